//! The state file: where a running dispatcher says who it is and where it listens, for its own commands and for tests.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The file's name in the run directory.
pub const FILE_NAME: &str = "dispatcher.json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub pid: u32,
    /// Where HTTP is served, as `host:port`.
    pub address: String,
    pub version: String,
}

/// The file of a running dispatcher; removed when dropped.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
}

impl StateFile {
    /// Writes the file whole or not at all, readable by its owner alone.
    pub fn write(run_directory: &Path, state: &State) -> io::Result<Self> {
        let path = run_directory.join(FILE_NAME);
        crate::service::write_whole(&path, &serde_json::to_vec(state)?, 0o600)?;
        Ok(Self { path })
    }

    /// What the dispatcher of this run directory wrote, if there is one.
    pub fn read(run_directory: &Path) -> io::Result<State> {
        Ok(serde_json::from_slice(&fs::read(
            run_directory.join(FILE_NAME),
        )?)?)
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        // A file that is gone already is as good as removed.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_file_says_what_was_written_and_goes_with_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let state = State {
            pid: 7,
            address: "127.0.0.1:8080".to_owned(),
            version: "0.1.0".to_owned(),
        };
        let file = StateFile::write(folder.path(), &state).unwrap();
        assert_eq!(StateFile::read(folder.path()).unwrap(), state);
        drop(file);
        assert!(StateFile::read(folder.path()).is_err());
    }
}
