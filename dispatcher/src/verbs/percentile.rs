//! Percentiles of a histogram in the text of `/metrics`.

/// Below this many samples a percentile says more about chance than about the server.
const MEDIAN_SAMPLES_MIN: u64 = 8;
const P90_SAMPLES_MIN: u64 = 64;
const P99_SAMPLES_MIN: u64 = 662;

/// One histogram, read back.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Histogram {
    /// Upper bound and how many samples are at or below it.
    buckets: Vec<(f64, u64)>,
}

impl Histogram {
    /// The sum of all series of `name`.
    pub(super) fn parse(metrics: &str, name: &str) -> Self {
        let mut buckets: Vec<(f64, u64)> = Vec::new();
        let prefix = format!("{name}_bucket{{");
        for line in metrics.lines() {
            let Some(rest) = line.strip_prefix(&prefix) else {
                continue;
            };
            let Some((labels, value)) = rest.split_once("} ") else {
                continue;
            };
            let bound = labels.split_once("le=\"").and_then(|(_, rest)| {
                let (bound, _) = rest.split_once('"')?;
                bound.replace("+Inf", "inf").parse::<f64>().ok()
            });
            // An exemplar may follow the value.
            let value = value.split(' ').next().and_then(|text| text.parse().ok());
            let (Some(bound), Some(count)) = (bound, value) else {
                continue;
            };
            match buckets.iter_mut().find(|(other, _)| *other == bound) {
                Some((_, sum)) => *sum += count,
                None => buckets.push((bound, count)),
            }
        }
        Self { buckets }
    }

    pub(super) fn count(&self) -> u64 {
        self.buckets.last().map_or(0, |(_, count)| *count)
    }

    /// The value under which `permille` of 1,000 samples are, interpolated within its bucket; `None`:
    /// there are too few samples to say.
    pub(super) fn permille(&self, permille: u64) -> Option<f64> {
        let least = match permille {
            0..=500 => MEDIAN_SAMPLES_MIN,
            501..=900 => P90_SAMPLES_MIN,
            _ => P99_SAMPLES_MIN,
        };
        let count = self.count();
        if count < least {
            return None;
        }
        let rank = count as f64 * permille as f64 / 1000.0;
        let (mut from, mut below) = (0.0, 0);
        for (bound, upto) in &self.buckets {
            if *upto as f64 >= rank {
                // Beyond the last bound nothing more is known.
                if bound.is_infinite() {
                    return Some(from);
                }
                let inside = upto.saturating_sub(below).max(1);
                let share = (rank - below as f64) / inside as f64;
                return Some(from + (bound - from) * share.clamp(0.0, 1.0));
            }
            (from, below) = (*bound, *upto);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(counts: [u64; 3]) -> String {
        let [a, b, all] = counts;
        format!(
            "# HELP x y\nx_bucket{{model_name=\"m\",le=\"0.1\"}} {a}\nx_bucket{{model_name=\"m\",le=\"0.2\"}} {b}\n\
             x_bucket{{model_name=\"m\",le=\"+Inf\"}} {all}\nx_count{{model_name=\"m\"}} {all}\nxy_bucket{{le=\"1\"}} 9\n"
        )
    }

    #[test]
    fn a_percentile_lies_within_its_bucket() {
        let one = Histogram::parse(&text([100, 900, 1000]), "x");
        assert_eq!(one.count(), 1000);
        assert_eq!(one.permille(50), Some(0.05));
        let median = one.permille(500).unwrap();
        assert!((median - 0.15).abs() < 1e-9, "{median}");
        assert_eq!(one.permille(900), Some(0.2));
        // All that is known of the last tenth is that it took longer.
        assert_eq!(one.permille(990), Some(0.2));
    }

    #[test]
    fn too_few_samples_have_no_percentile() {
        let one = Histogram::parse(&text([1, 7, 7]), "x");
        assert_eq!(one.permille(500), None);
        let one = Histogram::parse(&text([1, 63, 63]), "x");
        assert!(one.permille(500).is_some());
        assert_eq!((one.permille(900), one.permille(990)), (None, None));
        assert_eq!(Histogram::parse("", "x").count(), 0);
    }
}
