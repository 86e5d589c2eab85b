//! One request's bounded path from a link to its HTTP response: the fence that lets each token through once.
//!
//! The sender's side is the link's (tokens) and the driver's (assignment, outcomes); the receiver's
//! side is the HTTP handler's. Dropping the receiver is a cancel. The relay accepts only a row whose
//! attempt and first index are the ones it waits for; all else is counted and dropped. It keeps the
//! ids of all accepted tokens, from which, and from nothing else, a stream is resumed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::to_dispatcher::{End, Logprobs, Row};
use proto::{Attempt, FinishReason, InstanceId, TokenId};
use tokio::sync::Notify;

use crate::machine::{Outcome, Tick};

/// Text and other payload of this many bytes may wait for the client; more is a slow reader.
pub const UNREAD_BYTES_MAX: usize = 256 << 10;

/// What one piece costs beside its text, in the bound: its share of an SSE event.
const PIECE_OVERHEAD_BYTES: usize = 16;

/// What one piece's log probabilities hold in memory.
fn logprobs_bytes(logprobs: &Logprobs) -> usize {
    let top: usize = logprobs.top.iter().map(|one| one.bytes.len()).sum();
    size_of::<Logprobs>() + logprobs.bytes.len() + size_of_val(logprobs.top.as_slice()) + top
}

/// Moments and counts of one request, for `timings`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timeline {
    pub received: Tick,
    /// First assignment.
    pub assigned: Option<Tick>,
    pub first_token: Option<Tick>,
    pub last_token: Option<Tick>,
    /// The instance of the newest attempt.
    pub instance: Option<InstanceId>,
    pub attempts: u32,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub completion_tokens: u32,
    /// Sum of the batch sizes of the steps that gave this request tokens, and their number.
    pub batch_sum: u64,
    pub steps: u64,
}

/// What the HTTP handler takes out at once. Buffers are reused: pass the same one again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// All pieces' text, one after another.
    pub text: String,
    pub pieces: Vec<Piece>,
    pub end: Option<Terminal>,
}

/// One token's share of a batch. Text that only the stream's end released, after the newest token
/// was taken, comes as one more piece under that token's id.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    pub id: TokenId,
    /// Where this piece's text ends in [`Batch::text`]. Empty where the text is held back.
    pub text_end: usize,
    pub logprobs: Option<Logprobs>,
    /// No token of its own: more text of one that was taken before.
    pub repeated: bool,
}

impl Batch {
    pub fn clear(&mut self) {
        self.text.clear();
        self.pieces.clear();
        self.end = None;
    }
}

/// The one terminal event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Terminal {
    pub outcome: Outcome,
    pub timeline: Timeline,
}

/// What became of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept {
    /// Its tokens are in. `first`: the first token of the stream was among them.
    Taken {
        first: bool,
        finished: Option<FinishReason>,
    },
    /// An older attempt, or after the end: counted by the caller and dropped.
    Stale,
    /// The right attempt with a token index that does not follow: the worker is at fault.
    Gap { expected: u32 },
    /// The bound is passed: the request must be cancelled as a slow reader. Its tokens are in.
    Overflow,
}

/// What a resume is built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub attempt: Attempt,
    pub emitted: Vec<TokenId>,
    pub released_bytes: u64,
}

#[derive(Debug, Default)]
struct Inner {
    attempt: Attempt,
    emitted: Vec<TokenId>,
    released_bytes: u64,
    pending: Batch,
    /// What the log probabilities in `pending` hold.
    pending_logprobs_bytes: usize,
    /// The prompt's ids, where the client asked for them.
    prompt: Option<Arc<[TokenId]>>,
    ended: bool,
    receiver_gone: bool,
    timeline: Timeline,
}

#[derive(Debug, Default)]
struct Shared {
    inner: Mutex<Inner>,
    readable: Notify,
}

impl Shared {
    // A panic while the lock was held leaves plain data behind; going on with it is better than
    // losing every other request of the link.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end that the link and the driver write to. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sender(Arc<Shared>);

/// The end that the HTTP handler reads.
#[derive(Debug)]
pub struct Receiver(Arc<Shared>);

/// A new relay of a request received at `received`.
#[must_use]
pub fn channel(received: Tick) -> (Sender, Receiver) {
    let shared = Arc::new(Shared::default());
    shared.lock().timeline.received = received;
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl Sender {
    /// When the front had the request.
    #[must_use]
    pub fn received(&self) -> Tick {
        self.0.lock().timeline.received
    }

    /// Begins an attempt: rows of any other are stale from now on.
    pub fn assign(&self, attempt: Attempt, instance: InstanceId, prompt_tokens: u32, now: Tick) {
        let mut inner = self.0.lock();
        inner.attempt = attempt;
        let timeline = &mut inner.timeline;
        timeline.assigned.get_or_insert(now);
        timeline.instance = Some(instance);
        timeline.attempts += 1;
        timeline.prompt_tokens = prompt_tokens;
    }

    /// Keeps the prompt's ids for a client that asked for them. Until the first token another model
    /// may count the prompt anew.
    pub fn prompt(&self, ids: Arc<[TokenId]>) {
        self.0.lock().prompt = Some(ids);
    }

    /// Ends `attempt`, if it is the current one: nothing of it is accepted any more. Returns what
    /// the relay holds, from which the request may go on elsewhere.
    pub fn fence(&self, attempt: Attempt) -> Progress {
        let mut inner = self.0.lock();
        if inner.attempt == attempt {
            inner.attempt = attempt.next();
        }
        Progress {
            attempt: inner.attempt,
            emitted: inner.emitted.clone(),
            released_bytes: inner.released_bytes,
        }
    }

    /// What has been accepted so far.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let inner = self.0.lock();
        Progress {
            attempt: inner.attempt,
            emitted: inner.emitted.clone(),
            released_bytes: inner.released_bytes,
        }
    }

    /// Tokens accepted so far.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        u32::try_from(self.0.lock().emitted.len()).unwrap_or(u32::MAX)
    }

    /// The attempt has a slot.
    pub fn started(&self, attempt: Attempt, cached_tokens: u32) {
        let mut inner = self.0.lock();
        if inner.attempt == attempt {
            inner.timeline.cached_tokens = cached_tokens;
        }
    }

    /// Takes one row of a `Tokens` frame, where attempt and index match.
    pub fn accept(&self, row: Row, batch: u32, now: Tick) -> Accept {
        let mut inner = self.0.lock();
        if inner.ended || row.attempt != inner.attempt {
            return Accept::Stale;
        }
        let expected = u32::try_from(inner.emitted.len()).unwrap_or(u32::MAX);
        if row.first_index != expected {
            return Accept::Gap { expected };
        }
        let first = inner.emitted.is_empty() && !row.tokens.is_empty();
        if !row.tokens.is_empty() {
            inner.timeline.first_token.get_or_insert(now);
            inner.timeline.last_token = Some(now);
            inner.timeline.batch_sum += u64::from(batch);
            inner.timeline.steps += 1;
        }
        for token in row.tokens {
            inner.emitted.push(token.id);
            inner.released_bytes = token.released_bytes;
            inner.pending.text.push_str(&token.text);
            inner.pending_logprobs_bytes += token.logprobs.as_ref().map_or(0, logprobs_bytes);
            let text_end = inner.pending.text.len();
            inner.pending.pieces.push(Piece {
                id: token.id,
                text_end,
                logprobs: token.logprobs,
                repeated: false,
            });
        }
        if !row.tail.is_empty() {
            inner.pending.text.push_str(&row.tail);
            inner.released_bytes += row.tail.len() as u64;
            let text_end = inner.pending.text.len();
            // It belongs to the newest token, which may have been taken already.
            match inner.pending.pieces.last_mut() {
                Some(piece) => piece.text_end = text_end,
                None => {
                    let id = inner.emitted.last().copied().unwrap_or_default();
                    inner.pending.pieces.push(Piece {
                        id,
                        text_end,
                        logprobs: None,
                        repeated: true,
                    });
                }
            }
        }
        inner.timeline.completion_tokens = u32::try_from(inner.emitted.len()).unwrap_or(u32::MAX);
        let finished = match row.end {
            Some(End::Finished(reason)) => {
                inner.ended = true;
                let timeline = inner.timeline;
                inner.pending.end = Some(Terminal {
                    outcome: Outcome::Completed { reason },
                    timeline,
                });
                Some(reason)
            }
            // Failures and cancels are the machine's to judge: it may try elsewhere.
            _ => None,
        };
        let unread = inner.pending.text.len()
            + inner.pending.pieces.len() * PIECE_OVERHEAD_BYTES
            + inner.pending_logprobs_bytes;
        drop(inner);
        self.0.readable.notify_one();
        if unread > UNREAD_BYTES_MAX && finished.is_none() {
            return Accept::Overflow;
        }
        Accept::Taken { first, finished }
    }

    /// Ends the stream with `outcome`, unless it has ended. The first end wins.
    pub fn end(&self, outcome: Outcome) -> bool {
        let mut inner = self.0.lock();
        if inner.ended {
            return false;
        }
        inner.ended = true;
        let timeline = inner.timeline;
        inner.pending.end = Some(Terminal { outcome, timeline });
        drop(inner);
        self.0.readable.notify_one();
        true
    }

    /// The client's side is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.lock().receiver_gone
    }
}

impl Receiver {
    /// Waits until there is something, then takes all of it into `batch` (cleared first).
    ///
    /// Cancel-safe. After the end was taken it waits for ever.
    pub async fn next(&mut self, batch: &mut Batch) {
        batch.clear();
        loop {
            {
                let mut inner = self.0.lock();
                if !inner.pending.pieces.is_empty() || inner.pending.end.is_some() {
                    std::mem::swap(&mut inner.pending, batch);
                    inner.pending_logprobs_bytes = 0;
                    return;
                }
            }
            self.0.readable.notified().await;
        }
    }

    #[must_use]
    pub fn timeline(&self) -> Timeline {
        self.0.lock().timeline
    }

    /// The prompt's ids, where [`Sender::prompt`] was told them.
    #[must_use]
    pub fn prompt_ids(&self) -> Option<Arc<[TokenId]>> {
        self.0.lock().prompt.clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.lock().receiver_gone = true;
    }
}

#[cfg(test)]
mod tests {
    use proto::RequestId;
    use proto::to_dispatcher::{Token, TopLogprob};

    use super::*;

    fn row(first_index: u32, top: usize) -> Row {
        let one = TopLogprob {
            id: 1,
            bytes: vec![b'x'; 8],
            logprob: -1.0,
        };
        Row {
            request: RequestId(1),
            attempt: Attempt(1),
            first_index,
            tokens: vec![Token {
                id: 1,
                text: "x".to_owned(),
                released_bytes: u64::from(first_index) + 1,
                logprobs: Some(Logprobs {
                    chosen: -1.0,
                    bytes: b"x".to_vec(),
                    top: vec![one; top],
                }),
            }],
            tail: String::new(),
            end: None,
        }
    }

    #[tokio::test]
    async fn log_probabilities_count_against_the_bound_until_they_are_taken() {
        let (sender, mut receiver) = channel(Tick::ZERO);
        sender.assign(Attempt(1), InstanceId(0), 1, Tick::ZERO);
        let rows =
            1 + UNREAD_BYTES_MAX / logprobs_bytes(row(0, 20).tokens[0].logprobs.as_ref().unwrap());
        let rows = u32::try_from(rows).unwrap();
        let mut batch = Batch::default();
        for index in 0..rows - 1 {
            let accept = sender.accept(row(index, 20), 1, Tick::ZERO);
            if accept == Accept::Overflow {
                // The text beside them counts too.
                assert!(index > rows - rows / 10, "{index} of {rows}");
                break;
            }
        }
        receiver.next(&mut batch).await;
        let next = sender.tokens();
        let accept = sender.accept(row(next, 20), 1, Tick::ZERO);
        assert!(matches!(accept, Accept::Taken { .. }), "{accept:?}");
        for index in next + 1..next + 1 + rows {
            if sender.accept(row(index, 20), 1, Tick::ZERO) == Accept::Overflow {
                return;
            }
        }
        panic!("the bound was never passed");
    }
}
