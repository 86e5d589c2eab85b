//! Reads the tensors into MLX, in the form in which the device computes with them.

use std::collections::HashMap;

use mlx_rs::error::Exception;
use mlx_rs::{Array, Dtype, ops, transforms};

use super::config::Packing;
use super::layout::{LayerLayout, Layout, Matrix, Norm};
use super::safetensors::{Shard, Stored};
use super::{permanent, transient};
use crate::engine::{LoadError, Progress};

/// A matrix as it lies in memory.
#[derive(Debug)]
enum Form {
    /// Transposed, as matmul takes it.
    Plain(Array),
    Packed {
        weight: Array,
        scales: Array,
        biases: Array,
        packing: Packing,
    },
}

/// A linear layer, or an embedding.
#[derive(Debug)]
pub(super) struct Linear {
    form: Form,
    bias: Option<Array>,
}

impl Linear {
    /// `x` of shape [rows, inputs] to [rows, outputs].
    pub(super) fn apply(&self, x: &Array) -> Result<Array, Exception> {
        let y = match &self.form {
            Form::Plain(transposed) => ops::matmul(x, transposed)?,
            Form::Packed {
                weight,
                scales,
                biases,
                packing,
            } => ops::quantized_matmul(
                x,
                weight,
                scales,
                biases,
                true,
                packing.group_size,
                packing.bits,
            )?,
        };
        match &self.bias {
            Some(bias) => ops::add(&y, bias),
            None => Ok(y),
        }
    }

    /// The rows that `ids` name, as an embedding.
    pub(super) fn rows(&self, ids: &Array) -> Result<Array, Exception> {
        match &self.form {
            Form::Plain(transposed) => transposed.t().take_axis(ids, 0),
            Form::Packed {
                weight,
                scales,
                biases,
                packing,
            } => ops::dequantize(
                weight.take_axis(ids, 0)?,
                scales.take_axis(ids, 0)?,
                &biases.take_axis(ids, 0)?,
                packing.group_size,
                packing.bits,
            ),
        }
    }

    fn bytes(&self) -> u64 {
        let form = match &self.form {
            Form::Plain(transposed) => transposed.nbytes(),
            Form::Packed {
                weight,
                scales,
                biases,
                ..
            } => weight.nbytes() + scales.nbytes() + biases.nbytes(),
        };
        (form + self.bias.as_ref().map_or(0, Array::nbytes)) as u64
    }
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Array,
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    pub(super) output: Linear,
    pub(super) head_norms: Option<(Array, Array)>,
    pub(super) mlp_norm: Array,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// All of a model's weights, evaluated.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Linear,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Array,
    pub(super) head: Option<Linear>,
}

impl Weights {
    /// Bytes that one step reads: all but an embedding that is not the head too.
    pub(super) fn step_bytes(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            let matrices = [
                &layer.query,
                &layer.key,
                &layer.value,
                &layer.output,
                &layer.gate,
                &layer.up,
                &layer.down,
            ];
            let norms = layer.input_norm.nbytes() + layer.mlp_norm.nbytes();
            matrices.iter().map(|m| m.bytes()).sum::<u64>() + norms as u64
        });
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        layers.sum::<u64>() + head.bytes() + self.norm.nbytes() as u64
    }
}

/// How the weights are to lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// The type of all numbers that are not packed.
    pub(super) compute: Dtype,
    /// Unpack packed matrices.
    pub(super) unpack: bool,
}

/// The MLX type of numbers stored so.
pub(super) fn dtype(stored: Stored) -> Dtype {
    match stored {
        Stored::F32 => Dtype::Float32,
        Stored::F16 => Dtype::Float16,
        Stored::BF16 => Dtype::Bfloat16,
        Stored::U32 => Dtype::Uint32,
    }
}

/// Reads all of `layout`, which has been checked against the `shards`.
///
/// # Errors
/// Permanent where MLX refuses a file; transient where evaluation fails, which is a lack of memory.
pub(super) fn read(
    layout: &Layout,
    shards: &[Shard],
    wanted: Wanted,
    progress: &mut Progress,
) -> Result<Weights, LoadError> {
    let mut tensors = HashMap::new();
    for shard in shards {
        // Lazy: the numbers are read when a layer is evaluated.
        let read = Array::load_safetensors(&shard.path)
            .map_err(|e| permanent(format!("{}: {e}", shard.path.display())))?;
        tensors.extend(read);
    }
    let mut reader = Reader { tensors, wanted };
    let parts = layout.layers.len() + 2;
    let mut done = 0usize;
    let mut advance = || {
        done += 1;
        progress(u32::try_from(done * 1000 / parts).unwrap_or(1000));
    };

    let embedding = reader.linear(&layout.embedding)?;
    advance();
    let mut layers = Vec::with_capacity(layout.layers.len());
    for layer in &layout.layers {
        layers.push(reader.layer(layer)?);
        advance();
    }
    let norm = reader.norm(&layout.norm)?;
    let head = layout.head.as_ref().map(|m| reader.linear(m)).transpose()?;
    advance();
    Ok(Weights {
        embedding,
        layers,
        norm,
        head,
    })
}

struct Reader {
    tensors: HashMap<String, Array>,
    wanted: Wanted,
}

impl Reader {
    fn take(&mut self, name: &str) -> Result<Array, LoadError> {
        self.tensors
            .remove(name)
            .ok_or_else(|| permanent(format!("tensor {name} is missing")))
    }

    fn float(&mut self, name: &str) -> Result<Array, LoadError> {
        let array = self.take(name)?;
        array.as_dtype(self.wanted.compute).map_err(unread(name))
    }

    fn norm(&mut self, norm: &Norm) -> Result<Array, LoadError> {
        let array = self.float(&norm.name)?;
        array.eval().map_err(unread(&norm.name))?;
        Ok(array)
    }

    fn linear(&mut self, matrix: &Matrix) -> Result<Linear, LoadError> {
        let name = &matrix.name;
        let part = |part: &str| format!("{name}.{part}");
        let form = match matrix.packing {
            None => self.plain(name, self.wanted.compute)?,
            Some(packing) => {
                let weight = self.take(&part("weight"))?;
                let scales = self.float(&part("scales"))?;
                let biases = self.float(&part("biases"))?;
                if self.wanted.unpack {
                    let (group, bits) = (packing.group_size, packing.bits);
                    let plain = ops::dequantize(&weight, &scales, &biases, group, bits)
                        .map_err(unread(name))?;
                    transposed(&plain, name)?
                } else {
                    transforms::eval([&weight, &scales, &biases]).map_err(unread(name))?;
                    Form::Packed {
                        weight,
                        scales,
                        biases,
                        packing,
                    }
                }
            }
        };
        let bias = if matrix.bias {
            let bias = self.float(&part("bias"))?;
            bias.eval().map_err(unread(name))?;
            Some(bias)
        } else {
            None
        };
        Ok(Linear { form, bias })
    }

    fn plain(&mut self, name: &str, compute: Dtype) -> Result<Form, LoadError> {
        let weight = self.take(&format!("{name}.weight"))?;
        let weight = weight.as_dtype(compute).map_err(unread(name))?;
        transposed(&weight, name)
    }

    fn layer(&mut self, layout: &LayerLayout) -> Result<Layer, LoadError> {
        let head_norms = match &layout.head_norms {
            Some((query, key)) => Some((self.norm(query)?, self.norm(key)?)),
            None => None,
        };
        Ok(Layer {
            input_norm: self.norm(&layout.input_norm)?,
            query: self.linear(&layout.query)?,
            key: self.linear(&layout.key)?,
            value: self.linear(&layout.value)?,
            output: self.linear(&layout.output)?,
            head_norms,
            mlp_norm: self.norm(&layout.mlp_norm)?,
            gate: self.linear(&layout.gate)?,
            up: self.linear(&layout.up)?,
            down: self.linear(&layout.down)?,
        })
    }
}

/// A view: the numbers stay where they are.
fn transposed(weight: &Array, name: &str) -> Result<Form, LoadError> {
    weight.eval().map_err(unread(name))?;
    let view = weight.t();
    view.eval().map_err(unread(name))?;
    Ok(Form::Plain(view))
}

fn unread(name: &str) -> impl Fn(Exception) -> LoadError {
    let name = name.to_owned();
    move |e| transient(format!("reading {name}: {}", e.what()))
}
