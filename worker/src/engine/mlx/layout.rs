//! Which tensors a model of a given configuration has, and whether a folder's files hold exactly those.

use std::collections::BTreeMap;

use super::config::{Family, ModelConfig, Packing};
use super::permanent;
use super::safetensors::{Shard, Stored, Tensor};
use crate::engine::LoadError;

/// One matrix with what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    /// Its name without `.weight`.
    pub(super) name: String,
    pub(super) outputs: i32,
    pub(super) inputs: i32,
    pub(super) bias: bool,
    pub(super) packing: Option<Packing>,
}

/// A vector by which a norm multiplies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Norm {
    /// Its full name, `.weight` included.
    pub(super) name: String,
    pub(super) size: i32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerLayout {
    pub(super) input_norm: Norm,
    pub(super) query: Matrix,
    pub(super) key: Matrix,
    pub(super) value: Matrix,
    pub(super) output: Matrix,
    /// Norms over each head's queries and keys.
    pub(super) head_norms: Option<(Norm, Norm)>,
    pub(super) mlp_norm: Norm,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

/// Every tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<LayerLayout>,
    pub(super) norm: Norm,
    /// `None`: the embedding is the head.
    pub(super) head: Option<Matrix>,
}

impl Layout {
    /// The layout of a model whose files are these.
    ///
    /// # Errors
    /// Permanent: a packed matrix whose inputs its groups do not divide.
    pub(super) fn of(config: &ModelConfig, shards: &[Shard]) -> Result<Self, LoadError> {
        let has_head = |shard: &Shard| shard.tensors.contains_key("lm_head.weight");
        let tied = config.tied.unwrap_or(!shards.iter().any(has_head));
        let layers: Result<Vec<_>, _> = (0..config.layers).map(|i| layer(config, i)).collect();
        let whole = |name: &str| matrix(config, name, config.vocabulary, config.hidden, false);
        Ok(Self {
            embedding: whole("model.embed_tokens")?,
            layers: layers?,
            norm: Norm {
                name: "model.norm.weight".to_owned(),
                size: config.hidden,
            },
            head: if tied { None } else { Some(whole("lm_head")?) },
        })
    }

    /// Compares with what the files announce.
    ///
    /// # Errors
    /// Permanent, naming the tensor: one is missing, has another shape or type, or is unknown.
    pub(super) fn check(&self, shards: &[Shard]) -> Result<(), LoadError> {
        let mut found: BTreeMap<&str, &Tensor> = BTreeMap::new();
        for shard in shards {
            found.extend(shard.tensors.iter().map(|(name, t)| (name.as_str(), t)));
        }
        for (name, want) in self.expected() {
            let Some(tensor) = found.remove(name.as_str()) else {
                return Err(permanent(format!("tensor {name} is missing")));
            };
            if tensor.shape != want.shape {
                return Err(permanent(format!(
                    "tensor {name} has the shape {:?}; config.json asks for {:?}",
                    tensor.shape, want.shape
                )));
            }
            if tensor.stored.is_float() != want.float {
                return Err(permanent(format!(
                    "tensor {name} is stored as {:?}, which does not fit its use",
                    tensor.stored
                )));
            }
        }
        match found.keys().find(|name| !self.may_be_ignored(name)) {
            None => Ok(()),
            Some(name) => Err(permanent(format!("tensor {name} is unknown"))),
        }
    }

    /// Bytes of memory that these weights take: packed ones as they are or unpacked, all other
    /// numbers of `number_bytes` each.
    #[must_use]
    pub(super) fn memory_bytes(&self, shards: &[Shard], unpacked: bool, number_bytes: u64) -> u64 {
        let packed = |name: &str| {
            self.matrices().any(|matrix| {
                matrix.packing.is_some()
                    && name
                        .strip_prefix(matrix.name.as_str())
                        .is_some_and(|rest| [".weight", ".scales", ".biases"].contains(&rest))
            })
        };
        let tensors = shards.iter().flat_map(|shard| &shard.tensors);
        let stored = tensors
            .filter(|(name, _)| !unpacked || !packed(name))
            .map(|(_, tensor)| {
                let each = if tensor.stored.is_float() {
                    number_bytes
                } else {
                    4
                };
                numbers(&tensor.shape) * each
            });
        let whole = self.matrices().filter(|m| unpacked && m.packing.is_some());
        let whole = whole.map(|m| numbers(&[m.outputs, m.inputs]) * number_bytes);
        stored.sum::<u64>() + whole.sum::<u64>()
    }

    /// Every matrix, the embedding first.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layers = self.layers.iter().flat_map(LayerLayout::matrices);
        std::iter::once(&self.embedding)
            .chain(layers)
            .chain(&self.head)
    }

    fn expected(&self) -> Vec<(String, Expected)> {
        let mut all = Vec::new();
        for matrix in self.matrices() {
            matrix.expect(&mut all);
        }
        for norm in self.layers.iter().flat_map(LayerLayout::norms) {
            norm.expect(&mut all);
        }
        self.norm.expect(&mut all);
        all
    }

    /// What exporters leave in the files and no reader of these families uses.
    fn may_be_ignored(&self, name: &str) -> bool {
        name.ends_with(".rotary_emb.inv_freq")
            || (self.head.is_none() && name.starts_with("lm_head."))
    }
}

impl LayerLayout {
    fn matrices(&self) -> [&Matrix; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }

    fn norms(&self) -> Vec<&Norm> {
        let mut norms = vec![&self.input_norm, &self.mlp_norm];
        if let Some((query, key)) = &self.head_norms {
            norms.extend([query, key]);
        }
        norms
    }
}

struct Expected {
    shape: Vec<i32>,
    float: bool,
}

impl Matrix {
    /// Packed numbers of one row, in 32-bit words.
    fn words(&self, packing: Packing) -> i32 {
        // Whole groups of 32 and more, whatever the bits: always whole words.
        self.inputs / 32 * packing.bits
    }

    fn expect(&self, all: &mut Vec<(String, Expected)>) {
        let mut add = |part: &str, shape: Vec<i32>, float| {
            all.push((format!("{}.{part}", self.name), Expected { shape, float }));
        };
        match self.packing {
            None => add("weight", vec![self.outputs, self.inputs], true),
            Some(packing) => {
                let groups = self.inputs / packing.group_size;
                add("weight", vec![self.outputs, self.words(packing)], false);
                add("scales", vec![self.outputs, groups], true);
                add("biases", vec![self.outputs, groups], true);
            }
        }
        if self.bias {
            add("bias", vec![self.outputs], true);
        }
    }
}

impl Norm {
    fn expect(&self, all: &mut Vec<(String, Expected)>) {
        let shape = vec![self.size];
        all.push((self.name.clone(), Expected { shape, float: true }));
    }
}

fn numbers(shape: &[i32]) -> u64 {
    shape.iter().map(|&n| u64::from(n.unsigned_abs())).product()
}

fn matrix(
    config: &ModelConfig,
    name: &str,
    outputs: i32,
    inputs: i32,
    bias: bool,
) -> Result<Matrix, LoadError> {
    let packing = config.packing_of(name);
    if let Some(packing) = packing
        && inputs % packing.group_size != 0
    {
        return Err(permanent(format!(
            "{name} has {inputs} inputs, which groups of {} do not divide",
            packing.group_size
        )));
    }
    Ok(Matrix {
        name: name.to_owned(),
        outputs,
        inputs,
        bias,
        packing,
    })
}

fn layer(config: &ModelConfig, index: i32) -> Result<LayerLayout, LoadError> {
    let prefix = format!("model.layers.{index}");
    let norm = |name: &str, size: i32| Norm {
        name: format!("{prefix}.{name}.weight"),
        size,
    };
    let part = |name: &str, outputs: i32, inputs: i32, bias: bool| {
        matrix(config, &format!("{prefix}.{name}"), outputs, inputs, bias)
    };
    let queries = config.heads * config.head_dim;
    let keys = config.kv_heads * config.head_dim;
    let (hidden, wide, biased) = (config.hidden, config.intermediate, config.mlp_bias);
    Ok(LayerLayout {
        input_norm: norm("input_layernorm", hidden),
        query: part("self_attn.q_proj", queries, hidden, config.qkv_bias)?,
        key: part("self_attn.k_proj", keys, hidden, config.qkv_bias)?,
        value: part("self_attn.v_proj", keys, hidden, config.qkv_bias)?,
        output: part("self_attn.o_proj", hidden, queries, config.output_bias)?,
        head_norms: (config.family == Family::Qwen3).then(|| {
            let of = |name: &str| norm(name, config.head_dim);
            (of("self_attn.q_norm"), of("self_attn.k_norm"))
        }),
        mlp_norm: norm("post_attention_layernorm", hidden),
        gate: part("mlp.gate_proj", wide, hidden, biased)?,
        up: part("mlp.up_proj", wide, hidden, biased)?,
        down: part("mlp.down_proj", hidden, wide, biased)?,
    })
}

/// The type in which most of the model's plain numbers are stored.
#[must_use]
pub(super) fn common_float(shards: &[Shard]) -> Stored {
    let mut counts = [(Stored::F32, 0usize), (Stored::F16, 0), (Stored::BF16, 0)];
    for tensor in shards.iter().flat_map(|shard| shard.tensors.values()) {
        for (stored, count) in &mut counts {
            if tensor.stored == *stored {
                *count += 1;
            }
        }
    }
    counts
        .iter()
        .max_by_key(|(_, count)| *count)
        .map_or(Stored::F32, |(stored, _)| *stored)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    fn config(packed: bool) -> ModelConfig {
        let mut value = json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 100, "tie_word_embeddings": false
        });
        if packed {
            value["quantization"] = json!({"bits": 3, "group_size": 32});
        }
        ModelConfig::parse(&value.to_string()).unwrap()
    }

    fn shard(layout: &Layout) -> Shard {
        let tensors = layout.expected().into_iter().map(|(name, want)| {
            let stored = if want.float {
                Stored::BF16
            } else {
                Stored::U32
            };
            let shape = want.shape;
            (name, Tensor { stored, shape })
        });
        Shard {
            path: PathBuf::new(),
            tensors: tensors.collect(),
            header: Vec::new(),
            bytes: 0,
        }
    }

    #[test]
    fn three_bits_of_64_inputs_are_six_words() {
        let layout = Layout::of(&config(true), &[]).unwrap();
        let shard = shard(&layout);
        assert_eq!(shard.tensors["lm_head.weight"].shape, [100, 6]);
        assert_eq!(shard.tensors["lm_head.scales"].shape, [100, 2]);
        assert!(
            shard
                .tensors
                .contains_key("model.layers.0.self_attn.q_norm.weight")
        );
        layout.check(&[shard]).unwrap();
    }

    #[test]
    fn a_missing_an_unknown_and_a_misshapen_tensor_are_each_named() {
        for packed in [false, true] {
            let layout = Layout::of(&config(packed), &[]).unwrap();
            let whole = shard(&layout);
            let told = |shard: Shard| layout.check(&[shard]).unwrap_err().to_string();
            for name in whole.tensors.keys() {
                let mut less = whole.clone();
                let mut tensor = less.tensors.remove(name).unwrap();
                assert_eq!(told(less.clone()), format!("tensor {name} is missing"));
                tensor.shape[0] += 1;
                less.tensors.insert(name.clone(), tensor.clone());
                assert!(told(less.clone()).starts_with(&format!("tensor {name} has the shape")));
                tensor.shape[0] -= 1;
                tensor.stored = if tensor.stored.is_float() {
                    Stored::U32
                } else {
                    Stored::F32
                };
                less.tensors.insert(name.clone(), tensor);
                assert!(told(less).starts_with(&format!("tensor {name} is stored as")));
            }
            let mut more = whole.clone();
            let extra = more.tensors["model.norm.weight"].clone();
            more.tensors.insert("model.extra".to_owned(), extra);
            assert_eq!(told(more), "tensor model.extra is unknown");
        }
    }

    #[test]
    fn groups_that_do_not_divide_the_inputs_are_refused() {
        let mut value = json!({
            "model_type": "llama", "hidden_size": 96, "intermediate_size": 128,
            "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100
        });
        value["quantization"] = json!({"bits": 4, "group_size": 64});
        let config = ModelConfig::parse(&value.to_string()).unwrap();
        let error = Layout::of(&config, &[]).unwrap_err().to_string();
        assert!(error.contains("groups of 64"), "{error}");
    }
}
