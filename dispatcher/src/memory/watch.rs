//! Watches memory: what each worker takes, what is used of the limits, and when that is too much.

use std::sync::Arc;
use std::time::Duration;

use proto::{Generation, InstanceId};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::footprint::{self, Footprint};
use super::pressure::{Judge, Reading};
use super::{Limit, LimitOrigin, reading};
use crate::input::Input;
use crate::machine::Tick;
use crate::view::View;

/// Between two looks at what is used.
const EVERY: Duration = Duration::from_millis(500);
/// Between two measurements of the workers, where nothing changes. They walk page tables.
const MEASURE_EVERY: Duration = Duration::from_secs(5);
/// A measurement may take this share of the time, one in so many.
const MEASURE_SHARE: u32 = 20;

/// What one look found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub workers: Vec<WorkerFootprint>,
    /// What the workers take together, in bytes.
    pub workers_bytes: u64,
    /// Of each bound.
    pub readings: Vec<Reading>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerFootprint {
    pub instance: InstanceId,
    pub generation: Generation,
    pub footprint: Footprint,
}

/// Where figures come from; a test's says what it likes.
pub(crate) trait Sources: Send + 'static {
    fn readings(&mut self) -> Vec<Reading>;
    fn footprint(&mut self, pid: u32) -> Option<Footprint>;
}

/// The system itself.
#[derive(Debug)]
pub(crate) struct System;

impl Sources for System {
    fn readings(&mut self) -> Vec<Reading> {
        reading::read()
    }

    fn footprint(&mut self, pid: u32) -> Option<Footprint> {
        footprint::measure(pid)
    }
}

/// What the watch looks at and whom it tells.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) view: watch::Receiver<Arc<View>>,
    pub(crate) inputs: mpsc::Sender<Input>,
    pub(crate) limit: Limit,
    /// Bytes of the mapped model that footprints do not hold: all of them on macOS.
    pub(crate) mapped: u64,
}

/// A worker as the view shows it.
#[derive(Clone, Debug, PartialEq)]
struct Worker {
    instance: InstanceId,
    generation: Generation,
    pid: u32,
    state: &'static str,
}

impl Watch {
    /// Watches until the driver is gone.
    pub(crate) async fn serve(self, mut sources: impl Sources) {
        let start = Instant::now();
        let mut judge = Judge::default();
        let mut measured: Vec<Worker> = Vec::new();
        let mut footprints = Vec::new();
        let mut due = start;
        let mut timer = tokio::time::interval(EVERY);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            timer.tick().await;
            let workers = self.workers();
            let now = Instant::now();
            // A worker that has just become Ready, or is gone, is news.
            let measure = now >= due || judge.is_alert() || workers != measured;
            let look = workers.clone();
            // Reading /proc may wait for a worker's memory lock: not on a thread that serves.
            let looked = tokio::task::spawn_blocking(move || {
                let found = measure.then(|| look_at(&look, &mut sources));
                let readings = sources.readings();
                (sources, found, readings)
            });
            let Ok((returned, found, mut readings)) = looked.await else {
                // Only a panic of the sources ends here; the machine then keeps the last pressure.
                tracing::error!("the memory watch has stopped");
                return;
            };
            sources = returned;
            if let Some(found) = found {
                footprints = found;
                measured = workers;
                due = Instant::now() + MEASURE_EVERY.max(now.elapsed() * MEASURE_SHARE);
            }
            let workers_bytes = self.sum(&footprints);
            if self.limit.origin == LimitOrigin::Setting {
                readings.push(Reading {
                    used: workers_bytes,
                    limit: self.limit,
                });
            }
            let changed = judge.judge(&readings, Tick::ZERO.after(start.elapsed()));
            let report = Report {
                workers: footprints.clone(),
                workers_bytes,
                readings,
            };
            let mut told = self.inputs.send(Input::Measured(Box::new(report))).await;
            if let Some(pressure) = changed {
                tracing::warn!(?pressure, "memory pressure changed");
                told = self.inputs.send(Input::Memory(pressure)).await;
            }
            if told.is_err() {
                return;
            }
        }
    }

    fn workers(&self) -> Vec<Worker> {
        let view = self.view.borrow();
        let workers = view.instances.iter().filter_map(|one| {
            Some(Worker {
                instance: InstanceId(one.instance),
                generation: Generation(one.generation),
                pid: one.pid?,
                state: one.state,
            })
        });
        workers.collect()
    }

    fn sum(&self, footprints: &[WorkerFootprint]) -> u64 {
        let mapped = if footprints.is_empty() {
            0
        } else {
            self.mapped
        };
        footprints
            .iter()
            .map(|worker| worker.footprint.proportional)
            .fold(mapped, u64::saturating_add)
    }
}

fn look_at(workers: &[Worker], sources: &mut impl Sources) -> Vec<WorkerFootprint> {
    let found = workers.iter().filter_map(|worker| {
        Some(WorkerFootprint {
            instance: worker.instance,
            generation: worker.generation,
            footprint: sources.footprint(worker.pid)?,
        })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::event::MemoryPressure;
    use crate::view::InstanceView;
    use std::sync::atomic::{AtomicU64, Ordering};

    const MIB: u64 = 1 << 20;

    /// Workers of one MiB each, and a machine whose use the test sets.
    struct Told(Arc<AtomicU64>);

    impl Sources for Told {
        fn readings(&mut self) -> Vec<Reading> {
            vec![Reading {
                used: self.0.load(Ordering::Relaxed),
                limit: Limit {
                    bytes: 100 * MIB,
                    origin: LimitOrigin::Machine,
                },
            }]
        }

        fn footprint(&mut self, _: u32) -> Option<Footprint> {
            Some(Footprint {
                proportional: MIB,
                private: MIB / 2,
            })
        }
    }

    struct Rig {
        inputs: mpsc::Receiver<Input>,
        used: Arc<AtomicU64>,
        _view: watch::Sender<Arc<View>>,
    }

    fn rig(limit: Limit) -> Rig {
        let view = View {
            instances: vec![
                InstanceView {
                    pid: Some(1),
                    state: "ready",
                    ..InstanceView::default()
                };
                3
            ],
            ..View::default()
        };
        let (sender, view) = watch::channel(Arc::new(view));
        let (inputs, receiver) = mpsc::channel(64);
        let used = Arc::new(AtomicU64::new(0));
        let watch = Watch {
            view,
            inputs,
            limit,
            mapped: 0,
        };
        tokio::spawn(watch.serve(Told(Arc::clone(&used))));
        Rig {
            inputs: receiver,
            used,
            _view: sender,
        }
    }

    impl Rig {
        async fn pressure(&mut self) -> MemoryPressure {
            loop {
                if let Input::Memory(pressure) = self.inputs.recv().await.unwrap() {
                    return pressure;
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_machines_use_becomes_a_pressure_and_its_end() {
        let mut rig = rig(Limit {
            bytes: 100 * MIB,
            origin: LimitOrigin::Machine,
        });
        let Some(Input::Measured(report)) = rig.inputs.recv().await else {
            panic!("the first look tells what was found");
        };
        assert_eq!(report.workers.len(), 3);
        assert_eq!(report.workers_bytes, 3 * MIB);
        for (used, expected) in [
            (96, MemoryPressure::Soft),
            (99, MemoryPressure::Hard),
            (10, MemoryPressure::None),
        ] {
            rig.used.store(used * MIB, Ordering::Relaxed);
            assert_eq!(rig.pressure().await, expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_user_allows_is_compared_with_the_workers_alone() {
        let setting = |bytes| Limit {
            bytes,
            origin: LimitOrigin::Setting,
        };
        let mut tight = rig(setting(2 * MIB));
        assert_eq!(tight.pressure().await, MemoryPressure::Hard);
        let mut enough = rig(setting(3 * MIB));
        for _ in 0..10 {
            let input = enough.inputs.recv().await.unwrap();
            assert!(matches!(input, Input::Measured(_)), "{input:?}");
        }
    }
}
