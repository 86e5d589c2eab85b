//! Is an instance that has work making progress, or stalled.

use std::time::Duration;

use super::policy::Policy;
use super::tick::Tick;

/// The pulse of one Ready engine. Silence counts only while work is pending: an idle engine makes no steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Liveness {
    pulse: u64,
    longest_step: Duration,
    /// When the pulse last moved.
    moved_at: Tick,
    /// Since when there is work without a pause.
    pending_since: Option<Tick>,
}

impl Liveness {
    pub(super) fn new(now: Tick) -> Self {
        Self {
            pulse: 0,
            longest_step: Duration::ZERO,
            moved_at: now,
            pending_since: None,
        }
    }

    /// The engine thread's counter was reported. Any change is progress.
    pub(super) fn pulse(&mut self, pulse: u64, longest_step: Duration, now: Tick) {
        if pulse != self.pulse {
            self.pulse = pulse;
            self.moved_at = now;
        }
        self.longest_step = longest_step;
    }

    pub(super) fn set_pending(&mut self, pending: bool, now: Tick) {
        if pending {
            self.pending_since.get_or_insert(now);
        } else {
            self.pending_since = None;
        }
    }

    /// The moment at which silence becomes a stall; `None` without work.
    pub(super) fn stalled_at(&self, policy: &Policy) -> Option<Tick> {
        let scaled = self.longest_step.saturating_mul(policy.stall_factor);
        let bound = policy.stall_min.max(scaled).min(policy.stall_max);
        self.silent_since().map(|since| since.after(bound))
    }

    /// The moment at which silence makes the instance unready; `None` without work.
    pub(super) fn unready_at(&self, policy: &Policy) -> Option<Tick> {
        let scaled = self.longest_step.saturating_mul(policy.unready_factor);
        let bound = policy.unready_min.max(scaled);
        self.silent_since().map(|since| since.after(bound))
    }

    fn silent_since(&self) -> Option<Tick> {
        self.pending_since.map(|since| since.max(self.moved_at))
    }

    /// The dispatcher itself slept: that time is not the engine's silence.
    pub(super) fn forgive(&mut self, lateness: Duration) {
        self.moved_at = self.moved_at.after(lateness);
        self.pending_since = self.pending_since.map(|since| since.after(lateness));
    }

    pub(super) fn pulse_age(&self, now: Tick) -> Duration {
        now.since(self.moved_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Tick {
        Tick::from_micros(seconds * 1_000_000)
    }

    #[test]
    fn an_idle_engine_is_never_stalled_however_long_it_is_silent() {
        let liveness = Liveness::new(at(0));
        assert_eq!(liveness.stalled_at(&Policy::default()), None);
    }

    #[test]
    fn silence_counts_from_the_work_and_not_from_the_idle_time_before() {
        let mut liveness = Liveness::new(at(0));
        liveness.set_pending(true, at(1000));
        assert_eq!(liveness.stalled_at(&Policy::default()), Some(at(1030)));
        assert_eq!(liveness.unready_at(&Policy::default()), Some(at(1010)));
    }

    #[test]
    fn a_slow_engine_that_advances_gets_more_time_up_to_the_bound() {
        let mut liveness = Liveness::new(at(0));
        liveness.set_pending(true, at(0));
        liveness.pulse(1, Duration::from_secs(8), at(5));
        assert_eq!(liveness.stalled_at(&Policy::default()), Some(at(85)));
        liveness.pulse(2, Duration::from_secs(100), at(50));
        assert_eq!(liveness.stalled_at(&Policy::default()), Some(at(350)));
    }

    #[test]
    fn a_report_without_a_step_is_no_progress() {
        let mut liveness = Liveness::new(at(0));
        liveness.set_pending(true, at(0));
        liveness.pulse(1, Duration::ZERO, at(1));
        liveness.pulse(1, Duration::ZERO, at(20));
        assert_eq!(liveness.stalled_at(&Policy::default()), Some(at(31)));
    }

    #[test]
    fn time_that_the_dispatcher_slept_is_forgiven() {
        let mut liveness = Liveness::new(at(0));
        liveness.set_pending(true, at(0));
        liveness.forgive(Duration::from_secs(3600));
        assert_eq!(liveness.stalled_at(&Policy::default()), Some(at(3630)));
    }
}
