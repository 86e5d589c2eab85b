//! What the engine did, in the words of the wire: tokens become text, stop strings end streams.

use std::sync::Arc;

use proto::span::Micros;
use proto::to_dispatcher::{End, Row, StepTokens, ToDispatcher, Token};
use proto::{Attempt, FinishReason, RequestId};

use crate::batch::{Event, Opening, Step, StopFlag, failure};
use crate::engine::{Emission, Slot, SlotEnd, StepReport, TextModel};
use crate::stream::TextStream;

/// The text state of every slot's stream. A function of the events it is given, in their order.
pub struct Rows {
    model: Arc<dyn TextModel>,
    /// By slot; `None` where no stream is, or where it has ended.
    streams: Vec<Option<Stream>>,
    /// Number of the newest step.
    step: u64,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows")
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Stream {
    request: RequestId,
    attempt: Attempt,
    next_index: u32,
    text: TextStream,
    stopped: StopFlag,
}

impl Rows {
    /// Text states for an engine of `slots` slots.
    #[must_use]
    pub fn new(model: Arc<dyn TextModel>, slots: u32) -> Self {
        Self {
            model,
            streams: (0..slots).map(|_| None).collect(),
            step: 0,
        }
    }

    /// Appends to `out` what the dispatcher is to hear of `event`.
    pub fn tell(&mut self, event: Event, out: &mut Vec<ToDispatcher>) {
        match event {
            Event::Seated {
                opening,
                slot,
                cached_tokens,
            } => {
                out.push(ToDispatcher::Started {
                    request: opening.request,
                    attempt: opening.attempt,
                    cached_tokens,
                });
                let stream = Stream::open(&*self.model, &opening);
                if stream.text.is_stopped() {
                    // The slot is wanted back before anyone hears of the end.
                    stream.stopped.set();
                    out.push(self.alone(stream.close(FinishReason::Stop)));
                    self.put(slot, None);
                } else {
                    self.put(slot, Some(stream));
                }
            }
            Event::Complete { opening, reason } => {
                let stream = Stream::open(&*self.model, &opening);
                out.push(self.alone(stream.close(reason)));
            }
            Event::Refused {
                request,
                attempt,
                error,
            } => out.push(ToDispatcher::Failed {
                request,
                attempt,
                error,
            }),
            Event::Step(step) => out.push(self.step(step)),
            Event::Cancelled { slot } => {
                if let Some(stream) = self.take(slot) {
                    out.push(self.alone(stream.end_with(End::Cancelled)));
                }
            }
            Event::Drained => out.push(ToDispatcher::Drained),
        }
    }

    fn step(&mut self, step: Step) -> ToDispatcher {
        self.step = step.number;
        let mut rows = Vec::with_capacity(step.emissions.len());
        for emission in step.emissions {
            let Some(slot) = usize::try_from(emission.slot.0).ok() else {
                continue;
            };
            // A stream that a stop string ended: what its slot gave since then is dropped.
            let Some(place) = self.streams.get_mut(slot) else {
                continue;
            };
            if let Some(stream) = place {
                let row = stream.take(&*self.model, emission);
                if row.end.is_some() {
                    *place = None;
                }
                rows.push(row);
            }
        }
        let StepReport {
            batch,
            prefill_tokens,
        } = step.report;
        ToDispatcher::Tokens(StepTokens {
            step: step.number,
            duration: step.duration,
            batch,
            prefill_tokens,
            rows,
        })
    }

    /// A row that no step gave.
    fn alone(&self, row: Row) -> ToDispatcher {
        ToDispatcher::Tokens(StepTokens {
            step: self.step,
            duration: Micros(0),
            batch: 0,
            prefill_tokens: 0,
            rows: vec![row],
        })
    }

    fn put(&mut self, slot: Slot, stream: Option<Stream>) {
        if let Some(place) = usize::try_from(slot.0)
            .ok()
            .and_then(|at| self.streams.get_mut(at))
        {
            *place = stream;
        }
    }

    fn take(&mut self, slot: Slot) -> Option<Stream> {
        self.streams.get_mut(usize::try_from(slot.0).ok()?)?.take()
    }
}

impl Stream {
    fn open(model: &dyn TextModel, opening: &Opening) -> Self {
        Self {
            request: opening.request,
            attempt: opening.attempt,
            next_index: u32::try_from(opening.emitted.len()).unwrap_or(u32::MAX),
            text: TextStream::resume(
                model,
                &opening.emitted,
                opening.released_bytes,
                &opening.stop,
            ),
            stopped: opening.stopped.clone(),
        }
    }

    /// One step's tokens of this stream.
    fn take(&mut self, model: &dyn TextModel, emission: Emission) -> Row {
        let first_index = self.next_index;
        let mut tokens = Vec::with_capacity(emission.tokens.len());
        let mut logprobs = emission.logprobs.into_iter();
        let mut end = None;
        for id in emission.tokens {
            let mut text = String::new();
            let stopped = self.text.push(model, id, &mut text);
            self.next_index = self.next_index.saturating_add(1);
            tokens.push(Token {
                id,
                text,
                released_bytes: self.text.released_bytes(),
                logprobs: logprobs.next(),
            });
            if stopped {
                self.stopped.set();
                end = Some(End::Finished(FinishReason::Stop));
                break;
            }
        }
        let mut tail = String::new();
        if end.is_none() {
            end = emission.end.map(|end| match end {
                SlotEnd::Finished(reason) => self.finish(reason, &mut tail),
                SlotEnd::Failed(rejected) => End::Failed(failure(rejected)),
            });
        }
        Row {
            request: self.request,
            attempt: self.attempt,
            first_index,
            tokens,
            tail,
            end,
        }
    }

    /// Ends the stream without tokens: what was held back is its tail.
    fn close(mut self, reason: FinishReason) -> Row {
        let mut tail = String::new();
        let end = self.finish(reason, &mut tail);
        Row {
            tail,
            ..self.end_with(end)
        }
    }

    fn finish(&mut self, reason: FinishReason, tail: &mut String) -> End {
        if self.text.finish(tail) {
            End::Finished(FinishReason::Stop)
        } else {
            End::Finished(reason)
        }
    }

    fn end_with(&self, end: End) -> Row {
        Row {
            request: self.request,
            attempt: self.attempt,
            first_index: self.next_index,
            tokens: Vec::new(),
            tail: String::new(),
            end: Some(end),
        }
    }
}
