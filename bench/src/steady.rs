//! Of an open loop: the part of it that stands for the load, and whether the server kept up.

use crate::sample::Sample;
use crate::statistics::{median, steady_from};

/// The steady part of an open loop's requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Steady {
    pub samples: Vec<Sample>,
    /// Requests at the start that were left out, by MSER-5 over their times to first token.
    pub start: usize,
    /// Requests at the end that were left out, since the load fell while they ran.
    pub tail: usize,
}

/// Cuts off the start (MSER-5) and the tail: requests that were meant to start in the last stretch, as long as
/// the median request takes, ran in a server that nobody asked any more. Which are cut depends on when they
/// were to start and never on how long they took, so that slow ones are not favoured. A cut that would leave
/// fewer than half is not made.
#[must_use]
pub fn steady(samples: &[Sample]) -> Steady {
    let mut sorted = samples.to_vec();
    sorted.sort_by_key(|sample| sample.intended_us);
    let whole = Steady {
        samples: sorted.clone(),
        start: 0,
        tail: 0,
    };
    let total_us: Vec<f64> = sorted
        .iter()
        .filter(|sample| sample.outcome.is_done())
        .map(|sample| sample.total_ms() * 1e3)
        .collect();
    let (Some(last), Some(typical_us)) = (sorted.last(), median(&total_us)) else {
        return whole;
    };
    let ends_us = last.intended_us.saturating_sub(rounded(typical_us));
    let tail = sorted
        .iter()
        .filter(|sample| sample.intended_us > ends_us)
        .count();
    // A request without a token says nothing of the ramp; its neighbours do.
    let ttft: Vec<(usize, f64)> = sorted
        .iter()
        .enumerate()
        .filter_map(|(place, sample)| Some((place, sample.ttft_ms()?)))
        .collect();
    let values: Vec<f64> = ttft.iter().map(|(_, ms)| *ms).collect();
    let start = ttft
        .get(steady_from(&values))
        .map_or(0, |(place, _)| *place);
    if start + tail > sorted.len() / 2 {
        return whole;
    }
    let kept = sorted.len() - start - tail;
    Steady {
        samples: sorted.into_iter().skip(start).take(kept).collect(),
        start,
        tail,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer saturates"
)]
fn rounded(value: f64) -> u64 {
    value.round() as u64
}

/// Whether a server kept up with an open loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Keeping {
    /// Arrivals per second over the second half of the schedule.
    pub offered_per_s: f64,
    /// Completions per second over the same time.
    pub served_per_s: f64,
    /// Requests in the server at the schedule's middle and at its end.
    pub backlog: (usize, usize),
    pub refused: usize,
    pub saturated: bool,
}

/// Fewer completions than this share of arrivals, with a growing backlog, is saturation.
const SERVED_SHARE_MIN: f64 = 0.9;
/// A backlog that grew by less than this may be chance.
const BACKLOG_GROWTH_MIN: usize = 5;
/// More than this share of requests refused is saturation too: the server says so itself.
const REFUSED_SHARE_MAX: f64 = 0.01;

/// Judges the second half of an open loop: what arrived, what was completed, and what was left.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub fn keeping(samples: &[Sample]) -> Option<Keeping> {
    let first_us = samples.iter().map(|sample| sample.intended_us).min()?;
    let last_us = samples.iter().map(|sample| sample.intended_us).max()?;
    let middle_us = first_us + (last_us - first_us) / 2;
    let span_s = (last_us - middle_us) as f64 / 1e6;
    if span_s <= 0.0 {
        return None;
    }
    let arrived_by = |at_us: u64| {
        samples
            .iter()
            .filter(|sample| sample.intended_us <= at_us)
            .count()
    };
    let ended_by = |at_us: u64| {
        samples
            .iter()
            .filter(|sample| sample.done_us <= at_us)
            .count()
    };
    let backlog = |at_us| arrived_by(at_us).saturating_sub(ended_by(at_us));
    let completed = samples.iter().filter(|sample| {
        sample.outcome.is_done() && sample.done_us > middle_us && sample.done_us <= last_us
    });
    let refused = samples
        .iter()
        .filter(|sample| matches!(sample.outcome, crate::sample::Outcome::Refused { .. }))
        .count();
    let offered_per_s = (arrived_by(last_us) - arrived_by(middle_us)) as f64 / span_s;
    let served_per_s = completed.count() as f64 / span_s;
    let (early, late) = (backlog(middle_us), backlog(last_us));
    let behind = served_per_s < SERVED_SHARE_MIN * offered_per_s
        && late >= early.saturating_add(BACKLOG_GROWTH_MIN);
    Some(Keeping {
        offered_per_s,
        served_per_s,
        backlog: (early, late),
        refused,
        saturated: behind || refused as f64 > REFUSED_SHARE_MAX * samples.len() as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Outcome;

    /// Ten a second; each takes `ms(number)`.
    fn run(count: u64, ms: impl Fn(u64) -> u64) -> Vec<Sample> {
        let one = |id| {
            let at_us = id * 100_000;
            let mut sample = Sample::begin(id, 0, at_us, at_us);
            sample.token(at_us + ms(id) * 1_000 / 2);
            sample.done_us = at_us + ms(id) * 1_000;
            sample.output_tokens = 4;
            sample.outcome = Outcome::Done;
            sample
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn the_start_and_the_tail_are_cut_and_the_middle_stays() {
        // The first 20 are ten times slower; a request takes 500 ms, so that the last 5 ran while the load fell.
        let found = steady(&run(200, |id| if id < 20 { 5_000 } else { 500 }));
        assert_eq!((found.start, found.tail), (20, 5));
        assert_eq!(found.samples.len(), 175);
        assert_eq!(found.samples[0].id, 20);
    }

    #[test]
    fn slow_requests_are_not_cut_for_being_slow() {
        let found = steady(&run(200, |id| if id == 190 { 20_000 } else { 500 }));
        assert!(found.samples.iter().any(|sample| sample.id == 190));
    }

    #[test]
    fn a_run_too_short_to_cut_stays_whole() {
        let found = steady(&run(10, |_| 2_000));
        assert_eq!((found.samples.len(), found.start, found.tail), (10, 0, 0));
        assert_eq!(steady(&[]).samples, []);
    }

    #[test]
    fn a_server_that_falls_behind_is_saturated_and_one_that_is_slow_is_not() {
        let calm = keeping(&run(100, |_| 3_000)).unwrap();
        assert!(!calm.saturated, "{calm:?}");
        assert!((calm.offered_per_s - 10.0).abs() < 0.3);
        // Each request waits for all before it, at 150 ms each.
        let behind = keeping(&run(100, |id| (id + 1) * 50 + 150)).unwrap();
        assert!(behind.saturated, "{behind:?}");
        assert!((behind.served_per_s - 10.0 / 1.5).abs() < 0.5, "{behind:?}");
        let mut refusing = run(100, |_| 100);
        for sample in refusing.iter_mut().take(5) {
            sample.outcome = Outcome::Refused {
                status: 429,
                retry_after_s: None,
                message: String::new(),
            };
        }
        assert!(keeping(&refusing).unwrap().saturated);
        assert_eq!(keeping(&run(1, |_| 1)), None);
    }
}
