//! `dispatcher reload`: finds the running dispatcher, tells it to reload, and says what became of it.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use thiserror::Error;

use crate::link::RunDirectory;
use crate::state::{State, StateFile};

/// How long the dispatcher may take to read its configuration. A model's header may be on a slow disk.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at `/status`.
const PAUSE: Duration = Duration::from_millis(50);
/// Of one look.
const LOOK: Duration = Duration::from_secs(5);
/// A status of more bytes is not one.
const STATUS_BYTES_MAX: u64 = 4 << 20;

/// Why nothing was reloaded.
#[derive(Debug, Error)]
pub enum ReloadError {
    #[error("no dispatcher runs in {0}: say which one with its `--port` or `--run-dir`")]
    NotRunning(String),
    #[error("dispatcher (pid {pid}) cannot be told: {cause}")]
    Signal { pid: u32, cause: io::Error },
    #[error("dispatcher (pid {pid}) was told, but does not say what became of it: {cause}")]
    Silent { pid: u32, cause: io::Error },
    #[error("dispatcher (pid {pid}) keeps its configuration: {problem}")]
    Refused { pid: u32, problem: String },
}

/// Reloads the dispatcher of `run_directory`; returns what to tell the user.
///
/// # Errors
/// Where none runs there, it cannot be told, or it refused the new configuration.
pub fn reload(run_directory: &Path) -> Result<String, ReloadError> {
    let missing = || ReloadError::NotRunning(run_directory.display().to_string());
    // The state file of a killed dispatcher stays, and its pid may be another process's by now; the
    // lock does not stay.
    if !RunDirectory::is_in_use(run_directory) {
        return Err(missing());
    }
    let state = StateFile::read(run_directory).map_err(|_| missing())?;
    let silent = |cause| ReloadError::Silent {
        pid: state.pid,
        cause,
    };
    let before = reloads(&state).map_err(silent)?.count;
    let pid = i32::try_from(state.pid).map_err(|_| missing())?;
    kill(Pid::from_raw(pid), Signal::SIGHUP).map_err(|errno| ReloadError::Signal {
        pid: state.pid,
        cause: errno.into(),
    })?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = reloads(&state).map_err(silent)?;
        if now.count > before {
            return match now.error {
                Some(problem) => Err(ReloadError::Refused {
                    pid: state.pid,
                    problem,
                }),
                None => Ok(format!(
                    "dispatcher (pid {}, http://{}) has read its configuration and replaces its \
                     workers one after another\n",
                    state.pid, state.address
                )),
            };
        }
        if Instant::now() >= deadline {
            return Err(silent(io::ErrorKind::TimedOut.into()));
        }
        std::thread::sleep(PAUSE);
    }
}

/// What `/status` says of reloads.
struct Reloads {
    count: u64,
    error: Option<String>,
}

fn reloads(state: &State) -> io::Result<Reloads> {
    let address: SocketAddr = state.address.parse().map_err(io::Error::other)?;
    let mut stream = TcpStream::connect_timeout(&reachable(address), LOOK)?;
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_write_timeout(Some(LOOK))?;
    // HTTP/1.0 has no chunks: the body is all that follows the head.
    stream.write_all(b"GET /status HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(STATUS_BYTES_MAX).read_to_end(&mut answer)?;
    parse(&answer).ok_or_else(|| io::Error::other("its answer is not a status"))
}

fn parse(answer: &[u8]) -> Option<Reloads> {
    let body = answer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let status: Value = serde_json::from_slice(&answer[body..]).ok()?;
    Some(Reloads {
        count: status["reloads"].as_u64()?,
        error: status["last_reload_error"].as_str().map(str::to_owned),
    })
}

/// Where a server on `address` is reached from its own machine.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_dispatcher_runs_nobody_is_signalled() {
        let folder = tempfile::tempdir().unwrap();
        let error = reload(folder.path()).unwrap_err();
        assert!(matches!(error, ReloadError::NotRunning(_)), "{error}");
        // A dispatcher that was killed leaves its file; this test's own pid stands for a new owner.
        let state = State {
            pid: std::process::id(),
            address: "127.0.0.1:1".to_owned(),
            version: String::new(),
        };
        let _file = StateFile::write(folder.path(), &state).unwrap();
        let error = reload(folder.path()).unwrap_err();
        assert!(matches!(error, ReloadError::NotRunning(_)), "{error}");
    }

    #[test]
    fn an_answer_that_is_no_status_is_not_taken_for_one() {
        let good = b"HTTP/1.0 200 OK\r\n\r\n{\"reloads\":2,\"last_reload_error\":null}";
        assert_eq!(parse(good).map(|one| one.count), Some(2));
        for bad in [
            &b""[..],
            b"HTTP/1.0 200 OK\r\n\r\n",
            b"x\r\n\r\n[1]",
            b"x\r\n\r\n{}",
        ] {
            assert!(parse(bad).is_none());
        }
    }

    #[test]
    fn a_server_on_all_addresses_is_asked_on_its_own_machine() {
        let at = |text: &str| reachable(text.parse().unwrap()).to_string();
        assert_eq!(at("0.0.0.0:80"), "127.0.0.1:80");
        assert_eq!(at("[::]:80"), "[::1]:80");
        assert_eq!(at("10.0.0.1:80"), "10.0.0.1:80");
    }
}
