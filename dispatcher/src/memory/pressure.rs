//! When memory is short: readings to a pressure, with a second look before it rises, without I/O.

use std::time::Duration;

use super::{Limit, LimitOrigin};
use crate::machine::Tick;
use crate::machine::event::MemoryPressure;

/// From the first reading that is too high to the one that confirms it: a peak that is over by then
/// turns nobody away.
pub const SETTLE: Duration = Duration::from_millis(500);
/// A pressure holds until use is this far below what began it, in permille of the limit.
const RELEASE_PERMILLE: u64 = 30;

/// What is used of one bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// In bytes.
    pub used: u64,
    pub limit: Limit,
}

impl Reading {
    /// Use in permille of the limit. No limit at all is never used up.
    #[must_use]
    pub fn permille(&self) -> u64 {
        u64::try_from(u128::from(self.used) * 1000 / u128::from(self.limit.bytes.max(1)))
            .unwrap_or(u64::MAX)
    }

    /// Bytes that are still free.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.limit.bytes.saturating_sub(self.used)
    }

    /// Above the first it is `Soft`, above the second `Hard`. What the user allowed may be used up;
    /// of the machine and the cgroup something must be left, or the kernel kills.
    fn thresholds(&self) -> (u64, u64) {
        match self.limit.origin {
            LimitOrigin::Machine | LimitOrigin::Cgroup => (950, 980),
            LimitOrigin::Setting => (1000, 1050),
        }
    }

    /// What this reading alone would say while `current` holds.
    fn level(&self, current: MemoryPressure) -> MemoryPressure {
        let (soft, hard) = self.thresholds();
        let kept = |level: MemoryPressure, threshold: u64| {
            threshold
                - if current >= level {
                    RELEASE_PERMILLE
                } else {
                    0
                }
        };
        let permille = self.permille();
        if permille > kept(MemoryPressure::Hard, hard) {
            MemoryPressure::Hard
        } else if permille > kept(MemoryPressure::Soft, soft) {
            MemoryPressure::Soft
        } else {
            MemoryPressure::None
        }
    }
}

/// Turns readings into changes of pressure.
#[derive(Debug, Default)]
pub struct Judge {
    pressure: MemoryPressure,
    /// Since when readings have been above what holds.
    rising: Option<Tick>,
}

impl Judge {
    /// The worst of `readings` decides. A rise counts once it has been seen for [`SETTLE`], a fall at
    /// once. Returns the new pressure where it changed.
    pub fn judge(&mut self, readings: &[Reading], now: Tick) -> Option<MemoryPressure> {
        let levels = readings.iter().map(|reading| reading.level(self.pressure));
        let level = levels.max().unwrap_or_default();
        if level > self.pressure {
            let since = *self.rising.get_or_insert(now);
            if now.since(since) < SETTLE {
                return None;
            }
        }
        self.rising = None;
        let changed = level != self.pressure;
        self.pressure = level;
        changed.then_some(level)
    }

    #[must_use]
    pub fn pressure(&self) -> MemoryPressure {
        self.pressure
    }

    /// Whether readings should be taken as often as possible: something is, or may be, short.
    #[must_use]
    pub fn is_alert(&self) -> bool {
        self.rising.is_some() || self.pressure != MemoryPressure::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use MemoryPressure::{Hard, None as Free, Soft};

    fn of(origin: LimitOrigin, used: u64) -> Reading {
        Reading {
            used,
            limit: Limit {
                bytes: 1000,
                origin,
            },
        }
    }

    fn at(ms: u64) -> Tick {
        Tick::from_micros(ms * 1000)
    }

    /// The judge's pressure after each reading, one a second.
    fn course(origin: LimitOrigin, used: &[u64]) -> Vec<MemoryPressure> {
        let mut judge = Judge::default();
        let course = used.iter().zip(0..).map(|(used, second)| {
            judge.judge(&[of(origin, *used)], at(second * 1000));
            judge.pressure()
        });
        course.collect()
    }

    #[test]
    fn a_rise_needs_a_second_look_and_a_fall_does_not() {
        let machine = LimitOrigin::Machine;
        assert_eq!(
            course(machine, &[960, 500, 960, 960, 500]),
            [Free, Free, Free, Soft, Free]
        );
        assert_eq!(course(machine, &[999, 999, 999]), [Free, Hard, Hard]);
        let mut judge = Judge::default();
        assert_eq!(judge.judge(&[of(machine, 999)], at(0)), None);
        assert!(judge.is_alert());
        assert_eq!(judge.judge(&[of(machine, 999)], at(499)), None);
        assert_eq!(judge.judge(&[of(machine, 999)], at(500)), Some(Hard));
        assert_eq!(judge.judge(&[of(machine, 999)], at(501)), None);
    }

    #[test]
    fn use_that_wavers_about_a_threshold_does_not_flap() {
        let machine = LimitOrigin::Cgroup;
        assert_eq!(
            course(machine, &[955, 955, 945, 955, 925, 919, 945]),
            [Free, Soft, Soft, Soft, Soft, Free, Free]
        );
        assert_eq!(
            course(machine, &[985, 985, 975, 985, 951, 949, 940]),
            [Free, Hard, Hard, Hard, Hard, Soft, Soft]
        );
    }

    #[test]
    fn what_the_user_allowed_may_be_used_up_and_not_more() {
        let setting = LimitOrigin::Setting;
        assert_eq!(
            course(setting, &[1000, 1000, 1001, 1001, 1051, 1051]),
            [Free, Free, Free, Soft, Soft, Hard]
        );
    }

    #[test]
    fn the_worst_bound_decides_and_no_bound_is_never_short() {
        let mut judge = Judge::default();
        let both = [of(LimitOrigin::Machine, 10), of(LimitOrigin::Cgroup, 970)];
        judge.judge(&both, at(0));
        assert_eq!(judge.judge(&both, at(1000)), Some(Soft));
        let unbounded = Reading {
            used: u64::MAX / 2,
            limit: Limit {
                bytes: u64::MAX,
                origin: LimitOrigin::Machine,
            },
        };
        assert_eq!(judge.judge(&[unbounded], at(2000)), Some(Free));
        assert_eq!(judge.judge(&[], at(3000)), None);
    }
}
