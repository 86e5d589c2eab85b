//! What the whole-system tests share: a dispatcher process with real workers, and a small client.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part of the support"
)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "only tests use it: what fails here fails the test"
)]
#![allow(
    clippy::allow_attributes,
    reason = "an expectation would fail where all is used"
)]

pub mod client;
pub mod crowd;
#[cfg(feature = "llama")]
pub mod plain;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Long enough for a loaded two-core machine; a test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running dispatcher. Killed, with its workers, when dropped.
pub struct System {
    child: Child,
    pub address: String,
    pub run_directory: tempfile::TempDir,
    pub log: PathBuf,
}

/// The dispatcher's program, built beside the worker's.
pub fn dispatcher_program() -> PathBuf {
    let worker = Path::new(env!("CARGO_BIN_EXE_dispatcher-worker"));
    let program = worker.with_file_name("dispatcher");
    assert!(
        program.exists(),
        "{} is missing: run `cargo build --release` first",
        program.display()
    );
    program
}

/// The small real model. Missing is a failure, not a reason to skip.
pub fn model() -> PathBuf {
    let path = std::env::var_os("DISPATCHER_TEST_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    assert!(
        path.exists(),
        "{} is missing: run scripts/fetch-model",
        path.display()
    );
    path
}

impl System {
    /// Scripted workers with this script (`key=value,…`).
    pub fn scripted(script: &str, arguments: &[&str]) -> Self {
        let mut all = vec![
            "--engine",
            "scripted",
            "--scripted",
            script,
            "--model",
            "scripted",
        ];
        all.extend_from_slice(arguments);
        Self::start(&all)
    }

    /// Workers on the real model, one compute thread each.
    pub fn llama(arguments: &[&str]) -> Self {
        let model = model();
        let mut all = vec!["--engine", "llama", "--model", model.to_str().unwrap()];
        if !arguments.contains(&"--threads") {
            all.extend_from_slice(&["--threads", "1"]);
        }
        all.extend_from_slice(arguments);
        Self::start(&all)
    }

    /// Starts a dispatcher and waits until it is ready.
    pub fn start(arguments: &[&str]) -> Self {
        let system = Self::launch(arguments);
        system.await_ready();
        system
    }

    /// Starts a dispatcher and waits until it listens.
    pub fn launch(arguments: &[&str]) -> Self {
        let run_directory = tempfile::Builder::new()
            .prefix("dsp")
            .tempdir_in("/tmp")
            .unwrap();
        let log = run_directory.path().join("dispatcher.log");
        let output = std::fs::File::create(&log).unwrap();
        let child = Command::new(dispatcher_program())
            .args(["--port", "0", "--run-dir"])
            .arg(run_directory.path().join("run"))
            .arg("--worker")
            .arg(env!("CARGO_BIN_EXE_dispatcher-worker"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let mut system = Self {
            child,
            address: String::new(),
            run_directory,
            log,
        };
        let state = system.run_directory.path().join("run/dispatcher.json");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(bytes) = std::fs::read(&state)
                && let Ok(value) = serde_json::from_slice::<Value>(&bytes)
            {
                system.address = value["address"].as_str().unwrap().to_owned();
                return system;
            }
            if let Ok(Some(status)) = system.child.try_wait() {
                panic!("the dispatcher ended with {status}:\n{}", system.read_log());
            }
            assert!(
                Instant::now() < deadline,
                "the dispatcher does not listen:\n{}",
                system.read_log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn read_log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn await_ready(&self) {
        self.await_status("ready", |status| status["ready"] == true);
    }

    /// Polls `/status` until `condition` holds, and returns that status.
    pub fn await_status(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if condition(&status) {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "waited in vain for: {what}\nstatus: {status:#}\nlog:\n{}",
                self.read_log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn status(&self) -> Value {
        let body = client::get_blocking(&self.address, "/status");
        serde_json::from_str(&body.1).unwrap_or_else(|error| panic!("{error}: {}", body.1))
    }

    /// The sum of one metric over its labels.
    pub fn metric(&self, name: &str) -> f64 {
        let (_, text) = client::get_blocking(&self.address, "/metrics");
        let mut sum = 0.0;
        let mut found = false;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            if series == name
                || series
                    .strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with('{'))
            {
                sum += value.parse::<f64>().unwrap();
                found = true;
            }
        }
        assert!(found, "no metric {name} in:\n{text}");
        sum
    }

    /// Pids of the workers, by instance.
    pub fn worker_pids(&self) -> Vec<u32> {
        self.status()["instances"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|instance| instance["pid"].as_u64())
            .map(|pid| u32::try_from(pid).unwrap())
            .collect()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        kill(self.pid(), signal);
    }

    /// Waits for the dispatcher's own end and returns its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(
                Instant::now() < deadline,
                "the dispatcher does not end:\n{}",
                self.read_log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for System {
    fn drop(&mut self) {
        let workers = if self.address.is_empty() || self.child.try_wait().is_ok_and(|s| s.is_some())
        {
            Vec::new()
        } else {
            // A test that failed half-way must leave no worker behind either.
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.worker_pids()))
                .unwrap_or_default()
        };
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in workers {
            await_gone(pid, Duration::from_secs(10));
        }
        if std::thread::panicking() {
            eprintln!("---- dispatcher's log ----\n{}", self.read_log());
        }
    }
}

pub fn kill(pid: u32, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    // It may have ended by itself meanwhile; that is for the test's assertions to notice.
    let _ = nix::sys::signal::kill(pid, signal);
}

/// Whether the process exists and is no zombie.
pub fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .trim_start()
            .starts_with('Z')
    })
}

/// Waits until the process is gone; `false` where it is not within `bound`.
pub fn await_gone(pid: u32, bound: Duration) -> bool {
    let deadline = Instant::now() + bound;
    while alive(pid) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}
