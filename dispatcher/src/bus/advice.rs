//! One line that says what would make decoding faster, from what the bus is used at now.

use super::learned::StepTimes;
use super::processor::Processor;
use super::usage::BusView;
use crate::memory::Size;

/// What the words are made from.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub view: &'a BusView,
    pub weight_bytes: u64,
    pub cache_bytes: Option<u64>,
    /// Mean batch of the steps of the last seconds; 0 where there were none.
    pub batch: f64,
    pub slots: u32,
    /// On this bus.
    pub instances: u32,
    pub processor: Processor,
    /// A further instance would compute on the cores of those that are there.
    pub shares_cores: bool,
    /// There are other buses beside this one.
    pub several_buses: bool,
    pub waiting: u32,
    pub times: &'a StepTimes,
}

/// Less is not worth a change.
const WORTH: f64 = 0.10;
/// Beside another on one memory, an instance fills the gaps between the other's steps, and no measured
/// pair gained more than this (docs/BUS.md), however little of the bus a step uses.
const INSTANCE_GAIN_MAX: f64 = 0.10;
/// A batch that is proposed is at most this.
const BATCH_MAX: u32 = 64;
/// How many times the present batch is proposed.
const BATCH_FACTOR: u32 = 4;
/// So many steps of a batch size, and its time is known.
const STEPS_MIN: u64 = 20;

/// The advice.
#[must_use]
pub fn words(facts: &Facts<'_>) -> String {
    let view = facts.view;
    if view.cache_resident {
        return format!(
            "cache-resident: the weights ({}) fit into the last-level cache ({}), so memory does not \
             bound decoding and there is no bus figure",
            Size(facts.weight_bytes),
            Size(facts.cache_bytes.unwrap_or(0))
        );
    }
    let (Some(usage), Some(best)) = (view.usage, view.best_gb_per_s) else {
        return unknown(view);
    };
    if view.accounting_fault {
        return format!(
            "accounting fault: {} of {best:.0} GB/s in use is more than there can be; the bandwidth was \
             measured while something else used the memory, or the bytes per step are counted wrongly: \
             measure again with `dispatcher plan --remeasure`",
            percent(usage)
        );
    }
    let Some(stepping) = view.usage_while_stepping.filter(|_| facts.batch > 0.0) else {
        return "idle: nothing was decoded in the last seconds".to_owned();
    };
    gains(facts, stepping)
}

fn unknown(view: &BusView) -> String {
    if view.device == "CPU" {
        "the memory's read bandwidth is not measured yet: it is in the first idle moment, or at once \
         with `dispatcher plan`"
            .to_owned()
    } else {
        format!(
            "the read bandwidth of {} is not known: no bus figure",
            view.device
        )
    }
}

/// What a further instance and a larger batch would add, and what to run.
fn gains(facts: &Facts<'_>, stepping: f64) -> String {
    let batch = rounded(facts.batch).max(1);
    let instance_gain = if facts.shares_cores {
        0.0
    } else {
        (1.0 / stepping - 1.0).clamp(0.0, INSTANCE_GAIN_MAX)
    };
    let larger = batch.saturating_mul(BATCH_FACTOR).min(BATCH_MAX).max(batch);
    let batch_gain = batch_gain(facts, batch, larger);
    let place = if facts.several_buses {
        format!("{}: ", facts.view.device)
    } else {
        String::new()
    };
    let now = format!(
        "{place}bus {} busy at batch {batch}: a {} instance would add ~{}, batch {larger} would add ~{}",
        percent(stepping),
        ordinal(facts.instances + 1),
        percent(instance_gain),
        percent(batch_gain)
    );
    if batch_gain < WORTH {
        return format!("{now}: nothing to change");
    }
    if facts.slots >= larger && facts.waiting == 0 {
        return format!(
            "{now}: the slots are there ({}), more requests at once would fill them",
            facts.slots
        );
    }
    let slots = larger.max(facts.slots);
    if facts.several_buses {
        format!("{now}: run --slots {slots}")
    } else {
        format!("{now}: run --instances 1 --slots {slots}")
    }
}

/// What `larger` rows a step would give more than `batch`, as a part of what there is now: from the
/// steps that were seen where both sizes were, otherwise as assumed of such a processor.
fn batch_gain(facts: &Facts<'_>, batch: u32, larger: u32) -> f64 {
    let seen = |rows: u32| facts.times.step_s(rows, STEPS_MIN);
    let assumed = |rows: u32| 1.0 + facts.processor.further_row() * (f64::from(rows) - 1.0);
    let longer = match (seen(batch), seen(larger)) {
        (Some(now), Some(then)) if now > 0.0 => then / now,
        _ => assumed(larger) / assumed(batch),
    };
    (f64::from(larger) / f64::from(batch) / longer - 1.0).max(0.0)
}

/// A mean batch as a batch.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a float's cast saturates, and a batch has at most a few thousand rows"
)]
fn rounded(batch: f64) -> u32 {
    batch.round() as u32
}

fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

fn ordinal(number: u32) -> String {
    match number {
        2 => "2nd".to_owned(),
        3 => "3rd".to_owned(),
        _ => format!("{number}th"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::learned::BatchTime;
    use super::super::usage::tests::{known, load};
    use super::super::usage::{Known, Load, buses};
    use super::*;

    fn said(loads: &[Load], known: &Known, times: &StepTimes, waiting: u32) -> String {
        buses(loads, known, times, waiting)
            .into_iter()
            .map(|bus| bus.advice)
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn gpu(instance: u32, steps_per_s: f64) -> Load {
        Load {
            device: "Metal: Apple M4 Pro".to_owned(),
            ..load(instance, steps_per_s)
        }
    }

    #[test]
    fn every_situation_has_words_that_say_what_to_do() {
        let none = StepTimes::default();
        let learned = StepTimes {
            decode: [(1, 17_800), (4, 27_400)]
                .map(|(batch, us)| BatchTime {
                    batch,
                    steps: 100,
                    total_us: us * 100,
                })
                .to_vec(),
            ..StepTimes::default()
        };
        let unmeasured = Known {
            measured: None,
            ..known()
        };
        let resident = Load {
            weight_bytes_per_step: 20 << 20,
            ..load(0, 900.0)
        };
        let full = Load {
            slots: 32,
            batch_mean: 32.0,
            ..gpu(0, 9.0)
        };
        let roomy = Load {
            slots: 16,
            ..gpu(0, 56.0)
        };
        let two = |device: &str, instance| Load {
            device: "CUDA0: NVIDIA H200".to_owned(),
            assigned: Some(device.to_owned()),
            ..load(instance, 240.0)
        };
        let devices = [two("0: NVIDIA H200", 0), two("1: NVIDIA H200", 1)];
        let cases = [
            (
                "the study's one instance",
                said(&[gpu(0, 56.0)], &known(), &none, 4),
            ),
            (
                "with steps seen",
                said(&[gpu(0, 56.0)], &known(), &learned, 4),
            ),
            ("on the cores", said(&[load(0, 56.0)], &known(), &none, 4)),
            (
                "three instances",
                said(
                    &[gpu(0, 20.0), gpu(1, 20.0), gpu(2, 20.0)],
                    &known(),
                    &none,
                    4,
                ),
            ),
            (
                "slots that nobody fills",
                said(&[roomy], &known(), &none, 0),
            ),
            ("a full batch", said(&[full], &known(), &none, 4)),
            ("idle", said(&[gpu(0, 0.0)], &known(), &none, 0)),
            ("not measured", said(&[load(0, 9.0)], &unmeasured, &none, 0)),
            ("cache-resident", said(&[resident], &known(), &none, 0)),
            ("more than all", said(&[load(0, 90.0)], &known(), &none, 0)),
            ("two devices", said(&devices, &known(), &none, 9)),
        ];
        let table: Vec<String> = cases
            .iter()
            .map(|(name, words)| format!("{name}:\n{words}\n"))
            .collect();
        insta::assert_snapshot!(table.join("\n"));
    }

    #[test]
    fn an_instance_more_never_promises_more_than_any_gave() {
        for steps in [1.0, 5.0, 20.0, 40.0, 60.0] {
            let said = said(&[gpu(0, steps)], &known(), &StepTimes::default(), 4);
            let words = said.split("2nd instance would add ~").nth(1).unwrap();
            let gain: f64 = words.split(' ').next().unwrap().parse().unwrap();
            assert!((0.0..=10.0).contains(&gain), "{said}");
        }
    }
}
