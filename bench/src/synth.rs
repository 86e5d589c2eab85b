//! Writes a GGUF with a real model's shapes and quantisation and random contents.
//!
//! How fast a model decodes depends on the bytes that it moves and not on their values, so such a
//! file measures a machine that can't be brought the real weights. Its vocabulary is another model's,
//! filled up to the shape's size: prompts, templates and detokenising are real, the text is nonsense.

mod blocks;
mod vocabulary;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use clap::ValueEnum;

use self::blocks::{Kind, Pool};
use self::vocabulary::Vocabulary;
use crate::error::BenchError;

/// Tensors begin at multiples of so many bytes.
const ALIGNMENT: usize = 32;
/// Types of GGUF's key-value part.
const U32: u32 = 4;
const F32: u32 = 6;
const TEXT: u32 = 8;

/// Which model's shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Model {
    #[value(name = "qwen2.5-7b")]
    Qwen7B,
    #[value(name = "qwen2.5-0.5b")]
    Qwen05B,
}

/// The numbers that make a Qwen2 architecture.
#[derive(Clone, Copy, Debug)]
struct Shape {
    name: &'static str,
    layers: u32,
    width: u32,
    feed_forward: u32,
    heads: u32,
    kv_heads: u32,
    vocabulary: u32,
    /// The output head is the token embedding.
    tied: bool,
}

impl Model {
    fn shape(self) -> Shape {
        match self {
            Self::Qwen7B => Shape {
                name: "synthetic qwen2.5-7b",
                layers: 28,
                width: 3584,
                feed_forward: 18_944,
                heads: 28,
                kv_heads: 4,
                vocabulary: 152_064,
                tied: false,
            },
            Self::Qwen05B => Shape {
                name: "synthetic qwen2.5-0.5b",
                layers: 24,
                width: 896,
                feed_forward: 4864,
                heads: 14,
                kv_heads: 2,
                vocabulary: 151_936,
                tied: true,
            },
        }
    }
}

/// One tensor: its name, its rows' length and their number, and how it is kept.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    width: u32,
    rows: u32,
    kind: Kind,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        u64::from(self.width) * u64::from(self.rows) / self.kind.block_values()
            * self.kind.block_bytes()
    }
}

/// Writes the file, with the vocabulary of the GGUF `tokenizer`. Gives its size in bytes.
///
/// # Errors
/// `File` where one can't be read or written, `Usage` where `tokenizer` has no vocabulary that fits.
pub fn write(model: Model, tokenizer: &Path, seed: u64, out: &Path) -> Result<u64, BenchError> {
    let shape = model.shape();
    let vocabulary = Vocabulary::read(tokenizer, shape.vocabulary)?;
    write_shape(&shape, &vocabulary, seed, out)
}

fn write_shape(
    shape: &Shape,
    vocabulary: &Vocabulary,
    seed: u64,
    out: &Path,
) -> Result<u64, BenchError> {
    let failed = |source| BenchError::File {
        path: out.to_path_buf(),
        source,
    };
    let tensors = tensors(shape);
    let header = header(shape, vocabulary, &tensors);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(out).map_err(failed)?);
    file.write_all(&header).map_err(failed)?;
    let mut size = header.len() as u64;
    let mut pool = Pool::new(seed);
    for tensor in &tensors {
        let bytes = tensor.bytes();
        let padding = &[0; ALIGNMENT][..padding(bytes)];
        pool.write(tensor.kind, &tensor.name, bytes, &mut file)
            .and_then(|()| file.write_all(padding))
            .map_err(failed)?;
        size += bytes + padding.len() as u64;
    }
    file.flush().map_err(failed)?;
    Ok(size)
}

/// Bytes from the end of a tensor of `bytes` to the next one's beginning.
fn padding(bytes: u64) -> usize {
    let over = usize::try_from(bytes % ALIGNMENT as u64).unwrap_or_default();
    (ALIGNMENT - over) % ALIGNMENT
}

/// As llama.cpp's Q4_K_M has them: Q6_K for the head, and for the values and the feed-forward's way
/// back in half of the layers.
fn tensors(shape: &Shape) -> Vec<Tensor> {
    let kv = shape.width / shape.heads * shape.kv_heads;
    // K-quants keep rows of multiples of 256.
    let quantised = |name: String, width: u32, rows: u32, kind: Kind| Tensor {
        name,
        width,
        rows,
        kind: if width.is_multiple_of(256) {
            kind
        } else {
            Kind::Q8_0
        },
    };
    let plain = |name: String, width: u32| Tensor {
        name,
        width,
        rows: 1,
        kind: Kind::F32,
    };
    let embedding = if shape.tied { Kind::Q6K } else { Kind::Q4K };
    let (width, ff) = (shape.width, shape.feed_forward);
    let name = "token_embd.weight".to_owned();
    let mut all = vec![quantised(name, width, shape.vocabulary, embedding)];
    for layer in 0..shape.layers {
        let eighth = shape.layers / 8;
        let more =
            layer < eighth || layer >= 7 * shape.layers / 8 || layer.wrapping_sub(eighth) % 3 == 2;
        let high = if more { Kind::Q6K } else { Kind::Q4K };
        let name = |part: &str| format!("blk.{layer}.{part}");
        all.extend([
            plain(name("attn_norm.weight"), width),
            plain(name("ffn_norm.weight"), width),
            quantised(name("attn_q.weight"), width, width, Kind::Q4K),
            plain(name("attn_q.bias"), width),
            quantised(name("attn_k.weight"), width, kv, Kind::Q4K),
            plain(name("attn_k.bias"), kv),
            quantised(name("attn_v.weight"), width, kv, high),
            plain(name("attn_v.bias"), kv),
            quantised(name("attn_output.weight"), width, width, Kind::Q4K),
            quantised(name("ffn_gate.weight"), width, ff, Kind::Q4K),
            quantised(name("ffn_up.weight"), width, ff, Kind::Q4K),
            quantised(name("ffn_down.weight"), ff, width, high),
        ]);
    }
    all.push(plain("output_norm.weight".to_owned(), width));
    if !shape.tied {
        let name = "output.weight".to_owned();
        all.push(quantised(name, width, shape.vocabulary, Kind::Q6K));
    }
    all
}

fn header(shape: &Shape, vocabulary: &Vocabulary, tensors: &[Tensor]) -> Vec<u8> {
    let mut keys: Vec<Vec<u8>> = vec![
        entry("general.architecture", TEXT, &text("qwen2")),
        entry("general.name", TEXT, &text(shape.name)),
        entry("qwen2.rope.freq_base", F32, &1e6_f32.to_le_bytes()),
        entry(
            "qwen2.attention.layer_norm_rms_epsilon",
            F32,
            &1e-6_f32.to_le_bytes(),
        ),
    ];
    let numbers = [
        ("qwen2.block_count", shape.layers),
        ("qwen2.context_length", 131_072),
        ("qwen2.embedding_length", shape.width),
        ("qwen2.feed_forward_length", shape.feed_forward),
        ("qwen2.attention.head_count", shape.heads),
        ("qwen2.attention.head_count_kv", shape.kv_heads),
        ("qwen2.vocab_size", shape.vocabulary),
        // "mostly Q4_K, medium"
        ("general.file_type", 15),
        ("general.quantization_version", 2),
    ];
    keys.extend(numbers.map(|(key, n)| entry(key, U32, &n.to_le_bytes())));
    keys.extend(vocabulary.entries.iter().cloned());

    let mut out = b"GGUF".to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    out.extend(keys.concat());
    let mut offset = 0_u64;
    for tensor in tensors {
        out.extend(text(&tensor.name));
        let matrix = tensor.kind != Kind::F32;
        out.extend((1 + u32::from(matrix)).to_le_bytes());
        out.extend(u64::from(tensor.width).to_le_bytes());
        if matrix {
            out.extend(u64::from(tensor.rows).to_le_bytes());
        }
        out.extend(tensor.kind.id().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes() + padding(tensor.bytes()) as u64;
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

/// A string as GGUF has it: its length, then its bytes.
fn text(words: &str) -> Vec<u8> {
    let mut out = (words.len() as u64).to_le_bytes().to_vec();
    out.extend(words.as_bytes());
    out
}

fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut out = text(key);
    out.extend(kind.to_le_bytes());
    out.extend(value);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_billion_weights_take_the_bytes_that_the_real_file_takes() {
        let bytes: u64 = tensors(&Model::Qwen7B.shape())
            .iter()
            .map(Tensor::bytes)
            .sum();
        assert_eq!(bytes / 10_000_000, 467, "{bytes}");
    }

    #[test]
    fn the_file_is_as_long_as_its_header_says_and_the_same_for_a_seed() {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape {
            name: "tiny",
            layers: 2,
            width: 256,
            feed_forward: 512,
            heads: 4,
            kv_heads: 2,
            vocabulary: 300,
            tied: false,
        };
        let source = folder.path().join("small.gguf");
        std::fs::write(&source, vocabulary::tests::gguf(&["a", "b"])).unwrap();
        let vocabulary = Vocabulary::read(&source, shape.vocabulary).unwrap();
        let files: Vec<Vec<u8>> = ["one", "two"]
            .iter()
            .map(|name| {
                let path = folder.path().join(name);
                let size = write_shape(&shape, &vocabulary, 7, &path).unwrap();
                let bytes = std::fs::read(&path).unwrap();
                assert_eq!(bytes.len() as u64, size);
                bytes
            })
            .collect();
        assert_eq!(files[0], files[1]);
        let tensors = tensors(&shape);
        let header = header(&shape, &vocabulary, &tensors);
        let contents: u64 = tensors
            .iter()
            .map(|t| t.bytes() + padding(t.bytes()) as u64)
            .sum();
        assert_eq!(files[0].len() as u64, header.len() as u64 + contents);
    }
}
