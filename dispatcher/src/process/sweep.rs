//! Pid files, and the sweep at start that ends the workers of a dispatcher that was killed.
//!
//! A worker exits by itself when its dispatcher is gone. The sweep is for one that cannot: stopped,
//! or stuck in its driver with the memory still taken.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use proto::{Generation, InstanceId};
use serde::{Deserialize, Serialize};

use super::spawn::Launch;
use super::{identity, unix};
use crate::link::RunDirectory;

const PREFIX: &str = "worker-";
const SUFFIX: &str = ".pid";

/// Bytes of a pid file that are read: a longer one is not ours.
const RECORD_BYTES_MAX: usize = 4 << 10;

/// What a pid file says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    pid: u32,
    /// In the unit of [`identity::Identity`].
    started: u64,
    executable: String,
    instance: u32,
    generation: u64,
    dispatcher_pid: u32,
}

/// A pid file that was written. The waiting task removes it after the exit.
#[derive(Debug)]
pub(super) struct PidFile(PathBuf);

impl PidFile {
    /// Writes it, or says in the log why not: a worker without one serves as well.
    pub(super) fn write(
        directory: &Path,
        pid: u32,
        instance: InstanceId,
        generation: Generation,
        launch: &Launch,
    ) -> Option<Self> {
        // A process that is gone again has no identity, and needs no sweep.
        let found = identity::of(pid)?;
        let record = Record {
            pid,
            started: found.started,
            executable: found.executable,
            instance: instance.0,
            generation: generation.0,
            dispatcher_pid: std::process::id(),
        };
        let path = directory.join(format!("{PREFIX}{instance}-{generation}{SUFFIX}"));
        match write(&path, &record) {
            Ok(()) => Some(Self(path)),
            Err(error) => {
                let program = launch.program.display();
                tracing::warn!(%error, path = %path.display(), %program, "writing a pid file failed");
                None
            }
        }
    }

    pub(super) fn remove(self) {
        // Whoever removed it before has done what is wanted.
        let _ = fs::remove_file(self.0);
    }
}

fn write(path: &Path, record: &Record) -> io::Result<()> {
    let text = serde_json::to_vec(record)?;
    OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(path)?
        .write_all(&text)
}

/// What a sweep found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Workers of a dead dispatcher that were killed.
    pub killed: u32,
    /// Pid files whose process was gone, or was another.
    pub gone: u32,
}

/// Kills what workers of a dead dispatcher are left in `directory` and removes their pid files and
/// the socket's file.
///
/// The directory's lock says that its dispatcher is dead. A process is killed only if pid, start
/// time and executable are those that the dead dispatcher wrote down.
///
/// # Errors
///
/// Where the directory cannot be read.
pub fn sweep(directory: &RunDirectory) -> io::Result<Swept> {
    let mut swept = Swept::default();
    for entry in fs::read_dir(directory.path())? {
        let path = entry?.path();
        let is_record = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
        if !is_record {
            continue;
        }
        if read(&path).is_some_and(|record| kill(&record)) {
            swept.killed += 1;
        } else {
            swept.gone += 1;
        }
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(%error, path = %path.display(), "removing a pid file failed");
        }
    }
    match fs::remove_file(directory.socket()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(swept),
    }
}

fn read(path: &Path) -> Option<Record> {
    let text = fs::read(path).ok()?;
    // A dispatcher that was killed while it wrote leaves half a record.
    serde_json::from_slice(text.get(..text.len().min(RECORD_BYTES_MAX))?).ok()
}

fn kill(record: &Record) -> bool {
    let recorded = identity::Identity {
        started: record.started,
        executable: record.executable.clone(),
    };
    if identity::of(record.pid) != Some(recorded) {
        return false;
    }
    tracing::warn!(
        pid = record.pid,
        instance = record.instance,
        generation = record.generation,
        dispatcher_pid = record.dispatcher_pid,
        "killing a worker that its dead dispatcher left behind"
    );
    unix::signal_group(record.pid, Signal::SIGKILL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Child, Command};

    /// A sleeping process of its own group, killed when the test ends.
    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            let child = Command::new("/bin/sleep")
                .arg("600")
                .process_group(0)
                .spawn();
            Self(child.unwrap())
        }

        fn record(&self) -> Record {
            let found = identity::of(self.0.id()).unwrap();
            Record {
                pid: self.0.id(),
                started: found.started,
                executable: found.executable,
                instance: 1,
                generation: 2,
                dispatcher_pid: 3,
            }
        }

        fn lives(&mut self) -> bool {
            self.0.try_wait().unwrap().is_none()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn directory() -> (tempfile::TempDir, RunDirectory) {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDirectory::open(root.path()).unwrap();
        (root, directory)
    }

    #[test]
    fn a_worker_that_was_left_behind_is_killed_and_its_files_removed() {
        let (_root, directory) = directory();
        let mut sleeper = Sleeper::new();
        let path = directory.path().join("worker-1-2.pid");
        write(&path, &sleeper.record()).unwrap();
        fs::write(directory.socket(), "").unwrap();
        let swept = sweep(&directory).unwrap();
        assert_eq!(swept, Swept { killed: 1, gone: 0 });
        let status = sleeper.0.wait().unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGKILL as i32));
        assert!(!path.exists());
        assert!(!directory.socket().exists());
    }

    #[test]
    fn a_pid_that_is_another_process_now_is_left_alone() {
        let (_root, directory) = directory();
        let mut sleeper = Sleeper::new();
        let mut other_start = sleeper.record();
        other_start.started += 1;
        let mut other_program = sleeper.record();
        other_program.executable = "dispatcher-worker".into();
        write(&directory.path().join("worker-1-2.pid"), &other_start).unwrap();
        write(&directory.path().join("worker-1-3.pid"), &other_program).unwrap();
        let swept = sweep(&directory).unwrap();
        assert_eq!(swept, Swept { killed: 0, gone: 2 });
        assert!(sleeper.lives());
    }

    #[test]
    fn half_a_record_and_strange_files_are_no_reason_to_fail() {
        let (_root, directory) = directory();
        fs::write(directory.path().join("worker-1-2.pid"), "{\"pid\": 1").unwrap();
        fs::write(directory.path().join("notes.txt"), "mine").unwrap();
        let swept = sweep(&directory).unwrap();
        assert_eq!(swept, Swept { killed: 0, gone: 1 });
        assert!(directory.path().join("notes.txt").exists());
    }
}
