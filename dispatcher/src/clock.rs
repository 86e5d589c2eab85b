//! The only place that reads the clock; produces `Tick`s.

use std::time::{Duration, Instant};

use crate::machine::Tick;

/// Counts from the dispatcher's start. Copies agree with each other.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    #[must_use]
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    #[must_use]
    pub fn now(&self) -> Tick {
        Tick::ZERO.after(self.start.elapsed())
    }

    /// How long until `tick`; zero where it has passed.
    #[must_use]
    pub fn until(&self, tick: Tick) -> Duration {
        tick.since(self.now())
    }

    /// The moment of `tick`, for timers.
    #[must_use]
    pub fn instant(&self, tick: Tick) -> Instant {
        self.start + Duration::from_micros(tick.as_micros())
    }
}
