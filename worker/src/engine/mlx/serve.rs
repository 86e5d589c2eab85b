//! The engine's loop body: seats sequences, runs a step's passes, chooses tokens.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mlx_rs::error::Exception;
use mlx_rs::{Array, Dtype, transforms};
use proto::TokenId;
use proto::generate::FinishReason;
use proto::to_dispatcher::{Logprobs, TopLogprob};

use super::cache::{Cache, Shape};
use super::choose::{Row, Rows};
use super::device::{Backend, Claim};
use super::model::{Model, Span};
use super::schedule::{Schedule, Share, Waiting};
use super::text::FolderText;
use crate::engine::{
    Emission, Engine, EngineError, Limits, Pulse, Rejected, Slot, SlotEnd, StepReport, Task,
    TextModel,
};
use crate::sampler::{self, Sampled, Sampler, Unusable};

/// What the warm-up may spend on trying chunks: a restarted worker is waited for.
const LEARNING_MAX: Duration = Duration::from_millis(500);

/// A sequence that has a slot.
#[derive(Debug)]
struct Sequence {
    /// The prompt and all that was produced; the slot's cache holds a prefix of it.
    tokens: Vec<TokenId>,
    task: Task,
    sampler: Sampler,
    /// Index of the next token in the stream.
    next_index: u32,
    /// Which admission it was: prompts are prefilled in this order.
    turn: u64,
}

/// A model folder on MLX, owned by the thread that loaded it.
pub struct MlxEngine {
    claim: Claim,
    backend: Backend,
    model: Model,
    shape: Shape,
    limits: Limits,
    text: Arc<FolderText>,
    /// One a slot, in a vector of their own, since a pass writes several at once.
    caches: Vec<Cache>,
    seats: Vec<Option<Sequence>>,
    schedule: Schedule,
    admissions: u64,
}

impl fmt::Debug for MlxEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MlxEngine")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl MlxEngine {
    pub(super) fn new(
        claim: Claim,
        backend: Backend,
        model: Model,
        shape: Shape,
        slots: u32,
        text: Arc<FolderText>,
    ) -> Self {
        let limits = Limits {
            slots,
            context_tokens: shape.context_tokens.unsigned_abs(),
            vocabulary: text.vocabulary(),
            weight_bytes_per_step: model.weights().step_bytes(),
            kv_bytes_per_token: shape.bytes_per_token(),
            device: backend.name().to_owned(),
        };
        Self {
            claim,
            backend,
            model,
            shape,
            limits,
            text,
            caches: (0..slots).map(|_| Cache::new(shape)).collect(),
            seats: (0..slots).map(|_| None).collect(),
            schedule: Schedule::new(),
            admissions: 0,
        }
    }

    /// The logits after each token of a text, computed in one pass with nobody beside it. Where two
    /// runs differ, this says how near the tie was.
    ///
    /// # Errors
    /// `Poisoned` where MLX fails.
    pub fn score(&mut self, tokens: &[TokenId]) -> Result<Vec<Vec<f32>>, EngineError> {
        self.claim.assert_held();
        let rows = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let mut caches = [Cache::new(self.shape)];
        let logits = self.rows_of(tokens, &mut caches, &(0..rows).collect::<Vec<_>>());
        let logits = logits.map_err(|e| poisoned(&e))?;
        let flat = logits
            .try_as_slice::<f32>()
            .map_err(|e| EngineError::Poisoned(e.to_string()))?;
        let width = self.limits.vocabulary as usize;
        Ok(flat.chunks(width.max(1)).map(<[f32]>::to_vec).collect())
    }

    /// A pass of one span over fresh caches.
    fn rows_of(
        &self,
        tokens: &[TokenId],
        caches: &mut [Cache],
        rows: &[i32],
    ) -> Result<Array, Exception> {
        let end = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let span = Span {
            slot: 0,
            rows: 0..end,
            past: 0,
        };
        if let Some(cache) = caches.first_mut() {
            cache.extend(tokens)?;
        }
        let hidden = self.model.forward(tokens, &[span], caches)?;
        let logits = self.model.logits(&hidden, rows)?.as_dtype(Dtype::Float32)?;
        logits.eval()?;
        Ok(logits)
    }

    /// Tries how long passes take, so that the first prompt's chunks already have the right length.
    fn learn_speed(&mut self, pulse: &Pulse) -> Result<(), Exception> {
        let began = Instant::now();
        let mut caches = [Cache::new(self.shape)];
        let mut timed = |engine: &Self, rows: u32| {
            let tokens = vec![0; rows as usize];
            if let Some(cache) = caches.first_mut() {
                cache.truncate(0);
            }
            let start = Instant::now();
            engine.rows_of(&tokens, &mut caches, &[0])?;
            pulse.beat();
            Ok::<_, Exception>(start.elapsed())
        };
        // The first pass of these also makes room.
        timed(self, 1)?;
        let single = timed(self, 1)?;
        self.schedule.learn(0, single);
        let mut tried = 0;
        loop {
            let chunk = self.schedule.chunk(false);
            let spent = began.elapsed() > LEARNING_MAX;
            if spent || chunk <= tried || chunk >= self.limits.context_tokens {
                return Ok(());
            }
            let elapsed = timed(self, chunk)?;
            self.schedule.learn(chunk, elapsed);
            tried = chunk;
        }
    }

    fn waiting(&self) -> Vec<Waiting> {
        let mut waiting: Vec<(u64, Waiting)> = Vec::new();
        for (slot, seat) in self.seats.iter().enumerate() {
            let (Some(sequence), Some(cache)) = (seat, self.caches.get(slot)) else {
                continue;
            };
            let entry = Waiting {
                slot,
                pending: sequence.tokens.len().saturating_sub(cache.len()),
                alone: sequence.task.batch_invariant,
            };
            waiting.push((sequence.turn, entry));
        }
        waiting.sort_unstable_by_key(|(turn, _)| *turn);
        waiting.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Computes the shares' tokens; returns the rows of the complete ones.
    fn pass(&mut self, shares: &[Share]) -> Result<Option<Rows>, Exception> {
        let mut tokens = Vec::new();
        let mut spans = Vec::with_capacity(shares.len());
        let mut last_rows = Vec::new();
        let mut greedy = Vec::new();
        for share in shares {
            let (Some(cache), Some(Some(sequence))) =
                (self.caches.get_mut(share.slot), self.seats.get(share.slot))
            else {
                return Err(Exception::custom("a share without a sequence"));
            };
            let past = cache.len();
            let Some(new) = sequence.tokens.get(past..past + share.tokens) else {
                return Err(Exception::custom("a share of more tokens than there are"));
            };
            cache.extend(new)?;
            let start = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            tokens.extend_from_slice(new);
            let end = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            spans.push(Span {
                slot: share.slot,
                rows: start..end,
                past: i32::try_from(past).unwrap_or(i32::MAX),
            });
            if share.complete {
                last_rows.push(end - 1);
                greedy.push(sequence.sampler.is_argmax());
            }
        }
        tokens.resize(self.backend.padded(tokens.len()), 0);

        let hidden = self.model.forward(&tokens, &spans, &mut self.caches)?;
        let rows = if last_rows.is_empty() {
            None
        } else {
            let logits = self.model.logits(&hidden, &last_rows)?;
            Some(Rows::new(&logits.as_dtype(Dtype::Float32)?, greedy)?)
        };
        // The last layer's keys and values of rows without logits hang on nothing else.
        let caches = shares
            .iter()
            .filter_map(|share| self.caches.get(share.slot));
        let rows_arrays = rows.iter().flat_map(Rows::arrays);
        transforms::eval(caches.flat_map(Cache::arrays).chain(rows_arrays))?;
        Ok(rows)
    }

    /// The next token of a sequence whose pending tokens are all computed.
    fn next_token(&mut self, slot: usize, row: Row<'_>) -> Option<Emission> {
        let seat = self.seats.get_mut(slot)?;
        let sequence = seat.as_mut()?;
        let mut emission = Emission {
            slot: Slot(u32::try_from(slot).unwrap_or(u32::MAX)),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            end: None,
        };
        let sampled = match row {
            Row::Logits(logits) => sequence.sampler.sample(logits, sequence.next_index),
            Row::Chosen(chosen) => chosen.ok_or(Unusable).map(|token| Sampled {
                token,
                logprobs: None,
            }),
        };
        match sampled {
            Err(unusable) => {
                emission.end = Some(SlotEnd::Failed(Rejected::Row(unusable.to_string())));
                // What led to it must not be reused.
                if let Some(cache) = self.caches.get_mut(slot) {
                    cache.truncate(0);
                }
            }
            Ok(sampled) if !sequence.task.ignore_eos && self.text.is_end(sampled.token) => {
                emission.end = Some(SlotEnd::Finished(FinishReason::Stop));
            }
            Ok(sampled) => {
                sequence.tokens.push(sampled.token);
                sequence.next_index += 1;
                emission.tokens.push(sampled.token);
                emission.logprobs.extend(logprobs(&self.text, sampled));
                if sequence.tokens.len() >= self.limits.context_tokens as usize {
                    emission.end = Some(SlotEnd::Finished(FinishReason::Length));
                }
            }
        }
        if emission.end.is_some() {
            *seat = None;
        }
        Some(emission)
    }

    fn run(&mut self, shares: &[Share], out: &mut Vec<Emission>) -> Result<(), EngineError> {
        let Some(rows) = self.pass(shares).map_err(|e| poisoned(&e))? else {
            return Ok(());
        };
        let slots: Vec<usize> = shares
            .iter()
            .filter(|share| share.complete)
            .map(|share| share.slot)
            .collect();
        let width = self.limits.vocabulary as usize;
        rows.read(width, |number, row| {
            let slot = slots.get(number).copied();
            out.extend(slot.and_then(|slot| self.next_token(slot, row)));
        })
        .map_err(EngineError::Poisoned)
    }

    fn check(&self, slot: Slot, prompt: &[TokenId], task: &Task) -> Result<(), Rejected> {
        let refused = |words: String| Err(Rejected::Request(words));
        match self.seats.get(slot.0 as usize) {
            Some(None) => {}
            _ => return Err(Rejected::Row(format!("slot {} is not free", slot.0))),
        }
        if prompt.is_empty() || task.first_index as usize > prompt.len() {
            return refused("the prompt is empty".to_owned());
        }
        if prompt.len() >= self.limits.context_tokens as usize {
            return refused(format!(
                "the prompt's {} tokens leave no room in a context of {}",
                prompt.len(),
                self.limits.context_tokens
            ));
        }
        if let Some(token) = prompt.iter().find(|&&t| t >= self.limits.vocabulary) {
            return refused(format!("token {token} is outside of the vocabulary"));
        }
        sampler::check(&task.sampling, task.logprobs, self.limits.vocabulary)
            .map_err(|words| Rejected::Request(words.to_owned()))
    }
}

impl Engine for MlxEngine {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn warm(&mut self, pulse: &Pulse) -> Result<(), EngineError> {
        self.claim.assert_held();
        for rows in self.backend.shapes(self.limits.slots) {
            let tokens = vec![0; rows.min(self.limits.context_tokens as usize)];
            let mut caches = [Cache::new(self.shape)];
            self.rows_of(&tokens, &mut caches, &[0])
                .map_err(|e| poisoned(&e))?;
            pulse.beat();
        }
        self.learn_speed(pulse).map_err(|e| poisoned(&e))
    }

    fn admit(&mut self, slot: Slot, prompt: &[TokenId], task: &Task) -> Result<u32, EngineError> {
        self.check(slot, prompt, task)?;
        let index = slot.0 as usize;
        let Some(cache) = self.caches.get_mut(index) else {
            return Err(Rejected::Row(format!("slot {} is not there", slot.0)).into());
        };
        // The last token is always computed: its logits are the first token's.
        let reused = if task.cache_prompt && !task.batch_invariant {
            cache.common_prefix(prompt).min(prompt.len() - 1)
        } else {
            0
        };
        cache.truncate(reused);
        let (given, emitted) = prompt.split_at(prompt.len() - task.first_index as usize);
        self.admissions += 1;
        let sequence = Sequence {
            tokens: prompt.to_vec(),
            task: task.clone(),
            sampler: Sampler::new(&task.sampling, task.logprobs, given, emitted),
            next_index: task.first_index,
            turn: self.admissions,
        };
        if let Some(seat) = self.seats.get_mut(index) {
            *seat = Some(sequence);
        }
        Ok(u32::try_from(reused).unwrap_or(u32::MAX))
    }

    fn step(&mut self, pulse: &Pulse, out: &mut Vec<Emission>) -> Result<StepReport, EngineError> {
        self.claim.assert_held();
        let waiting = self.waiting();
        let decoding = |share: &Share| {
            waiting
                .iter()
                .any(|w| w.slot == share.slot && w.pending == 1)
        };
        let mut report = StepReport::default();
        if waiting.is_empty() {
            pulse.beat();
        }
        for pass in self.schedule.passes(&waiting) {
            let batch = pass.iter().filter(|share| decoding(share)).count();
            let prefilled: usize = pass.iter().filter(|s| !decoding(s)).map(|s| s.tokens).sum();
            let alone = pass.iter().any(|share| {
                let seat = self.seats.get(share.slot).and_then(Option::as_ref);
                seat.is_some_and(|sequence| sequence.task.batch_invariant)
            });
            let prefilled = u32::try_from(prefilled).unwrap_or(u32::MAX);
            let start = Instant::now();
            self.run(&pass, out)?;
            if !alone {
                self.schedule.learn(prefilled, start.elapsed());
            }
            pulse.beat();
            report.batch += u32::try_from(batch).unwrap_or(u32::MAX);
            report.prefill_tokens += prefilled;
        }
        Ok(report)
    }

    fn release(&mut self, slot: Slot) {
        if let Some(seat) = self.seats.get_mut(slot.0 as usize) {
            *seat = None;
        }
    }

    fn best_slot(&self, prompt: &[TokenId], free: &[Slot]) -> Option<Slot> {
        let rank = |slot: &Slot| {
            let cache = self.caches.get(slot.0 as usize);
            let shared = cache.map_or(0, |c| c.common_prefix(prompt));
            // Among equals the one that loses least.
            let held = cache.map_or(0, Cache::len);
            (std::cmp::Reverse(shared), held, slot.0)
        };
        free.iter().copied().min_by_key(rank)
    }
}

fn logprobs(text: &FolderText, sampled: Sampled) -> Option<Logprobs> {
    let bytes = |token: TokenId| {
        let mut bytes = Vec::new();
        text.piece(token, &mut bytes);
        bytes
    };
    sampled.logprobs.map(|found| Logprobs {
        chosen: found.chosen,
        bytes: bytes(sampled.token),
        top: found
            .top
            .into_iter()
            .map(|(id, logprob)| TopLogprob {
                id,
                bytes: bytes(id),
                logprob,
            })
            .collect(),
    })
}

fn poisoned(error: &Exception) -> EngineError {
    EngineError::Poisoned(format!("MLX: {}", error.what()))
}
