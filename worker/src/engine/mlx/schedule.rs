//! Which rows each forward pass computes: every decoding sequence, and as much prefill as fits the time.

use std::time::Duration;

/// Time that a pass with prefill is to take: running streams wait that long for their next token.
const PASS_TARGET: Duration = Duration::from_millis(250);
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

/// Divides passes and learns how long they take.
#[derive(Debug)]
pub(super) struct Schedule {
    chunk: u32,
    /// The slot of the last lone pass; the next one in admission order follows.
    last_alone: Option<usize>,
}

impl Schedule {
    pub(super) fn new() -> Self {
        Self {
            chunk: CHUNK_MIN,
            last_alone: None,
        }
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
        let mut left = self.chunk as usize;
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
        if prefilled == 0 {
            return;
        }
        let target = PASS_TARGET.as_secs_f64();
        let seconds = elapsed.as_secs_f64().max(1e-4);
        if seconds > target {
            // In proportion, so that one slow pass is enough to come back.
            let fit = f64::from(prefilled) * target / seconds;
            self.chunk = whole(fit).clamp(CHUNK_MIN, self.chunk);
        } else if prefilled >= self.chunk {
            // A full chunk was fast: as far as its own speed carries, at most twofold a pass.
            let fit = f64::from(prefilled) * target / seconds;
            self.chunk = whole(fit).min(self.chunk * 2).clamp(CHUNK_MIN, CHUNK_MAX);
        }
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
        assert_eq!(schedule.chunk, 16);
        schedule.learn(16, Duration::from_millis(10));
        assert_eq!(schedule.chunk, 32);
        schedule.learn(32, Duration::from_millis(200));
        assert_eq!(schedule.chunk, 40);
        schedule.learn(10, Duration::from_millis(1));
        assert_eq!(schedule.chunk, 40, "a part of a chunk says little");
        schedule.learn(40, Duration::from_secs(1));
        assert_eq!(schedule.chunk, 16);
        for _ in 0..20 {
            let chunk = schedule.chunk;
            schedule.learn(chunk, Duration::from_micros(1));
        }
        assert_eq!(schedule.chunk, CHUNK_MAX);
    }
}
