//! One cell of a matrix: so many instances and slots under so much load; and its figures, by the study's definitions.

use serde::{Deserialize, Serialize};

use crate::arrival::Arrival;
use crate::process::Memory;
use crate::sample::Sample;
use crate::statistics::{interpolated, mean, median};
use crate::status::ServerWord;
use crate::strain::Strain;
use crate::target::Size;

/// Which cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Which server, where there are several.
    pub arm: String,
    /// `None`: a foreign server, whose size is not known.
    pub size: Option<Size>,
    pub arrival: Arrival,
    /// Counts from 0.
    pub repeat: u32,
    /// `cold`: the first request after a start, which pays for all that is done once.
    pub cold: bool,
}

/// What was measured in one cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub cell: Cell,
    /// In the order that the cells ran in.
    pub order: u32,
    pub memory: Option<Memory>,
    /// What the machine took away meanwhile.
    pub strain: Option<Strain>,
    /// What the server said of itself at the end.
    pub server: Option<ServerWord>,
    #[serde(skip)]
    pub samples: Vec<Sample>,
}

impl Measured {
    /// A cell of which only the requests are known.
    #[must_use]
    pub fn new(cell: Cell, order: u32, samples: Vec<Sample>) -> Self {
        Self {
            cell,
            order,
            memory: None,
            strain: None,
            server: None,
            samples,
        }
    }
}

/// The figures of one cell, or of several repeats of it together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    pub requests: u64,
    pub done: u64,
    pub wall_s: f64,
    pub output_tokens: u64,
    /// Sum of output tokens / wall seconds, and nothing else.
    pub aggregate_tokens_per_s: f64,
    pub tpot_ms: Vec<f64>,
    /// From the intended start.
    pub ttft_ms: Vec<f64>,
    /// From sending, the wait in the server's queue included.
    pub ttft_sent_ms: Vec<f64>,
    /// From sending, the wait in the server's queue taken off, where it is told.
    pub ttft_engine_ms: Vec<f64>,
    pub total_ms: Vec<f64>,
    /// Normalised latency: intended start to end over output tokens.
    pub ms_per_token: Vec<f64>,
    pub request_tokens_per_s: Vec<f64>,
    pub late_ms: Vec<f64>,
    pub gap_ms_max: f64,
    /// Every gap, milliseconds, with the tokens that it stands for.
    pub gaps: Vec<(f64, f64)>,
    /// Median share of the first-token time that was spent in the queue.
    pub queue_share: Option<f64>,
    pub cached_tokens: Option<u64>,
    pub batch_mean: Option<f64>,
    /// Tokens of some request were counted by events, for want of `usage`.
    pub counted_by_events: bool,
    /// Answers that the model ended before their bound.
    pub early: u64,
    /// What went wrong, with how often.
    pub faults: std::collections::BTreeMap<String, u64>,
}

impl Figures {
    /// Of `samples` that ran side by side.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "a run is far shorter than 2^52 microseconds"
    )]
    pub fn of(samples: &[Sample]) -> Self {
        let begin_us = samples.iter().map(|sample| sample.sent_us).min();
        let end_us = samples.iter().map(|sample| sample.done_us).max();
        let wall_us = end_us.zip(begin_us).map_or(0, |(end, begin)| end - begin);
        let done: Vec<&Sample> = samples.iter().filter(|s| s.outcome.is_done()).collect();
        let all = |of: fn(&Sample) -> Option<f64>| -> Vec<f64> {
            done.iter().filter_map(|sample| of(sample)).collect()
        };
        let mut faults = std::collections::BTreeMap::new();
        for sample in samples.iter().filter(|sample| !sample.outcome.is_done()) {
            let what = format!("{}: {}", sample.outcome.word(), sample.outcome.reason());
            *faults.entry(what).or_default() += 1;
        }
        // Tokens of a request that failed were still made and paid for, and nobody has them: they do not count.
        let output_tokens = done.iter().map(|sample| sample.output_tokens).sum();
        let cached: Vec<u64> = done.iter().filter_map(|s| s.cached_tokens()).collect();
        let gaps = done.iter().flat_map(|sample| &sample.gaps_us);
        Self {
            requests: samples.len() as u64,
            done: done.len() as u64,
            wall_s: wall_us as f64 / 1e6,
            output_tokens,
            aggregate_tokens_per_s: output_tokens as f64 / (wall_us.max(1) as f64 / 1e6),
            tpot_ms: all(Sample::tpot_ms),
            ttft_ms: all(Sample::ttft_ms),
            ttft_sent_ms: all(Sample::ttft_sent_ms),
            ttft_engine_ms: all(Sample::ttft_engine_ms),
            total_ms: all(|sample| Some(sample.total_ms())),
            ms_per_token: all(Sample::ms_per_token),
            request_tokens_per_s: all(Sample::tokens_per_s),
            late_ms: samples.iter().map(Sample::late_ms).collect(),
            gaps: done
                .iter()
                .flat_map(|sample| sample.weighted_gaps())
                .collect(),
            gap_ms_max: gaps.max().map_or(0.0, |gap| f64::from(*gap) / 1e3),
            queue_share: median(&all(Sample::queue_share)),
            cached_tokens: (!cached.is_empty()).then(|| cached.iter().sum()),
            batch_mean: mean(&all(|sample| sample.timings.as_ref()?.batch_mean)),
            counted_by_events: done
                .iter()
                .any(|sample| sample.counted_by == crate::sample::CountedBy::Events),
            early: done.iter().filter(|sample| sample.ended_early()).count() as u64,
            faults,
        }
    }

    /// Figures of several repeats: requests are pooled, and the aggregate is the median of the repeats'.
    #[must_use]
    pub fn pooled(repeats: &[Self]) -> Self {
        let mut pooled = Self::default();
        for one in repeats {
            pooled.requests += one.requests;
            pooled.done += one.done;
            pooled.wall_s += one.wall_s;
            pooled.output_tokens += one.output_tokens;
            pooled.tpot_ms.extend(&one.tpot_ms);
            pooled.ttft_ms.extend(&one.ttft_ms);
            pooled.ttft_sent_ms.extend(&one.ttft_sent_ms);
            pooled.ttft_engine_ms.extend(&one.ttft_engine_ms);
            pooled.total_ms.extend(&one.total_ms);
            pooled.ms_per_token.extend(&one.ms_per_token);
            pooled.early += one.early;
            pooled
                .request_tokens_per_s
                .extend(&one.request_tokens_per_s);
            pooled.late_ms.extend(&one.late_ms);
            pooled.gaps.extend(&one.gaps);
            pooled.gap_ms_max = pooled.gap_ms_max.max(one.gap_ms_max);
            pooled.counted_by_events |= one.counted_by_events;
            for (what, count) in &one.faults {
                *pooled.faults.entry(what.clone()).or_default() += count;
            }
            if let Some(cached) = one.cached_tokens {
                *pooled.cached_tokens.get_or_insert_default() += cached;
            }
        }
        let each =
            |of: fn(&Self) -> Option<f64>| -> Vec<f64> { repeats.iter().filter_map(of).collect() };
        pooled.aggregate_tokens_per_s =
            median(&each(|one| Some(one.aggregate_tokens_per_s))).unwrap_or(0.0);
        pooled.queue_share = median(&each(|one| one.queue_share));
        pooled.batch_mean = mean(&each(|one| one.batch_mean));
        pooled
    }

    /// Largest distance of a repeat's aggregate from their median, as a share of it.
    #[must_use]
    pub fn spread(repeats: &[Self]) -> Option<f64> {
        let rates: Vec<f64> = repeats
            .iter()
            .map(|one| one.aggregate_tokens_per_s)
            .collect();
        let middle = median(&rates)?;
        let low = interpolated(&rates, 0.0)?;
        let high = interpolated(&rates, 1.0)?;
        (rates.len() > 1 && middle > 0.0).then(|| (high - middle).max(middle - low) / middle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Outcome;

    fn request(id: u64, sent_us: u64, done: bool) -> Sample {
        let mut sample = Sample::begin(id, 0, sent_us, sent_us);
        sample.token(sent_us + 100_000);
        sample.token(sent_us + 300_000);
        sample.done_us = sent_us + 500_000;
        sample.output_tokens = 50;
        if done {
            sample.outcome = Outcome::Done;
        }
        sample
    }

    #[test]
    fn the_aggregate_is_the_sum_of_tokens_that_somebody_got_over_the_wall() {
        let samples = [
            request(0, 0, true),
            request(1, 500_000, true),
            request(2, 0, false),
        ];
        let figures = Figures::of(&samples);
        assert_eq!((figures.requests, figures.done), (3, 2));
        assert!((figures.aggregate_tokens_per_s - 100.0).abs() < 1e-9);
        assert_eq!(figures.ttft_ms, [100.0, 100.0]);
        assert_eq!(figures.gap_ms_max, 200.0);
        assert_eq!(figures.faults["truncated: the run ended first"], 1);
        assert!(figures.counted_by_events);
    }

    #[test]
    fn repeats_are_pooled_with_the_median_of_their_aggregates() {
        let rate = |rate| Figures {
            aggregate_tokens_per_s: rate,
            ttft_ms: vec![rate],
            done: 1,
            ..Figures::default()
        };
        let repeats = [rate(10.0), rate(30.0), rate(11.0)];
        let pooled = Figures::pooled(&repeats);
        assert_eq!(pooled.aggregate_tokens_per_s, 11.0);
        assert_eq!((pooled.done, pooled.ttft_ms.len()), (3, 3));
        assert!((Figures::spread(&repeats).unwrap() - 19.0 / 11.0).abs() < 1e-9);
        assert_eq!(Figures::spread(&repeats[..1]), None);
    }
}
