//! Reads a GGUF file's header, bounded, so that a bad file ends in words before llama.cpp sees it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Longest string kept or skipped, bytes. The longest seen are chat templates of some 100 KB.
const STRING_BYTES_MAX: u64 = 16 << 20;
/// Most elements of one array; the largest vocabularies have some 300,000 entries.
const ARRAY_LEN_MAX: u64 = 16 << 20;
/// Longest integer array kept (one value a layer); longer ones are skipped.
const ARRAY_KEPT_MAX: u64 = 4096;
const KEYS_MAX: u64 = 1 << 16;
const TENSORS_MAX: u64 = 1 << 20;
/// Most bytes of one header; a vocabulary of 300,000 with merges takes about 20 MB.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// `GGML_MAX_DIMS`.
const DIMENSIONS_MAX: u32 = 4;
const SPLITS_MAX: u64 = 1000;

/// Why a file is not a model that can be loaded.
#[derive(Debug, Error)]
pub enum GgufError {
    #[error("read {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} is not a GGUF file: {reason}")]
    NotGguf { path: PathBuf, reason: String },
    #[error("{path} is cut short: {needed} bytes are needed, {there} are there")]
    CutShort {
        path: PathBuf,
        needed: u64,
        there: u64,
    },
}

/// One tensor as the header lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub bytes: u64,
}

/// A value of the header's key-value part; texts that are long lists are not kept.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    /// One value a layer, in some architectures.
    List(Vec<u64>),
}

/// What the header says, over all files of a split model.
#[derive(Debug)]
pub struct Header {
    values: HashMap<String, Value>,
    pub tensors: Vec<Tensor>,
    /// blake3 over every file's header bytes, size and modification time.
    pub hash: [u8; 32],
}

impl Header {
    /// Reads the header of `path`, and of its sisters where the model is split over files.
    ///
    /// # Errors
    /// `Io` where a file can't be read, `NotGguf` where its bytes are not a header within the
    /// bounds above, `CutShort` where the tensors named do not fit in the file.
    pub fn read(path: &Path) -> Result<Self, GgufError> {
        let mut hasher = blake3::Hasher::new();
        let mut header = read_file(path, &mut hasher)?;
        let splits = header.unsigned("split.count").unwrap_or(1);
        if splits > 1 {
            for sister in sisters(path, &header, splits)? {
                header
                    .tensors
                    .extend(read_file(&sister, &mut hasher)?.tensors);
            }
        }
        header.hash = *hasher.finalize().as_bytes();
        Ok(header)
    }

    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    #[must_use]
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        match self.values.get(key)? {
            Value::Unsigned(n) => Some(*n),
            Value::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The model's architecture, as llama.cpp names it.
    #[must_use]
    pub fn architecture(&self) -> Option<&str> {
        self.text("general.architecture")
    }

    fn of_architecture(&self, key: &str) -> Option<&Value> {
        self.values.get(&format!("{}.{key}", self.architecture()?))
    }

    fn number(&self, key: &str) -> Option<u64> {
        match self.of_architecture(key)? {
            Value::Unsigned(n) => Some(*n),
            Value::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// Tokens of context the model was trained on.
    #[must_use]
    pub fn context_length(&self) -> Option<u64> {
        self.number("context_length")
    }

    /// Whether the model can continue a text: encoders and embedding models can't.
    #[must_use]
    pub fn is_generative(&self) -> bool {
        let architecture = self.architecture().unwrap_or_default();
        let encoder = architecture.contains("bert")
            || architecture.starts_with("t5")
            || architecture.ends_with("-embedding")
            || matches!(
                architecture,
                "clip" | "wavtokenizer-dec" | "llama-embed" | "pangu-embedded"
            )
            || matches!(architecture, "dream" | "llada" | "llada-moe");
        let masked = self.of_architecture("attention.causal") == Some(&Value::Unsigned(0));
        !encoder && !masked && self.of_architecture("pooling_type").is_none()
    }

    /// Bytes of weights that a step of one row reads: all tensors but the token embedding (of which
    /// one row is read), unless that is the output head as well; of experts the share in use.
    #[must_use]
    pub fn weight_bytes_per_step(&self) -> u64 {
        let tied = !self.tensors.iter().any(|t| t.name == "output.weight");
        let experts = self.number("expert_count").unwrap_or(0);
        let used = self.number("expert_used_count").unwrap_or(0);
        self.tensors
            .iter()
            .filter(|t| tied || t.name != "token_embd.weight")
            .filter(|t| t.name != "per_layer_token_embd.weight")
            .map(|t| {
                if t.name.contains("_exps.") && experts > 0 && used > 0 {
                    share(t.bytes, used, experts)
                } else {
                    t.bytes
                }
            })
            .fold(0, u64::saturating_add)
    }

    /// Bytes of KV cache that one token costs with 16-bit keys and values, all layers together.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> u64 {
        let layers = self.number("block_count").unwrap_or(0).min(ARRAY_KEPT_MAX);
        let heads = self.number("attention.head_count").unwrap_or(0);
        let width = self.number("embedding_length").unwrap_or(0);
        let head = width.checked_div(heads).unwrap_or(0);
        let key = self.number("attention.key_length").unwrap_or(head);
        let value = self.number("attention.value_length").unwrap_or(head);
        let kv_heads: u64 = match self.of_architecture("attention.head_count_kv") {
            Some(Value::List(list)) => list.iter().fold(0, |sum, n| sum.saturating_add(*n)),
            Some(Value::Unsigned(n)) => n.saturating_mul(layers),
            _ => heads.saturating_mul(layers),
        };
        kv_heads
            .saturating_mul(key.saturating_add(value))
            .saturating_mul(2)
    }
}

/// `bytes` × `part` / `whole` without overflow.
fn share(bytes: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(bytes) * u128::from(part.min(whole)) / u128::from(whole.max(1));
    u64::try_from(product).unwrap_or(bytes)
}

/// The other files of a split model, by llama.cpp's naming.
fn sisters(first: &Path, header: &Header, splits: u64) -> Result<Vec<PathBuf>, GgufError> {
    let refuse = |reason: String| GgufError::NotGguf {
        path: first.to_path_buf(),
        reason,
    };
    if splits > SPLITS_MAX {
        return Err(refuse(format!("it claims {splits} parts")));
    }
    if header.unsigned("split.no").unwrap_or(0) != 0 {
        return Err(refuse(format!(
            "it is a later part of {splits}; name the first part"
        )));
    }
    let name = first
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or_default();
    let stem = name
        .strip_suffix(&format!("-00001-of-{splits:05}.gguf"))
        .ok_or_else(|| {
            refuse(format!(
                "a part of {splits} must end in -00001-of-{splits:05}.gguf"
            ))
        })?;
    Ok((2..=splits)
        .map(|n| first.with_file_name(format!("{stem}-{n:05}-of-{splits:05}.gguf")))
        .collect())
}

fn read_file(path: &Path, hasher: &mut blake3::Hasher) -> Result<Header, GgufError> {
    let io = |source| GgufError::Io {
        path: path.to_path_buf(),
        source,
    };
    let file = File::open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        let reason = "it is not a regular file".to_owned();
        return Err(GgufError::NotGguf {
            path: path.to_path_buf(),
            reason,
        });
    }
    let mut reader = Reader {
        inner: BufReader::new(file),
        at: 0,
        hasher,
    };
    let parsed = parse(&mut reader);
    let (header, data_bytes) = match parsed {
        Ok(parsed) => parsed,
        Err(Fault::Io(e)) if e.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(GgufError::NotGguf {
                path: path.to_path_buf(),
                reason: "it ends within its header".to_owned(),
            });
        }
        Err(Fault::Io(source)) => return Err(io(source)),
        Err(Fault::Content(reason)) => {
            return Err(GgufError::NotGguf {
                path: path.to_path_buf(),
                reason,
            });
        }
    };
    let alignment = header.unsigned("general.alignment").unwrap_or(32).max(1);
    let needed = reader
        .at
        .next_multiple_of(alignment.min(1 << 30))
        .saturating_add(data_bytes);
    if needed > meta.len() {
        let there = meta.len();
        return Err(GgufError::CutShort {
            path: path.to_path_buf(),
            needed,
            there,
        });
    }
    hasher.update(&meta.len().to_le_bytes());
    let modified = meta
        .modified()
        .ok()
        .and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
    hasher.update(&modified.map_or(0, |d| d.as_nanos()).to_le_bytes());
    Ok(header)
}

enum Fault {
    Io(io::Error),
    Content(String),
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

fn content<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Content(reason.into()))
}

/// Counts and hashes what is read.
struct Reader<'h, R> {
    inner: R,
    at: u64,
    hasher: &'h mut blake3::Hasher,
}

impl<R: Read> Reader<'_, R> {
    fn fill(&mut self, into: &mut [u8]) -> Result<(), Fault> {
        self.inner.read_exact(into)?;
        self.hasher.update(into);
        self.at = self.at.saturating_add(into.len() as u64);
        if self.at > HEADER_BYTES_MAX {
            return content(format!(
                "its header is longer than {HEADER_BYTES_MAX} bytes"
            ));
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn skip(&mut self, mut bytes: u64) -> Result<(), Fault> {
        let mut scratch = [0_u8; 8192];
        while bytes > 0 {
            let take = usize::try_from(bytes)
                .unwrap_or(usize::MAX)
                .min(scratch.len());
            self.fill(&mut scratch[..take])?;
            bytes -= take as u64;
        }
        Ok(())
    }

    fn string_bytes(&mut self) -> Result<u64, Fault> {
        let length = self.u64()?;
        if length > STRING_BYTES_MAX {
            return content(format!("a string of {length} bytes"));
        }
        Ok(length)
    }

    fn string(&mut self) -> Result<String, Fault> {
        let length = self.string_bytes()?;
        // The length is a claim: read in pieces, so that a lie costs no more than what is there.
        let mut bytes = Vec::new();
        let mut scratch = [0_u8; 8192];
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let take = left.min(scratch.len());
            self.fill(&mut scratch[..take])?;
            bytes.extend_from_slice(&scratch[..take]);
            left -= take;
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Gives the header and how many bytes of tensor data must follow it.
fn parse<R: Read>(reader: &mut Reader<'_, R>) -> Result<(Header, u64), Fault> {
    if &reader.array::<4>()? != b"GGUF" {
        return content("its first bytes are not `GGUF`");
    }
    match reader.u32()? {
        2 | 3 => {}
        1 => return content("its version 1 is no longer supported"),
        version if version & 0xffff == 0 => return content("it is big-endian"),
        version => return content(format!("its version {version} is not known")),
    }
    let tensor_count = reader.u64()?;
    let key_count = reader.u64()?;
    if tensor_count > TENSORS_MAX {
        return content(format!("it claims {tensor_count} tensors"));
    }
    if key_count > KEYS_MAX {
        return content(format!("it claims {key_count} keys"));
    }
    let mut values = HashMap::new();
    for _ in 0..key_count {
        let key = reader.string()?;
        let kind = reader.u32()?;
        if let Some(value) = value(reader, kind)? {
            values.insert(key, value);
        }
    }
    let mut tensors = Vec::new();
    let mut data_bytes = 0_u64;
    for _ in 0..tensor_count {
        let (tensor, offset) = tensor(reader)?;
        data_bytes = data_bytes.max(offset.saturating_add(tensor.bytes));
        tensors.push(tensor);
    }
    Ok((
        Header {
            values,
            tensors,
            hash: [0; 32],
        },
        data_bytes,
    ))
}

/// Bytes of a scalar of the value type `kind`.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn value<R: Read>(reader: &mut Reader<'_, R>, kind: u32) -> Result<Option<Value>, Fault> {
    Ok(Some(match kind {
        8 => Value::Text(reader.string()?),
        9 => return list(reader),
        _ => scalar(reader, kind)?,
    }))
}

fn scalar<R: Read>(reader: &mut Reader<'_, R>, kind: u32) -> Result<Value, Fault> {
    Ok(match kind {
        0 | 7 => Value::Unsigned(u64::from(u8::from_le_bytes(reader.array()?))),
        1 => Value::Signed(i64::from(i8::from_le_bytes(reader.array()?))),
        2 => Value::Unsigned(u64::from(u16::from_le_bytes(reader.array()?))),
        3 => Value::Signed(i64::from(i16::from_le_bytes(reader.array()?))),
        4 => Value::Unsigned(u64::from(reader.u32()?)),
        5 => Value::Signed(i64::from(i32::from_le_bytes(reader.array()?))),
        6 => Value::Float(f64::from(f32::from_le_bytes(reader.array()?))),
        10 => Value::Unsigned(reader.u64()?),
        11 => Value::Signed(i64::from_le_bytes(reader.array()?)),
        12 => Value::Float(f64::from_le_bytes(reader.array()?)),
        _ => return content(format!("a value of the unknown type {kind}")),
    })
}

fn list<R: Read>(reader: &mut Reader<'_, R>) -> Result<Option<Value>, Fault> {
    let kind = reader.u32()?;
    let length = reader.u64()?;
    if length > ARRAY_LEN_MAX {
        return content(format!("an array of {length} elements"));
    }
    if kind == 8 {
        for _ in 0..length {
            let bytes = reader.string_bytes()?;
            reader.skip(bytes)?;
        }
        return Ok(None);
    }
    let Some(bytes) = scalar_bytes(kind) else {
        return content(format!("an array of the unknown type {kind}"));
    };
    if length > ARRAY_KEPT_MAX || matches!(kind, 6 | 12) {
        reader.skip(length.saturating_mul(bytes))?;
        return Ok(None);
    }
    let mut kept = Vec::new();
    for _ in 0..length {
        match scalar(reader, kind)? {
            Value::Unsigned(n) => kept.push(n),
            Value::Signed(n) => kept.push(u64::try_from(n).unwrap_or(0)),
            _ => {}
        }
    }
    Ok(Some(Value::List(kept)))
}

/// One tensor and its offset in the data part.
fn tensor<R: Read>(reader: &mut Reader<'_, R>) -> Result<(Tensor, u64), Fault> {
    let name = reader.string()?;
    let dimensions = reader.u32()?;
    if dimensions == 0 || dimensions > DIMENSIONS_MAX {
        return content(format!("a tensor of {dimensions} dimensions"));
    }
    let mut elements = 1_u64;
    for _ in 0..dimensions {
        elements = match elements.checked_mul(reader.u64()?) {
            Some(n) if n <= 1 << 48 => n,
            _ => {
                return content(format!(
                    "the tensor {name} has more elements than any machine"
                ));
            }
        };
    }
    let kind = reader.u32()?;
    let offset = reader.u64()?;
    let Some((block, bytes)) = block(kind) else {
        return content(format!("the tensor {name} has the unknown type {kind}"));
    };
    Ok((
        Tensor {
            name,
            bytes: (elements / block).saturating_mul(bytes),
        },
        offset,
    ))
}

/// Elements and bytes of one block of a ggml type (`ggml_type` in ggml.h, sizes of ggml-common.h).
fn block(kind: u32) -> Option<(u64, u64)> {
    Some(match kind {
        0 | 26 => (1, 4),      // F32, I32
        1 | 25 | 30 => (1, 2), // F16, I16, BF16
        24 => (1, 1),          // I8
        27 | 28 => (1, 8),     // I64, F64
        2 | 20 => (32, 18),    // Q4_0, IQ4_NL
        3 => (32, 20),         // Q4_1
        6 => (32, 22),         // Q5_0
        7 => (32, 24),         // Q5_1
        8 => (32, 34),         // Q8_0
        9 => (32, 36),         // Q8_1
        10 => (256, 84),       // Q2_K
        11 | 21 => (256, 110), // Q3_K, IQ3_S
        12 => (256, 144),      // Q4_K
        13 => (256, 176),      // Q5_K
        14 => (256, 210),      // Q6_K
        15 => (256, 292),      // Q8_K
        16 | 35 => (256, 66),  // IQ2_XXS, TQ2_0
        17 => (256, 74),       // IQ2_XS
        18 => (256, 98),       // IQ3_XXS
        19 => (256, 50),       // IQ1_S
        22 => (256, 82),       // IQ2_S
        23 => (256, 136),      // IQ4_XS
        29 => (256, 56),       // IQ1_M
        34 => (256, 54),       // TQ1_0
        39 => (32, 17),        // MXFP4
        40 => (64, 36),        // NVFP4
        41 => (128, 18),       // Q1_0
        42 => (64, 18),        // Q2_0
        _ => return None,
    })
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
