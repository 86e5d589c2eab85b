//! Passes over a whole vocabulary, written in lanes so that the compiler turns them into SIMD.
//!
//! Every function adds and compares in a fixed order, whatever the machine's vector width: the same
//! logits give the same token everywhere.

/// Lanes of one pass: four SSE or one AVX-512 register. With more the compiler gives up.
const LANES: usize = 16;
/// Values that [`argmax`] looks through at a time: 16 KiB, half of a first-level cache.
const SEARCHED: usize = 4096;
/// Values of one block of [`Weights`].
pub(super) const BLOCK: usize = 256;

/// Logits that can't be sampled from: not a number, positive infinity, or nothing above −∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unusable;

/// The largest value.
pub(super) fn maximum(values: &[f32]) -> Result<f32, Unusable> {
    match largest(values) {
        Some(top) if top > f32::NEG_INFINITY => Ok(top),
        _ => Err(Unusable),
    }
}

/// The largest value, −∞ where there is nothing larger; `None` where one is not a number or +∞.
fn largest(values: &[f32]) -> Option<f32> {
    let (top, usable) = super::wide::scan(values);
    usable.then_some(top)
}

/// The largest value, and whether none is +∞ or not a number.
#[inline(always)]
pub(super) fn scan(values: &[f32]) -> (f32, bool) {
    let mut best = [f32::NEG_INFINITY; LANES];
    // A comparison with NaN is false, so NaN never wins: it is looked for apart, in the same pass.
    let mut bad = [0_u32; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for ((best, bad), &x) in best.iter_mut().zip(&mut bad).zip(chunk) {
            *best = if x > *best { x } else { *best };
            *bad |= u32::from(x < f32::INFINITY) ^ 1;
        }
    }
    let mut top = f32::NEG_INFINITY;
    let mut any_bad = bad.iter().fold(0, |all, bad| all | bad);
    for &x in best.iter().chain(rest) {
        top = if x > top { x } else { top };
        any_bad |= u32::from(x < f32::INFINITY) ^ 1;
    }
    (top, any_bad == 0)
}

/// The index of the largest value, the lowest of equal ones. Memory is read once: the block that
/// holds the largest value is still in the first cache when it is searched.
pub(super) fn argmax(values: &[f32]) -> Result<usize, Unusable> {
    let mut best = f32::NEG_INFINITY;
    let mut holder = 0;
    let mut usable = false;
    for (n, block) in values.chunks(SEARCHED).enumerate() {
        match largest(block) {
            Some(top) if top > best => (best, holder, usable) = (top, n, true),
            Some(_) => {}
            None => return Err(Unusable),
        }
    }
    if !usable {
        return Err(Unusable);
    }
    let start = holder * SEARCHED;
    let block = values.get(start..).ok_or(Unusable)?;
    let at = block.iter().position(|&x| x == best).ok_or(Unusable)?;
    Ok(start + at)
}

/// e^x for x ≤ 0, within 3e-7 of its value; 0 below −87, where an f32 would be subnormal.
///
/// Cephes' `expf`: x = n·ln 2 + r, a polynomial for e^r, and n put into the exponent's bits. The
/// rounding is done by adding 1.5·2²³, which every vector unit can do; `floor` needs SSE4.1.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_2e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + c;
    }
    let e_r = p * r * r + r + 1.0;
    let power = shifted
        .to_bits()
        .wrapping_sub(MAGIC.to_bits())
        .wrapping_add(127)
        << 23;
    let result = e_r * f32::from_bits(power);
    // A mask and not a choice: the compiler makes a branch of a choice, and no vectors.
    let kept = 0_u32.wrapping_sub(u32::from(x > -87.0));
    f32::from_bits(result.to_bits() & kept)
}

/// Unnormalised probabilities of a whole vocabulary, with the sum of each block of it.
#[derive(Debug, Default)]
pub(super) struct Weights {
    pub(super) values: Vec<f32>,
    blocks: Vec<f64>,
    pub(super) total: f64,
}

impl Weights {
    /// e^((x − top) × scale) of each value.
    pub(super) fn fill(&mut self, logits: &[f32], top: f32, scale: f32) {
        self.values.resize(logits.len(), 0.0);
        for (into, &x) in self.values.iter_mut().zip(logits) {
            *into = exp((x - top) * scale);
        }
        self.blocks.clear();
        self.blocks.extend(self.values.chunks(BLOCK).map(sum));
        self.total = self.blocks.iter().sum();
    }

    /// The index at which the running sum, in the order of the vocabulary, passes `target`.
    pub(super) fn pick(&self, target: f64) -> Option<usize> {
        let mut below = 0.0;
        let mut found = None;
        for (n, &mass) in self.blocks.iter().enumerate() {
            if mass > 0.0 {
                found = Some((n, below));
                if below + mass > target {
                    break;
                }
            }
            below += mass;
        }
        let (n, before) = found?;
        let start = n * BLOCK;
        let block = self
            .values
            .get(start..(start + BLOCK).min(self.values.len()))?;
        super::select::walk(block.iter().copied(), target - before).map(|at| start + at)
    }
}

/// The sum in lanes, then over the lanes in order.
fn sum(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for lane in 0..8 {
            lanes[lane] += f64::from(chunk[lane]);
        }
    }
    let tail: f64 = rest.iter().map(|&x| f64::from(x)).sum();
    lanes.iter().sum::<f64>() + tail
}

/// ln Σ e^x, `top` being the largest x.
pub(super) fn log_sum_exp(values: &[f32], top: f32) -> f64 {
    let mut total = 0.0;
    let mut scratch = [0.0_f32; BLOCK];
    for block in values.chunks(BLOCK) {
        for (into, &x) in scratch.iter_mut().zip(block) {
            *into = exp(x - top);
        }
        total += sum(&scratch[..block.len()]);
    }
    f64::from(top) + total.ln()
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, LANES, SEARCHED, Unusable, Weights, argmax, exp, log_sum_exp, maximum};
    use proptest::prelude::*;

    #[test]
    fn the_exponential_is_within_three_parts_in_ten_million_and_exact_at_zero() {
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        let mut x = 0.0_f32;
        while x > -87.0 {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "e^{x}: relative error {error}");
            x -= 0.003;
        }
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn one_bad_number_anywhere_is_seen() {
        for length in [1, LANES - 1, LANES, LANES + 1, 1000, 2 * SEARCHED + 5] {
            for at in (0..length).step_by(length.div_ceil(1000)) {
                for bad in [f32::NAN, f32::INFINITY, -f32::NAN] {
                    let mut values = vec![1.0; length];
                    values[at] = bad;
                    assert_eq!(argmax(&values), Err(Unusable), "{bad} at {at} of {length}");
                }
            }
        }
        assert_eq!(maximum(&[]), Err(Unusable));
        assert_eq!(maximum(&[f32::NEG_INFINITY; 70]), Err(Unusable));
    }

    proptest! {
        #[test]
        fn argmax_is_the_lowest_index_of_the_largest(
            values in prop_oneof![
                proptest::collection::vec((-4_i8..4).prop_map(f32::from), 1..300),
                proptest::collection::vec((-99_i8..99).prop_map(f32::from), 1..3 * SEARCHED),
            ]
        ) {
            let mut best = 0;
            for (i, &x) in values.iter().enumerate() {
                if x > values[best] {
                    best = i;
                }
            }
            prop_assert_eq!(argmax(&values), Ok(best));
        }

        #[test]
        fn picking_walks_the_vocabulary_in_its_order(
            logits in proptest::collection::vec(-30.0_f32..0.0, 1..3 * BLOCK),
            u in 0.0_f64..1.0,
        ) {
            let mut weights = Weights::default();
            weights.fill(&logits, 0.0, 1.0);
            let target = u * weights.total;
            let picked = weights.pick(target).expect("weights are positive");
            let below: f64 = weights.values[..picked].iter().map(|&x| f64::from(x)).sum();
            let through = below + f64::from(weights.values[picked]);
            prop_assert!(below <= target + 1e-9 && target < through + 1e-9);
        }

        #[test]
        fn log_sum_exp_is_the_plain_one(
            logits in proptest::collection::vec(-50.0_f32..50.0, 1..700)
        ) {
            let top = maximum(&logits).expect("finite");
            let plain: f64 = logits.iter().map(|&x| (f64::from(x) - f64::from(top)).exp()).sum();
            let plain = f64::from(top) + plain.ln();
            prop_assert!((log_sum_exp(&logits, top) - plain).abs() < 1e-5);
        }
    }
}
