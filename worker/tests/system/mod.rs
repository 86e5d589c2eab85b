//! What the whole-system tests share: a dispatcher process with real workers, and a small client.

#![allow(
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    reason = "each test binary uses its own part of the support"
)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
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
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Long enough for a loaded two-core machine; a test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running dispatcher. Killed, with its workers, when dropped.
pub struct System {
    child: Child,
    pub address: String,
    pub run_directory: Arc<tempfile::TempDir>,
    pub log: PathBuf,
}

/// How a dispatcher is to be started, where the plain way is not enough.
pub struct Start {
    arguments: Vec<String>,
    folder: Arc<tempfile::TempDir>,
    shell: Option<String>,
    environment: Vec<(String, String)>,
    worker: PathBuf,
}

/// A dispatcher that did not start.
#[derive(Debug)]
pub struct Refused {
    pub code: Option<i32>,
    pub log: String,
    pub took: Duration,
}

impl Start {
    pub fn new(arguments: &[&str]) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("dsp")
            .tempdir_in("/tmp")
            .unwrap();
        Self {
            arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
            folder: Arc::new(folder),
            shell: None,
            environment: Vec::new(),
            worker: PathBuf::from(env!("CARGO_BIN_EXE_dispatcher-worker")),
        }
    }

    /// Scripted workers with this script.
    pub fn scripted(script: &str, arguments: &[&str]) -> Self {
        Self::new(&[&scripted_arguments(script)[..], arguments].concat())
    }

    /// Where its log, its run directory and its workers' script are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// In the run directory that `other` has or had.
    pub fn in_place_of(mut self, other: &System) -> Self {
        self.folder = Arc::clone(&other.run_directory);
        self
    }

    /// After these words of a shell, which holds for the dispatcher and its workers.
    pub fn after_shell(mut self, words: &str) -> Self {
        self.shell = Some(words.to_owned());
        self
    }

    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Workers that a shell starts after these words, in the process that becomes the worker.
    pub fn workers_after_shell(mut self, words: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let path = self.folder.path().join("worker.sh");
        let program = env!("CARGO_BIN_EXE_dispatcher-worker");
        std::fs::write(
            &path,
            format!("#!/bin/sh\n{words}\nexec {program} \"$@\"\n"),
        )
        .unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
        self.worker = path;
        self
    }

    fn spawn(&self) -> (Child, PathBuf) {
        let taken = |number: &u32| self.folder.path().join(format!("{number}.log")).exists();
        let number = (1..).find(|number| !taken(number)).unwrap();
        let log = self.folder.path().join(format!("{number}.log"));
        let output = std::fs::File::create(&log).unwrap();
        let mut command = match &self.shell {
            None => Command::new(dispatcher_program()),
            Some(words) => {
                let mut command = Command::new("/bin/sh");
                command
                    .args(["-c", &format!("{words}; exec \"$0\" \"$@\"")])
                    .arg(dispatcher_program());
                command
            }
        };
        let child = command
            .args(["--run-dir"])
            .arg(self.folder.path().join("run"))
            .arg("--worker")
            .arg(&self.worker)
            .args(
                (!self.arguments.iter().any(|word| word == "--port"))
                    .then_some(["--port", "0"])
                    .into_iter()
                    .flatten(),
            )
            .args(&self.arguments)
            // What is measured of the machine is measured once for all tests, and not in the user's home.
            .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        (child, log)
    }

    /// Starts it and waits until it is ready.
    pub fn start(self) -> System {
        let system = self.launch();
        system.await_ready();
        system
    }

    /// Starts it and waits until it listens.
    pub fn launch(self) -> System {
        let (child, log) = self.spawn();
        let mut system = System {
            child,
            address: String::new(),
            run_directory: self.folder,
            log,
        };
        let state = system.run_directory.path().join("run/dispatcher.json");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(bytes) = std::fs::read(&state)
                && let Ok(value) = serde_json::from_slice::<Value>(&bytes)
                && value["pid"] == system.pid()
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

    /// Starts it and waits for its end.
    pub fn refused(self) -> Refused {
        let begun = Instant::now();
        let (mut child, log) = self.spawn();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > PATIENCE {
                let _ = child.kill();
                panic!("the dispatcher does not refuse to start");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        Refused {
            code: status.code(),
            took: begun.elapsed(),
            log: std::fs::read_to_string(log).unwrap(),
        }
    }
}

fn scripted_arguments(script: &str) -> [&str; 6] {
    // An endless output is the default: the script that changes nothing.
    let script = if script.is_empty() {
        "length=0"
    } else {
        script
    };
    [
        "--engine",
        "scripted",
        "--scripted",
        script,
        "--model",
        "scripted",
    ]
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
        Start::scripted(script, arguments).start()
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
        Start::new(arguments).launch()
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

    /// The value of the one series of a metric that has all of `labels` (`name="value"`); 0 where
    /// there is none yet.
    pub fn metric_with(&self, name: &str, labels: &[&str]) -> f64 {
        let (_, text) = client::get_blocking(&self.address, "/metrics");
        let found = text.lines().find_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let rest = series.strip_prefix(name)?;
            let fits = rest.starts_with('{') && labels.iter().all(|label| rest.contains(label));
            fits.then(|| value.parse::<f64>().unwrap())
        });
        found.unwrap_or(0.0)
    }

    /// The crash records on disk, the newest first.
    pub fn crash_records(&self) -> Vec<Value> {
        let folder = self.run_directory.path().join("run/crashes");
        let mut paths: Vec<_> = std::fs::read_dir(folder)
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default();
        paths.retain(|path: &PathBuf| path.extension().is_some_and(|suffix| suffix == "json"));
        paths.sort();
        let read = |path: &PathBuf| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        paths.iter().rev().map(read).collect()
    }

    /// Waits until the log has `words`.
    pub fn await_log(&self, words: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.read_log().contains(words) {
            assert!(
                Instant::now() < deadline,
                "the log never says `{words}`:\n{}",
                self.read_log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
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

/// Processor time that the process has taken so far.
pub fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    // A tick is 10 ms on every Linux that is in use.
    Duration::from_millis(ticks * 10)
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
