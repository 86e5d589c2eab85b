//! A stand-in for systemd: a socket that it holds, the notify protocol, start time-out, watchdog, stop time-out.

#![allow(
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::allow_attributes,
    reason = "support of tests, of which each uses its part"
)]

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::system::{PATIENCE, client, dispatcher_program, kill};

/// A process; one that a failed test left is killed. Its workers go with it.
pub struct Running {
    pub child: Child,
    /// All that it said since its start.
    pub said: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal);
    }

    /// Its exit code; `None` where a signal ended it.
    pub fn end(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the dispatcher does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// One service of the stand-in.
pub struct Unit {
    pub folder: tempfile::TempDir,
    pub listener: Option<TcpListener>,
    pub arguments: Vec<String>,
    /// `WatchdogSec`.
    pub watchdog: Option<Duration>,
    /// `TimeoutStartSec`.
    pub start_timeout: Duration,
    notify: UnixDatagram,
}

/// How a start ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Started {
    Ready,
    /// With this exit code.
    Ended(Option<i32>),
    /// The start time-out passed.
    TimedOut,
}

impl Unit {
    pub fn new(with_socket: bool, arguments: &[&str]) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("dsp")
            .tempdir_in("/tmp")
            .unwrap();
        let notify = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        let words = ["serve", "--service-manager", "systemd"];
        Self {
            listener: with_socket.then(|| TcpListener::bind("127.0.0.1:0").unwrap()),
            arguments: words
                .iter()
                .chain(arguments)
                .map(|&word| word.to_owned())
                .collect(),
            watchdog: None,
            start_timeout: PATIENCE,
            notify,
            folder,
        }
    }

    /// With a configuration file that says `text`.
    pub fn configured(with_socket: bool, text: &str) -> Self {
        let mut unit = Self::new(with_socket, &[]);
        unit.configure(text);
        let path = unit.config();
        unit.arguments
            .extend(["--config".to_owned(), path.to_str().unwrap().to_owned()]);
        unit
    }

    /// Writes the configuration file anew, with what every test wants beside `text`.
    pub fn configure(&self, text: &str) {
        let all = format!(
            "run-dir = {:?}\nworker = {:?}\nport = 0\n{text}",
            self.run_directory(),
            env!("CARGO_BIN_EXE_dispatcher-worker"),
        );
        std::fs::write(self.config(), all).unwrap();
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("dispatcher.toml")
    }

    pub fn run_directory(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub fn address(&self) -> String {
        let listener = self.listener.as_ref().unwrap();
        listener.local_addr().unwrap().to_string()
    }

    pub fn spawn(&self) -> Running {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.path().join("log"))
            .unwrap();
        let mut shell = String::from("exec 3<&0 0</dev/null; ");
        if self.listener.is_some() {
            shell.push_str("export LISTEN_PID=$$ LISTEN_FDS=1; ");
        }
        if let Some(watchdog) = self.watchdog {
            let us = watchdog.as_micros();
            shell.push_str(&format!("export WATCHDOG_PID=$$ WATCHDOG_USEC={us}; "));
        }
        shell.push_str("exec \"$0\" \"$@\"");
        let input = match &self.listener {
            Some(listener) => OwnedFd::from(listener.try_clone().unwrap()).into(),
            None => Stdio::null(),
        };
        let child = Command::new("sh")
            .args(["-c", &shell])
            .arg(dispatcher_program())
            .args(&self.arguments)
            .env("NOTIFY_SOCKET", self.folder.path().join("notify"))
            // Of no use to a service, which reads its file.
            .env("DISPATCHER_SLOTS", "0")
            .stdin(input)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Running {
            child,
            said: String::new(),
        }
    }

    /// What comes within `patience`, if anything does.
    pub fn hear(&self, running: &mut Running, patience: Duration) -> Option<String> {
        let patience = patience.max(Duration::from_millis(1));
        self.notify.set_read_timeout(Some(patience)).unwrap();
        let mut buffer = [0; 8192];
        let read = self.notify.recv(&mut buffer).ok()?;
        let text = String::from_utf8(buffer[..read].to_vec()).unwrap();
        running.said.push_str(&text);
        Some(text)
    }

    /// Waits until it says `words`.
    pub fn await_words(&self, running: &mut Running, words: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !running.said.contains(words) {
            assert!(
                Instant::now() < deadline,
                "`{words}` is never said, only:\n{}\nlog:\n{}",
                running.said,
                self.log()
            );
            self.hear(running, Duration::from_millis(100));
        }
    }

    /// Starts it as systemd would: until READY=1, its end, or the time-out, which it may extend.
    pub fn start(&self) -> (Running, Started) {
        // What a predecessor said last.
        self.notify.set_nonblocking(true).unwrap();
        let mut buffer = [0; 8192];
        while self.notify.recv(&mut buffer).is_ok() {}
        self.notify.set_nonblocking(false).unwrap();
        let mut running = self.spawn();
        let mut deadline = Instant::now() + self.start_timeout;
        loop {
            if let Some(text) = self.hear(&mut running, Duration::from_millis(20)) {
                if text.lines().any(|line| line == "READY=1") {
                    return (running, Started::Ready);
                }
                for line in text.lines() {
                    if let Some(us) = line.strip_prefix("EXTEND_TIMEOUT_USEC=") {
                        let more = Duration::from_micros(us.parse().unwrap());
                        deadline = deadline.max(Instant::now() + more);
                    }
                }
            }
            if let Some(status) = running.child.try_wait().unwrap() {
                return (running, Started::Ended(status.code()));
            }
            if Instant::now() >= deadline {
                return (running, Started::TimedOut);
            }
        }
    }

    /// Stops it and returns its exit code.
    pub fn stop(&self, mut running: Running) -> Option<i32> {
        running.signal(Signal::SIGTERM);
        running.end()
    }
}

/// The status and the JSON of `path`.
pub fn get(address: &str, path: &str) -> (u16, serde_json::Value) {
    let (status, body) = client::get_blocking(address, path);
    let body = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
    (status, body)
}

/// A FIFO in the place of each file that a crash record of `pid` may be written to in the next minutes:
/// the write, and with it the driver loop, waits until somebody reads.
pub fn trap_crash_records(run_directory: &Path, pid: u32) -> Vec<PathBuf> {
    let folder = run_directory.join("crashes");
    std::fs::create_dir_all(&folder).unwrap();
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    (now..now + 200)
        .map(|second| {
            let path = folder.join(format!(".crash-{second:012}-{pid:08}-000001.json.tmp"));
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
            path
        })
        .collect()
}
