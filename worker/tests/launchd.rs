//! A stand-in for launchd, after our reading of its manual: KeepAlive, ThrottleInterval, ExitTimeOut and Sockets, from the property list that `service install` writes. The real one needs a Mac.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod manager;
mod system;

use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use manager::get;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use system::{PATIENCE, client, dispatcher_program, kill};

/// The stand-in's seconds last so long: its throttle of ten would make every test wait.
const SECOND: Duration = Duration::from_millis(100);

/// One loaded job.
struct Job {
    folder: tempfile::TempDir,
    program: Vec<String>,
    working_directory: PathBuf,
    restart_unless_successful: bool,
    throttle: Duration,
    exit_timeout: Duration,
    /// `Sockets`; on a port of the test's own.
    listener: Option<TcpListener>,
    child: Option<Child>,
    last_start: Option<Instant>,
    starts: u32,
    ends: Vec<ExitStatus>,
    /// KeepAlive wants it started.
    due: bool,
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("dsp")
        .tempdir_in("/tmp")
        .unwrap()
}

/// Writes the configuration that the service reads.
fn configure(folder: &Path, text: &str) {
    let all = format!(
        "run-dir = {:?}\nworker = {:?}\nport = 18080\n{text}",
        folder.join("run"),
        env!("CARGO_BIN_EXE_dispatcher-worker"),
    );
    std::fs::write(folder.join("dispatcher.toml"), all).unwrap();
}

/// The property list that an owner of a Mac would get.
fn definition(folder: &Path, with_socket: bool) -> plist::Dictionary {
    let mut command = Command::new(dispatcher_program());
    command
        .args([
            "service",
            "install",
            "--print",
            "--service-manager",
            "launchd",
            "--config",
        ])
        .arg(folder.join("dispatcher.toml"));
    if !with_socket {
        command.arg("--no-socket");
    }
    let output = command.env("HOME", folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, xml) = text.split_once('\n').unwrap();
    let value = plist::Value::from_reader_xml(xml.trim_end().as_bytes()).unwrap();
    value.into_dictionary().unwrap()
}

impl Job {
    /// `bootstrap`: the job is loaded and, by RunAtLoad, started.
    fn load(folder: tempfile::TempDir, definition: &plist::Dictionary) -> Self {
        let seconds = |key: &str| {
            let value = definition[key].as_unsigned_integer().unwrap();
            SECOND * u32::try_from(value).unwrap()
        };
        let words = definition["ProgramArguments"].as_array().unwrap().iter();
        let keep = definition["KeepAlive"].as_dictionary().unwrap();
        let sockets = definition.get("Sockets").map(|sockets| {
            let sockets = sockets.as_dictionary().unwrap();
            sockets["Listeners"].as_dictionary().unwrap().clone()
        });
        let mut job = Self {
            program: words
                .map(|word| word.as_string().unwrap().to_owned())
                .collect(),
            working_directory: definition["WorkingDirectory"].as_string().unwrap().into(),
            restart_unless_successful: keep["SuccessfulExit"].as_boolean() == Some(false),
            throttle: seconds("ThrottleInterval"),
            // Not shortened: the dispatcher's own times are not.
            exit_timeout: seconds("ExitTimeOut") * 10,
            listener: sockets.map(|one| {
                assert_eq!(one["SockServiceName"].as_string(), Some("18080"));
                TcpListener::bind((one["SockNodeName"].as_string().unwrap(), 0)).unwrap()
            }),
            folder,
            child: None,
            last_start: None,
            starts: 0,
            ends: Vec::new(),
            due: definition["RunAtLoad"].as_boolean() == Some(true),
        };
        job.turn();
        job
    }

    /// One look of launchd at the job: reaps it, and starts it where it is due and not throttled.
    fn turn(&mut self) {
        if let Some(child) = &mut self.child {
            let Some(status) = child.try_wait().unwrap() else {
                return;
            };
            self.child = None;
            self.ends.push(status);
            self.due = self.restart_unless_successful && !status.success();
        }
        let wanted = self.due || self.has_connection();
        let rested = self
            .last_start
            .is_none_or(|start| start.elapsed() >= self.throttle);
        if wanted && rested {
            self.due = false;
            self.child = Some(self.spawn());
            self.last_start = Some(Instant::now());
            self.starts += 1;
        }
    }

    /// A connection waits in the backlog: launchd starts the job for it, however it ended before.
    fn has_connection(&self) -> bool {
        self.listener.as_ref().is_some_and(|listener| {
            let mut one = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            poll(&mut one, PollTimeout::ZERO).unwrap() > 0
        })
    }

    fn spawn(&self) -> Child {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.path().join("log"))
            .unwrap();
        // launchd hands sockets over by a call that only macOS has; here it is systemd's way.
        let mut shell = String::from("exec 3<&0 0</dev/null; ");
        if self.listener.is_some() {
            shell.push_str("export LISTEN_PID=$$ LISTEN_FDS=1; ");
        }
        shell.push_str("exec \"$0\" \"$@\"");
        let input = match &self.listener {
            Some(listener) => OwnedFd::from(listener.try_clone().unwrap()).into(),
            None => Stdio::null(),
        };
        Command::new("sh")
            .args(["-c", &shell])
            .args(&self.program)
            .current_dir(&self.working_directory)
            .stdin(input)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    fn until(&mut self, what: &str, holds: impl Fn(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            self.turn();
            assert!(
                Instant::now() < deadline,
                "{what} never comes:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Looks at the job for so long.
    fn watch(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// `bootout`: SIGTERM, and SIGKILL after ExitTimeOut. Whether it ended by itself, with 0.
    fn stop(&mut self) -> bool {
        let Some(mut child) = self.child.take() else {
            return true;
        };
        kill(child.id(), Signal::SIGTERM);
        let deadline = Instant::now() + self.exit_timeout;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.success();
            }
            if Instant::now() >= deadline {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Where it serves, once it does.
    fn address(&mut self) -> String {
        let state = self.folder.path().join("run/dispatcher.json");
        let read = |job: &mut Self| {
            let text = std::fs::read_to_string(&state).ok()?;
            let state: serde_json::Value = serde_json::from_str(&text).ok()?;
            let pid = job.child.as_ref()?.id();
            (state["pid"] == pid).then(|| state["address"].as_str().unwrap().to_owned())
        };
        self.until("the state file", |job| read(job).is_some());
        let address = read(self).unwrap();
        self.until("readiness", |_| {
            client::get_blocking(&address, "/ready").0 == 200
        });
        address
    }
}

const SCRIPTED: &str = "engine = \"scripted\"\nscripted = \"step_us=2000\"\n";

#[test]
fn a_dispatcher_that_crashes_is_started_again_after_the_throttle() {
    let folder = folder();
    configure(folder.path(), SCRIPTED);
    let definition = definition(folder.path(), true);
    let mut job = Job::load(folder, &definition);
    job.address();
    for crash in 1..=3 {
        let began = job.last_start.unwrap();
        kill(job.child.as_ref().unwrap().id(), Signal::SIGKILL);
        job.until("the next start", |job| job.starts == crash + 1);
        assert!(job.last_start.unwrap() - began >= job.throttle);
        let address = job.address();
        client::stream(&address, &client::chat("on", 3)).assert_complete();
    }
    assert!(job.stop());
}

#[test]
fn a_stop_drains_within_the_limit_and_is_not_followed_by_a_start() {
    let folder = folder();
    configure(
        folder.path(),
        &format!("{SCRIPTED}drain-timeout = \"20s\"\n"),
    );
    let definition = definition(folder.path(), true);
    assert_eq!(
        definition["ExitTimeOut"].as_unsigned_integer(),
        Some(20 + 5 + 10)
    );
    let mut job = Job::load(folder, &definition);
    let address = job.address();
    let mut running =
        client::Events::open(&address, "/v1/chat/completions", &client::chat("on", 400));
    running.next_text();
    let stopped = job.stop();
    assert!(stopped, "{}", job.log());
    running.whole().assert_complete();
    job.watch(job.throttle * 2);
    assert_eq!(job.starts, 1, "{}", job.log());
}

#[test]
fn a_configuration_error_without_a_socket_is_started_once_and_not_again() {
    let folder = folder();
    configure(folder.path(), SCRIPTED);
    let definition = definition(folder.path(), false);
    assert!(!definition.contains_key("Sockets"));
    configure(folder.path(), "slotz = 4\n");
    let mut job = Job::load(folder, &definition);
    job.until("its end", |job| !job.ends.is_empty());
    job.watch(job.throttle * 3);
    assert_eq!((job.starts, job.ends.len()), (1, 1), "{}", job.log());
    assert_eq!(job.ends[0].code(), Some(0));
    assert!(job.log().contains("did you mean `slots`"), "{}", job.log());
}

#[test]
fn a_configuration_error_with_a_socket_stays_up_and_says_why_to_each_who_asks() {
    let folder = folder();
    configure(folder.path(), SCRIPTED);
    let definition = definition(folder.path(), true);
    configure(folder.path(), "slotz = 4\n");
    let mut job = Job::load(folder, &definition);
    let address = job
        .listener
        .as_ref()
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    for _ in 0..20 {
        // Each of these connections would start an ended job again.
        let (status, body) = get(&address, "/ready");
        assert_eq!(status, 503);
        assert!(
            body["reason"].as_str().unwrap().contains("did you mean"),
            "{body}"
        );
        job.turn();
    }
    job.watch(job.throttle * 3);
    assert_eq!((job.starts, job.ends.len()), (1, 0), "{}", job.log());
    // Mended and told, it serves in the same process.
    configure(job.folder.path(), SCRIPTED);
    kill(job.child.as_ref().unwrap().id(), Signal::SIGHUP);
    job.until("readiness", |_| {
        client::get_blocking(&address, "/ready").0 == 200
    });
    assert_eq!(job.starts, 1);
    assert!(job.stop());
}

#[test]
fn a_connection_starts_a_job_that_ended_well() {
    let folder = folder();
    configure(folder.path(), SCRIPTED);
    let definition = definition(folder.path(), true);
    let mut job = Job::load(folder, &definition);
    let address = job.address();
    kill(job.child.as_ref().unwrap().id(), Signal::SIGTERM);
    job.until("its end", |job| !job.ends.is_empty());
    job.watch(job.throttle * 2);
    assert_eq!(job.starts, 1, "an end with 0 is no reason to start");
    let waiting = std::thread::spawn(move || client::stream(&address, &client::chat("on", 3)));
    job.until("a start for the connection", |job| job.starts == 2);
    waiting.join().unwrap().assert_complete();
    assert!(job.stop());
}
