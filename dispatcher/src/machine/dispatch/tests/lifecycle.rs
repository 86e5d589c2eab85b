//! Starting, stalling, backing off and parking.

use std::time::Duration;

use super::{Rig, SIGABRT, arrival, assigned, facts, told};
use crate::machine::action::{Denied, Outcome};
use crate::machine::event::{Event, ExitStatus, WorkerFacts};
use crate::machine::policy::Policy;

const EXIT_78: ExitStatus = ExitStatus::Code(78);

#[test]
fn the_first_actions_spawn_a_first_generation_for_each_instance() {
    let rig = Rig::new(Policy {
        instances: 3,
        ..Policy::default()
    });
    assert_eq!(told(&rig.said), [("spawn", 0), ("spawn", 1), ("spawn", 2)]);
    assert_eq!(rig.worker(2).1.0, 1);
}

#[test]
fn a_worker_that_does_not_connect_or_load_in_time_is_terminated_and_then_killed() {
    let mut rig = Rig::new(Policy::default());
    let policy = Policy::default();
    assert_eq!(told(&rig.pass(policy.connect_timeout)), [("terminate", 0)]);
    assert_eq!(told(&rig.pass(policy.worker_grace)), [("kill", 0)]);
    assert_eq!(
        told(&rig.pass(Duration::from_secs(3600))),
        [],
        "after the kill only the exit counts"
    );
    assert_eq!(told(&rig.exits(0, super::SIGKILL)), [("spawn", 0)]);
}

#[test]
fn loading_that_advances_is_never_too_slow() {
    let mut rig = Rig::new(Policy::default());
    let (instance, generation) = rig.worker(0);
    rig.tell(Event::Connected {
        instance,
        generation,
    });
    for permille in 1..=10 {
        assert_eq!(told(&rig.pass(Duration::from_secs(290))), []);
        rig.tell(Event::LoadProgress {
            instance,
            generation,
            permille,
        });
    }
    for _ in 0..2 {
        rig.tell(Event::LoadProgress {
            instance,
            generation,
            permille: 10,
        });
        rig.pass(Duration::from_secs(150));
    }
    assert_eq!(
        rig.state(0),
        "terminating",
        "the same figure again is no progress"
    );
}

#[test]
fn a_slow_worker_that_advances_is_never_killed_and_a_stalled_one_is() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    for pulse in 1..100 {
        rig.pulse(0, pulse);
        assert_eq!(told(&rig.pass(Duration::from_secs(29))), []);
    }
    assert_eq!(told(&rig.pass(Duration::from_secs(1))), [("terminate", 0)]);
}

#[test]
fn an_unanswered_cancel_is_work_and_idleness_is_none() {
    let mut rig = Rig::ready(1, 1);
    assert_eq!(told(&rig.pass(Duration::from_secs(3600))), []);
    rig.arrive(1);
    rig.leave(1);
    assert_eq!(told(&rig.pass(Duration::from_secs(30))), [("terminate", 0)]);
}

#[test]
fn readiness_turns_false_before_the_stall_and_says_why() {
    let mut rig = Rig::ready(1, 2);
    rig.arrive(1);
    let turn = rig.machine.next_deadline();
    assert_eq!(
        turn,
        Some(rig.now.after(Policy::default().unready_min)),
        "somebody looks at that moment"
    );
    rig.pass(Policy::default().unready_min);
    let snapshot = rig.machine.snapshot(rig.now);
    assert!(!snapshot.ready);
    let reason = snapshot.not_ready_reason.unwrap_or_default();
    assert_eq!(reason, "instance 0: silent with work pending");
    assert_eq!(
        assigned(&rig.arrive(2)),
        [],
        "a doubtful worker gets no new work"
    );
    rig.pulse(0, 1);
    assert!(rig.machine.snapshot(rig.now).ready);
    assert_eq!(assigned(&rig.said).last(), Some(&(2, 0)));
}

#[test]
fn when_the_computer_slept_nobody_is_stalled_by_it() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.now = rig.now.after(Duration::from_secs(8 * 3600));
    assert_eq!(told(&rig.tell(Event::DeadlineReached)), []);
    assert_eq!(told(&rig.pass(Duration::from_secs(29))), []);
    assert_eq!(told(&rig.pass(Duration::from_secs(1))), [("terminate", 0)]);
}

#[test]
fn a_prompt_thread_that_never_answers_shows_a_stalled_worker() {
    let mut rig = Rig::ready(1, 1);
    let mut text = arrival(1);
    text.prompt_tokens = None;
    rig.tell(Event::Arrived(Box::new(text)));
    assert_eq!(
        told(&rig.pass(Policy::default().measure_stall)),
        [("terminate", 0)]
    );
}

#[test]
fn a_crash_loop_is_parked_with_its_reason_and_tried_again_later() {
    let mut rig = Rig::new(Policy::default());
    let mut spawns = 1;
    while rig.state(0) != "quarantined" {
        if rig.state(0) == "spawning" {
            rig.exits(0, ExitStatus::Code(1));
        } else {
            rig.pass(Duration::from_millis(100));
        }
        spawns = rig.worker(0).1.0;
        assert!(spawns < 20);
    }
    assert_eq!(spawns, 6, "five crashes are allowed, the sixth parks");
    let snapshot = rig.machine.snapshot(rig.now);
    assert_eq!(snapshot.instances[0].reason.as_deref(), Some("exit code 1"));
    assert!(
        snapshot
            .not_ready_reason
            .unwrap_or_default()
            .contains("quarantined (exit code 1)")
    );
    assert_eq!(
        snapshot.instances[0].next_try_in,
        Some(Policy::default().park_min)
    );
    assert_eq!(told(&rig.pass(Policy::default().park_min)), [("spawn", 0)]);
}

#[test]
fn a_permanent_error_never_loops_and_a_reload_tries_again() {
    let mut rig = Rig::new(Policy::default());
    assert_eq!(told(&rig.exits(0, EXIT_78)), []);
    assert_eq!(rig.state(0), "quarantined");
    assert_eq!(told(&rig.pass(Duration::from_secs(100_000))), []);
    assert_eq!(told(&rig.tell(Event::Reload)), [("spawn", 0)]);
    let (instance, generation) = rig.worker(0);
    rig.tell(Event::SpawnFailed {
        instance,
        generation,
        permanent: true,
    });
    assert_eq!(rig.state(0), "quarantined");
    assert_eq!(rig.machine.next_deadline(), None);
}

#[test]
fn where_all_are_parked_nobody_waits_in_vain() {
    let mut rig = Rig::new(Policy::default());
    rig.arrive(1);
    rig.exits(0, EXIT_78);
    rig.arrive(2);
    for id in [1, 2] {
        let outcome = rig.outcome(id);
        assert!(
            matches!(outcome, Some(Outcome::Denied(Denied::NoInstance { .. }))),
            "{outcome:?}"
        );
    }
}

#[test]
fn while_one_instance_starts_or_backs_off_arrivals_queue() {
    let mut rig = Rig::new(Policy::default());
    rig.arrive(1);
    rig.exits(0, SIGABRT);
    rig.exits(0, SIGABRT);
    assert_eq!(rig.state(0), "backoff");
    rig.arrive(2);
    assert_eq!((rig.outcome(1), rig.outcome(2)), (None, None));
}

#[test]
fn words_of_an_older_generation_are_counted_and_dropped() {
    let mut rig = Rig::ready(1, 1);
    let (instance, generation) = rig.worker(0);
    rig.dies(0, SIGABRT);
    let stale = [
        Event::Connected {
            instance,
            generation,
        },
        Event::Ready {
            instance,
            generation,
            facts: facts(1, 0),
        },
        Event::AttemptEnded {
            instance,
            generation,
            accepted: Vec::new(),
        },
        Event::Exited {
            instance,
            generation,
            status: SIGABRT,
        },
        Event::Connected {
            instance: proto::InstanceId(99),
            generation,
        },
    ];
    let before = rig.machine.snapshot(rig.now).counters.stale;
    for event in stale {
        assert!(rig.tell(event).is_empty());
    }
    assert_eq!(rig.machine.snapshot(rig.now).counters.stale, before + 5);
    assert_eq!(rig.state(0), "spawning");
}

#[test]
fn a_worker_that_names_no_slot_has_one() {
    let mut rig = Rig::new(Policy::default());
    rig.arrive(1);
    let said = rig.bring_up(
        0,
        WorkerFacts {
            slots: 0,
            ..facts(1, 0)
        },
    );
    assert_eq!(assigned(&said), [(1, 0)]);
}

#[test]
#[should_panic(expected = "the policy contradicts itself")]
fn a_policy_that_contradicts_itself_is_our_own_mistake() {
    Rig::new(Policy {
        instances: 0,
        ..Policy::default()
    });
}
