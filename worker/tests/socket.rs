//! A listening socket that outlives the dispatcher: handed over by `LISTEN_FDS`, through fifty restarts under load.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod system;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use system::{PATIENCE, client, dispatcher_program, kill};

const RESTARTS: u32 = 50;
const CLIENTS: usize = 4;

/// A dispatcher; a test that fails half-way leaves none behind. Its workers go with it.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Served {
    fn signal(&self, signal: Signal) {
        kill(self.0.id(), signal);
    }

    fn end(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the dispatcher does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A dispatcher that was handed `listener`, as systemd would.
fn start(listener: &TcpListener, folder: &Path) -> Served {
    let socket: OwnedFd = listener.try_clone().unwrap().into();
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("dispatcher.log"))
        .unwrap();
    let script = format!(
        "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec '{}' --run-dir '{}' --worker '{}' \
         --engine scripted --scripted step_us=2000 --slots 8",
        dispatcher_program().display(),
        folder.join("run").display(),
        env!("CARGO_BIN_EXE_dispatcher-worker"),
    );
    let child = Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::from(socket))
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    Served(child)
}

/// Waits until this very dispatcher serves.
fn await_ready(address: &str, child: &Served, folder: &Path) {
    let deadline = Instant::now() + PATIENCE;
    let state = folder.join("run/dispatcher.json");
    loop {
        let ours = std::fs::read_to_string(&state)
            .is_ok_and(|text| text.contains(&format!("\"pid\":{}", child.0.id())));
        if ours && client::get_blocking(address, "/ready").0 == 200 {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "not ready:\n{}",
            std::fs::read_to_string(folder.join("dispatcher.log")).unwrap_or_default()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One request on a connection of its own; an error is anything but a complete answer.
fn ask(address: &str, tokens: u32) -> Result<(), String> {
    let said = |what: &str, error: std::io::Error| format!("{what}: {error}");
    let body = client::chat("across a restart", tokens).to_string();
    let mut stream = TcpStream::connect(address).map_err(|error| said("connect", error))?;
    stream
        .set_read_timeout(Some(PATIENCE))
        .map_err(|error| said("set", error))?;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream
        .write_all(request.as_bytes())
        .map_err(|error| said("write", error))?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .map_err(|error| format!("read: {error} after {answer:?}"))?;
    if answer.starts_with("HTTP/1.1 200") && answer.contains("data: [DONE]") {
        Ok(())
    } else {
        Err(format!("answered {answer:?}"))
    }
}

#[test]
fn fifty_restarts_under_load_refuse_reset_and_turn_away_nothing() {
    let folder = tempfile::Builder::new()
        .prefix("dsp")
        .tempdir_in("/tmp")
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut child = start(&listener, folder.path());
    await_ready(&address, &child, folder.path());
    let over = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (over, answered) = (Arc::clone(&over), Arc::clone(&answered));
            let address = address.clone();
            std::thread::spawn(move || {
                let mut failures = Vec::new();
                let mut tokens = 1 + u32::try_from(number).unwrap();
                while !over.load(Ordering::Relaxed) {
                    tokens = tokens * 7 % 61;
                    match ask(&address, 1 + tokens) {
                        Ok(()) => {
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => failures.push(error),
                    }
                }
                failures
            })
        })
        .collect();
    for restart in 0..RESTARTS {
        // Each restart comes into live traffic.
        let before = answered.load(Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        while answered.load(Ordering::Relaxed) < before + 5 {
            assert!(Instant::now() < deadline, "nothing is answered");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.signal(Signal::SIGTERM);
        assert_eq!(child.end(), Some(0), "restart {restart}");
        child = start(&listener, folder.path());
    }
    await_ready(&address, &child, folder.path());
    over.store(true, Ordering::Relaxed);
    let failures: Vec<_> = clients
        .into_iter()
        .flat_map(|client| client.join().unwrap())
        .collect();
    child.signal(Signal::SIGTERM);
    assert_eq!(child.end(), Some(0));
    println!(
        "{} answered over {RESTARTS} restarts",
        answered.load(Ordering::Relaxed)
    );
    assert!(
        failures.is_empty(),
        "{} failed, the first: {}",
        failures.len(),
        failures[0]
    );
}

#[test]
fn an_idle_connection_is_closed_and_a_late_head_still_answered_when_the_dispatcher_ends() {
    let folder = tempfile::Builder::new()
        .prefix("dsp")
        .tempdir_in("/tmp")
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut child = start(&listener, folder.path());
    await_ready(&address, &child, folder.path());
    // Answered once, and kept alive.
    let mut idle = TcpStream::connect(&address).unwrap();
    idle.set_read_timeout(Some(PATIENCE)).unwrap();
    idle.write_all(format!("GET /health HTTP/1.1\r\nhost: {address}\r\n\r\n").as_bytes())
        .unwrap();
    let mut buffer = [0; 4096];
    let read = idle.read(&mut buffer).unwrap();
    assert!(buffer[..read].starts_with(b"HTTP/1.1 200"));
    // A stream that still runs when the signal comes.
    let mut running =
        client::Events::open(&address, "/v1/chat/completions", &client::chat("on", 400));
    running.next_text();
    child.signal(Signal::SIGTERM);
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
    // Nobody accepts this one until the successor does.
    let waiting = std::thread::spawn({
        let address = address.clone();
        move || ask(&address, 3)
    });
    running.whole().assert_complete();
    assert_eq!(child.end(), Some(0));
    let mut child = start(&listener, folder.path());
    assert_eq!(waiting.join().unwrap(), Ok(()));
    child.signal(Signal::SIGTERM);
    assert_eq!(child.end(), Some(0));
}

#[test]
fn what_is_handed_over_and_cannot_be_listened_on_is_refused_for_good() {
    let folder = tempfile::Builder::new()
        .prefix("dsp")
        .tempdir_in("/tmp")
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let pretended = TcpListener::from(OwnedFd::from(connected));
    let mut child = start(&pretended, folder.path());
    assert_eq!(child.end(), Some(78));
    let log = std::fs::read_to_string(folder.path().join("dispatcher.log")).unwrap();
    assert!(log.contains("not a listening one"), "{log}");
}
