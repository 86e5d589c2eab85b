//! Randomness as a function of (seed, token index): no state, so a resumed stream draws the same.

/// The golden ratio in 64 bits, the increment of splitmix64 (Steele, Lea, Flood 2014).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// splitmix64's finaliser: a bijection in which each input bit moves about half of the output bits.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in [0, 1) for the token `index` of the stream seeded with `seed`.
///
/// The seed is mixed first, so that neighbouring seeds are unrelated streams and not the same
/// stream shifted by one.
#[must_use]
pub fn uniform(seed: u64, index: u32) -> f64 {
    let stream = mix(seed.wrapping_add(GOLDEN));
    let step = u64::from(index).wrapping_add(1).wrapping_mul(GOLDEN);
    let bits = mix(mix(stream.wrapping_add(step)) ^ stream) >> 11;
    // 53 bits fit in an f64 exactly.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    let fraction = bits as f64 * (1.0 / 9_007_199_254_740_992.0);
    fraction
}

#[cfg(test)]
mod tests {
    use super::uniform;

    #[test]
    fn the_same_seed_and_index_give_the_same_number_for_ever() {
        // Written down: a change of these numbers changes every seeded stream of every user.
        let drawn: Vec<u64> = [(0, 0), (0, 1), (1, 0), (u64::MAX, u32::MAX)]
            .iter()
            .map(|&(seed, index)| uniform(seed, index).to_bits())
            .collect();
        assert_eq!(drawn, GOLDEN_BITS);
    }

    const GOLDEN_BITS: [u64; 4] = [
        0x3fe0_e364_ebc5_9307,
        0x3fcd_7c3c_c70c_7c48,
        0x3fe6_b901_ba37_e1b6,
        0x3fec_d988_6e37_b57d,
    ];

    #[test]
    fn the_numbers_fill_the_unit_interval_evenly_over_indices_and_over_seeds() {
        for by_seed in [false, true] {
            let mut bins = [0_u32; 64];
            let draws: u32 = 64_000;
            for n in 0..draws {
                let u = if by_seed {
                    uniform(u64::from(n), 7)
                } else {
                    uniform(7, n)
                };
                assert!((0.0..1.0).contains(&u));
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "below 64 by the line above"
                )]
                let bin = (u * 64.0) as usize;
                bins[bin] += 1;
            }
            let expected = f64::from(draws) / 64.0;
            let chi_squared: f64 = bins
                .iter()
                .map(|&n| (f64::from(n) - expected).powi(2) / expected)
                .sum();
            // 63 degrees of freedom: 120 is passed once in some 60,000 tries; the numbers are fixed.
            assert!(
                chi_squared < 120.0,
                "chi squared {chi_squared}, by seed: {by_seed}"
            );
        }
    }

    #[test]
    fn neighbouring_seeds_are_not_the_same_stream_shifted() {
        for shift in 1..100_u32 {
            let same = (0..100_u32)
                .filter(|&i| uniform(5, i + shift) == uniform(6, i))
                .count();
            assert_eq!(same, 0);
        }
    }
}
