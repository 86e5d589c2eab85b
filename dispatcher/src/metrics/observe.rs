//! What links see goes to the metrics.

use std::time::Duration;

use proto::InstanceId;

use super::Metrics;
use crate::link::LinkObserver;

impl LinkObserver for Metrics {
    fn step(&self, instance: InstanceId, batch: u32, prefill_tokens: u32, duration: Duration) {
        Self::step(self, instance, batch, prefill_tokens, duration);
    }

    fn gap(&self, gap: Duration) {
        Self::gap(self, gap);
    }

    // The same number reaches the driver, which counts it.
    fn stale(&self, _: u64) {}
}
