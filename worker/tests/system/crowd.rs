//! A crowd of HTTP clients on one runtime: thousands of connections, and what each of them saw.

use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::System;
use super::client::Whole;

/// Runs `crowd` on a runtime of its own, with as many open files as the system grants.
pub fn run<T>(crowd: impl Future<Output = T>) -> T {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let wanted = hard.min(65_536);
    if wanted > soft {
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).unwrap();
    }
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(crowd)
}

/// What a bound is multiplied by: 1 where the promise itself is held (`DISPATCHER_STRICT=1`, on a
/// machine that does nothing else), 5 beside other work.
pub fn slack() -> f64 {
    if is_strict() { 1.0 } else { 5.0 }
}

pub fn is_strict() -> bool {
    std::env::var_os("DISPATCHER_STRICT").is_some_and(|value| value == "1")
}

/// Prints one measured figure beside its bound.
pub fn figure(name: &str, value: impl std::fmt::Display, bound: impl std::fmt::Display) {
    eprintln!("figure: {name} = {value} (bound {bound})");
}

/// Choices of one test run; the seed is printed, and `DISPATCHER_SEED` gives it back.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn seeded() -> Self {
        let given = std::env::var("DISPATCHER_SEED").ok();
        let seed = given.map_or_else(
            || {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                u64::try_from(now.unwrap().as_nanos() & u128::from(u64::MAX)).unwrap()
            },
            |text| text.parse().unwrap(),
        );
        eprintln!("seed: DISPATCHER_SEED={seed}");
        Self(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// The value that a share of `quantile` of all values does not exceed.
pub fn quantile(values: &mut [f64], quantile: f64) -> f64 {
    assert!(!values.is_empty(), "nothing was measured");
    values.sort_unstable_by(f64::total_cmp);
    let count = values.len() as f64;
    // The first of which a share of `quantile` or more is no greater.
    let place = (1..=values.len()).find(|rank| *rank as f64 >= count * quantile);
    values[place.unwrap_or(values.len()) - 1]
}

/// Resident memory of a process, in bytes.
pub fn resident_bytes(pid: u32) -> u64 {
    let output = std::process::Command::new("ps")
        .args(["-o", "rss=", "-p", &pid.to_string()])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.trim().parse::<u64>().unwrap() * 1024
}

/// The sum of a metric's samples whose labels hold `label`.
pub fn metric_with(system: &System, name: &str, label: &str) -> f64 {
    let (_, text) = super::client::get_blocking(&system.address, "/metrics");
    text.lines()
        .filter(|line| line.starts_with(&format!("{name}{{")) && line.contains(label))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
        .sum()
}

/// One chat request.
#[derive(Clone, Debug)]
pub struct Ask {
    body: Bytes,
    key: Option<String>,
    /// Keep a stream's bytes, and do not only count them.
    keep: bool,
}

impl Ask {
    pub fn of(body: &Value) -> Self {
        Self {
            body: body.to_string().into(),
            key: None,
            keep: false,
        }
    }

    pub fn stream(content: &str, max_tokens: u32) -> Self {
        Self::of(&super::client::chat(content, max_tokens))
    }

    pub fn whole(content: &str, max_tokens: u32) -> Self {
        Self::of(&json!({
            "messages": [{ "role": "user", "content": content }],
            "max_tokens": max_tokens,
            "temperature": 0,
        }))
    }

    pub fn key(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }

    pub fn keep(mut self) -> Self {
        self.keep = true;
        self
    }

    /// The request as bytes, for a client that is no good one.
    pub fn bytes(&self, address: SocketAddr) -> Vec<u8> {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.body.len()
        );
        [head.as_bytes(), &self.body].concat()
    }
}

/// What came back.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub retry_after: bool,
    /// All of it but of a stream that was not to be kept.
    pub body: Vec<u8>,
    /// The stream came to its `[DONE]`.
    pub done: bool,
    /// Milliseconds between events; 0 between those that came together.
    pub gaps_ms: Vec<f32>,
    pub took: Duration,
}

const DONE: &[u8] = b"data: [DONE]\n\n";

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// A kept stream, read as its events.
    pub fn events(&self) -> Whole {
        let text = std::str::from_utf8(&self.body).unwrap();
        let mut whole = Whole {
            status: self.status,
            ..Whole::default()
        };
        for event in text.split("\n\n").filter(|event| !event.is_empty()) {
            whole.take(event.strip_prefix("data: ").unwrap_or(event));
        }
        whole
    }

    fn take(&mut self, chunk: &[u8], stream: bool, keep: bool, last: &mut Option<Instant>) {
        if stream {
            let events = chunk.windows(2).filter(|pair| pair == b"\n\n").count();
            let now = Instant::now();
            if let Some(last) = last.replace(now) {
                let gap = now.duration_since(last).as_secs_f32() * 1e3;
                self.gaps_ms.push(gap);
            }
            let together = self.gaps_ms.len() + events.saturating_sub(1);
            self.gaps_ms.resize(together, 0.0);
            self.done = chunk.ends_with(DONE);
        }
        if keep || !stream {
            self.body.extend_from_slice(chunk);
        }
    }
}

/// One keep-alive connection; dropping it closes it at once.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    task: JoinHandle<()>,
    address: SocketAddr,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    pub async fn open(address: SocketAddr) -> Result<Self, String> {
        let words = |error: &dyn std::fmt::Display| format!("no connection: {error}");
        let socket = TcpStream::connect(address)
            .await
            .map_err(|error| words(&error))?;
        socket.set_nodelay(true).map_err(|error| words(&error))?;
        let (sender, connection) = http1::handshake(TokioIo::new(socket))
            .await
            .map_err(|error| words(&error))?;
        let task = tokio::spawn(async move {
            // What breaks it is told to the request on it.
            let _ = connection.await;
        });
        Ok(Self {
            sender,
            task,
            address,
        })
    }

    pub async fn get(&mut self, path: &str) -> Result<Reply, String> {
        let request = hyper::Request::get(path);
        self.exchange(request, Bytes::new(), true).await
    }

    pub async fn ask(&mut self, ask: &Ask) -> Result<Reply, String> {
        let mut request =
            hyper::Request::post("/v1/chat/completions").header("content-type", "application/json");
        if let Some(key) = &ask.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        self.exchange(request, ask.body.clone(), ask.keep).await
    }

    async fn exchange(
        &mut self,
        request: hyper::http::request::Builder,
        body: Bytes,
        keep: bool,
    ) -> Result<Reply, String> {
        let begun = Instant::now();
        let request = request
            .header("host", self.address.to_string())
            .body(Full::new(body))
            .unwrap();
        let words = |error: hyper::Error| format!("broken: {error:?}");
        self.sender.ready().await.map_err(words)?;
        let response = self.sender.send_request(request).await.map_err(words)?;
        let headers = response.headers();
        let stream = headers
            .get("content-type")
            .is_some_and(|kind| kind == "text/event-stream");
        let mut reply = Reply {
            status: response.status().as_u16(),
            retry_after: headers.contains_key("retry-after"),
            ..Reply::default()
        };
        let mut body = response.into_body();
        let mut last = None;
        while let Some(frame) = body.frame().await {
            if let Ok(chunk) = frame.map_err(words)?.into_data() {
                reply.take(&chunk, stream, keep, &mut last);
            }
        }
        reply.took = begun.elapsed();
        Ok(reply)
    }
}

/// One request on a connection of its own.
pub async fn ask(address: SocketAddr, ask: &Ask) -> Result<Reply, String> {
    Connection::open(address).await?.ask(ask).await
}
