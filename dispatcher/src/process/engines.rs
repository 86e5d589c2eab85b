//! Asks a worker program which engines it was built with: only it knows.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use thiserror::Error;

use super::spawn;
use crate::model::{EngineKind, Engines};

/// How long an answer may take; it takes a few milliseconds, and on a busy machine a second.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// An answer has a line for each engine. What is longer is not one.
const ANSWER_BYTES_MAX: u64 = 4096;

/// Why a worker program's engines are not known.
#[derive(Debug, Error)]
pub enum AskError {
    #[error("it cannot be started: {0}")]
    Start(#[source] io::Error),
    #[error("asked for its engines, it gave no answer in {} s", .0.as_secs())]
    Silent(Duration),
    #[error("asked for its engines, it ended with {0}")]
    Failed(ExitStatus),
    #[error("asked for its engines, it answered something else")]
    Foreign,
}

/// What `program --engines` says. Waits for it, at most 10 s.
///
/// # Errors
/// Where it cannot be started, does not answer in time, or is no worker of ours.
pub fn ask(program: &Path) -> Result<Engines, AskError> {
    ask_within(program, ANSWER_MAX)
}

fn ask_within(program: &Path, limit: Duration) -> Result<Engines, AskError> {
    // A bare name is a file here, not a program somewhere on the search path.
    let child = Command::new(std::path::absolute(program).map_err(AskError::Start)?)
        .arg("--engines")
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(spawn::is_kept)))
        // A BLAS starts its threads when it is loaded: none are needed for this.
        .env("OPENBLAS_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(AskError::Start)?;
    let pid = child.id();
    let (answer, answered) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("engines".to_owned())
        .spawn(move || {
            // Nobody waits for an answer that comes too late.
            let _ = answer.send(read(child));
        })
        .map_err(AskError::Start)?;
    let (text, status) = match answered.recv_timeout(limit) {
        Ok(read) => read.map_err(AskError::Start)?,
        Err(_) => {
            let pid = i32::try_from(pid).unwrap_or(i32::MAX);
            let pid = nix::unistd::Pid::from_raw(pid);
            // One that ended this very moment needs no killing.
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            return Err(AskError::Silent(limit));
        }
    };
    if !status.success() {
        return Err(AskError::Failed(status));
    }
    understood(&text).ok_or(AskError::Foreign)
}

/// All that it says, up to the bound, and how it ended.
fn read(mut child: Child) -> io::Result<(Vec<u8>, ExitStatus)> {
    let mut text = Vec::new();
    if let Some(output) = child.stdout.take() {
        output.take(ANSWER_BYTES_MAX).read_to_end(&mut text)?;
    }
    Ok((text, child.wait()?))
}

/// `None` where no line names an engine. Names that are not known here are a newer worker's.
fn understood(text: &[u8]) -> Option<Engines> {
    let text = std::str::from_utf8(text).ok()?;
    let engines: Engines = text
        .lines()
        .filter_map(|line| EngineKind::named(line.trim()))
        .collect();
    (engines != Engines::default()).then_some(engines)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn program(script: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
        folder
    }

    fn asked(script: &str) -> Result<Engines, AskError> {
        let folder = program(script);
        ask_within(&folder.path().join("worker"), Duration::from_secs(60))
    }

    #[test]
    fn a_worker_is_believed_about_its_engines_and_names_of_a_newer_one_are_left_out() {
        let said = asked("#!/bin/sh\n[ \"$*\" = --engines ] && printf 'mlx\\nwarp\\nscripted\\n'");
        let said = said.unwrap();
        assert!(said.has(EngineKind::Mlx) && said.has(EngineKind::Scripted));
        assert!(!said.has(EngineKind::Llama));
    }

    #[test]
    fn a_program_that_is_no_worker_is_told_apart_by_what_it_does() {
        let foreign = asked("#!/bin/sh\necho hello");
        assert!(matches!(foreign, Err(AskError::Foreign)), "{foreign:?}");
        let endless = asked("#!/bin/sh\nexec yes");
        assert!(matches!(endless, Err(AskError::Failed(_))), "{endless:?}");
        let failing = asked("#!/bin/sh\nexit 2");
        assert!(matches!(failing, Err(AskError::Failed(_))), "{failing:?}");
        let none = ask(Path::new("/nonexistent/worker"));
        assert!(matches!(none, Err(AskError::Start(_))), "{none:?}");
    }

    #[test]
    fn a_program_that_says_nothing_is_given_up_and_killed() {
        let folder = program("#!/bin/sh\necho $$ >\"${0%/*}/pid\"\nexec tail -f /dev/null");
        let silent = ask_within(&folder.path().join("worker"), Duration::from_millis(500));
        assert!(matches!(silent, Err(AskError::Silent(_))), "{silent:?}");
    }
}
