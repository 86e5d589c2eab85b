//! Which rows each forward pass computes: every decoding sequence, and as much prefill as fits the time.

use std::time::Duration;

/// Time that a pass with prefill is to take, seconds: running streams wait that long for their next
/// token.
const PASS_TARGET_S: f64 = 0.25;
/// The same where nobody decodes, and only arrivals and cancels wait. Fewer passes read the weights
/// fewer times.
const LONE_PASS_TARGET_S: f64 = 0.5;
/// First chunk, and the smallest one.
pub(super) const CHUNK_MIN: u32 = 16;
/// Longer chunks have brought Metal machines down, and gain nothing.
pub(super) const CHUNK_MAX: u32 = 2048;
/// The chunk of rows that step alone: fixed, so that their numbers depend on nothing else, and small,
/// since their passes come on top of the others'.
pub(super) const LONE_CHUNK: usize = 16;

/// A sequence as the schedule sees it, in the order of admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) slot: usize,
    /// Tokens known and not computed, at least one.
    pub(super) pending: usize,
    /// Its rows share a pass with nobody.
    pub(super) alone: bool,
}

/// So many tokens of a slot go through a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) slot: usize,
    pub(super) tokens: usize,
    /// Afterwards nothing is pending: the last row's logits are the next token's.
    pub(super) complete: bool,
}

impl Share {
    fn of(waiting: &Waiting, tokens: usize) -> Self {
        Self {
            slot: waiting.slot,
            tokens,
            complete: tokens == waiting.pending,
        }
    }
}

/// Divides passes and learns how long they take: a fixed time for reading all weights, and some more
/// for each token of prefill.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Seconds of a pass without prefill; 0 until there was one.
    fixed_s: f64,
    /// Seconds that a prefilled token adds; `None` until one was.
    token_s: Option<f64>,
    /// The longest chunk that was computed: the next is at most twice as long.
    tried: u32,
    /// The slot of the last lone pass; the next one in admission order follows.
    last_alone: Option<usize>,
}

impl Schedule {
    pub(super) fn new() -> Self {
        Self {
            fixed_s: 0.0,
            token_s: None,
            tried: CHUNK_MIN / 2,
            last_alone: None,
        }
    }

    /// Prompt tokens of the next pass, beside rows that decode or with nobody.
    pub(super) fn chunk(&self, decodes: bool) -> u32 {
        let target = if decodes {
            PASS_TARGET_S
        } else {
            LONE_PASS_TARGET_S
        };
        let Some(token_s) = self.token_s else {
            return CHUNK_MIN;
        };
        let fit = (target - self.fixed_s) / token_s.max(1e-9);
        let most = self.tried.saturating_mul(2).clamp(CHUNK_MIN, CHUNK_MAX);
        whole(fit).clamp(CHUNK_MIN, most)
    }

    /// The passes of one step: one that is shared, then at most one of a lone row.
    pub(super) fn passes(&mut self, waiting: &[Waiting]) -> Vec<Vec<Share>> {
        let mut shared: Vec<Share> = Vec::new();
        let together = || waiting.iter().filter(|w| !w.alone);
        shared.extend(
            together()
                .filter(|w| w.pending == 1)
                .map(|w| Share::of(w, 1)),
        );
        // Prefill in the order of admission: the first prompt is finished first.
        let mut left = self.chunk(!shared.is_empty()) as usize;
        for prompt in together().filter(|w| w.pending > 1) {
            let tokens = prompt.pending.min(left);
            if tokens == 0 {
                break;
            }
            left -= tokens;
            shared.push(Share::of(prompt, tokens));
        }
        let mut passes = Vec::new();
        if !shared.is_empty() {
            passes.push(shared);
        }
        if let Some(next) = self.next_alone(waiting) {
            passes.push(vec![Share::of(next, next.pending.min(LONE_CHUNK))]);
        }
        passes
    }

    fn next_alone<'a>(&mut self, waiting: &'a [Waiting]) -> Option<&'a Waiting> {
        let alone: Vec<&Waiting> = waiting.iter().filter(|w| w.alone).collect();
        let last = self
            .last_alone
            .and_then(|slot| alone.iter().position(|w| w.slot == slot));
        let next = last.map_or(0, |at| at + 1);
        let chosen = alone.get(next).or_else(|| alone.first()).copied();
        self.last_alone = chosen.map(|w| w.slot);
        chosen
    }

    /// A shared pass with `prefilled` prompt tokens took `elapsed`.
    pub(super) fn learn(&mut self, prefilled: u32, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if prefilled == 0 {
            let known = if self.fixed_s == 0.0 {
                seconds
            } else {
                self.fixed_s
            };
            self.fixed_s = (3.0 * known + seconds) / 4.0;
            return;
        }
        // Never nothing, though the fixed part was measured on a slower moment.
        let added = (seconds - self.fixed_s).max(seconds / 4.0) / f64::from(prefilled);
        match self.token_s {
            // A part of a chunk says little of how fast a whole one would be.
            Some(known) if added < known => {
                if prefilled.saturating_mul(2) >= self.chunk(true) {
                    self.token_s = Some(f64::midpoint(known, added));
                }
            }
            // One slow pass is enough to come back.
            _ => self.token_s = Some(added),
        }
        self.tried = self.tried.max(prefilled);
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the bounds of a chunk first"
)]
fn whole(tokens: f64) -> u32 {
    tokens.clamp(1.0, f64::from(CHUNK_MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(slot: usize, pending: usize, alone: bool) -> Waiting {
        Waiting {
            slot,
            pending,
            alone,
        }
    }

    fn share(slot: usize, tokens: usize, complete: bool) -> Share {
        Share {
            slot,
            tokens,
            complete,
        }
    }

    #[test]
    fn all_decode_and_the_first_prompt_takes_the_chunk() {
        let mut schedule = Schedule::new();
        let sequences = [
            waiting(0, 100, false),
            waiting(1, 1, false),
            waiting(2, 50, false),
            waiting(3, 1, false),
        ];
        let want = [share(1, 1, true), share(3, 1, true), share(0, 16, false)];
        assert_eq!(schedule.passes(&sequences), [want]);
        let sequences = [waiting(0, 10, false), waiting(2, 50, false)];
        let want = [share(0, 10, true), share(2, 6, false)];
        assert_eq!(schedule.passes(&sequences), [want]);
        assert!(schedule.passes(&[]).is_empty());
    }

    #[test]
    fn rows_that_step_alone_take_turns_and_hold_nobody_up() {
        let mut schedule = Schedule::new();
        let sequences = [
            waiting(0, 1, false),
            waiting(1, 40, true),
            waiting(2, 1, true),
        ];
        let turns: Vec<_> = (0..3)
            .map(|_| {
                let passes = schedule.passes(&sequences);
                assert_eq!(passes[0], [share(0, 1, true)]);
                assert_eq!(passes.len(), 2);
                passes[1].clone()
            })
            .collect();
        let prefill = vec![share(1, LONE_CHUNK, false)];
        assert_eq!(turns, [prefill.clone(), vec![share(2, 1, true)], prefill]);
    }

    #[test]
    fn the_chunk_doubles_at_most_while_it_is_fast_and_shrinks_at_once() {
        let mut schedule = Schedule::new();
        assert_eq!(schedule.chunk(true), 16);
        schedule.learn(16, Duration::from_millis(10));
        assert_eq!(schedule.chunk(true), 32);
        schedule.learn(32, Duration::from_millis(200));
        assert_eq!(schedule.chunk(true), 40);
        schedule.learn(10, Duration::from_millis(1));
        assert_eq!(schedule.chunk(true), 40, "a part of a chunk says little");
        schedule.learn(40, Duration::from_secs(1));
        assert_eq!(schedule.chunk(true), 16);
        for _ in 0..40 {
            let chunk = schedule.chunk(true);
            schedule.learn(chunk, Duration::from_micros(1));
        }
        assert_eq!(schedule.chunk(true), CHUNK_MAX);
    }

    #[test]
    fn what_a_pass_costs_without_prefill_is_not_charged_to_the_prompt() {
        let mut schedule = Schedule::new();
        schedule.learn(0, Duration::from_millis(125));
        // Powers of two, so that no rounding hides: 1/256 s a token.
        schedule.learn(16, Duration::from_micros(187_500));
        assert_eq!(schedule.chunk(true), 32);
        assert_eq!(schedule.chunk(false), 32, "no more than twice as many");
        schedule.learn(32, Duration::from_millis(250));
        assert_eq!((schedule.chunk(true), schedule.chunk(false)), (32, 64));
        schedule.learn(64, Duration::from_millis(375));
        assert_eq!((schedule.chunk(true), schedule.chunk(false)), (32, 96));
        schedule.learn(0, Duration::from_secs(2));
        assert_eq!(schedule.chunk(true), 16, "never less");
    }
}
