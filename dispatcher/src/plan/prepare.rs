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
