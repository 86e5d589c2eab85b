//! Asks a running dispatcher, over its own HTTP: for the commands that say how one stands.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::link::RunDirectory;
use crate::state::{State, StateFile};

/// Of one question.
const PATIENCE: Duration = Duration::from_secs(5);
/// An answer of more bytes is not one of ours.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Who runs in `run_directory`; `None`: nobody.
///
/// The state file of a killed dispatcher stays, and its pid may be another process's by now; the lock
/// does not stay.
#[must_use]
pub fn running(run_directory: &Path) -> Option<State> {
    if !RunDirectory::is_in_use(run_directory) {
        return None;
    }
    StateFile::read(run_directory).ok()
}

/// The status of whoever runs in `run_directory`.
///
/// # Errors
/// Where nobody does, or the answer is not a status.
pub fn status_of(run_directory: &Path) -> io::Result<Value> {
    let state = running(run_directory)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no dispatcher runs there"))?;
    status(&state.address)
}

/// What `/status` says at `address`.
///
/// # Errors
/// Where it cannot be asked, or the answer is not a status.
pub fn status(address: &str) -> io::Result<Value> {
    let body = get(address, "/status")?;
    let status: Value = serde_json::from_slice(&body).map_err(|_| not_a("status"))?;
    if status["uptime_us"].is_u64() {
        Ok(status)
    } else {
        Err(not_a("status"))
    }
}

/// The body of `path` at `address` (`host:port`).
///
/// # Errors
/// Where nobody answers, or not in HTTP.
pub fn get(address: &str, path: &str) -> io::Result<Vec<u8>> {
    let address: SocketAddr = address.parse().map_err(io::Error::other)?;
    let mut stream = TcpStream::connect_timeout(&reachable(address), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // HTTP/1.0 has no chunks: the body is all that follows the head.
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.ok_or_else(|| not_a("HTTP response"))?;
    Ok(answer.split_off(end + 4))
}

fn not_a(what: &str) -> io::Error {
    io::Error::other(format!("its answer is not a {what}"))
}

/// Where a server on `address` is reached from its own machine.
#[must_use]
pub fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Seconds in words: `42 s`, `3 min 5 s`, `2 h 7 min`, `5 d 3 h`.
#[must_use]
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_on_all_addresses_is_asked_on_its_own_machine() {
        let at = |text: &str| reachable(text.parse().unwrap()).to_string();
        assert_eq!(at("0.0.0.0:80"), "127.0.0.1:80");
        assert_eq!(at("[::]:80"), "[::1]:80");
        assert_eq!(at("10.0.0.1:80"), "10.0.0.1:80");
    }

    #[test]
    fn an_answer_that_is_no_status_is_not_taken_for_one() {
        for (answer, good) in [
            (&b"HTTP/1.0 200 OK\r\n\r\n{\"uptime_us\":2}"[..], true),
            (b"", false),
            (b"HTTP/1.0 200 OK\r\n\r\n", false),
            (b"x\r\n\r\n[1]", false),
            (b"x\r\n\r\n{}", false),
        ] {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let server = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut question = [0; 64];
                let read = stream.read(&mut question).unwrap();
                stream.write_all(answer).unwrap();
                question[..read].starts_with(b"GET /status HTTP/1.0")
            });
            assert_eq!(status(&address).is_ok(), good);
            assert!(server.join().unwrap());
        }
    }

    #[test]
    fn durations_are_words() {
        let words = [5, 65, 3665, 90_000].map(duration);
        assert_eq!(words, ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]);
    }
}
