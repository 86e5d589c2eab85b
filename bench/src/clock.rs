//! The one clock of a run: microseconds since its start.

use std::time::{Duration, Instant};

/// When a run began. All times in samples count from it.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts a run now.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    #[must_use]
    pub fn now_us(&self) -> u64 {
        micros(self.0.elapsed())
    }

    /// The moment that is `at_us` after the start.
    #[must_use]
    pub fn instant(&self, at_us: u64) -> Instant {
        self.0 + Duration::from_micros(at_us)
    }
}

/// Whole microseconds; what does not fit in 64 bits is longer than any run.
#[must_use]
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Nearest whole microseconds of some milliseconds, negative ones as none.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer saturates, and a negative span means none"
)]
pub fn micros_of_ms(ms: f64) -> u64 {
    (ms * 1e3).round().max(0.0) as u64
}
