//! How a worker comes to be, and what becomes of a place whose worker is gone.

use std::time::Duration;

use super::{Dispatch, Shutdown};
use crate::machine::action::{Action, Denied, Failure, Outcome};
use crate::machine::event::WorkerFacts;
use crate::machine::instance::{Death, Instance, State, Why};
use crate::machine::liveness::Liveness;
use crate::machine::measurement::ExitCause;
use crate::machine::request::Request;
use crate::machine::restart::Next;

impl Dispatch {
    pub(super) fn spawn(&mut self, index: usize) {
        let place = &mut self.instances[index];
        let reborn = place.generation.0 > 0;
        place.generation = place.generation.next();
        place.restarts += u64::from(reborn);
        place.spawned_at = self.now;
        place.ready_at = None;
        let (instance, generation) = (place.id, place.generation);
        let connect_by = self.now.after(self.policy.connect_timeout);
        self.enter(index, State::Spawning { connect_by });
        self.act(Action::Spawn {
            instance,
            generation,
        });
    }

    pub(super) fn connected(&mut self, index: usize) {
        if !matches!(self.instances[index].state, State::Spawning { .. }) {
            self.stale();
            return;
        }
        self.instances[index].link_open = true;
        let stalled_at = self.now.after(self.policy.load_stall);
        self.enter(
            index,
            State::Loading {
                permille: 0,
                stalled_at,
            },
        );
    }

    pub(super) fn load_progress(&mut self, index: usize, permille: u32) {
        let at = self.now.after(self.policy.load_stall);
        if let State::Loading {
            permille: before,
            stalled_at,
        } = &mut self.instances[index].state
            && permille > *before
        {
            *before = permille;
            *stalled_at = at;
        }
    }

    pub(super) fn warm_progress(&mut self, index: usize, done: u32) {
        let at = self.now.after(self.policy.warm_stall);
        match &mut self.instances[index].state {
            State::Loading { .. } => {
                self.enter(
                    index,
                    State::Warming {
                        done,
                        pulse: 0,
                        stalled_at: at,
                    },
                );
            }
            State::Warming {
                done: before,
                stalled_at,
                ..
            } if done > *before => {
                *before = done;
                *stalled_at = at;
            }
            _ => {}
        }
    }

    pub(super) fn ready(&mut self, index: usize, facts: WorkerFacts) {
        let place = &mut self.instances[index];
        if !matches!(place.state, State::Loading { .. } | State::Warming { .. }) {
            self.stale();
            return;
        }
        // A worker that names no slot would take no work for ever; one sequence it must be able to hold.
        let slots = facts.slots.max(1);
        let facts = WorkerFacts { slots, ..facts };
        place.facts = Some(facts);
        place.ready_at = Some(self.now);
        self.facts = Some(facts);
        self.check_stranded = true;
        let liveness = Liveness::new(self.now);
        self.enter(index, State::Ready { liveness });
    }

    pub(super) fn progress(&mut self, index: usize, pulse: u64, longest_step: Duration) {
        let now = self.now;
        let at = now.after(self.policy.warm_stall);
        match &mut self.instances[index].state {
            State::Ready { liveness } => liveness.pulse(pulse, longest_step, now),
            State::Warming {
                pulse: before,
                stalled_at,
                ..
            } if pulse > *before => {
                *before = pulse;
                *stalled_at = at;
            }
            _ => {}
        }
    }

    pub(super) fn spawn_failed(&mut self, index: usize, permanent: bool) {
        match &self.instances[index].state {
            State::Spawning { .. } | State::Terminating(_) if !self.instances[index].link_open => {}
            _ => {
                self.stale();
                return;
            }
        }
        let planned = matches!(
            &self.instances[index].state,
            State::Terminating(Death {
                why: Why::Planned,
                ..
            })
        );
        let cause = match (planned, permanent) {
            (true, _) => ExitCause::Planned,
            (false, true) => ExitCause::Permanent,
            (false, false) => ExitCause::Engine,
        };
        let words = if permanent {
            "its program cannot be started"
        } else {
            "no process could be started"
        };
        self.refill(index, cause, words.to_owned());
    }

    /// The worker is gone; decides what becomes of its place.
    pub(super) fn refill(&mut self, index: usize, cause: ExitCause, reason: String) {
        let now = self.now;
        let place = &mut self.instances[index];
        place.link_open = false;
        place.facts = None;
        place.refuses_until = None;
        if matches!(self.shutdown, Shutdown::Leaving { .. } | Shutdown::Left) {
            self.enter(index, State::Stopped);
            return;
        }
        let external = cause == ExitCause::External;
        let next = match cause {
            ExitCause::Planned => Next::Now,
            ExitCause::Permanent => {
                place.crashes += 1;
                self.park(index, None, reason);
                return;
            }
            ExitCause::External | ExitCause::Engine => {
                place.crashes += 1;
                let life = place.life(now, external);
                place
                    .restart
                    .died(&self.policy, &mut self.jitter, now, life)
            }
        };
        match next {
            Next::Now => self.spawn(index),
            Next::After(pause) => {
                let until = now.after(pause);
                self.enter(index, State::Backoff { until, reason });
            }
            Next::Park(pause) => self.park(index, Some(pause), reason),
        }
    }

    fn park(&mut self, index: usize, pause: Option<Duration>, reason: String) {
        let until = pause.map(|pause| self.now.after(pause));
        self.enter(index, State::Quarantined { until, reason });
        self.check_stranded = true;
    }

    /// Ends what no instance will ever serve: everything where all are parked, else the streams
    /// whose model is gone.
    pub(super) fn fail_stranded(&mut self) {
        if !std::mem::take(&mut self.check_stranded) {
            return;
        }
        let all_parked = self.instances.iter().all(Instance::is_parked);
        let waiting: Vec<_> = if all_parked {
            self.queue.requests().collect()
        } else {
            self.queue.again().collect()
        };
        for id in waiting {
            let Some(request) = self.requests.get(&id) else {
                continue;
            };
            if all_parked {
                let retry_after = self.parked_for();
                self.refuse(id, Denied::NoInstance { retry_after });
            } else if !self.can_still_serve(request) {
                self.end(id, Outcome::Failed(Failure::NoInstance));
            }
        }
    }

    fn can_still_serve(&self, request: &Request) -> bool {
        let Some(model) = request.bound_to() else {
            return true;
        };
        self.instances.iter().any(|place| match &place.state {
            State::Ready { .. } => place.facts.is_some_and(|facts| facts.model == model),
            // Which model the next worker brings is known when it is Ready.
            _ => !place.is_parked(),
        })
    }
}
