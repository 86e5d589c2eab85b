//! Worker processes: spawned, starting, dying, killed and reaped.

use std::collections::BTreeMap;
use std::time::Duration;

use dispatcher::machine::Tick;
use dispatcher::machine::event::{Event, ExitStatus};
use proto::{Attempt, RequestId};

use crate::engine::Run;
use crate::link::{Frame, Link};
use crate::oracle::{Blame, WorkerId};
use crate::world::{Happening, SIGKILL, World};

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) model: u8,
    pub(crate) slots: u32,
    pub(crate) alive: bool,
    pub(crate) reap_scheduled: bool,
    pub(crate) hung: bool,
    pub(crate) deaf: bool,
    pub(crate) slow: bool,
    pub(crate) draining: bool,
    pub(crate) link: Link,
    /// Attempts whose rows are let into relays.
    pub(crate) session: BTreeMap<RequestId, Attempt>,
    pub(crate) runs: BTreeMap<RequestId, Run>,
    pub(crate) stepping: bool,
    pub(crate) pulse: u64,
    pub(crate) longest_step: Duration,
    /// Frames and events of one worker keep their order.
    pub(crate) framed_at: Tick,
    pub(crate) told_at: Tick,
    /// Frames behind this moment are lost with the worker.
    pub(crate) cut_at: Option<Tick>,
    pub(crate) blame: Option<Blame>,
    pub(crate) last_news: Tick,
}

impl World {
    pub(crate) fn spawn(&mut self, worker: WorkerId) {
        let now = self.now;
        let deaf = self.fault(self.faults.deaf);
        let slow = self.fault(self.faults.slow);
        let slots = self.dice.between_u32(1, 4);
        let state = Worker {
            model: self.model,
            slots,
            alive: true,
            reap_scheduled: false,
            hung: false,
            deaf,
            slow,
            draining: false,
            link: Link::None,
            session: BTreeMap::new(),
            runs: BTreeMap::new(),
            stepping: false,
            pulse: 0,
            longest_step: Duration::ZERO,
            framed_at: now,
            told_at: now,
            cut_at: None,
            blame: None,
            last_news: now,
        };
        self.workers.insert(worker, state);
        let after = self.dice.micros(10, 50_000);
        self.put_after(after, Happening::StartUp(worker, 0));
    }

    pub(crate) fn start_up(&mut self, worker: WorkerId, stage: u32) {
        let (instance, generation) = worker;
        if !self.workers[&worker].alive {
            return;
        }
        if stage == 0 {
            if self.fault(self.faults.failed_spawn) {
                self.workers.get_mut(&worker).unwrap().alive = false;
                let permanent = self.dice.chance(1000);
                self.tell(Event::SpawnFailed {
                    instance,
                    generation,
                    permanent,
                });
                return;
            }
            self.tell(Event::Spawned {
                instance,
                generation,
            });
            if !self.workers[&worker].alive {
                return;
            }
        }
        if self.fault(self.faults.hung_load) {
            self.workers.get_mut(&worker).unwrap().hung = true;
            return;
        }
        if self.fault(self.faults.failed_load) {
            self.die(worker, ExitStatus::Code(1), Some(Blame::Engine));
            return;
        }
        if self.fault(self.faults.permanent) {
            self.die(worker, ExitStatus::Code(78), Some(Blame::Engine));
            return;
        }
        let frame = match stage {
            0 => Frame::Connected,
            1..=3 => Frame::Loading(stage * 300),
            4..=5 => Frame::Warming(stage - 3),
            _ => Frame::Ready,
        };
        let last = matches!(frame, Frame::Ready);
        self.write(worker, frame);
        if last {
            return;
        }
        let pause = if self.fault(self.faults.slow_load) {
            self.dice.millis(1000, 15_000)
        } else {
            self.dice.micros(1000, 300_000)
        };
        self.put_after(pause, Happening::StartUp(worker, stage + 1));
    }

    /// The process ends. What it wrote before may still be read, in whole, in part, or not at all.
    pub(crate) fn die(&mut self, id: WorkerId, status: ExitStatus, blame: Option<Blame>) {
        let cut = self.fault(self.faults.lost_frames);
        let cut = cut.then(|| self.now.after(self.dice.micros(0, 3000)));
        let no_eof = self.fault(self.faults.no_eof);
        let reap = if blame == Some(Blame::Outsider) && self.dice.chance(2000) {
            self.dice.millis(0, 2_900)
        } else {
            self.dice.micros(10, 20_000)
        };
        let worker = self.workers.get_mut(&id).unwrap();
        worker.alive = false;
        worker.blame = worker.blame.or(blame);
        worker.runs.clear();
        worker.cut_at = worker.cut_at.or(cut);
        let eof_at = worker.framed_at.min(cut.unwrap_or(worker.framed_at));
        if worker.link == Link::Open && !no_eof {
            self.put(eof_at, Happening::Frame(id, Frame::Eof));
        }
        self.reap_after(id, reap, status);
    }

    pub(crate) fn reap_after(&mut self, id: WorkerId, after: Duration, status: ExitStatus) {
        let worker = self.workers.get_mut(&id).unwrap();
        if !worker.reap_scheduled {
            worker.reap_scheduled = true;
            self.put_after(after, Happening::Reap(id, status));
        }
    }

    pub(crate) fn kill(&mut self, id: WorkerId) {
        self.fence(id);
        let late = self.fault(self.faults.late_reap);
        let after = if late {
            self.dice.millis(100, 40_000)
        } else {
            self.dice.micros(10, 5000)
        };
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.alive {
            worker.alive = false;
            worker.runs.clear();
            let signal = SIGKILL;
            self.reap_after(id, after, ExitStatus::Signal { signal, oom: false });
        }
    }

    /// Work, or its answer, must have been missing for long where a Ready worker is terminated.
    pub(crate) fn check_termination(&self, id: WorkerId) {
        // Its spawn may stand before this in the same turn.
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let snapshot = self.machine.snapshot(self.now);
        let reason = &snapshot.instances[usize::try_from(id.0.0).unwrap()].reason;
        if reason
            .as_deref()
            .is_some_and(|reason| reason.starts_with("stalled"))
        {
            let silence = self.now.since(worker.last_news);
            let bound = self.policy.stall_min.min(self.policy.measure_stall);
            let doubtful = worker.hung || !worker.alive;
            assert!(
                doubtful || silence >= bound,
                "a worker that advances is not killed: silent for {silence:?}"
            );
            assert!(
                self.oracle.has_work(id) || doubtful,
                "an idle worker is not killed"
            );
        }
    }
}
