//! What is due by now, and when the next thing is.

use super::{Dispatch, Shutdown};
use crate::machine::action::{Action, Denied};
use crate::machine::instance::{Death, Draining, State, Why};
use crate::machine::queue::Place;
use crate::machine::request::{Phase, Request};
use crate::machine::tick::Tick;
use crate::machine::timers::Owner;
use proto::RequestId;

impl Dispatch {
    /// The dispatcher woke later than it had to: it, or the whole computer, slept. The workers could
    /// not be heard meanwhile, so their silence is not held against them. When the sleep began is
    /// not known, only that the machine was last called at `before`: a worker keeps the time that it
    /// had left then, for a shift by the lateness alone would end it in the moment of waking.
    pub(super) fn forgive_lateness(&mut self, before: Tick) {
        let late = |next| self.now.since(next) > self.policy.clock_jump;
        if !self.timers.next().is_some_and(late) {
            return;
        }
        let unheard = self.now.since(before);
        for index in 0..self.instances.len() {
            self.instances[index].forgive(unheard);
            self.arm_instance(index);
        }
    }

    pub(super) fn expire(&mut self) {
        let now = self.now;
        // An event may have moved an instance's deadline before it is looked at.
        for index in 0..self.instances.len() {
            self.arm_instance(index);
        }
        for owner in self.timers.take_due(now) {
            match owner {
                Owner::Shutdown => self.shutdown_due(),
                Owner::Instance(instance) => self.instance_due(instance.0 as usize),
                Owner::Request(request) => self.request_due(request),
            }
        }
    }

    fn request_due(&mut self, id: RequestId) {
        let now = self.now;
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            self.refuse(id, Denied::DeadlineExceeded);
            return;
        }
        if !request.has_started() && request.queue_deadline <= now {
            let waited = now.since(request.received);
            self.refuse(id, Denied::QueueTimeout { waited });
            return;
        }
        if matches!(request.phase, Phase::Pausing { until } if until <= now) {
            request.phase = Phase::Queued;
            self.queue.set_place(id, Place::PromptThread);
        }
        self.arm_request(id);
    }

    fn instance_due(&mut self, index: usize) {
        let now = self.now;
        let place = &mut self.instances[index];
        if place.refuses_until.is_some_and(|until| until <= now) {
            place.refuses_until = None;
        }
        let prompt_thread = place.prompt_thread_stalled_at(&self.policy);
        match &place.state {
            State::Ready { .. } if prompt_thread.is_some_and(|at| at <= now) => {
                self.terminate(index, Why::Stalled);
            }
            State::Spawning { connect_by: at }
            | State::Loading { stalled_at: at, .. }
            | State::Warming { stalled_at: at, .. }
                if *at <= now =>
            {
                self.terminate(index, Why::SlowStart);
            }
            State::Ready { liveness }
                if liveness
                    .stalled_at(&self.policy)
                    .is_some_and(|at| at <= now) =>
            {
                self.terminate(index, Why::Stalled);
            }
            State::Draining(draining) if draining.until() <= now => {
                let draining = *draining;
                self.draining_due(index, draining);
            }
            State::Terminating(death) => {
                let death = death.clone();
                self.death_due(index, &death);
            }
            State::Backoff { until, .. } if *until <= now => self.spawn(index),
            State::Quarantined {
                until: Some(until), ..
            } if *until <= now => self.spawn(index),
            _ => {}
        }
    }

    fn draining_due(&mut self, index: usize, draining: Draining) {
        let place = &self.instances[index];
        let (instance, generation) = (place.id, place.generation);
        if matches!(draining, Draining::Emptying { .. }) && place.link_open {
            // Its requests have had their time: they go on elsewhere, from what their relays hold.
            self.act(Action::CloseLink {
                instance,
                generation,
            });
        }
        self.terminate(index, Why::Planned);
    }

    fn death_due(&mut self, index: usize, death: &Death) {
        let now = self.now;
        let is_due = |at: Option<Tick>| at.is_some_and(|at| at <= now);
        if is_due(death.close_at) {
            let place = &mut self.instances[index];
            let (instance, generation) = (place.id, place.generation);
            if let State::Terminating(death) = &mut place.state {
                death.close_at = None;
            }
            self.act(Action::CloseLink {
                instance,
                generation,
            });
        }
        if is_due(death.judge_at) {
            if let State::Terminating(death) = &mut self.instances[index].state {
                death.judge_at = None;
            }
            self.release_unjudged(index);
        }
        if is_due(death.kill_at) {
            self.kill(index);
        }
    }

    fn shutdown_due(&mut self) {
        match self.shutdown {
            Shutdown::Draining { .. } => self.leave_now(),
            Shutdown::Leaving { .. } => self.leave_for_good(),
            Shutdown::No | Shutdown::Left => {}
        }
    }

    pub(super) fn arm_request(&mut self, id: RequestId) {
        let at = self.requests.get(&id).and_then(Request::next_deadline);
        self.timers.set(Owner::Request(id), at);
    }

    pub(super) fn arm_instance(&mut self, index: usize) {
        let place = &self.instances[index];
        let at = place.next_deadline(&self.policy, self.now);
        self.timers.set(Owner::Instance(place.id), at);
    }
}
