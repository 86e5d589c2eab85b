//! Counters of one link, summed up and handed on at most every 50 ms.

use std::time::Duration;

use proto::to_dispatcher::{Progress, StepTokens};
use proto::{Generation, InstanceId};

use crate::input::Input;
use crate::machine::Tick;

/// The shortest time between two reports.
pub(super) const INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Tally {
    last_report: Option<Tick>,
    changed: bool,
    pulse: u64,
    steps: u64,
    live_slots: u32,
    longest_step: Duration,
    tokens: u64,
    batch_sum: u64,
    steps_done: u64,
    kv_tokens: u64,
    busy: Duration,
    stale: u64,
}

impl Tally {
    pub(super) fn step(&mut self, step: &StepTokens) {
        self.changed = true;
        self.steps = self.steps.max(step.step);
        self.batch_sum += u64::from(step.batch);
        self.steps_done += 1;
        self.busy = self.busy.saturating_add(step.duration.into());
    }

    /// A row read the cached keys and values of so many tokens.
    pub(super) fn kv_read(&mut self, tokens: u64) {
        self.kv_tokens = self.kv_tokens.saturating_add(tokens);
    }

    pub(super) fn tokens(&mut self, count: usize) {
        self.tokens += count as u64;
    }

    pub(super) fn progress(&mut self, progress: &Progress) {
        self.changed = true;
        self.pulse = progress.pulse;
        self.steps = self.steps.max(progress.steps);
        self.live_slots = progress.live_slots;
        self.longest_step = progress.longest_step.into();
    }

    pub(super) fn stale(&mut self) {
        self.changed = true;
        self.stale += 1;
    }

    /// How long until the next report is due; `None`: there is nothing to report.
    pub(super) fn due_in(&self, now: Tick) -> Option<Duration> {
        if !self.changed {
            return None;
        }
        let due = self
            .last_report
            .map_or(Tick::ZERO, |last| last.after(INTERVAL));
        Some(due.since(now))
    }

    /// The report since the last one, and the number of stale rows in it.
    pub(super) fn report(
        &mut self,
        instance: InstanceId,
        generation: Generation,
        now: Tick,
    ) -> (Input, u64) {
        self.last_report = Some(now);
        self.changed = false;
        let input = Input::Progress {
            instance,
            generation,
            pulse: self.pulse,
            steps: self.steps,
            live_slots: self.live_slots,
            longest_step: self.longest_step,
            tokens: std::mem::take(&mut self.tokens),
            batch_sum: std::mem::take(&mut self.batch_sum),
            steps_done: std::mem::take(&mut self.steps_done),
            kv_tokens: std::mem::take(&mut self.kv_tokens),
            busy: std::mem::take(&mut self.busy),
        };
        (input, std::mem::take(&mut self.stale))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::span::Micros;

    fn at(millis: u64) -> Tick {
        Tick::from_micros(millis * 1000)
    }

    fn step(number: u64, batch: u32) -> StepTokens {
        StepTokens {
            step: number,
            duration: Micros(2000),
            batch,
            prefill_tokens: 0,
            rows: Vec::new(),
        }
    }

    #[test]
    fn the_first_report_is_due_at_once_and_the_next_after_the_interval() {
        let mut tally = Tally::default();
        assert_eq!(tally.due_in(at(5)), None, "nothing has happened");
        tally.step(&step(1, 4));
        assert_eq!(tally.due_in(at(5)), Some(Duration::ZERO));
        let _ = tally.report(InstanceId(0), Generation(1), at(5));
        assert_eq!(tally.due_in(at(6)), None);
        tally.step(&step(2, 4));
        assert_eq!(tally.due_in(at(15)), Some(Duration::from_millis(40)));
        assert_eq!(tally.due_in(at(60)), Some(Duration::ZERO));
    }

    #[test]
    fn a_report_sums_what_came_since_the_last_and_keeps_what_is_a_state() {
        let mut tally = Tally::default();
        tally.progress(&Progress {
            pulse: 70,
            steps: 60,
            live_slots: 3,
            longest_step: Micros(9000),
        });
        tally.step(&step(61, 3));
        tally.step(&step(62, 2));
        tally.tokens(5);
        tally.kv_read(120);
        tally.kv_read(121);
        tally.stale();
        let (input, stale) = tally.report(InstanceId(0), Generation(1), at(0));
        assert_eq!(stale, 1);
        let Input::Progress {
            pulse,
            steps,
            live_slots,
            tokens,
            batch_sum,
            steps_done,
            kv_tokens,
            busy,
            ..
        } = input
        else {
            panic!("{input:?}");
        };
        assert_eq!((pulse, steps, live_slots), (70, 62, 3));
        assert_eq!((tokens, batch_sum, steps_done), (5, 5, 2));
        assert_eq!(kv_tokens, 241);
        assert_eq!(busy, Duration::from_millis(4));
        let (input, stale) = tally.report(InstanceId(0), Generation(1), at(50));
        assert_eq!(stale, 0);
        let Input::Progress { tokens, steps, .. } = input else {
            panic!("{input:?}");
        };
        assert_eq!((tokens, steps), (0, 62));
    }
}
