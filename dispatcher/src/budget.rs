//! What the workers' memory comes to: last footprints by place, starts that wait for room, and the picture for people.

use proto::{Generation, InstanceId};
use serde::Serialize;

use crate::fleet::Place;
use crate::machine::Tick;
use crate::machine::event::MemoryPressure;
use crate::memory::pressure::Reading;
use crate::memory::reserve::{self, SETTLE};
use crate::memory::watch::Report;
use crate::memory::{Limit, LimitOrigin, Plan, reading};

/// Memory as `/status` shows it: the bound that is nearest to being used up, and the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryView {
    /// `none`, `soft` (no new work is given out) or `hard` (what waits is sent away).
    pub pressure: &'static str,
    pub used_bytes: u64,
    pub limit_bytes: u64,
    /// `machine`, `cgroup` or `setting`.
    pub limit_origin: &'static str,
    /// What all workers take together.
    pub workers_bytes: u64,
    /// What was predicted for them before the start, where the model's header says enough.
    pub predicted_bytes: Option<u64>,
}

impl MemoryView {
    /// The pressure as a number, for metrics.
    pub(crate) fn level(&self) -> f64 {
        match self.pressure {
            "hard" => 2.0,
            "soft" => 1.0,
            _ => 0.0,
        }
    }
}

/// The memory side of the pool.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: Limit,
    predicted: Option<u64>,
    compared: bool,
    /// Private bytes of each place's last worker that served under this configuration.
    needed: Vec<Option<u64>>,
    /// Starts that found no room, until they look again.
    held: Vec<Held>,
    report: Option<Report>,
    pressure: MemoryPressure,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    instance: InstanceId,
    generation: Generation,
    until: Tick,
}

impl Budget {
    pub(crate) fn new(instances: u32, limit: Limit, plan: Option<&Plan>) -> Self {
        Self {
            limit,
            predicted: plan.map(Plan::footprint),
            compared: false,
            needed: (0..instances).map(|_| None).collect(),
            held: Vec::new(),
            report: None,
            pressure: MemoryPressure::None,
        }
    }

    /// Books a look of the watch. `places` tells which workers serve: only their footprints are whole.
    pub(crate) fn measured(&mut self, report: Report, places: &mut [Place]) {
        for worker in &report.workers {
            let index = worker.instance.0 as usize;
            let (Some(place), Some(needed)) = (places.get_mut(index), self.needed.get_mut(index))
            else {
                continue;
            };
            if place.generation != worker.generation {
                continue;
            }
            place.footprint = Some(worker.footprint);
            if place.ready.is_some() {
                *needed = Some(worker.footprint.private);
            }
        }
        let all = places
            .iter()
            .all(|place| place.ready.is_some() && place.footprint.is_some());
        if let Some(predicted) = self.predicted
            && all
            && !self.compared
        {
            self.compared = true;
            if let Some(words) = reserve::compare(predicted, report.workers_bytes) {
                tracing::warn!("{words}");
            }
        }
        self.report = Some(report);
    }

    pub(crate) fn pressed(&mut self, pressure: MemoryPressure) {
        self.pressure = pressure;
    }

    /// Whether a worker of `instance` may start now. The first one of a configuration may: the plan
    /// has been checked.
    ///
    /// # Errors
    /// The arithmetic, where it does not fit.
    pub(crate) fn room(&self, instance: InstanceId, places: &[Place]) -> Result<(), String> {
        let needed = |index: usize| self.needed.get(index).copied().flatten();
        let Some(own) = needed(instance.0 as usize) else {
            return Ok(());
        };
        let mut promised = 0_u64;
        let mut taken = 0_u64;
        for (index, place) in places.iter().enumerate() {
            if place.child.is_none() || index == instance.0 as usize {
                continue;
            }
            let footprint = place.footprint.unwrap_or_default();
            taken = taken.saturating_add(footprint.proportional);
            if place.ready.is_none() {
                let rest = needed(index).unwrap_or(0).saturating_sub(footprint.private);
                promised = promised.saturating_add(rest);
            }
        }
        let mut readings = reading::read();
        if self.limit.origin == LimitOrigin::Setting {
            readings.push(Reading {
                used: taken,
                limit: self.limit,
            });
        }
        reserve::room(own, promised, &readings)
    }

    /// Lets a start wait for one more look.
    pub(crate) fn hold(&mut self, instance: InstanceId, generation: Generation, now: Tick) {
        self.held.push(Held {
            instance,
            generation,
            until: now.after(SETTLE),
        });
    }

    /// A start that is to look again, taken out.
    pub(crate) fn due(&mut self, now: Tick) -> Option<(InstanceId, Generation)> {
        let index = self.held.iter().position(|held| held.until <= now)?;
        let held = self.held.swap_remove(index);
        Some((held.instance, held.generation))
    }

    /// Gives up a start that waits. `false`: none of this generation does.
    pub(crate) fn give_up(&mut self, instance: InstanceId, generation: Generation) -> bool {
        let before = self.held.len();
        self.held
            .retain(|held| (held.instance, held.generation) != (instance, generation));
        self.held.len() < before
    }

    /// `None` until the first look.
    pub(crate) fn view(&self) -> Option<MemoryView> {
        let report = self.report.as_ref()?;
        let nearest = report.readings.iter().max_by_key(|one| one.permille());
        Some(MemoryView {
            pressure: match self.pressure {
                MemoryPressure::None => "none",
                MemoryPressure::Soft => "soft",
                MemoryPressure::Hard => "hard",
            },
            used_bytes: nearest.map_or(0, |one| one.used),
            limit_bytes: nearest.map_or(0, |one| one.limit.bytes),
            limit_origin: nearest.map_or("machine", |one| match one.limit.origin {
                LimitOrigin::Machine => "machine",
                LimitOrigin::Cgroup => "cgroup",
                LimitOrigin::Setting => "setting",
            }),
            workers_bytes: report.workers_bytes,
            predicted_bytes: self.predicted,
        })
    }
}
