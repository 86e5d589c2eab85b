//! One request's life: queued, assigned, streaming, then exactly one outcome.

use std::time::Duration;

use proto::{Attempt, InstanceId, RequestId};

use super::action::Outcome;
use super::event::{Arrival, Fingerprint, ModelHash};
use super::measurement::{ExitCause, RequestRecord};
use super::policy::Policy;
use super::queue::Ticket;
use super::tick::Tick;

/// Tokens assumed of a request that named no bound.
const OUTPUT_TOKENS_ASSUMED: u32 = 256;

const TOKEN_ID_BYTES: u64 = 4;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for a slot, or for its turn to be measured.
    Queued,
    /// No prompt thread had time; asked again at `until`.
    Pausing { until: Tick },
    /// A worker's prompt thread is counting its tokens.
    Measuring { instance: InstanceId },
    /// Its worker died, and whether that counts against it is not known yet.
    Held { instance: InstanceId },
    /// Sent to a worker; no token is out in this attempt's worker's name yet.
    Assigned { instance: InstanceId },
    /// Tokens are out.
    Streaming { instance: InstanceId },
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    /// Its place in the queue, as often as it waits; `tokens` of it are charged at the first assignment.
    pub(super) ticket: Ticket,
    pub(super) fingerprint: Fingerprint,
    pub(super) affinity: Option<u64>,
    /// Of text; 0 for ids.
    pub(super) prompt_bytes: u64,
    pub(super) prompt_is_ids: bool,
    pub(super) prompt_tokens: Option<u32>,
    pub(super) max_tokens: Option<u32>,
    pub(super) received: Tick,
    pub(super) deadline: Option<Tick>,
    pub(super) queue_deadline: Tick,

    pub(super) phase: Phase,
    /// The newest attempt; 0 before the first.
    pub(super) attempt: Attempt,
    /// Tokens that the relay accepted, over all attempts.
    pub(super) tokens: u32,
    pub(super) cached_tokens: u32,
    /// Whose ids the prompt's are, once measured; and whose tokens the stream's are.
    pub(super) model: Option<ModelHash>,
    pub(super) instance: Option<InstanceId>,
    pub(super) assigned: Option<Tick>,
    pub(super) first_token: Option<Tick>,

    pub(super) engine_deaths: u32,
    pub(super) external_deaths: u32,
    /// Deaths whose cause is not known yet.
    pub(super) unjudged: u32,
    pub(super) oom: bool,
    /// It may have batch-mates no more.
    pub(super) alone: bool,
    /// Times that no prompt thread had time for it.
    pub(super) measure_tries: u32,
    /// Times that a worker did not take it.
    pub(super) not_taken: u32,
}

impl Request {
    pub(super) fn new(
        arrival: &Arrival,
        ticket: Ticket,
        queue_timeout: Duration,
        now: Tick,
    ) -> Self {
        let received = arrival.received.min(now);
        Self {
            id: arrival.request,
            ticket,
            fingerprint: arrival.fingerprint,
            affinity: arrival.affinity,
            prompt_bytes: arrival.prompt_bytes,
            prompt_is_ids: arrival.prompt_tokens.is_some(),
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: arrival.max_tokens,
            received,
            deadline: arrival.deadline.map(|deadline| received.after(deadline)),
            queue_deadline: received.after(queue_timeout),
            phase: Phase::Queued,
            attempt: Attempt(0),
            tokens: 0,
            cached_tokens: 0,
            model: None,
            instance: None,
            assigned: None,
            first_token: None,
            engine_deaths: 0,
            external_deaths: 0,
            unjudged: 0,
            oom: false,
            alone: false,
            measure_tries: 0,
            not_taken: 0,
        }
    }

    /// It had a slot at some time: the queue's time-out applies no more, and refusals become failures.
    pub(super) fn has_started(&self) -> bool {
        self.assigned.is_some()
    }

    /// How it waits: what its relay has accepted so far is kept for the resume, and counts.
    pub(super) fn waiting_ticket(&self) -> Ticket {
        let emitted = u64::from(self.tokens) * TOKEN_ID_BYTES;
        Ticket {
            bytes: self.ticket.bytes + emitted,
            ..self.ticket
        }
    }

    /// One more death of an engine is one too many.
    pub(super) fn is_one_death_from_failing(&self, policy: &Policy) -> bool {
        self.engine_deaths + self.unjudged + 1 >= policy.engine_deaths_max
    }

    /// Counts a worker's death that interrupted it, and says whether that was one too many.
    pub(super) fn count_death(&mut self, cause: ExitCause, oom: bool, policy: &Policy) -> bool {
        let suspected = self.external_deaths >= policy.suspect_after;
        match cause {
            ExitCause::Planned => {}
            ExitCause::External => {
                self.external_deaths += 1;
                // One more from outside, with nobody else to blame, is too many to be chance.
                self.engine_deaths += u32::from(suspected);
            }
            ExitCause::Engine | ExitCause::Permanent => {
                self.engine_deaths += 1;
                self.oom = oom;
            }
        }
        self.alone = self.engine_deaths > 0
            || self.unjudged > 0
            || self.external_deaths >= policy.suspect_after;
        self.engine_deaths >= policy.engine_deaths_max
    }

    /// Whether its prompt's length is known in the tokens of `model`.
    pub(super) fn is_measured_for(&self, model: ModelHash) -> bool {
        self.prompt_is_ids || self.model == Some(model)
    }

    /// The only model that can go on with the stream; `None`: any can begin it.
    pub(super) fn bound_to(&self) -> Option<ModelHash> {
        if self.tokens > 0 { self.model } else { None }
    }

    /// Tokens that the stream may still grow by in a context of this size.
    pub(super) fn tokens_left(&self, context_tokens: u32) -> u32 {
        let room = context_tokens.saturating_sub(self.prompt_tokens.unwrap_or(0));
        self.max_tokens
            .unwrap_or(u32::MAX)
            .min(room)
            .saturating_sub(self.tokens)
    }

    pub(super) fn next_deadline(&self) -> Option<Tick> {
        let queue = (!self.has_started()).then_some(self.queue_deadline);
        let pause = match self.phase {
            Phase::Pausing { until } => Some(until),
            _ => None,
        };
        [queue, pause, self.deadline].into_iter().flatten().min()
    }

    pub(super) fn seat(&self) -> Option<InstanceId> {
        match self.phase {
            Phase::Assigned { instance } | Phase::Streaming { instance } => Some(instance),
            _ => None,
        }
    }

    pub(super) fn record(&self, outcome: Outcome, now: Tick) -> RequestRecord {
        RequestRecord {
            request: self.id,
            key: self.ticket.key,
            prompt_bytes: self.prompt_bytes,
            received: self.received,
            assigned: self.assigned,
            first_token: self.first_token,
            ended: now,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.tokens,
            cached_tokens: self.cached_tokens,
            attempts: self.attempt.0,
            instance: self.instance,
            outcome,
        }
    }
}

/// Tokens that a request will probably cost: the prompt's bytes / 4 (its length where that is
/// known) + what it asked for, or 256, as far as the context has room.
pub(super) fn estimate_tokens(arrival: &Arrival, context_tokens: Option<u32>) -> u64 {
    let prompt = arrival
        .prompt_tokens
        .map_or(arrival.prompt_bytes / 4, u64::from);
    let room = context_tokens.map_or(u64::MAX, |context| {
        u64::from(context).saturating_sub(prompt)
    });
    let output = u64::from(arrival.max_tokens.unwrap_or(OUTPUT_TOKENS_ASSUMED)).min(room);
    prompt.saturating_add(output).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::event::{KeyId, Priority};

    fn arrival() -> Arrival {
        Arrival {
            request: RequestId(1),
            received: Tick::ZERO,
            key: KeyId(0),
            priority: Priority::Normal,
            fingerprint: Fingerprint(1),
            bytes: 400,
            prompt_bytes: 400,
            prompt_tokens: None,
            max_tokens: None,
            deadline: None,
            affinity: None,
        }
    }

    #[test]
    fn the_estimate_is_a_quarter_of_the_bytes_and_what_was_asked_for_within_the_context() {
        let mut arrival = arrival();
        assert_eq!(estimate_tokens(&arrival, None), 100 + 256);
        arrival.max_tokens = Some(1000);
        assert_eq!(estimate_tokens(&arrival, None), 1100);
        assert_eq!(estimate_tokens(&arrival, Some(512)), 512);
        arrival.prompt_tokens = Some(7);
        assert_eq!(estimate_tokens(&arrival, Some(512)), 512);
        arrival.max_tokens = Some(1);
        assert_eq!(estimate_tokens(&arrival, Some(512)), 8);
    }

    #[test]
    fn a_request_that_started_is_out_of_reach_of_the_queue_timeout() {
        let mut request = Request::new(
            &arrival(),
            Ticket::default(),
            Duration::from_secs(5),
            Tick::ZERO,
        );
        assert_eq!(request.next_deadline(), Some(Tick::from_micros(5_000_000)));
        request.assigned = Some(Tick::ZERO);
        assert_eq!(request.next_deadline(), None);
    }

    #[test]
    fn only_a_stream_with_tokens_is_bound_to_its_model() {
        let mut request = Request::new(
            &arrival(),
            Ticket::default(),
            Duration::from_secs(5),
            Tick::ZERO,
        );
        request.model = Some(ModelHash([1; 32]));
        assert_eq!(request.bound_to(), None);
        request.tokens = 1;
        assert_eq!(request.bound_to(), Some(ModelHash([1; 32])));
    }
}
