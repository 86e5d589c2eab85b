//! What was measured of this machine, kept in the user's cache directory so that it is measured once.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::bandwidth::{self, Bandwidth, Plan};
use super::machine::Machine;
use crate::memory::pressure::Reading;
use crate::memory::reading;

/// A file of more bytes is not ours.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Passes of a measurement: the best and the median of them are told.
pub const PASSES: usize = 20;
/// The best of an undisturbed measurement is at most so many times its median.
const SETTLED: f64 = 1.15;
/// So many times the array must be free in every bound on memory.
const ROOM: u64 = 2;
/// With fewer undisturbed passes there is no figure.
const PASSES_MIN: usize = 8;

/// The read bandwidth of one machine's memory, with all its cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    pub machine: Machine,
    pub threads: u32,
    pub array_bytes: u64,
    /// GB (10⁹ bytes) per second of the fastest pass.
    pub best_gb_per_s: f64,
    /// Of the middle one.
    pub median_gb_per_s: f64,
    pub passes: u32,
    /// Seconds since 1970.
    pub unix_s: u64,
}

impl Measurement {
    /// Whether its passes agree. Where they do not, something else used the memory, and the best may
    /// be too low.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.best_gb_per_s <= self.median_gb_per_s * SETTLED
    }

    /// From what was read, where enough passes were undisturbed.
    #[must_use]
    pub fn of(found: &Bandwidth, machine: &Machine) -> Option<Self> {
        if found.gb_per_s.len() < PASSES_MIN {
            return None;
        }
        Some(Self {
            machine: machine.clone(),
            threads: u32::try_from(found.threads).unwrap_or(u32::MAX),
            array_bytes: found.bytes as u64,
            best_gb_per_s: found.best()?,
            median_gb_per_s: found.median()?,
            passes: u32::try_from(found.gb_per_s.len()).unwrap_or(u32::MAX),
            unix_s: now(),
        })
    }
}

/// The measurements of all machines that share the cache directory.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Contents {
    machines: BTreeMap<String, Measurement>,
}

impl Store {
    /// In `cache_directory`, which need not exist.
    #[must_use]
    pub fn new(cache_directory: &Path) -> Self {
        Self {
            path: cache_directory.join("bus.json"),
        }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is known of `machine`. A file that is damaged or from another version knows nothing.
    #[must_use]
    pub fn get(&self, machine: &Machine) -> Option<Measurement> {
        let found = self.read().machines.remove(&machine.key())?;
        let sane = |rate: f64| rate.is_finite() && rate > 0.0;
        (sane(found.best_gb_per_s) && sane(found.median_gb_per_s)).then_some(found)
    }

    /// Keeps `measurement`, the file whole or as it was.
    ///
    /// # Errors
    /// Where the directory cannot be written.
    pub fn put(&self, measurement: &Measurement) -> io::Result<()> {
        let mut contents = self.read();
        let key = measurement.machine.key();
        contents.machines.insert(key, measurement.clone());
        write_whole(&self.path, &serde_json::to_vec_pretty(&contents)?)
    }

    /// Keeps `measurement` where nothing better is known, and returns what is kept.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn put_better(&self, measurement: Measurement) -> io::Result<Measurement> {
        let known = self.get(&measurement.machine);
        match known.filter(|known| known.best_gb_per_s > measurement.best_gb_per_s) {
            Some(known) => Ok(known),
            None => self.put(&measurement).map(|()| measurement),
        }
    }

    fn read(&self) -> Contents {
        read_bounded(&self.path)
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }
}

/// Reads a file of ours; `None` where it is not there, or not ours.
pub(crate) fn read_bounded(path: &Path) -> Option<Vec<u8>> {
    let length = fs::metadata(path).ok()?.len();
    if length > FILE_BYTES_MAX {
        return None;
    }
    fs::read(path).ok()
}

/// Writes a file whole or not at all, its directory with it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", std::process::id()));
    let written = fs::File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // What is left of a full disk's attempt helps nobody.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Measures now, with all cores, for about a second. `None`: there is not enough memory for an array
/// that the caches cannot hold.
#[must_use]
pub fn measure_now(machine: &Machine) -> Option<Measurement> {
    measure_while(machine, &|| true)
}

/// As [`measure_now`], but ends as soon as `may` does not hold, and then has no figure.
#[must_use]
pub fn measure_while(machine: &Machine, may: &(dyn Fn() -> bool + Sync)) -> Option<Measurement> {
    let bytes = bandwidth::array_bytes(machine.cache_bytes, machine.memory_bytes)?;
    // A cgroup may have far less than the machine, and others may have taken most of either.
    let has_room = |reading: &Reading| reading.free() / ROOM >= bytes as u64;
    if !reading::read().iter().all(has_room) {
        return None;
    }
    let found = bandwidth::measure_while(
        Plan {
            threads: machine.cores as usize,
            bytes,
            passes: PASSES,
        },
        may,
    );
    Measurement::of(&found, machine)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(chip: &str) -> Machine {
        Machine {
            chip: chip.to_owned(),
            cores: 2,
            ..Machine::default()
        }
    }

    fn measured(chip: &str, passes: usize) -> Option<Measurement> {
        let found = Bandwidth {
            threads: 2,
            bytes: 1 << 28,
            gb_per_s: (0..passes).map(|pass| 20.0 + pass as f64).collect(),
            checksum: 0,
        };
        Measurement::of(&found, &machine(chip))
    }

    #[test]
    fn each_machine_finds_its_own_measurement() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(&folder.path().join("not/yet"));
        assert_eq!(store.get(&machine("a")), None);
        let a = measured("a", 9).unwrap();
        store.put(&a).unwrap();
        store.put(&measured("b", 10).unwrap()).unwrap();
        let found = store.get(&machine("a")).unwrap();
        assert_eq!((found.best_gb_per_s, found.median_gb_per_s), (28.0, 24.0));
        assert_eq!(store.get(&machine("b")).unwrap().passes, 10);
        assert_eq!(store.get(&machine("c")), None);
    }

    #[test]
    fn a_busy_machines_measurement_is_not_settled_and_does_not_replace_a_better_one() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let quiet = measured("a", 9).unwrap();
        let busy = Measurement {
            best_gb_per_s: 12.0,
            median_gb_per_s: 8.0,
            ..quiet.clone()
        };
        assert!(!busy.is_settled());
        assert_eq!(store.put_better(busy.clone()).unwrap(), busy);
        assert_eq!(store.put_better(quiet.clone()).unwrap(), quiet);
        assert_eq!(store.put_better(busy).unwrap(), quiet);
        let steady = Measurement {
            median_gb_per_s: 27.0,
            ..quiet
        };
        assert!(steady.is_settled());
    }

    #[test]
    fn a_damaged_file_knows_nothing_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        fs::write(store.path(), b"{\"machines\":{\"x\":").unwrap();
        assert_eq!(store.get(&machine("a")), None);
        store.put(&measured("a", 20).unwrap()).unwrap();
        assert!(store.get(&machine("a")).is_some());
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file stays: {left:?}");
    }

    #[test]
    fn too_few_undisturbed_passes_are_no_measurement() {
        assert_eq!(measured("a", PASSES_MIN - 1), None);
        assert!(measured("a", PASSES_MIN).is_some());
        let too_small = Machine {
            memory_bytes: 1 << 20,
            ..machine("a")
        };
        assert_eq!(measure_now(&too_small), None);
    }

    #[test]
    fn an_absurd_figure_in_the_file_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let mut wrong = measured("a", 20).unwrap();
        wrong.best_gb_per_s = -1.0;
        store.put(&wrong).unwrap();
        assert_eq!(store.get(&machine("a")), None);
    }
}
