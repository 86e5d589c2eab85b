//! Backoff and crash-loop budget of one instance.

use std::collections::VecDeque;
use std::time::Duration;

use super::policy::Policy;
use super::tick::Tick;

/// Pseudo-random numbers from the seed that the machine was given (splitmix64).
#[derive(Debug)]
pub(super) struct Jitter(u64);

impl Jitter {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Between half of `pause` and all of it, so that instances that died together do not come
    /// back together.
    fn spread(&mut self, pause: Duration) -> Duration {
        let percent = u32::try_from(self.next() % 51).unwrap_or(0);
        pause * (50 + percent) / 100
    }
}

/// What becomes of the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Now,
    After(Duration),
    Park(Duration),
}

/// How long the worker that died had lived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Life {
    /// From spawn to Ready, or to the death where it never was.
    pub(super) start_up: Duration,
    /// How long it was Ready; `None`: it never was.
    pub(super) ready_for: Option<Duration>,
    /// Killed from outside: it says nothing about the engine, so it slows restarts but parks nothing.
    pub(super) external: bool,
}

#[derive(Debug, Default)]
pub(super) struct Restart {
    /// Moments of the crashes in the window; at most `crashes_max` + 1.
    crashes: VecDeque<Tick>,
    /// Deaths in a row without a healthy period between them.
    streak: u32,
    /// Crashes in a row before Ready: a load too slow for the window to see must not loop either.
    failed_starts: u32,
    /// Times parked in a row.
    parks: u32,
    /// It comes from being parked: one crash parks it again.
    on_trial: bool,
}

impl Restart {
    pub(super) fn died(
        &mut self,
        policy: &Policy,
        jitter: &mut Jitter,
        now: Tick,
        life: Life,
    ) -> Next {
        if life
            .ready_for
            .is_some_and(|lived| lived >= policy.crash_window)
        {
            self.clear();
        }
        if !life.external && self.is_spent(policy, now, life) {
            return Next::Park(self.park(policy));
        }
        let first = self.streak == 0;
        let doubling = self.streak.saturating_sub(1).min(20);
        self.streak = self.streak.saturating_add(1);
        if first {
            return Next::Now;
        }
        // A worker that had served and was killed from outside has nothing to recover from; the
        // pause is there only so that a killer in a loop does not keep the machine loading models.
        let longest = if life.external && life.ready_for.is_some() {
            policy.backoff_external_max
        } else {
            policy.backoff_max
        };
        let pause = policy
            .backoff_min
            .saturating_mul(1 << doubling)
            .min(longest);
        // Time spent starting up kept the crash loop slow already.
        let pause = jitter.spread(pause).saturating_sub(life.start_up);
        if pause.is_zero() {
            Next::Now
        } else {
            Next::After(pause)
        }
    }

    fn is_spent(&mut self, policy: &Policy, now: Tick, life: Life) -> bool {
        self.crashes.push_back(now);
        while self
            .crashes
            .front()
            .is_some_and(|crash| now.since(*crash) > policy.crash_window)
        {
            self.crashes.pop_front();
        }
        self.failed_starts = match life.ready_for {
            Some(_) => 0,
            None => self.failed_starts + 1,
        };
        let crashes = u32::try_from(self.crashes.len()).unwrap_or(u32::MAX);
        self.on_trial || crashes > policy.crashes_max || self.failed_starts > policy.crashes_max
    }

    fn park(&mut self, policy: &Policy) -> Duration {
        let pause = policy
            .park_min
            .saturating_mul(1 << self.parks.min(20))
            .min(policy.park_max);
        let parks = self.parks.saturating_add(1);
        *self = Self {
            parks,
            on_trial: true,
            ..Self::default()
        };
        pause
    }

    /// An operator's fresh start, or a healthy period.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crash(restart: &mut Restart, at_s: u64, ready_s: Option<u64>, external: bool) -> Next {
        let life = Life {
            start_up: Duration::ZERO,
            ready_for: ready_s.map(Duration::from_secs),
            external,
        };
        let now = Tick::from_micros(at_s * 1_000_000);
        restart.died(&Policy::default(), &mut Jitter::new(7), now, life)
    }

    #[test]
    fn the_first_restart_is_immediate_and_later_ones_grow() {
        let mut restart = Restart::default();
        assert_eq!(crash(&mut restart, 0, Some(1), false), Next::Now);
        let mut before = Duration::ZERO;
        for at_s in 1..5 {
            let Next::After(pause) = crash(&mut restart, at_s, Some(1), false) else {
                panic!("crash {at_s} has no pause")
            };
            assert!(pause > before && pause <= Policy::default().backoff_max);
            before = pause / 2;
        }
    }

    #[test]
    fn one_crash_more_than_the_budget_parks_and_each_failed_trial_doubles_the_pause() {
        let mut restart = Restart::default();
        for at_s in 0..5 {
            assert!(!matches!(
                crash(&mut restart, at_s, Some(1), false),
                Next::Park(_)
            ));
        }
        let park = Policy::default().park_min;
        assert_eq!(crash(&mut restart, 5, Some(1), false), Next::Park(park));
        assert_eq!(crash(&mut restart, 400, None, false), Next::Park(park * 2));
        assert_eq!(crash(&mut restart, 1100, None, false), Next::Park(park * 4));
        for at_s in 0..10 {
            let next = crash(&mut restart, 2000 + at_s * 4000, None, false);
            assert!(matches!(next, Next::Park(pause) if pause <= Policy::default().park_max));
        }
    }

    #[test]
    fn ready_workers_killed_from_outside_come_back_after_a_second_at_most() {
        let mut restart = Restart::default();
        let longest = Policy::default().backoff_external_max;
        for at_s in 0..100 {
            match crash(&mut restart, at_s, Some(1), true) {
                Next::Now => {}
                Next::After(pause) => assert!(pause <= longest),
                Next::Park(_) => panic!("parked"),
            }
        }
    }

    #[test]
    fn a_healthy_period_makes_the_next_restart_immediate_again() {
        let mut restart = Restart::default();
        for at_s in 0..6 {
            crash(&mut restart, at_s, Some(1), false);
        }
        assert_eq!(crash(&mut restart, 500, Some(61), false), Next::Now);
    }

    #[test]
    fn loads_too_slow_for_the_window_are_parked_all_the_same() {
        let mut restart = Restart::default();
        for start in 0..5 {
            assert!(!matches!(
                crash(&mut restart, start * 100, None, false),
                Next::Park(_)
            ));
        }
        assert!(matches!(
            crash(&mut restart, 500, None, false),
            Next::Park(_)
        ));
    }

    #[test]
    fn deaths_from_outside_slow_restarts_and_park_nothing() {
        let mut restart = Restart::default();
        for at_s in 0..50 {
            assert!(!matches!(
                crash(&mut restart, at_s, Some(0), true),
                Next::Park(_)
            ));
        }
    }

    #[test]
    fn time_spent_starting_up_counts_into_the_pause() {
        let mut restart = Restart::default();
        crash(&mut restart, 0, Some(1), false);
        let life = Life {
            start_up: Duration::from_secs(20),
            ready_for: Some(Duration::from_secs(1)),
            external: false,
        };
        let now = Tick::from_micros(30_000_000);
        let next = restart.died(&Policy::default(), &mut Jitter::new(7), now, life);
        assert_eq!(next, Next::Now);
    }
}
