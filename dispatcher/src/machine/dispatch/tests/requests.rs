//! Admission, measuring, slots, cancels and time-outs of single requests.

use std::time::Duration;

use proto::{Attempt, RequestId};

use super::{Rig, arrival, asked_to_measure, assigned, facts};
use crate::machine::action::{Action, Denied, Failure, Outcome, QueueBound};
use crate::machine::event::{
    AttemptError, CancelCause, Event, KeyId, MemoryPressure, Priority, TokenisedOutcome,
};
use crate::machine::policy::Policy;
use crate::machine::tick::Tick;

fn text(id: u64) -> Event {
    let mut arrival = arrival(id);
    arrival.prompt_tokens = None;
    Event::Arrived(Box::new(arrival))
}

#[test]
fn a_prompt_of_text_is_measured_by_a_ready_worker_before_it_takes_a_slot() {
    let mut rig = Rig::ready(1, 1);
    let said = rig.tell(text(1));
    assert_eq!(asked_to_measure(&said), [(1, 0)]);
    assert_eq!(assigned(&said), []);
    let said = rig.tokenised(1, 0, TokenisedOutcome::Tokens(12));
    assert_eq!(assigned(&said), [(1, 0)]);
}

#[test]
fn without_a_ready_worker_it_waits_unmeasured_and_is_measured_first() {
    let mut rig = Rig::new(Policy::default());
    assert!(rig.tell(text(1)).is_empty());
    let said = rig.bring_up(0, facts(1, 0));
    assert_eq!(asked_to_measure(&said), [(1, 0)]);
    assert_eq!(assigned(&said), []);
}

#[test]
fn a_prompt_as_long_as_the_context_never_takes_a_slot() {
    let mut rig = Rig::ready(1, 1);
    rig.tell(text(1));
    let said = rig.tokenised(1, 0, TokenisedOutcome::Tokens(1000));
    assert_eq!(assigned(&said), []);
    let denied = Denied::PromptTooLong {
        prompt_tokens: 1000,
        context_tokens: 1000,
    };
    assert_eq!(rig.outcome(1), Some(&Outcome::Denied(denied)));
}

#[test]
fn what_waited_before_the_machine_was_told_counts_as_waiting() {
    let mut rig = Rig::new(Policy {
        queue_timeout: Duration::from_secs(60),
        ..Policy::default()
    });
    rig.pass(Duration::from_secs(100));
    let mut early = arrival(1);
    early.received = Tick::ZERO.after(Duration::from_secs(50));
    rig.machine.handle(Event::Arrived(Box::new(early)), rig.now);
    rig.listen();
    rig.pass(Duration::from_secs(9));
    assert_eq!(rig.outcome(1), None);
    rig.pass(Duration::from_secs(1));
    let waited = Duration::from_secs(60);
    let denied = Denied::QueueTimeout { waited };
    assert_eq!(rig.outcome(1), Some(&Outcome::Denied(denied)));
}

#[test]
fn a_prompt_of_more_bytes_than_the_context_can_hold_is_not_even_measured() {
    let mut rig = Rig::new(Policy::default());
    let mut arrival = arrival(1);
    arrival.prompt_tokens = None;
    arrival.prompt_bytes = 16_001;
    rig.tell(Event::Arrived(Box::new(arrival.clone())));
    assert_eq!(rig.outcome(1), None, "the limit is not known yet");
    assert_eq!(asked_to_measure(&rig.bring_up(0, facts(1, 0))), []);
    arrival.request = RequestId(2);
    rig.tell(Event::Arrived(Box::new(arrival)));
    for id in [1, 2] {
        let denied = Denied::PromptTooLarge {
            bytes: 16_001,
            limit_bytes: 16_000,
        };
        assert_eq!(rig.outcome(id), Some(&Outcome::Denied(denied)));
    }
}

#[test]
fn a_prompt_that_the_template_refuses_is_the_clients_fault() {
    let mut rig = Rig::ready(1, 1);
    rig.tell(text(1));
    rig.tokenised(
        1,
        0,
        TokenisedOutcome::Rejected("no system role".to_owned()),
    );
    let denied = Denied::PromptRejected("no system role".to_owned());
    assert_eq!(rig.outcome(1), Some(&Outcome::Denied(denied)));
}

#[test]
fn a_prompt_thread_without_time_is_asked_again_after_growing_pauses_and_not_for_ever() {
    let mut rig = Rig::ready(1, 1);
    let mut asked = asked_to_measure(&rig.tell(text(1))).len();
    while rig.outcome(1).is_none() {
        rig.tokenised(1, 0, TokenisedOutcome::Unavailable);
        asked += asked_to_measure(&rig.pass(Duration::from_secs(60))).len();
        assert!(asked < 20);
    }
    let outcome = rig.outcome(1);
    assert!(
        matches!(outcome, Some(Outcome::Denied(Denied::QueueTimeout { .. }))),
        "{outcome:?}"
    );
}

#[test]
fn a_worker_that_dies_while_measuring_is_followed_by_another() {
    let mut rig = Rig::ready(2, 1);
    assert_eq!(asked_to_measure(&rig.tell(text(1))), [(1, 0)]);
    let said = rig.dies(0, super::SIGKILL);
    assert_eq!(asked_to_measure(&said), [(1, 1)]);
}

#[test]
fn a_prompt_thread_is_never_asked_more_than_it_can_queue() {
    let mut rig = Rig::ready(1, 1);
    let mut asked = 0;
    for id in 1..=100 {
        asked += asked_to_measure(&rig.tell(text(id))).len();
    }
    assert_eq!(asked, 8);
    rig.leave(1);
    let said = rig.tokenised(1, 0, TokenisedOutcome::Tokens(3));
    assert_eq!(
        asked_to_measure(&said).len(),
        1,
        "the answer frees its place though the client left"
    );
}

#[test]
fn in_flight_never_exceeds_the_slots_and_an_end_makes_room() {
    let mut rig = Rig::ready(1, 2);
    let started: Vec<_> = (1..=5).flat_map(|id| assigned(&rig.arrive(id))).collect();
    assert_eq!(started, [(1, 0), (2, 0)]);
    assert_eq!(assigned(&rig.finish(1, 1)), [(3, 0)]);
}

#[test]
fn a_queued_request_whose_client_left_never_reaches_a_worker() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    rig.leave(2);
    let cancelled = Outcome::Cancelled(CancelCause::ClientDisconnect);
    assert_eq!(rig.outcome(2), Some(&cancelled));
    assert_eq!(assigned(&rig.finish(1, 1)), []);
}

#[test]
fn a_running_cancel_ends_at_once_and_its_slot_is_free_when_the_worker_says_so() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    let said = rig.leave(1);
    assert!(rig.outcome(1).is_some());
    assert!(
        said.iter()
            .any(|action| matches!(action, Action::SendCancel { .. }))
    );
    assert_eq!(assigned(&said), [], "the worker still holds the seat");
    let said = rig.tell(Event::CancelDone {
        request: RequestId(1),
        attempt: Attempt(1),
    });
    assert_eq!(assigned(&said), [(2, 0)]);
}

#[test]
fn a_late_word_of_an_older_attempt_frees_no_seat() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.arrive(2);
    rig.arrive(3);
    rig.dies(0, super::SIGKILL);
    rig.finish(2, 1);
    assert_eq!(assigned(&rig.said).last(), Some(&(1, 1)));
    rig.leave(1);
    assert_eq!(assigned(&rig.finish(1, 1)), [], "attempt 2 holds the seat");
    assert_eq!(assigned(&rig.finish(1, 2)), [(3, 1)]);
}

#[test]
fn an_end_that_crosses_the_cancel_frees_the_slot_as_well() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    rig.leave(1);
    assert_eq!(assigned(&rig.finish(1, 1)), [(2, 0)]);
}

#[test]
fn what_waited_too_long_never_starts_and_what_started_may_take_its_time() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    for pulse in 0..70 {
        rig.pulse(0, pulse);
        rig.pass(Duration::from_secs(10));
    }
    let outcome = rig.outcome(2);
    assert!(
        matches!(outcome, Some(Outcome::Denied(Denied::QueueTimeout { .. }))),
        "{outcome:?}"
    );
    assert_eq!(rig.outcome(1), None);
    assert_eq!(assigned(&rig.finish(1, 1)), []);
}

#[test]
fn the_slot_that_frees_in_the_moment_of_the_timeout_does_not_start_it() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    rig.now = rig.now.after(Policy::default().queue_timeout);
    assert_eq!(assigned(&rig.finish(1, 1)), []);
    assert!(rig.outcome(2).is_some());
}

#[test]
fn the_clients_own_deadline_denies_a_waiting_and_fails_a_running_request() {
    let mut rig = Rig::ready(1, 1);
    for id in [1, 2] {
        let mut arrival = arrival(id);
        arrival.deadline = Some(Duration::from_secs(5));
        rig.tell(Event::Arrived(Box::new(arrival)));
    }
    let said = rig.pass(Duration::from_secs(5));
    assert!(
        said.iter()
            .any(|action| matches!(action, Action::SendCancel { .. }))
    );
    assert_eq!(
        rig.outcome(1),
        Some(&Outcome::Failed(Failure::DeadlineExceeded))
    );
    assert_eq!(
        rig.outcome(2),
        Some(&Outcome::Denied(Denied::DeadlineExceeded))
    );
}

#[test]
fn request_limit_plus_one_is_refused_at_once_whatever_is_loaded() {
    for ready in [false, true] {
        let policy = Policy {
            queue_entries_max: 4,
            ..Policy::default()
        };
        let mut rig = Rig::new(policy);
        if ready {
            rig.bring_up(0, facts(1, 0));
            rig.arrive(100);
        }
        for id in 1..=4 {
            rig.arrive(id);
            assert_eq!(rig.outcome(id), None);
        }
        rig.arrive(5);
        match rig.outcome(5) {
            Some(Outcome::Denied(Denied::QueueFull {
                bound,
                depth,
                limit,
                retry_after,
            })) => {
                assert_eq!((*bound, *depth, *limit), (QueueBound::Entries, 4, 4));
                assert!(*retry_after >= Duration::from_secs(1));
            }
            outcome => panic!("{outcome:?}"),
        }
    }
}

#[test]
fn sixteen_streams_of_one_client_are_all_queued_and_all_complete() {
    let mut rig = Rig::ready(1, 2);
    for id in 1..=16 {
        rig.arrive(id);
    }
    for id in 1..=16 {
        assert_eq!(rig.outcome(id), None);
        rig.finish(id, 1);
        assert!(matches!(rig.outcome(id), Some(Outcome::Completed { .. })));
    }
}

#[test]
fn a_flood_of_one_key_leaves_half_of_the_queue_to_the_others() {
    let policy = Policy {
        queue_entries_max: 100,
        ..Policy::default()
    };
    let mut rig = Rig::new(policy);
    let mut from = |key: u64, id: u64| {
        let mut arrival = arrival(id);
        arrival.key = KeyId(key);
        rig.tell(Event::Arrived(Box::new(arrival)));
        rig.outcome(id).is_none()
    };
    assert!(from(1, 0));
    let flood = (1..=100).filter(|id| from(2, *id)).count();
    assert_eq!(flood, 50);
    assert!((101..120).all(|id| from(1, id)));
}

#[test]
fn priority_is_honoured_inside_a_key() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    for (id, priority) in [
        (2, Priority::Low),
        (3, Priority::Normal),
        (4, Priority::High),
    ] {
        let mut arrival = arrival(id);
        arrival.priority = priority;
        rig.tell(Event::Arrived(Box::new(arrival)));
    }
    assert_eq!(assigned(&rig.finish(1, 1)), [(4, 0)]);
    assert_eq!(assigned(&rig.finish(4, 1)), [(3, 0)]);
    assert_eq!(assigned(&rig.finish(3, 1)), [(2, 0)]);
}

#[test]
fn a_request_goes_where_its_prefix_is_and_spills_over_when_that_is_loaded() {
    let mut rig = Rig::ready(2, 8);
    let send = |rig: &mut Rig, id: u64, affinity| {
        let mut arrival = arrival(id);
        arrival.affinity = affinity;
        assigned(&rig.tell(Event::Arrived(Box::new(arrival))))[0].1
    };
    assert_eq!(send(&mut rig, 1, Some(77)), 0);
    assert_eq!(send(&mut rig, 2, None), 1);
    assert_eq!(send(&mut rig, 3, None), 0);
    rig.finish(1, 1);
    rig.finish(3, 1);
    rig.finish(2, 1);
    assert_eq!(send(&mut rig, 4, None), 0);
    let homes: Vec<_> = (5..12).map(|id| send(&mut rig, id, Some(77))).collect();
    assert_eq!(homes[0], 0, "its load is within the bound");
    assert!(homes.contains(&1), "and later it is not: {homes:?}");
}

#[test]
fn a_worker_that_sends_a_request_back_is_not_asked_again_at_once_nor_for_ever() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    let mut attempt = 1;
    while rig.outcome(1).is_none() {
        let said = rig.tell(Event::RequestFailed {
            request: RequestId(1),
            attempt: Attempt(attempt),
            error: AttemptError::NotTaken,
        });
        assert_eq!(assigned(&said), []);
        attempt += 1;
        let again = assigned(&rig.pass(Duration::from_millis(100)));
        assert!(again == [(1, 0)] || rig.outcome(1).is_some());
        assert!(attempt < 30);
    }
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(Failure::NoInstance)));
}

#[test]
fn a_row_that_the_engine_gave_up_fails_and_frees_its_slot() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    let said = rig.tell(Event::RequestFailed {
        request: RequestId(1),
        attempt: Attempt(1),
        error: AttemptError::Engine("not a number".to_owned()),
    });
    let failed = Failure::Engine("not a number".to_owned());
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(failed)));
    assert_eq!(assigned(&said), [(2, 0)]);
}

#[test]
fn words_of_an_older_attempt_are_counted_and_dropped() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    assert!(rig.finish(1, 9).is_empty());
    assert!(rig.finish(2, 1).is_empty());
    assert!(rig.leave(3).is_empty());
    assert_eq!(rig.machine.snapshot(rig.now).counters.stale, 3);
    assert_eq!(rig.outcome(1), None);
}

#[test]
fn soft_pressure_keeps_new_work_waiting_and_hard_pressure_sends_it_away() {
    let mut rig = Rig::ready(1, 2);
    rig.arrive(1);
    rig.tell(Event::Memory(MemoryPressure::Soft));
    assert_eq!(assigned(&rig.arrive(2)), []);
    rig.tell(Event::Memory(MemoryPressure::Hard));
    rig.arrive(3);
    for id in [2, 3] {
        let outcome = rig.outcome(id);
        assert!(matches!(
            outcome,
            Some(Outcome::Denied(Denied::OutOfMemory { .. }))
        ));
    }
    assert_eq!(rig.outcome(1), None, "what runs runs on");
    rig.tell(Event::Memory(MemoryPressure::None));
    assert_eq!(assigned(&rig.arrive(4)), [(4, 0)]);
}
