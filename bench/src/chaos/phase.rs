//! What a stream was doing when a worker was killed, from what its client saw.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::clock::micros_of_ms;
use crate::sample::Sample;

/// Where a stream stood at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Not assigned yet, by the server's own `queue_ms`.
    Queued,
    /// Assigned, or not known to be queued, and without a token.
    Prefilling,
    Decoding,
    /// All tokens but the last had come, or all and not yet the end.
    LastToken,
}

/// Streams in one phase at the moments of the kills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// In flight anywhere.
    pub in_flight: u64,
    /// Of these, interrupted by that kill, as their `attempts` show.
    pub hit: u64,
}

pub type Histogram = BTreeMap<Phase, Tally>;

/// What `sample` was doing at `at_us`; `None`: it was not in flight.
#[must_use]
pub(crate) fn phase(sample: &Sample, at_us: u64) -> Option<Phase> {
    if at_us < sample.sent_us || at_us >= sample.done_us {
        return None;
    }
    let Some(first_us) = sample.first_token_us.filter(|first_us| *first_us <= at_us) else {
        let queue_ms = sample.timings.as_ref().and_then(|timings| timings.queue_ms);
        let queued = queue_ms.is_some_and(|ms| at_us < sample.sent_us + micros_of_ms(ms));
        return Some(if queued {
            Phase::Queued
        } else {
            Phase::Prefilling
        });
    };
    let mut token_us = first_us;
    let later = sample.gaps_us.iter().take_while(|gap| {
        token_us += u64::from(**gap);
        token_us <= at_us
    });
    let received = 1 + later.count() as u64;
    Some(if received + 1 >= sample.events {
        Phase::LastToken
    } else {
        Phase::Decoding
    })
}

/// How long after `at_us` the stream's next token came, or its end, microseconds.
fn silence_us(sample: &Sample, at_us: u64) -> u64 {
    let mut token_us = sample.first_token_us.unwrap_or(sample.done_us);
    for gap in &sample.gaps_us {
        if token_us > at_us {
            break;
        }
        token_us += u64::from(*gap);
    }
    if token_us <= at_us {
        token_us = sample.done_us;
    }
    token_us.saturating_sub(at_us)
}

/// Counts, over all kills, what the streams were doing. A stream with n attempts was hit n − 1 times:
/// by those of the kills in its life, its wait in the queue apart, after which it was silent longest.
#[must_use]
pub(crate) fn histogram(samples: &[Sample], kills_us: &[u64]) -> Histogram {
    let mut histogram = Histogram::new();
    for sample in samples {
        let mut during: Vec<(u64, Phase)> = kills_us
            .iter()
            .filter_map(|&at_us| Some((at_us, phase(sample, at_us)?)))
            .collect();
        during.sort_by_key(|&(at_us, phase)| {
            // What was not assigned cannot have been interrupted, however long it waited.
            let waited = phase == Phase::Queued;
            (waited, std::cmp::Reverse(silence_us(sample, at_us)))
        });
        let attempts = sample.timings.as_ref().and_then(|timings| timings.attempts);
        let hits = attempts.unwrap_or(1).saturating_sub(1) as usize;
        for (rank, (_, phase)) in during.into_iter().enumerate() {
            let tally = histogram.entry(phase).or_default();
            tally.in_flight += 1;
            tally.hit += u64::from(rank < hits);
        }
    }
    histogram
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::ServerTimings;

    fn sample() -> Sample {
        let mut sample = Sample::begin(0, 0, 0, 1_000);
        for at_us in [10_000, 20_000, 90_000, 100_000] {
            sample.token(at_us);
        }
        sample.done_us = 101_000;
        sample.timings = Some(ServerTimings {
            queue_ms: Some(4.0),
            attempts: Some(2),
            ..ServerTimings::default()
        });
        sample
    }

    #[test]
    fn each_moment_has_its_phase() {
        let at = |at_us| phase(&sample(), at_us);
        assert_eq!(at(999), None);
        assert_eq!(at(4_999), Some(Phase::Queued));
        assert_eq!(at(5_000), Some(Phase::Prefilling));
        assert_eq!(at(10_000), Some(Phase::Decoding));
        assert_eq!(at(89_999), Some(Phase::Decoding));
        assert_eq!(at(90_000), Some(Phase::LastToken));
        assert_eq!(at(100_500), Some(Phase::LastToken));
        assert_eq!(at(101_000), None);
    }

    #[test]
    fn the_kill_before_the_long_silence_is_the_one_that_hit() {
        let found = histogram(&[sample()], &[1_500, 6_000, 25_000, 95_000, 400_000]);
        let tally = |in_flight, hit| Tally { in_flight, hit };
        assert_eq!(found[&Phase::Prefilling], tally(1, 0));
        assert_eq!(found[&Phase::Decoding], tally(1, 1));
        assert_eq!(found[&Phase::LastToken], tally(1, 0));
        assert_eq!(found[&Phase::Queued], tally(1, 0));
        assert_eq!(found.len(), 4);
    }
}
