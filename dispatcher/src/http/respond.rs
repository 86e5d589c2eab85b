//! One request from its ticket to its response: a JSON body, or a stream of events.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::Frame;
use proto::{FinishReason, TokenId};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info};

use super::error::ApiError;
use super::logprobs::Pending;
use super::peer::Peer;
use super::sse::{self, Extras, Identity, Renderer};
use super::timings::{Timings, UsageBody};
use super::validate::Route;
use crate::clock::Clock;
use crate::gateway::Ticket;
use crate::machine::Outcome;
use crate::relay::{Batch, Terminal};

/// Rendered bytes that are handed to the connection at once. What is not rendered yet stays where
/// its bound is kept.
const SLICE_BYTES: usize = 16 << 10;

/// The times that a stream keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamTimes {
    /// Status and headers go out after this, whatever there is to say.
    pub(crate) first_wait: Duration,
    /// Between comments of a stream that has nothing to say.
    pub(crate) keepalive: Duration,
}

/// A request under way and the connection that it came on.
pub(crate) struct Open {
    ticket: Ticket,
    peer: Arc<Peer>,
    clock: Clock,
    ended: bool,
}

impl Open {
    pub(crate) fn new(ticket: Ticket, peer: Arc<Peer>, clock: Clock) -> Self {
        Self {
            ticket,
            peer,
            clock,
            ended: false,
        }
    }

    /// The terminal event was read.
    fn end(&mut self, terminal: &Terminal) {
        self.ended = true;
        self.ticket.finished();
        debug!(request = %self.ticket.request, outcome = ?terminal.outcome, "request ended");
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let request = self.ticket.request;
        if self.peer.is_stalled() {
            self.ticket.slow_reader();
            info!(%request, "request cancelled: its client does not read");
        } else {
            info!(%request, "request cancelled: its connection closed");
        }
    }
}

/// All of a completed request.
#[derive(Debug)]
pub(crate) struct Collected {
    pub(crate) text: String,
    pub(crate) logprobs: Pending,
    pub(crate) reason: FinishReason,
    pub(crate) timings: Timings,
    pub(crate) usage: UsageBody,
    ids: Option<Ids>,
}

/// The tokens of a request by their ids.
#[derive(Debug)]
struct Ids {
    prompt: Arc<[TokenId]>,
    output: Vec<TokenId>,
}

impl Collected {
    /// Adds the ids of prompt and output to the answer's `body`, where they were asked for.
    pub(crate) fn add_ids(&self, route: Route, body: &mut Value) {
        let Some(ids) = &self.ids else {
            return;
        };
        body["choices"][0]["token_ids"] = json!(ids.output);
        if route == Route::Completions {
            body["choices"][0]["prompt_token_ids"] = json!(&ids.prompt[..]);
        }
        body["prompt_token_ids"] = json!(&ids.prompt[..]);
    }
}

/// Waits for the end.
pub(crate) async fn collect(
    mut open: Open,
    extras: Extras,
    route: Route,
) -> Result<Collected, ApiError> {
    let mut text = String::new();
    let mut output = Vec::new();
    let mut logprobs = Pending::default();
    let mut characters = 0;
    let mut batch = Batch::default();
    let terminal = loop {
        open.ticket.relay.next(&mut batch).await;
        let mut start = 0;
        for piece in &mut batch.pieces {
            if extras.token_ids && !piece.repeated {
                output.push(piece.id);
            }
            if let Some(one) = piece.logprobs.take() {
                logprobs.push(one, characters);
                if route == Route::Completions {
                    characters += batch.text[start..piece.text_end].chars().count();
                }
            }
            start = piece.text_end;
        }
        text.push_str(&batch.text);
        if let Some(terminal) = batch.end.take() {
            break terminal;
        }
    };
    open.end(&terminal);
    let Outcome::Completed { reason } = terminal.outcome else {
        return Err(failure(&terminal.outcome));
    };
    Ok(Collected {
        text,
        logprobs,
        reason,
        timings: Timings::new(&terminal.timeline, open.clock.now()),
        usage: UsageBody::new(&terminal.timeline),
        ids: extras.token_ids.then(|| Ids {
            prompt: open.ticket.relay.prompt_ids().unwrap_or_default(),
            output,
        }),
    })
}

/// Waits for the first token, then answers 200 with a stream; a failure before that has its own status.
pub(crate) async fn stream(
    mut open: Open,
    route: Route,
    identity: &Identity,
    extras: Extras,
    times: StreamTimes,
) -> Result<Response, ApiError> {
    let mut batch = Batch::default();
    let waited = timeout(times.first_wait, open.ticket.relay.next(&mut batch)).await;
    if let Some(terminal) = &batch.end
        && batch.pieces.is_empty()
        && let Some(error) = ApiError::of_outcome(&terminal.outcome)
    {
        open.end(terminal);
        return Err(error);
    }
    let renderer = Renderer::new(route, identity, extras);
    let slot = Slot::default();
    let first = waited.is_ok().then_some(batch);
    let events = events(open, first, renderer, times.keepalive, slot.clone());
    let body = EventBody {
        events: Some(Box::pin(events)),
        slot,
    };
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        // A proxy that collects a stream defeats it.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ]
    .map(|(name, value)| (name, HeaderValue::from_static(value)));
    Ok((headers, Body::new(body)).into_response())
}

fn failure(outcome: &Outcome) -> ApiError {
    ApiError::of_outcome(outcome).unwrap_or_else(|| {
        ApiError::new(
            axum::http::StatusCode::INTERNAL_SERVER_ERROR,
            "server_error",
            "internal_error",
            "the request ended in an unknown way",
        )
    })
}

/// Writes the stream through `slot`, one slice at a time, each only when the last one was taken.
async fn events(
    mut open: Open,
    first: Option<Batch>,
    mut renderer: Renderer,
    keepalive: Duration,
    slot: Slot,
) {
    let mut out = Vec::with_capacity(1024);
    let mut written_at = Instant::now();
    let mut timer = std::pin::pin!(sleep_until(written_at + keepalive));
    let mut waiting = first.is_none();
    let mut batch = first.unwrap_or_default();
    if waiting {
        slot.put(Bytes::from_static(sse::KEEPALIVE)).await;
    } else {
        renderer.begin(open.ticket.relay.prompt_ids(), &mut out);
    }
    let mut begun = !waiting;
    loop {
        if waiting {
            tokio::select! {
                biased;
                () = open.ticket.relay.next(&mut batch) => {}
                () = &mut timer => {
                    // The timer is moved here alone, not at each write.
                    if written_at.elapsed() >= keepalive {
                        slot.put(Bytes::from_static(sse::KEEPALIVE)).await;
                        written_at = Instant::now();
                    }
                    timer.as_mut().reset(written_at + keepalive);
                    continue;
                }
            }
        }
        let pieces = batch.pieces.len();
        if !begun && (pieces > 0 || completed(&batch)) {
            renderer.begin(open.ticket.relay.prompt_ids(), &mut out);
            begun = true;
        }
        let mut piece = 0;
        while piece < pieces {
            let from = piece;
            piece = renderer.pieces(&mut batch, piece, SLICE_BYTES, &mut out);
            if piece < pieces {
                open.peer.event_bytes(out.len() / (piece - from).max(1));
                slot.put(take(&mut out)).await;
            }
        }
        open.peer.event_bytes(out.len() / pieces.max(1));
        let terminal = batch.end.take();
        if let Some(terminal) = &terminal {
            open.end(terminal);
            match terminal.outcome {
                Outcome::Completed { reason } => {
                    let timings = Timings::new(&terminal.timeline, open.clock.now());
                    let usage = UsageBody::new(&terminal.timeline);
                    renderer.finish(reason, &timings, &usage, &mut out);
                }
                _ => sse::error(&failure(&terminal.outcome), &mut out),
            }
        }
        if !out.is_empty() {
            slot.put(take(&mut out)).await;
            written_at = Instant::now();
        }
        if terminal.is_some() {
            return;
        }
        waiting = true;
    }
}

fn completed(batch: &Batch) -> bool {
    batch
        .end
        .as_ref()
        .is_some_and(|end| matches!(end.outcome, Outcome::Completed { .. }))
}

/// The bytes, leaving room for as many.
fn take(out: &mut Vec<u8>) -> Bytes {
    let next = Vec::with_capacity(out.len().next_power_of_two().clamp(512, 2 * SLICE_BYTES));
    Bytes::from(std::mem::replace(out, next))
}

/// Room for one slice between the events' future and the body that drives it.
#[derive(Clone, Debug, Default)]
struct Slot(Arc<Mutex<Option<Bytes>>>);

impl Slot {
    fn with<T>(&self, act: impl FnOnce(&mut Option<Bytes>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Resolves when the body has taken the bytes. The body polls the future again after that, so no
    /// waker is needed.
    async fn put(&self, bytes: Bytes) {
        self.with(|slot| *slot = Some(bytes));
        std::future::poll_fn(|_| {
            if self.with(|slot| slot.is_some()) {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
    }
}

/// Drives the events' future only when the connection has room, so that what is not written stays in
/// the relay.
struct EventBody<F> {
    events: Option<Pin<Box<F>>>,
    slot: Slot,
}

impl<F: Future<Output = ()>> hyper::body::Body for EventBody<F> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(events) = &mut self.events
            && events.as_mut().poll(cx).is_ready()
        {
            self.events = None;
        }
        match self.slot.with(Option::take) {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None if self.events.is_none() => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}
