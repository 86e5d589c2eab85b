//! What a worker's death means for the requests it interrupted.

use std::time::Duration;

use proto::RequestId;

use super::{Rig, SIGABRT, SIGKILL, arrival, asked_to_measure, assigned, facts, told};
use crate::machine::action::{Denied, Failure, Outcome};
use crate::machine::event::{Event, ExitStatus, Fingerprint, TokenisedOutcome};
use crate::machine::policy::Policy;

fn is_running(outcome: Option<&Outcome>) -> bool {
    outcome.is_none()
}

#[test]
fn a_death_before_the_first_token_is_only_delay() {
    let mut rig = Rig::ready(2, 1);
    assert_eq!(assigned(&rig.arrive(1)), [(1, 0)]);
    rig.link_ends(0, &[(1, 1, 0)]);
    let said = rig.exits(0, SIGABRT);
    assert_eq!(assigned(&said), [(1, 1)]);
    rig.finish(1, 2);
    assert!(matches!(rig.outcome(1), Some(Outcome::Completed { .. })));
}

#[test]
fn a_stream_waits_for_the_fence_and_not_for_the_reap() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.first_token(1, 1);
    for pulse in 1..4 {
        rig.pulse(0, pulse);
    }
    // The worker stalls: TERM, then KILL; the fence comes with the kill, the exit does not come.
    let said = rig.pass(Duration::from_secs(30));
    assert_eq!(told(&said), [("terminate", 0)]);
    let said = rig.pass(Duration::from_secs(5));
    assert_eq!(told(&said), [("kill", 0)]);
    assert_eq!(assigned(&said), []);
    let said = rig.link_ends(0, &[(1, 1, 17)]);
    assert_eq!(assigned(&said), [(1, 1)]);
    assert_eq!(rig.state(0), "terminating", "the place stays taken");
    assert_eq!(told(&rig.exits(0, SIGKILL)), [("spawn", 0)]);
}

#[test]
fn an_exit_without_an_end_of_the_link_closes_it_after_the_grace() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    assert_eq!(assigned(&rig.exits(0, SIGABRT)), []);
    let said = rig.pass(Policy::default().link_grace);
    assert_eq!(told(&said), [("close", 0)]);
    let said = rig.link_ends(0, &[(1, 1, 3)]);
    assert_eq!(assigned(&said), [(1, 1)]);
    assert_eq!(told(&said), [("spawn", 0)]);
}

#[test]
fn a_closed_link_with_a_live_process_gets_sigkill_and_counts_as_the_engines() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    let said = rig.link_ends(0, &[(1, 1, 3)]);
    assert_eq!(
        assigned(&said),
        [],
        "whom the death counts against is not known yet"
    );
    let said = rig.pass(Policy::default().link_grace);
    assert_eq!((told(&said), assigned(&said)), (vec![], vec![(1, 1)]));
    assert_eq!(
        told(&rig.pass(Policy::default().lost_link_grace)),
        [("kill", 0)]
    );
    assert_eq!(rig.machine.requests[&RequestId(1)].engine_deaths, 1);
}

#[test]
fn what_goes_on_before_the_exit_status_goes_on_alone_and_a_good_status_frees_it() {
    let mut rig = Rig::ready(2, 2);
    for id in 1..=4 {
        rig.arrive(id);
    }
    rig.finish(2, 1);
    rig.finish(4, 1);
    rig.link_ends(0, &[(1, 1, 3), (3, 1, 3)]);
    let said = rig.pass(Policy::default().link_grace);
    assert_eq!(assigned(&said), [(1, 1)], "no suspect joins a batch");
    rig.exits(0, SIGKILL);
    rig.finish(1, 2);
    let both = [assigned(&rig.said), assigned(&rig.arrive(5))].concat();
    assert_eq!(
        both[5..],
        [(3, 1), (5, 1)],
        "it was from outside: nobody is a suspect"
    );
}

#[test]
fn a_second_death_is_not_run_from_before_its_status_is_known() {
    let mut rig = Rig::ready(3, 1);
    rig.arrive(1);
    rig.dies(0, SIGABRT);
    rig.link_ends(1, &[(1, 2, 3)]);
    let said = rig.pass(Policy::default().link_grace * 2);
    assert_eq!(assigned(&said), [], "a third engine would be at risk");
    let said = rig.exits(1, SIGKILL);
    assert_eq!(assigned(&said), [(1, 2)], "from outside it fails nothing");
}

#[test]
fn after_one_engines_death_a_request_runs_alone_and_the_second_fails_it() {
    let mut rig = Rig::ready(2, 4);
    rig.arrive(1);
    rig.dies(0, SIGABRT);
    assert!(is_running(rig.outcome(1)));
    for id in 2..=4 {
        assert_eq!(
            assigned(&rig.arrive(id)),
            [],
            "no batch-mates for a suspect"
        );
    }
    let said = rig.dies(1, SIGABRT);
    let failed = Failure::WorkerDied {
        oom: false,
        deaths: 2,
    };
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(failed)));
    assert_eq!(assigned(&said), []);
    let mut again = arrival(9);
    again.fingerprint = Fingerprint(1);
    rig.tell(Event::Arrived(Box::new(again)));
    let outcome = rig.outcome(9);
    assert!(matches!(
        outcome,
        Some(Outcome::Denied(Denied::Quarantined { .. }))
    ));
}

#[test]
fn innocent_batch_mates_of_a_poisonous_prompt_complete() {
    let mut rig = Rig::ready(2, 4);
    // All four share the first batch.
    for id in 1..=8 {
        rig.arrive(id);
    }
    let batch: Vec<_> = assigned(&rig.said);
    let batch: Vec<_> = batch
        .iter()
        .filter(|(_, home)| *home == 0)
        .map(|(id, _)| *id)
        .collect();
    let poison = batch[0];
    let mut deaths = 0;
    for _ in 0..200 {
        // The worker that has the poison dies; every other running request finishes.
        let seats: Vec<_> = (0..2)
            .flat_map(|index| {
                let seats = rig.machine.instances[index].seats.clone();
                seats
                    .into_iter()
                    .map(move |(id, seat)| (index, id.0, seat.attempt.0))
            })
            .collect();
        let Some((index, id, attempt)) = seats
            .iter()
            .find(|(_, id, _)| *id == poison)
            .or(seats.first())
            .copied()
        else {
            for instance in 0..2 {
                if rig.state(instance) == "spawning" {
                    rig.bring_up(instance, facts(4, 0));
                }
            }
            rig.pass(Duration::from_secs(1));
            if rig.machine.requests.is_empty() {
                break;
            }
            continue;
        };
        if id == poison {
            deaths += 1;
            rig.dies(u32::try_from(index).unwrap(), SIGABRT);
        } else {
            rig.finish(id, attempt);
        }
    }
    assert_eq!(
        deaths, 2,
        "a poisonous prompt takes at most two workers with it"
    );
    for id in 1..=8 {
        let completed = matches!(rig.outcome(id), Some(Outcome::Completed { .. }));
        assert_eq!(
            completed,
            id != poison,
            "request {id}: {:?}",
            rig.outcome(id)
        );
    }
}

#[test]
fn deaths_from_outside_never_fail_a_request() {
    let mut rig = Rig::ready(1, 2);
    rig.arrive(1);
    for _ in 0..5 {
        rig.dies(0, SIGKILL);
        rig.revive(0, 2);
        assert!(is_running(rig.outcome(1)));
    }
    // Five are enough for suspicion: it runs alone now.
    assert_eq!(assigned(&rig.arrive(2)), []);
    rig.finish(1, 6);
    assert!(matches!(rig.outcome(1), Some(Outcome::Completed { .. })));
}

#[test]
fn a_death_while_alone_by_suspicion_counts_as_the_engines() {
    let mut rig = Rig::ready(1, 2);
    rig.arrive(1);
    for death in 1..=7 {
        assert!(is_running(rig.outcome(1)), "before death {death}");
        rig.dies(0, SIGKILL);
        rig.revive(0, 2);
    }
    let outcome = rig.outcome(1);
    assert!(
        matches!(outcome, Some(Outcome::Failed(Failure::WorkerDied { .. }))),
        "{outcome:?}"
    );
}

#[test]
fn the_oom_killers_kill_counts_and_is_told_apart() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    let oom = ExitStatus::Signal {
        signal: 9,
        oom: true,
    };
    rig.dies(0, oom);
    rig.dies(1, oom);
    let failed = Failure::WorkerDied {
        oom: true,
        deaths: 2,
    };
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(failed)));
}

#[test]
fn a_resumed_request_stands_before_all_that_wait_and_outlives_the_queue_timeout() {
    let mut rig = Rig::ready(1, 1);
    for id in 1..=3 {
        rig.arrive(id);
    }
    rig.link_ends(0, &[(1, 1, 4)]);
    rig.exits(0, SIGKILL);
    let mut waited = Duration::ZERO;
    while waited < Policy::default().queue_timeout {
        rig.pass(Duration::from_secs(20));
        waited += Duration::from_secs(20);
        rig.tell(Event::LoadProgress {
            instance: rig.worker(0).0,
            generation: rig.worker(0).1,
            permille: 1,
        });
    }
    assert!(is_running(rig.outcome(1)));
    assert!(rig.outcome(2).is_some());
    while rig.state(0) != "spawning" {
        rig.exits(0, SIGKILL);
        rig.pass(Duration::from_secs(1));
    }
    assert_eq!(assigned(&rig.bring_up(0, facts(1, 0))), [(1, 0)]);
}

#[test]
fn a_stream_resumes_only_on_its_own_model_and_fails_where_none_is_left() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.link_ends(0, &[(1, 1, 4)]);
    rig.arrive(2);
    rig.exits(0, SIGKILL);
    assert_eq!(assigned(&rig.said), [(1, 0), (2, 1)]);
    // The worker that comes back has another model, and so has the other one later.
    assert_eq!(assigned(&rig.bring_up(0, facts(1, 1))), []);
    assert!(is_running(rig.outcome(1)));
    rig.dies(1, SIGKILL);
    rig.pass(Duration::from_secs(1));
    rig.bring_up(1, facts(1, 1));
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(Failure::NoInstance)));
}

#[test]
fn a_prompt_measured_by_one_model_is_measured_again_for_another() {
    let mut rig = Rig::ready(1, 1);
    let mut text = arrival(1);
    text.prompt_tokens = None;
    rig.tell(Event::Arrived(Box::new(text)));
    rig.tokenised(1, 0, TokenisedOutcome::Tokens(12));
    rig.link_ends(0, &[(1, 1, 0)]);
    rig.exits(0, SIGKILL);
    let said = rig.bring_up(0, facts(1, 1));
    assert_eq!(
        (assigned(&said), asked_to_measure(&said)),
        (vec![], vec![(1, 0)])
    );
    let said = rig.tokenised(1, 0, TokenisedOutcome::Tokens(14));
    assert_eq!(assigned(&said), [(1, 0)]);
}

#[test]
fn a_stream_whose_last_token_arrived_without_its_end_is_complete() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.link_ends(0, &[(1, 1, 100)]);
    let said = rig.exits(0, SIGABRT);
    assert_eq!(assigned(&said), []);
    assert!(matches!(rig.outcome(1), Some(Outcome::Completed { .. })));
}

#[test]
fn a_prompt_that_kills_who_counts_it_takes_at_most_two_workers() {
    let mut rig = Rig::ready(3, 1);
    let mut text = arrival(1);
    text.prompt_tokens = None;
    assert_eq!(
        asked_to_measure(&rig.tell(Event::Arrived(Box::new(text)))),
        [(1, 0)]
    );
    assert_eq!(asked_to_measure(&rig.dies(0, SIGABRT)), [(1, 1)]);
    assert_eq!(
        assigned(&rig.arrive(2)),
        [(2, 2)],
        "nobody joins the suspect"
    );
    rig.dies(1, SIGABRT);
    let outcome = rig.outcome(1);
    assert!(
        matches!(outcome, Some(Outcome::Failed(Failure::WorkerDied { .. }))),
        "{outcome:?}"
    );
}

#[test]
fn requests_that_must_run_alone_take_their_turns_before_newer_work() {
    let mut rig = Rig::ready(2, 2);
    for id in 1..=4 {
        rig.arrive(id);
    }
    assert_eq!(assigned(&rig.said), [(1, 0), (2, 1), (3, 0), (4, 1)]);
    rig.dies(0, SIGABRT);
    rig.arrive(5);
    // Instance 0 does not come back; instance 1 is emptied for the first suspect, and does not
    // take the newcomer although it has a slot.
    assert_eq!(assigned(&rig.finish(2, 1)), []);
    assert_eq!(assigned(&rig.finish(4, 1)), [(1, 1)]);
    assert_eq!(assigned(&rig.arrive(6)), [], "no batch-mates");
    assert_eq!(assigned(&rig.finish(1, 2)), [(3, 1)]);
    assert_eq!(assigned(&rig.finish(3, 2)), [(5, 1), (6, 1)]);
}

#[test]
fn suspects_never_take_the_last_worker_that_serves_the_others() {
    let mut rig = Rig::ready(2, 2);
    rig.arrive(1);
    rig.arrive(2);
    rig.arrive(3);
    rig.dies(0, SIGABRT);
    rig.finish(2, 1);
    rig.revive(0, 2);
    let suspects: Vec<_> = assigned(&rig.said).into_iter().skip(3).collect();
    assert_eq!(suspects, [(1, 1)], "the other suspect waits");
    assert_eq!(assigned(&rig.arrive(4)), [(4, 0)]);
}
