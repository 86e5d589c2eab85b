//! Why a cell's figures are not to be trusted. A marked cell is shown, and left out of ratios and verdicts.

use std::fmt;

use crate::cell::Measured;
use crate::sample::Sample;
use crate::statistics::{interpolated, median, samples_needed};

/// Client clock and server clock may differ by this much, milliseconds.
pub const CLOCKS_MS_MAX: f64 = 2.0;
/// A schedule may be late by this much, milliseconds …
pub const LATE_MS_MAX: f64 = 1.0;
/// … or by this share of the median time to first token, whichever is more.
pub const LATE_SHARE_MAX: f64 = 0.01;

/// One reason.
#[derive(Clone, Debug, PartialEq)]
pub enum Mark {
    /// Both sides timed the same requests, and differ.
    Clocks { differ_ms: f64, at: f64 },
    /// The bench sent later than the schedule said.
    Late { late_ms: f64, at: f64 },
    /// So many answers have a length that cannot be, or not the length that was asked for.
    Tokens { answers: usize },
    /// The machine was held back.
    Machine { what: String },
}

impl fmt::Display for Mark {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clocks { differ_ms, at } => write!(
                out,
                "client and server times differ by {differ_ms:.1} ms at p{:.0}",
                at * 100.0
            ),
            Self::Late { late_ms, at } => write!(
                out,
                "requests were sent {late_ms:.1} ms late at p{:.0}",
                at * 100.0
            ),
            Self::Tokens { answers } => {
                write!(out, "token counts of {answers} answers do not match")
            }
            Self::Machine { what } => out.write_str(what),
        }
    }
}

/// All marks of a cell.
#[must_use]
pub fn marks(measured: &Measured) -> Vec<Mark> {
    let done: Vec<&Sample> = measured
        .samples
        .iter()
        .filter(|sample| sample.outcome.is_done())
        .collect();
    let mut marks = Vec::new();
    marks.extend(clocks(&done));
    marks.extend(late(&measured.samples, &done));
    let answers = done.iter().filter(|sample| is_miscounted(sample)).count();
    if answers > 0 {
        marks.push(Mark::Tokens { answers });
    }
    let strain = measured.strain.and_then(|strain| strain.fault());
    marks.extend(strain.map(|what| Mark::Machine { what }));
    marks
}

/// The highest of p99, p90 and p50 that so many samples carry, and the value there.
fn highest(values: &[f64]) -> Option<(f64, f64)> {
    let q = [0.99, 0.9, 0.5]
        .into_iter()
        .find(|q| values.len() >= samples_needed(*q))?;
    Some((q, interpolated(values, q)?))
}

fn clocks(done: &[&Sample]) -> Option<Mark> {
    let differences: Vec<f64> = done
        .iter()
        .filter_map(|sample| {
            let server_ms = sample.timings.as_ref()?.ttft_ms?;
            Some((sample.ttft_sent_ms()? - server_ms).abs())
        })
        .collect();
    let (at, differ_ms) = highest(&differences)?;
    (differ_ms > CLOCKS_MS_MAX).then_some(Mark::Clocks { differ_ms, at })
}

fn late(samples: &[Sample], done: &[&Sample]) -> Option<Mark> {
    let late: Vec<f64> = samples.iter().map(Sample::late_ms).collect();
    let (at, late_ms) = highest(&late)?;
    let ttft: Vec<f64> = done.iter().filter_map(|sample| sample.ttft_ms()).collect();
    let share = LATE_SHARE_MAX * median(&ttft).unwrap_or(0.0);
    (late_ms > LATE_MS_MAX && late_ms > share).then_some(Mark::Late { late_ms, at })
}

/// An event with text holds a token at least; an answer that ended for its length has that length; none is longer.
fn is_miscounted(sample: &Sample) -> bool {
    let usage = match sample.usage {
        Some(usage) if usage.completion_tokens > 0 => usage.completion_tokens,
        _ => return false,
    };
    let at_length = sample.finish_reason.as_deref() == Some("length");
    let asked = sample.asked_tokens.map(u64::from);
    sample.events > usage
        || asked.is_some_and(|asked| usage > asked || (at_length && usage != asked))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::Arrival;
    use crate::cell::Cell;
    use crate::chunk::{ServerTimings, Usage};
    use crate::sample::Outcome;
    use crate::strain::Strain;

    /// `count` answers of 4 tokens, first after 100 ms by the client and `server_ms` by the server.
    fn measured(count: u64, server_ms: f64, late_us: u64) -> Measured {
        let sample = |id| {
            let mut sample = Sample::begin(id, 0, 0, late_us);
            for token in 0..4 {
                sample.token(late_us + 100_000 + token * 10_000);
            }
            sample.done_us = late_us + 130_000;
            sample.asked_tokens = Some(4);
            sample.finish_reason = Some("length".into());
            sample.usage = Some(Usage {
                completion_tokens: 4,
                ..Usage::default()
            });
            sample.timings = Some(ServerTimings {
                ttft_ms: Some(server_ms),
                ..ServerTimings::default()
            });
            sample.outcome = Outcome::Done;
            sample
        };
        let cell = Cell {
            arm: "a".into(),
            size: None,
            arrival: Arrival::Closed { concurrency: 1 },
            repeat: 0,
            cold: false,
        };
        Measured::new(cell, 0, (0..count).map(sample).collect())
    }

    #[test]
    fn clocks_that_differ_mark_a_cell_at_the_highest_percentile_that_it_carries() {
        assert_eq!(marks(&measured(16, 99.0, 0)), []);
        assert_eq!(
            marks(&measured(16, 97.0, 0)),
            [Mark::Clocks {
                differ_ms: 3.0,
                at: 0.5
            }]
        );
        let mut many = measured(662, 99.0, 0);
        for sample in many.samples.iter_mut().take(10) {
            sample.timings.as_mut().unwrap().ttft_ms = Some(90.0);
        }
        assert!(matches!(marks(&many)[..], [Mark::Clocks { at: 0.99, .. }]));
        many.samples.truncate(661);
        // p90 is the highest that 661 carry, and there they agree.
        assert_eq!(marks(&many), []);
    }

    #[test]
    fn a_late_schedule_marks_only_where_it_is_more_than_a_millisecond_and_a_hundredth() {
        assert_eq!(marks(&measured(16, 100.0, 900)), []);
        assert_eq!(marks(&measured(16, 100.0, 1_000)), []);
        assert!(matches!(
            marks(&measured(16, 100.0, 3_000))[..],
            [Mark::Late { at: 0.5, .. }]
        ));
        // 1.5 ms late, and the first token after 10 s: less than a hundredth.
        let mut slow = measured(16, 10_000.0, 1_500);
        for sample in &mut slow.samples {
            sample.first_token_us = Some(10_001_500);
        }
        assert_eq!(marks(&slow), []);
    }

    #[test]
    fn counts_that_cannot_be_mark_a_cell() {
        let with = |change: fn(&mut Sample)| {
            let mut cell = measured(3, 100.0, 0);
            change(&mut cell.samples[1]);
            marks(&cell)
        };
        let wrong = [Mark::Tokens { answers: 1 }];
        assert_eq!(with(|sample| sample.events = 5), wrong);
        assert_eq!(with(|sample| sample.asked_tokens = Some(5)), wrong);
        assert_eq!(with(|sample| sample.asked_tokens = Some(3)), wrong);
        // A model that stops early is no mismatch.
        let early = |sample: &mut Sample| {
            sample.asked_tokens = Some(9);
            sample.finish_reason = Some("stop".into());
        };
        assert_eq!(with(early), []);
        assert_eq!(with(|sample| sample.usage = None), []);
    }

    #[test]
    fn a_throttled_machine_marks_a_cell() {
        let mut cell = measured(3, 100.0, 0);
        cell.strain = Some(Strain {
            heat_events: Some(1),
            ..Strain::default()
        });
        assert!(matches!(marks(&cell)[..], [Mark::Machine { .. }]));
    }
}
