//! Step times that were measured on this machine, kept so that the next plan need not assume any.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::curve::Curve;
use super::model::ModelFacts;
use crate::bus::store::{now, read_bounded, write_whole};
use crate::bus::{Machine, StepTimes};

/// So many steps of a batch size, and its mean counts.
pub const STEPS_MIN: u64 = 20;
/// So many batch sizes, and a server has learnt something.
const POINTS_MIN: usize = 2;

/// What one model's steps take on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    pub model: String,
    pub curve: Curve,
    /// `plan --measure`, or `serving`.
    pub origin: String,
    /// Processes that wanted a core before the steps were timed, as the system's load says; `None` where
    /// nobody looked.
    pub load_before: Option<f64>,
    /// Seconds since 1970.
    pub unix_s: u64,
}

/// Calibrations of all machines and models that share the cache directory.
#[derive(Clone, Debug)]
pub struct Calibrations {
    path: PathBuf,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Contents {
    calibrations: BTreeMap<String, Calibration>,
}

/// What a calibration holds for: this machine, this model, so many threads of one instance, this device.
#[must_use]
pub fn key(machine: &Machine, model: &ModelFacts, threads: u32, device: &str) -> String {
    format!(
        "{}:{}:{}:{threads}:{device}",
        machine.key(),
        model.engine,
        model.identity
    )
}

impl Calibrations {
    /// In `cache_directory`, which need not exist.
    #[must_use]
    pub fn new(cache_directory: &Path) -> Self {
        Self {
            path: cache_directory.join("steps.json"),
        }
    }

    #[must_use]
    pub fn get(&self, key: &str) -> Option<Calibration> {
        self.read().calibrations.remove(key)
    }

    /// Keeps one, the file whole or as it was.
    ///
    /// # Errors
    /// Where the directory cannot be written.
    pub fn put(&self, key: &str, calibration: &Calibration) -> io::Result<()> {
        let mut contents = self.read();
        contents
            .calibrations
            .insert(key.to_owned(), calibration.clone());
        write_whole(&self.path, &serde_json::to_vec_pretty(&contents)?)
    }

    fn read(&self) -> Contents {
        read_bounded(&self.path)
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }
}

/// The batch sizes that were seen often enough, and their seconds.
#[must_use]
pub fn points(times: &StepTimes, steps_min: u64) -> Vec<(u32, f64)> {
    times
        .decode
        .iter()
        .filter_map(|one| Some((one.batch, times.step_s(one.batch, steps_min)?)))
        .collect()
}

/// Seconds of one prompt token.
#[must_use]
pub fn prefill_s_per_token(times: &StepTimes) -> Option<f64> {
    (times.prefill_tokens > 0).then(|| times.prefill_us as f64 / 1e6 / times.prefill_tokens as f64)
}

/// What a server with one instance has learnt; `None`: too little to plan with.
#[must_use]
pub fn learnt(times: &StepTimes, model: &str) -> Option<Calibration> {
    let points = points(times, STEPS_MIN);
    if points.len() < POINTS_MIN {
        return None;
    }
    Some(Calibration {
        model: model.to_owned(),
        curve: Curve::measured(points, prefill_s_per_token(times), Vec::new())?,
        origin: "serving".to_owned(),
        load_before: None,
        unix_s: now(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::learned::BatchTime;

    fn times(batches: &[(u32, u64, u64)]) -> StepTimes {
        StepTimes {
            decode: batches
                .iter()
                .map(|&(batch, steps, mean_us)| BatchTime {
                    batch,
                    steps,
                    total_us: steps * mean_us,
                })
                .collect(),
            prefill_tokens: 1000,
            prefill_us: 500_000,
        }
    }

    #[test]
    fn a_server_that_saw_several_batch_sizes_often_has_learnt() {
        assert_eq!(learnt(&times(&[(1, 500, 9000)]), "m"), None);
        assert_eq!(learnt(&times(&[(1, 500, 9000), (4, 3, 9000)]), "m"), None);
        let found = learnt(&times(&[(1, 500, 9000), (4, 20, 15_000)]), "m").unwrap();
        assert_eq!(found.curve.points(), [(1, 0.009), (4, 0.015)]);
        assert!((found.curve.prefill_s_per_token() - 0.0005).abs() < 1e-12);
    }

    #[test]
    fn what_was_kept_is_found_again_and_a_damaged_file_is_no_calibration() {
        let folder = tempfile::tempdir().unwrap();
        let kept = Calibrations::new(&folder.path().join("new"));
        let one = learnt(&times(&[(1, 50, 9000), (2, 50, 9500)]), "m").unwrap();
        assert_eq!(kept.get("a"), None);
        kept.put("a", &one).unwrap();
        kept.put("b", &one).unwrap();
        assert_eq!(kept.get("a"), Some(one));
        std::fs::write(folder.path().join("new/steps.json"), "{").unwrap();
        assert_eq!(kept.get("a"), None);
    }
}
