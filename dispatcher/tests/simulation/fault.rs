//! What goes wrong in one run, and how often: all of it drawn from the seed.

use std::time::Duration;

use dispatcher::machine::Policy;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// All chance of one run.
#[derive(Debug)]
pub(crate) struct Dice(ChaCha8Rng);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// In `low..=high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.next_u64() % (high - low + 1)
    }

    pub(crate) fn between_u32(&mut self, low: u32, high: u32) -> u32 {
        u32::try_from(self.between(u64::from(low), u64::from(high))).unwrap()
    }

    /// True in `permyriad` of 10,000 throws.
    pub(crate) fn chance(&mut self, permyriad: u64) -> bool {
        permyriad > 0 && self.0.next_u64() % 10_000 < permyriad
    }

    pub(crate) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.between(low, high))
    }

    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.micros(low * 1000, high * 1000)
    }
}

/// Chances in 10,000, each per occasion of its own kind. Most runs have few kinds, some have many.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Per step: the engine aborts.
    pub(crate) crash: u64,
    /// Of crashes: an exit code in place of a signal, or the OOM killer.
    pub(crate) odd_status: u64,
    /// Per step: somebody kills the worker from outside.
    pub(crate) external: u64,
    /// Of deaths: the end of the link is never read.
    pub(crate) no_eof: u64,
    /// Per step: the link closes and the process lives on.
    pub(crate) no_exit: u64,
    /// Of deaths: frames still on their way are lost.
    pub(crate) lost_frames: u64,
    /// Of SIGKILLs: the process is reaped late.
    pub(crate) late_reap: u64,
    /// Per step: the engine makes no further step.
    pub(crate) hang: u64,
    /// Of workers: SIGTERM and drain are not heard.
    pub(crate) deaf: u64,
    /// Of workers: steps take seconds.
    pub(crate) slow: u64,
    /// Of starts: loading takes long, hangs, crashes, cannot be configured, cannot be spawned.
    pub(crate) slow_load: u64,
    pub(crate) hung_load: u64,
    pub(crate) failed_load: u64,
    pub(crate) permanent: u64,
    pub(crate) failed_spawn: u64,
    /// Of prompts: the prompt thread has no time; of prompts: it dies of it.
    pub(crate) busy_prompt_thread: u64,
    pub(crate) tokenise_crash: u64,
    /// Of assignments: the worker sends the request back, refuses it, or gives its row up.
    pub(crate) not_taken: u64,
    pub(crate) row_failure: u64,
    /// Of frames: a copy of an old one arrives again.
    pub(crate) echo: u64,
    /// Of requests: the client leaves; does not read; sets a deadline; sends a prompt that kills engines.
    pub(crate) cancel: u64,
    pub(crate) slow_reader: u64,
    pub(crate) deadline: u64,
    pub(crate) poison: u64,
    /// Whole-run occasions: how often each comes, 0..n times.
    pub(crate) clock_jumps: u64,
    pub(crate) reloads: u64,
    pub(crate) new_model: bool,
    pub(crate) memory_waves: u64,
    pub(crate) drain_early: bool,
    pub(crate) stop: bool,
}

impl Faults {
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        // How wild the run is: in some nothing goes wrong, in some nearly everything.
        let wildness = [0, 800, 2500, 5000][usize::try_from(dice.between(0, 3)).unwrap()];
        let mut maybe = |low: u64, high: u64| {
            let on = dice.chance(wildness);
            let rate = dice.between(low, high);
            if on { rate } else { 0 }
        };
        Self {
            crash: maybe(5, 200),
            odd_status: maybe(1000, 6000),
            external: maybe(5, 200),
            no_eof: maybe(500, 10_000),
            no_exit: maybe(5, 50),
            lost_frames: maybe(1000, 10_000),
            late_reap: maybe(1000, 10_000),
            hang: maybe(5, 60),
            deaf: maybe(1000, 10_000),
            slow: maybe(1000, 8000),
            slow_load: maybe(1000, 8000),
            hung_load: maybe(500, 3000),
            failed_load: maybe(500, 9000),
            permanent: maybe(200, 2000),
            failed_spawn: maybe(200, 3000),
            busy_prompt_thread: maybe(500, 8000),
            tokenise_crash: maybe(10, 300),
            not_taken: maybe(100, 3000),
            row_failure: maybe(50, 500),
            echo: maybe(50, 500),
            cancel: maybe(500, 6000),
            slow_reader: maybe(200, 2000),
            deadline: maybe(500, 3000),
            poison: maybe(100, 2000),
            clock_jumps: maybe(1, 3),
            reloads: maybe(1, 3),
            new_model: maybe(1, 1) > 0,
            memory_waves: maybe(1, 3),
            drain_early: maybe(1, 1) > 0,
            stop: maybe(0, 1) > 0,
        }
    }

    /// Nothing can take a worker from the requests or a request from its worker.
    pub(crate) fn are_harmless(&self) -> bool {
        let harmful = [
            self.crash,
            self.external,
            self.no_exit,
            self.hang,
            self.slow,
            self.hung_load,
            self.failed_load,
            self.permanent,
            self.failed_spawn,
            self.busy_prompt_thread,
            self.tokenise_crash,
            self.not_taken,
            self.row_failure,
            self.cancel,
            self.slow_reader,
            self.deadline,
            self.poison,
            self.clock_jumps,
            self.reloads,
            self.memory_waves,
            u64::from(self.drain_early),
            u64::from(self.stop),
        ];
        harmful.iter().all(|rate| *rate == 0)
    }

    /// Workers die, but only from outside.
    pub(crate) fn only_outsiders_kill(&self) -> bool {
        let engines = [
            self.crash,
            self.no_exit,
            self.hang,
            self.tokenise_crash,
            self.poison,
        ];
        engines.iter().all(|rate| *rate == 0)
    }
}

/// Small limits, so that they are met often.
pub(crate) fn draw_policy(dice: &mut Dice) -> Policy {
    let seconds = Duration::from_secs;
    let queue_timeout = [5, 60, 600][usize::try_from(dice.between(0, 2)).unwrap()];
    Policy {
        instances: dice.between_u32(1, 4),
        queue_entries_max: dice.between_u32(3, 60),
        queue_bytes_max: dice.between(1_000, 20_000),
        queue_tokens_max: dice.between(500, 20_000),
        queue_timeout: seconds(queue_timeout),
        key_in_flight_max: dice.chance(3000).then(|| dice.between_u32(1, 3)),
        priority_aging: seconds(dice.between(1, 30)),
        connect_timeout: seconds(10),
        load_stall: seconds(20),
        warm_stall: seconds(20),
        park_min: seconds(dice.between(20, 300)),
        drain_timeout: seconds(dice.between(2, 30)),
        replace_timeout: seconds(dice.between(1, 30)),
        crashes_max: dice.between_u32(1, 5),
        ..Policy::default()
    }
}
