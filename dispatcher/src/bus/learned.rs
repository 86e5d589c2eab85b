//! What serving teaches: how long a step takes at each batch size, and how fast prompts are computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proto::InstanceId;
use serde::{Deserialize, Serialize};

use crate::link::LinkObserver;
use crate::metrics::Metrics;

/// Larger batches are not told apart.
const BATCH_MAX: usize = 256;

/// Counts steps by batch size. Cheap to clone; takes no lock.
#[derive(Clone, Debug)]
pub struct Learned(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Of steps that only decoded, by batch size.
    decode: Vec<Sum>,
    /// Of steps that only prefilled: tokens, and microseconds.
    prefill: Sum,
}

/// How many, and microseconds together.
#[derive(Debug, Default)]
struct Sum {
    count: AtomicU64,
    us: AtomicU64,
}

impl Sum {
    fn add(&self, count: u64, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.count.fetch_add(count, Ordering::Relaxed);
        self.us.fetch_add(us, Ordering::Relaxed);
    }

    fn read(&self) -> (u64, u64) {
        (
            self.count.load(Ordering::Relaxed),
            self.us.load(Ordering::Relaxed),
        )
    }
}

/// Durations of steps since the start of the dispatcher.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Of steps that decoded and did nothing else, by batch size.
    pub decode: Vec<BatchTime>,
    /// Prompt tokens computed in steps that did nothing else, and how long those took.
    pub prefill_tokens: u64,
    pub prefill_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchTime {
    pub batch: u32,
    pub steps: u64,
    /// Of all these steps together.
    pub total_us: u64,
}

impl StepTimes {
    /// Seconds of a step at exactly this batch size, where at least `steps_min` were seen.
    #[must_use]
    pub fn step_s(&self, batch: u32, steps_min: u64) -> Option<f64> {
        let one = self.decode.iter().find(|one| one.batch == batch)?;
        (one.steps >= steps_min.max(1)).then(|| one.total_us as f64 / one.steps as f64 / 1e6)
    }

    /// What came since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |batch: u32| {
            let mut all = before.decode.iter();
            all.find(|one| one.batch == batch)
                .map_or((0, 0), |one| (one.steps, one.total_us))
        };
        let decode = self.decode.iter().filter_map(|one| {
            let (steps, us) = earlier(one.batch);
            let steps = one.steps.saturating_sub(steps);
            (steps > 0).then(|| BatchTime {
                batch: one.batch,
                steps,
                total_us: one.total_us.saturating_sub(us),
            })
        });
        Self {
            decode: decode.collect(),
            prefill_tokens: self.prefill_tokens.saturating_sub(before.prefill_tokens),
            prefill_us: self.prefill_us.saturating_sub(before.prefill_us),
        }
    }
}

impl Default for Learned {
    fn default() -> Self {
        Self(Arc::new(Inner {
            decode: (0..=BATCH_MAX).map(|_| Sum::default()).collect(),
            prefill: Sum::default(),
        }))
    }
}

impl Learned {
    /// One step. Those that prefill beside decoding say nothing clear of either, and are left out.
    pub fn step(&self, batch: u32, prefill_tokens: u32, duration: Duration) {
        if batch == 0 {
            self.0.prefill.add(prefill_tokens.into(), duration);
        } else if prefill_tokens == 0
            && let Some(sum) = self.0.decode.get(batch as usize)
        {
            sum.add(1, duration);
        }
    }

    #[must_use]
    pub fn read(&self) -> StepTimes {
        let decode = (0_u32..).zip(&self.0.decode).filter_map(|(batch, sum)| {
            let (steps, total_us) = sum.read();
            (steps > 0).then_some(BatchTime {
                batch,
                steps,
                total_us,
            })
        });
        let (prefill_tokens, prefill_us) = self.0.prefill.read();
        StepTimes {
            decode: decode.collect(),
            prefill_tokens,
            prefill_us,
        }
    }
}

/// What links see goes to the metrics, and steps are learnt from.
#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) metrics: Metrics,
    pub(crate) learned: Learned,
}

impl LinkObserver for Observed {
    fn step(&self, instance: InstanceId, batch: u32, prefill_tokens: u32, duration: Duration) {
        self.learned.step(batch, prefill_tokens, duration);
        LinkObserver::step(&self.metrics, instance, batch, prefill_tokens, duration);
    }

    fn gap(&self, gap: Duration) {
        LinkObserver::gap(&self.metrics, gap);
    }

    fn stale(&self, count: u64) {
        LinkObserver::stale(&self.metrics, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_apart_by_what_they_did() {
        let learned = Learned::default();
        let ms = Duration::from_millis;
        learned.step(4, 0, ms(10));
        learned.step(4, 0, ms(12));
        learned.step(4, 16, ms(500));
        learned.step(0, 64, ms(32));
        learned.step(100_000, 0, ms(1));
        let times = learned.read();
        assert_eq!(times.step_s(4, 2), Some(0.011));
        assert_eq!(times.step_s(4, 3), None, "too few to be told");
        assert_eq!(times.step_s(5, 1), None);
        assert_eq!((times.prefill_tokens, times.prefill_us), (64, 32_000));
        assert_eq!(times.decode.len(), 1, "{times:?}");
    }

    #[test]
    fn what_came_between_two_looks_is_their_difference() {
        let learned = Learned::default();
        learned.step(1, 0, Duration::from_millis(100));
        learned.step(2, 0, Duration::from_millis(7));
        let before = learned.read();
        learned.step(1, 0, Duration::from_millis(6));
        let since = learned.read().since(&before);
        assert_eq!(since.step_s(1, 1), Some(0.006));
        assert_eq!(since.step_s(2, 1), None);
    }
}
