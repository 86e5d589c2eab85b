//! Crash records: one small JSON file per unplanned death of a worker, the oldest dropped.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Records kept on disk.
pub const RECORDS_MAX: usize = 100;
const PREFIX: &str = "crash-";

/// What is known of one death. It holds no text of any request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CrashRecord {
    /// Seconds since the Unix epoch.
    pub at_unix_s: u64,
    pub instance: u32,
    pub generation: u64,
    /// `external`, `engine` or `permanent`.
    pub cause: String,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// The cgroup's OOM killer struck while it died.
    pub oom: bool,
    /// From spawn to exit.
    pub uptime_ms: u64,
    pub engine: Option<String>,
    pub model: Option<String>,
    /// Keyed hashes of the prompts that were in its batch; meaningless to any other dispatcher.
    pub fingerprints: Vec<String>,
    /// The last lines of its output.
    pub tail: Vec<String>,
}

impl CrashRecord {
    /// Its main facts, for people.
    #[must_use]
    pub fn line(&self) -> String {
        let ago = unix_seconds().saturating_sub(self.at_unix_s);
        let last = self
            .tail
            .last()
            .map_or(String::new(), |line| format!(": {line}"));
        format!(
            "{} ago, instance {}, {}, {}{last}",
            crate::ask::duration(ago),
            self.instance,
            self.cause,
            self.how()
        )
    }

    /// How the process ended.
    #[must_use]
    pub fn how(&self) -> String {
        let how = match (self.signal, self.exit_code) {
            (Some(signal), _) => format!("signal {signal}"),
            (None, Some(code)) => format!("exit code {code}"),
            (None, None) => "unknown end".to_owned(),
        };
        let oom = if self.oom { ", out of memory" } else { "" };
        format!("{how}{oom}")
    }
}

/// A folder of crash records.
#[derive(Clone, Debug)]
pub struct CrashLog {
    directory: PathBuf,
    written: u64,
}

impl CrashLog {
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            written: 0,
        }
    }

    /// Writes one record, whole or not at all, and drops the oldest over the bound.
    pub fn write(&mut self, record: &CrashRecord) -> io::Result<PathBuf> {
        create_private(&self.directory)?;
        self.written += 1;
        // Names sort by time, then by order within this process.
        let name = format!(
            "{PREFIX}{:012}-{:08}-{:06}.json",
            record.at_unix_s,
            std::process::id(),
            self.written
        );
        let path = self.directory.join(&name);
        let temporary = self.directory.join(format!(".{name}.tmp"));
        let bytes = serde_json::to_vec_pretty(record)?;
        fs::write(&temporary, bytes)?;
        fs::rename(&temporary, &path)?;
        self.prune()?;
        Ok(path)
    }

    /// The newest records first. A file that is no record is passed over.
    pub fn read(&self) -> io::Result<Vec<CrashRecord>> {
        let mut records = Vec::new();
        for path in self.paths()?.into_iter().rev() {
            if let Ok(bytes) = fs::read(&path)
                && let Ok(record) = serde_json::from_slice(&bytes)
            {
                records.push(record);
            }
        }
        Ok(records)
    }

    fn prune(&self) -> io::Result<()> {
        let paths = self.paths()?;
        let excess = paths.len().saturating_sub(RECORDS_MAX);
        for path in paths.into_iter().take(excess) {
            fs::remove_file(path)?;
        }
        Ok(())
    }

    /// Oldest first.
    fn paths(&self) -> io::Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        match fs::read_dir(&self.directory) {
            Ok(entries) => {
                for entry in entries {
                    let entry = entry?;
                    let name = entry.file_name();
                    if name.to_string_lossy().starts_with(PREFIX) {
                        paths.push(entry.path());
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        paths.sort();
        Ok(paths)
    }
}

/// Seconds since the Unix epoch, for records that people read; nothing is ever computed from it.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

fn create_private(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(instance: u32, at_unix_s: u64) -> CrashRecord {
        CrashRecord {
            at_unix_s,
            instance,
            generation: 3,
            cause: "engine".to_owned(),
            exit_code: None,
            signal: Some(6),
            oom: false,
            uptime_ms: 1500,
            engine: Some("scripted".to_owned()),
            model: Some("none".to_owned()),
            fingerprints: vec!["00ff".to_owned()],
            tail: vec!["assertion failed".to_owned()],
        }
    }

    #[test]
    fn records_come_back_newest_first() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = CrashLog::new(folder.path().join("crashes"));
        assert_eq!(log.read().unwrap(), []);
        log.write(&record(0, 10)).unwrap();
        log.write(&record(1, 20)).unwrap();
        assert_eq!(log.read().unwrap(), [record(1, 20), record(0, 10)]);
    }

    #[test]
    fn the_oldest_records_over_the_bound_are_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = CrashLog::new(folder.path().to_owned());
        for at in 0..RECORDS_MAX as u64 + 7 {
            log.write(&record(0, at)).unwrap();
        }
        let records = log.read().unwrap();
        assert_eq!(records.len(), RECORDS_MAX);
        assert_eq!(records.last().unwrap().at_unix_s, 7);
    }

    #[test]
    fn a_file_that_is_no_record_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = CrashLog::new(folder.path().to_owned());
        log.write(&record(0, 10)).unwrap();
        fs::write(folder.path().join("crash-999999999999-x.json"), b"{ half").unwrap();
        assert_eq!(log.read().unwrap(), [record(0, 10)]);
    }
}
