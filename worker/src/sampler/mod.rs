//! Chooses a token from logits; one sampler a sequence, the same for every engine.
//!
//! The order is vLLM's: logit bias, then penalties (repetition, then frequency and presence), then
//! at temperature 0 the largest logit; else temperature, min-p, top-k, top-p (over what top-k left)
//! and the draw. llama.cpp has temperature last by default; with temperature 1 the two agree.
//!
//! Logprobs are those of the model itself, before all of this.
//!
//! The draw inverts the cumulative distribution *in the order of the vocabulary*, not of the
//! probabilities: two nearly equal tokens that change ranks between two runs then move a boundary by
//! as little as their probabilities moved. It uses [`uniform`]`(seed, index)` and nothing that
//! earlier draws left behind, so that a stream resumed from its ids goes on as the same stream.

mod lanes;
mod select;
mod uniform;
mod vector;
mod wide;

#[cfg(test)]
mod reference;

use std::collections::HashMap;

use proto::TokenId;
use proto::generate::Sampling;
use thiserror::Error;

pub use self::lanes::{Job, sample_rows};
use self::select::Scored;
pub use self::uniform::uniform;

/// Most alternatives reported with a token.
pub const TOP_LOGPROBS_MAX: u32 = 128;
/// Largest magnitude of a bias or a penalty: far beyond any logit, and far from overflow.
const MAGNITUDE_MAX: f32 = 1e6;
/// Below this a temperature is greedy: dividing by it would only round to the same.
const TEMPERATURE_MIN: f32 = 1e-5;

/// The row can't be sampled: a logit is not a number or infinite, or every token is ruled out.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the model's output is not a number, or rules out every token")]
pub struct Unusable;

impl From<vector::Unusable> for Unusable {
    fn from(_: vector::Unusable) -> Self {
        Self
    }
}

/// The token chosen for one index.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: TokenId,
    /// Where they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of probabilities, before bias, penalties, temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// What a penalty needs to know of a token that was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// How often it was produced; 0: it is in the prompt alone.
    produced: u32,
}

/// One sequence's sampler. Its state is a function of the ids seen, and can be rebuilt from them.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    logprobs: Option<usize>,
    /// Empty unless a penalty is on.
    seen: HashMap<TokenId, Seen>,
    edited: Vec<f32>,
    weights: vector::Weights,
    best: Vec<Scored>,
}

/// Whether `sampling` can be carried out over a vocabulary of that size, in words for the client.
///
/// # Errors
/// The words.
pub fn check(
    sampling: &Sampling,
    logprobs: Option<u32>,
    vocabulary: u32,
) -> Result<(), &'static str> {
    let within = |x: f32, low: f32, high: f32| x >= low && x <= high;
    if !within(sampling.temperature, 0.0, MAGNITUDE_MAX) {
        return Err("temperature must be a number of at least 0");
    }
    if !within(sampling.top_p, 0.0, 1.0) || !within(sampling.min_p, 0.0, 1.0) {
        return Err("top_p and min_p must lie between 0 and 1");
    }
    if !within(
        sampling.repetition_penalty,
        1.0 / MAGNITUDE_MAX,
        MAGNITUDE_MAX,
    ) {
        return Err("repetition_penalty must be a number above 0");
    }
    for penalty in [sampling.presence_penalty, sampling.frequency_penalty] {
        if !within(penalty, -MAGNITUDE_MAX, MAGNITUDE_MAX) {
            return Err("presence_penalty and frequency_penalty must be numbers");
        }
    }
    for &(token, bias) in &sampling.logit_bias {
        if token >= vocabulary {
            return Err("logit_bias names a token outside of the vocabulary");
        }
        if !within(bias, -MAGNITUDE_MAX, MAGNITUDE_MAX) {
            return Err("logit_bias must hold numbers");
        }
    }
    if logprobs.is_some_and(|n| n > TOP_LOGPROBS_MAX) {
        return Err("more alternatives are asked for than are reported");
    }
    Ok(())
}

impl Sampler {
    /// A sampler for a sequence whose `prompt` and earlier output (`emitted`) are known.
    /// `sampling` must have passed [`check`].
    #[must_use]
    pub fn new(
        sampling: &Sampling,
        logprobs: Option<u32>,
        prompt: &[TokenId],
        emitted: &[TokenId],
    ) -> Self {
        let mut sampler = Self {
            sampling: sampling.clone(),
            logprobs: logprobs.map(|n| n.min(TOP_LOGPROBS_MAX) as usize),
            seen: HashMap::new(),
            edited: Vec::new(),
            weights: vector::Weights::default(),
            best: Vec::new(),
        };
        if sampler.penalises() {
            for &token in prompt {
                sampler.seen.entry(token).or_default();
            }
        }
        for &token in emitted {
            sampler.accept(token);
        }
        sampler
    }

    /// Whether every token is the one with the largest logit and nothing else is asked of the row, so
    /// that an engine may choose it without this sampler.
    #[must_use]
    pub fn is_argmax(&self) -> bool {
        let greedy = self.sampling.temperature < TEMPERATURE_MIN || self.sampling.top_k == 1;
        greedy
            && self.logprobs.is_none()
            && self.sampling.logit_bias.is_empty()
            && !self.penalises()
    }

    /// Chooses the token with the given index in the stream, and counts it as produced.
    ///
    /// # Errors
    /// [`Unusable`] where the logits are no distribution.
    pub fn sample(&mut self, logits: &[f32], index: u32) -> Result<Sampled, Unusable> {
        let token = self.choose(logits, index)?;
        let logprobs = match self.logprobs {
            Some(n) => Some(self.report(logits, token, n)?),
            None => None,
        };
        self.accept(token);
        Ok(Sampled { token, logprobs })
    }

    fn penalises(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0
    }

    /// A token became output.
    fn accept(&mut self, token: TokenId) {
        if self.penalises() {
            let seen = self.seen.entry(token).or_default();
            seen.produced = seen.produced.saturating_add(1);
        }
    }

    fn choose(&mut self, logits: &[f32], index: u32) -> Result<TokenId, Unusable> {
        let edits = self.penalises() || !self.sampling.logit_bias.is_empty();
        if edits {
            self.edit(logits);
        }
        let logits = if edits {
            self.edited.as_slice()
        } else {
            logits
        };
        if self.sampling.temperature < TEMPERATURE_MIN || self.sampling.top_k == 1 {
            return id(vector::argmax(logits)?);
        }
        let top = vector::maximum(logits)?;
        let scale = 1.0 / self.sampling.temperature;
        let u = uniform(self.sampling.seed, index);
        let k = self.sampling.top_k as usize;
        if k > 0 && k < logits.len() {
            select::top_k(logits, k, &mut self.best);
            for (_, weight) in &mut self.best {
                *weight = vector::exp((*weight - top) * scale);
            }
        } else {
            self.weights.fill(logits, top, scale);
            if self.sampling.top_p >= 1.0 && self.sampling.min_p <= 0.0 {
                let at = self.weights.pick(u * self.weights.total).ok_or(Unusable)?;
                return id(at);
            }
            if self.sampling.min_p > 0.0 {
                let values = self.weights.values.iter();
                let bar = self.sampling.min_p;
                self.best.clear();
                self.best
                    .extend((0..).zip(values.copied()).filter(|&(_, w)| w >= bar));
                if self.sampling.top_p < 1.0 {
                    select::sort(&mut self.best);
                }
            } else {
                let needed = f64::from(self.sampling.top_p) * self.weights.total;
                select::nucleus(&self.weights.values, needed, &mut self.best);
                return self.draw(u);
            }
        }
        // What top-k or min-p left, best first; the likeliest has the weight 1.
        self.best
            .retain(|&(_, weight)| weight >= self.sampling.min_p);
        if self.sampling.top_p < 1.0 {
            let total: f64 = self.best.iter().map(|s| f64::from(s.1)).sum();
            select::cut_to_nucleus(&mut self.best, f64::from(self.sampling.top_p) * total);
        }
        self.draw(u)
    }

    /// Draws from `best`, in the order of the vocabulary.
    fn draw(&mut self, u: f64) -> Result<TokenId, Unusable> {
        self.best.sort_unstable_by_key(|s| s.0);
        let total: f64 = self.best.iter().map(|s| f64::from(s.1)).sum();
        let at = select::walk(self.best.iter().map(|s| s.1), u * total).ok_or(Unusable)?;
        self.best.get(at).map(|s| s.0).ok_or(Unusable)
    }

    /// The logits with bias and penalties, into `edited`.
    fn edit(&mut self, logits: &[f32]) {
        self.edited.clear();
        self.edited.extend_from_slice(logits);
        let s = &self.sampling;
        for &(token, bias) in &s.logit_bias {
            if let Some(logit) = self.edited.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for (&token, seen) in &self.seen {
            if let Some(logit) = self.edited.get_mut(token as usize) {
                if *logit > 0.0 {
                    *logit /= s.repetition_penalty;
                } else {
                    *logit *= s.repetition_penalty;
                }
                if seen.produced > 0 {
                    #[expect(clippy::cast_precision_loss, reason = "no stream has 2^24 tokens")]
                    let times = seen.produced as f32;
                    *logit -= s.frequency_penalty * times + s.presence_penalty;
                }
            }
        }
    }

    fn report(
        &mut self,
        logits: &[f32],
        token: TokenId,
        n: usize,
    ) -> Result<TokenLogprobs, Unusable> {
        let top = vector::maximum(logits)?;
        let normaliser = vector::log_sum_exp(logits, top);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a logprob is sent as an f32"
        )]
        let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
        let chosen = logits.get(token as usize).copied().ok_or(Unusable)?;
        select::top_k(logits, n, &mut self.best);
        let top = self
            .best
            .iter()
            .map(|&(token, logit)| (token, logprob(logit)))
            .collect();
        Ok(TokenLogprobs {
            chosen: logprob(chosen),
            top,
        })
    }
}

fn id(index: usize) -> Result<TokenId, Unusable> {
    TokenId::try_from(index).map_err(|_| Unusable)
}

#[cfg(test)]
mod tests;
