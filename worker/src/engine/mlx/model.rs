//! The forward pass of the supported families, over rows that belong to several sequences.

use std::ops::Range;

use mlx_rs::error::Exception;
use mlx_rs::fast::ScaledDotProductAttentionMask as Mask;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, fast, ops};
use proto::TokenId;

use super::cache::Cache;
use super::config::{Llama3Scaling, ModelConfig, Rope};
use super::weights::{Layer, Weights};

/// The rows of a pass that belong to one slot. The pass has one row a token, whoever's it is, so
/// that every matrix is read once for all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) slot: usize,
    pub(super) rows: Range<i32>,
    /// Tokens of the slot that were computed before.
    pub(super) past: i32,
}

#[derive(Debug)]
pub(super) struct Model {
    config: ModelConfig,
    weights: Weights,
    /// Periods of the rotation, where they are not the plain powers of a base.
    periods: Option<Array>,
}

impl Model {
    pub(super) fn new(config: ModelConfig, weights: Weights) -> Self {
        let periods = config.rope.llama3.map(|scaling| {
            let periods = stretched_periods(&config.rope, &scaling, config.head_dim);
            Array::from_slice(&periods, &[config.head_dim / 2])
        });
        Self {
            config,
            weights,
            periods,
        }
    }

    pub(super) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Computes `tokens`, and writes their keys and values into the caches of the spans' slots.
    /// Rows that no span covers are padding: they cost a row and change nothing. Returns the last
    /// layer's rows, normed, [rows, hidden]; nothing has been evaluated yet.
    pub(super) fn forward(
        &self,
        tokens: &[TokenId],
        spans: &[Span],
        caches: &mut [Cache],
    ) -> Result<Array, Exception> {
        let rows = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let ids = Array::from_slice(tokens, &[rows]);
        let mut positions = vec![0i32; tokens.len()];
        for span in spans {
            for (row, past) in span.rows.clone().zip(span.past..) {
                if let Some(position) = usize::try_from(row).ok().and_then(|r| positions.get_mut(r))
                {
                    *position = past;
                }
            }
        }
        let positions = Array::from_slice(&positions, &[rows]);

        let mut x = self.weights.embedding.rows(&ids)?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let normed = self.norm(&x, &layer.input_norm)?;
            let attended = self.attend(index, layer, &normed, &positions, spans, caches)?;
            x = ops::add(&x, &attended)?;
            let normed = self.norm(&x, &layer.mlp_norm)?;
            let gate = layer.gate.apply(&normed)?;
            // Not nn::silu: that compiles, which takes a C++ compiler at run time on a CPU.
            let gate = ops::multiply(&gate, &ops::sigmoid(&gate)?)?;
            let wide = ops::multiply(&gate, &layer.up.apply(&normed)?)?;
            x = ops::add(&x, &layer.down.apply(&wide)?)?;
        }
        self.norm(&x, &self.weights.norm)
    }

    /// The logits of the named rows of what `forward` returned, [rows.len(), vocabulary].
    pub(super) fn logits(&self, hidden: &Array, rows: &[i32]) -> Result<Array, Exception> {
        let count = i32::try_from(rows.len()).unwrap_or(i32::MAX);
        let picked = if count == hidden.dim(0) && (0..).zip(rows).all(|(at, &row)| at == row) {
            hidden.clone()
        } else {
            hidden.take_axis(Array::from_slice(rows, &[count]), 0)?
        };
        let head = self
            .weights
            .head
            .as_ref()
            .unwrap_or(&self.weights.embedding);
        head.apply(&picked)
    }

    fn norm(&self, x: &Array, weight: &Array) -> Result<Array, Exception> {
        fast::rms_norm(x, Some(weight), self.config.norm_epsilon)
    }

    fn rotate(&self, x: &Array, positions: &Array) -> Result<Array, Exception> {
        let rope = &self.config.rope;
        let base = self.periods.is_none().then_some(rope.base);
        let dims = self.config.head_dim;
        let periods = self.periods.as_ref();
        // One row a batch entry of a single token: every row has a position of its own.
        fast::rope_dynamic(
            x,
            dims,
            rope.traditional,
            base,
            rope.scale,
            positions,
            periods,
        )
    }

    fn attend(
        &self,
        index: usize,
        layer: &Layer,
        x: &Array,
        positions: &Array,
        spans: &[Span],
        caches: &mut [Cache],
    ) -> Result<Array, Exception> {
        let ModelConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        let rows = x.dim(0);
        let mut query = layer.query.apply(x)?.reshape(&[rows, heads, 1, head_dim])?;
        let mut key = layer
            .key
            .apply(x)?
            .reshape(&[rows, kv_heads, 1, head_dim])?;
        let value = layer
            .value
            .apply(x)?
            .reshape(&[rows, kv_heads, 1, head_dim])?;
        if let Some((query_norm, key_norm)) = &layer.head_norms {
            query = self.norm(&query, query_norm)?;
            key = self.norm(&key, key_norm)?;
        }
        let query = self.rotate(&query, positions)?.squeeze_axes(&[2])?;
        let key = self.rotate(&key, positions)?;
        let both = ops::concatenate(&[&key, &value], 1)?.squeeze_axes(&[2])?;

        let scale = 1.0 / f32::from(i16::try_from(head_dim).unwrap_or(i16::MAX)).sqrt();
        let mut outputs = Vec::with_capacity(spans.len() + 1);
        let mut covered = 0;
        for span in spans {
            let Some(cache) = caches.get_mut(span.slot) else {
                return Err(Exception::custom("a span without a slot"));
            };
            let length = span.rows.end - span.rows.start;
            covered = span.rows.end;
            let new = both.try_index(span.rows.clone())?.swap_axes(0, 1)?;
            let (keys, values) = cache.write(index, span.past, &new)?;
            let asked = query
                .try_index(span.rows.clone())?
                .swap_axes(0, 1)?
                .expand_dims(0)?;
            // A single row sees all there is: no mask, and the kernel made for that.
            let mask = (length > 1).then_some(Mask::Causal);
            let seen = fast::scaled_dot_product_attention(asked, keys, values, scale, mask, None)?;
            let seen = seen.transpose_axes(&[0, 2, 1, 3])?;
            outputs.push(seen.reshape(&[length, heads * head_dim])?);
        }
        if covered < rows {
            let padding = [rows - covered, heads * head_dim];
            outputs.push(ops::zeros_dtype(&padding, x.dtype())?);
        }
        layer.output.apply(&ops::concatenate(&outputs, 0)?)
    }
}

/// Llama 3.1's periods: slow ones are stretched by the factor, fast ones kept, and those between
/// go over from one to the other (transformers' `_compute_llama3_parameters`, mlx-lm's `Llama3RoPE`).
#[expect(
    clippy::cast_possible_truncation,
    reason = "computed in double so that only the last rounding counts"
)]
fn stretched_periods(rope: &Rope, scaling: &Llama3Scaling, dims: i32) -> Vec<f32> {
    let factor = f64::from(scaling.factor);
    let (low, high) = (
        f64::from(scaling.low_freq_factor),
        f64::from(scaling.high_freq_factor),
    );
    let context = f64::from(scaling.original_context);
    (0..dims / 2)
        .map(|i| {
            let period = f64::from(rope.base).powf(2.0 * f64::from(i) / f64::from(dims));
            let turns = context / (2.0 * std::f64::consts::PI * period);
            let stretched = if turns < low {
                period * factor
            } else if turns > high {
                period
            } else {
                let smooth = (turns - low) / (high - low);
                period / ((1.0 - smooth) / factor + smooth)
            };
            stretched as f32
        })
        .collect()
}
