//! `dispatcher reload`: finds the running dispatcher, tells it to reload, and says what became of it.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thiserror::Error;

use crate::ask;
use crate::state::State;

/// How long the dispatcher may take to read its configuration. A model's header may be on a slow disk.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at `/status`.
const PAUSE: Duration = Duration::from_millis(50);

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
    let state = ask::running(run_directory).ok_or_else(missing)?;
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
    let status = ask::status(&state.address)?;
    Ok(Reloads {
        count: status["reloads"].as_u64().unwrap_or_default(),
        error: status["last_reload_error"].as_str().map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::StateFile;

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
}
