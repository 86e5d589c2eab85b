//! Seeded randomness: the same seed gives the same run, on every machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A stream of random numbers with a name, so that two uses of one seed never share numbers.
#[derive(Debug)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// The stream `name` of `seed`.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        Self(ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()))
    }

    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in [0, 1).
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in 0..`bound`; 0 where `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product: a bias of bound / 2^64, which no run is long enough to see.
        let product = u128::from(self.0.next_u64()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or_default()
    }

    /// Uniform in `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below((high.max(low) - low).saturating_add(1))
    }

    /// An index into `length` things; 0 where there are none.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or_default()
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Gamma with `shape` and mean 1, by Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).
    pub fn gamma(&mut self, shape: f64) -> f64 {
        // Below 1 their method needs the boost: Gamma(a) = Gamma(a + 1) · U^(1/a).
        let (base, boost) = if shape < 1.0 {
            (shape + 1.0, (1.0 - self.unit()).powf(1.0 / shape))
        } else {
            (shape, 1.0)
        };
        let d = base - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v <= 0.0 {
                continue;
            }
            let u = 1.0 - self.unit();
            if u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v * boost / shape;
            }
        }
    }

    /// Shuffles in place, by Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.index(last + 1);
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_for_ever_and_names_part_streams() {
        let mut random = Random::new(7, "arrival");
        let first = random.bits();
        assert_eq!(first, Random::new(7, "arrival").bits());
        assert_ne!(first, Random::new(7, "prompt").bits());
        assert_ne!(first, Random::new(8, "arrival").bits());
    }

    #[test]
    fn gamma_has_the_mean_and_the_variance_of_its_shape() {
        for (shape, seed) in [(0.25, 1), (1.0, 2), (4.0, 3)] {
            let mut random = Random::new(seed, "gamma");
            let values: Vec<f64> = (0..200_000).map(|_| random.gamma(shape)).collect();
            let n = values.len() as f64;
            let mean = values.iter().sum::<f64>() / n;
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
            assert!(
                (mean - 1.0).abs() < 0.02,
                "shape {shape}, seed {seed}: mean {mean}"
            );
            assert!(
                (variance * shape - 1.0).abs() < 0.05,
                "shape {shape}, seed {seed}: variance {variance}"
            );
        }
    }

    #[test]
    fn bounds_are_kept() {
        let mut random = Random::new(1, "bounds");
        assert!((0..1_000).all(|_| (3..=5).contains(&random.within(3, 5))));
        assert_eq!(random.below(0), 0);
        assert_eq!(random.within(9, 2), 9);
    }
}
