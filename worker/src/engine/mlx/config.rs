//! What a model folder's `config.json` says of the model, checked against what this engine computes.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::permanent;
use crate::engine::LoadError;

/// Which of the supported families; they differ in biases and in norms on queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Qwen2,
    Qwen3,
}

/// How one linear layer's or embedding's weights are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    pub(super) bits: i32,
    pub(super) group_size: i32,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rope {
    pub(super) base: f32,
    /// Factor on positions; 1 where they are taken as they are.
    pub(super) scale: f32,
    /// Interleaved pairs rather than halves.
    pub(super) traditional: bool,
    pub(super) llama3: Option<Llama3Scaling>,
}

/// Llama 3.1's stretching of the slow frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Llama3Scaling {
    pub(super) factor: f32,
    pub(super) low_freq_factor: f32,
    pub(super) high_freq_factor: f32,
    pub(super) original_context: f32,
}

/// The model's dimensions and variants.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelConfig {
    pub(super) family: Family,
    pub(super) hidden: i32,
    pub(super) intermediate: i32,
    pub(super) layers: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) head_dim: i32,
    pub(super) vocabulary: i32,
    pub(super) norm_epsilon: f32,
    pub(super) rope: Rope,
    /// Whether the head is the embedding; `None`: the files tell, by having a head or not.
    pub(super) tied: Option<bool>,
    /// Biases on the query, key and value projections.
    pub(super) qkv_bias: bool,
    /// A bias on the attention's output projection.
    pub(super) output_bias: bool,
    pub(super) mlp_bias: bool,
    /// What the model was trained on, in tokens.
    pub(super) context_tokens: u32,
    pub(super) end_tokens: Vec<u32>,
    packing: Option<Packing>,
    /// Layers packed otherwise; `None`: not at all.
    packing_overrides: HashMap<String, Option<Packing>>,
}

/// No published model of these families comes near; a wild value would ask for wild memory.
const DIMENSION_MAX: i64 = 1 << 24;

impl ModelConfig {
    /// Reads the text of `config.json`.
    ///
    /// # Errors
    /// Permanent: not JSON, a key is missing or absurd, or the model is of a kind that this engine
    /// would compute wrongly.
    pub(super) fn parse(text: &str) -> Result<Self, LoadError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|e| permanent(format!("config.json is not JSON: {e}")))?;
        let Value::Object(root) = value else {
            return Err(permanent("config.json is not an object"));
        };
        let family = match root.get("model_type").and_then(Value::as_str) {
            Some("llama") => Family::Llama,
            Some("qwen2") => Family::Qwen2,
            Some("qwen3") => Family::Qwen3,
            Some(other) => {
                return Err(permanent(format!(
                    "config.json: model_type \"{other}\" is not supported (llama, qwen2 and qwen3 are)"
                )));
            }
            None => return Err(permanent("config.json: model_type is missing")),
        };
        refuse_unsupported(&root)?;

        let hidden = dimension(&root, "hidden_size")?;
        let heads = dimension(&root, "num_attention_heads")?;
        let kv_heads = optional_dimension(&root, "num_key_value_heads")?.unwrap_or(heads);
        let head_dim = optional_dimension(&root, "head_dim")?.unwrap_or(hidden / heads.max(1));
        if heads % kv_heads != 0 || head_dim == 0 || head_dim % 2 != 0 {
            return Err(permanent(format!(
                "config.json: {heads} heads of {head_dim} cannot share {kv_heads} key-value heads"
            )));
        }
        let flag = |key: &str| root.get(key).and_then(Value::as_bool);
        let attention_bias = flag("attention_bias").unwrap_or(false);
        let (packing, packing_overrides) = quantization(&root)?;
        Ok(Self {
            family,
            hidden,
            intermediate: dimension(&root, "intermediate_size")?,
            layers: dimension(&root, "num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            vocabulary: dimension(&root, "vocab_size")?,
            norm_epsilon: number(&root, "rms_norm_eps")?.unwrap_or(1e-6),
            rope: rope(&root)?,
            tied: flag("tie_word_embeddings"),
            qkv_bias: attention_bias || family == Family::Qwen2,
            output_bias: attention_bias && family != Family::Qwen2,
            mlp_bias: flag("mlp_bias").unwrap_or(false) && family == Family::Llama,
            context_tokens: u32::try_from(
                optional_dimension(&root, "max_position_embeddings")?.unwrap_or(2048),
            )
            .unwrap_or(2048),
            end_tokens: token_ids(root.get("eos_token_id")),
            packing,
            packing_overrides,
        })
    }

    /// How the named layer (`model.layers.0.mlp.up_proj`) is packed; `None`: plain numbers.
    #[must_use]
    pub(super) fn packing_of(&self, layer: &str) -> Option<Packing> {
        self.packing_overrides
            .get(layer)
            .copied()
            .unwrap_or(self.packing)
    }
}

/// Token ids as one number or a list of numbers; anything else is none.
#[must_use]
pub(super) fn token_ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Whatever would be computed wrongly in silence is refused by name.
fn refuse_unsupported(root: &Map<String, Value>) -> Result<(), LoadError> {
    if let Some(act) = root.get("hidden_act").and_then(Value::as_str)
        && act != "silu"
    {
        return Err(permanent(format!(
            "config.json: hidden_act \"{act}\" is not supported (silu is)"
        )));
    }
    let sliding = root.get("use_sliding_window").and_then(Value::as_bool) == Some(true)
        || root
            .get("layer_types")
            .and_then(Value::as_array)
            .is_some_and(|types| types.iter().any(|t| t.as_str() != Some("full_attention")));
    if sliding {
        return Err(permanent(
            "config.json: sliding-window attention is not supported",
        ));
    }
    Ok(())
}

fn integer(root: &Map<String, Value>, key: &str) -> Result<Option<i64>, LoadError> {
    match root.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => v
            .as_i64()
            .map(Some)
            .ok_or_else(|| permanent(format!("config.json: {key} is not a whole number"))),
    }
}

fn optional_dimension(root: &Map<String, Value>, key: &str) -> Result<Option<i32>, LoadError> {
    let Some(n) = integer(root, key)? else {
        return Ok(None);
    };
    match i32::try_from(n) {
        Ok(small) if (1..=DIMENSION_MAX).contains(&n) => Ok(Some(small)),
        _ => Err(permanent(format!("config.json: {key} is {n}"))),
    }
}

fn dimension(root: &Map<String, Value>, key: &str) -> Result<i32, LoadError> {
    optional_dimension(root, key)?
        .ok_or_else(|| permanent(format!("config.json: {key} is missing")))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "these parameters are used in float32 by every implementation"
)]
fn number(root: &Map<String, Value>, key: &str) -> Result<Option<f32>, LoadError> {
    match root.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => match v.as_f64() {
            Some(n) if n.is_finite() && n > 0.0 => Ok(Some(n as f32)),
            _ => Err(permanent(format!(
                "config.json: {key} is not a positive number"
            ))),
        },
    }
}

fn rope(root: &Map<String, Value>) -> Result<Rope, LoadError> {
    // Newer files gather everything of the rotation in `rope_parameters`.
    let nested = ["rope_parameters", "rope_scaling"]
        .iter()
        .find_map(|key| root.get(*key).and_then(Value::as_object));
    let base = match number(root, "rope_theta")? {
        Some(base) => base,
        None => match nested {
            Some(map) => number(map, "rope_theta")?.unwrap_or(10_000.0),
            None => 10_000.0,
        },
    };
    let mut rope = Rope {
        base,
        scale: 1.0,
        traditional: root.get("rope_traditional").and_then(Value::as_bool) == Some(true),
        llama3: None,
    };
    let Some(map) = nested else { return Ok(rope) };
    let kind = map
        .get("rope_type")
        .or_else(|| map.get("type"))
        .and_then(Value::as_str)
        .unwrap_or("default");
    let needed = |key: &str| {
        number(map, key)?.ok_or_else(|| permanent(format!("config.json: rope scaling lacks {key}")))
    };
    match kind {
        "default" => {}
        "linear" => rope.scale = 1.0 / needed("factor")?,
        "llama3" => {
            let scaling = Llama3Scaling {
                factor: needed("factor")?,
                low_freq_factor: number(map, "low_freq_factor")?.unwrap_or(1.0),
                high_freq_factor: number(map, "high_freq_factor")?.unwrap_or(4.0),
                original_context: number(map, "original_max_position_embeddings")?
                    .unwrap_or(8192.0),
            };
            if scaling.high_freq_factor <= scaling.low_freq_factor {
                return Err(permanent(
                    "config.json: rope scaling's high_freq_factor must be above its low_freq_factor",
                ));
            }
            rope.llama3 = Some(scaling);
        }
        other => {
            return Err(permanent(format!(
                "config.json: rope type \"{other}\" is not supported (default, linear and llama3 are)"
            )));
        }
    }
    Ok(rope)
}

type Quantization = (Option<Packing>, HashMap<String, Option<Packing>>);

fn quantization(root: &Map<String, Value>) -> Result<Quantization, LoadError> {
    let Some(map) = root.get("quantization").filter(|v| !v.is_null()) else {
        // Other tools' formats (GPTQ, AWQ) announce themselves under this key alone.
        if root
            .get("quantization_config")
            .is_some_and(|v| !v.is_null())
        {
            return Err(permanent(
                "config.json: quantization_config without quantization: not a format of MLX",
            ));
        }
        return Ok((None, HashMap::new()));
    };
    let Value::Object(map) = map else {
        return Err(permanent("config.json: quantization is not an object"));
    };
    let whole = packing("quantization", map)?;
    let mut overrides = HashMap::new();
    for (key, value) in map {
        match value {
            Value::Object(own) => {
                overrides.insert(key.clone(), Some(packing(key, own)?));
            }
            Value::Bool(false) => {
                overrides.insert(key.clone(), None);
            }
            _ => {}
        }
    }
    Ok((Some(whole), overrides))
}

fn packing(name: &str, map: &Map<String, Value>) -> Result<Packing, LoadError> {
    if let Some(mode) = map.get("mode").and_then(Value::as_str)
        && mode != "affine"
    {
        return Err(permanent(format!(
            "config.json: {name}: quantisation mode \"{mode}\" is not supported (affine is)"
        )));
    }
    let bits = optional_dimension(map, "bits")?.unwrap_or(4);
    let group_size = optional_dimension(map, "group_size")?.unwrap_or(64);
    if ![2, 3, 4, 5, 6, 8].contains(&bits) || ![32, 64, 128].contains(&group_size) {
        return Err(permanent(format!(
            "config.json: {name}: {bits} bits in groups of {group_size} are not supported"
        )));
    }
    Ok(Packing { bits, group_size })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn base() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 100, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
            "eos_token_id": [2, 3]
        })
    }

    fn with(key: &str, value: Value) -> Result<ModelConfig, LoadError> {
        let mut config = base();
        config[key] = value;
        ModelConfig::parse(&config.to_string())
    }

    #[test]
    fn a_layer_with_its_own_packing_keeps_it_and_the_rest_take_the_common_one() {
        let config = with(
            "quantization",
            json!({
                "bits": 4, "group_size": 64, "mode": "affine",
                "model.embed_tokens": {"bits": 8, "group_size": 32},
                "lm_head": false
            }),
        )
        .unwrap();
        let packing = |bits, group_size| Some(Packing { bits, group_size });
        assert_eq!(config.packing_of("model.embed_tokens"), packing(8, 32));
        assert_eq!(config.packing_of("lm_head"), None);
        assert_eq!(
            config.packing_of("model.layers.0.mlp.up_proj"),
            packing(4, 64)
        );
        assert_eq!(config.end_tokens, [2, 3]);
        assert_eq!(config.head_dim, 16);
    }

    #[test]
    fn what_would_be_computed_wrongly_is_refused_by_its_name() {
        for (key, value, named) in [
            ("model_type", json!("mamba"), "mamba"),
            ("hidden_act", json!("gelu"), "gelu"),
            ("use_sliding_window", json!(true), "sliding"),
            (
                "rope_scaling",
                json!({"rope_type": "yarn", "factor": 4.0}),
                "yarn",
            ),
            ("quantization", json!({"mode": "mxfp4"}), "mxfp4"),
            ("quantization", json!({"bits": 7}), "7 bits"),
            (
                "quantization_config",
                json!({"quant_method": "gptq"}),
                "quantization_config",
            ),
            ("hidden_size", json!(-1), "hidden_size"),
            ("hidden_size", json!("x"), "hidden_size"),
            ("num_key_value_heads", json!(3), "key-value"),
            ("vocab_size", Value::Null, "vocab_size"),
        ] {
            let error = with(key, value).unwrap_err();
            assert!(matches!(error, LoadError::Permanent(_)));
            assert!(error.to_string().contains(named), "{error}");
        }
        assert!(ModelConfig::parse("[]").is_err());
        assert!(ModelConfig::parse("{").is_err());
    }

    #[test]
    fn the_rotation_is_read_from_the_old_and_from_the_new_place() {
        let old = with(
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}),
        )
        .unwrap();
        assert_eq!(old.rope.llama3.map(|s| s.factor), Some(32.0));
        let new = with(
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 1e6}),
        )
        .unwrap();
        assert_eq!((new.rope.base, new.rope.llama3), (1e6, None));
    }
}
