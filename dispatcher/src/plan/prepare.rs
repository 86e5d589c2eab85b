//! Brings together what a prediction is made from: the model's header, this machine's memory, timed steps.

use serde::Serialize;

use super::calibration::{self, Calibration, Calibrations};
use super::curve::Curve;
use super::model::ModelFacts;
use super::predict::{Buses, Memory, Question, Workload};
use crate::bus::{Machine, Measurement, Processor, Store, datasheet, store};
use crate::config::Sizing;
use crate::memory::{Costs, Size};

/// Context a slot gets where nobody said how much, in tokens; as the server's.
const CONTEXT_DEFAULT: u32 = 4096;
/// With more processes a core than this before the timing, others took part of the time.
const BUSY_LOAD: f64 = 0.5;
/// Of a device's memory, what is left to others, in percent.
const DEVICE_HEADROOM_PERCENT: u64 = 5;
/// A runtime's own memory on a device, in bytes.
const DEVICE_WORKING_BYTES: u64 = 768 << 20;

/// Where the bandwidth came from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "source", rename_all = "snake_case")]
pub enum Bandwidth {
    /// Read by this machine's cores.
    Measured {
        best_gb_per_s: f64,
        median_gb_per_s: f64,
        passes: u32,
    },
    /// Stated by the maker of this processor.
    DataSheet {
        name: String,
        gb_per_s: f64,
    },
    /// Given on the command line.
    Given {
        gb_per_s: f64,
    },
    Unknown,
}

impl Bandwidth {
    fn best(&self) -> Option<f64> {
        match self {
            Self::Measured { best_gb_per_s, .. } => Some(*best_gb_per_s),
            Self::DataSheet { gb_per_s, .. } | Self::Given { gb_per_s } => Some(*gb_per_s),
            Self::Unknown => None,
        }
    }
}

/// A prediction's ingredients.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub model: ModelFacts,
    pub processor: Processor,
    pub bandwidth: Bandwidth,
    /// The weights lie in the last-level cache: memory does not bound them.
    pub cache_resident: bool,
    pub calibration: Option<Calibration>,
    /// Under which a new calibration is kept.
    pub key: String,
    pub question: Question,
    /// What the reader should know.
    pub notes: Vec<String>,
}

/// For `model` on this machine. The memory is measured if it never was, which takes about a second.
///
/// `given`: a bandwidth in GB/s to plan with instead of this machine's.
#[must_use]
pub fn prepare(
    model: ModelFacts,
    sizing: &Sizing,
    machine: &Machine,
    workload: Workload,
    given: Option<f64>,
) -> Prepared {
    let mut notes = Vec::new();
    let processor = processor(sizing);
    let bandwidth = match given {
        Some(gb_per_s) => Bandwidth::Given { gb_per_s },
        None => bandwidth(sizing, machine, processor, &mut notes),
    };
    let step_bytes = model.weights.bytes_per_step(1.0);
    let cache_resident = processor == Processor::Cpu
        && given.is_none()
        && machine
            .cache_bytes
            .is_some_and(|cache| step_bytes < cache as f64);
    let best = bandwidth.best().filter(|_| !cache_resident);
    let threads = sizing.threads.unwrap_or(machine.cores);
    let device = sizing
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .next()
        .unwrap_or("");
    let key = calibration::key(machine, &model, threads, device);
    // Another machine's bandwidth says nothing of this one's steps.
    let calibration = Calibrations::new(&sizing.cache_directory)
        .get(&key)
        .filter(|_| given.is_none());
    if let Some(load) = calibration.as_ref().and_then(|known| known.load_before)
        && load > f64::from(machine.cores) * BUSY_LOAD
    {
        notes.push(format!(
            "steps were timed on a busy machine (load {load:.1} on {} cores): they are too long; time them \
             again when it is quiet, with `--measure`",
            machine.cores
        ));
    }
    let assumed = || Some(Curve::assumed(&model.weights, best?, processor));
    let curve = calibration
        .as_ref()
        .map(|known| known.curve.clone())
        .or_else(assumed);
    let question = Question {
        weights: model.weights,
        kv_bytes_per_token: model.kv_bytes_per_token,
        workload,
        buses: Buses {
            gb_per_s: best,
            count: u32::try_from(sizing.devices.len()).unwrap_or(1).max(1),
        },
        curve,
        memory: memory(&model, sizing),
    };
    Prepared {
        model,
        processor,
        bandwidth,
        cache_resident,
        calibration,
        key,
        question,
        notes,
    }
}

fn processor(sizing: &Sizing) -> Processor {
    if sizing.is_mac {
        Processor::Unified
    } else if sizing.devices.is_empty() {
        Processor::Cpu
    } else {
        Processor::Gpu
    }
}

fn bandwidth(
    sizing: &Sizing,
    machine: &Machine,
    processor: Processor,
    notes: &mut Vec<String>,
) -> Bandwidth {
    let name = match (processor, sizing.devices.first()) {
        (Processor::Cpu, _) => {
            return match measured(sizing, machine, false, notes) {
                Some(one) => Bandwidth::Measured {
                    best_gb_per_s: one.best_gb_per_s,
                    median_gb_per_s: one.median_gb_per_s,
                    passes: one.passes,
                },
                None => Bandwidth::Unknown,
            };
        }
        (Processor::Gpu, Some(device)) => device.name.clone(),
        (Processor::Unified | Processor::Gpu, _) => machine.chip.clone(),
    };
    if sizing.devices.iter().any(|device| device.name != name) && processor == Processor::Gpu {
        notes.push(format!(
            "the devices differ; the plan takes all of them to be like the first, {name}"
        ));
    }
    match datasheet::gb_per_s(&name) {
        Some(gb_per_s) => Bandwidth::DataSheet { name, gb_per_s },
        None => {
            notes.push(format!(
                "no bandwidth is known of {name}: give one with `--bandwidth GB/s`"
            ));
            Bandwidth::Unknown
        }
    }
}

/// This machine's measurement, made now where there is none, or where `again` asks for it.
pub(super) fn measured(
    sizing: &Sizing,
    machine: &Machine,
    again: bool,
    notes: &mut Vec<String>,
) -> Option<Measurement> {
    let kept = Store::new(&sizing.cache_directory);
    if let Some(known) = kept.get(machine).filter(|_| !again) {
        notes.extend(unsettled(&known));
        return Some(known);
    }
    let Some(fresh) = store::measure_now(machine) else {
        notes.push(
            "the memory's bandwidth was not measured: there is too little memory for an array that \
             the caches cannot hold; give one with `--bandwidth GB/s`"
                .to_owned(),
        );
        return None;
    };
    if let Err(cause) = kept.put(&fresh) {
        notes.push(format!(
            "the measured bandwidth cannot be kept in {}: {cause}",
            kept.path().display()
        ));
    }
    notes.extend(unsettled(&fresh));
    Some(fresh)
}

fn unsettled(measured: &Measurement) -> Option<String> {
    (!measured.is_settled()).then(|| {
        format!(
            "the memory was measured on a busy machine (best {:.1}, median {:.1} GB/s): the ceiling may be \
             too low; measure again when it is quiet, with `--remeasure`",
            measured.best_gb_per_s, measured.median_gb_per_s
        )
    })
}

fn memory(model: &ModelFacts, sizing: &Sizing) -> Memory {
    let own = model.context_length.unwrap_or(CONTEXT_DEFAULT);
    let context_tokens = sizing
        .context_tokens
        .unwrap_or_else(|| own.min(CONTEXT_DEFAULT));
    let smallest = sizing
        .devices
        .iter()
        .map(|device| device.memory_bytes)
        .min();
    match smallest.filter(|_| !sizing.is_mac) {
        Some(bytes) => Memory {
            costs: Costs {
                mapped: model.tensor_bytes,
                repacked: 0,
                kv_per_token: model.kv_bytes_per_token,
                working: DEVICE_WORKING_BYTES,
            },
            usable: bytes - bytes / 100 * DEVICE_HEADROOM_PERCENT,
            context_tokens,
            per_device: true,
        },
        None => Memory {
            costs: model.costs,
            usable: sizing.memory.usable(),
            context_tokens,
            per_device: false,
        },
    }
}

impl Prepared {
    /// Bytes of memory that may be taken, for people.
    #[must_use]
    pub fn usable(&self) -> Size {
        Size(self.question.memory.usable)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::bus::store::now;
    use crate::devices::Device;
    use crate::memory::{Limit, LimitOrigin};
    use crate::plan::calibration::Calibration;

    const WORKLOAD: Workload = Workload {
        prompt_tokens: 64,
        output_tokens: 256,
    };

    fn sizing(cache: &Path) -> Sizing {
        Sizing {
            models_directory: PathBuf::new(),
            cache_directory: cache.to_path_buf(),
            worker: PathBuf::new(),
            model: None,
            context_tokens: None,
            threads: None,
            slots: None,
            instances: None,
            memory: Limit {
                bytes: 24 << 30,
                origin: LimitOrigin::Setting,
            },
            devices: Vec::new(),
            is_mac: false,
        }
    }

    fn machine(chip: &str) -> Machine {
        Machine {
            chip: chip.to_owned(),
            cores: 4,
            memory_bytes: 24 << 30,
            cache_bytes: Some(32 << 20),
            ..Machine::default()
        }
    }

    /// A folder of one tensor of 40 MB that every step reads.
    fn model(folder: &Path) -> ModelFacts {
        let tensor = serde_json::json!({"lm_head.weight": {"data_offsets": [0, 40_000_000]}});
        let header = tensor.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + 40_000_000, 0);
        let config = r#"{"num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64}"#;
        fs::write(folder.join("config.json"), config).unwrap();
        fs::write(folder.join("m.safetensors"), bytes).unwrap();
        ModelFacts::read(folder).unwrap()
    }

    #[test]
    fn what_is_kept_is_used_and_a_busy_machines_figures_are_remarked_on() {
        let folder = tempfile::tempdir().unwrap();
        let (sizing, machine) = (sizing(folder.path()), machine("chip"));
        let busy = Measurement {
            machine: machine.clone(),
            threads: 4,
            array_bytes: 1 << 28,
            best_gb_per_s: 20.0,
            median_gb_per_s: 11.0,
            passes: 20,
            unix_s: now(),
        };
        Store::new(folder.path()).put(&busy).unwrap();
        let facts = model(folder.path());
        let found = prepare(facts.clone(), &sizing, &machine, WORKLOAD, None);
        assert_eq!(found.question.buses.gb_per_s, Some(20.0));
        assert!(!found.question.curve.as_ref().unwrap().is_measured());
        assert!(found.notes[0].contains("--remeasure"), "{:?}", found.notes);
        let timed = Calibration {
            model: facts.name.clone(),
            curve: Curve::measured(vec![(1, 0.010), (4, 0.012)], None, Vec::new()).unwrap(),
            origin: "plan --measure".to_owned(),
            load_before: Some(3.0),
            unix_s: now(),
        };
        let kept = Calibrations::new(folder.path());
        kept.put(&found.key, &timed).unwrap();
        let again = prepare(facts.clone(), &sizing, &machine, WORKLOAD, None);
        assert_eq!(again.calibration, Some(timed));
        assert!(again.notes[1].contains("load 3.0"), "{:?}", again.notes);
        let elsewhere = prepare(facts, &sizing, &machine, WORKLOAD, Some(100.0));
        assert_eq!(
            elsewhere.calibration, None,
            "another machine's steps are not known"
        );
    }

    #[test]
    fn a_gpu_is_planned_with_its_data_sheet_and_its_own_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut sizing = sizing(folder.path());
        let gpu = |index| Device {
            index,
            name: "NVIDIA H200".to_owned(),
            memory_bytes: 140 << 30,
            environment: Vec::new(),
        };
        sizing.devices = vec![gpu(0), gpu(1)];
        let facts = model(folder.path());
        let found = prepare(facts.clone(), &sizing, &machine("AMD"), WORKLOAD, None);
        assert_eq!(found.question.buses.count, 2);
        assert_eq!(found.question.buses.gb_per_s, Some(4800.0));
        assert!(found.question.memory.per_device);
        sizing.devices.clear();
        sizing.is_mac = true;
        let mac = prepare(
            facts.clone(),
            &sizing,
            &machine("Apple M4 Pro"),
            WORKLOAD,
            None,
        );
        assert_eq!(mac.question.buses.gb_per_s, Some(273.0));
        let unknown = prepare(facts, &sizing, &machine("Apple M99"), WORKLOAD, None);
        assert_eq!(unknown.bandwidth, Bandwidth::Unknown);
        assert!(
            unknown.notes[0].contains("--bandwidth"),
            "{:?}",
            unknown.notes
        );
    }

    #[test]
    fn weights_that_the_cache_holds_have_no_ceiling() {
        let folder = tempfile::tempdir().unwrap();
        let roomy = Machine {
            cache_bytes: Some(64 << 20),
            memory_bytes: 1 << 20,
            ..machine("chip")
        };
        let found = prepare(
            model(folder.path()),
            &sizing(folder.path()),
            &roomy,
            WORKLOAD,
            None,
        );
        assert!(found.cache_resident);
        assert_eq!(found.question.buses.gb_per_s, None);
        assert_eq!(found.question.curve, None);
    }
}
