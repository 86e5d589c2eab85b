//! Links and relays: frames in order, the fence, and what the machine hears of them.

use std::time::Duration;

use dispatcher::machine::event::{Accepted, AttemptError, Event, TokenisedOutcome, WorkerFacts};
use proto::{Attempt, FinishReason, RequestId};

use crate::client::{model_hash, token};
use crate::oracle::WorkerId;
use crate::world::{CONTEXT_TOKENS, Happening, World};

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) request: RequestId,
    pub(crate) attempt: Attempt,
    pub(crate) first_index: u32,
    pub(crate) tokens: Vec<u64>,
    pub(crate) end: Option<RowEnd>,
}

#[derive(Clone, Debug)]
pub(crate) enum RowEnd {
    Finished(FinishReason),
    Cancelled,
    Failed,
}

/// What a worker writes on its link.
#[derive(Clone, Debug)]
pub(crate) enum Frame {
    Connected,
    Loading(u32),
    Warming(u32),
    Ready,
    Tokenised(RequestId, TokenisedOutcome),
    Started(RequestId, Attempt),
    Step { rows: Vec<Row>, pulse: u64 },
    Failed(RequestId, Attempt, AttemptError),
    Drained,
    Eof,
}

/// What reaches a worker.

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Link {
    None,
    Open,
    Fenced,
}

impl World {
    pub(crate) fn write(&mut self, id: WorkerId, frame: Frame) {
        let latency = self.dice.micros(20, 2000);
        let at = self.now.after(latency);
        let worker = self.workers.get_mut(&id).unwrap();
        worker.framed_at = worker.framed_at.max(at);
        let at = worker.framed_at;
        self.put(at, Happening::Frame(id, frame));
    }

    /// To the machine by way of the driver's queue, in order per worker.
    pub(crate) fn report(&mut self, id: WorkerId, event: Event) {
        let latency = if self.dice.chance(3000) {
            self.dice.micros(0, 1000)
        } else {
            Duration::ZERO
        };
        let at = self.now.after(latency);
        let worker = self.workers.get_mut(&id).unwrap();
        worker.told_at = worker.told_at.max(at);
        let at = worker.told_at;
        if at == self.now {
            self.tell(event);
        } else {
            self.put(at, Happening::Tell(event));
        }
    }

    pub(crate) fn fence(&mut self, id: WorkerId) {
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.link != Link::Open {
            return;
        }
        worker.link = Link::Fenced;
        let session = std::mem::take(&mut worker.session);
        let mut accepted = Vec::new();
        for (request, attempt) in session {
            let client = self.clients.get_mut(&request).unwrap();
            if client.attempt == attempt {
                client.attempt = attempt.next();
            }
            accepted.push(Accepted {
                request,
                attempt,
                tokens: u32::try_from(client.tokens.len()).unwrap(),
            });
        }
        let (instance, generation) = id;
        let at = self.now;
        let worker = self.workers.get_mut(&id).unwrap();
        worker.told_at = worker.told_at.max(at);
        let at = worker.told_at;
        // Never inside of an action: the driver's loop hands it over with its next turn.
        self.put(
            at,
            Happening::Tell(Event::AttemptEnded {
                instance,
                generation,
                accepted,
            }),
        );
    }

    pub(crate) fn read(&mut self, id: WorkerId, frame: Frame) {
        let (instance, generation) = id;
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.link == Link::Fenced {
            return;
        }
        if !matches!(frame, Frame::Eof) && worker.cut_at.is_some_and(|at| self.now > at) {
            return;
        }
        if matches!(frame, Frame::Connected) {
            if !worker.alive {
                return;
            }
            worker.link = Link::Open;
        }
        if worker.link == Link::None {
            return;
        }
        match frame {
            Frame::Connected => self.report(
                id,
                Event::Connected {
                    instance,
                    generation,
                },
            ),
            Frame::Loading(permille) => self.report(
                id,
                Event::LoadProgress {
                    instance,
                    generation,
                    permille,
                },
            ),
            Frame::Warming(done) => self.report(
                id,
                Event::WarmProgress {
                    instance,
                    generation,
                    done,
                    of: 2,
                },
            ),
            Frame::Ready => {
                let facts = WorkerFacts {
                    slots: worker.slots,
                    context_tokens: CONTEXT_TOKENS,
                    longest_token_bytes: 16,
                    model: model_hash(worker.model),
                    start_up: Duration::from_secs(1),
                };
                self.report(
                    id,
                    Event::Ready {
                        instance,
                        generation,
                        facts,
                    },
                );
            }
            Frame::Tokenised(request, outcome) => self.report(
                id,
                Event::Tokenised {
                    request,
                    instance,
                    generation,
                    outcome,
                },
            ),
            Frame::Started(request, attempt) => self.report(
                id,
                Event::Started {
                    request,
                    attempt,
                    cached_tokens: 0,
                },
            ),
            Frame::Failed(request, attempt, error) => {
                worker.session.remove(&request);
                self.report(
                    id,
                    Event::RequestFailed {
                        request,
                        attempt,
                        error,
                    },
                );
            }
            Frame::Step { rows, pulse } => self.read_step(id, rows, pulse),
            Frame::Drained => self.report(
                id,
                Event::Drained {
                    instance,
                    generation,
                },
            ),
            Frame::Eof => self.fence(id),
        }
    }

    pub(crate) fn read_step(&mut self, id: WorkerId, rows: Vec<Row>, pulse: u64) {
        let (instance, generation) = id;
        let worker = self.workers.get_mut(&id).unwrap();
        worker.last_news = self.now;
        let longest_step = worker.longest_step;
        let model = worker.model;
        for row in rows {
            if let Some(event) = self.relay(id, &row, model) {
                self.report(id, event);
            }
        }
        self.report(
            id,
            Event::Progress {
                instance,
                generation,
                pulse,
                longest_step,
            },
        );
    }

    /// The fence of one request: takes a row whose attempt and index match. Returns what the machine
    /// must hear of it. An end is told even where the client's side has ended, for the seat's sake.
    pub(crate) fn relay(&mut self, id: WorkerId, row: &Row, model: u8) -> Option<Event> {
        let (request, attempt) = (row.request, row.attempt);
        if row.end.is_some() {
            let worker = self.workers.get_mut(&id).unwrap();
            if worker.session.get(&request) == Some(&attempt) {
                worker.session.remove(&request);
            }
        }
        let client = self.clients.get_mut(&request).unwrap();
        if client.ended.is_some() || client.end_relayed {
            return row
                .end
                .is_some()
                .then_some(Event::CancelDone { request, attempt });
        }
        if client.attempt != attempt {
            return None;
        }
        let expected = u32::try_from(client.tokens.len()).unwrap();
        assert_eq!(
            row.first_index, expected,
            "a stream goes on where it was: no gap, no repeat"
        );
        let first = client.tokens.is_empty() && !row.tokens.is_empty();
        for (index, value) in (row.first_index..).zip(&row.tokens) {
            assert_eq!(
                *value,
                token(request, index, model),
                "each token is its index's"
            );
            client.tokens.push(*value);
        }
        if !row.tokens.is_empty() {
            self.oracle.streams(request, model_hash(model));
        }
        let tokens = u32::try_from(client.tokens.len()).unwrap();
        let end = row.end.clone();
        if matches!(end, Some(RowEnd::Finished(_))) {
            client.end_relayed = true;
        }
        if first && end.is_some() {
            self.report(id, Event::FirstToken { request, attempt });
        } else if first {
            return Some(Event::FirstToken { request, attempt });
        }
        match end? {
            RowEnd::Finished(reason) => Some(Event::Finished {
                request,
                attempt,
                reason,
                tokens,
            }),
            RowEnd::Cancelled => Some(Event::CancelDone { request, attempt }),
            RowEnd::Failed => Some(Event::RequestFailed {
                request,
                attempt,
                error: AttemptError::Engine("not a number".to_owned()),
            }),
        }
    }
}
