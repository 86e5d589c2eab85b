//! The inventory of an MLX folder: its configuration, and the headers of its safetensors files.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::model::ModelError;
use crate::bus::Weights;

/// A configuration of more bytes is none.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// The format's own bound on a file's header.
const HEADER_BYTES_MAX: u64 = 100 << 20;
/// Weight files of one model at most.
const FILES_MAX: usize = 4096;

/// What a folder says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Folder {
    pub(super) weights: Weights,
    /// With 16-bit keys and values.
    pub(super) kv_bytes_per_token: u64,
    pub(super) context_length: Option<u32>,
    /// Of all tensors, as they are stored.
    pub(super) tensor_bytes: u64,
    pub(super) vocabulary: u32,
}

/// Bytes by what a step does with them.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    always: u64,
    embedding: u64,
    head: u64,
    experts: u64,
}

/// Reads the folder.
///
/// # Errors
/// Where a file is missing, cannot be read, or is not what its name says.
pub(super) fn read(folder: &Path) -> Result<Folder, ModelError> {
    let config = read_config(&folder.join("config.json"))?;
    let mut sums = Sums::default();
    for file in weight_files(folder)? {
        add_file(&file, &mut sums)?;
    }
    let total = sums.always + sums.embedding + sums.head + sums.experts;
    if total == 0 {
        return Err(damaged(folder, "its files hold no tensors"));
    }
    let number = |names: &[&str]| {
        let found = names.iter().find_map(|name| config.get(*name)?.as_u64());
        found.unwrap_or(0)
    };
    let small = |names: &[&str]| u32::try_from(number(names)).unwrap_or(u32::MAX);
    let experts = small(&["num_local_experts", "num_experts", "n_routed_experts"]);
    let used = small(&["num_experts_per_tok", "moe_topk"]);
    let head = if sums.head > 0 {
        sums.head
    } else {
        sums.embedding
    };
    let always = sums.always.saturating_add(head);
    let weights = if experts > 0 && used > 0 {
        Weights {
            always_bytes: always,
            expert_bytes: sums.experts,
            experts,
            experts_used: used,
        }
    } else {
        Weights {
            always_bytes: always.saturating_add(sums.experts),
            ..Weights::default()
        }
    };
    let heads = number(&["num_attention_heads"]);
    let kv_heads = match number(&["num_key_value_heads"]) {
        0 => heads,
        some => some,
    };
    let head_length = match number(&["head_dim"]) {
        0 => number(&["hidden_size"]).checked_div(heads).unwrap_or(0),
        some => some,
    };
    Ok(Folder {
        weights,
        // Keys and values, of 2 bytes each.
        kv_bytes_per_token: number(&["num_hidden_layers"])
            .saturating_mul(kv_heads)
            .saturating_mul(head_length)
            .saturating_mul(4),
        context_length: Some(small(&["max_position_embeddings"])).filter(|n| *n > 0),
        tensor_bytes: total,
        vocabulary: small(&["vocab_size"]),
    })
}

/// Models that see images keep the figures of their text part in a part of its own.
fn read_config(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text = bounded(path, CONFIG_BYTES_MAX)?;
    let value: Value = serde_json::from_slice(&text)
        .map_err(|error| damaged(path, &format!("it is not JSON: {error}")))?;
    let object = match value.get("text_config") {
        Some(text) => text.as_object(),
        None => value.as_object(),
    };
    object
        .cloned()
        .ok_or_else(|| damaged(path, "it is no object"))
}

fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let entries = fs::read_dir(folder).map_err(|cause| ModelError::Io {
        path: folder.to_path_buf(),
        cause,
    })?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "safetensors")
        })
        .take(FILES_MAX)
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(damaged(folder, "it holds no safetensors file"));
    }
    Ok(files)
}

/// Adds the tensors of one file, by where its header says that their bytes begin and end.
fn add_file(path: &Path, sums: &mut Sums) -> Result<(), ModelError> {
    let io = |cause| ModelError::Io {
        path: path.to_path_buf(),
        cause,
    };
    let mut file = File::open(path).map_err(io)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX || length > file_bytes {
        return Err(damaged(
            path,
            &format!("it claims a header of {length} bytes"),
        ));
    }
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text).map_err(io)?;
    let header: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| damaged(path, &format!("its header is not JSON: {error}")))?;
    let room = file_bytes - length - 8.min(file_bytes - length);
    for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let offset = |index: usize| tensor.get("data_offsets")?.get(index)?.as_u64();
        let (Some(begin), Some(end)) = (offset(0), offset(1)) else {
            return Err(damaged(path, &format!("tensor {name} has no place")));
        };
        if begin > end || end > room {
            return Err(damaged(
                path,
                &format!(
                    "it is cut short: tensor {name} ends after the file's end (an interrupted download? fetch it again)"
                ),
            ));
        }
        let sum = match () {
            () if name.contains("embed_tokens.") => &mut sums.embedding,
            () if name.contains("lm_head.") => &mut sums.head,
            () if name.contains(".switch_mlp.") || name.contains(".experts.") => &mut sums.experts,
            () => &mut sums.always,
        };
        *sum = sum.saturating_add(end - begin);
    }
    Ok(())
}

fn bounded(path: &Path, max: u64) -> Result<Vec<u8>, ModelError> {
    let io = |cause| ModelError::Io {
        path: path.to_path_buf(),
        cause,
    };
    if fs::metadata(path).map_err(io)?.len() > max {
        return Err(damaged(path, "it is too large"));
    }
    fs::read(path).map_err(io)
}

fn damaged(path: &Path, problem: &str) -> ModelError {
    ModelError::Damaged {
        path: path.to_path_buf(),
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a folder with these tensors (name and bytes).
    fn folder(config: &str, tensors: &[(&str, u64)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config).unwrap();
        fs::write(
            folder.path().join("model.safetensors"),
            safetensors(tensors),
        )
        .unwrap();
        folder
    }

    fn safetensors(tensors: &[(&str, u64)]) -> Vec<u8> {
        let mut at = 0;
        let mut header = Map::new();
        header.insert(
            "__metadata__".to_owned(),
            serde_json::json!({"format": "mlx"}),
        );
        for (name, bytes) in tensors {
            let place = serde_json::json!({"dtype": "U8", "shape": [bytes], "data_offsets": [at, at + bytes]});
            header.insert((*name).to_owned(), place);
            at += bytes;
        }
        let text = serde_json::to_vec(&header).unwrap();
        let mut all = (text.len() as u64).to_le_bytes().to_vec();
        all.extend(text);
        all.resize(all.len() + usize::try_from(at).unwrap(), 0);
        all
    }

    const CONFIG: &str = r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "max_position_embeddings": 8192, "vocab_size": 100}"#;

    #[test]
    fn embedding_rows_are_skipped_and_the_head_is_not() {
        let tensors = [
            ("model.embed_tokens.weight", 1000),
            ("model.layers.0.mlp.up_proj.weight", 300),
            ("model.layers.0.mlp.up_proj.scales", 30),
            ("lm_head.weight", 500),
        ];
        let found = read(folder(CONFIG, &tensors).path()).unwrap();
        assert_eq!(found.weights.always_bytes, 300 + 30 + 500);
        assert_eq!(found.tensor_bytes, 1830);
        // 2 layers × 2 heads × 16 × keys and values of 2 bytes.
        assert_eq!(found.kv_bytes_per_token, 2 * 2 * 16 * 4);
        assert_eq!(found.context_length, Some(8192));
    }

    #[test]
    fn without_a_head_the_embedding_is_the_head() {
        let tensors = [
            ("model.embed_tokens.weight", 1000),
            ("model.norm.weight", 4),
        ];
        let found = read(folder(CONFIG, &tensors).path()).unwrap();
        assert_eq!(found.weights.always_bytes, 1004);
    }

    #[test]
    fn of_experts_those_that_are_used_count() {
        let config = r#"{"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1,
            "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2}}"#;
        let tensors = [
            ("model.layers.0.mlp.switch_mlp.up_proj.weight", 800),
            ("model.layers.0.self_attn.q_proj.weight", 10),
            ("lm_head.weight", 90),
        ];
        let found = read(folder(config, &tensors).path()).unwrap();
        assert_eq!(found.weights.bytes_per_step(1.0), 100.0 + 200.0);
        assert_eq!(found.kv_bytes_per_token, 8 * 4);
    }

    #[test]
    fn folders_that_are_none_are_refused_with_the_file_at_fault() {
        let says = |folder: &tempfile::TempDir, words: &str| {
            let error = read(folder.path()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        let whole = [("a.weight", 100)];
        says(&folder("no", &whole), "config.json");
        says(&folder(CONFIG, &[]), "no tensors");
        let cut = folder(CONFIG, &whole);
        let path = cut.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        says(&cut, "cut short");
        fs::write(&path, [255; 16]).unwrap();
        says(&cut, "claims a header");
        fs::write(&path, [1; 4]).unwrap();
        says(&cut, "model.safetensors");
        fs::remove_file(&path).unwrap();
        says(&cut, "no safetensors");
    }
}
