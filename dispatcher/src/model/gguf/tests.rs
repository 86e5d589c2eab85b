use std::io::Cursor as Bytes;

use proptest::prelude::*;

use super::*;

/// Writes GGUF headers for tests: the least that a model needs, and what a test adds.
#[derive(Default)]
struct Writer {
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl Writer {
    fn model() -> Self {
        Self::default()
            .string("general.architecture", "llama")
            .number("llama.block_count", 30)
            .number("llama.context_length", 2048)
            .number("llama.embedding_length", 576)
            .number("llama.attention.head_count", 9)
            .number("llama.attention.head_count_kv", 3)
    }

    fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        let mut bytes = Vec::new();
        text(&mut bytes, key);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
        self.entries.push(bytes);
        self
    }

    fn string(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.entry(key, STRING, &bytes)
    }

    fn number(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    fn tensor(self, kind: u32, extents: &[u64], offset: u64) -> Self {
        self.named("blk.0.weight", kind, extents, offset)
    }

    fn named(mut self, name: &str, kind: u32, extents: &[u64], offset: u64) -> Self {
        let mut bytes = Vec::new();
        text(&mut bytes, name);
        bytes.extend(u32::try_from(extents.len()).unwrap().to_le_bytes());
        for extent in extents {
            bytes.extend(extent.to_le_bytes());
        }
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        self.tensors.push(bytes);
        self
    }

    fn bytes(&self, data: usize) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        bytes.extend(self.entries.iter().flatten());
        bytes.extend(self.tensors.iter().flatten());
        bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
        bytes
    }
}

fn parse(bytes: &[u8]) -> Result<Header, GgufError> {
    read_from(Bytes::new(bytes), bytes.len() as u64)
}

#[test]
fn the_figures_of_a_small_llama_are_read() {
    let bytes = Writer::model()
        .string("general.name", "Tiny")
        .tensor(2, &[64, 2], 0)
        .tensor(0, &[8], 72)
        .bytes(104);
    let header = parse(&bytes).unwrap();
    assert_eq!(header.architecture, "llama");
    assert_eq!(header.name.as_deref(), Some("Tiny"));
    assert_eq!(header.context_length, Some(2048));
    assert_eq!(header.block_count, 30);
    // 30 layers × 3 heads × (64 + 64) × 2 bytes.
    assert_eq!(header.kv_bytes_per_token, 23_040);
    assert_eq!(header.tensor_bytes, 72 + 32);
    assert_eq!(
        header.repacked_bytes, 72,
        "Q4_0 matrices are private copies"
    );
}

/// F32 tensors of so many numbers, one after another.
fn inventory(writer: Writer, tensors: &[(&str, u64)]) -> Header {
    let mut at = 0;
    let mut writer = writer;
    for (name, numbers) in tensors {
        writer = writer.named(name, 0, &[*numbers], at);
        at += numbers * 4;
    }
    parse(&writer.bytes(usize::try_from(at).unwrap())).unwrap()
}

#[test]
fn a_dense_model_with_a_head_of_its_own_skips_the_embedding() {
    let header = inventory(
        Writer::model(),
        &[
            ("token_embd.weight", 1000),
            ("per_layer_token_embd.weight", 700),
            ("blk.0.ffn_up.weight", 50),
            ("output_norm.weight", 5),
            ("output.weight", 200),
        ],
    );
    let weights = header.weights();
    assert_eq!(weights.always_bytes, (50 + 5 + 200) * 4);
    assert_eq!(weights.bytes_per_step(8.0), 255.0 * 4.0);
}

#[test]
fn a_tied_model_reads_the_embedding_as_its_head() {
    let tensors = [("token_embd.weight", 1000), ("blk.0.ffn_up.weight", 50)];
    let header = inventory(Writer::model(), &tensors);
    assert_eq!(header.weights().always_bytes, 1050 * 4);
}

#[test]
fn a_mixture_reads_the_experts_that_its_rows_are_sent_to() {
    let tensors = [
        ("token_embd.weight", 1000),
        ("output.weight", 100),
        ("blk.0.ffn_gate_exps.weight", 800),
        ("blk.0.ffn_gate_inp.weight", 8),
        ("blk.0.ffn_gate_shexp.weight", 20),
    ];
    let mixture = Writer::model()
        .number("llama.expert_count", 8)
        .number("llama.expert_used_count", 2);
    let weights = inventory(mixture, &tensors).weights();
    assert_eq!(
        weights.always_bytes,
        128 * 4,
        "shared experts and the router"
    );
    assert_eq!(weights.bytes_per_step(1.0), (128.0 + 200.0) * 4.0);
    let nothing_said = inventory(Writer::model(), &tensors).weights();
    assert_eq!(nothing_said.bytes_per_step(1.0), (128.0 + 800.0) * 4.0);
}

#[test]
fn the_files_of_a_split_model_are_added_up() {
    let folder = tempfile::tempdir().unwrap();
    let part = |number: u16, name: &str| {
        let writer = if number == 0 {
            Writer::model()
        } else {
            Writer::default()
        };
        let bytes = writer
            .entry("split.count", 2, &2_u16.to_le_bytes())
            .entry("split.no", 2, &number.to_le_bytes())
            .named(name, 0, &[100], 0)
            .bytes(400);
        let path = folder
            .path()
            .join(format!("m-{:05}-of-00002.gguf", number + 1));
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let first = part(0, "token_embd.weight");
    let error = read(&first).unwrap_err();
    assert!(
        matches!(error, GgufError::Io(_)),
        "the second is missing: {error}"
    );
    let second = part(1, "output.weight");
    let header = read(&first).unwrap();
    assert_eq!(header.tensor_bytes, 800);
    assert_eq!(
        header.weights().always_bytes,
        400,
        "the head, in the second file"
    );
    assert_eq!(header.architecture, "llama");
    let error = read(&second).unwrap_err().to_string();
    assert!(error.contains("name the first"), "{error}");
}

#[test]
fn heads_given_layer_by_layer_are_added_up() {
    let mut heads = Vec::new();
    heads.extend(4_u32.to_le_bytes());
    heads.extend(2_u64.to_le_bytes());
    heads.extend(1_u32.to_le_bytes());
    heads.extend(3_u32.to_le_bytes());
    let bytes = Writer::default()
        .string("general.architecture", "x")
        .number("x.block_count", 2)
        .entry("x.attention.head_count_kv", ARRAY, &heads)
        .number("x.attention.key_length", 10)
        .number("x.attention.value_length", 6)
        .bytes(0);
    assert_eq!(
        parse(&bytes).unwrap().kv_bytes_per_token,
        (1 + 3) * (10 + 6) * 2
    );
}

#[test]
fn the_vocabulary_is_counted_without_being_kept() {
    let mut tokens = Vec::new();
    tokens.extend(STRING.to_le_bytes());
    tokens.extend(3_u64.to_le_bytes());
    for token in ["a", "", "ccc"] {
        text(&mut tokens, token);
    }
    let bytes = Writer::model()
        .entry("tokenizer.ggml.tokens", ARRAY, &tokens)
        .bytes(0);
    assert_eq!(parse(&bytes).unwrap().vocabulary, 3);
}

#[test]
fn a_foreign_file_is_named_as_such() {
    let error = parse(b"PK\x03\x04 and so on").unwrap_err();
    assert!(matches!(error, GgufError::Magic(_)), "{error}");
    assert!(matches!(parse(b"GG").unwrap_err(), GgufError::HeaderCut));
    assert!(matches!(parse(b"").unwrap_err(), GgufError::HeaderCut));
}

#[test]
fn an_interrupted_download_is_found_by_its_missing_tensors() {
    let writer = Writer::model().tensor(8, &[32, 4], 0);
    assert!(parse(&writer.bytes(136)).is_ok());
    let error = parse(&writer.bytes(135)).unwrap_err();
    assert!(matches!(error, GgufError::TensorsCut { .. }), "{error}");
}

#[test]
fn absurd_lengths_are_refused_before_anything_is_allocated() {
    for at in [8, 16] {
        let mut bytes = Writer::model().bytes(0);
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = parse(&bytes).unwrap_err();
        assert!(matches!(error, GgufError::Damaged(_)), "{error}");
    }
    let mut huge = Vec::new();
    huge.extend(u64::MAX.to_le_bytes());
    let bytes = Writer::model().entry("k", STRING, &huge).bytes(0);
    assert!(matches!(parse(&bytes).unwrap_err(), GgufError::HeaderCut));
    for kind in [STRING, 4, 10] {
        let mut array = Vec::new();
        array.extend(kind.to_le_bytes());
        array.extend((u64::MAX / 4).to_le_bytes());
        let bytes = Writer::model().entry("k", ARRAY, &array).bytes(0);
        assert!(parse(&bytes).is_err());
    }
    let bytes = Writer::model().tensor(0, &[1 << 40, 1 << 40], 0).bytes(0);
    assert!(parse(&bytes).is_err());
    let bytes = Writer::model().tensor(0, &[4], u64::MAX - 1).bytes(0);
    assert!(parse(&bytes).is_err());
}

#[test]
fn every_prefix_of_a_header_is_an_error_and_never_a_panic() {
    let whole = Writer::model().tensor(8, &[32, 4], 0).bytes(136);
    for length in 0..whole.len() {
        assert!(parse(&whole[..length]).is_err(), "of {length} bytes");
    }
}

proptest! {
    #[test]
    fn damaged_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)
    ) {
        let mut bytes = Writer::model().tensor(12, &[256, 4], 0).bytes(576);
        for (index, value) in edits {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        let _ = parse(&bytes);
    }
}
