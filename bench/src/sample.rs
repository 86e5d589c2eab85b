//! What is known of one request after it ended, well or not.

use serde::{Deserialize, Serialize};

use crate::chunk::{ServerTimings, Usage};

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Outcome {
    /// A whole stream: a finish reason, or `[DONE]`, and no error.
    Done,
    /// The server declined it before it began: 429, or 503.
    Refused {
        status: u16,
        retry_after_s: Option<u64>,
        message: String,
    },
    /// The server said that it failed, by a status or by an event in the stream.
    Failed {
        status: Option<u16>,
        message: String,
    },
    /// The stream ended without `[DONE]` and without an error event.
    Truncated { message: String },
    /// What came cannot be understood.
    Malformed { message: String },
    /// No connection, or none that took the request.
    Unreachable { message: String },
    /// Nothing came for longer than the client waits.
    TimedOut { waited_ms: u64 },
}

impl Outcome {
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// One word for tables.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused { .. } => "refused",
            Self::Failed { .. } => "failed",
            Self::Truncated { .. } => "truncated",
            Self::Malformed { .. } => "malformed",
            Self::Unreachable { .. } => "unreachable",
            Self::TimedOut { .. } => "timed_out",
        }
    }

    /// What went wrong, for people.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Done => String::new(),
            Self::Refused {
                status, message, ..
            } => format!("{status} {message}"),
            Self::Failed {
                status: Some(status),
                message,
            } => format!("{status} {message}"),
            Self::Failed { message, .. }
            | Self::Truncated { message }
            | Self::Malformed { message }
            | Self::Unreachable { message } => message.clone(),
            Self::TimedOut { waited_ms } => format!("nothing came for {waited_ms} ms"),
        }
    }
}

/// Who counted the output tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountedBy {
    /// The server's `usage`.
    Usage,
    /// The client, one per event with text: too few where an event carries several tokens.
    #[default]
    Events,
}

/// One request. All times are microseconds since the start of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub id: u64,
    /// Which prompt of the workload.
    pub prompt: u32,
    /// When the arrival process wanted it sent. Latency counts from here.
    pub intended_us: u64,
    pub sent_us: u64,
    pub headers_us: Option<u64>,
    /// First event with text.
    pub first_token_us: Option<u64>,
    /// Last event with text.
    pub last_token_us: Option<u64>,
    /// `[DONE]`, or the end of whatever kind.
    pub done_us: u64,
    /// From each event with text to the next.
    pub gaps_us: Vec<u32>,
    /// Events with text.
    pub events: u64,
    pub output_tokens: u64,
    /// The bound that was sent with it.
    #[serde(default)]
    pub asked_tokens: Option<u32>,
    pub counted_by: CountedBy,
    pub usage: Option<Usage>,
    pub timings: Option<ServerTimings>,
    pub finish_reason: Option<String>,
    /// Bytes of the answer's text.
    pub text_bytes: u64,
    /// Blake3 of the answer's text, its first 16 hexadecimal digits: equal answers show as such.
    pub text_hash: String,
    pub outcome: Outcome,
}

impl Sample {
    /// A request that is about to be sent.
    #[must_use]
    pub fn begin(id: u64, prompt: u32, intended_us: u64, sent_us: u64) -> Self {
        Self {
            id,
            prompt,
            intended_us,
            sent_us,
            headers_us: None,
            first_token_us: None,
            last_token_us: None,
            done_us: sent_us,
            gaps_us: Vec::new(),
            events: 0,
            output_tokens: 0,
            asked_tokens: None,
            counted_by: CountedBy::Events,
            usage: None,
            timings: None,
            finish_reason: None,
            text_bytes: 0,
            text_hash: String::new(),
            outcome: Outcome::Truncated {
                message: "the run ended first".into(),
            },
        }
    }

    /// Notes an event with text at `now_us`.
    pub fn token(&mut self, now_us: u64) {
        if let Some(last) = self.last_token_us {
            let gap = now_us.saturating_sub(last);
            self.gaps_us.push(u32::try_from(gap).unwrap_or(u32::MAX));
        }
        self.first_token_us.get_or_insert(now_us);
        self.last_token_us = Some(now_us);
        self.events += 1;
    }

    /// Time to first token from the intended start, milliseconds: the queue of client and server included.
    #[must_use]
    pub fn ttft_ms(&self) -> Option<f64> {
        Some(ms(self.intended_us, self.first_token_us?))
    }

    /// Time to first token from the moment of sending, milliseconds: the study's "queue-inclusive TTFT".
    #[must_use]
    pub fn ttft_sent_ms(&self) -> Option<f64> {
        Some(ms(self.sent_us, self.first_token_us?))
    }

    /// Time to first token without the wait in the server's queue, where the server tells it: the study's "engine TTFT".
    #[must_use]
    pub fn ttft_engine_ms(&self) -> Option<f64> {
        let queue_ms = self.timings.as_ref()?.queue_ms?;
        Some((self.ttft_sent_ms()? - queue_ms).max(0.0))
    }

    /// Intended start to the end of the stream, milliseconds.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        ms(self.intended_us, self.done_us)
    }

    /// Time per output token after the first, milliseconds: (total − TTFT) / (output tokens − 1).
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^52"
    )]
    pub fn tpot_ms(&self) -> Option<f64> {
        let first = self.first_token_us?;
        (self.output_tokens > 1).then(|| ms(first, self.done_us) / (self.output_tokens - 1) as f64)
    }

    /// Output tokens per second of this request's own time, from sending to its end, without the wait
    /// in the server's queue where it tells that.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^52"
    )]
    pub fn tokens_per_s(&self) -> Option<f64> {
        let queue_ms = self.timings.as_ref().and_then(|timings| timings.queue_ms);
        let span_ms = ms(self.sent_us, self.done_us) - queue_ms.unwrap_or(0.0);
        (span_ms > 0.0 && self.output_tokens > 0).then(|| self.output_tokens as f64 / span_ms * 1e3)
    }

    /// Normalised latency, milliseconds a token: intended start to the end of the stream, over all output tokens.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^52"
    )]
    pub fn ms_per_token(&self) -> Option<f64> {
        (self.output_tokens > 0).then(|| self.total_ms() / self.output_tokens as f64)
    }

    /// Whether the model ended the answer before the bound that was sent with it.
    #[must_use]
    pub fn ended_early(&self) -> bool {
        self.asked_tokens
            .is_some_and(|asked| self.output_tokens < u64::from(asked))
    }

    /// Each gap, milliseconds, with the tokens that it stands for: those that the answer's mean event carried.
    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^52"
    )]
    pub fn weighted_gaps(&self) -> impl Iterator<Item = (f64, f64)> {
        let tokens = self.output_tokens as f64 / self.events.max(1) as f64;
        self.gaps_us
            .iter()
            .map(move |gap| (f64::from(*gap) / 1e3, tokens))
    }

    /// How much later than intended it was sent, milliseconds.
    #[must_use]
    pub fn late_ms(&self) -> f64 {
        ms(self.intended_us, self.sent_us)
    }

    /// Share of the time to first token that was spent in the server's queue, 0 to 1, where it tells.
    #[must_use]
    pub fn queue_share(&self) -> Option<f64> {
        let queue_ms = self.timings.as_ref()?.queue_ms?;
        let ttft_ms = self.ttft_ms()?;
        (ttft_ms > 0.0).then(|| (queue_ms / ttft_ms).clamp(0.0, 1.0))
    }

    /// Prompt tokens that the server took from its cache, where it tells.
    #[must_use]
    pub fn cached_tokens(&self) -> Option<u64> {
        let by_timings = self
            .timings
            .as_ref()
            .and_then(|timings| timings.cached_tokens);
        by_timings.or_else(|| Some(self.usage?.prompt_tokens_details?.cached_tokens))
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a run is far shorter than 2^52 microseconds"
)]
fn ms(from_us: u64, to_us: u64) -> f64 {
    to_us as f64 / 1e3 - from_us as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_studys_definitions_hold_on_a_hand_made_request() {
        let mut sample = Sample::begin(1, 0, 1_000, 3_000);
        for at in [103_000, 113_000, 133_000] {
            sample.token(at);
        }
        sample.done_us = 143_000;
        sample.output_tokens = 5;
        sample.timings = Some(ServerTimings {
            queue_ms: Some(60.0),
            ..ServerTimings::default()
        });
        assert_eq!(sample.gaps_us, [10_000, 20_000]);
        assert_eq!(sample.ttft_ms(), Some(102.0));
        assert_eq!(sample.ttft_sent_ms(), Some(100.0));
        assert_eq!(sample.ttft_engine_ms(), Some(40.0));
        assert_eq!(sample.tpot_ms(), Some(10.0));
        assert_eq!(sample.late_ms(), 2.0);
        assert!((sample.tokens_per_s().unwrap() - 5.0 / 0.08).abs() < 1e-9);
        assert!((sample.queue_share().unwrap() - 60.0 / 102.0).abs() < 1e-9);
    }
}
