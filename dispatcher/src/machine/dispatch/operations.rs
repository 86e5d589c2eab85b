//! What operators ask for: drain, stop, rolling replacement, and relief of memory.

use super::{Dispatch, Shutdown};
use crate::machine::action::{Action, Denied};
use crate::machine::event::MemoryPressure;
use crate::machine::instance::{Draining, State, Why};
use crate::machine::policy::Policy;
use crate::machine::tick::Tick;
use crate::machine::timers::Owner;

impl Dispatch {
    /// Admits nothing more; what was accepted, waiting or running, may end in time.
    pub(super) fn drain(&mut self) {
        if self.shutdown != Shutdown::No {
            return;
        }
        let until = self.now.after(self.policy.drain_timeout);
        self.shutdown = Shutdown::Draining { until };
        self.rollout.waiting.clear();
        self.timers.set(Owner::Shutdown, Some(until));
    }

    /// Ends everything at once.
    pub(super) fn stop(&mut self) {
        self.leave(|machine, index| machine.kill_planned(index));
        let give_up_at = self.now.after(self.policy.worker_grace);
        self.wait_to_leave(give_up_at);
    }

    /// The drain's time is over.
    pub(super) fn leave_now(&mut self) {
        self.leave(|machine, index| match machine.instances[index].state {
            State::Terminating(_) => {}
            _ => machine.terminate(index, Why::Planned),
        });
        let give_up_at = self.now.after(self.policy.worker_grace * 2);
        self.wait_to_leave(give_up_at);
    }

    /// Everything has ended: workers may go in their own time.
    fn leave_politely(&mut self) {
        let until = self.now.after(self.policy.worker_grace);
        self.leave(|machine, index| match machine.instances[index].state {
            State::Terminating(_) | State::Draining(Draining::Asked { .. }) => {}
            State::Ready { .. } | State::Draining(_) => machine.ask_to_drain(index, until),
            _ => machine.terminate(index, Why::Planned),
        });
        let give_up_at = self.now.after(self.policy.worker_grace * 3);
        self.wait_to_leave(give_up_at);
    }

    /// Ends what is left, and every place: an empty one at once, another by `dismiss`.
    fn leave(&mut self, dismiss: impl Fn(&mut Self, usize)) {
        let left: Vec<_> = self.requests.keys().copied().collect();
        let retry_after = self.policy.drain_timeout;
        for id in left {
            self.refuse(id, Denied::Draining { retry_after });
        }
        self.rollout.waiting.clear();
        self.rollout.current = None;
        self.shutdown = Shutdown::Leaving {
            give_up_at: self.now,
        };
        for index in 0..self.instances.len() {
            if self.instances[index].has_process() {
                dismiss(self, index);
            } else {
                self.enter(index, State::Stopped);
            }
        }
    }

    fn wait_to_leave(&mut self, give_up_at: Tick) {
        self.shutdown = Shutdown::Leaving { give_up_at };
        self.timers.set(Owner::Shutdown, Some(give_up_at));
    }

    pub(super) fn advance_shutdown(&mut self) {
        if matches!(self.shutdown, Shutdown::Draining { .. }) && self.requests.is_empty() {
            self.leave_politely();
        }
        let all_stopped = || {
            let mut places = self.instances.iter();
            places.all(|place| matches!(place.state, State::Stopped))
        };
        if matches!(self.shutdown, Shutdown::Leaving { .. }) && all_stopped() {
            self.leave_for_good();
        }
    }

    /// Also where a killed worker was not reaped in time: nobody waits for the kernel.
    pub(super) fn leave_for_good(&mut self) {
        self.shutdown = Shutdown::Left;
        self.timers.set(Owner::Shutdown, None);
        self.act(Action::Stopped);
    }

    /// Takes over the times and counts of `policy` that may change while requests are under way.
    /// Bounds of the queue and the number of instances stay. What was timed already keeps its time,
    /// but for the liveness of workers.
    ///
    /// # Panics
    ///
    /// Where the policy contradicts itself, as [`Dispatch::new`].
    pub fn retime(&mut self, policy: &Policy) {
        let kept = &self.policy;
        let policy = Policy {
            instances: kept.instances,
            queue_entries_max: kept.queue_entries_max,
            queue_bytes_max: kept.queue_bytes_max,
            queue_tokens_max: kept.queue_tokens_max,
            key_in_flight_max: kept.key_in_flight_max,
            priority_aging: kept.priority_aging,
            engine_deaths_max: kept.engine_deaths_max,
            ..policy.clone()
        };
        if let Err(contradiction) = policy.check() {
            panic!("the policy contradicts itself: {contradiction}");
        }
        self.policy = policy;
        for index in 0..self.instances.len() {
            self.arm_instance(index);
        }
    }

    /// Replaces every worker, one after another. A reload during a reload starts over with those
    /// that were replaced already.
    pub(super) fn reload(&mut self) {
        if self.shutdown != Shutdown::No {
            return;
        }
        self.rollout.waiting.clear();
        for index in 0..self.instances.len() {
            let place = &mut self.instances[index];
            place.restart.clear();
            let (instance, generation) = (place.id, place.generation);
            match place.state {
                State::Backoff { .. } | State::Quarantined { .. } => self.spawn(index),
                State::Spawning { .. }
                | State::Loading { .. }
                | State::Warming { .. }
                | State::Ready { .. } => {
                    self.rollout.waiting.insert(instance, generation);
                }
                // What ends already is followed by a worker of the new configuration.
                State::Draining(_) | State::Terminating(_) | State::Stopped => {}
            }
        }
    }

    /// Starts the next replacement once the last one serves. Where the last one is parked, the
    /// others keep serving as they are.
    pub(super) fn advance_rollout(&mut self) {
        while !self.rollout.waiting.is_empty() {
            if let Some(current) = self.rollout.current {
                let place = &self.instances[current.0 as usize];
                if place.is_parked() {
                    self.rollout.waiting.clear();
                    self.rollout.current = None;
                    return;
                }
                // A reload meanwhile may have put the one that is being replaced on the list again.
                if !place.is_ready() && !self.rollout.waiting.contains_key(&current) {
                    return;
                }
            }
            let again = self.rollout.current.take();
            let again = again.and_then(|current| self.rollout.waiting.remove_entry(&current));
            let next = again.or_else(|| self.rollout.waiting.pop_first());
            let Some((instance, generation)) = next else {
                return;
            };
            let index = instance.0 as usize;
            let place = &self.instances[index];
            if place.generation != generation {
                continue;
            }
            match place.state {
                State::Ready { .. } => {
                    let until = self.now.after(self.policy.replace_timeout);
                    self.enter(index, State::Draining(Draining::Emptying { until }));
                }
                State::Spawning { .. } | State::Loading { .. } | State::Warming { .. } => {
                    self.terminate(index, Why::Planned);
                }
                _ => continue,
            }
            self.rollout.current = Some(instance);
        }
        if let Some(current) = self.rollout.current {
            let place = &self.instances[current.0 as usize];
            if place.is_ready() || place.is_parked() {
                self.rollout.current = None;
            }
        }
    }

    pub(super) fn ask_emptied_to_drain(&mut self) {
        let until = self.now.after(self.policy.worker_grace);
        for index in 0..self.instances.len() {
            let place = &self.instances[index];
            if matches!(place.state, State::Draining(Draining::Emptying { .. })) && place.is_empty()
            {
                self.ask_to_drain(index, until);
            }
        }
    }

    fn ask_to_drain(&mut self, index: usize, until: Tick) {
        let place = &self.instances[index];
        let (instance, generation) = (place.id, place.generation);
        self.act(Action::SendDrain {
            instance,
            generation,
        });
        self.enter(index, State::Draining(Draining::Asked { until }));
    }

    /// `Soft` keeps new work from the slots; `Hard` also sends away what waits for its first.
    pub(super) fn memory(&mut self, pressure: MemoryPressure) {
        self.memory = pressure;
        if pressure != MemoryPressure::Hard {
            return;
        }
        let denied = self.out_of_memory();
        let waiting: Vec<_> = self.queue.requests().collect();
        for id in waiting {
            if self
                .requests
                .get(&id)
                .is_some_and(|request| !request.has_started())
            {
                self.refuse(id, denied.clone());
            }
        }
    }
}
