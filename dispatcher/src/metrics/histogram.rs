//! A histogram of fixed buckets over atomics: recording takes no lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets in whole units, of which `per_unit` make one unit of the exposed metric.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: &'static [u64],
    per_unit: f64,
    /// One more than there are bounds: the last has none.
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

/// One consistent enough picture of a histogram: its count is the sum of its buckets.
#[derive(Debug, PartialEq)]
pub(crate) struct Snapshot {
    pub(crate) sum: f64,
    pub(crate) count: u64,
    /// Upper bounds and counts, not cumulative.
    pub(crate) buckets: Vec<(f64, u64)>,
}

impl Histogram {
    /// Of durations; `bounds` in microseconds, shown in seconds.
    pub(crate) fn of_durations(bounds: &'static [u64]) -> Self {
        Self::new(bounds, 1e6)
    }

    /// Of whole numbers.
    pub(crate) fn of_counts(bounds: &'static [u64]) -> Self {
        Self::new(bounds, 1.0)
    }

    fn new(bounds: &'static [u64], per_unit: f64) -> Self {
        Self {
            bounds,
            per_unit,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    pub(crate) fn observe_duration(&self, duration: Duration) {
        self.observe(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
    }

    pub(crate) fn observe(&self, value: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let bounds = self
            .bounds
            .iter()
            .map(|&bound| bound as f64 / self.per_unit)
            .chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds
            .zip(&self.counts)
            .map(|(bound, count)| (bound, count.load(Ordering::Relaxed)))
            .collect();
        Snapshot {
            sum: self.sum.load(Ordering::Relaxed) as f64 / self.per_unit,
            count: buckets.iter().map(|(_, count)| count).sum(),
            buckets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_on_a_bound_is_in_the_bucket_below_it() {
        let histogram = Histogram::of_durations(&[1_000, 2_000_000]);
        for micros in [0, 1_000, 1_001, 2_000_000, 2_000_001, u64::MAX / 4] {
            histogram.observe_duration(Duration::from_micros(micros));
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.buckets, [(0.001, 2), (2.0, 2), (f64::INFINITY, 2)]);
        assert_eq!(snapshot.count, 6);
    }
}
