//! A server that answers by script, on threads, so that its own times are as fine as the system's.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How each answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Done,
    /// All tokens, and then the connection closes properly without `[DONE]`.
    NoDone,
    /// The connection breaks inside an event after so many tokens.
    CutAfter(u32),
    /// An error event after so many tokens.
    ErrorAfter(u32),
    /// A status instead of a stream.
    Status(u16),
    /// Bytes that are no stream of events at all.
    Garbage,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Script {
    pub(crate) first: Duration,
    pub(crate) gap: Duration,
    pub(crate) tokens: u32,
    pub(crate) usage: bool,
    pub(crate) ending: Ending,
    /// The request with this number, and all that come meanwhile, wait so long.
    pub(crate) stall: Option<(u64, Duration)>,
    /// Like an engine with one slot.
    pub(crate) one_at_a_time: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            first: Duration::ZERO,
            gap: Duration::ZERO,
            tokens: 8,
            usage: true,
            ending: Ending::Done,
            stall: None,
            one_at_a_time: false,
        }
    }
}

/// When the server read a request and wrote its tokens.
#[derive(Clone, Debug)]
pub(crate) struct Served {
    pub(crate) received: Instant,
    pub(crate) tokens: Vec<Instant>,
}

pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) served: Arc<Mutex<Vec<Served>>>,
}

struct Shared {
    script: Script,
    requests: AtomicU64,
    stalled_until: Mutex<Option<Instant>>,
    slot: Mutex<()>,
    served: Arc<Mutex<Vec<Served>>>,
}

/// Serves until the process ends.
pub(crate) fn serve(script: Script) -> Server {
    serve_at(script, 0)
}

fn serve_at(script: Script, port: u16) -> Server {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let served = Arc::new(Mutex::new(Vec::new()));
    let shared = Arc::new(Shared {
        script,
        requests: AtomicU64::new(0),
        stalled_until: Mutex::new(None),
        slot: Mutex::new(()),
        served: Arc::clone(&served),
    });
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let shared = Arc::clone(&shared);
            // A client that goes away is no fault of the server.
            std::thread::spawn(move || connection(&stream, &shared).unwrap_or_default());
        }
    });
    Server { url, served }
}

fn connection(stream: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    while let Some((path, body)) = request(&mut reader)? {
        if !path.ends_with("/completions") {
            let status = if path == "/health" { 200 } else { 404 };
            write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        let received = Instant::now();
        let number = shared.requests.fetch_add(1, Ordering::SeqCst);
        if let Some((at, stall)) = shared.script.stall {
            let mut until = shared.stalled_until.lock().unwrap();
            if number == at {
                *until = Some(Instant::now() + stall);
            }
            let wait = until.map(|until| until.saturating_duration_since(Instant::now()));
            drop(until);
            std::thread::sleep(wait.unwrap_or_default());
        }
        let slot = shared
            .script
            .one_at_a_time
            .then(|| shared.slot.lock().unwrap());
        let tokens = answer(stream, &shared.script, &body)?;
        drop(slot);
        shared
            .served
            .lock()
            .unwrap()
            .push(Served { received, tokens });
    }
    Ok(())
}

/// Path and body of the next request; none at the connection's end.
pub(crate) fn request(
    reader: &mut impl BufRead,
) -> std::io::Result<Option<(String, serde_json::Value)>> {
    let mut length = 0;
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let Some(path) = first.split(' ').nth(1).map(ToOwned::to_owned) else {
        return Ok(None);
    };
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some((
        path,
        serde_json::from_slice(&body).unwrap_or_default(),
    )))
}

fn answer(
    mut stream: &TcpStream,
    script: &Script,
    body: &serde_json::Value,
) -> std::io::Result<Vec<Instant>> {
    if let Ending::Status(status) = script.ending {
        let text =
            r#"{"error":{"message":"the queue is full","type":"rate_limit","code":"queue_full"}}"#;
        write!(
            stream,
            "HTTP/1.1 {status} X\r\nRetry-After: 3\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        )?;
        return Ok(Vec::new());
    }
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )?;
    let mut chunk = |text: &str| write!(stream, "{:x}\r\n{text}\r\n", text.len());
    if script.ending == Ending::Garbage {
        chunk("data: {\"choices\": nonsense\n\n")?;
        chunk("data: [DONE]\n\n")?;
        chunk("")?;
        return Ok(Vec::new());
    }
    chunk(": keepalive\n\n")?;
    // Deadlines and not rests, so that delays do not add up.
    let mut due = Instant::now() + script.first;
    let prompt = body["messages"][0]["content"].as_str().unwrap_or_default();
    let mut written = Vec::new();
    for token in 0..script.tokens {
        if script.ending == Ending::CutAfter(token) {
            chunk("data: {\"choi")?;
            stream.shutdown(std::net::Shutdown::Both)?;
            return Ok(written);
        }
        if script.ending == Ending::ErrorAfter(token) {
            chunk("data: {\"error\":{\"message\":\"it died\",\"code\":\"worker_died\"}}\n\n")?;
            return chunk("").map(|()| written);
        }
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due += script.gap;
        let last = token + 1 == script.tokens;
        let asked = body["max_tokens"].as_u64();
        let finish = match last {
            true if asked == Some(u64::from(script.tokens)) => "\"length\"",
            true => "\"stop\"",
            false => "null",
        };
        let timings = if last {
            r#","timings":{"queue_ms":0.5,"attempts":1,"instance":0}"#
        } else {
            ""
        };
        let start = prompt.chars().take(9).collect::<String>();
        written.push(Instant::now());
        chunk(&format!(
            "data: {{\"choices\":[{{\"delta\":{{\"content\":\" {start}{token}\"}},\"finish_reason\":{finish}}}]{timings}}}\n\n"
        ))?;
    }
    if script.usage {
        chunk(&format!(
            "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":4,\"completion_tokens\":{}}}}}\n\n",
            script.tokens
        ))?;
    }
    if script.ending == Ending::Done {
        chunk("data: [DONE]\n\n")?;
    }
    chunk("").map(|()| written)
}

/// The command that runs [`serves_another_test_until_it_is_killed`] as a server of its own, to be started by the bench.
pub(crate) fn command(gap_us: u64) -> String {
    let me = std::env::current_exe().unwrap();
    format!(
        "env BENCH_SUITE_PORT={{port}} BENCH_SUITE_GAP_US={gap_us} '{}' --ignored --exact support::serves_another_test_until_it_is_killed",
        me.display()
    )
}

#[test]
#[ignore = "no test: the server that other tests start"]
fn serves_another_test_until_it_is_killed() {
    let number = |name: &str| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
    // Run by hand with all ignored tests, it has no port and ends.
    let Some(port) = number("BENCH_SUITE_PORT") else {
        return;
    };
    let script = Script {
        gap: Duration::from_micros(number("BENCH_SUITE_GAP_US").unwrap_or_default()),
        ..Script::default()
    };
    let _server = serve_at(script, u16::try_from(port).unwrap());
    loop {
        std::thread::park();
    }
}
