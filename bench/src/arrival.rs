//! When requests are meant to be sent.

use crate::error::BenchError;
use crate::random::Random;

/// The process that requests arrive by.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Arrival {
    /// So many users, each of whom sends the next request when the last has ended. An overloaded
    /// server slows its own load down, which is why this says nothing of latency under load.
    Closed { concurrency: u32 },
    /// Evenly spaced.
    Constant { per_s: f64 },
    /// Independent arrivals: what many users who do not know of each other make.
    Poisson { per_s: f64 },
    /// Gamma distributed gaps. `burstiness` is the coefficient of variation of the gaps:
    /// 1 is Poisson, above it come bursts, below it regularity.
    Gamma { per_s: f64, burstiness: f64 },
    /// As the workload's trace says, `speed` times as fast.
    Trace { speed: f64 },
}

impl Arrival {
    /// Refuses rates that mean nothing.
    ///
    /// # Errors
    /// A rate, burstiness or concurrency that is not above 0.
    pub fn check(&self) -> Result<(), BenchError> {
        let fine = match *self {
            Self::Closed { concurrency } => concurrency > 0,
            Self::Constant { per_s } | Self::Poisson { per_s } => per_s > 0.0 && per_s.is_finite(),
            Self::Gamma { per_s, burstiness } => {
                per_s > 0.0 && per_s.is_finite() && burstiness > 0.0 && burstiness.is_finite()
            }
            Self::Trace { speed } => speed > 0.0 && speed.is_finite(),
        };
        fine.then_some(())
            .ok_or_else(|| BenchError::Usage(format!("{self:?} never sends a request")))
    }

    /// The intended starts of `count` requests, microseconds since the run's start, in order.
    /// None for a closed loop, where each start depends on an end, and for a trace, which has its own.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float to integer saturates, and no gap is negative"
    )]
    pub fn starts_us(&self, count: usize, seed: u64) -> Option<Vec<u64>> {
        let mut random = Random::new(seed, "arrival");
        let (per_s, mut gap): (f64, Box<dyn FnMut() -> f64>) = match *self {
            Self::Closed { .. } | Self::Trace { .. } => return None,
            Self::Constant { per_s } => (per_s, Box::new(|| 1.0)),
            Self::Poisson { per_s } => (per_s, Box::new(move || random.exponential())),
            Self::Gamma { per_s, burstiness } => {
                let shape = 1.0 / (burstiness * burstiness);
                (per_s, Box::new(move || random.gamma(shape)))
            }
        };
        let mut at_s = 0.0;
        let starts = (0..count).map(|_| {
            let start = (at_s * 1e6) as u64;
            at_s += gap() / per_s;
            start
        });
        Some(starts.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(arrival: Arrival, seed: u64) -> (f64, f64) {
        let starts = arrival.starts_us(100_001, seed).unwrap();
        let gaps: Vec<f64> = starts
            .windows(2)
            .map(|w| (w[1] - w[0]) as f64 / 1e6)
            .collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let deviation = (gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n).sqrt();
        (mean, deviation / mean)
    }

    #[test]
    fn each_process_has_its_rate_and_its_burstiness() {
        let seed = 11;
        for (arrival, variation) in [
            (Arrival::Constant { per_s: 50.0 }, 0.0),
            (Arrival::Poisson { per_s: 50.0 }, 1.0),
            (
                Arrival::Gamma {
                    per_s: 50.0,
                    burstiness: 2.0,
                },
                2.0,
            ),
            (
                Arrival::Gamma {
                    per_s: 50.0,
                    burstiness: 0.5,
                },
                0.5,
            ),
        ] {
            let (mean, measured) = gaps(arrival, seed);
            assert!(
                (mean * 50.0 - 1.0).abs() < 0.02,
                "seed {seed}: {arrival:?} has mean {mean}"
            );
            assert!(
                (measured - variation).abs() < 0.03,
                "seed {seed}: {arrival:?} varies by {measured}"
            );
        }
    }

    #[test]
    fn a_seed_gives_the_same_arrivals() {
        let poisson = Arrival::Poisson { per_s: 3.0 };
        assert_eq!(poisson.starts_us(50, 4), poisson.starts_us(50, 4));
        assert_ne!(poisson.starts_us(50, 4), poisson.starts_us(50, 5));
        assert_eq!(Arrival::Closed { concurrency: 2 }.starts_us(5, 1), None);
    }

    #[test]
    fn rates_that_never_send_are_refused() {
        assert!(Arrival::Poisson { per_s: 0.0 }.check().is_err());
        assert!(Arrival::Constant { per_s: f64::NAN }.check().is_err());
        assert!(Arrival::Closed { concurrency: 0 }.check().is_err());
        assert!(
            Arrival::Gamma {
                per_s: 1.0,
                burstiness: 1.5
            }
            .check()
            .is_ok()
        );
    }
}
