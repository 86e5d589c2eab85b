//! One sequence, one token at a time, on llama-cpp-2 alone: what the engine must agree with.

use std::num::NonZeroU32;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use proto::TokenId;
use worker::engine::TextModel;
use worker::engine::llama::{LlamaText, backend};
use worker::sampler::uniform;

use crate::near_tie;
use crate::stream::THREADS;

/// Tokens of one pass.
const PIECE: usize = 48;

pub(crate) struct Plain<'t> {
    context: LlamaContext<'static>,
    text: &'t LlamaText,
}

impl<'t> Plain<'t> {
    pub(crate) fn new(text: &'t LlamaText) -> Self {
        let threads = i32::try_from(THREADS).expect("few");
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(2048))
            .with_n_threads(threads)
            .with_n_threads_batch(threads);
        let context = text
            .model()
            .new_context(backend().expect("started"), params);
        Self {
            context: context.expect("a context"),
            text,
        }
    }

    /// In pieces: from 64 tokens a pass on ggml's CPU attention is another kernel, whose logits
    /// differ by more than what is to be seen here.
    fn feed(&mut self, tokens: &[TokenId], mut position: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for piece in tokens.chunks(PIECE) {
            logits = self.decode(piece, position).to_vec();
            position += piece.len();
        }
        logits
    }

    fn decode(&mut self, tokens: &[TokenId], position: usize) -> &[f32] {
        let mut batch = LlamaBatch::new(tokens.len(), 1);
        for (offset, &token) in tokens.iter().enumerate() {
            let token = LlamaToken(i32::try_from(token).expect("an id"));
            let position = i32::try_from(position + offset).expect("small");
            batch
                .add(token, position, &[0], offset + 1 == tokens.len())
                .expect("room");
        }
        self.context.decode(&mut batch).expect("a decode");
        self.context
            .get_logits_ith(i32::try_from(tokens.len() - 1).expect("small"))
    }

    /// Logits after each of `tokens`, computed `piece` tokens a pass.
    pub(crate) fn logits_by(&mut self, tokens: &[TokenId], piece: usize) -> Vec<Vec<f32>> {
        self.context.clear_kv_cache();
        let mut all = Vec::new();
        for (pass, piece_ids) in tokens.chunks(piece).enumerate() {
            let mut batch = LlamaBatch::new(piece, 1);
            for (offset, &token) in piece_ids.iter().enumerate() {
                let token = LlamaToken(i32::try_from(token).expect("an id"));
                let position = i32::try_from(pass * piece + offset).expect("small");
                batch.add(token, position, &[0], true).expect("room");
            }
            self.context.decode(&mut batch).expect("a decode");
            for index in 0..piece_ids.len() {
                let index = i32::try_from(index).expect("small");
                all.push(self.context.get_logits_ith(index).to_vec());
            }
        }
        all
    }

    /// The logits after `prefix`.
    pub(crate) fn logits(&mut self, prefix: &[TokenId]) -> Vec<f32> {
        self.context.clear_kv_cache();
        self.feed(prefix, 0)
    }

    /// Greedy continuation, until an end token or `most` tokens.
    pub(crate) fn greedy(&mut self, prompt: &[TokenId], most: usize) -> Vec<TokenId> {
        self.context.clear_kv_cache();
        let mut tokens = prompt.to_vec();
        let mut computed = 0;
        while tokens.len() < prompt.len() + most {
            let logits = self.feed(&tokens[computed..], computed);
            computed = tokens.len();
            let mut best = 0;
            for (id, logit) in logits.iter().enumerate() {
                if *logit > logits[best] {
                    best = id;
                }
            }
            let best = TokenId::try_from(best).expect("an id");
            if self.text.is_end(best) {
                break;
            }
            tokens.push(best);
        }
        tokens.split_off(prompt.len())
    }

    /// Panics unless `got` is `expected`, or first differs from it at a near tie of greedy choice.
    /// A stream may end where the other goes on: then an end token is one of the two candidates.
    /// Gives the number of near ties (0 or 1).
    pub(crate) fn same_or_near_tie(
        &mut self,
        what: &str,
        prompt: &[TokenId],
        expected: &[TokenId],
        got: &[TokenId],
    ) -> usize {
        let Some((at, prefix)) = parting(prompt, expected, got) else {
            return 0;
        };
        let logits = self.logits(&prefix);
        let ended = |_: ()| {
            let ends = (0..self.text.vocabulary()).filter(|&t| self.text.is_end(t));
            ends.max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]))
                .expect("one")
        };
        let a = expected.get(at).copied().unwrap_or_else(|| ended(()));
        let b = got.get(at).copied().unwrap_or_else(|| ended(()));
        let gap = (logits[a as usize] - logits[b as usize]).abs();
        eprintln!("{what}: parts at {at} by {gap} ({a} or {b})");
        assert!(
            gap <= epsilon(),
            "{what}: no near tie at {at}: {a} and {b} are {gap} apart"
        );
        1
    }

    /// The same for sampling at a temperature with nothing cut off: the draw must lie within what
    /// [`epsilon`] can move the cumulative distribution by, of both tokens.
    pub(crate) fn same_or_near_draw(
        &mut self,
        what: &str,
        prompt: &[TokenId],
        expected: &[TokenId],
        got: &[TokenId],
        (seed, temperature): (u64, f64),
    ) -> usize {
        let Some((at, prefix)) = parting(prompt, expected, got) else {
            return 0;
        };
        let logits = self.logits(&prefix);
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> = logits
            .iter()
            .map(|&x| (f64::from(x - top) / temperature).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        let u = uniform(seed, u32::try_from(at).expect("small"));
        let share = (2.0 * f64::from(epsilon()) / temperature).exp() - 1.0;
        for token in [expected.get(at), got.get(at)].into_iter().flatten() {
            let token = *token as usize;
            let below: f64 = weights[..token].iter().sum::<f64>() / total;
            let through = below + weights[token] / total;
            let slack = |c: f64| share * c.min(1.0 - c) + 1e-6;
            let within = u >= below - slack(below) && u <= through + slack(through);
            eprintln!("{what}: parts at {at}: draw {u}, {token} has [{below}, {through})");
            assert!(
                within,
                "{what}: the draw {u} is far from {token}'s [{below}, {through})"
            );
        }
        1
    }
}

/// What two runs' logits of this model may differ by.
fn epsilon() -> f32 {
    near_tie::epsilon("llama", "q4_1")
}

/// Where two continuations first differ, and the ids before that.
fn parting(
    prompt: &[TokenId],
    expected: &[TokenId],
    got: &[TokenId],
) -> Option<(usize, Vec<TokenId>)> {
    if expected == got {
        return None;
    }
    let at = expected.iter().zip(got).take_while(|(a, b)| a == b).count();
    Some((at, [prompt, &expected[..at]].concat()))
}
