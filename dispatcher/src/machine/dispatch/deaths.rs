//! How a worker ends, and what that means for the requests it interrupted.

use proto::RequestId;

use super::Dispatch;
use crate::machine::action::{Action, Failure, Outcome};
use crate::machine::event::{Accepted, ExitStatus};
use crate::machine::instance::{Death, Draining, State, Why, reason};
use crate::machine::measurement::{ExitCause, Measurement};
use crate::machine::queue::Place;
use crate::machine::request::Phase;

impl Dispatch {
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
            death.judge_at = None;
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
        let death = match &mut self.instances[index].state {
            State::Terminating(death) => {
                death.close_at = None;
                self.advance_death(index);
                return;
            }
            State::Draining(Draining::Asked { .. }) => {
                Death::new(Why::Planned, Some(self.now.after(self.policy.worker_grace)))
            }
            _ => Death {
                judge_at: Some(self.now.after(self.policy.link_grace)),
                ..Death::new(
                    Why::LinkLost,
                    Some(self.now.after(self.policy.lost_link_grace)),
                )
            },
        };
        self.enter(index, State::Terminating(death));
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
            judge_at: None,
            close_at: link_open.then(|| self.now.after(self.policy.link_grace)),
            exit: Some(status),
        };
        self.enter(index, State::Terminating(death));
        self.advance_death(index);
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
            self.judge(id, cause, oom);
            self.resume(id);
            if exit.is_none() {
                self.instances[index].parted.push(id);
            }
        }
        for id in std::mem::take(&mut self.instances[index].unjudged) {
            if let Some(request) = self.requests.get_mut(&id) {
                request.unjudged -= 1;
            }
            self.judge(id, cause, oom);
        }
        let Some(status) = exit else {
            return;
        };
        let parted = std::mem::take(&mut self.instances[index].parted);
        if why == Why::Planned {
            // Where it was to leave and turns out to have crashed first, that counts against its
            // requests wherever they are now.
            for id in parted {
                self.judge(id, cause, oom);
            }
        }
        let batch = std::mem::take(&mut self.instances[index].batch);
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

    /// The exit status is late (a driver gives the device's memory back first). Requests go on
    /// without it, alone in case it speaks against them; but not where it would fail them.
    pub(super) fn release_unjudged(&mut self, index: usize) {
        for id in std::mem::take(&mut self.instances[index].casualties) {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            if request.is_one_death_from_failing(&self.policy) {
                self.instances[index].casualties.push(id);
                continue;
            }
            request.unjudged += 1;
            request.alone = true;
            self.instances[index].unjudged.push(id);
            self.resume(id);
        }
    }

    /// Counts a death against a request, wherever it is, and fails it where it was one too many.
    fn judge(&mut self, id: RequestId, cause: ExitCause, oom: bool) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        if request.count_death(cause, oom, &self.policy) {
            self.fail_poisonous(id);
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

    /// A request that its worker's death interrupted goes on.
    fn resume(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (alone, started, tokens) = (request.alone, request.has_started(), request.tokens);
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
}
