//! Sends one request, reads its stream, and notes what came when.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::chunk::{Chunk, error_text};
use crate::clock::{Clock, micros};
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::sample::{CountedBy, Outcome, Sample};
use crate::sse::{Item, Parser};

/// An answer that is no stream may be this long.
const BODY_BYTES_MAX: usize = 16 << 20;

/// A server that keeps a stream open after `[DONE]` is not waited for beyond this.
const AFTER_DONE: Duration = Duration::from_secs(2);

/// How long the client waits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub connect: Duration,
    /// Between two arrivals of anything, keep-alives included.
    pub idle: Duration,
    /// For a whole request.
    pub total: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(300),
            total: Duration::from_secs(3_600),
        }
    }
}

/// One request, ready to be sent.
#[derive(Clone, Debug)]
pub struct Ask {
    pub id: u64,
    /// Which prompt of the workload.
    pub prompt: u32,
    /// The JSON body.
    pub body: Bytes,
    /// The bound in it, tokens.
    pub max_tokens: u32,
}

type Sender = SendRequest<Full<Bytes>>;

/// Speaks to one endpoint, from any number of tasks.
#[derive(Debug)]
pub struct Client {
    endpoint: Endpoint,
    patience: Patience,
    keep_alive: bool,
    idle: Mutex<Vec<Sender>>,
}

/// Why no response came.
enum NoResponse {
    Connect(String),
    /// The connection took the request and then ended.
    Exchange(String),
    Timeout,
}

impl Client {
    /// `keep_alive`: connections are used again; else each request has its own.
    #[must_use]
    pub fn new(endpoint: Endpoint, patience: Patience, keep_alive: bool) -> Self {
        Self {
            endpoint,
            patience,
            keep_alive,
            idle: Mutex::new(Vec::new()),
        }
    }

    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Sends `ask` now and reads its answer to the end. `on_text` gets each event's text as it comes.
    /// Never fails: whatever happens is in the sample's outcome.
    pub async fn ask(
        &self,
        ask: &Ask,
        clock: Clock,
        intended_us: u64,
        mut on_text: impl FnMut(&str),
    ) -> Sample {
        let mut sample = Sample::begin(ask.id, ask.prompt, intended_us, clock.now_us());
        sample.asked_tokens = Some(ask.max_tokens);
        let mut hash = blake3::Hasher::new();
        let exchange = async {
            let (response, sender) = match self
                .respond(Method::POST, &self.endpoint.path, ask.body.clone())
                .await
            {
                Ok(answer) => answer,
                Err(NoResponse::Connect(message)) => return Outcome::Unreachable { message },
                Err(NoResponse::Exchange(message)) => return Outcome::Truncated { message },
                Err(NoResponse::Timeout) => return self.timed_out(),
            };
            sample.headers_us = Some(clock.now_us());
            let outcome = if response.status() == StatusCode::OK {
                self.read(response, clock, &mut sample, &mut |text: &str| {
                    hash.update(text.as_bytes());
                    on_text(text);
                })
                .await
            } else {
                self.read_refusal(response).await
            };
            if self.keep_alive && outcome.is_done() {
                self.put_back(sender);
            }
            outcome
        };
        let outcome = timeout(self.patience.total, exchange).await;
        sample.outcome = outcome.unwrap_or_else(|_| Outcome::TimedOut {
            waited_ms: micros(self.patience.total) / 1_000,
        });
        // A finished stream was stamped at its `[DONE]`.
        if sample.done_us == sample.sent_us {
            sample.done_us = clock.now_us();
        }
        match sample.usage {
            Some(usage) if usage.completion_tokens > 0 => {
                sample.output_tokens = usage.completion_tokens;
                sample.counted_by = CountedBy::Usage;
            }
            _ => sample.output_tokens = sample.events,
        }
        sample.text_hash = hash.finalize().to_hex().as_str()[..16].to_owned();
        sample
    }

    /// The body of a GET, for `/status`, `/ready` and the like, with its status.
    ///
    /// # Errors
    /// Nothing answers, or not within `within`.
    pub async fn get(
        &self,
        path: &str,
        within: Duration,
    ) -> Result<(StatusCode, Bytes), BenchError> {
        let failed = |reason: String| BenchError::Unreachable {
            target: format!("http://{}{path}", self.endpoint.authority()),
            reason,
        };
        let path = format!("{}{path}", self.endpoint.root);
        let exchange = async {
            let (response, sender) = self
                .respond(Method::GET, &path, Bytes::new())
                .await
                .map_err(|error| match error {
                    NoResponse::Connect(reason) | NoResponse::Exchange(reason) => failed(reason),
                    NoResponse::Timeout => failed("no answer".into()),
                })?;
            let status = response.status();
            let body = http_body_util::Limited::new(response.into_body(), BODY_BYTES_MAX)
                .collect()
                .await
                .map_err(|error| failed(error.to_string()))?;
            if self.keep_alive {
                self.put_back(sender);
            }
            Ok((status, body.to_bytes()))
        };
        match timeout(within, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(failed(format!(
                "no answer within {} ms",
                within.as_millis()
            ))),
        }
    }

    fn timed_out(&self) -> Outcome {
        Outcome::TimedOut {
            waited_ms: micros(self.patience.idle) / 1_000,
        }
    }

    fn take_idle(&self) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(sender) = idle.pop() {
            if !sender.is_closed() {
                return Some(sender);
            }
        }
        None
    }

    fn put_back(&self, sender: Sender) {
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(sender);
    }

    async fn connect(&self) -> Result<Sender, NoResponse> {
        let address = (self.endpoint.host.as_str(), self.endpoint.port);
        let stream = timeout(self.patience.connect, TcpStream::connect(address))
            .await
            .map_err(|_| NoResponse::Connect("connect in time".into()))?
            .map_err(|error| NoResponse::Connect(error.to_string()))?;
        stream
            .set_nodelay(true)
            .map_err(|error| NoResponse::Connect(error.to_string()))?;
        let (sender, connection) = handshake(TokioIo::new(stream))
            .await
            .map_err(|error| NoResponse::Connect(error.to_string()))?;
        // It ends with its sender, or with the peer; a fault of it also shows in the response's body.
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn respond(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Sender), NoResponse> {
        if let Some(sender) = self.take_idle() {
            // The server may have closed it in the very moment of its reuse: then a fresh one is tried.
            match self.exchange(sender, &method, path, body.clone()).await {
                Err(NoResponse::Exchange(_)) => {}
                answer => return answer,
            }
        }
        let sender = self.connect().await?;
        self.exchange(sender, &method, path, body).await
    }

    async fn exchange(
        &self,
        mut sender: Sender,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Sender), NoResponse> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, self.endpoint.authority())
            .header(ACCEPT, "*/*");
        if method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if !self.keep_alive {
            request = request.header(CONNECTION, "close");
        }
        if let Some(key) = &self.endpoint.api_key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request
            .body(Full::new(body))
            .map_err(|error| NoResponse::Connect(error.to_string()))?;
        let answered = async {
            sender.ready().await?;
            sender.send_request(request).await
        };
        match timeout(self.patience.idle, answered).await {
            Ok(Ok(response)) => Ok((response, sender)),
            Ok(Err(error)) => Err(NoResponse::Exchange(chain(&error))),
            Err(_) => Err(NoResponse::Timeout),
        }
    }

    async fn read_refusal(&self, response: Response<Incoming>) -> Outcome {
        let status = response.status();
        let retry_after_s = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.trim().parse().ok());
        let body = http_body_util::Limited::new(response.into_body(), BODY_BYTES_MAX).collect();
        let message = match timeout(self.patience.idle, body).await {
            Err(_) => return self.timed_out(),
            Ok(Err(error)) => error.to_string(),
            Ok(Ok(body)) => {
                let text = body.to_bytes();
                let json: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
                let error = json.as_ref().and_then(|json| json.get("error"));
                error.map_or_else(
                    || String::from_utf8_lossy(&text).chars().take(200).collect(),
                    error_text,
                )
            }
        };
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Outcome::Refused {
                status: status.as_u16(),
                retry_after_s,
                message,
            },
            _ => Outcome::Failed {
                status: Some(status.as_u16()),
                message,
            },
        }
    }

    async fn read(
        &self,
        response: Response<Incoming>,
        clock: Clock,
        sample: &mut Sample,
        on_text: &mut impl FnMut(&str),
    ) -> Outcome {
        let is_stream = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.starts_with("text/event-stream"));
        let mut body = response.into_body();
        if !is_stream {
            return self.read_whole(body, clock, sample, on_text).await;
        }
        let mut parser = Parser::new();
        let mut seen = Seen::default();
        loop {
            let wait = if seen.done {
                self.patience.idle.min(AFTER_DONE)
            } else {
                self.patience.idle
            };
            let frame = match timeout(wait, body.frame()).await {
                Err(_) if seen.done => break,
                Err(_) => return self.timed_out(),
                Ok(None) => break,
                Ok(Some(Err(error))) => {
                    return seen.ended(&format!("connection lost: {}", chain(&error)));
                }
                Ok(Some(Ok(frame))) => frame,
            };
            let Some(bytes) = frame.data_ref() else {
                continue;
            };
            let now_us = clock.now_us();
            let pushed = parser.push(bytes, &mut |item| seen.take(item, now_us, sample, on_text));
            if let Err(error) = pushed {
                return Outcome::Malformed {
                    message: error.to_string(),
                };
            }
        }
        let cut = if parser.is_mid_event() {
            "the stream ended inside an event"
        } else {
            "the stream ended without [DONE]"
        };
        seen.ended(cut)
    }

    async fn read_whole(
        &self,
        body: Incoming,
        clock: Clock,
        sample: &mut Sample,
        on_text: &mut impl FnMut(&str),
    ) -> Outcome {
        let body = http_body_util::Limited::new(body, BODY_BYTES_MAX).collect();
        let bytes = match timeout(self.patience.idle, body).await {
            Err(_) => return self.timed_out(),
            Ok(Err(error)) => {
                return Outcome::Truncated {
                    message: error.to_string(),
                };
            }
            Ok(Ok(body)) => body.to_bytes(),
        };
        let chunk = std::str::from_utf8(&bytes)
            .map_err(|error| error.to_string())
            .and_then(|text| Chunk::parse(text).map_err(|error| error.to_string()));
        match chunk {
            Err(message) => Outcome::Malformed { message },
            Ok(chunk) => {
                let mut seen = Seen {
                    done: true,
                    ..Seen::default()
                };
                seen.note(chunk, clock.now_us(), sample, on_text);
                seen.ended("")
            }
        }
    }
}

/// What a stream has said of its end so far.
#[derive(Default)]
struct Seen {
    done: bool,
    error: Option<String>,
    malformed: Option<String>,
}

impl Seen {
    fn take(
        &mut self,
        item: Item<'_>,
        now_us: u64,
        sample: &mut Sample,
        on_text: &mut impl FnMut(&str),
    ) {
        let Item::Event { data, .. } = item else {
            return;
        };
        if data == "[DONE]" {
            if self.done {
                self.malformed.get_or_insert("a second [DONE]".into());
            }
            self.done = true;
            sample.done_us = now_us;
            return;
        }
        if self.done {
            self.malformed.get_or_insert("an event after [DONE]".into());
        }
        match Chunk::parse(data) {
            Ok(chunk) => self.note(chunk, now_us, sample, on_text),
            Err(error) => {
                self.malformed.get_or_insert(error.to_string());
            }
        }
    }

    fn note(
        &mut self,
        chunk: Chunk,
        now_us: u64,
        sample: &mut Sample,
        on_text: &mut impl FnMut(&str),
    ) {
        if !chunk.text.is_empty() {
            sample.token(now_us);
            sample.text_bytes += chunk.text.len() as u64;
            on_text(&chunk.text);
        }
        if chunk.finish_reason.is_some() {
            if sample.finish_reason.is_some() {
                self.malformed
                    .get_or_insert("a second finish reason".into());
            }
            sample.finish_reason = chunk.finish_reason;
        }
        sample.usage = chunk.usage.or(sample.usage);
        sample.timings = chunk.timings.or(sample.timings.take());
        if let Some(error) = chunk.error {
            self.error.get_or_insert(error);
        }
    }

    fn ended(self, how: &str) -> Outcome {
        if let Some(message) = self.error {
            Outcome::Failed {
                status: None,
                message,
            }
        } else if let Some(message) = self.malformed {
            Outcome::Malformed { message }
        } else if self.done {
            Outcome::Done
        } else {
            Outcome::Truncated {
                message: how.to_owned(),
            }
        }
    }
}

/// An error with its causes, which is where hyper says what happened.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
