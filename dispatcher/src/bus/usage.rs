//! How much of each memory bus the instances use, from steps that their engines counted.

use serde::Serialize;

use super::advice::{self, Facts};
use super::learned::StepTimes;
use super::store::Measurement;
use super::weights::Weights;
use super::{Machine, Processor, datasheet};

/// An instance that serves, as the bus sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    pub instance: u32,
    /// Where its engine runs, in the engine's words.
    pub device: String,
    /// The device that it was given, where devices are given out.
    pub assigned: Option<String>,
    pub slots: u32,
    /// Bytes of weights of a step of one row, and of KV cache of one token, as the engine says.
    pub weight_bytes_per_step: u64,
    pub kv_bytes_per_token: u64,
    /// Over the last seconds: steps that the engine counted, a second; the mean batch of those that
    /// decoded; cached tokens that they read, a second; the share of time that a step was running.
    pub steps_per_s: f64,
    pub batch_mean: f64,
    pub kv_tokens_per_s: f64,
    pub busy: f64,
}

/// What does not change from second to second.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub machine: Machine,
    /// Of the machine's memory, with all its cores.
    pub measured: Option<Measurement>,
    /// The model's inventory, where its header was read.
    pub weights: Option<Weights>,
    /// Threads of one instance.
    pub threads: u32,
}

/// One memory bus and those who share it, as `/status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BusView {
    /// Whose memory: `CPU`, or a device.
    pub device: String,
    pub instances: Vec<u32>,
    /// Where the bandwidth comes from: `measured`, `data sheet`, or `unknown`.
    pub source: &'static str,
    /// GB (10⁹ bytes) per second that can be read: of the fastest pass, and of the middle one.
    pub best_gb_per_s: Option<f64>,
    pub median_gb_per_s: Option<f64>,
    /// GB per second that the instances read over the last seconds.
    pub read_gb_per_s: f64,
    /// That, as a part of the best; null where there is no figure.
    pub usage: Option<f64>,
    /// The same over the time in which steps were running.
    pub usage_while_stepping: Option<f64>,
    /// The weights are smaller than the last-level cache: they are not read from memory each step.
    pub cache_resident: bool,
    /// More is used than there can be: a figure is wrong, and is shown as it is.
    pub accounting_fault: bool,
    /// What would help, in words.
    pub advice: String,
}

impl Load {
    fn is_cpu(&self) -> bool {
        Processor::of(&self.device) == Processor::Cpu
    }

    /// The name of the bus that it reads from.
    fn bus(&self) -> String {
        if self.is_cpu() {
            return "CPU".to_owned();
        }
        self.assigned.clone().unwrap_or_else(|| self.device.clone())
    }

    /// Bytes that a second of its steps reads from memory.
    #[must_use]
    pub fn bytes_per_s(&self, weights: Option<&Weights>) -> f64 {
        self.steps_per_s * self.weight_bytes(weights)
            + self.kv_tokens_per_s * self.kv_bytes_per_token as f64
    }

    /// Of one step: what the engine says of one row, and what more rows add where experts are chosen.
    fn weight_bytes(&self, weights: Option<&Weights>) -> f64 {
        let more = weights.map_or(0.0, |weights| {
            weights.bytes_per_step(self.batch_mean.max(1.0)) - weights.bytes_per_step_min()
        });
        self.weight_bytes_per_step as f64 + more
    }
}

/// Of one instance: bytes per second, and their part of its bus, where that has a figure.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    pub bytes_per_s: f64,
    pub usage: Option<f64>,
}

/// What `load` takes of its bus.
#[must_use]
pub fn share(load: &Load, known: &Known) -> Share {
    let bytes_per_s = load.bytes_per_s(known.weights.as_ref());
    let best = bandwidth(load, known).best;
    Share {
        bytes_per_s,
        usage: best
            .filter(|_| !is_cache_resident(load, known))
            .map(|best| bytes_per_s / 1e9 / best),
    }
}

/// All buses that `loads` read from, in the order of their first instance.
#[must_use]
pub fn buses(loads: &[Load], known: &Known, times: &StepTimes, waiting: u32) -> Vec<BusView> {
    let mut names: Vec<String> = Vec::new();
    for load in loads {
        let name = load.bus();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let several = names.len() > 1;
    names
        .into_iter()
        .map(|name| {
            let mine: Vec<&Load> = loads.iter().filter(|load| load.bus() == name).collect();
            bus(name, &mine, known, times, waiting, several)
        })
        .collect()
}

fn bus(
    device: String,
    loads: &[&Load],
    known: &Known,
    times: &StepTimes,
    waiting: u32,
    several: bool,
) -> BusView {
    let mut view = BusView {
        device,
        instances: loads.iter().map(|load| load.instance).collect(),
        source: "unknown",
        ..BusView::default()
    };
    let Some(first) = loads.first() else {
        return view;
    };
    let rate = bandwidth(first, known);
    view.source = rate.source;
    view.best_gb_per_s = rate.best;
    view.median_gb_per_s = rate.median;
    view.cache_resident = is_cache_resident(first, known);
    let weights = known.weights.as_ref();
    let bytes: f64 = loads.iter().map(|load| load.bytes_per_s(weights)).sum();
    view.read_gb_per_s = bytes / 1e9;
    if let (Some(best), false) = (rate.best, view.cache_resident) {
        view.usage = Some(view.read_gb_per_s / best);
        // Those that step, and only while they do.
        let stepping = loads.iter().filter(|load| load.busy > BUSY_MIN);
        let while_stepping: f64 = stepping
            .map(|load| load.bytes_per_s(weights) / 1e9 / best / load.busy.min(1.0))
            .sum();
        view.usage_while_stepping = (while_stepping > 0.0).then_some(while_stepping);
        // Beyond what the passes themselves disagree by.
        let bound = rate.median.map_or(1.0, |median| best / median.min(best));
        view.accounting_fault = view.usage.is_some_and(|usage| usage > bound);
    }
    view.advice = advice::words(&Facts {
        view: &view,
        weight_bytes: first.weight_bytes_per_step,
        cache_bytes: known.machine.cache_bytes,
        batch: mean_batch(loads),
        slots: first.slots,
        instances: u32::try_from(loads.len()).unwrap_or(u32::MAX),
        processor: Processor::of(&first.device),
        // On the machine's own cores a further instance gets none of its own.
        shares_cores: first.is_cpu()
            && known
                .threads
                .saturating_mul(u32::try_from(loads.len()).unwrap_or(u32::MAX))
                >= known.machine.cores,
        several_buses: several,
        waiting,
        times,
    });
    view
}

/// A share of time below this says too little of what happens while stepping.
const BUSY_MIN: f64 = 0.02;

struct Rate {
    source: &'static str,
    best: Option<f64>,
    median: Option<f64>,
}

fn bandwidth(load: &Load, known: &Known) -> Rate {
    if load.is_cpu() {
        let measured = known.measured.as_ref();
        return Rate {
            source: measured.map_or("unknown", |_| "measured"),
            best: measured.map(|one| one.best_gb_per_s),
            median: measured.map(|one| one.median_gb_per_s),
        };
    }
    // A Mac's GPU reads the memory that the machine has; its name is the chip's.
    let name = match &load.assigned {
        Some(assigned) => assigned.as_str(),
        None if Processor::of(&load.device) == Processor::Unified => known.machine.chip.as_str(),
        None => load.device.as_str(),
    };
    let best = datasheet::gb_per_s(name).or_else(|| datasheet::gb_per_s(&load.device));
    Rate {
        source: best.map_or("unknown", |_| "data sheet"),
        best,
        median: best,
    }
}

fn is_cache_resident(load: &Load, known: &Known) -> bool {
    load.is_cpu()
        && known
            .machine
            .cache_bytes
            .is_some_and(|cache| load.weight_bytes_per_step < cache)
}

fn mean_batch(loads: &[&Load]) -> f64 {
    let steps: f64 = loads.iter().map(|load| load.steps_per_s).sum();
    let rows: f64 = loads
        .iter()
        .map(|load| load.steps_per_s * load.batch_mean)
        .sum();
    if steps > 0.0 { rows / steps } else { 0.0 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The study's machine: 4.4 GB of weights, 273 GB/s; here as if its cores had measured it.
    pub(in crate::bus) fn known() -> Known {
        let machine = Machine {
            chip: "Apple M4 Pro".to_owned(),
            cores: 12,
            memory_bytes: 24 << 30,
            cache_bytes: Some(32 << 20),
            ..Machine::default()
        };
        Known {
            measured: Some(Measurement {
                machine: machine.clone(),
                threads: 12,
                array_bytes: 1 << 30,
                best_gb_per_s: 273.0,
                median_gb_per_s: 260.0,
                passes: 20,
                unix_s: 0,
            }),
            machine,
            weights: None,
            threads: 12,
        }
    }

    pub(in crate::bus) fn load(instance: u32, steps_per_s: f64) -> Load {
        Load {
            instance,
            device: "CPU (12 threads)".to_owned(),
            slots: 1,
            weight_bytes_per_step: 4_400_000_000,
            kv_bytes_per_token: 57_344,
            steps_per_s,
            batch_mean: 1.0,
            kv_tokens_per_s: steps_per_s * 200.0,
            busy: 1.0,
            ..Load::default()
        }
    }

    #[test]
    fn bytes_of_a_step_times_steps_over_bandwidth_is_the_use() {
        let known = known();
        let one = load(0, 56.0);
        let bytes = 56.0 * (4.4e9 + 200.0 * 57_344.0);
        let share = share(&one, &known);
        assert!((share.bytes_per_s - bytes).abs() < 1.0, "{share:?}");
        let expected = bytes / 273e9;
        assert!((share.usage.unwrap() - expected).abs() < 1e-9);
        let buses = buses(&[one, load(1, 3.0)], &known, &StepTimes::default(), 0);
        assert_eq!(buses.len(), 1, "they share the machine's memory");
        assert_eq!(buses[0].instances, [0, 1]);
        let both = buses[0].usage.unwrap();
        assert!((both - expected * 59.0 / 56.0).abs() < 1e-9, "{both}");
        assert_eq!(buses[0].source, "measured");
    }

    #[test]
    fn more_than_all_of_it_is_shown_and_flagged() {
        let known = known();
        // Within what the passes disagree by: 273 / 260.
        let view = &buses(&[load(0, 63.0)], &known, &StepTimes::default(), 0)[0];
        assert!(
            view.usage.unwrap() > 1.0 && !view.accounting_fault,
            "{view:?}"
        );
        let view = &buses(&[load(0, 100.0)], &known, &StepTimes::default(), 0)[0];
        assert!(view.usage.unwrap() > 1.6, "never clipped: {view:?}");
        assert!(view.accounting_fault);
    }

    #[test]
    fn weights_that_the_cache_holds_get_a_label_and_no_figure() {
        let small = Load {
            weight_bytes_per_step: 31 << 20,
            ..load(0, 1000.0)
        };
        assert_eq!(share(&small, &known()).usage, None);
        let view = &buses(&[small], &known(), &StepTimes::default(), 0)[0];
        assert!(view.cache_resident);
        assert_eq!((view.usage, view.accounting_fault), (None, false));
    }

    #[test]
    fn each_device_is_a_bus_of_its_own() {
        let on = |instance, device: &str| Load {
            device: "CUDA0: NVIDIA H200".to_owned(),
            assigned: Some(device.to_owned()),
            ..load(instance, 200.0)
        };
        let loads = [
            on(0, "0: NVIDIA H200"),
            on(1, "1: NVIDIA H200"),
            on(2, "0: NVIDIA H200"),
        ];
        let found = buses(&loads, &known(), &StepTimes::default(), 0);
        let instances: Vec<_> = found.iter().map(|bus| bus.instances.clone()).collect();
        assert_eq!(instances, [vec![0, 2], vec![1]]);
        assert_eq!(found[0].source, "data sheet");
        assert_eq!(found[0].best_gb_per_s, Some(4800.0));
        assert!((found[0].usage.unwrap() - 2.0 * found[1].usage.unwrap()).abs() < 1e-9);
    }

    #[test]
    fn a_bus_that_nobody_measured_has_bytes_and_no_share() {
        let unknown = Known {
            measured: None,
            ..known()
        };
        let view = &buses(&[load(0, 10.0)], &unknown, &StepTimes::default(), 0)[0];
        assert_eq!((view.source, view.usage), ("unknown", None));
        assert!(view.read_gb_per_s > 44.0);
    }

    #[test]
    fn rows_of_a_mixture_touch_more_experts_than_the_engine_says_of_one() {
        let known = Known {
            weights: Some(Weights {
                always_bytes: 400_000_000,
                expert_bytes: 16_000_000_000,
                experts: 8,
                experts_used: 2,
            }),
            ..known()
        };
        let one = load(0, 1.0);
        let two = Load {
            batch_mean: 2.0,
            ..one.clone()
        };
        let weights = known.weights.as_ref();
        let more = two.bytes_per_s(weights) - one.bytes_per_s(weights);
        assert!(
            (more - 16e9 * (7.0 / 16.0 - 2.0 / 8.0)).abs() < 1.0,
            "{more}"
        );
    }
}
