//! Seeds × steps over `machine::Dispatch`, with faults, against a shadow model.
//!
//! A failing seed is printed with the command that replays it with a trace.

#[cfg(test)]
#[path = "simulation/fault.rs"]
mod fault;
#[cfg(test)]
#[path = "simulation/oracle.rs"]
mod oracle;
#[cfg(test)]
#[path = "simulation/world.rs"]
mod world;

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use crate::fault::{Dice, Faults, draw_policy};
    use crate::world::World;

    const SEEDS: u64 = 10_000;
    const PARTS: u64 = 8;

    fn run(seed: u64, trace: bool) -> World {
        let mut dice = Dice::new(seed);
        let faults = Faults::draw(&mut dice);
        let policy = draw_policy(&mut dice);
        if trace {
            eprintln!("seed {seed}: {faults:#?} {policy:#?}");
        }
        let mut world = World::new(seed, faults, policy, dice, trace);
        world.run();
        world
    }

    fn run_part(part: u64) {
        for seed in (part..SEEDS).step_by(usize::try_from(PARTS).unwrap()) {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, false))) {
                eprintln!(
                    "seed {seed} fails; replay it with a trace by\n  \
                     SIM_SEED={seed} cargo test --release -p dispatcher --test simulation \
                     one_seed_replays -- --nocapture"
                );
                resume_unwind(panic);
            }
        }
    }

    /// `SIM_SEED` chooses the seed and prints its trace.
    #[test]
    fn one_seed_replays_to_the_same_actions() {
        let chosen = std::env::var("SIM_SEED").ok();
        let seed = chosen.as_deref().map_or(7, |seed| seed.parse().unwrap());
        let first = run(seed, chosen.is_some());
        let second = run(seed, false);
        assert_eq!(first.trail, second.trail, "seed {seed}");
    }

    /// What any hundred seeds must come across, so that the simulation cannot quietly stop trying.
    const MUST_BE_SEEN: [&str; 46] = [
        "Entries",
        "Bytes",
        "Tokens",
        "KeyShare",
        "Draining",
        "NoInstance",
        "OutOfMemory",
        "QueueTimeout",
        "DeadlineExceeded",
        "PromptTooLong",
        "PromptRejected",
        "Quarantined",
        "Rejected",
        "Engine",
        "WorkerDied",
        "Stop",
        "Length",
        "ClientDisconnect",
        "SlowReader",
        "Planned",
        "External",
        "Permanent",
        "spawning",
        "loading",
        "warming",
        "ready",
        "draining",
        "terminating",
        "backoff",
        "quarantined",
        "stopped",
        "Request",
        "Stale",
        "Failover",
        "FingerprintQuarantined",
        "Spawn",
        "Terminate",
        "Kill",
        "CloseLink",
        "SendDrain",
        "SendTokenise",
        "SendGenerate",
        "SendCancel",
        "Stopped",
        "alone",
        "resumed",
    ];

    #[test]
    fn every_kind_of_outcome_exit_and_action_comes_up() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 20_000..20_600 {
            seen.extend(run(seed, false).oracle.seen);
        }
        let missing: Vec<_> = MUST_BE_SEEN
            .iter()
            .filter(|words| !seen.contains(**words))
            .collect();
        assert!(missing.is_empty(), "never seen in 600 runs: {missing:?}");
    }

    macro_rules! parts {
        ($($name:ident: $part:literal,)*) => {
            $(
                #[test]
                fn $name() {
                    run_part($part);
                }
            )*
        };
    }

    parts! {
        the_promises_hold_under_faults_seeds_0_of_8: 0,
        the_promises_hold_under_faults_seeds_1_of_8: 1,
        the_promises_hold_under_faults_seeds_2_of_8: 2,
        the_promises_hold_under_faults_seeds_3_of_8: 3,
        the_promises_hold_under_faults_seeds_4_of_8: 4,
        the_promises_hold_under_faults_seeds_5_of_8: 5,
        the_promises_hold_under_faults_seeds_6_of_8: 6,
        the_promises_hold_under_faults_seeds_7_of_8: 7,
    }
}
