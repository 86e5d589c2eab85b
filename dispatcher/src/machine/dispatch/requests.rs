//! What clients and workers say about single requests, up to each one's end.

use std::time::Duration;

use proto::{Attempt, FinishReason, InstanceId, RequestId};

use super::{Dispatch, Shutdown};
use crate::machine::action::{Action, Denied, Failure, Outcome};
use crate::machine::admission::{self, Room};
use crate::machine::event::{Arrival, AttemptError, CancelCause, MemoryPressure, TokenisedOutcome};
use crate::machine::instance::{Instance, State};
use crate::machine::measurement::{Measurement, RequestRecord};
use crate::machine::queue::{Place, Ticket};
use crate::machine::request::{Phase, Request, estimate_tokens};
use crate::machine::timers::Owner;

/// Times that prompt threads may have no time for one prompt. What takes so long so often is the
/// prompt's own doing.
const MEASURE_TRIES_MAX: u32 = 8;
const MEASURE_PAUSE: Duration = Duration::from_millis(100);
/// Times that workers may send one request back untouched.
const NOT_TAKEN_MAX: u32 = 20;
/// What a worker that sent a request back gets no new work for.
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

impl Dispatch {
    pub(super) fn arrived(&mut self, arrival: &Arrival) {
        let id = arrival.request;
        if self.requests.contains_key(&id) || self.lingering.contains_key(&id) {
            self.stale();
            return;
        }
        let context = self.facts.map(|facts| facts.context_tokens);
        let tokens = estimate_tokens(arrival, context);
        if let Err(denied) = self.admit(arrival, tokens) {
            self.counters.denied += 1;
            let outcome = Outcome::Denied(denied);
            let request = Request::new(arrival, Ticket::default(), Duration::ZERO, self.now);
            self.announce(request.record(outcome, self.now));
            return;
        }
        self.counters.accepted += 1;
        let ticket = Ticket {
            request: id,
            key: arrival.key,
            priority: arrival.priority,
            sequence: self.next_sequence,
            received: arrival.received.min(self.now),
            bytes: arrival.bytes,
            tokens,
        };
        self.next_sequence += 1;
        let request = Request::new(arrival, ticket, self.policy.queue_timeout, self.now);
        let place = place_of(&request);
        self.requests.insert(id, request);
        self.queue.push(ticket, false, place);
        self.arm_request(id);
    }

    fn admit(&self, arrival: &Arrival, tokens: u64) -> Result<(), Denied> {
        if self.shutdown != Shutdown::No {
            return Err(Denied::Draining {
                retry_after: self.policy.drain_timeout,
            });
        }
        if let Some(retry_after) = self.quarantine.left(arrival.fingerprint, self.now) {
            return Err(Denied::Quarantined { retry_after });
        }
        if self.instances.iter().all(Instance::is_parked) {
            return Err(Denied::NoInstance {
                retry_after: self.parked_for(),
            });
        }
        if self.memory == MemoryPressure::Hard {
            return Err(self.out_of_memory());
        }
        let room = Room {
            total: self.queue.total(),
            own: self.queue.held_by(arrival.key),
            others_have_work: self.queue.others_have_work(arrival.key),
            retry_after: self.retry_after(self.queue.len()),
        };
        admission::check(&self.policy, arrival, tokens, &room, self.facts.as_ref())
    }

    pub(super) fn out_of_memory(&self) -> Denied {
        Denied::OutOfMemory {
            retry_after: self.retry_after(self.queue.len()),
        }
    }

    /// When the first parked instance is tried again.
    pub(super) fn parked_for(&self) -> Duration {
        let until = self
            .instances
            .iter()
            .filter_map(|place| match &place.state {
                State::Quarantined { until, .. } => *until,
                _ => None,
            });
        until
            .min()
            .map_or(self.policy.park_min, |until| until.since(self.now))
            .max(Duration::from_secs(1))
    }

    pub(super) fn client_gone(&mut self, id: RequestId, cause: CancelCause) {
        if self.requests.contains_key(&id) {
            self.end(id, Outcome::Cancelled(cause));
        } else {
            self.stale();
        }
    }

    pub(super) fn tokenised(&mut self, id: RequestId, index: usize, outcome: TokenisedOutcome) {
        let place = &mut self.instances[index];
        if place.measuring.remove(&id).is_none() {
            self.stale();
            return;
        }
        if place.exclusive == Some(id) {
            place.exclusive = None;
        }
        let facts = place.facts;
        // Where the client left meanwhile, the answer only frees the prompt thread.
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        match outcome {
            TokenisedOutcome::Tokens(tokens) => {
                request.prompt_tokens = Some(tokens);
                request.model = facts.map(|facts| facts.model);
                request.phase = Phase::Queued;
                let context = facts.map_or(u32::MAX, |facts| facts.context_tokens);
                if let Err(denied) = admission::check_length(tokens, context) {
                    self.refuse(id, denied);
                    return;
                }
                self.queue.set_place(id, Place::Slot);
            }
            TokenisedOutcome::Rejected(words) => self.refuse(id, Denied::PromptRejected(words)),
            TokenisedOutcome::Unavailable => {
                request.measure_tries += 1;
                if request.measure_tries > MEASURE_TRIES_MAX {
                    let waited = self.now.since(request.received);
                    self.refuse(id, Denied::QueueTimeout { waited });
                    return;
                }
                let pause = MEASURE_PAUSE * (1 << (request.measure_tries - 1));
                let until = self.now.after(pause);
                request.phase = Phase::Pausing { until };
                self.queue.set_place(id, Place::Away);
            }
        }
        self.arm_request(id);
    }

    pub(super) fn started(&mut self, id: RequestId, attempt: Attempt, cached_tokens: u32) {
        if let Some(request) = self.seated(id, attempt) {
            request.cached_tokens = cached_tokens;
        } else if self.lingering_seat(id, attempt).is_none() {
            self.stale();
        }
    }

    pub(super) fn first_token(&mut self, id: RequestId, attempt: Attempt) {
        let now = self.now;
        if let Some(request) = self.seated(id, attempt) {
            if let Phase::Assigned { instance } = request.phase {
                request.phase = Phase::Streaming { instance };
            }
            request.first_token.get_or_insert(now);
            request.tokens = request.tokens.max(1);
        } else if self.lingering_seat(id, attempt).is_none() {
            self.stale();
        }
    }

    pub(super) fn finished(
        &mut self,
        id: RequestId,
        attempt: Attempt,
        reason: FinishReason,
        tokens: u32,
    ) {
        let now = self.now;
        let Some(request) = self.seated(id, attempt) else {
            self.release_lingering(id, attempt);
            return;
        };
        request.tokens = request.tokens.max(tokens);
        if request.tokens > 0 {
            request.first_token.get_or_insert(now);
        }
        self.release_seat(id);
        self.end(id, Outcome::Completed { reason });
    }

    pub(super) fn cancel_done(&mut self, id: RequestId, attempt: Attempt) {
        if self.seated(id, attempt).is_none() {
            self.release_lingering(id, attempt);
            return;
        }
        self.release_seat(id);
        let words = "the worker cancelled it unasked".to_owned();
        self.end(id, Outcome::Failed(Failure::Engine(words)));
    }

    pub(super) fn request_failed(&mut self, id: RequestId, attempt: Attempt, error: AttemptError) {
        let Some(request) = self.seated(id, attempt) else {
            self.release_lingering(id, attempt);
            return;
        };
        request.not_taken += u32::from(error == AttemptError::NotTaken);
        let spent = request.not_taken > NOT_TAKEN_MAX;
        let index = self.release_seat(id);
        match error {
            AttemptError::Rejected(words) => {
                self.end(id, Outcome::Failed(Failure::Rejected(words)))
            }
            AttemptError::Engine(words) => self.end(id, Outcome::Failed(Failure::Engine(words))),
            AttemptError::NotTaken if spent => self.end(id, Outcome::Failed(Failure::NoInstance)),
            AttemptError::NotTaken => {
                if let Some(index) = index {
                    self.instances[index].refuses_until = Some(self.now.after(REFUSAL_PAUSE));
                }
                self.wait_again(id);
            }
        }
    }

    /// A request that had a seat and lost it without fault waits at the head of its key's queue.
    pub(super) fn wait_again(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.phase = Phase::Queued;
        let place = place_of(request);
        if self.queue.contains(id) {
            self.queue.set_place(id, place);
        } else {
            self.queue.push(request.waiting_ticket(), true, place);
        }
        self.arm_request(id);
    }

    /// The live request that this attempt of it is seated for.
    fn seated(&mut self, id: RequestId, attempt: Attempt) -> Option<&mut Request> {
        self.requests
            .get_mut(&id)
            .filter(|request| request.seat().is_some() && request.attempt == attempt)
    }

    fn lingering_seat(&self, id: RequestId, attempt: Attempt) -> Option<InstanceId> {
        let instance = *self.lingering.get(&id)?;
        let seat = self.instances[instance.0 as usize].seats.get(&id)?;
        (seat.attempt == attempt).then_some(instance)
    }

    /// The worker gave up a seat whose request had ended before.
    fn release_lingering(&mut self, id: RequestId, attempt: Attempt) {
        let Some(instance) = self.lingering_seat(id, attempt) else {
            self.stale();
            return;
        };
        self.lingering.remove(&id);
        self.free_seat(id, instance.0 as usize);
    }

    fn release_seat(&mut self, id: RequestId) -> Option<usize> {
        let index = self.requests.get(&id)?.seat()?.0 as usize;
        self.free_seat(id, index);
        Some(index)
    }

    fn free_seat(&mut self, id: RequestId, index: usize) {
        let place = &mut self.instances[index];
        place.seats.remove(&id);
        if place.exclusive == Some(id) {
            place.exclusive = None;
        }
    }

    /// Ends a request for a reason of the kind that a request without a slot has. One that had a
    /// slot fails instead.
    pub(super) fn refuse(&mut self, id: RequestId, denied: Denied) {
        let started = self.requests.get(&id).is_some_and(Request::has_started);
        let outcome = if started {
            Outcome::Failed(match denied {
                Denied::Draining { .. } => Failure::Draining,
                Denied::DeadlineExceeded => Failure::DeadlineExceeded,
                Denied::PromptRejected(words) => Failure::Rejected(words),
                Denied::PromptTooLarge { limit_bytes, .. } => Failure::Rejected(format!(
                    "the prompt is longer than the context's {limit_bytes} bytes"
                )),
                Denied::PromptTooLong { context_tokens, .. } => Failure::Rejected(format!(
                    "the prompt is longer than the context of {context_tokens} tokens"
                )),
                _ => Failure::NoInstance,
            })
        } else {
            Outcome::Denied(denied)
        };
        self.end(id, outcome);
    }

    /// The one way out. A worker that still works for it is told to stop, and keeps the seat until it says so.
    pub(super) fn end(&mut self, id: RequestId, outcome: Outcome) {
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        self.timers.set(Owner::Request(id), None);
        if self.reserved.is_some_and(|(_, reserved)| reserved == id) {
            self.reserved = None;
        }
        self.queue.remove(id);
        if let Some(instance) = request.seat() {
            self.cancel_seat(&request, instance);
        }
        let used = u64::from(request.prompt_tokens.unwrap_or(0)) + u64::from(request.tokens);
        let completed = matches!(outcome, Outcome::Completed { .. });
        if let Some(assigned) = request.assigned {
            let charged = request.ticket.tokens;
            // Of a stream that was cut the true count is not known here: it pays at least its estimate.
            let used = if completed { used } else { used.max(charged) };
            self.queue.ended(request.ticket.key, charged, used);
            if completed {
                self.rate.ended(self.now.since(assigned));
            }
        }
        match &outcome {
            Outcome::Completed { .. } => self.counters.completed += 1,
            Outcome::Denied(_) => self.counters.denied_after_wait += 1,
            Outcome::Failed(_) => self.counters.failed += 1,
            Outcome::Cancelled(_) => self.counters.cancelled += 1,
        }
        if matches!(outcome, Outcome::Denied(_)) {
            self.counters.denied += 1;
        }
        self.announce(request.record(outcome, self.now));
    }

    fn cancel_seat(&mut self, request: &Request, instance: InstanceId) {
        let place = &mut self.instances[instance.0 as usize];
        let generation = place.generation;
        let Some(seat) = place.seats.get_mut(&request.id) else {
            return;
        };
        seat.cancelled = true;
        let attempt = seat.attempt;
        self.lingering.insert(request.id, instance);
        self.act(Action::SendCancel {
            request: request.id,
            attempt,
            instance,
            generation,
        });
    }

    fn announce(&mut self, record: RequestRecord) {
        self.act(Action::End {
            request: record.request,
            outcome: record.outcome.clone(),
        });
        self.record(Measurement::Request(Box::new(record)));
    }
}

/// What an entry without a worker waits for.
pub(super) fn place_of(request: &Request) -> Place {
    if request.prompt_tokens.is_some() {
        Place::Slot
    } else {
        Place::PromptThread
    }
}
