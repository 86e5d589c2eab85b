//! Percentiles, intervals and the steady part of a run, with rules for what too few samples cannot show.

use crate::random::Random;

/// Bootstrap draws: the ends of a 95 % interval move by under 2 % of its width from seed to seed.
pub const RESAMPLES: usize = 10_000;

/// A quantile, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantile {
    Value(f64),
    /// There are `n` samples and `needed` would have to be.
    TooFew {
        n: usize,
        needed: usize,
    },
}

impl std::fmt::Display for Quantile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Value(value) => out.write_str(&figure(*value)),
            Self::TooFew { n, needed } => write!(out, "n too small ({n} < {needed})"),
        }
    }
}

/// A figure with four significant digits, without an exponent.
#[must_use]
pub fn figure(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 1_000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Samples that quantile `q` needs: 64 for p90, 662 for p99, 6,636 for p99.9, about 6.6 beyond the quantile elsewhere.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer saturates"
)]
pub fn samples_needed(q: f64) -> usize {
    let tail = (1.0 - q).min(q);
    let close = |other: f64| (tail - other).abs() < 1e-9;
    if q == 0.5 {
        1
    } else if close(0.1) {
        64
    } else if close(0.01) {
        662
    } else if close(0.001) {
        6_636
    } else {
        (6.636 / tail).ceil() as usize
    }
}

/// The quantile `q` by linear interpolation between order statistics, if there are samples enough for it.
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> Quantile {
    let (n, needed) = (values.len(), samples_needed(q));
    if n < needed {
        return Quantile::TooFew { n, needed };
    }
    Quantile::Value(interpolated(values, q).unwrap_or(f64::NAN))
}

/// The quantile `q` by linear interpolation between order statistics, however few the samples. The
/// study printed its p99 from 20; kept for `study-v1`, where it is marked.
#[must_use]
pub fn interpolated(values: &[f64], q: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    of_sorted(&sorted, q)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the position lies between 0 and the number of samples"
)]
fn of_sorted(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let position = q.clamp(0.0, 1.0) * last as f64;
    let below = position.floor();
    let index = below as usize;
    let low = *sorted.get(index)?;
    let high = sorted.get(index + 1).copied().unwrap_or(low);
    Some(low + (high - low) * (position - below))
}

/// The quantile `q` of values that count for their weights: the least value that the values up to it, together,
/// weigh `q` of all. With equal weights it lies within one order statistic of [`interpolated`].
#[must_use]
pub fn weighted(values: &[(f64, f64)], q: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all: f64 = sorted.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    let reached = sorted.iter().find(|(_, weight)| {
        sum += weight;
        sum >= q * all
    });
    reached.or(sorted.last()).map(|(value, _)| *value)
}

#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    interpolated(values, 0.5)
}

#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Sample standard deviation (n − 1).
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    (values.len() > 1).then(|| {
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        (squares / (values.len() - 1) as f64).sqrt()
    })
}

/// An estimate with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Interval {
    pub estimate: f64,
    pub low: f64,
    pub high: f64,
}

impl std::fmt::Display for Interval {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            estimate,
            low,
            high,
        } = self;
        write!(
            out,
            "{} [{}, {}]",
            figure(*estimate),
            figure(*low),
            figure(*high)
        )
    }
}

/// What is taken of a set of values.
pub type Statistic = fn(&[f64]) -> Option<f64>;

/// Percentile bootstrap of `of(b) / of(a)`, both sets drawn independently. `None` where either is empty or its statistic 0.
#[must_use]
pub fn ratio_interval(a: &[f64], b: &[f64], of: Statistic, seed: u64) -> Option<Interval> {
    let estimate = ratio(of(b)?, of(a)?)?;
    let mut random = Random::new(seed, "bootstrap");
    let (mut drawn_a, mut drawn_b) = (vec![0.0; a.len()], vec![0.0; b.len()]);
    let ratios = (0..RESAMPLES).filter_map(|_| {
        draw(a, &mut drawn_a, &mut random);
        draw(b, &mut drawn_b, &mut random);
        ratio(of(&drawn_b)?, of(&drawn_a)?)
    });
    interval(estimate, ratios.collect())
}

/// Percentile bootstrap of the ratio where run i of `a` and run i of `b` were made side by side: pairs are
/// drawn, so that what troubled both cancels out.
#[must_use]
pub fn paired_ratio_interval(a: &[f64], b: &[f64], of: Statistic, seed: u64) -> Option<Interval> {
    if a.len() != b.len() {
        return None;
    }
    let estimate = ratio(of(b)?, of(a)?)?;
    let mut random = Random::new(seed, "bootstrap");
    let (mut drawn_a, mut drawn_b) = (vec![0.0; a.len()], vec![0.0; b.len()]);
    let ratios = (0..RESAMPLES).filter_map(|_| {
        for place in 0..a.len() {
            let from = random.index(a.len());
            drawn_a[place] = a[from];
            drawn_b[place] = b[from];
        }
        ratio(of(&drawn_b)?, of(&drawn_a)?)
    });
    interval(estimate, ratios.collect())
}

/// Percentile bootstrap of one set's statistic.
#[must_use]
pub fn bootstrap_interval(values: &[f64], of: Statistic, seed: u64) -> Option<Interval> {
    let estimate = of(values)?;
    let mut random = Random::new(seed, "bootstrap");
    let mut drawn = vec![0.0; values.len()];
    let statistics = (0..RESAMPLES).filter_map(|_| {
        draw(values, &mut drawn, &mut random);
        of(&drawn)
    });
    interval(estimate, statistics.collect())
}

fn draw(from: &[f64], into: &mut [f64], random: &mut Random) {
    for place in into {
        *place = from[random.index(from.len())];
    }
}

fn ratio(above: f64, below: f64) -> Option<f64> {
    let ratio = above / below;
    ratio.is_finite().then_some(ratio)
}

fn interval(estimate: f64, mut drawn: Vec<f64>) -> Option<Interval> {
    drawn.sort_by(f64::total_cmp);
    Some(Interval {
        estimate,
        low: of_sorted(&drawn, 0.025)?,
        high: of_sorted(&drawn, 0.975)?,
    })
}

/// How many of the first values belong to the start and not to the steady state, by MSER-5 (White, 1997):
/// of all cuts in the first half, in batches of 5, the one with the least squared error of the rest's mean.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub fn steady_from(values: &[f64]) -> usize {
    const BATCH: usize = 5;
    let batches: Vec<f64> = values
        .chunks_exact(BATCH)
        .map(|batch| batch.iter().sum::<f64>() / BATCH as f64)
        .collect();
    let (mut sum, mut squares) = (0.0, 0.0);
    let mut best = (f64::INFINITY, 0);
    // From the end on, so that the sums of each rest come from those of the shorter one.
    for cut in (0..batches.len()).rev() {
        sum += batches[cut];
        squares += batches[cut] * batches[cut];
        let n = (batches.len() - cut) as f64;
        let error = (squares - sum * sum / n).max(0.0) / (n * n);
        if cut <= batches.len() / 2 && error <= best.0 {
            best = (error, cut);
        }
    }
    best.1 * BATCH
}

/// Share of requests, 0 to 1, that ended well and within both limits. What was refused or failed counts against it.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub fn goodput_share(
    samples: &[crate::sample::Sample],
    ttft_ms_max: f64,
    tpot_ms_max: f64,
) -> Option<f64> {
    let good = samples.iter().filter(|sample| {
        sample.outcome.is_done()
            && sample.ttft_ms().is_some_and(|ttft| ttft <= ttft_ms_max)
            && sample.tpot_ms().is_none_or(|tpot| tpot <= tpot_ms_max)
    });
    (!samples.is_empty()).then(|| good.count() as f64 / samples.len() as f64)
}

#[cfg(test)]
mod tests;
