//! A model folder's `config.json`, read with bounds: the few figures that sizing needs. The engine
//! itself reads it strictly; here what is missing is only not known.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde_json::Value;

/// Configurations in the field have up to 100 kB (a packing of its own for each layer).
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Entries of a folder that are looked at.
const ENTRIES_MAX: usize = 10_000;
/// Larger figures than any model has are not one's.
const FIGURE_MAX: u64 = 1 << 32;

/// What is known of a folder before a worker loads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folder {
    /// Tokens of context that the model was trained for.
    pub context_length: Option<u32>,
    /// Numbers in all matrices together; 0 where the configuration does not say.
    pub parameters: u64,
    /// Whether the matrices are packed.
    pub packed: bool,
    /// Bytes of all weight files.
    pub file_bytes: u64,
    /// Numbers that one token of one sequence adds to the KV cache.
    pub kv_numbers_per_token: u64,
}

/// Reads what the folder says of itself. What cannot be read is left at nothing: the worker's load
/// is what refuses a folder, and says why.
#[must_use]
pub fn read(folder: &Path) -> Folder {
    let file_bytes = weight_bytes(folder);
    let config = config(&folder.join("config.json")).unwrap_or(Value::Null);
    Folder {
        file_bytes,
        ..of_config(&config)
    }
}

fn config(path: &Path) -> Option<Value> {
    let mut text = Vec::new();
    let file = File::open(path).ok()?;
    file.take(CONFIG_BYTES_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn weight_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let weights = entries.take(ENTRIES_MAX).flatten().filter(|entry| {
        let path = entry.path();
        path.extension().is_some_and(|e| e == "safetensors")
    });
    // Through links: a hub's cache has nothing else.
    let sizes = weights.filter_map(|entry| fs::metadata(entry.path()).ok());
    sizes.fold(0, |sum, metadata| metadata.len().saturating_add(sum))
}

fn of_config(config: &Value) -> Folder {
    let figure = |key: &str| {
        let figure = config.get(key).and_then(Value::as_u64);
        figure.filter(|figure| (1..FIGURE_MAX).contains(figure))
    };
    let context_length = figure("max_position_embeddings").and_then(|c| u32::try_from(c).ok());
    let packed = config.get("quantization").is_some_and(Value::is_object);
    let known = Folder {
        context_length,
        packed,
        ..Folder::default()
    };
    let (Some(layers), Some(hidden), Some(wide), Some(heads), Some(vocabulary)) = (
        figure("num_hidden_layers"),
        figure("hidden_size"),
        figure("intermediate_size"),
        figure("num_attention_heads"),
        figure("vocab_size"),
    ) else {
        return known;
    };
    let kv_heads = figure("num_key_value_heads").unwrap_or(heads);
    let head = figure("head_dim").unwrap_or(hidden / heads);
    // As 128-bit numbers: five figures below 2^32 cannot overflow them.
    let [layers, hidden, wide, heads, vocabulary, kv_heads, head] =
        [layers, hidden, wide, heads, vocabulary, kv_heads, head].map(u128::from);
    let tied = config.get("tie_word_embeddings").and_then(Value::as_bool) == Some(true);
    let embeddings = vocabulary * hidden * if tied { 1 } else { 2 };
    let attention = 2 * hidden * head * (heads + kv_heads);
    let parameters = embeddings + layers * (attention + 3 * hidden * wide);
    Folder {
        parameters: u64::try_from(parameters).unwrap_or(u64::MAX),
        kv_numbers_per_token: u64::try_from(2 * layers * kv_heads * head).unwrap_or(u64::MAX),
        ..known
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_folder_is_sized_from_its_configuration_and_its_weight_files() {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
            "max_position_embeddings": 8192, "tie_word_embeddings": true,
            "quantization": { "bits": 4, "group_size": 32 },
        });
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        fs::write(folder.path().join("a.safetensors"), [0; 10]).unwrap();
        fs::write(folder.path().join("b.safetensors"), [0; 5]).unwrap();
        fs::write(folder.path().join("tokenizer.json"), [0; 99]).unwrap();
        let found = read(folder.path());
        // SmolLM2-135M, without its 35,136 numbers of norms.
        assert_eq!(found.parameters, 134_515_008 - 35_136);
        assert_eq!(found.kv_numbers_per_token, 2 * 30 * 3 * 64);
        assert_eq!(found.context_length, Some(8192));
        assert_eq!((found.packed, found.file_bytes), (true, 15));
    }

    #[test]
    fn a_configuration_that_says_nothing_or_nonsense_is_no_panic() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()), Folder::default());
        for text in ["", "[]", "{\"hidden_size\": -1}", "\u{7f}"] {
            fs::write(folder.path().join("config.json"), text).unwrap();
            assert_eq!(read(folder.path()), Folder::default(), "{text:?}");
        }
        let most = FIGURE_MAX - 1;
        let huge = json!({
            "num_hidden_layers": most, "hidden_size": most, "intermediate_size": most,
            "num_attention_heads": 1, "vocab_size": most,
        });
        assert_eq!(of_config(&huge).parameters, u64::MAX);
    }
}
