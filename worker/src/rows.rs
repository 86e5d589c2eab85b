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

#[cfg(test)]
mod tests {
    use proto::TokenId;

    use super::*;
    use crate::engine::Rejected;
    use crate::engine::scripted::ScriptedText;

    fn rows() -> Rows {
        Rows::new(Arc::new(ScriptedText), 4)
    }

    fn opening(request: u64, stop: &[&str]) -> Box<Opening> {
        Box::new(Opening {
            request: RequestId(request),
            attempt: Attempt(3),
            emitted: Vec::new(),
            released_bytes: 0,
            stop: stop.iter().map(ToString::to_string).collect(),
            stopped: StopFlag::default(),
        })
    }

    fn seated(slot: u32, opening: Box<Opening>) -> Event {
        Event::Seated {
            opening,
            slot: Slot(slot),
            cached_tokens: 0,
        }
    }

    fn emission(slot: u32, text: &str, end: Option<SlotEnd>) -> Emission {
        Emission {
            slot: Slot(slot),
            tokens: text.bytes().map(TokenId::from).collect(),
            logprobs: Vec::new(),
            end,
        }
    }

    fn step(emissions: Vec<Emission>) -> Event {
        Event::Step(Step {
            number: 9,
            duration: Micros(5),
            report: StepReport::default(),
            emissions,
        })
    }

    /// What is said of the events: the rows of all frames, and how many frames had any.
    fn told(rows: &mut Rows, events: Vec<Event>) -> (Vec<Row>, usize) {
        let mut out = Vec::new();
        for event in events {
            rows.tell(event, &mut out);
        }
        let mut frames = 0;
        let said = out.into_iter().filter_map(|message| match message {
            ToDispatcher::Tokens(step) => Some(step.rows),
            _ => None,
        });
        let said = said.inspect(|rows| frames += usize::from(!rows.is_empty()));
        (said.flatten().collect(), frames)
    }

    fn text(row: &Row) -> String {
        row.tokens.iter().map(|token| token.text.as_str()).collect()
    }

    const LENGTH: Option<SlotEnd> = Some(SlotEnd::Finished(FinishReason::Length));

    #[test]
    fn one_frame_carries_all_rows_of_a_step() {
        let mut rows = rows();
        let events = vec![
            seated(0, opening(1, &[])),
            seated(2, opening(2, &[])),
            step(vec![emission(0, "ab", None), emission(2, "c", LENGTH)]),
        ];
        let (said, frames) = told(&mut rows, events);
        assert_eq!(frames, 1);
        assert_eq!((text(&said[0]), said[0].end.clone()), ("ab".into(), None));
        assert_eq!(said[0].tokens[1].released_bytes, 2);
        assert_eq!(said[1].end, Some(End::Finished(FinishReason::Length)));
    }

    #[test]
    fn what_a_slot_gives_after_a_stop_string_is_dropped_until_it_is_seated_anew() {
        let mut rows = rows();
        let first = opening(1, &["xy"]);
        let stopped = first.stopped.clone();
        let (said, _) = told(
            &mut rows,
            vec![seated(1, first), step(vec![emission(1, "axyb", None)])],
        );
        assert!(stopped.is_set());
        assert_eq!(text(&said[0]), "a");
        assert_eq!(
            said[0].tokens.len(),
            3,
            "the token after the match is not in the stream"
        );
        assert_eq!(said[0].end, Some(End::Finished(FinishReason::Stop)));
        let late = vec![
            step(vec![emission(1, "late", LENGTH)]),
            Event::Cancelled { slot: Slot(1) },
            seated(1, opening(2, &[])),
            step(vec![emission(1, "new", None)]),
        ];
        let (said, _) = told(&mut rows, late);
        assert_eq!(said.len(), 1);
        assert_eq!(
            (said[0].request, text(&said[0])),
            (RequestId(2), "new".into())
        );
    }

    #[test]
    fn an_end_without_a_token_releases_what_was_held_back_as_its_tail() {
        let mut rows = rows();
        let events = vec![
            seated(0, opening(1, &["STOP"])),
            step(vec![emission(0, "a ST", None)]),
            step(vec![emission(
                0,
                "",
                Some(SlotEnd::Finished(FinishReason::Stop)),
            )]),
        ];
        let (said, _) = told(&mut rows, events);
        assert_eq!((text(&said[0]).as_str(), said[0].tail.as_str()), ("a ", ""));
        assert_eq!((said[1].first_index, said[1].tail.as_str()), (4, "ST"));
    }

    #[test]
    fn a_failed_or_cancelled_row_releases_nothing_more() {
        let mut rows = rows();
        let fault = SlotEnd::Failed(Rejected::Row("not a number".into()));
        let events = vec![
            seated(0, opening(1, &["STOP"])),
            seated(1, opening(2, &["STOP"])),
            step(vec![
                emission(0, "ST", Some(fault)),
                emission(1, "ST", None),
            ]),
            Event::Cancelled { slot: Slot(1) },
        ];
        let (said, _) = told(&mut rows, events);
        assert!(
            said.iter()
                .all(|row| row.tail.is_empty() && text(row).is_empty())
        );
        assert!(matches!(said[0].end, Some(End::Failed(_))));
        assert_eq!(said[2].end, Some(End::Cancelled));
    }

    #[test]
    fn a_resume_whose_tokens_hold_a_stop_string_ends_with_what_it_owes() {
        let mut rows = rows();
        let mut resumed = opening(1, &["STOP"]);
        resumed.emitted = "one STOP".bytes().map(TokenId::from).collect();
        resumed.released_bytes = 1;
        let stopped = resumed.stopped.clone();
        let (said, _) = told(&mut rows, vec![seated(0, resumed)]);
        assert!(stopped.is_set(), "the slot is wanted back");
        assert_eq!((said[0].first_index, said[0].tokens.len()), (8, 0));
        assert_eq!(said[0].tail, "ne ");
        assert_eq!(said[0].end, Some(End::Finished(FinishReason::Stop)));
    }
}
