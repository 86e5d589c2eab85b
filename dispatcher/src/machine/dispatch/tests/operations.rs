//! Drain, stop and rolling replacement.

use std::time::Duration;

use super::{Rig, SIGABRT, SIGKILL, assigned, facts, told};
use crate::machine::action::{Action, Denied, Failure, Outcome};
use crate::machine::event::{Event, ExitStatus};
use crate::machine::policy::Policy;

const EXIT_0: ExitStatus = ExitStatus::Code(0);

#[test]
fn a_drain_admits_nothing_and_lets_what_was_accepted_end() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    assert_eq!(told(&rig.tell(Event::Drain)), []);
    rig.arrive(3);
    let outcome = rig.outcome(3);
    assert!(matches!(
        outcome,
        Some(Outcome::Denied(Denied::Draining { .. }))
    ));
    assert!(!rig.machine.snapshot(rig.now).ready);
    assert_eq!(assigned(&rig.finish(1, 1)), [(2, 0)]);
    assert_eq!(told(&rig.finish(2, 1)), [("drain", 0)]);
    assert_eq!(told(&rig.link_ends(0, &[])), []);
    assert_eq!(told(&rig.exits(0, EXIT_0)), [("stopped", 0)]);
}

#[test]
fn the_drains_end_gives_the_rest_its_terminal_event_and_leaves() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.arrive(2);
    rig.tell(Event::Drain);
    let mut said = Vec::new();
    for pulse in 1..=30 {
        rig.pulse(0, pulse);
        said.extend(rig.pass(Duration::from_secs(1)));
    }
    assert_eq!(told(&said), [("terminate", 0)]);
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(Failure::Draining)));
    let outcome = rig.outcome(2);
    assert!(matches!(
        outcome,
        Some(Outcome::Denied(Denied::Draining { .. }))
    ));
    assert_eq!(
        told(&rig.pass(Policy::default().worker_grace)),
        [("kill", 0)]
    );
    rig.link_ends(0, &[]);
    assert_eq!(told(&rig.exits(0, SIGKILL)), [("stopped", 0)]);
}

#[test]
fn a_worker_that_cannot_be_reaped_does_not_keep_the_dispatcher() {
    let mut rig = Rig::ready(2, 1);
    rig.tell(Event::Drain);
    let said = rig.pass(Duration::from_secs(60));
    let verbs = ["terminate", "kill"]
        .map(|verb| told(&said).iter().filter(|(said, _)| *said == verb).count());
    assert_eq!(verbs, [2, 2]);
    assert_eq!(told(&said).last(), Some(&("stopped", 0)));
    assert_eq!(rig.machine.next_deadline(), None);
    assert!(rig.arrive(1).is_empty(), "nothing follows Stopped");
}

#[test]
fn a_second_signal_ends_everything_at_once() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.tell(Event::Drain);
    let said = rig.tell(Event::Stop);
    assert_eq!(told(&said), [("kill", 0), ("kill", 1)]);
    assert_eq!(rig.outcome(1), Some(&Outcome::Failed(Failure::Draining)));
    for instance in 0..2 {
        rig.link_ends(instance, &[]);
        rig.exits(instance, SIGKILL);
    }
    assert_eq!(told(&rig.said).last(), Some(&("stopped", 0)));
}

#[test]
fn a_worker_that_dies_while_others_drain_is_replaced_as_long_as_there_is_work() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.tell(Event::Drain);
    rig.link_ends(0, &[(1, 1, 3)]);
    assert_eq!(told(&rig.exits(0, SIGABRT)), [("spawn", 0)]);
    assert_eq!(assigned(&rig.bring_up(0, facts(1, 0))), [(1, 0)]);
    rig.finish(1, 2);
    assert_eq!(told(&rig.dies(0, EXIT_0)), [("stopped", 0)]);
}

#[test]
fn a_reload_replaces_one_instance_at_a_time_and_loses_nothing() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.arrive(2);
    assert_eq!(told(&rig.tell(Event::Reload)), []);
    assert_eq!((rig.state(0), rig.state(1)), ("draining", "ready"));
    assert_eq!(told(&rig.finish(1, 1)), [("drain", 0)]);
    rig.arrive(3);
    assert_eq!(rig.outcome(3), None);
    assert_eq!(told(&rig.dies(0, EXIT_0)), [("spawn", 0)]);
    assert_eq!(
        rig.state(1),
        "ready",
        "the next waits until this one serves"
    );
    assert_eq!(assigned(&rig.bring_up(0, facts(1, 0))), [(3, 0)]);
    assert_eq!(rig.state(1), "draining");
    rig.finish(2, 1);
    rig.dies(1, EXIT_0);
    rig.bring_up(1, facts(1, 0));
    assert_eq!((rig.state(0), rig.state(1)), ("ready", "ready"));
    assert_eq!((rig.worker(0).1.0, rig.worker(1).1.0), (2, 2));
}

#[test]
fn what_still_runs_when_its_replacement_is_due_resumes_and_it_counts_against_nobody() {
    let mut rig = Rig::ready(1, 1);
    rig.arrive(1);
    rig.tell(Event::Reload);
    let said = rig.pass(Policy::default().replace_timeout);
    assert_eq!(told(&said), [("close", 0), ("terminate", 0)]);
    rig.link_ends(0, &[(1, 1, 40)]);
    assert_eq!(
        told(&rig.exits(
            0,
            ExitStatus::Signal {
                signal: 15,
                oom: false
            }
        )),
        [("spawn", 0)]
    );
    assert_eq!(assigned(&rig.bring_up(0, facts(2, 0))), [(1, 0)]);
    assert_eq!(assigned(&rig.arrive(2)), [(2, 0)], "nobody is a suspect");
    rig.finish(1, 2);
    assert!(matches!(rig.outcome(1), Some(Outcome::Completed { .. })));
}

#[test]
fn a_reload_during_a_reload_replaces_what_was_replaced_too_early() {
    let mut rig = Rig::ready(2, 1);
    rig.tell(Event::Reload);
    rig.dies(0, EXIT_0);
    assert_eq!(rig.state(0), "spawning");
    // Generation 2 of instance 0 was started with the configuration before this one.
    assert_eq!(told(&rig.tell(Event::Reload)), [("terminate", 0)]);
    assert_eq!(rig.state(1), "ready", "one at a time");
    rig.tell(Event::Reload);
    rig.exits(0, EXIT_0);
    rig.bring_up(0, facts(1, 0));
    rig.dies(1, EXIT_0);
    rig.bring_up(1, facts(1, 0));
    assert_eq!((rig.state(0), rig.state(1)), ("ready", "ready"));
    assert_eq!((rig.worker(0).1.0, rig.worker(1).1.0), (3, 2));
}

#[test]
fn where_the_first_replacement_cannot_work_the_others_serve_on() {
    let mut rig = Rig::ready(2, 1);
    rig.tell(Event::Reload);
    rig.dies(0, EXIT_0);
    rig.exits(0, ExitStatus::Code(78));
    assert_eq!((rig.state(0), rig.state(1)), ("quarantined", "ready"));
    assert_eq!(assigned(&rig.arrive(1)), [(1, 1)]);
    rig.pass(Duration::from_secs(25));
    assert_eq!(rig.state(1), "ready");
}

#[test]
fn a_crash_while_leaving_counts_against_the_requests_wherever_they_are() {
    let mut rig = Rig::ready(2, 1);
    rig.arrive(1);
    rig.tell(Event::Reload);
    rig.pass(Policy::default().replace_timeout);
    let said = rig.link_ends(0, &[(1, 1, 40)]);
    assert_eq!(assigned(&said), [(1, 1)], "a planned end is nobody's fault");
    rig.exits(0, SIGABRT);
    let said = rig.dies(1, SIGABRT);
    assert!(
        said.iter()
            .any(|action| matches!(action, Action::End { .. })),
        "the second death fails it"
    );
}
