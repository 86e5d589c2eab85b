//! The fake world around the machine: simulated time, what happens when, and the driver's part.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use dispatcher::machine::event::{CancelCause, Event, ExitStatus, MemoryPressure};
use dispatcher::machine::{Action, Dispatch, Outcome, Policy, Tick};
use proto::RequestId;

use crate::client::Client;
use crate::engine::Order;
use crate::fault::{Dice, Faults};
use crate::link::{Frame, Link};
use crate::oracle::{Oracle, WorkerId, settling_time};
use crate::process::Worker;

/// Of every worker, in every model.
pub(crate) const CONTEXT_TOKENS: u32 = 400;
const EVENTS_MAX: u64 = 400_000;
/// A turn of the driver is no longer than this.
const TURN_MAX: Duration = Duration::from_millis(1);
pub(crate) const SIGKILL: i32 = 9;

#[derive(Clone, Debug)]
pub(crate) enum Happening {
    Arrive(RequestId),
    Leave(RequestId, CancelCause),
    Tell(Event),
    Frame(WorkerId, Frame),
    Order(WorkerId, Order),
    Step(WorkerId),
    StartUp(WorkerId, u32),
    Reap(WorkerId, ExitStatus),
    Operator(Event),
    Jump(Duration),
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) faults: Faults,
    pub(crate) policy: Policy,
    pub(crate) now: Tick,
    pub(crate) machine: Dispatch,
    pub(crate) oracle: Oracle,
    pub(crate) schedule: BTreeMap<(Tick, u64), Happening>,
    pub(crate) sequence: u64,
    /// Actions of the driver's turn that goes on.
    pub(crate) undone: VecDeque<Action>,
    pub(crate) workers: BTreeMap<WorkerId, Worker>,
    pub(crate) clients: BTreeMap<RequestId, Client>,
    pub(crate) arrived: BTreeSet<RequestId>,
    /// The model that a worker spawned now will load.
    pub(crate) model: u8,
    pub(crate) calm_at: Tick,
    /// The dispatcher, or the computer, slept until here.
    pub(crate) slept_until: Tick,
    pub(crate) events: u64,
    /// A number over everything that happened, to compare replays by.
    pub(crate) trail: u64,
    pub(crate) trace: bool,
}

impl World {
    pub(crate) fn new(
        seed: u64,
        faults: Faults,
        policy: Policy,
        mut dice: Dice,
        trace: bool,
    ) -> Self {
        let now = Tick::from_micros(dice.between(0, 1_000_000));
        let calm_at = now.after(dice.millis(2_000, 60_000));
        let machine = Dispatch::new(policy.clone(), seed, now);
        let mut world = Self {
            dice,
            faults,
            oracle: Oracle::new(policy.clone()),
            policy,
            now,
            machine,
            schedule: BTreeMap::new(),
            sequence: 0,
            undone: VecDeque::new(),
            workers: BTreeMap::new(),
            clients: BTreeMap::new(),
            arrived: BTreeSet::new(),
            model: 0,
            calm_at,
            slept_until: now,
            events: 0,
            trail: 0,
            trace,
        };
        world.plan_clients();
        world.plan_occasions();
        world.obey();
        world
    }

    pub(crate) fn span(&self) -> u64 {
        u64::try_from(self.calm_at.since(self.now).as_millis()).unwrap()
    }

    pub(crate) fn plan_occasions(&mut self) {
        let span = self.span();
        for _ in 0..self.faults.clock_jumps {
            let at = self.now.after(self.dice.millis(0, span));
            let jump = self.dice.millis(1, 400_000);
            self.put(at, Happening::Jump(jump));
        }
        for _ in 0..self.faults.reloads {
            let at = self.now.after(self.dice.millis(0, span));
            self.put(at, Happening::Operator(Event::Reload));
        }
        for _ in 0..self.faults.memory_waves {
            let at = self.now.after(self.dice.millis(0, span));
            let pressure = if self.dice.chance(5000) {
                MemoryPressure::Soft
            } else {
                MemoryPressure::Hard
            };
            self.put(at, Happening::Operator(Event::Memory(pressure)));
            let at = at.after(self.dice.millis(1, 5_000));
            self.put(at, Happening::Operator(Event::Memory(MemoryPressure::None)));
        }
        if self.faults.drain_early {
            let at = self.now.after(self.dice.millis(0, span));
            self.put(at, Happening::Operator(Event::Drain));
        }
        if self.faults.stop {
            let at = self.now.after(self.dice.millis(0, span + 2_000));
            self.put(at, Happening::Operator(Event::Stop));
        }
    }

    pub(crate) fn put(&mut self, at: Tick, happening: Happening) {
        self.sequence += 1;
        self.schedule
            .insert((at.max(self.now), self.sequence), happening);
    }

    pub(crate) fn put_after(&mut self, after: Duration, happening: Happening) {
        self.put(self.now.after(after), happening);
    }

    /// Faults happen only until it calms down.
    pub(crate) fn fault(&mut self, permyriad: u64) -> bool {
        self.now < self.calm_at && self.dice.chance(permyriad)
    }

    /// Runs to the end: everything ended, then drained, then stopped.
    pub(crate) fn run(&mut self) {
        let end_by = self.calm_at.after(settling_time(&self.policy));
        let mut asked_to_drain = false;
        while !self.oracle.stopped {
            let all_arrived = self.arrived.len() == self.clients.len();
            if all_arrived && self.oracle.live() == 0 && !asked_to_drain && self.now >= self.calm_at
            {
                asked_to_drain = true;
                self.put_after(Duration::from_secs(1), Happening::Operator(Event::Drain));
            }
            if all_arrived && self.oracle.live() == 0 && self.now < self.calm_at {
                let at = self.calm_at;
                self.put(at, Happening::Operator(Event::DeadlineReached));
            }
            self.step_time();
            assert!(
                self.now < end_by,
                "with faults off, everything ends within a bound"
            );
        }
        // Who was still to come is turned away by a dispatcher that has left: there is no machine any more.
        self.oracle.check_end(self.arrived.len());
        self.check_counts();
    }

    pub(crate) fn step_time(&mut self) {
        let next = self.schedule.first_key_value().map(|((at, _), _)| *at);
        if next.is_none_or(|at| at.since(self.now) > TURN_MAX) {
            self.do_all();
        }
        let deadline = self.machine.next_deadline();
        let next = self.schedule.first_key_value().map(|((at, _), _)| *at);
        let deadline = deadline.map(|at| at.max(self.slept_until).max(self.now));
        match (next, deadline) {
            (Some(next), Some(deadline)) if next > deadline => self.wake(deadline),
            (Some(_), _) => {
                let ((at, _), happening) = self.schedule.pop_first().unwrap();
                self.now = at;
                self.happen(happening);
            }
            (None, Some(deadline)) => self.wake(deadline),
            (None, None) => panic!("something always follows until the dispatcher has left"),
        }
    }

    pub(crate) fn wake(&mut self, at: Tick) {
        // Timers are a little late at times.
        let late = if self.dice.chance(1000) {
            self.dice.micros(0, 3000)
        } else {
            Duration::ZERO
        };
        let first = self.schedule.first_key_value().map(|((at, _), _)| *at);
        self.now = at.after(late).min(first.unwrap_or(at.after(late))).max(at);
        self.tell(Event::DeadlineReached);
    }

    pub(crate) fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Arrive(request) => {
                self.arrived.insert(request);
                let mut arrival = self.clients[&request].arrival.clone();
                // The loop was busy, or another clock is a little ahead.
                let latest = self.now.as_micros() + 1000;
                let late = self.dice.between(0, 50_000);
                arrival.received = Tick::from_micros(latest.saturating_sub(late));
                self.tell(Event::Arrived(Box::new(arrival)));
            }
            Happening::Leave(request, cause) => {
                if self.oracle.is_live(request) {
                    self.tell(Event::ClientGone { request, cause });
                    let outcome = self.oracle.outcome(request).cloned();
                    assert_eq!(
                        outcome,
                        Some(Outcome::Cancelled(cause)),
                        "a client that left is cancelled at once"
                    );
                }
            }
            Happening::Tell(event) => self.tell(event),
            Happening::Frame(worker, frame) => self.read(worker, frame),
            Happening::Order(worker, order) => self.follow(worker, order),
            Happening::Step(worker) => self.step(worker),
            Happening::StartUp(worker, stage) => self.start_up(worker, stage),
            Happening::Reap(worker, status) => {
                let (instance, generation) = worker;
                self.tell(Event::Exited {
                    instance,
                    generation,
                    status,
                });
            }
            Happening::Operator(event) => {
                if event == Event::Reload && self.faults.new_model {
                    self.model = (self.model + 1) % 3;
                }
                if event == Event::Drain && self.oracle.draining {
                    return;
                }
                self.tell(event);
            }
            Happening::Jump(jump) => {
                if self.trace {
                    eprintln!(
                        "{:>12} everything sleeps for {jump:?}",
                        self.now.as_micros()
                    );
                }
                let later = std::mem::take(&mut self.schedule);
                let later = later.into_iter();
                self.schedule = later
                    .map(|((at, order), it)| ((at.after(jump), order), it))
                    .collect();
                for worker in self.workers.values_mut() {
                    worker.framed_at = worker.framed_at.after(jump);
                    worker.told_at = worker.told_at.after(jump);
                    worker.cut_at = worker.cut_at.map(|at| at.after(jump));
                    worker.last_news = worker.last_news.after(jump);
                }
                self.calm_at = self.calm_at.after(jump);
                self.slept_until = self.now.after(jump);
            }
        }
    }

    /// One event into the machine, all its actions out, everything checked.
    pub(crate) fn tell(&mut self, event: Event) {
        self.events += 1;
        assert!(self.events < EVENTS_MAX, "the world comes to rest");
        if self.trace {
            eprintln!("{:>12} {event:?}", self.now.as_micros());
        }
        let blame = match &event {
            Event::AttemptEnded {
                instance,
                generation,
                ..
            }
            | Event::Exited {
                instance,
                generation,
                ..
            } => self.workers[&(*instance, *generation)].blame,
            _ => None,
        };
        if self.oracle.stopped {
            return;
        }
        self.oracle.sees(&event, blame, self.now);
        self.machine.handle(event.clone(), self.now);
        self.machine.check_invariants();
        self.obey();
        if !self.oracle.stopped
            && self.fault(self.faults.echo)
            && !matches!(event, Event::Reload | Event::Memory(_))
        {
            // The same again, late: it must change nothing that it has changed before.
            self.echo(event);
        }
    }

    /// Tells something again that is stale by now.
    pub(crate) fn echo(&mut self, event: Event) {
        let stale = match &event {
            Event::Finished { .. } | Event::CancelDone { .. } | Event::RequestFailed { .. } => true,
            Event::ClientGone { request, .. } => !self.oracle.is_live(*request),
            Event::AttemptEnded { .. } | Event::Exited { .. } => true,
            _ => false,
        };
        if stale {
            let before = self.machine.snapshot(self.now).counters.stale;
            self.machine.handle(event, self.now);
            self.machine.check_invariants();
            let after = self.machine.snapshot(self.now).counters.stale;
            assert_eq!(before + 1, after, "what is stale is counted and dropped");
            self.obey();
        }
    }

    pub(crate) fn obey(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            if self.trace {
                eprintln!("{:>12}     {action:?}", self.now.as_micros());
            }
            self.trail = mix(self.trail, self.now.as_micros(), &action);
            self.oracle.does(&action, self.now);
            if let Action::Terminate {
                instance,
                generation,
            } = action
            {
                self.check_termination((instance, generation));
            }
            self.undone.push_back(action);
        }
        // The driver takes several events in one turn at times, before it does what they lead to.
        if !self.dice.chance(self.faults.long_turns) {
            self.do_all();
        }
    }

    pub(crate) fn do_all(&mut self) {
        while let Some(action) = self.undone.pop_front() {
            self.carry_out(action);
        }
    }

    pub(crate) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Spawn {
                instance,
                generation,
            } => self.spawn((instance, generation)),
            Action::Terminate {
                instance,
                generation,
            } => self.order((instance, generation), Order::Terminate),
            Action::Kill {
                instance,
                generation,
            } => self.kill((instance, generation)),
            Action::CloseLink {
                instance,
                generation,
            } => {
                self.fence((instance, generation));
                let after = self.dice.micros(0, 1_000_000);
                let happening = Happening::Order((instance, generation), Order::LinkGone);
                self.put_after(after, happening);
            }
            Action::SendDrain {
                instance,
                generation,
            } => self.order((instance, generation), Order::Drain),
            Action::SendTokenise {
                request,
                instance,
                generation,
            } => self.order((instance, generation), Order::Tokenise(request)),
            Action::SendGenerate {
                request,
                attempt,
                instance,
                generation,
            } => {
                let client = self.clients.get_mut(&request).unwrap();
                assert!(attempt >= client.attempt, "attempts only grow");
                client.attempt = attempt;
                let worker = self.workers.get_mut(&(instance, generation)).unwrap();
                if worker.link == Link::Open {
                    worker.session.insert(request, attempt);
                    self.order((instance, generation), Order::Generate(request, attempt));
                }
            }
            Action::SendCancel {
                request,
                attempt,
                instance,
                generation,
            } => self.order((instance, generation), Order::Cancel(request, attempt)),
            Action::End { request, outcome } => self.end(request, outcome),
            Action::Record(_) | Action::Stopped => {}
        }
    }

    pub(crate) fn order(&mut self, worker: WorkerId, order: Order) {
        // Fixed, so that orders cannot overtake each other.
        self.put_after(Duration::from_micros(200), Happening::Order(worker, order));
    }

    /// The machine's own totals agree with what the clients were told.
    pub(crate) fn check_counts(&self) {
        let snapshot = self.machine.snapshot(self.now);
        let counters = snapshot.counters;
        let ended = counters.completed + counters.failed + counters.cancelled + counters.denied;
        assert_eq!(ended, self.arrived.len() as u64, "the counters add up");
        assert_eq!(
            counters.completed, self.oracle.completed,
            "the counters add up"
        );
        if self.faults.are_harmless() {
            for (request, outcome) in self.oracle.outcomes() {
                let fine = matches!(outcome, Outcome::Completed { .. } | Outcome::Denied(_));
                assert!(
                    fine,
                    "with faults off, what is let in completes: {request} {outcome:?}"
                );
            }
        }
        if self.faults.only_outsiders_kill() {
            let failed = self.oracle.outcomes().find(|(_, outcome)| {
                let outcome = format!("{outcome:?}");
                outcome.contains("WorkerDied")
            });
            if let Some((request, outcome)) = failed {
                // Only beyond the suspicion bound; the oracle has checked that at the end itself.
                assert!(self.faults.external > 0, "{request} {outcome:?}");
            }
        }
    }
}

fn mix(trail: u64, at: u64, action: &Action) -> u64 {
    let words = format!("{action:?}");
    let start = trail ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    words.bytes().fold(start, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
