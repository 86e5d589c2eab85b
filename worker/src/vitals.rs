//! What the engine thread shows of itself to the heartbeat: numbers behind atomics, no lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use proto::span::Micros;
use proto::to_dispatcher::Progress;

use crate::engine::Pulse;

/// What the engine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Parts of 1000 of the load that are done.
    Loading {
        permille: u32,
    },
    /// Batch shapes that ran.
    Warming {
        done: u32,
    },
    Serving,
}

/// Written by the engine thread, read by the heartbeat.
#[derive(Debug, Default)]
pub struct Vitals {
    pulse: Pulse,
    /// 0 loading, 1 warming, 2 serving.
    phase: AtomicU32,
    permille: AtomicU32,
    /// The pulse with which warm-up began.
    warm_from: AtomicU64,
    steps: AtomicU64,
    live_slots: AtomicU32,
    longest_step_us: AtomicU64,
}

impl Vitals {
    /// The counter that the engine moves.
    #[must_use]
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// Part of the load is done.
    pub fn loaded(&self, permille: u32) {
        self.permille.store(permille.min(1000), Ordering::Relaxed);
        self.pulse.beat();
    }

    /// The load is over, warm-up begins.
    pub fn warming(&self) {
        self.warm_from.store(self.pulse.read(), Ordering::Relaxed);
        self.phase.store(1, Ordering::Release);
    }

    /// Warm-up is over, work may come.
    pub fn serving(&self) {
        self.phase.store(2, Ordering::Release);
    }

    /// A step is over.
    pub fn stepped(&self, steps: u64, longest: Duration) {
        self.steps.store(steps, Ordering::Relaxed);
        self.longest_step_us
            .store(Micros::from(longest).0, Ordering::Relaxed);
    }

    /// So many slots hold a live sequence.
    pub fn live(&self, slots: u32) {
        self.live_slots.store(slots, Ordering::Relaxed);
    }

    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Loading {
                permille: self.permille.load(Ordering::Relaxed),
            },
            1 => {
                let done = self.pulse.read() - self.warm_from.load(Ordering::Relaxed);
                Phase::Warming {
                    done: u32::try_from(done).unwrap_or(u32::MAX),
                }
            }
            _ => Phase::Serving,
        }
    }

    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress {
            pulse: self.pulse.read(),
            steps: self.steps.load(Ordering::Relaxed),
            live_slots: self.live_slots.load(Ordering::Relaxed),
            longest_step: Micros(self.longest_step_us.load(Ordering::Relaxed)),
        }
    }
}
