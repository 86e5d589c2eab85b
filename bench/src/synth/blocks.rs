//! Random contents of quantised tensors: zero-mean weights of a size that a forward pass survives.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::random::Random;

/// Different bytes of one kind; longer tensors repeat them. Above any cache that weights could stay in.
const POOL_BYTES: usize = 64 << 20;

/// How a tensor's values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    F32,
    Q4K,
    Q6K,
    Q8_0,
}

impl Kind {
    /// ggml's number for it.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q6K => 14,
        }
    }

    pub(super) fn block_values(self) -> u64 {
        match self {
            Self::F32 => 1,
            Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    pub(super) fn block_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }
}

/// The contents of each kind, made when it is first written.
pub(super) struct Pool {
    seed: u64,
    made: BTreeMap<Kind, Vec<u8>>,
}

impl Pool {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            made: BTreeMap::new(),
        }
    }

    /// Writes `bytes` of a tensor's contents.
    pub(super) fn write(
        &mut self,
        kind: Kind,
        name: &str,
        bytes: u64,
        out: &mut impl Write,
    ) -> io::Result<()> {
        if kind == Kind::F32 {
            // Norms are ones, biases nothing.
            let value = if name.contains("norm") { 1.0_f32 } else { 0.0 };
            for _ in 0..bytes / 4 {
                out.write_all(&value.to_le_bytes())?;
            }
            return Ok(());
        }
        let seed = self.seed;
        let pool = self.made.entry(kind).or_insert_with(|| make(kind, seed));
        let mut left = bytes;
        while left > 0 {
            let part = usize::try_from(left).unwrap_or(usize::MAX).min(pool.len());
            out.write_all(&pool[..part])?;
            left -= part as u64;
        }
        Ok(())
    }
}

fn make(kind: Kind, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed, &format!("{kind:?}"));
    let block = usize::try_from(kind.block_bytes()).unwrap_or(1);
    let mut pool = vec![0; POOL_BYTES / block * block];
    for eight in pool.chunks_mut(8) {
        let length = eight.len();
        eight.copy_from_slice(&random.bits().to_le_bytes()[..length]);
    }
    for block in pool.chunks_exact_mut(block) {
        let mantissa = u16::from_le_bytes([block[0], block[1]]) & 0x3ff;
        let scale = half(mantissa);
        match kind {
            Kind::F32 => {}
            Kind::Q8_0 => block[..2].copy_from_slice(&scale),
            Kind::Q6K => {
                block[192..208].fill(8);
                block[208..].copy_from_slice(&scale);
            }
            Kind::Q4K => {
                // Each sub-block's scale and minimum are 32, and the minimums' unit is 7.5 times the
                // scales': w = 32·d·(q − 7.5).
                block[..2].copy_from_slice(&scale);
                block[2..4].copy_from_slice(&seven_and_a_half(mantissa));
                block[4..12].fill(160);
                block[12..16].fill(0);
            }
        }
    }
    pool
}

/// The 16-bit float (1 + mantissa/1024) × 2⁻¹³: weights of a few hundredths once multiplied out.
fn half(mantissa: u16) -> [u8; 2] {
    ((2 << 10) | mantissa).to_le_bytes()
}

/// 7.5 times `half(mantissa)`, rounded to nearest.
fn seven_and_a_half(mantissa: u16) -> [u8; 2] {
    // In units of 2⁻²³; from 8192 on it takes one more power of two.
    let value = (u32::from(mantissa) + 1024) * 15 / 2;
    let (exponent, divisor) = if value < 8192 { (3, 4) } else { (4, 8) };
    let rounded = (value + divisor / 2) / divisor;
    // Rounding up to 2048 carries into the exponent, as the bits do by themselves.
    let bits = (exponent << 10) + rounded;
    u16::try_from(bits).unwrap_or(u16::MAX).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(bytes: [u8; 2]) -> f64 {
        let bits = u16::from_le_bytes(bytes);
        let (exponent, mantissa) = (i32::from(bits >> 10) - 15, f64::from(bits & 0x3ff));
        (1.0 + mantissa / 1024.0) * 2.0_f64.powi(exponent)
    }

    #[test]
    fn the_minimum_is_seven_and_a_half_scales_whatever_the_mantissa() {
        for mantissa in 0..1024 {
            let scale = value(half(mantissa));
            assert!((1e-4..3e-4).contains(&scale), "{scale}");
            let ratio = value(seven_and_a_half(mantissa)) / scale;
            assert!((ratio - 7.5).abs() < 0.01, "{mantissa}: {ratio}");
        }
    }

    #[test]
    fn the_mean_weight_of_a_block_is_nearly_nothing() {
        let pool = make(Kind::Q4K, 3);
        let mut sum = 0_i64;
        let (mut low, mut high) = (0, 0);
        for block in pool.chunks_exact(144).take(5000) {
            for &two in &block[16..] {
                low += i64::from(two & 15);
                high += i64::from(two >> 4);
                sum += 2;
            }
        }
        let mean = (low + high) as f64 / sum as f64;
        assert!((mean - 7.5).abs() < 0.05, "{mean}");
    }
}
