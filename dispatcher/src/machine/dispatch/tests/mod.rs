//! A machine and the words to tell it things, for the tests beside this file.

mod deaths;
mod lifecycle;
mod load;
mod operations;
mod requests;

use std::time::Duration;

use proto::{Attempt, FinishReason, Generation, InstanceId, RequestId};

use super::Dispatch;
use crate::machine::action::{Action, Outcome};
use crate::machine::event::{
    Accepted, Arrival, CancelCause, Event, ExitStatus, Fingerprint, KeyId, ModelHash, Priority,
    TokenisedOutcome, WorkerFacts,
};
use crate::machine::policy::Policy;
use crate::machine::tick::Tick;

const SIGKILL: ExitStatus = ExitStatus::Signal {
    signal: 9,
    oom: false,
};
const SIGABRT: ExitStatus = ExitStatus::Signal {
    signal: 6,
    oom: false,
};

struct Rig {
    machine: Dispatch,
    now: Tick,
    /// All actions so far but records.
    said: Vec<Action>,
}

fn arrival(id: u64) -> Arrival {
    Arrival {
        request: RequestId(id),
        received: Tick::ZERO,
        key: KeyId(0),
        priority: Priority::Normal,
        fingerprint: Fingerprint(id),
        bytes: 40,
        prompt_bytes: 40,
        prompt_tokens: Some(10),
        max_tokens: Some(100),
        deadline: None,
        affinity: None,
    }
}

fn facts(slots: u32, model: u8) -> WorkerFacts {
    WorkerFacts {
        slots,
        context_tokens: 1000,
        longest_token_bytes: 16,
        model: ModelHash([model; 32]),
        start_up: Duration::from_secs(3),
    }
}

impl Rig {
    fn new(policy: Policy) -> Self {
        let now = Tick::from_micros(1);
        let mut rig = Self {
            machine: Dispatch::new(policy, 7, now),
            now,
            said: Vec::new(),
        };
        rig.listen();
        rig
    }

    /// A pool of Ready workers with this many slots each.
    fn ready(instances: u32, slots: u32) -> Self {
        Self::ready_with(instances, slots, Policy::default())
    }

    fn ready_with(instances: u32, slots: u32, policy: Policy) -> Self {
        let mut rig = Self::new(Policy {
            instances,
            ..policy
        });
        for instance in 0..instances {
            rig.bring_up(instance, facts(slots, 0));
        }
        rig
    }

    fn bring_up(&mut self, instance: u32, facts: WorkerFacts) -> Vec<Action> {
        let (instance, generation) = self.worker(instance);
        self.tell(Event::Connected {
            instance,
            generation,
        });
        self.tell(Event::Ready {
            instance,
            generation,
            facts,
        })
    }

    /// Waits for the next worker, and brings it up.
    fn revive(&mut self, instance: u32, slots: u32) {
        while self.state(instance) != "spawning" {
            self.pass(Duration::from_millis(100));
        }
        self.bring_up(instance, facts(slots, 0));
    }

    /// The instance and its newest generation.
    fn worker(&self, instance: u32) -> (InstanceId, Generation) {
        let id = InstanceId(instance);
        let index = usize::try_from(instance).unwrap();
        (id, self.machine.instances[index].generation)
    }

    fn listen(&mut self) -> Vec<Action> {
        let mut said = Vec::new();
        while let Some(action) = self.machine.poll_action() {
            if !matches!(action, Action::Record(_)) {
                said.push(action);
            }
        }
        self.machine.check_invariants();
        self.said.extend(said.iter().cloned());
        said
    }

    /// What it says to this. Arrivals are received in the moment of the telling.
    fn tell(&mut self, mut event: Event) -> Vec<Action> {
        if let Event::Arrived(arrival) = &mut event {
            arrival.received = self.now;
        }
        self.machine.handle(event, self.now);
        self.listen()
    }

    fn arrive(&mut self, id: u64) -> Vec<Action> {
        self.tell(Event::Arrived(Box::new(arrival(id))))
    }

    /// Lets time pass as the driver does: waking at each deadline.
    fn pass(&mut self, time: Duration) -> Vec<Action> {
        let until = self.now.after(time);
        let mut said = Vec::new();
        while let Some(due) = self.machine.next_deadline().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            said.extend(self.tell(Event::DeadlineReached));
        }
        self.now = until;
        said
    }

    fn finish(&mut self, id: u64, attempt: u32) -> Vec<Action> {
        self.tell(Event::Finished {
            request: RequestId(id),
            attempt: Attempt(attempt),
            reason: FinishReason::Stop,
            tokens: 5,
        })
    }

    fn first_token(&mut self, id: u64, attempt: u32) -> Vec<Action> {
        self.tell(Event::FirstToken {
            request: RequestId(id),
            attempt: Attempt(attempt),
        })
    }

    fn leave(&mut self, id: u64) -> Vec<Action> {
        self.tell(Event::ClientGone {
            request: RequestId(id),
            cause: CancelCause::ClientDisconnect,
        })
    }

    fn tokenised(&mut self, id: u64, instance: u32, outcome: TokenisedOutcome) -> Vec<Action> {
        let (instance, generation) = self.worker(instance);
        self.tell(Event::Tokenised {
            request: RequestId(id),
            instance,
            generation,
            outcome,
        })
    }

    fn link_ends(&mut self, instance: u32, accepted: &[(u64, u32, u32)]) -> Vec<Action> {
        let (instance, generation) = self.worker(instance);
        let accepted = accepted.iter().map(|(id, attempt, tokens)| Accepted {
            request: RequestId(*id),
            attempt: Attempt(*attempt),
            tokens: *tokens,
        });
        self.tell(Event::AttemptEnded {
            instance,
            generation,
            accepted: accepted.collect(),
        })
    }

    fn exits(&mut self, instance: u32, status: ExitStatus) -> Vec<Action> {
        let (instance, generation) = self.worker(instance);
        self.tell(Event::Exited {
            instance,
            generation,
            status,
        })
    }

    /// The whole end of a worker: link, then process.
    fn dies(&mut self, instance: u32, status: ExitStatus) -> Vec<Action> {
        let mut said = self.link_ends(instance, &[]);
        said.extend(self.exits(instance, status));
        said
    }

    fn outcome(&self, id: u64) -> Option<&Outcome> {
        let mut ends = self.said.iter().filter_map(|action| match action {
            Action::End { request, outcome } if *request == RequestId(id) => Some(outcome),
            _ => None,
        });
        let outcome = ends.next();
        assert_eq!(ends.next(), None, "one end a request");
        outcome
    }

    fn state(&self, instance: u32) -> &'static str {
        self.machine.instances[usize::try_from(instance).unwrap()]
            .state
            .word()
    }

    fn pulse(&mut self, instance: u32, pulse: u64) {
        let (instance, generation) = self.worker(instance);
        self.tell(Event::Progress {
            instance,
            generation,
            pulse,
            longest_step: Duration::from_millis(20),
        });
    }
}

/// Which requests were given a slot, and where.
fn assigned(said: &[Action]) -> Vec<(u64, u32)> {
    let sent = said.iter().filter_map(|action| match action {
        Action::SendGenerate {
            request, instance, ..
        } => Some((request.0, instance.0)),
        _ => None,
    });
    sent.collect()
}

fn asked_to_measure(said: &[Action]) -> Vec<(u64, u32)> {
    let sent = said.iter().filter_map(|action| match action {
        Action::SendTokenise {
            request, instance, ..
        } => Some((request.0, instance.0)),
        _ => None,
    });
    sent.collect()
}

/// The verbs said to workers' processes and links, with the instance.
fn told(said: &[Action]) -> Vec<(&'static str, u32)> {
    let verbs = said.iter().filter_map(|action| match action {
        Action::Spawn { instance, .. } => Some(("spawn", instance.0)),
        Action::Terminate { instance, .. } => Some(("terminate", instance.0)),
        Action::Kill { instance, .. } => Some(("kill", instance.0)),
        Action::CloseLink { instance, .. } => Some(("close", instance.0)),
        Action::SendDrain { instance, .. } => Some(("drain", instance.0)),
        Action::Stopped => Some(("stopped", 0)),
        _ => None,
    });
    verbs.collect()
}
