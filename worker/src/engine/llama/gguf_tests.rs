//! Headers that are right, cut, false and random.

use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::{GgufError, Header};

#[derive(Default)]
struct Builder {
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: usize,
}

impl Builder {
    fn string(into: &mut Vec<u8>, text: &str) {
        into.extend((text.len() as u64).to_le_bytes());
        into.extend(text.as_bytes());
    }

    fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        Self::string(&mut self.keys, key);
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
        self.key_count += 1;
        self
    }

    fn text(self, key: &str, text: &str) -> Self {
        let mut value = Vec::new();
        Self::string(&mut value, text);
        self.key(key, 8, &value)
    }

    fn number(self, key: &str, n: u32) -> Self {
        self.key(key, 4, &n.to_le_bytes())
    }

    fn tensor(mut self, name: &str, dimensions: &[u64], kind: u32, bytes: usize) -> Self {
        Self::string(&mut self.tensors, name);
        self.tensors
            .extend(u32::try_from(dimensions.len()).expect("few").to_le_bytes());
        for d in dimensions {
            self.tensors.extend(d.to_le_bytes());
        }
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend((self.data as u64).to_le_bytes());
        self.tensor_count += 1;
        self.data = (self.data + bytes).next_multiple_of(32);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(32) + self.data, 0);
        out
    }
}

fn small() -> Builder {
    let mut names = Vec::new();
    names.extend(8_u32.to_le_bytes());
    names.extend(2_u64.to_le_bytes());
    Builder::string(&mut names, "a");
    Builder::string(&mut names, "b");
    Builder::default()
        .text("general.architecture", "llama")
        .number("llama.block_count", 2)
        .number("llama.context_length", 512)
        .number("llama.embedding_length", 64)
        .number("llama.attention.head_count", 4)
        .number("llama.attention.head_count_kv", 2)
        .key("tokenizer.ggml.tokens", 9, &names)
        .key("llama.rope.freq_base", 6, &1e4_f32.to_le_bytes())
        .tensor("token_embd.weight", &[64, 10], 8, 680)
        .tensor("blk.0.ffn_up.weight", &[64, 32], 3, 1280)
        .tensor("output_norm.weight", &[64], 0, 256)
}

fn write(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).expect("written");
    (folder, path)
}

fn read(bytes: &[u8]) -> Result<Header, GgufError> {
    let (_folder, path) = write(bytes);
    Header::read(&path)
}

#[test]
fn a_header_tells_what_a_step_reads_and_what_a_token_costs() {
    let header = read(&small().bytes()).expect("a good file");
    assert_eq!(header.architecture(), Some("llama"));
    assert_eq!(header.context_length(), Some(512));
    assert!(header.is_generative());
    // Tied: the embedding is the head as well.
    assert_eq!(header.weight_bytes_per_step(), 680 + 1280 + 256);
    // 2 layers × 2 heads × (16 + 16) values × 2 bytes.
    assert_eq!(header.kv_bytes_per_token(), 256);

    let untied = small().tensor("output.weight", &[64, 10], 1, 1280);
    let header = read(&untied.bytes()).expect("a good file");
    assert_eq!(header.weight_bytes_per_step(), 1280 + 1280 + 256);
}

#[test]
fn of_experts_only_the_share_in_use_counts() {
    let experts = small()
        .number("llama.expert_count", 8)
        .number("llama.expert_used_count", 2)
        .tensor("blk.0.ffn_up_exps.weight", &[64, 32, 8], 1, 32_768);
    let header = read(&experts.bytes()).expect("a good file");
    assert_eq!(
        header.weight_bytes_per_step(),
        680 + 1280 + 256 + 32_768 / 4
    );
}

#[test]
fn one_value_a_layer_is_summed() {
    let mut heads = Vec::new();
    heads.extend(5_u32.to_le_bytes());
    heads.extend(2_u64.to_le_bytes());
    heads.extend(0_i32.to_le_bytes());
    heads.extend(3_i32.to_le_bytes());
    let layers = Builder::default()
        .text("general.architecture", "hybrid")
        .number("hybrid.block_count", 2)
        .number("hybrid.attention.key_length", 8)
        .number("hybrid.attention.value_length", 4)
        .key("hybrid.attention.head_count_kv", 9, &heads);
    let header = read(&layers.bytes()).expect("a good file");
    assert_eq!(header.kv_bytes_per_token(), 3 * 12 * 2);
}

#[test]
fn models_that_continue_no_text_are_known() {
    for architecture in ["bert", "nomic-bert-moe", "t5", "gemma-embedding", "llada"] {
        let file = Builder::default()
            .text("general.architecture", architecture)
            .bytes();
        assert!(
            !read(&file).expect("a good file").is_generative(),
            "{architecture}"
        );
    }
    let masked = small().key("llama.attention.causal", 7, &[0]).bytes();
    assert!(!read(&masked).expect("a good file").is_generative());
}

#[test]
fn another_file_has_another_hash_and_the_same_file_the_same() {
    let (_folder, path) = write(&small().bytes());
    let first = Header::read(&path).expect("a good file").hash;
    assert_eq!(Header::read(&path).expect("a good file").hash, first);
    let mut longer = small().bytes();
    longer.push(0);
    std::fs::write(&path, longer).expect("written");
    assert_ne!(Header::read(&path).expect("a good file").hash, first);
}

#[test]
fn every_cut_of_a_file_is_an_error_in_words() {
    let whole = small().bytes();
    // The last tensor's padding may be missing.
    for length in (0..whole.len() - 32).step_by(29) {
        let error = read(&whole[..length]).expect_err("it is cut");
        let words = error.to_string();
        assert!(
            words.contains("cut short") || words.contains("ends within its header"),
            "{length}: {words}"
        );
    }
}

#[test]
fn false_claims_are_refused_without_allocating_for_them() {
    let refused = |bytes: &[u8], words: &str| {
        let error = read(bytes).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(b"PK\x03\x04 and so on, a zip file", "not `GGUF`");
    let mut version = small().bytes();
    version[4..8].copy_from_slice(&9_u32.to_le_bytes());
    refused(&version, "version 9");
    version[4..8].copy_from_slice(&3_u32.to_be_bytes());
    refused(&version, "big-endian");
    let mut tensors = small().bytes();
    tensors[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&tensors, "tensors");
    let mut keys = small().bytes();
    keys[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&keys, "keys");
    let mut string = small().bytes();
    string[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&string, "a string of");
    let huge = Builder::default()
        .tensor("x", &[u64::MAX, u64::MAX], 0, 0)
        .bytes();
    refused(&huge, "more elements");
    let odd = Builder::default().tensor("x", &[1], 4000, 0).bytes();
    refused(&odd, "unknown type 4000");
    let flat = Builder::default().tensor("x", &[], 0, 0).bytes();
    refused(&flat, "0 dimensions");
}

#[test]
fn a_missing_file_and_a_folder_are_told_apart_from_a_bad_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = Header::read(&folder.path().join("none.gguf"));
    assert!(matches!(missing, Err(GgufError::Io { .. })));
    assert!(Header::read(folder.path()).is_err());
}

#[test]
fn the_parts_of_a_split_model_are_read_together() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let name = |n| folder.path().join(format!("big-{n:05}-of-00002.gguf"));
    let split = |no: u16| {
        Builder::default()
            .key("split.count", 2, &2_u16.to_le_bytes())
            .key("split.no", 2, &no.to_le_bytes())
    };
    let first = split(0)
        .text("general.architecture", "llama")
        .tensor("a", &[8], 0, 32);
    let second = split(1).tensor("b", &[16], 0, 64);
    std::fs::write(name(1), first.bytes()).expect("written");
    assert!(
        matches!(Header::read(&name(1)), Err(GgufError::Io { .. })),
        "a part is missing"
    );
    std::fs::write(name(2), second.bytes()).expect("written");
    let header = Header::read(&name(1)).expect("both parts");
    assert_eq!(header.weight_bytes_per_step(), 96);
    let error = Header::read(&name(2)).expect_err("not the first");
    assert!(error.to_string().contains("name the first part"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn random_bytes_and_damaged_headers_end_in_a_result(
        noise in proptest::collection::vec(any::<u8>(), 0..200),
        at in 0_usize..400,
    ) {
        let _ = read(&noise);
        let mut damaged = small().bytes();
        for (offset, byte) in noise.iter().enumerate().take(6) {
            if let Some(place) = damaged.get_mut(at + offset) {
                *place = *byte;
            }
        }
        let _ = read(&damaged);
    }
}
