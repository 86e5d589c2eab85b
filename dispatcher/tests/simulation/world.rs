//! A fake fleet and its clients: processes, links and relays as the contract has them, on simulated time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dispatcher::machine::event::{
    Accepted, Arrival, AttemptError, CancelCause, Event, ExitStatus, Fingerprint, KeyId,
    MemoryPressure, ModelHash, Priority, TokenisedOutcome, WorkerFacts,
};
use dispatcher::machine::{Action, Dispatch, Failure, Outcome, Policy, Tick};
use proto::{Attempt, FinishReason, RequestId};

use crate::fault::{Dice, Faults};
use crate::oracle::{Blame, Oracle, WorkerId, settling_time};

const CONTEXT_TOKENS: u32 = 400;
const EVENTS_MAX: u64 = 400_000;
/// Added to a request's number when its client sends it again.
const RETRIES_FROM: u64 = 1_000;
const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;
const SIGSEGV: i32 = 11;
const SIGTERM: i32 = 15;

/// What a client wants, and what its relay has.
#[derive(Debug)]
struct Client {
    arrival: Arrival,
    prompt_tokens: u32,
    /// Where the model ends the stream by itself.
    natural_end: u32,
    poison: bool,
    bad_template: bool,
    attempt: Attempt,
    tokens: Vec<u64>,
    ended: Option<Outcome>,
    /// The relay took the end together with the last token.
    end_relayed: bool,
}

#[derive(Clone, Debug)]
struct Row {
    request: RequestId,
    attempt: Attempt,
    first_index: u32,
    tokens: Vec<u64>,
    end: Option<RowEnd>,
}

#[derive(Clone, Debug)]
enum RowEnd {
    Finished(FinishReason),
    Cancelled,
    Failed,
}

impl Client {
    fn new(arrival: Arrival, dice: &mut Dice, poison: bool) -> Self {
        Self {
            prompt_tokens: u32::try_from(arrival.bytes / 4).unwrap(),
            arrival,
            natural_end: dice.between_u32(1, 80),
            poison,
            bad_template: dice.chance(200),
            attempt: Attempt(0),
            tokens: Vec::new(),
            ended: None,
            end_relayed: false,
        }
    }
}

/// What a worker writes on its link.
#[derive(Clone, Debug)]
enum Frame {
    Connected,
    Loading(u32),
    Warming(u32),
    Ready,
    Tokenised(RequestId, TokenisedOutcome),
    Started(RequestId, Attempt),
    Step { rows: Vec<Row>, pulse: u64 },
    Failed(RequestId, Attempt, AttemptError),
    Drained,
    Eof,
}

/// What reaches a worker.
#[derive(Clone, Debug)]
enum Order {
    Tokenise(RequestId),
    Generate(RequestId, Attempt),
    Cancel(RequestId, Attempt),
    Drain,
    Terminate,
    LinkGone,
}

#[derive(Clone, Debug)]
enum Happening {
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
struct Run {
    attempt: Attempt,
    prefill_steps: u32,
    next_index: u32,
    cancelled: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Link {
    None,
    Open,
    Fenced,
}

#[derive(Debug)]
struct Worker {
    model: u8,
    slots: u32,
    alive: bool,
    reap_scheduled: bool,
    hung: bool,
    deaf: bool,
    slow: bool,
    draining: bool,
    link: Link,
    /// Attempts whose rows are let into relays.
    session: BTreeMap<RequestId, Attempt>,
    runs: BTreeMap<RequestId, Run>,
    stepping: bool,
    pulse: u64,
    longest_step: Duration,
    /// Frames and events of one worker keep their order.
    framed_at: Tick,
    told_at: Tick,
    /// Frames behind this moment are lost with the worker.
    cut_at: Option<Tick>,
    blame: Option<Blame>,
    last_news: Tick,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) faults: Faults,
    policy: Policy,
    now: Tick,
    machine: Dispatch,
    pub(crate) oracle: Oracle,
    schedule: BTreeMap<(Tick, u64), Happening>,
    sequence: u64,
    workers: BTreeMap<WorkerId, Worker>,
    clients: BTreeMap<RequestId, Client>,
    arrived: BTreeSet<RequestId>,
    /// The model that a worker spawned now will load.
    model: u8,
    calm_at: Tick,
    /// The dispatcher, or the computer, slept until here.
    slept_until: Tick,
    events: u64,
    /// A number over everything that happened, to compare replays by.
    pub(crate) trail: u64,
    trace: bool,
}

/// The token that a model has at this index of a stream.
fn token(request: RequestId, index: u32, model: u8) -> u64 {
    (request.0 << 32) | (u64::from(index) << 8) | u64::from(model)
}

fn model_hash(model: u8) -> ModelHash {
    ModelHash([model; 32])
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

    fn span(&self) -> u64 {
        u64::try_from(self.calm_at.since(self.now).as_millis()).unwrap()
    }

    fn plan_clients(&mut self) {
        let count = self.dice.between(1, 60);
        let keys = self.dice.between(1, 4);
        let span = self.span();
        for id in 1..=count {
            let request = RequestId(id);
            let prompt_tokens = if self.dice.chance(300) {
                CONTEXT_TOKENS + 5
            } else {
                self.dice.between_u32(1, 200)
            };
            let ids = self.dice.chance(2000);
            let bytes = u64::from(prompt_tokens) * 4;
            let priorities = [Priority::High, Priority::Normal, Priority::Low];
            let arrival = Arrival {
                request,
                key: KeyId(self.dice.between(1, keys)),
                priority: priorities[usize::try_from(self.dice.between(0, 2)).unwrap()],
                fingerprint: Fingerprint(id),
                bytes,
                prompt_bytes: if ids { 0 } else { bytes },
                prompt_tokens: ids.then_some(prompt_tokens),
                max_tokens: self.dice.chance(5000).then(|| self.dice.between_u32(1, 60)),
                deadline: self
                    .dice
                    .chance(self.faults.deadline)
                    .then(|| self.dice.millis(1, 20_000)),
                affinity: self.dice.chance(5000).then(|| self.dice.between(0, 3)),
            };
            let poison = self.dice.chance(self.faults.poison);
            let client = Client::new(arrival, &mut self.dice, poison);
            self.clients.insert(request, client);
            let at = self.now.after(self.dice.millis(0, span));
            self.put(at, Happening::Arrive(request));
            if self.dice.chance(self.faults.cancel) {
                let at = at.after(self.dice.micros(0, 5_000_000));
                self.put(at, Happening::Leave(request, CancelCause::ClientDisconnect));
            } else if self.dice.chance(self.faults.slow_reader) {
                let at = at.after(self.dice.micros(10_000, 3_000_000));
                self.put(at, Happening::Leave(request, CancelCause::SlowReader));
            }
        }
    }

    fn plan_occasions(&mut self) {
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

    fn put(&mut self, at: Tick, happening: Happening) {
        self.sequence += 1;
        self.schedule
            .insert((at.max(self.now), self.sequence), happening);
    }

    fn put_after(&mut self, after: Duration, happening: Happening) {
        self.put(self.now.after(after), happening);
    }

    /// Faults happen only until it calms down.
    fn fault(&mut self, permyriad: u64) -> bool {
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

    fn step_time(&mut self) {
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

    fn wake(&mut self, at: Tick) {
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

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Arrive(request) => {
                self.arrived.insert(request);
                let arrival = self.clients[&request].arrival.clone();
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
    fn tell(&mut self, event: Event) {
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
    fn echo(&mut self, event: Event) {
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

    fn obey(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            if self.trace {
                eprintln!("{:>12}     {action:?}", self.now.as_micros());
            }
            self.trail = mix(self.trail, self.now.as_micros(), &action);
            self.oracle.does(&action, self.now);
            self.carry_out(action);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Spawn {
                instance,
                generation,
            } => self.spawn((instance, generation)),
            Action::Terminate {
                instance,
                generation,
            } => {
                self.check_termination((instance, generation));
                self.order((instance, generation), Order::Terminate);
            }
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

    fn order(&mut self, worker: WorkerId, order: Order) {
        // Fixed, so that orders cannot overtake each other.
        self.put_after(Duration::from_micros(200), Happening::Order(worker, order));
    }

    fn end(&mut self, request: RequestId, outcome: Outcome) {
        let client = self.clients.get_mut(&request).unwrap();
        if matches!(outcome, Outcome::Completed { .. }) {
            let room = CONTEXT_TOKENS - client.prompt_tokens;
            let asked = client.arrival.max_tokens.unwrap_or(u32::MAX).min(room);
            let expected = client.natural_end.min(asked);
            let got = u32::try_from(client.tokens.len()).unwrap();
            // A new model may count one or two prompt tokens more, and then has less room.
            assert!(
                got == expected || (got < expected && expected == room),
                "a completed stream is whole: {got} of {expected} tokens"
            );
        }
        let died_of_it = matches!(outcome, Outcome::Failed(Failure::WorkerDied { .. }));
        if client.poison && request.0 < RETRIES_FROM && died_of_it {
            let mut arrival = client.arrival.clone();
            arrival.request = RequestId(request.0 + RETRIES_FROM);
            self.retry(arrival);
        }
        let client = self.clients.get_mut(&request).unwrap();
        client.ended.get_or_insert(outcome);
    }

    /// A client that was failed by its own prompt sends it again.
    fn retry(&mut self, arrival: Arrival) {
        let request = arrival.request;
        let client = Client::new(arrival, &mut self.dice, true);
        self.clients.insert(request, client);
        let after = self.dice.millis(0, 5_000);
        self.put_after(after, Happening::Arrive(request));
    }

    // ---- processes ----

    fn spawn(&mut self, worker: WorkerId) {
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

    fn start_up(&mut self, worker: WorkerId, stage: u32) {
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
    fn die(&mut self, id: WorkerId, status: ExitStatus, blame: Option<Blame>) {
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

    fn reap_after(&mut self, id: WorkerId, after: Duration, status: ExitStatus) {
        let worker = self.workers.get_mut(&id).unwrap();
        if !worker.reap_scheduled {
            worker.reap_scheduled = true;
            self.put_after(after, Happening::Reap(id, status));
        }
    }

    fn kill(&mut self, id: WorkerId) {
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
    fn check_termination(&self, id: WorkerId) {
        let worker = &self.workers[&id];
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

    // ---- links ----

    fn write(&mut self, id: WorkerId, frame: Frame) {
        let latency = self.dice.micros(20, 2000);
        let at = self.now.after(latency);
        let worker = self.workers.get_mut(&id).unwrap();
        worker.framed_at = worker.framed_at.max(at);
        let at = worker.framed_at;
        self.put(at, Happening::Frame(id, frame));
    }

    /// To the machine by way of the driver's queue, in order per worker.
    fn report(&mut self, id: WorkerId, event: Event) {
        let latency = if self.dice.chance(3000) {
            self.dice.micros(0, 1000)
        } else {
            Duration::ZERO
        };
        let at = self.now.after(latency);
        let worker = self.workers.get_mut(&id).unwrap();
        worker.told_at = worker.told_at.max(at);
        let at = worker.told_at;
        if at == self.now {
            self.tell(event);
        } else {
            self.put(at, Happening::Tell(event));
        }
    }

    fn fence(&mut self, id: WorkerId) {
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.link != Link::Open {
            return;
        }
        worker.link = Link::Fenced;
        let session = std::mem::take(&mut worker.session);
        let mut accepted = Vec::new();
        for (request, attempt) in session {
            let client = self.clients.get_mut(&request).unwrap();
            if client.attempt == attempt {
                client.attempt = attempt.next();
            }
            accepted.push(Accepted {
                request,
                attempt,
                tokens: u32::try_from(client.tokens.len()).unwrap(),
            });
        }
        let (instance, generation) = id;
        let at = self.now;
        let worker = self.workers.get_mut(&id).unwrap();
        worker.told_at = worker.told_at.max(at);
        let at = worker.told_at;
        // Never inside of an action: the driver's loop hands it over with its next turn.
        self.put(
            at,
            Happening::Tell(Event::AttemptEnded {
                instance,
                generation,
                accepted,
            }),
        );
    }

    fn read(&mut self, id: WorkerId, frame: Frame) {
        let (instance, generation) = id;
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.link == Link::Fenced {
            return;
        }
        if !matches!(frame, Frame::Eof) && worker.cut_at.is_some_and(|at| self.now > at) {
            return;
        }
        if matches!(frame, Frame::Connected) {
            if !worker.alive {
                return;
            }
            worker.link = Link::Open;
        }
        if worker.link == Link::None {
            return;
        }
        match frame {
            Frame::Connected => self.report(
                id,
                Event::Connected {
                    instance,
                    generation,
                },
            ),
            Frame::Loading(permille) => self.report(
                id,
                Event::LoadProgress {
                    instance,
                    generation,
                    permille,
                },
            ),
            Frame::Warming(done) => self.report(
                id,
                Event::WarmProgress {
                    instance,
                    generation,
                    done,
                    of: 2,
                },
            ),
            Frame::Ready => {
                let facts = WorkerFacts {
                    slots: worker.slots,
                    context_tokens: CONTEXT_TOKENS,
                    longest_token_bytes: 16,
                    model: model_hash(worker.model),
                    start_up: Duration::from_secs(1),
                };
                self.report(
                    id,
                    Event::Ready {
                        instance,
                        generation,
                        facts,
                    },
                );
            }
            Frame::Tokenised(request, outcome) => self.report(
                id,
                Event::Tokenised {
                    request,
                    instance,
                    generation,
                    outcome,
                },
            ),
            Frame::Started(request, attempt) => self.report(
                id,
                Event::Started {
                    request,
                    attempt,
                    cached_tokens: 0,
                },
            ),
            Frame::Failed(request, attempt, error) => {
                worker.session.remove(&request);
                self.report(
                    id,
                    Event::RequestFailed {
                        request,
                        attempt,
                        error,
                    },
                );
            }
            Frame::Step { rows, pulse } => self.read_step(id, rows, pulse),
            Frame::Drained => self.report(
                id,
                Event::Drained {
                    instance,
                    generation,
                },
            ),
            Frame::Eof => self.fence(id),
        }
    }

    fn read_step(&mut self, id: WorkerId, rows: Vec<Row>, pulse: u64) {
        let (instance, generation) = id;
        let worker = self.workers.get_mut(&id).unwrap();
        worker.last_news = self.now;
        let longest_step = worker.longest_step;
        let model = worker.model;
        for row in rows {
            if let Some(event) = self.relay(id, &row, model) {
                self.report(id, event);
            }
        }
        self.report(
            id,
            Event::Progress {
                instance,
                generation,
                pulse,
                longest_step,
            },
        );
    }

    /// The fence of one request: takes a row whose attempt and index match. Returns what the machine
    /// must hear of it. An end is told even where the client's side has ended, for the seat's sake.
    fn relay(&mut self, id: WorkerId, row: &Row, model: u8) -> Option<Event> {
        let (request, attempt) = (row.request, row.attempt);
        if row.end.is_some() {
            let worker = self.workers.get_mut(&id).unwrap();
            if worker.session.get(&request) == Some(&attempt) {
                worker.session.remove(&request);
            }
        }
        let client = self.clients.get_mut(&request).unwrap();
        if client.ended.is_some() || client.end_relayed {
            return row
                .end
                .is_some()
                .then_some(Event::CancelDone { request, attempt });
        }
        if client.attempt != attempt {
            return None;
        }
        let expected = u32::try_from(client.tokens.len()).unwrap();
        assert_eq!(
            row.first_index, expected,
            "a stream goes on where it was: no gap, no repeat"
        );
        let first = client.tokens.is_empty() && !row.tokens.is_empty();
        for (index, value) in (row.first_index..).zip(&row.tokens) {
            assert_eq!(
                *value,
                token(request, index, model),
                "each token is its index's"
            );
            client.tokens.push(*value);
        }
        if !row.tokens.is_empty() {
            self.oracle.streams(request, model_hash(model));
        }
        let tokens = u32::try_from(client.tokens.len()).unwrap();
        let end = row.end.clone();
        if matches!(end, Some(RowEnd::Finished(_))) {
            client.end_relayed = true;
        }
        if first && end.is_some() {
            self.report(id, Event::FirstToken { request, attempt });
        } else if first {
            return Some(Event::FirstToken { request, attempt });
        }
        match end? {
            RowEnd::Finished(reason) => Some(Event::Finished {
                request,
                attempt,
                reason,
                tokens,
            }),
            RowEnd::Cancelled => Some(Event::CancelDone { request, attempt }),
            RowEnd::Failed => Some(Event::RequestFailed {
                request,
                attempt,
                error: AttemptError::Engine("not a number".to_owned()),
            }),
        }
    }

    // ---- inside a worker ----

    fn follow(&mut self, id: WorkerId, order: Order) {
        let worker = self.workers.get_mut(&id).unwrap();
        if !worker.alive {
            return;
        }
        match order {
            Order::Terminate if worker.deaf => {}
            Order::LinkGone if worker.deaf || worker.hung => {}
            Order::Terminate => {
                let signal = SIGTERM;
                self.die(id, ExitStatus::Signal { signal, oom: false }, None);
            }
            Order::LinkGone => self.die(id, ExitStatus::Code(0), None),
            _ if worker.link != Link::Open => {}
            Order::Tokenise(request) => self.tokenise(id, request),
            Order::Generate(request, attempt) => self.generate(id, request, attempt),
            Order::Cancel(request, attempt) => {
                if let Some(run) = worker.runs.get_mut(&request)
                    && run.attempt == attempt
                {
                    run.cancelled = true;
                }
            }
            Order::Drain => {
                if !worker.hung && !worker.deaf {
                    worker.draining = true;
                    self.leave_if_drained(id);
                }
            }
        }
    }

    fn leave_if_drained(&mut self, id: WorkerId) {
        let worker = &self.workers[&id];
        if worker.draining && worker.runs.is_empty() && worker.alive {
            self.write(id, Frame::Drained);
            self.die(id, ExitStatus::Code(0), None);
        }
    }

    fn tokenise(&mut self, id: WorkerId, request: RequestId) {
        if self.workers[&id].hung && self.dice.chance(5000) {
            return;
        }
        if self.fault(self.faults.tokenise_crash) {
            let signal = SIGSEGV;
            self.die(
                id,
                ExitStatus::Signal { signal, oom: false },
                Some(Blame::Engine),
            );
            return;
        }
        let client = &self.clients[&request];
        let outcome = if client.bad_template {
            TokenisedOutcome::Rejected("the template refuses".to_owned())
        } else if self.fault(self.faults.busy_prompt_thread) {
            TokenisedOutcome::Unavailable
        } else {
            let client = &self.clients[&request];
            TokenisedOutcome::Tokens(client.prompt_tokens + u32::from(self.workers[&id].model))
        };
        self.write(id, Frame::Tokenised(request, outcome));
    }

    fn generate(&mut self, id: WorkerId, request: RequestId, attempt: Attempt) {
        if self.workers[&id].draining || self.fault(self.faults.not_taken) {
            self.write(id, Frame::Failed(request, attempt, AttemptError::NotTaken));
            return;
        }
        if self.fault(self.faults.row_failure) {
            let words = "the engine refuses".to_owned();
            self.write(
                id,
                Frame::Failed(request, attempt, AttemptError::Rejected(words)),
            );
            return;
        }
        let client = &self.clients[&request];
        // What a resumed stream is built from is what the relay holds, and no attempt changes it but this.
        let emitted = u32::try_from(client.tokens.len()).unwrap();
        let run = Run {
            attempt,
            prefill_steps: (client.prompt_tokens + emitted) / 64 + 1,
            next_index: emitted,
            cancelled: client.attempt != attempt || client.ended.is_some(),
        };
        let worker = self.workers.get_mut(&id).unwrap();
        worker.runs.insert(request, run);
        let slots = usize::try_from(worker.slots).unwrap();
        assert!(
            worker.runs.len() <= slots,
            "a worker is never given more than it has slots"
        );
        self.write(id, Frame::Started(request, attempt));
        self.keep_stepping(id);
    }

    fn keep_stepping(&mut self, id: WorkerId) {
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.stepping || worker.hung || !worker.alive || worker.runs.is_empty() {
            return;
        }
        worker.stepping = true;
        let slow = worker.slow && self.now < self.calm_at;
        let step = if slow {
            self.dice.millis(500, 4000)
        } else {
            self.dice.millis(2, 30)
        };
        let worker = self.workers.get_mut(&id).unwrap();
        worker.longest_step = worker.longest_step.max(step);
        self.put_after(step, Happening::Step(id));
    }

    fn step(&mut self, id: WorkerId) {
        let worker = self.workers.get_mut(&id).unwrap();
        worker.stepping = false;
        if !worker.alive || worker.hung {
            return;
        }
        if self.fault(self.faults.hang) {
            let worker = self.workers.get_mut(&id).unwrap();
            worker.hung = true;
            worker.blame = Some(Blame::Engine);
            return;
        }
        if self.fault(self.faults.no_exit) && self.workers[&id].link == Link::Open {
            let worker = self.workers.get_mut(&id).unwrap();
            worker.hung = true;
            worker.deaf = true;
            worker.blame = Some(Blame::Engine);
            let at = worker.framed_at;
            self.put(at, Happening::Frame(id, Frame::Eof));
            return;
        }
        if self.fault(self.faults.crash) {
            let status = self.crash_status();
            self.die(id, status, Some(Blame::Engine));
            return;
        }
        if self.fault(self.faults.external) {
            let signals = [SIGKILL, SIGTERM, 2, 1];
            let signal = signals[usize::try_from(self.dice.between(0, 3)).unwrap()];
            self.die(
                id,
                ExitStatus::Signal { signal, oom: false },
                Some(Blame::Outsider),
            );
            return;
        }
        let worker = &self.workers[&id];
        let poison = worker
            .runs
            .iter()
            .find(|(request, run)| run.prefill_steps == 0 && self.clients[*request].poison);
        if let Some((request, _)) = poison {
            self.oracle
                .poisoned(self.clients[request].arrival.fingerprint.0);
            let signal = SIGABRT;
            self.die(
                id,
                ExitStatus::Signal { signal, oom: false },
                Some(Blame::Engine),
            );
            return;
        }
        self.advance(id);
        self.leave_if_drained(id);
        self.keep_stepping(id);
    }

    fn crash_status(&mut self) -> ExitStatus {
        if self.fault(self.faults.odd_status) {
            match self.dice.between(0, 2) {
                0 => ExitStatus::Code(0),
                1 => ExitStatus::Code(101),
                _ => ExitStatus::Signal {
                    signal: SIGKILL,
                    oom: true,
                },
            }
        } else {
            let signal = if self.dice.chance(5000) {
                SIGABRT
            } else {
                SIGSEGV
            };
            ExitStatus::Signal { signal, oom: false }
        }
    }

    /// One forward pass: each row gets on by a chunk of its prompt, or by one or two tokens.
    fn advance(&mut self, id: WorkerId) {
        let requests: Vec<_> = self.workers[&id].runs.keys().copied().collect();
        let mut rows = Vec::new();
        for request in requests {
            let failed = self.fault(self.faults.row_failure);
            let pair = self.dice.chance(2000);
            let client = &self.clients[&request];
            let worker = self.workers.get_mut(&id).unwrap();
            let model = worker.model;
            let run = worker.runs.get_mut(&request).unwrap();
            let room = CONTEXT_TOKENS - client.prompt_tokens - u32::from(model);
            let asked = client.arrival.max_tokens.unwrap_or(u32::MAX).min(room);
            let first_index = run.next_index;
            let mut tokens = Vec::new();
            let end = if run.cancelled {
                Some(RowEnd::Cancelled)
            } else if failed {
                Some(RowEnd::Failed)
            } else if run.prefill_steps > 0 {
                run.prefill_steps -= 1;
                continue;
            } else {
                let last = client.natural_end.min(asked);
                for _ in 0..=u32::from(pair) {
                    if run.next_index < last {
                        tokens.push(token(request, run.next_index, model));
                        run.next_index += 1;
                    }
                }
                let reason = if client.natural_end <= asked {
                    FinishReason::Stop
                } else {
                    FinishReason::Length
                };
                (run.next_index >= last).then_some(RowEnd::Finished(reason))
            };
            let attempt = run.attempt;
            if end.is_some() {
                worker.runs.remove(&request);
            }
            rows.push(Row {
                request,
                attempt,
                first_index,
                tokens,
                end,
            });
        }
        let worker = self.workers.get_mut(&id).unwrap();
        worker.pulse += 1;
        let pulse = worker.pulse;
        self.write(id, Frame::Step { rows, pulse });
    }

    /// The machine's own totals agree with what the clients were told.
    fn check_counts(&self) {
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
