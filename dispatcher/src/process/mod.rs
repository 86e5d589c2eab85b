//! Worker processes: a handle for each child, and its exit as one input to the driver.
//!
//! **Which thread spawns matters.** On Linux a worker asks to be killed when its parent dies, and
//! the kernel takes the spawning *thread* for the parent. [`Processes::spawn`] is therefore a plain
//! call that forks on the caller's thread, and it must be made from a thread that lives as long as
//! the dispatcher: the one that runs the driver inside `Runtime::block_on`, never a blocking-pool
//! thread, which ends when it has been idle.

pub mod engines;
mod identity;
mod output;
pub mod spawn;
pub mod sweep;
mod unix;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use proto::{Generation, InstanceId};
use thiserror::Error;
use tokio::process::{ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::input::Input;
use crate::machine::event::ExitStatus;

pub use spawn::{Launch, WorkerCommand};

/// After an exit, how long the last lines of output may take to arrive. Something that left the
/// worker's group can hold the pipe open for longer.
const OUTPUT_GRACE: Duration = Duration::from_millis(100);

/// Why no process came to be.
#[derive(Debug, Error)]
#[error("start {program}: {source}")]
pub struct SpawnError {
    program: PathBuf,
    source: io::Error,
}

impl SpawnError {
    /// Whether trying again is pointless: there is no such program, or it cannot be executed.
    #[must_use]
    pub fn permanent(&self) -> bool {
        matches!(
            self.source.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
        ) || self.source.raw_os_error() == Some(nix::errno::Errno::ENOEXEC as i32)
    }
}

/// Starts workers and watches over them.
#[derive(Debug)]
pub struct Processes {
    run_directory: PathBuf,
    inputs: mpsc::Sender<Input>,
    oom: unix::OomWatch,
}

/// A worker process. Dropping the handle closes the worker's standard input, at which it exits.
#[derive(Debug)]
pub struct Child {
    pid: u32,
    instance: InstanceId,
    generation: Generation,
    exited: Arc<AtomicBool>,
    /// Open for the worker's life: its end of file tells the worker that the dispatcher is gone.
    _stdin: Option<File>,
}

impl Processes {
    /// Pid files are kept in `run_directory`; exits go to `inputs`.
    ///
    /// Descriptors that this process was started with are marked close-on-exec: call it once they
    /// are there, and hand none to a child by inheritance afterwards.
    #[must_use]
    pub fn new(run_directory: &Path, inputs: mpsc::Sender<Input>) -> Self {
        unix::keep_descriptors_from_children();
        Self {
            run_directory: run_directory.to_owned(),
            inputs,
            oom: unix::OomWatch::new(),
        }
    }

    /// Starts a process in a group of its own. `register` gets its pid, and only then is `token`
    /// written to its standard input: a worker cannot say hello before it is expected.
    ///
    /// `Input::Exited` comes exactly once for each process that was started. Must be called within
    /// a tokio runtime, from the driver's own thread (see the module).
    ///
    /// # Errors
    ///
    /// Where the system starts no process. Then `register` is not called and no exit comes.
    pub fn spawn(
        &self,
        instance: InstanceId,
        generation: Generation,
        launch: &Launch,
        token: &[u8; 32],
        register: impl FnOnce(u32),
    ) -> Result<Child, SpawnError> {
        let failed = |source| SpawnError {
            program: launch.program.clone(),
            source,
        };
        let oom_at_spawn = self.oom.count();
        // Descriptors do not leak: std, tokio and interprocess open theirs close-on-exec, and those
        // from before were marked so.
        let mut process = Command::new(&launch.program)
            .args(&launch.arguments)
            .env_clear()
            .envs(launch.environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let Some(pid) = process.id() else {
            return Err(failed(io::Error::other("it has no pid")));
        };
        let record = sweep::PidFile::write(&self.run_directory, pid, instance, generation, launch);
        register(pid);
        let stdin = process
            .stdin
            .take()
            .and_then(|stdin| hand_over(stdin, token));
        let tail = output::Tail::default();
        let mut outputs = Vec::new();
        if let Some(stdout) = process.stdout.take() {
            let follow = output::follow(stdout, "stdout", instance, generation, tail.clone());
            outputs.push(tokio::spawn(follow));
        }
        if let Some(stderr) = process.stderr.take() {
            let follow = output::follow(stderr, "stderr", instance, generation, tail.clone());
            outputs.push(tokio::spawn(follow));
        }
        let exited = Arc::new(AtomicBool::new(false));
        let watch = Watch {
            pid,
            instance,
            generation,
            exited: Arc::clone(&exited),
            oom: self.oom.clone(),
            oom_at_spawn,
            inputs: self.inputs.clone(),
        };
        tokio::spawn(watch.run(process, outputs, tail, record));
        Ok(Child {
            pid,
            instance,
            generation,
            exited,
            _stdin: stdin,
        })
    }
}

/// Writes the token and keeps the pipe. The pipe is empty, so that 32 bytes always fit; a child
/// that is gone already shows by its exit.
fn hand_over(stdin: ChildStdin, token: &[u8; 32]) -> Option<File> {
    let mut stdin = File::from(stdin.into_owned_fd().ok()?);
    if let Err(error) = stdin.write_all(token) {
        tracing::debug!(%error, "a worker took no token");
    }
    Some(stdin)
}

impl Child {
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    #[must_use]
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// SIGTERM to the worker's group. `false`: it is gone.
    pub fn terminate(&self) -> bool {
        self.signal(Signal::SIGTERM)
    }

    /// SIGKILL to the worker's group. `false`: it is gone.
    pub fn kill(&self) -> bool {
        self.signal(Signal::SIGKILL)
    }

    fn signal(&self, signal: Signal) -> bool {
        // After the exit the number may be another process's.
        !self.exited.load(Ordering::Acquire) && unix::signal_group(self.pid, signal)
    }
}

/// What the waiting task knows of its child.
struct Watch {
    pid: u32,
    instance: InstanceId,
    generation: Generation,
    exited: Arc<AtomicBool>,
    oom: unix::OomWatch,
    oom_at_spawn: u64,
    inputs: mpsc::Sender<Input>,
}

impl Watch {
    async fn run(
        self,
        mut process: tokio::process::Child,
        outputs: Vec<JoinHandle<()>>,
        tail: output::Tail,
        record: Option<sweep::PidFile>,
    ) {
        let status = match process.wait().await {
            Ok(status) => {
                let killed = std::os::unix::process::ExitStatusExt::signal(&status)
                    == Some(Signal::SIGKILL as i32);
                let oom = killed && self.oom.explains_kill(self.oom_at_spawn);
                unix::exit_status(status, oom)
            }
            // Someone else has waited for it: it is gone, and how is not known.
            Err(error) => {
                tracing::error!(%error, pid = self.pid, "waiting for a worker failed");
                ExitStatus::Code(-1)
            }
        };
        // What a worker started does not outlive it. Its group keeps the number from being given
        // to another process while there is someone in it.
        unix::signal_group(self.pid, Signal::SIGKILL);
        self.exited.store(true, Ordering::Release);
        if let Some(record) = record {
            record.remove();
        }
        let mut outputs = outputs.into_iter();
        let all = async {
            for output in outputs.by_ref() {
                // A reader that panicked has read what it has read.
                let _ = output.await;
            }
        };
        if tokio::time::timeout(OUTPUT_GRACE, all).await.is_err() {
            tracing::debug!(
                pid = self.pid,
                "a worker's output is still open after its exit"
            );
        }
        let input = Input::Exited {
            instance: self.instance,
            generation: self.generation,
            status,
            tail: tail.take(),
        };
        // A driver that is gone needs no telling.
        let _ = self.inputs.send(input).await;
    }
}
