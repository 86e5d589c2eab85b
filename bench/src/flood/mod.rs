//! Many streaming readers that cost next to nothing: shows what a server can carry, not what the reader can.
//!
//! A reader's work per event must be far below the server's, or it would be the bench that is
//! measured. So: no runtime, no JSON, no clock per event. One thread reads all its sockets in turn,
//! 64 KiB at a time, and then rests for the pace, so that one read takes all the events that came
//! meanwhile. The price is that first-token times are only as fine as the pace.

mod http;
mod scan;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::process::cpu_time;
use crate::statistics::{figure, median};
use crate::workload::Workload;

use http::Response;
use scan::{Counts, Scanner};

/// One read takes up to this many bytes.
const READ_BYTES: usize = 64 << 10;

/// A stream in which nothing comes for so long is given up.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// How much is read.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// Streams at a time.
    pub readers: u32,
    /// Streams in all.
    pub requests: u64,
    pub threads: u32,
    /// Rest between two rounds over a thread's sockets.
    pub pace: Duration,
}

/// What came.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Flooded {
    pub requests: u64,
    /// Streams that ended with `[DONE]`.
    pub completed: u64,
    pub events: u64,
    /// Events with text.
    pub tokens: u64,
    /// Sum of the servers' own counts.
    pub usage_tokens: u64,
    pub errors: u64,
    /// The first few errors, in words.
    pub messages: Vec<String>,
    pub wall_s: f64,
    /// The bench's own CPU time, all threads.
    pub cpu_s: f64,
    /// As fine as the pace.
    pub ttft_ms_p50: f64,
    pub ttft_ms_max: f64,
}

impl Flooded {
    /// Events with text per second, or the servers' own count where events carry several tokens.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens.max(self.usage_tokens) as f64 / self.wall_s.max(1e-9)
    }

    /// The bench's own cost, microseconds of CPU per event.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn cpu_us_per_event(&self) -> f64 {
        self.cpu_s * 1e6 / (self.events.max(1)) as f64
    }
}

impl std::fmt::Display for Flooded {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "tokens_per_s={:.0} tokens={} usage_tokens={} events={} requests={} completed={} errors={} wall_s={:.3} own_cpu_s={:.3} own_cpu_us_per_event={:.3} ttft_ms_p50={} ttft_ms_max={}",
            self.tokens_per_s(),
            self.tokens,
            self.usage_tokens,
            self.events,
            self.requests,
            self.completed,
            self.errors,
            self.wall_s,
            self.cpu_s,
            self.cpu_us_per_event(),
            figure(self.ttft_ms_p50),
            figure(self.ttft_ms_max),
        )?;
        self.messages
            .iter()
            .try_for_each(|message| write!(out, "\n  error: {message}"))
    }
}

/// Reads `flood.requests` streams and counts.
///
/// # Errors
/// The endpoint's name does not resolve, or a thread could not be started. A stream that fails is counted.
pub fn run(endpoint: &Endpoint, workload: &Workload, flood: Flood) -> Result<Flooded, BenchError> {
    let address = resolve(endpoint)?;
    let threads = flood.threads.clamp(1, flood.readers.max(1));
    let next = Arc::new(AtomicU64::new(0));
    let (began, cpu_before) = (Instant::now(), cpu_time());
    let totals = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let share = flood.readers / threads + u32::from(thread < flood.readers % threads);
                let next = Arc::clone(&next);
                let mut worker = Worker {
                    endpoint,
                    workload,
                    address,
                    flood,
                    next,
                    scanner: Scanner::new(),
                    buffer: vec![0; READ_BYTES],
                    total: Total::default(),
                };
                scope.spawn(move || {
                    worker.run(share);
                    worker.total
                })
            })
            .collect();
        workers
            .into_iter()
            .filter_map(|worker| worker.join().ok())
            .collect::<Vec<_>>()
    });
    let mut flooded = Flooded {
        wall_s: began.elapsed().as_secs_f64(),
        cpu_s: cpu_time().saturating_sub(cpu_before).as_secs_f64(),
        ..Flooded::default()
    };
    let mut firsts = Vec::new();
    for total in totals {
        flooded.requests += total.requests;
        flooded.completed += total.completed;
        flooded.events += total.events;
        flooded.tokens += total.tokens;
        flooded.usage_tokens += total.usage_tokens;
        flooded.errors += total.errors;
        flooded.messages.extend(total.messages);
        firsts.extend(total.ttft_ms);
    }
    flooded.messages.truncate(MESSAGES_MAX);
    flooded.ttft_ms_p50 = median(&firsts).unwrap_or(f64::NAN);
    flooded.ttft_ms_max = firsts.iter().copied().fold(f64::NAN, f64::max);
    Ok(flooded)
}

const MESSAGES_MAX: usize = 5;

fn resolve(endpoint: &Endpoint) -> Result<SocketAddr, BenchError> {
    let unreachable = |reason: String| BenchError::Unreachable {
        target: endpoint.authority(),
        reason,
    };
    (endpoint.host.as_str(), endpoint.port)
        .to_socket_addrs()
        .map_err(|error| unreachable(error.to_string()))?
        .next()
        .ok_or_else(|| unreachable("the name has no address".into()))
}

#[derive(Debug, Default)]
struct Total {
    requests: u64,
    completed: u64,
    events: u64,
    tokens: u64,
    usage_tokens: u64,
    errors: u64,
    messages: Vec<String>,
    ttft_ms: Vec<f64>,
}

struct Stream {
    socket: TcpStream,
    response: Response,
    body: Vec<u8>,
    counts: Counts,
    sent: Instant,
    heard: Instant,
    has_first: bool,
}

/// What one look at a socket showed.
enum Look {
    Quiet,
    Open,
    /// The response is whole; the connection may serve again.
    Finished,
    Broken(String),
}

struct Worker<'a> {
    endpoint: &'a Endpoint,
    workload: &'a Workload,
    address: SocketAddr,
    flood: Flood,
    next: Arc<AtomicU64>,
    scanner: Scanner,
    buffer: Vec<u8>,
    total: Total,
}

impl Worker<'_> {
    fn run(&mut self, share: u32) {
        let mut streams: Vec<Option<Stream>> = (0..share).map(|_| self.begin(None)).collect();
        while streams.iter().any(Option::is_some) {
            for place in &mut streams {
                let Some(stream) = place else {
                    continue;
                };
                match self.look(stream) {
                    Look::Quiet | Look::Open => {}
                    Look::Finished => {
                        let stream = place.take();
                        *place = stream.and_then(|stream| self.finish(stream, None));
                    }
                    Look::Broken(message) => {
                        let stream = place.take();
                        *place = stream.and_then(|stream| self.finish(stream, Some(message)));
                    }
                }
            }
            // Not to wait for anything, but to let the kernel gather events, which makes each read worth its cost.
            std::thread::sleep(self.flood.pace);
        }
    }

    /// Sends the next request, if there is one left, over `socket` or a fresh connection.
    fn begin(&mut self, mut socket: Option<TcpStream>) -> Option<Stream> {
        loop {
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            if id >= self.flood.requests {
                return None;
            }
            self.total.requests += 1;
            let ask = self.workload.ask(id, self.endpoint.is_chat());
            match self.send(socket.take(), &ask.body) {
                Ok(stream) => return Some(stream),
                Err(error) => self.failed(error.to_string()),
            }
        }
    }

    fn send(&self, socket: Option<TcpStream>, body: &Bytes) -> std::io::Result<Stream> {
        let mut socket = match socket {
            Some(socket) => socket,
            None => TcpStream::connect_timeout(&self.address, Duration::from_secs(10))?,
        };
        socket.set_nodelay(true)?;
        let mut request = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {}\r\n",
            self.endpoint.path,
            self.endpoint.authority(),
            body.len()
        );
        if let Some(key) = &self.endpoint.api_key {
            request.push_str(&format!("Authorization: Bearer {key}\r\n"));
        }
        request.push_str("\r\n");
        let mut request = request.into_bytes();
        request.extend_from_slice(body);
        socket.set_nonblocking(false)?;
        socket.write_all(&request)?;
        socket.set_nonblocking(true)?;
        let now = Instant::now();
        Ok(Stream {
            socket,
            response: Response::new(),
            body: Vec::new(),
            counts: Counts::default(),
            sent: now,
            heard: now,
            has_first: false,
        })
    }

    fn look(&mut self, stream: &mut Stream) -> Look {
        loop {
            let length = match stream.socket.read(&mut self.buffer) {
                Ok(0) if stream.response.may_end_here() => return Look::Finished,
                Ok(0) => return Look::Broken("the connection ended inside a response".into()),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if stream.heard.elapsed() > SILENCE_MAX {
                        return Look::Broken(format!("nothing came for {SILENCE_MAX:?}"));
                    }
                    return Look::Quiet;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Look::Broken(error.to_string()),
            };
            if let Err(error) = stream
                .response
                .push(&self.buffer[..length], &mut stream.body)
            {
                return Look::Broken(error.to_string());
            }
            if stream.response.status == 200
                && !self.scanner.scan(&mut stream.body, &mut stream.counts)
            {
                return Look::Broken("a line without an end".into());
            }
            stream.heard = Instant::now();
            if !stream.has_first && stream.counts.tokens > 0 {
                stream.has_first = true;
                let waited = stream.heard - stream.sent;
                self.total.ttft_ms.push(waited.as_secs_f64() * 1e3);
            }
            if stream.response.is_complete() {
                return Look::Finished;
            }
            // A short read emptied the socket; asking again would only cost a call.
            if length < self.buffer.len() {
                return Look::Open;
            }
        }
    }

    fn finish(&mut self, mut stream: Stream, broken: Option<String>) -> Option<Stream> {
        let counts = stream.counts;
        self.total.events += counts.events;
        self.total.tokens += counts.tokens;
        self.total.usage_tokens += counts.usage_tokens;
        let reusable = broken.is_none() && stream.response.is_complete() && !stream.response.closes;
        if let Some(message) = broken {
            self.failed(message);
        } else if stream.response.status != 200 {
            let text = String::from_utf8_lossy(&stream.body);
            let text: String = text.chars().take(200).collect();
            self.failed(format!("status {}: {text}", stream.response.status));
        } else if counts.errors > 0 {
            self.failed("an error event in the stream".into());
        } else if !counts.done {
            self.failed("a stream without [DONE]".into());
        } else {
            self.total.completed += 1;
        }
        stream.response.reset();
        self.begin(reusable.then_some(stream.socket))
    }

    fn failed(&mut self, message: String) {
        self.total.errors += 1;
        if self.total.messages.len() < MESSAGES_MAX {
            self.total.messages.push(message);
        }
    }
}
