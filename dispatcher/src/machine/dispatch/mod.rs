//! The machine's front: an event in, actions out, and when to be called again.

mod deadlines;
mod deaths;
mod invariants;
mod lifecycle;
mod operations;
mod placement;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proto::{Generation, InstanceId, RequestId};

use super::action::Action;
use super::admission::{Quarantine, ServiceRate};
use super::event::{Event, MemoryPressure, WorkerFacts};
use super::instance::{Instance, State};
use super::measurement::Measurement;
use super::policy::Policy;
use super::queue::Queue;
use super::request::Request;
use super::restart::Jitter;
use super::schedule::Prefixes;
use super::snapshot::Counters;
use super::tick::Tick;
use super::timers::Timers;

/// The whole control plane. Events in, actions out; it reads no clock and does no I/O.
#[derive(Debug)]
pub struct Dispatch {
    pub(super) policy: Policy,
    pub(super) now: Tick,
    jitter: Jitter,
    pub(super) instances: Vec<Instance>,
    pub(super) requests: BTreeMap<RequestId, Request>,
    /// Requests that ended while a worker still holds a seat for them.
    lingering: BTreeMap<RequestId, InstanceId>,
    pub(super) queue: Queue,
    /// An instance that is being emptied for a request that must run alone.
    reserved: Option<(InstanceId, RequestId)>,
    quarantine: Quarantine,
    prefixes: Prefixes,
    pub(super) rate: ServiceRate,
    timers: Timers,
    actions: VecDeque<Action>,
    pub(super) counters: Counters,
    pub(super) memory: MemoryPressure,
    pub(super) shutdown: Shutdown,
    rollout: Rollout,
    /// Of the worker that became Ready last: what an arrival is judged by.
    pub(super) facts: Option<WorkerFacts>,
    next_sequence: u64,
    /// An instance's fate changed so that a stream may have lost its last place to go on.
    check_stranded: bool,
}

/// How far the dispatcher's own end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shutdown {
    /// Not asked for.
    No,
    /// Nothing is admitted; what was accepted may end until then.
    Draining { until: Tick },
    /// All requests have ended and the workers are told to go; afterwards nobody waits for them.
    Leaving { give_up_at: Tick },
    /// `Action::Stopped` was given.
    Left,
}

/// A rolling replacement: one instance at a time.
#[derive(Debug, Default)]
struct Rollout {
    /// Whose worker of this generation is still to be replaced.
    waiting: BTreeMap<InstanceId, Generation>,
    /// Who is being replaced, until its next worker is Ready.
    current: Option<InstanceId>,
}

impl Dispatch {
    /// A machine whose first actions spawn a worker for each instance. `seed` spreads the backoff
    /// pauses; nothing else is random.
    ///
    /// # Panics
    ///
    /// Where the policy contradicts itself; see [`Policy::check`].
    #[must_use]
    pub fn new(policy: Policy, seed: u64, now: Tick) -> Self {
        if let Err(contradiction) = policy.check() {
            panic!("the policy contradicts itself: {contradiction}");
        }
        let instances = (0..policy.instances).map(|id| Instance::new(InstanceId(id)));
        let mut machine = Self {
            now,
            jitter: Jitter::new(seed),
            instances: instances.collect(),
            requests: BTreeMap::new(),
            lingering: BTreeMap::new(),
            queue: Queue::new(policy.priority_aging, policy.key_in_flight_max),
            reserved: None,
            quarantine: Quarantine::default(),
            prefixes: Prefixes::default(),
            rate: ServiceRate::default(),
            timers: Timers::default(),
            actions: VecDeque::new(),
            counters: Counters::default(),
            memory: MemoryPressure::None,
            shutdown: Shutdown::No,
            rollout: Rollout::default(),
            facts: None,
            next_sequence: 0,
            check_stranded: false,
            policy,
        };
        for index in 0..machine.instances.len() {
            machine.spawn(index);
        }
        machine.turn();
        machine
    }

    /// Takes in one thing that happened at `now`. Time that runs backwards is read as standing still.
    pub fn handle(&mut self, event: Event, now: Tick) {
        let before = self.now;
        self.now = before.max(now);
        if self.shutdown != Shutdown::Left {
            self.forgive_lateness(before);
            self.apply(event);
            self.observe_work();
            self.expire();
            self.turn();
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
    }

    /// The next thing to do, oldest first. To be drained after each [`Dispatch::handle`].
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Event::DeadlineReached`] is due; `None`: nothing waits for time.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        self.timers.next()
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Arrived(arrival) => self.arrived(&arrival),
            Event::ClientGone { request, cause } => self.client_gone(request, cause),
            Event::Tokenised {
                request,
                instance,
                generation,
                outcome,
            } => match self.current(instance, generation) {
                Some(index) => self.tokenised(request, index, outcome),
                None => self.stale(),
            },
            Event::Started {
                request,
                attempt,
                cached_tokens,
            } => self.started(request, attempt, cached_tokens),
            Event::FirstToken { request, attempt } => self.first_token(request, attempt),
            Event::Finished {
                request,
                attempt,
                reason,
                tokens,
            } => self.finished(request, attempt, reason, tokens),
            Event::CancelDone { request, attempt } => self.cancel_done(request, attempt),
            Event::RequestFailed {
                request,
                attempt,
                error,
            } => self.request_failed(request, attempt, error),
            Event::Drain => self.drain(),
            Event::Stop => self.stop(),
            Event::Reload => self.reload(),
            Event::Memory(pressure) => self.memory(pressure),
            Event::DeadlineReached => {}
            event => self.apply_to_worker(event),
        }
    }

    fn apply_to_worker(&mut self, event: Event) {
        let (instance, generation) = match &event {
            Event::Spawned {
                instance,
                generation,
            }
            | Event::SpawnFailed {
                instance,
                generation,
                ..
            }
            | Event::Connected {
                instance,
                generation,
            }
            | Event::LoadProgress {
                instance,
                generation,
                ..
            }
            | Event::WarmProgress {
                instance,
                generation,
                ..
            }
            | Event::Ready {
                instance,
                generation,
                ..
            }
            | Event::Progress {
                instance,
                generation,
                ..
            }
            | Event::Drained {
                instance,
                generation,
            }
            | Event::AttemptEnded {
                instance,
                generation,
                ..
            }
            | Event::Exited {
                instance,
                generation,
                ..
            } => (*instance, *generation),
            _ => return,
        };
        let Some(index) = self.current(instance, generation) else {
            self.stale();
            return;
        };
        match event {
            Event::SpawnFailed { permanent, .. } => self.spawn_failed(index, permanent),
            Event::Connected { .. } => self.connected(index),
            Event::LoadProgress { permille, .. } => self.load_progress(index, permille),
            Event::WarmProgress { done, .. } => self.warm_progress(index, done),
            Event::Ready { facts, .. } => self.ready(index, facts),
            Event::Progress {
                pulse,
                longest_step,
                ..
            } => self.progress(index, pulse, longest_step),
            Event::AttemptEnded { accepted, .. } => self.link_ended(index, &accepted),
            Event::Exited { status, .. } => self.exited(index, status),
            // A process exists, or says that it is about to leave: what follows is what counts.
            _ => {}
        }
    }

    /// What follows from the state alone, whatever happened.
    fn turn(&mut self) {
        self.advance_rollout();
        if matches!(self.shutdown, Shutdown::No | Shutdown::Draining { .. }) {
            self.fail_stranded();
            self.place_waiting();
            self.measure_waiting();
        }
        self.ask_emptied_to_drain();
        self.advance_shutdown();
        self.observe_work();
        for index in 0..self.instances.len() {
            self.arm_instance(index);
        }
    }

    /// The place of a worker that may speak: this generation, and not known to be gone.
    fn current(&self, instance: InstanceId, generation: Generation) -> Option<usize> {
        let index = instance.0 as usize;
        let place = self.instances.get(index)?;
        (place.generation == generation && place.has_process()).then_some(index)
    }

    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn record(&mut self, measurement: Measurement) {
        self.act(Action::Record(measurement));
    }

    fn stale(&mut self) {
        self.counters.stale += 1;
        self.record(Measurement::Stale);
    }

    /// Moves an instance into a state and says so.
    fn enter(&mut self, index: usize, state: State) {
        let place = &mut self.instances[index];
        let (before, after) = (place.state.word(), state.word());
        place.state = state;
        let (instance, generation) = (place.id, place.generation);
        if !place.is_ready()
            && self
                .reserved
                .is_some_and(|(reserved, _)| reserved == instance)
        {
            self.reserved = None;
        }
        if before != after {
            self.record(Measurement::Instance {
                instance,
                generation,
                state: after,
            });
        }
    }

    /// Tells each engine's liveness whether work is pending: seats, unanswered cancels included.
    fn observe_work(&mut self) {
        for place in &mut self.instances {
            let pending = !place.seats.is_empty();
            if let State::Ready { liveness } = &mut place.state {
                liveness.set_pending(pending, self.now);
            }
        }
    }

    pub(super) fn slots_ready(&self) -> u32 {
        let ready = self.instances.iter().filter(|place| place.is_ready());
        ready.map(Instance::slots).fold(0, u32::saturating_add)
    }

    pub(super) fn retry_after(&self, depth: u64) -> Duration {
        let start_up = self.facts.map(|facts| facts.start_up);
        self.rate.retry_after(depth, self.slots_ready(), start_up)
    }
}
