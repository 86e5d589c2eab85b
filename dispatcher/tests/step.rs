//! The cost of one machine step must not grow with what waits.

// A debug build checks every invariant over the whole queue after each event.
#![cfg(not(debug_assertions))]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dispatcher::machine::event::{Arrival, Fingerprint, KeyId, ModelHash, Priority, WorkerFacts};
use dispatcher::machine::{Action, Dispatch, Event, Policy, Tick};
use proto::{Attempt, FinishReason, Generation, InstanceId, RequestId};

const REQUESTS: u64 = 20_000;
const KEYS: u64 = 1_000;
/// Three events a request on a computer that others use; a walk over the queue in each takes minutes.
const LONGEST: Duration = Duration::from_secs(10);

fn arrival(id: u64, now: Tick) -> Arrival {
    Arrival {
        request: RequestId(id),
        received: now,
        key: KeyId(id % KEYS),
        priority: [Priority::High, Priority::Normal, Priority::Low]
            [usize::try_from(id % 3).expect("small")],
        fingerprint: Fingerprint(id),
        bytes: 400,
        prompt_bytes: 400,
        prompt_tokens: Some(100),
        max_tokens: Some(100),
        deadline: Some(Duration::from_secs(100_000 + id)),
        affinity: Some(id % 7),
    }
}

fn bring_up(machine: &mut Dispatch, now: Tick) {
    let (instance, generation) = (InstanceId(0), Generation(1));
    let facts = WorkerFacts {
        slots: 4,
        context_tokens: 1000,
        longest_token_bytes: 16,
        model: ModelHash::default(),
        start_up: Duration::ZERO,
    };
    let connected = Event::Connected {
        instance,
        generation,
    };
    let ready = Event::Ready {
        instance,
        generation,
        facts,
    };
    machine.handle(connected, now);
    machine.handle(ready, now);
}

#[test]
fn twenty_thousand_waiting_requests_of_a_thousand_keys_cost_little_a_step() {
    let policy = Policy {
        queue_entries_max: 100_000,
        queue_bytes_max: u64::MAX,
        queue_tokens_max: u64::MAX,
        queue_timeout: Duration::from_secs(1_000_000),
        ..Policy::default()
    };
    let start = Instant::now();
    let mut now = Tick::ZERO;
    let mut machine = Dispatch::new(policy, 1, now);
    for id in 0..REQUESTS {
        machine.handle(Event::Arrived(Box::new(arrival(id, now))), now);
    }
    bring_up(&mut machine, now);
    let mut running = VecDeque::new();
    let mut ended = 0;
    loop {
        while let Some(action) = machine.poll_action() {
            match action {
                Action::SendGenerate { request, .. } => running.push_back(request),
                Action::End { .. } => ended += 1,
                _ => {}
            }
        }
        let Some(request) = running.pop_front() else {
            break;
        };
        now = now.after(Duration::from_millis(1));
        let attempt = Attempt(1);
        machine.handle(Event::FirstToken { request, attempt }, now);
        let finished = Event::Finished {
            request,
            attempt,
            reason: FinishReason::Stop,
            tokens: 100,
        };
        machine.handle(finished, now);
    }
    assert_eq!(ended, REQUESTS);
    let took = start.elapsed();
    assert!(took < LONGEST, "{took:?} for {REQUESTS} requests");
}
