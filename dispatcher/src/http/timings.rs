//! A request's moments as the `timings` and `usage` objects of its response.

use serde::Serialize;

use crate::machine::Tick;
use crate::relay::Timeline;

/// Milliseconds, all on the dispatcher's clock and all from the arrival of the request on.
/// `None`: it never came to that.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Timings {
    /// Arrival to the first assignment.
    pub(crate) queue_ms: Option<f64>,
    /// First assignment to the first token.
    pub(crate) prefill_ms: Option<f64>,
    /// Arrival to the first token, queue included.
    pub(crate) ttft_ms: Option<f64>,
    /// First token to the last.
    pub(crate) decode_ms: Option<f64>,
    /// Arrival to the end.
    pub(crate) total_ms: f64,
    /// The instance of the newest attempt.
    pub(crate) instance: Option<u32>,
    pub(crate) attempts: u32,
    /// Mean batch size of the steps that gave this request its tokens.
    pub(crate) batch_mean: Option<f64>,
    pub(crate) cached_tokens: u32,
}

impl Timings {
    #[must_use]
    pub(crate) fn new(timeline: &Timeline, ended: Tick) -> Self {
        let between = |from: Option<Tick>, to: Option<Tick>| Some(milliseconds(from?, to?));
        let received = Some(timeline.received);
        Self {
            queue_ms: between(received, timeline.assigned),
            prefill_ms: between(timeline.assigned, timeline.first_token),
            ttft_ms: between(received, timeline.first_token),
            decode_ms: between(timeline.first_token, timeline.last_token),
            total_ms: milliseconds(timeline.received, ended),
            instance: timeline.instance.map(|instance| instance.0),
            attempts: timeline.attempts,
            batch_mean: (timeline.steps > 0)
                .then(|| round(timeline.batch_sum as f64 / timeline.steps as f64, 100.0)),
            cached_tokens: timeline.cached_tokens,
        }
    }
}

fn milliseconds(from: Tick, to: Tick) -> f64 {
    round(to.since(from).as_secs_f64() * 1e3, 1000.0)
}

fn round(value: f64, per: f64) -> f64 {
    (value * per).round() / per
}

/// Token counts in OpenAI's form.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct UsageBody {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) total_tokens: u32,
    pub(crate) prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct PromptTokensDetails {
    pub(crate) cached_tokens: u32,
}

impl UsageBody {
    #[must_use]
    pub(crate) fn new(timeline: &Timeline) -> Self {
        Self {
            prompt_tokens: timeline.prompt_tokens,
            completion_tokens: timeline.completion_tokens,
            total_tokens: timeline
                .prompt_tokens
                .saturating_add(timeline.completion_tokens),
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: timeline.cached_tokens,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::InstanceId;

    #[test]
    fn timings_count_from_the_arrival_and_hold_the_queue() {
        let timeline = Timeline {
            received: Tick::from_micros(1_000),
            assigned: Some(Tick::from_micros(3_500)),
            first_token: Some(Tick::from_micros(10_000)),
            last_token: Some(Tick::from_micros(30_000)),
            instance: Some(InstanceId(2)),
            attempts: 1,
            batch_sum: 10,
            steps: 4,
            ..Timeline::default()
        };
        let timings = Timings::new(&timeline, Tick::from_micros(31_000));
        assert_eq!(timings.queue_ms, Some(2.5));
        assert_eq!(timings.prefill_ms, Some(6.5));
        assert_eq!(timings.ttft_ms, Some(9.0));
        assert_eq!(timings.decode_ms, Some(20.0));
        assert_eq!(timings.total_ms, 30.0);
        assert_eq!(timings.batch_mean, Some(2.5));
    }

    #[test]
    fn what_never_happened_has_no_time() {
        let timings = Timings::new(&Timeline::default(), Tick::from_micros(5));
        assert_eq!(timings.queue_ms, None);
        assert_eq!(timings.ttft_ms, None);
        assert_eq!(timings.batch_mean, None);
    }
}
