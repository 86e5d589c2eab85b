//! One slot's keys and values: an array a layer, grown in blocks, and the tokens they belong to.

use mlx_rs::error::Exception;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::{Array, Dtype, ops};
use proto::TokenId;

/// Tokens by which a cache grows at least.
const BLOCK_TOKENS: i32 = 256;

/// What every slot's cache has in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) layers: usize,
    pub(super) kv_heads: i32,
    pub(super) head_dim: i32,
    pub(super) dtype: Dtype,
    /// Tokens of the longest sequence.
    pub(super) context_tokens: i32,
}

impl Shape {
    /// Bytes that one token of one sequence takes.
    pub(super) fn bytes_per_token(&self) -> u64 {
        let numbers = 2
            * self.layers as u64
            * u64::from(self.kv_heads.unsigned_abs())
            * u64::from(self.head_dim.unsigned_abs());
        numbers * if self.dtype == Dtype::Float32 { 4 } else { 2 }
    }

    /// Tokens to make room for when `needed` must fit in a cache of `capacity`: at least a block
    /// more, and an eighth more, so that a long sequence is seldom copied.
    fn grown(&self, capacity: i32, needed: i32) -> i32 {
        let wanted = needed.max(capacity + capacity / 8);
        let blocks = (wanted + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        (blocks * BLOCK_TOKENS).min(self.context_tokens.max(needed))
    }
}

/// The keys and values of one slot, and whose they are.
#[derive(Debug)]
pub(super) struct Cache {
    shape: Shape,
    /// Each of [2 × kv heads, capacity, head dim]: the keys' heads, then the values'.
    layers: Vec<Array>,
    capacity: i32,
    /// The tokens whose keys and values are held, in order.
    tokens: Vec<TokenId>,
}

impl Cache {
    pub(super) fn new(shape: Shape) -> Self {
        Self {
            shape,
            layers: Vec::new(),
            capacity: 0,
            tokens: Vec::new(),
        }
    }

    /// Tokens held.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// How many of the first tokens of `prompt` are held as they are.
    pub(super) fn common_prefix(&self, prompt: &[TokenId]) -> usize {
        let pairs = self.tokens.iter().zip(prompt);
        pairs.take_while(|(held, wanted)| held == wanted).count()
    }

    /// Forgets all but the first `keep` tokens. The memory stays.
    pub(super) fn truncate(&mut self, keep: usize) {
        self.tokens.truncate(keep);
    }

    /// Makes room for `more` tokens and enters them; their keys and values must be written next.
    pub(super) fn extend(&mut self, more: &[TokenId]) -> Result<(), Exception> {
        let needed = i32::try_from(self.tokens.len() + more.len()).unwrap_or(i32::MAX);
        if needed > self.capacity {
            let capacity = self.shape.grown(self.capacity, needed);
            self.grow(capacity)?;
        }
        self.tokens.extend_from_slice(more);
        Ok(())
    }

    fn grow(&mut self, capacity: i32) -> Result<(), Exception> {
        let Shape {
            layers,
            kv_heads,
            head_dim,
            dtype,
            ..
        } = self.shape;
        let added = [2 * kv_heads, capacity - self.capacity, head_dim];
        for index in 0..layers {
            let room = ops::zeros_dtype(&added, dtype)?;
            match self.layers.get_mut(index) {
                Some(layer) => *layer = ops::concatenate(&[&*layer, &room], 1)?,
                None => self.layers.push(room),
            }
        }
        self.capacity = capacity;
        Ok(())
    }

    /// Writes one layer's new keys and values, of shape [2 × kv heads, tokens, head dim], behind the
    /// first `past` tokens; returns that layer's keys and values so far, each [1, kv heads, tokens,
    /// head dim].
    ///
    /// The array is handed on rather than shared, so MLX writes in place: no copy of the cache.
    pub(super) fn write(
        &mut self,
        layer: usize,
        past: i32,
        new: &Array,
    ) -> Result<(Array, Array), Exception> {
        let Some(held) = self.layers.get_mut(layer) else {
            return Err(Exception::custom("a layer without a cache"));
        };
        let end = past + new.dim(1);
        held.try_index_mut((.., past..end, ..), new)
            .map_err(|e| Exception::custom(e.to_string()))?;
        let heads = self.shape.kv_heads;
        let keys = held.try_index((..heads, ..end, ..))?.expand_dims(0)?;
        let values = held.try_index((heads.., ..end, ..))?.expand_dims(0)?;
        Ok((keys, values))
    }

    /// The arrays to evaluate after a forward pass.
    pub(super) fn arrays(&self) -> &[Array] {
        &self.layers
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::indexing::IndexOp;

    use super::*;

    fn shape() -> Shape {
        Shape {
            layers: 2,
            kv_heads: 2,
            head_dim: 4,
            dtype: Dtype::Float32,
            context_tokens: 1000,
        }
    }

    #[test]
    fn room_grows_in_blocks_by_an_eighth_and_never_past_the_context() {
        let shape = shape();
        assert_eq!(shape.grown(0, 1), 256);
        assert_eq!(shape.grown(256, 257), 512);
        assert_eq!(shape.grown(768, 769), 1000);
        let long = Shape {
            context_tokens: 100_000,
            ..shape
        };
        assert_eq!(long.grown(25_600, 25_601), 28_928);
        assert_eq!(shape.bytes_per_token(), 2 * 2 * 2 * 4 * 4);
    }

    #[test]
    fn what_was_written_is_read_back_after_the_cache_has_grown_and_was_cut() {
        let mut cache = Cache::new(shape());
        let filled = |value: f32, tokens: i32| {
            ops::multiply(
                ops::ones::<f32>(&[4, tokens, 4]).unwrap(),
                Array::from_f32(value),
            )
            .unwrap()
        };
        cache.extend(&[7; 250]).unwrap();
        cache.write(0, 0, &filled(1.0, 250)).unwrap();
        cache.extend(&[8; 10]).unwrap();
        let (keys, values) = cache.write(0, 250, &filled(2.0, 10)).unwrap();
        assert_eq!(keys.shape(), [1, 2, 260, 4]);
        for (token, value) in [(0, 1.0), (249, 1.0), (250, 2.0), (259, 2.0)] {
            for array in [&keys, &values] {
                assert_eq!(array.index((0, 1, token, 3)).item_exact::<f32>(), value);
            }
        }
        let mut prompt = vec![7; 250];
        prompt.push(9);
        assert_eq!(cache.common_prefix(&prompt), 250);
        cache.truncate(250);
        cache.extend(&[9]).unwrap();
        let (keys, _) = cache.write(0, 250, &filled(3.0, 1)).unwrap();
        assert_eq!(keys.shape(), [1, 2, 251, 4]);
        assert_eq!(keys.index((0, 0, 250, 0)).item_exact::<f32>(), 3.0);
        assert_eq!(cache.len(), 251);
    }
}
