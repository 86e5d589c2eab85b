//! The longest of the newest steps.

use std::collections::VecDeque;
use std::time::Duration;

/// How many steps are looked back on.
pub const STEPS: u64 = 1000;

/// A sliding maximum over [`STEPS`] durations. Costs a few comparisons a step, and no allocation.
#[derive(Clone, Debug)]
pub struct Stopwatch {
    steps: u64,
    /// Steps that nothing later has outlasted, with their numbers: durations fall from front to back.
    candidates: VecDeque<(u64, Duration)>,
}

impl Default for Stopwatch {
    fn default() -> Self {
        Self {
            steps: 0,
            candidates: VecDeque::with_capacity(usize::try_from(STEPS + 1).unwrap_or_default()),
        }
    }
}

impl Stopwatch {
    /// Takes one step's duration and returns the longest of the last [`STEPS`], this one included.
    pub fn lap(&mut self, duration: Duration) -> Duration {
        self.steps += 1;
        while self.candidates.back().is_some_and(|(_, d)| *d <= duration) {
            self.candidates.pop_back();
        }
        self.candidates.push_back((self.steps, duration));
        while let Some((number, longest)) = self.candidates.front() {
            if number + STEPS > self.steps {
                return *longest;
            }
            self.candidates.pop_front();
        }
        duration
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_long_step_is_forgotten_after_a_thousand_more() {
        let mut stopwatch = Stopwatch::default();
        assert_eq!(
            stopwatch.lap(Duration::from_secs(9)),
            Duration::from_secs(9)
        );
        for _ in 1..STEPS {
            assert_eq!(
                stopwatch.lap(Duration::from_millis(1)),
                Duration::from_secs(9)
            );
        }
        assert_eq!(
            stopwatch.lap(Duration::from_millis(1)),
            Duration::from_millis(1)
        );
    }

    proptest! {
        #[test]
        fn it_is_the_maximum_of_the_window(laps in prop::collection::vec(0..50_u64, 1..3000)) {
            let mut stopwatch = Stopwatch::default();
            for (at, &lap) in laps.iter().enumerate() {
                let window = &laps[(at + 1).saturating_sub(1000)..=at];
                let longest = stopwatch.lap(Duration::from_micros(lap));
                prop_assert_eq!(Some(longest), window.iter().max().map(|m| Duration::from_micros(*m)));
            }
        }
    }
}
