//! How many prompt tokens a step takes, so that it lasts as long as running streams can wait.

use std::time::Duration;

/// How long a step with a prefill chunk should last. Streams then see no gap above twice this, and a
/// cancelled prefill is gone after it.
pub(super) const TARGET: Duration = Duration::from_millis(250);
/// Tokens of the first chunk, of which nothing is known yet.
const FIRST: usize = 16;
/// A prefill advances by as many tokens at least, however slow the step.
const LEAST: usize = 8;

/// The chunk size, steered by the time that steps took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    tokens: usize,
    most: usize,
}

impl Chunk {
    /// `most`: tokens that fit in one step.
    pub(super) fn new(most: usize) -> Self {
        let most = most.max(1);
        Self {
            tokens: FIRST.min(most),
            most,
        }
    }

    pub(super) fn tokens(self) -> usize {
        self.tokens
    }

    /// A step with `prefilled` prompt tokens took `took`, whatever else was in it.
    pub(super) fn observe(&mut self, prefilled: usize, took: Duration) {
        // A short chunk that was fast says nothing about a long one.
        if prefilled == 0 || (prefilled < self.tokens && took <= TARGET) {
            return;
        }
        let ratio = TARGET.as_secs_f64() / took.as_secs_f64().max(1e-6);
        // One odd step (a page fault, a busy neighbour) must not throw the size far off.
        let ratio = ratio.clamp(0.25, 2.0);
        #[expect(clippy::cast_precision_loss, reason = "chunks are small")]
        let next = prefilled as f64 * ratio;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive and at most twice a chunk"
        )]
        let next = next as usize;
        self.tokens = next.clamp(LEAST.min(self.most), self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::{Chunk, LEAST, TARGET};
    use std::time::Duration;

    /// Steps on a machine of `per_token` a prompt token and `base` for the rest.
    fn settle(chunk: &mut Chunk, base: Duration, per_token: Duration) -> Duration {
        let mut took = Duration::ZERO;
        for _ in 0..40 {
            let tokens = chunk.tokens();
            took = base + per_token * u32::try_from(tokens).expect("small");
            chunk.observe(tokens, took);
        }
        took
    }

    #[test]
    fn it_settles_at_the_target_on_slow_and_on_fast_machines() {
        for per_token_us in [200, 1000, 4000, 12_000] {
            let mut chunk = Chunk::new(2048);
            let took = settle(
                &mut chunk,
                Duration::from_millis(9),
                Duration::from_micros(per_token_us),
            );
            assert!(
                took <= TARGET * 5 / 4 && took >= TARGET / 2,
                "{per_token_us} us: {took:?}"
            );
        }
    }

    #[test]
    fn it_stays_within_the_batch_and_never_stops_a_prefill() {
        let mut chunk = Chunk::new(64);
        settle(&mut chunk, Duration::ZERO, Duration::from_micros(1));
        assert_eq!(chunk.tokens(), 64);
        settle(&mut chunk, Duration::from_secs(2), Duration::from_secs(1));
        assert_eq!(chunk.tokens(), LEAST);
        assert_eq!(Chunk::new(3).tokens(), 3);
    }

    #[test]
    fn the_short_end_of_a_prompt_does_not_shrink_it() {
        let mut chunk = Chunk::new(512);
        settle(&mut chunk, Duration::ZERO, Duration::from_millis(1));
        let before = chunk.tokens();
        chunk.observe(1, Duration::from_millis(9));
        chunk.observe(0, Duration::from_millis(9));
        assert_eq!(chunk.tokens(), before);
    }

    #[test]
    fn one_odd_step_costs_at_most_three_quarters() {
        let mut chunk = Chunk::new(512);
        settle(&mut chunk, Duration::ZERO, Duration::from_millis(1));
        let before = chunk.tokens();
        chunk.observe(before, Duration::from_secs(60));
        assert!(chunk.tokens() >= before / 4);
    }
}
