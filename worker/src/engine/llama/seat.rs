//! One slot's sequence: what is known, what of it is computed, and what goes on in it.

use proto::TokenId;

use super::plan::Want;
use crate::engine::Task;
use crate::sampler::Sampler;

/// A slot. When nobody sits in it, its cache is kept for a prompt that begins the same.
#[derive(Debug, Default)]
pub(super) struct Seat {
    /// The sequence's ids.
    pub(super) tokens: Vec<TokenId>,
    /// How many of them are in the KV cache.
    pub(super) computed: usize,
    pub(super) live: Option<Live>,
    /// The number of the last admission; 0: never.
    pub(super) used: u64,
}

/// A sequence that goes on.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) task: Task,
    pub(super) sampler: Sampler,
    /// The index in the stream of the token to be chosen next.
    pub(super) index: u32,
    /// Tokens of the prompt, without output of earlier attempts.
    pub(super) original: usize,
    pub(super) order: u64,
    /// A token was chosen: from now on it is one token a step.
    pub(super) decoding: bool,
}

impl Seat {
    /// How many tokens of `prompt` are in the cache, from the first on.
    pub(super) fn shared_with(&self, prompt: &[TokenId]) -> usize {
        let kept = self.tokens.get(..self.computed).unwrap_or_default();
        kept.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    /// The sequence ends; what is computed stays.
    pub(super) fn stop(&mut self) {
        self.live = None;
        self.tokens.truncate(self.computed);
    }

    /// What it waits for. A row that steps alone takes its prompt in chunks of `alone_chunk`, and
    /// output of earlier attempts token by token: as it was computed the first time.
    pub(super) fn want(&self, slot: usize, alone_chunk: usize) -> Option<Want> {
        let live = self.live.as_ref()?;
        let alone =
            live.task
                .batch_invariant
                .then(|| match live.original.checked_sub(self.computed) {
                    Some(left) if left > 0 => left.min(alone_chunk),
                    _ => 1,
                });
        Some(Want {
            slot,
            position: self.computed,
            pending: self.tokens.len().saturating_sub(self.computed),
            decoding: live.decoding,
            order: live.order,
            alone,
        })
    }
}
