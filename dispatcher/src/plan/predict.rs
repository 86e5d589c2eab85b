//! The K × slots table: what the bus allows, what is to be expected, and what it costs.

use serde::Serialize;

use super::curve::Curve;
use crate::bus::Weights;
use crate::devices::instances_on;
use crate::memory::Costs;

/// What each request is, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Workload {
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

impl Workload {
    /// Cached tokens that a row reads, in the middle of its output.
    #[must_use]
    pub fn context_mean(&self) -> f64 {
        f64::from(self.prompt_tokens) + f64::from(self.output_tokens) / 2.0
    }
}

/// The memories that instances read from, each instance from one of them in turn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Buses {
    /// Of each, in GB (10⁹ bytes) per second; `None`: not known, or the weights lie in the cache.
    pub gb_per_s: Option<f64>,
    pub count: u32,
}

/// What there is for instances to be kept in.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub costs: Costs,
    /// Bytes that all instances of one memory may take together.
    pub usable: u64,
    /// Tokens of each slot.
    pub context_tokens: u32,
    /// Each device holds its own weights, and nothing is shared.
    pub per_device: bool,
}

/// What is to be predicted.
#[derive(Clone, Debug)]
pub struct Question {
    pub weights: Weights,
    pub kv_bytes_per_token: u64,
    pub workload: Workload,
    pub buses: Buses,
    /// `None`: there is nothing to estimate from.
    pub curve: Option<Curve>,
    pub memory: Memory,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cell {
    pub instances: u32,
    pub slots: u32,
    /// Seats of all instances: so many requests run at once.
    pub streams: u32,
    /// Output tokens a second of all streams that the memory allows at most: BW·N / (K·W + N·KV).
    pub ceiling_tokens_per_s: Option<f64>,
    /// Those to be expected with every seat taken, prompts included.
    pub estimate_tokens_per_s: Option<f64>,
    /// Of one stream while it decodes.
    pub stream_tokens_per_s: Option<f64>,
    /// From the assignment of a request to its first token while all other seats decode, in ms.
    pub ttft_ms: Option<f64>,
    /// Bytes of all instances of the fullest memory.
    pub memory_bytes: u64,
    pub fits: bool,
    /// Streams that a crash of one worker interrupts: N/K.
    pub blast_radius: u32,
}

/// The cells of all pairs, instances first.
#[must_use]
pub fn predict(question: &Question, instances: &[u32], slots: &[u32]) -> Vec<Cell> {
    let pairs = instances
        .iter()
        .flat_map(|instances| slots.iter().map(|slots| (*instances, *slots)));
    pairs
        .map(|(instances, slots)| cell(question, instances.max(1), slots.max(1)))
        .collect()
}

fn cell(question: &Question, instances: u32, slots: u32) -> Cell {
    let count = question.buses.count.max(1) as usize;
    let on: Vec<u32> = (0..count)
        .map(|place| instances_on(count, place, instances))
        .filter(|own| *own > 0)
        .collect();
    let fullest = on.iter().copied().max().unwrap_or(1);
    let ceilings = on.iter().map(|own| ceiling(question, *own, slots));
    let ceiling: Option<f64> = ceilings.sum();
    let rates = on.iter().map(|own| estimate(question, *own, slots));
    let estimate: Option<f64> = rates.sum();
    let curve = question.curve.as_ref();
    let step = curve.map(|curve| bounded_step_s(question, curve, fullest, slots));
    let memory_bytes = memory(&question.memory, fullest, slots);
    Cell {
        instances,
        slots,
        streams: instances.saturating_mul(slots),
        ceiling_tokens_per_s: ceiling,
        estimate_tokens_per_s: estimate,
        stream_tokens_per_s: step.map(|step| 1.0 / step),
        ttft_ms: curve.zip(step).map(|(curve, step)| {
            let prefill = prefill_s(question, curve) * f64::from(fullest);
            (prefill + step) * 1e3
        }),
        memory_bytes,
        fits: memory_bytes <= question.memory.usable,
        blast_radius: slots,
    }
}

/// `BW·N / (K·W + N·KV)` of `own` instances on one bus, in tokens per second.
fn ceiling(question: &Question, own: u32, slots: u32) -> Option<f64> {
    Some(f64::from(own) * f64::from(slots) / bus_step_s(question, own, slots)?)
}

/// Seconds that the bus needs for one step of each of `own` instances.
fn bus_step_s(question: &Question, own: u32, slots: u32) -> Option<f64> {
    let bytes_per_s = question.buses.gb_per_s? * 1e9;
    let weights = question.weights.bytes_per_step(f64::from(slots));
    let kv = question.kv_bytes_per_token as f64 * question.workload.context_mean();
    let bytes = f64::from(own) * (weights + f64::from(slots) * kv);
    (bytes > 0.0).then(|| bytes / bytes_per_s)
}

/// A step never takes less than the bus needs for it, whatever was timed or assumed.
fn bounded_step_s(question: &Question, curve: &Curve, own: u32, slots: u32) -> f64 {
    let bus = bus_step_s(question, own, slots).unwrap_or(0.0);
    curve.shared_step_s(own, slots).max(bus)
}

fn prefill_s(question: &Question, curve: &Curve) -> f64 {
    f64::from(question.workload.prompt_tokens) * curve.prefill_s_per_token()
}

/// Output tokens per second of `own` instances on one bus with every seat taken: each request's
/// output takes its steps, and the prompts of all are computed one after another beside them.
fn estimate(question: &Question, own: u32, slots: u32) -> Option<f64> {
    let curve = question.curve.as_ref()?;
    let streams = f64::from(own) * f64::from(slots);
    let output = f64::from(question.workload.output_tokens.max(1));
    let decode = output * bounded_step_s(question, curve, own, slots);
    let prefill = streams * prefill_s(question, curve);
    Some(streams * output / (decode + prefill))
}

/// Bytes of `own` instances on one memory.
fn memory(memory: &Memory, own: u32, slots: u32) -> u64 {
    let costs = &memory.costs;
    let kv = costs
        .kv_per_token
        .saturating_mul(u64::from(memory.context_tokens))
        .saturating_mul(u64::from(slots));
    let private = costs
        .repacked
        .saturating_add(costs.working)
        .saturating_add(kv);
    let own = u64::from(own);
    if memory.per_device {
        private.saturating_add(costs.mapped).saturating_mul(own)
    } else {
        private.saturating_mul(own).saturating_add(costs.mapped)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bus::Processor;

    /// Qwen2.5-7B in 4 bits on the study's machine, its 64-token prompts, 256 out.
    pub(in crate::plan) fn study() -> Question {
        Question {
            weights: Weights {
                always_bytes: 4_400_000_000,
                ..Weights::default()
            },
            kv_bytes_per_token: 57_344,
            workload: Workload {
                prompt_tokens: 64,
                output_tokens: 256,
            },
            buses: Buses {
                gb_per_s: Some(273.0),
                count: 1,
            },
            curve: None,
            memory: Memory {
                costs: Costs {
                    mapped: 4_700_000_000,
                    working: 400 << 20,
                    kv_per_token: 57_344,
                    repacked: 0,
                },
                usable: 22 << 30,
                context_tokens: 4096,
                per_device: false,
            },
        }
    }

    fn one(question: &Question, instances: u32, slots: u32) -> Cell {
        predict(question, &[instances], &[slots])[0]
    }

    #[test]
    fn the_studys_ceiling_is_the_studys_arithmetic() {
        let cell = one(&study(), 1, 1);
        let kv = 57_344.0 * (64.0 + 128.0);
        let expected = 273e9 / (4.4e9 + kv);
        assert!((cell.ceiling_tokens_per_s.unwrap() - expected).abs() < 1e-6);
        // K instances of one stream each: K times the weights for K streams.
        let three = one(&study(), 3, 1).ceiling_tokens_per_s.unwrap();
        assert!((three - expected).abs() < 1e-6, "{three}");
        let batch = one(&study(), 1, 8).ceiling_tokens_per_s.unwrap();
        assert!(batch > 7.5 * expected, "{batch}");
        assert_eq!(cell.estimate_tokens_per_s, None);
    }

    /// Decode rates that were measured, in docs/PERFORMANCE.md's and the study's tables: batch or
    /// streams, and tokens per second.
    #[test]
    fn no_cell_that_was_measured_passes_the_ceiling() {
        let on = |weights: u64, kv: u64, gb_per_s: f64, prompt: u32, output: u32| Question {
            weights: Weights {
                always_bytes: weights,
                ..Weights::default()
            },
            kv_bytes_per_token: kv,
            workload: Workload {
                prompt_tokens: prompt,
                output_tokens: output,
            },
            buses: Buses {
                gb_per_s: Some(gb_per_s),
                count: 1,
            },
            ..study()
        };
        // K, slots, tokens per second.
        let mac = on(4_300_000_000, 57_344, 273.0, 64, 256);
        let cells = [(1, 1, 55.6), (2, 1, 60.2), (3, 1, 60.7)];
        let h200 = on(4_680_000_000, 57_344, 4340.0, 64, 128);
        let many = [
            (1, 1, 242.0),
            (1, 8, 945.0),
            (1, 32, 3328.0),
            (1, 64, 4640.0),
            (1, 256, 5190.0),
            (2, 1, 221.0),
            (4, 1, 181.0),
            (2, 64, 5133.0),
            (4, 32, 3226.0),
        ];
        let small = on(96_600_000, 23_040, 34.0, 16, 128);
        let few = [(1, 1, 137.0), (1, 8, 222.0), (2, 1, 132.0), (3, 1, 136.0)];
        for (question, cells) in [(mac, &cells[..]), (h200, &many), (small, &few)] {
            for (instances, slots, measured) in cells {
                let ceiling = one(&question, *instances, *slots).ceiling_tokens_per_s;
                assert!(
                    *measured <= ceiling.unwrap(),
                    "{instances} x {slots}: {measured} of {ceiling:?}"
                );
            }
        }
    }

    #[test]
    fn devices_of_their_own_are_worth_as_many_times_as_much() {
        let mut question = study();
        question.curve = Some(Curve::assumed(&question.weights, 273.0, Processor::Gpu));
        let single = one(&question, 1, 8);
        question.buses.count = 2;
        question.memory.per_device = true;
        let double = one(&question, 2, 8);
        let ratio = |of: fn(&Cell) -> Option<f64>| of(&double).unwrap() / of(&single).unwrap();
        assert!((ratio(|cell| cell.ceiling_tokens_per_s) - 2.0).abs() < 1e-9);
        assert!((ratio(|cell| cell.estimate_tokens_per_s) - 2.0).abs() < 1e-9);
        assert_eq!(double.memory_bytes, single.memory_bytes, "of each device");
        let three = one(&question, 3, 8);
        assert!(three.memory_bytes > double.memory_bytes, "one holds two");
    }

    #[test]
    fn memory_counts_shared_weights_once_and_says_what_does_not_fit() {
        let (single, triple) = (one(&study(), 1, 4), one(&study(), 3, 4));
        let private = single.memory_bytes - 4_700_000_000;
        assert_eq!(triple.memory_bytes, 4_700_000_000 + 3 * private);
        assert!(single.fits && triple.fits);
        assert!(!one(&study(), 3, 64).fits);
        assert_eq!(one(&study(), 3, 4).blast_radius, 4);
    }

    proptest! {
        #[test]
        fn no_estimate_passes_its_ceiling(
            always in 1_u64..1 << 40,
            experts in 0_u64..1 << 40,
            kv in 0_u64..1 << 22,
            gb_per_s in 0.1_f64..10_000.0,
            times in proptest::collection::vec((1_u32..300, 1e-6_f64..10.0), 1..6),
            crowd in 0.01_f64..4.0,
            (instances, slots, buses) in (1_u32..40, 1_u32..300, 1_u32..9),
            (prompt, output) in (0_u32..100_000, 0_u32..100_000),
        ) {
            let question = Question {
                weights: Weights { always_bytes: always, expert_bytes: experts, experts: 8, experts_used: 2 },
                kv_bytes_per_token: kv,
                workload: Workload { prompt_tokens: prompt, output_tokens: output },
                buses: Buses { gb_per_s: Some(gb_per_s), count: buses },
                curve: Curve::measured(times, None, vec![(2, crowd)]),
                ..study()
            };
            let cell = one(&question, instances, slots);
            let (ceiling, estimate) = (cell.ceiling_tokens_per_s.unwrap(), cell.estimate_tokens_per_s.unwrap());
            prop_assert!(estimate <= ceiling * (1.0 + 1e-9), "{estimate} of {ceiling}");
            prop_assert!(estimate > 0.0 && estimate.is_finite());
        }
    }
}
