//! The shadow model: what the clients and the workers were promised, checked from the outside.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dispatcher::machine::event::{Arrival, Event, KeyId, MemoryPressure, ModelHash};
use dispatcher::machine::measurement::{ExitCause, Measurement};
use dispatcher::machine::{Action, Denied, Failure, Outcome, Policy, QueueBound, Tick};
use proto::{Attempt, Generation, InstanceId, RequestId};

pub(crate) type WorkerId = (InstanceId, Generation);

/// Who is to blame for a death. The world knows it, the machine has to find it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    Engine,
    Outsider,
}

/// A request that was let in and has not ended.
#[derive(Debug)]
struct Live {
    key: KeyId,
    fingerprint: u64,
    /// When the front had it, and when the machine was told.
    received: Tick,
    told: Tick,
    attempt: Attempt,
    started: bool,
    seat: Option<WorkerId>,
    /// Whose tokens the stream's are.
    model: Option<ModelHash>,
    /// Whose ids the prompt's are; `None` where the client sent them itself.
    measured_by: Option<ModelHash>,
    engine_deaths: u32,
    outside_deaths: u32,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    slots: usize,
    model: ModelHash,
}

#[derive(Debug)]
pub(crate) struct Oracle {
    policy: Policy,
    live: BTreeMap<RequestId, Live>,
    ended: BTreeMap<RequestId, Outcome>,
    recorded: BTreeSet<RequestId>,
    /// Seats as the workers' side sees them: from the assignment until the attempt's end was told.
    seats: BTreeMap<WorkerId, BTreeMap<RequestId, Attempt>>,
    measuring: BTreeMap<WorkerId, BTreeSet<RequestId>>,
    /// Requests that were taken from a worker which had done nothing wrong so far.
    parted: BTreeMap<WorkerId, Vec<RequestId>>,
    facts: BTreeMap<WorkerId, Facts>,
    newest: BTreeMap<InstanceId, Generation>,
    /// Places whose process has not been reaped.
    taken: BTreeSet<InstanceId>,
    /// Engines' deaths as the machine recorded them, since the last reload.
    crashes: BTreeMap<InstanceId, Vec<Tick>>,
    /// Engines that a prompt took with it.
    killed_by: BTreeMap<u64, u32>,
    pub(crate) draining: bool,
    stopping: bool,
    pub(crate) stopped: bool,
    memory: MemoryPressure,
    pub(crate) completed: u64,
    /// What the run has come across, by the words of the enums.
    pub(crate) seen: BTreeSet<String>,
}

impl Oracle {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            policy,
            live: BTreeMap::new(),
            ended: BTreeMap::new(),
            recorded: BTreeSet::new(),
            seats: BTreeMap::new(),
            measuring: BTreeMap::new(),
            parted: BTreeMap::new(),
            facts: BTreeMap::new(),
            newest: BTreeMap::new(),
            taken: BTreeSet::new(),
            crashes: BTreeMap::new(),
            killed_by: BTreeMap::new(),
            draining: false,
            stopping: false,
            stopped: false,
            memory: MemoryPressure::None,
            completed: 0,
            seen: BTreeSet::new(),
        }
    }

    /// A prompt took an engine with it.
    pub(crate) fn poisoned(&mut self, fingerprint: u64) {
        let engines = self.killed_by.entry(fingerprint).or_default();
        *engines += 1;
        assert!(
            *engines <= self.policy.engine_deaths_max,
            "a poisonous prompt takes at most two engines"
        );
    }

    pub(crate) fn sees(&mut self, event: &Event, blame: Option<Blame>, now: Tick) {
        match event {
            Event::Arrived(arrival) => self.arrived(arrival, now),
            Event::Ready {
                instance,
                generation,
                facts,
            } => {
                let slots = usize::try_from(facts.slots).unwrap();
                let model = facts.model;
                self.facts
                    .insert((*instance, *generation), Facts { slots, model });
            }
            Event::Tokenised {
                request,
                instance,
                generation,
                ..
            } => {
                if let Some(measuring) = self.measuring.get_mut(&(*instance, *generation)) {
                    measuring.remove(request);
                }
                let facts = self.facts.get(&(*instance, *generation));
                if let (Some(live), Some(facts)) = (self.live.get_mut(request), facts) {
                    live.measured_by = Some(facts.model);
                }
            }
            Event::Finished {
                request, attempt, ..
            }
            | Event::CancelDone { request, attempt }
            | Event::RequestFailed {
                request, attempt, ..
            } => self.seat_given_up(*request, *attempt),
            Event::AttemptEnded {
                instance,
                generation,
                ..
            } => self.link_ended((*instance, *generation), blame),
            Event::Exited {
                instance,
                generation,
                ..
            } => {
                self.taken.remove(instance);
                let batch = self.parted.remove(&(*instance, *generation));
                if blame == Some(Blame::Engine) {
                    self.blame_for(batch.unwrap_or_default(), Blame::Engine);
                }
            }
            Event::SpawnFailed { instance, .. } => {
                self.taken.remove(instance);
            }
            Event::Drain => self.draining = true,
            Event::Stop => {
                self.draining = true;
                self.stopping = true;
            }
            Event::Reload => self.crashes.clear(),
            Event::Memory(pressure) => self.memory = *pressure,
            _ => {}
        }
    }

    fn arrived(&mut self, arrival: &Arrival, now: Tick) {
        let live = Live {
            key: arrival.key,
            fingerprint: arrival.fingerprint.0,
            received: arrival.received.min(now),
            told: now,
            attempt: Attempt(0),
            started: false,
            seat: None,
            model: None,
            measured_by: None,
            engine_deaths: 0,
            outside_deaths: 0,
        };
        self.live.insert(arrival.request, live);
    }

    fn seat_given_up(&mut self, request: RequestId, attempt: Attempt) {
        for seats in self.seats.values_mut() {
            if seats.get(&request) == Some(&attempt) {
                seats.remove(&request);
            }
        }
        if let Some(live) = self.live.get_mut(&request)
            && live.attempt == attempt
        {
            live.seat = None;
        }
    }

    fn link_ended(&mut self, worker: WorkerId, blame: Option<Blame>) {
        let seats = self.seats.remove(&worker).unwrap_or_default();
        let measuring = self.measuring.remove(&worker).unwrap_or_default();
        let batch: Vec<_> = seats.into_keys().chain(measuring).collect();
        for request in &batch {
            if let Some(live) = self.live.get_mut(request) {
                live.seat = None;
            }
        }
        match blame {
            Some(blame) => self.blame_for(batch, blame),
            None => {
                self.parted.insert(worker, batch);
            }
        }
    }

    fn blame_for(&mut self, batch: Vec<RequestId>, blame: Blame) {
        for request in batch {
            if let Some(live) = self.live.get_mut(&request) {
                match blame {
                    Blame::Engine => live.engine_deaths += 1,
                    Blame::Outsider => live.outside_deaths += 1,
                }
            }
        }
    }

    pub(crate) fn does(&mut self, action: &Action, now: Tick) {
        assert!(!self.stopped, "nothing follows Stopped");
        self.note(action);
        match action {
            Action::Spawn {
                instance,
                generation,
            } => {
                assert!(
                    !self.stopping,
                    "no worker is spawned once the dispatcher stops"
                );
                assert!(
                    self.taken.insert(*instance),
                    "a place is filled only once it is free"
                );
                let before = self.newest.insert(*instance, *generation);
                let follows = before.unwrap_or_default().next();
                assert_eq!(follows, *generation, "each spawn takes the next generation");
            }
            Action::Terminate {
                instance,
                generation,
            }
            | Action::Kill {
                instance,
                generation,
            }
            | Action::CloseLink {
                instance,
                generation,
            }
            | Action::SendDrain {
                instance,
                generation,
            } => {
                let newest = self.newest.get(instance);
                assert_eq!(
                    newest,
                    Some(generation),
                    "only the newest worker is told anything"
                );
            }
            Action::SendTokenise {
                request,
                instance,
                generation,
            } => self.tokenises(*request, (*instance, *generation)),
            Action::SendGenerate {
                request,
                attempt,
                instance,
                generation,
            } => self.generates(*request, *attempt, (*instance, *generation), now),
            Action::SendCancel {
                request,
                attempt,
                instance,
                generation,
            } => {
                let seats = &self.seats[&(*instance, *generation)];
                assert_eq!(
                    seats.get(request),
                    Some(attempt),
                    "a cancel goes to who has the attempt"
                );
            }
            Action::End { request, outcome } => self.ends(*request, outcome, now),
            Action::Record(measurement) => self.records(measurement, now),
            Action::Stopped => {
                assert!(self.draining, "the dispatcher leaves only when asked");
                assert!(
                    self.live.is_empty(),
                    "every request has ended before the dispatcher leaves"
                );
                self.stopped = true;
            }
        }
    }

    /// Remembers which kinds of outcomes, exits and actions came up.
    fn note(&mut self, action: &Action) {
        let words = match action {
            Action::End { outcome, .. } => match outcome {
                Outcome::Denied(Denied::QueueFull { bound, .. }) => format!("{bound:?}"),
                Outcome::Denied(denied) => format!("{denied:?}"),
                Outcome::Failed(failure) => format!("{failure:?}"),
                Outcome::Completed { reason } => format!("{reason:?}"),
                Outcome::Cancelled(cause) => format!("{cause:?}"),
            },
            Action::Record(Measurement::WorkerExit { cause, .. }) => format!("{cause:?}"),
            Action::Record(Measurement::Instance { state, .. }) => (*state).to_owned(),
            Action::Record(measurement) => format!("{measurement:?}"),
            action => format!("{action:?}"),
        };
        let end = words.find([' ', '(']).unwrap_or(words.len());
        if !self.seen.contains(&words[..end]) {
            self.seen.insert(words[..end].to_owned());
        }
    }

    fn tokenises(&mut self, request: RequestId, worker: WorkerId) {
        assert!(
            self.facts.contains_key(&worker),
            "only a Ready worker counts prompts"
        );
        let live = &self.live[&request];
        assert!(live.seat.is_none(), "a request in a slot is not measured");
        let measuring = self.measuring.entry(worker).or_default();
        measuring.insert(request);
        assert!(measuring.len() <= 16, "a prompt thread's queue is bounded");
    }

    fn generates(&mut self, request: RequestId, attempt: Attempt, worker: WorkerId, now: Tick) {
        assert_eq!(
            self.newest[&worker.0], worker.1,
            "work goes to the newest generation"
        );
        let facts = self.facts[&worker];
        let live = self.live.get_mut(&request);
        let live = live.expect("only a request that was let in and has not ended is started");
        assert_eq!(
            attempt,
            live.attempt.next(),
            "each assignment takes the next attempt"
        );
        assert_eq!(live.seat, None, "a request has one seat at a time");
        if !live.started {
            let waited = now.since(live.received);
            assert!(
                waited < self.policy.queue_timeout,
                "what waited too long never starts"
            );
            assert_eq!(
                self.memory,
                MemoryPressure::None,
                "short memory keeps new work out of the slots"
            );
        }
        if let Some(model) = live.model {
            assert_eq!(model, facts.model, "a stream goes on with its own model");
        }
        let killed_before = live.engine_deaths > 0;
        let resumed = live.model.is_some();
        if let Some(model) = live.measured_by {
            assert_eq!(
                model, facts.model,
                "a prompt's ids are of the model that gets them"
            );
        }
        live.attempt = attempt;
        live.started = true;
        live.seat = Some(worker);
        let key = live.key;
        let seats = self.seats.entry(worker).or_default();
        let before = seats.insert(request, attempt);
        assert_eq!(before, None, "a request's older attempt has left its seat");
        if killed_before {
            self.seen.insert("alone".to_owned());
        }
        if resumed {
            self.seen.insert("resumed".to_owned());
        }
        assert!(seats.len() <= facts.slots, "in-flight <= slots");
        if let Some(cap) = self.policy.key_in_flight_max {
            let running = self
                .live
                .values()
                .filter(|live| live.key == key && live.seat.is_some());
            assert!(
                running.count() <= usize::try_from(cap).unwrap(),
                "a key's cap holds"
            );
        }
    }

    /// The relay accepted a token of this model.
    pub(crate) fn streams(&mut self, request: RequestId, model: ModelHash) {
        if let Some(live) = self.live.get_mut(&request) {
            let before = *live.model.get_or_insert(model);
            assert_eq!(before, model, "a stream's tokens are all one model's");
        }
    }

    fn ends(&mut self, request: RequestId, outcome: &Outcome, now: Tick) {
        let waiting = self
            .live
            .values()
            .filter(|live| live.seat.is_none())
            .count()
            - 1;
        let live = self.live.remove(&request);
        let live = live.expect("only a request that was let in and has not ended can end");
        let before = self.ended.insert(request, outcome.clone());
        assert_eq!(before, None, "exactly one terminal event");
        let policy = &self.policy;
        match outcome {
            Outcome::Completed { .. } => {
                assert!(live.started, "what completes has started");
                self.completed += 1;
            }
            Outcome::Cancelled(_) => {}
            Outcome::Denied(denied) => {
                assert!(!live.started, "what had a slot fails, it is not denied");
                match denied {
                    Denied::QueueFull { bound, .. } => {
                        assert_eq!(live.told, now, "a full queue refuses at once");
                        let limit = usize::try_from(policy.queue_entries_max).unwrap();
                        if *bound == QueueBound::Entries {
                            assert!(waiting >= limit, "a queue with room for an entry takes it");
                        }
                    }
                    Denied::Draining { .. } => assert!(self.draining),
                    Denied::OutOfMemory { .. } => assert_eq!(self.memory, MemoryPressure::Hard),
                    Denied::Quarantined { .. } => {
                        let killed = self.killed_by.get(&live.fingerprint).copied().unwrap_or(0);
                        assert!(killed > 0, "only what killed is quarantined");
                    }
                    _ => {}
                }
            }
            Outcome::Failed(failure) => {
                // Before its first slot a request can fail in one way: its prompt killed who counted it.
                let died = matches!(failure, Failure::WorkerDied { .. });
                assert!(
                    live.started || died,
                    "what never had a slot is denied, it does not fail"
                );
                match failure {
                    Failure::WorkerDied { .. } => {
                        let suspected = live.outside_deaths.saturating_sub(policy.suspect_after);
                        let counted = live.engine_deaths + suspected;
                        assert!(
                            counted >= policy.engine_deaths_max,
                            "deaths from outside fail nothing, and one engine's death fails nothing: {live:?}"
                        );
                    }
                    Failure::Draining => assert!(self.draining),
                    _ => {}
                }
            }
        }
    }

    fn records(&mut self, measurement: &Measurement, now: Tick) {
        match measurement {
            Measurement::Request(record) => {
                assert!(self.recorded.insert(record.request), "one record a request");
                let outcome = self.ended.get(&record.request);
                assert_eq!(
                    outcome,
                    Some(&record.outcome),
                    "the record says what the client was told"
                );
                let assigned = record.assigned.unwrap_or(record.received);
                let first = record.first_token.unwrap_or(assigned);
                let ordered =
                    record.received <= assigned && assigned <= first && first <= record.ended;
                assert!(ordered, "received <= assigned <= first token <= ended");
            }
            Measurement::WorkerExit {
                instance, cause, ..
            } if *cause == ExitCause::Engine => {
                let crashes = self.crashes.entry(*instance).or_default();
                crashes.push(now);
                crashes.retain(|crash| now.since(*crash) <= self.policy.crash_window);
                let crashes = u32::try_from(crashes.len()).unwrap();
                // One more is the crash that parks; then one trial, parked again at its first crash.
                assert!(
                    crashes <= self.policy.crashes_max + 2,
                    "restarts are bounded: {crashes} crashes in the window"
                );
            }
            _ => {}
        }
    }

    pub(crate) fn is_live(&self, request: RequestId) -> bool {
        self.live.contains_key(&request)
    }

    pub(crate) fn live(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn outcome(&self, request: RequestId) -> Option<&Outcome> {
        self.ended.get(&request)
    }

    pub(crate) fn outcomes(&self) -> impl Iterator<Item = (&RequestId, &Outcome)> {
        self.ended.iter()
    }

    /// Whether work is pending at a worker: the time from which its silence counts.
    pub(crate) fn has_work(&self, worker: WorkerId) -> bool {
        self.seats
            .get(&worker)
            .is_some_and(|seats| !seats.is_empty())
    }

    /// Nothing is left over at the end.
    pub(crate) fn check_end(&self, arrived: usize) {
        assert_eq!(self.live(), 0, "every request has ended");
        assert_eq!(
            self.ended.len(),
            arrived,
            "accepted = completed + failed + cancelled + denied"
        );
        assert_eq!(self.recorded.len(), arrived, "each request has its record");
        assert!(self.stopped, "a drained dispatcher leaves");
    }
}

/// Longest time in which everything must have ended once nothing goes wrong any more: a stall and
/// its kill, a parked instance's return, the queue's time-out, and the work itself.
pub(crate) fn settling_time(policy: &Policy) -> Duration {
    policy.stall_max
        + policy.measure_stall
        + policy.load_stall * 4
        + policy.worker_grace * 4
        + policy.park_max
        + policy.queue_timeout
        + Duration::from_secs(4000)
}
