//! Slots: which attempt sits in which, what it may still produce, and when it leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proto::generate::{FinishReason, Generate};
use proto::span::Micros;
use proto::to_dispatcher::RequestError;
use proto::{Attempt, RequestId, TokenId};

use crate::engine::{Emission, Engine, EngineError, Rejected, Slot, SlotEnd, StepReport, Task};

/// Set by the session thread when a stop string ended a stream: the slot is wanted back. It is set
/// before the dispatcher hears of the end, so whoever asks for a slot after that finds it free.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What the session thread needs in order to turn an attempt's tokens into text.
#[derive(Clone, Debug)]
pub struct Opening {
    pub request: RequestId,
    pub attempt: Attempt,
    /// Tokens of earlier attempts.
    pub emitted: Vec<TokenId>,
    /// Bytes of their text that were handed on.
    pub released_bytes: u64,
    pub stop: Vec<String>,
    pub stopped: StopFlag,
}

/// What the engine thread tells the session thread, in the order in which it happened.
#[derive(Debug)]
pub enum Event {
    /// The attempt sits in `slot`; emissions of that slot are its own from now on.
    Seated {
        opening: Box<Opening>,
        slot: Slot,
        cached_tokens: u32,
    },
    /// The attempt was complete as it came, and never had a slot.
    Complete {
        opening: Box<Opening>,
        reason: FinishReason,
    },
    /// The attempt has no slot and never had one.
    Refused {
        request: RequestId,
        attempt: Attempt,
        error: RequestError,
    },
    Step(Step),
    /// The attempt in `slot` left it because it was asked to.
    Cancelled {
        slot: Slot,
    },
    /// Draining, and no slot is live.
    Drained,
}

/// One step of the engine and what came of it.
#[derive(Debug)]
pub struct Step {
    /// Steps since the start, this one included.
    pub number: u64,
    pub duration: Micros,
    pub report: StepReport,
    /// At most one of each slot. A slot whose emission has an end is free.
    pub emissions: Vec<Emission>,
}

#[derive(Debug)]
struct Seat {
    request: RequestId,
    attempt: Attempt,
    /// Tokens that the stream may still have.
    remaining: u32,
    stop_ids: Vec<TokenId>,
    stopped: StopFlag,
}

/// The seats of one engine.
#[derive(Debug)]
pub struct Batch {
    seats: Vec<Option<Seat>>,
    live: u32,
    draining: bool,
    /// Scratch of `open`.
    free: Vec<Slot>,
    sequence: Vec<TokenId>,
}

impl Batch {
    /// Seats for an engine of `slots` slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        Self {
            seats: (0..slots).map(|_| None).collect(),
            live: 0,
            draining: false,
            free: Vec::new(),
            sequence: Vec::new(),
        }
    }

    /// Slots that hold a live sequence.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.live
    }

    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// No new attempt gets a slot from now on.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Seats an attempt, or says why not.
    ///
    /// # Errors
    ///
    /// `Poisoned` only: a refusal of the engine is the event `Refused`.
    pub fn open(
        &mut self,
        generate: Generate,
        engine: &mut dyn Engine,
    ) -> Result<Event, EngineError> {
        self.sweep(engine);
        let (request, attempt) = (generate.request, generate.attempt);
        let refused = |error| Event::Refused {
            request,
            attempt,
            error,
        };
        let limits = engine.limits();
        if let Some(words) = wrong_with(&generate, limits.vocabulary) {
            return Ok(refused(RequestError::Rejected(words)));
        }
        let first_index = u32::try_from(generate.emitted.len()).unwrap_or(u32::MAX);
        let length = generate.prompt.len() + generate.emitted.len();
        let is_full = length >= usize::try_from(limits.context_tokens).unwrap_or(usize::MAX);
        if is_full && first_index == 0 {
            return Ok(refused(RequestError::Rejected(format!(
                "the prompt of {length} tokens leaves no room in the context of {} tokens",
                limits.context_tokens
            ))));
        }
        let stopped = StopFlag::default();
        let remaining = generate.max_tokens.saturating_sub(first_index);
        if remaining == 0 || is_full {
            return Ok(Event::Complete {
                opening: Box::new(opening(generate, stopped)),
                reason: FinishReason::Length,
            });
        }
        if self.draining {
            return Ok(refused(RequestError::Draining));
        }
        self.free.clear();
        let vacant = self
            .seats
            .iter()
            .zip(0..)
            .filter(|(seat, _)| seat.is_none());
        self.free.extend(vacant.map(|(_, slot)| Slot(slot)));
        self.sequence.clear();
        self.sequence.extend_from_slice(&generate.prompt);
        self.sequence.extend_from_slice(&generate.emitted);
        let best = engine.best_slot(&self.sequence, &self.free);
        let Some(slot) = best.filter(|slot| self.free.contains(slot)) else {
            return Ok(refused(RequestError::NoSlot));
        };
        let task = Task {
            sampling: generate.sampling.clone(),
            logprobs: generate.logprobs,
            first_index,
            ignore_eos: generate.ignore_eos,
            batch_invariant: generate.batch_invariant,
            cache_prompt: generate.cache_prompt,
        };
        let cached_tokens = match engine.admit(slot, &self.sequence, &task) {
            Ok(cached) => cached,
            Err(EngineError::Rejected(rejected)) => return Ok(refused(failure(rejected))),
            Err(poisoned) => return Err(poisoned),
        };
        if let Some(seat) = self.seat_mut(slot) {
            *seat = Some(Seat {
                request,
                attempt,
                remaining,
                stop_ids: generate.stop_ids.clone(),
                stopped: stopped.clone(),
            });
            self.live += 1;
        }
        Ok(Event::Seated {
            opening: Box::new(opening(generate, stopped)),
            slot,
            cached_tokens,
        })
    }

    /// Frees the attempt's slot; `None` where it has none (any more).
    pub fn cancel(
        &mut self,
        request: RequestId,
        attempt: Attempt,
        engine: &mut dyn Engine,
    ) -> Option<Event> {
        self.sweep(engine);
        let is_asked = |seat: &Seat| seat.request == request && seat.attempt == attempt;
        let at = self
            .seats
            .iter()
            .position(|seat| seat.as_ref().is_some_and(is_asked))?;
        let slot = Slot(u32::try_from(at).ok()?);
        self.vacate(slot);
        engine.release(slot);
        Some(Event::Cancelled { slot })
    }

    /// Frees the slots of streams that the session thread has ended.
    pub fn sweep(&mut self, engine: &mut dyn Engine) {
        if self.live == 0 {
            return;
        }
        for (seat, slot) in self.seats.iter_mut().zip(0..) {
            if seat.as_ref().is_some_and(|seat| seat.stopped.is_set()) {
                *seat = None;
                self.live -= 1;
                engine.release(Slot(slot));
            }
        }
    }

    /// Holds what a step emitted to the bounds of each stream, and frees the slots that ended.
    pub fn settle(&mut self, emissions: &mut Vec<Emission>, engine: &mut dyn Engine) {
        emissions.retain_mut(|emission| {
            let Some(Some(seat)) = self.seat_mut(emission.slot) else {
                return false;
            };
            let engine_ended = emission.end.is_some();
            seat.bound(emission);
            if emission.end.is_some() {
                self.vacate(emission.slot);
                if !engine_ended {
                    engine.release(emission.slot);
                }
            }
            !emission.tokens.is_empty() || emission.end.is_some()
        });
    }

    fn seat_mut(&mut self, slot: Slot) -> Option<&mut Option<Seat>> {
        self.seats.get_mut(usize::try_from(slot.0).ok()?)
    }

    fn vacate(&mut self, slot: Slot) {
        if self.seat_mut(slot).and_then(Option::take).is_some() {
            self.live -= 1;
        }
    }
}

impl Seat {
    /// Cuts an emission at the first stop id, then at the token budget.
    fn bound(&mut self, emission: &mut Emission) {
        let is_stop = |token: &TokenId| self.stop_ids.contains(token);
        if !self.stop_ids.is_empty()
            && let Some(at) = emission.tokens.iter().position(is_stop)
        {
            cut(emission, at, FinishReason::Stop);
        }
        let allowed = usize::try_from(self.remaining).unwrap_or(usize::MAX);
        if emission.tokens.len() > allowed
            || (emission.tokens.len() == allowed && emission.end.is_none())
        {
            cut(emission, allowed, FinishReason::Length);
        }
        let taken = u32::try_from(emission.tokens.len()).unwrap_or(u32::MAX);
        self.remaining = self.remaining.saturating_sub(taken);
    }
}

fn cut(emission: &mut Emission, length: usize, reason: FinishReason) {
    emission.tokens.truncate(length);
    emission.logprobs.truncate(length);
    emission.end = Some(SlotEnd::Finished(reason));
}

/// What no engine should be asked, in words for the client.
fn wrong_with(generate: &Generate, vocabulary: u32) -> Option<String> {
    if generate.prompt.is_empty() {
        return Some("the prompt is empty".to_string());
    }
    let mut ids = generate.prompt.iter().chain(&generate.emitted);
    let unknown = ids.find(|id| **id >= vocabulary)?;
    Some(format!(
        "token {unknown} is not among the model's {vocabulary}"
    ))
}

fn opening(generate: Generate, stopped: StopFlag) -> Opening {
    Opening {
        request: generate.request,
        attempt: generate.attempt,
        emitted: generate.emitted,
        released_bytes: generate.released_bytes,
        stop: generate.stop,
        stopped,
    }
}

/// A row's failure in the words of the wire.
#[must_use]
pub fn failure(rejected: Rejected) -> RequestError {
    match rejected {
        Rejected::Request(words) => RequestError::Rejected(words),
        Rejected::Row(words) => RequestError::Engine(words),
    }
}
