//! The workers' births and deaths, and what a death means for the requests it interrupted.

use std::time::Duration;

use proto::RequestId;

use super::{Dispatch, Shutdown};
use crate::machine::action::{Action, Denied, Failure, Outcome};
use crate::machine::event::{Accepted, ExitStatus, WorkerFacts};
use crate::machine::instance::{Death, Draining, Instance, State, Why, reason};
use crate::machine::liveness::Liveness;
use crate::machine::measurement::{ExitCause, Measurement};
use crate::machine::queue::Place;
use crate::machine::request::{Phase, Request};
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

    /// SIGTERM now, SIGKILL after the grace.
    pub(super) fn terminate(&mut self, index: usize, why: Why) {
        let place = &self.instances[index];
        let (instance, generation) = (place.id, place.generation);
        self.act(Action::Terminate {
            instance,
            generation,
        });
        let kill_at = Some(self.now.after(self.policy.worker_grace));
        self.enter(index, State::Terminating(Death::new(why, kill_at)));
    }

    /// SIGKILL. Its link is fenced at the same moment; nothing is awaited but the exit.
    pub(super) fn kill(&mut self, index: usize) {
        let place = &mut self.instances[index];
        let (instance, generation) = (place.id, place.generation);
        if let State::Terminating(death) = &mut place.state {
            death.kill_at = None;
            death.killed = true;
        }
        self.act(Action::Kill {
            instance,
            generation,
        });
        self.advance_death(index);
    }

    /// SIGKILL without SIGTERM before it: nobody waits any more.
    pub(super) fn kill_planned(&mut self, index: usize) {
        match &self.instances[index].state {
            State::Terminating(death) if death.exit.is_some() => return,
            State::Terminating(_) => {}
            _ => self.enter(index, State::Terminating(Death::new(Why::Planned, None))),
        }
        self.kill(index);
    }

    /// The link is fenced: its requests are off this worker, with what their relays hold.
    pub(super) fn link_ended(&mut self, index: usize, accepted: &[Accepted]) {
        if !self.instances[index].link_open {
            self.stale();
            return;
        }
        self.instances[index].link_open = false;
        self.interrupt(index, accepted);
        let grace = match &mut self.instances[index].state {
            State::Terminating(death) => {
                death.close_at = None;
                self.advance_death(index);
                return;
            }
            State::Draining(Draining::Asked { .. }) => (Why::Planned, self.policy.worker_grace),
            _ => (Why::LinkLost, self.policy.lost_link_grace),
        };
        let kill_at = Some(self.now.after(grace.1));
        self.enter(index, State::Terminating(Death::new(grace.0, kill_at)));
        self.advance_death(index);
    }

    pub(super) fn exited(&mut self, index: usize, status: ExitStatus) {
        let why = match &self.instances[index].state {
            State::Terminating(death) if death.exit.is_some() => {
                self.stale();
                return;
            }
            State::Terminating(death) => death.why,
            State::Draining(Draining::Asked { .. }) => Why::Planned,
            _ => Why::Exited,
        };
        let killed =
            matches!(&self.instances[index].state, State::Terminating(death) if death.killed);
        let link_open = self.instances[index].link_open;
        let death = Death {
            why,
            kill_at: None,
            killed,
            close_at: link_open.then(|| self.now.after(self.policy.link_grace)),
            exit: Some(status),
        };
        self.enter(index, State::Terminating(death));
        self.advance_death(index);
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

    /// Takes every request off a worker whose link is fenced. They wait until it is known whether
    /// the death counts against them.
    fn interrupt(&mut self, index: usize, accepted: &[Accepted]) {
        for report in accepted {
            if let Some(request) = self.requests.get_mut(&report.request)
                && request.seat() == Some(self.instances[index].id)
            {
                request.tokens = request.tokens.max(report.tokens);
                if request.tokens > 0 {
                    request.first_token.get_or_insert(self.now);
                }
            }
        }
        let place = &mut self.instances[index];
        let instance = place.id;
        place.exclusive = None;
        let seats = std::mem::take(&mut place.seats);
        let measuring = std::mem::take(&mut place.measuring);
        for (id, seat) in seats {
            if seat.cancelled {
                self.lingering.remove(&id);
                continue;
            }
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            request.phase = Phase::Held { instance };
            self.queue.push(request.ticket, true, Place::Away);
            self.instances[index].casualties.push(id);
            self.instances[index].batch.push(id);
            self.arm_request(id);
        }
        for id in measuring.into_keys() {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            request.phase = Phase::Held { instance };
            self.instances[index].casualties.push(id);
            self.arm_request(id);
        }
    }

    /// Goes on with a death as far as is known: first its requests, then its place.
    fn advance_death(&mut self, index: usize) {
        let place = &self.instances[index];
        if place.link_open {
            return;
        }
        let State::Terminating(death) = &place.state else {
            return;
        };
        let Some(cause) = death.cause() else {
            return;
        };
        let (why, exit) = (death.why, death.exit);
        let oom = matches!(exit, Some(ExitStatus::Signal { oom: true, .. }));
        for id in std::mem::take(&mut self.instances[index].casualties) {
            self.resume(id, cause, oom);
        }
        let Some(status) = exit else {
            return;
        };
        let batch = std::mem::take(&mut self.instances[index].batch);
        if why == Why::Planned && cause == ExitCause::Engine {
            self.count_late(&batch, oom);
        }
        let place = &mut self.instances[index];
        let exit = Measurement::WorkerExit {
            instance: place.id,
            generation: place.generation,
            status,
            cause,
            uptime: self.now.since(place.spawned_at),
            batch,
        };
        self.counters.worker_exits += 1;
        self.record(exit);
        self.refill(index, cause, reason(why, Some(status)));
    }

    /// A worker that was to leave turns out to have crashed first. Its requests went on at once, so
    /// the death counts against them wherever they are now.
    fn count_late(&mut self, batch: &[RequestId], oom: bool) {
        for &id in batch {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            request.engine_deaths += 1;
            request.oom = oom;
            request.alone = true;
            if request.engine_deaths >= self.policy.engine_deaths_max {
                self.fail_poisonous(id);
            }
        }
    }

    /// Its prompt killed as many engines as one may.
    fn fail_poisonous(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (oom, deaths) = (request.oom, request.engine_deaths);
        self.quarantine
            .insert(request.fingerprint, &self.policy, self.now);
        self.record(Measurement::FingerprintQuarantined { request: id });
        self.end(id, Outcome::Failed(Failure::WorkerDied { oom, deaths }));
    }

    /// Counts a death against a request it interrupted, and lets the request go on, or fails it.
    fn resume(&mut self, id: RequestId, cause: ExitCause, oom: bool) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let suspected = request.external_deaths >= self.policy.suspect_after;
        match cause {
            ExitCause::Planned => {}
            ExitCause::External => {
                request.external_deaths += 1;
                // One more from outside, with nobody else to blame, is too many to be chance.
                request.engine_deaths += u32::from(suspected);
            }
            ExitCause::Engine | ExitCause::Permanent => request.engine_deaths += 1,
        }
        request.oom = oom;
        request.alone =
            request.engine_deaths > 0 || request.external_deaths >= self.policy.suspect_after;
        let alone = request.alone;
        if request.engine_deaths >= self.policy.engine_deaths_max {
            self.fail_poisonous(id);
            return;
        }
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (started, tokens) = (request.has_started(), request.tokens);
        if started {
            self.counters.failovers += 1;
            self.record(Measurement::Failover {
                request: id,
                tokens,
            });
        }
        if alone {
            self.queue.set_again(id);
        }
        self.check_stranded = true;
        self.wait_again(id);
    }

    /// The worker is gone; decides what becomes of its place.
    fn refill(&mut self, index: usize, cause: ExitCause, reason: String) {
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
