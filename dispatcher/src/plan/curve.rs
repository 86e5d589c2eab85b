//! How long a step takes at each batch size: measured at a few and drawn between them, or assumed.

use serde::{Deserialize, Serialize};

use crate::bus::{Processor, Weights};

/// Seconds of a step by batch size, for one instance that has its memory and cores to itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Batch size and seconds, in the order of the batch.
    points: Vec<(u32, f64)>,
    /// Seconds that one prompt token takes.
    prefill_s_per_token: f64,
    /// Of K instances side by side, beyond K times as long each: 1.1 is a tenth longer.
    crowds: Vec<(u32, f64)>,
    measured: bool,
}

impl Curve {
    /// From steps that were timed. `None`: there is no usable point.
    #[must_use]
    pub fn measured(
        mut points: Vec<(u32, f64)>,
        prefill_s_per_token: Option<f64>,
        mut crowds: Vec<(u32, f64)>,
    ) -> Option<Self> {
        let usable = |value: f64| value.is_finite() && value > 0.0;
        points.retain(|(batch, seconds)| *batch > 0 && usable(*seconds));
        points.sort_by_key(|(batch, _)| *batch);
        points.dedup_by_key(|(batch, _)| *batch);
        crowds.retain(|(instances, factor)| *instances > 1 && usable(*factor));
        crowds.sort_by_key(|(instances, _)| *instances);
        let (last_batch, last_s) = *points.last()?;
        Some(Self {
            prefill_s_per_token: prefill_s_per_token
                .filter(|seconds| usable(*seconds))
                // A prompt token costs about what a row of the largest batch does.
                .unwrap_or(last_s / f64::from(last_batch)),
            points,
            crowds,
            measured: true,
        })
    }

    /// Assumed from the bytes of a step and the bandwidth (GB/s).
    #[must_use]
    pub fn assumed(weights: &Weights, gb_per_s: f64, processor: Processor) -> Self {
        let (share, further) = (processor.bus_share(), processor.further_row());
        let seconds = |rows: u32| {
            let bus = weights.bytes_per_step(f64::from(rows)) / (gb_per_s * 1e9 * share);
            let one = weights.bytes_per_step(1.0) / (gb_per_s * 1e9 * share);
            bus + one * further * f64::from(rows - 1)
        };
        let one = seconds(1);
        Self {
            points: [1, 2, 4, 8, 16, 32, 64]
                .map(|rows| (rows, seconds(rows)))
                .to_vec(),
            prefill_s_per_token: one * further,
            crowds: Vec::new(),
            measured: false,
        }
    }

    /// Whether steps were timed on this machine.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.measured
    }

    /// Batch sizes that were timed, or assumed.
    #[must_use]
    pub fn points(&self) -> &[(u32, f64)] {
        &self.points
    }

    #[must_use]
    pub fn prefill_s_per_token(&self) -> f64 {
        self.prefill_s_per_token
    }

    /// Seconds of a step of `batch` rows: on the line between the neighbours that are known, and beyond
    /// the last on the line of the last two. With one point, a further row costs what a row costs.
    #[must_use]
    pub fn step_s(&self, batch: u32) -> f64 {
        let rows = f64::from(batch.max(1));
        let Some(&(first, first_s)) = self.points.first() else {
            return 0.0;
        };
        if batch <= first {
            // Fewer rows read the same weights: no less time is assumed.
            return first_s;
        }
        let index = self.points.partition_point(|(known, _)| *known < batch);
        let (low, high) = match (self.points.get(index), self.points.len()) {
            (Some(high), _) => (self.points[index - 1], *high),
            (None, 1) => ((0, 0.0), self.points[0]),
            (None, length) => (self.points[length - 2], self.points[length - 1]),
        };
        let slope = (high.1 - low.1) / (f64::from(high.0) - f64::from(low.0));
        // Noise may make a larger batch look faster; it is not drawn on as such.
        let from = if batch > high.0 { high } else { low };
        from.1 + slope.max(0.0) * (rows - f64::from(from.0))
    }

    /// Seconds of a step of each of `instances` that share one memory and one set of cores: they get
    /// equal parts of both.
    #[must_use]
    pub fn shared_step_s(&self, instances: u32, batch: u32) -> f64 {
        let crowd = self
            .crowds
            .iter()
            .rev()
            .find(|(known, _)| *known <= instances)
            .map_or(1.0, |(_, factor)| *factor);
        f64::from(instances.max(1)) * self.step_s(batch) * crowd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_two_timed_batches_lies_the_line_and_beyond_the_last_its_end() {
        let curve = Curve::measured(vec![(8, 0.020), (1, 0.010), (4, 0.016)], None, Vec::new());
        let curve = curve.unwrap();
        let near = |batch: u32, expected: f64| {
            let got = curve.step_s(batch);
            assert!((got - expected).abs() < 1e-9, "{batch}: {got} {expected}");
        };
        near(1, 0.010);
        near(2, 0.012);
        near(4, 0.016);
        near(6, 0.018);
        near(8, 0.020);
        near(16, 0.028);
        assert!((curve.prefill_s_per_token() - 0.0025).abs() < 1e-9);
    }

    #[test]
    fn a_single_point_and_noise_give_no_nonsense() {
        let one = Curve::measured(vec![(4, 0.016)], None, Vec::new()).unwrap();
        assert_eq!(one.step_s(1), 0.016);
        assert_eq!(one.step_s(8), 0.032);
        let noisy = Curve::measured(vec![(1, 0.010), (2, 0.008)], None, Vec::new()).unwrap();
        assert_eq!(noisy.step_s(64), 0.008);
        for useless in [vec![], vec![(0, 1.0)], vec![(1, 0.0)], vec![(1, f64::NAN)]] {
            assert_eq!(Curve::measured(useless, None, Vec::new()), None);
        }
    }

    #[test]
    fn instances_on_one_bus_take_as_many_times_as_long() {
        let plain = Curve::measured(vec![(1, 0.010)], None, Vec::new()).unwrap();
        assert!((plain.shared_step_s(3, 1) - 0.030).abs() < 1e-12);
        let crowded = Curve::measured(vec![(1, 0.010)], None, vec![(2, 1.2)]).unwrap();
        assert!((crowded.shared_step_s(1, 1) - 0.010).abs() < 1e-12);
        assert!((crowded.shared_step_s(2, 1) - 0.024).abs() < 1e-12);
        assert!((crowded.shared_step_s(3, 1) - 0.036).abs() < 1e-12);
    }
}
