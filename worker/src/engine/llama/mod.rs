//! The llama.cpp engine: every live sequence in one `llama_decode` a step.
//!
//! The library ends the process on a batch that it does not accept; `plan::check` stands before it.
//! What `llama_decode` answers decides who dies: no room in the cache ends one row, everything else
//! the process.

mod chunk;
mod gguf;
mod load;
mod log;
mod plan;
mod seat;
mod text;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llama_cpp_2::DecodeError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use proto::TokenId;
use proto::generate::FinishReason;
use proto::to_dispatcher::{Logprobs, TopLogprob};

pub use self::gguf::{GgufError, Header};
pub use self::load::{backend, load, open};
pub use self::text::LlamaText;

use self::chunk::Chunk;
use self::plan::{Row, Turn};
use self::seat::{Live, Seat};
use crate::engine::{
    Emission, Engine, EngineError, Limits, Pulse, Rejected, Slot, SlotEnd, StepReport, Task,
    TextModel,
};
use crate::sampler::{self, Sampled, Sampler, TokenLogprobs, Unusable};

/// Prompt tokens a step of a row that steps alone: fixed, so that its arithmetic never depends on
/// how busy the machine is.
const ALONE_CHUNK: usize = 32;
/// Warm-up runs no further shape after this.
const WARM_UP_MAX: Duration = Duration::from_secs(60);

/// What the load found out about one step.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Tokens of the largest batch.
    step_tokens: usize,
    /// Threads that sample rows side by side.
    sampling_lanes: usize,
}

/// One context of one model, with a seat for each slot.
pub struct LlamaEngine {
    context: LlamaContext<'static>,
    batch: LlamaBatch<'static>,
    text: Arc<LlamaText>,
    limits: Limits,
    shape: Shape,
    seats: Vec<Seat>,
    chunk: Chunk,
    turn: Turn,
    /// Counts admissions: who came first, and which kept cache is the oldest.
    admissions: u64,
}

impl fmt::Debug for LlamaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlamaEngine")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl LlamaEngine {
    fn new(
        context: LlamaContext<'static>,
        text: Arc<LlamaText>,
        limits: Limits,
        shape: Shape,
    ) -> Self {
        let seats = (0..limits.slots).map(|_| Seat::default()).collect();
        Self {
            context,
            batch: LlamaBatch::new(shape.step_tokens, 1),
            text,
            limits,
            shape,
            seats,
            chunk: Chunk::new(shape.step_tokens),
            turn: Turn::default(),
            admissions: 0,
        }
    }

    /// Prompt tokens that the next step may take.
    #[must_use]
    pub fn prefill_chunk(&self) -> usize {
        self.chunk.tokens()
    }

    fn context_tokens(&self) -> usize {
        self.limits.context_tokens as usize
    }

    /// Takes what lies behind `keep` tokens out of a slot's cache. Some architectures can't forget
    /// a part; then all goes. Gives how many are left.
    fn forget_behind(&mut self, slot: usize, keep: usize) -> Result<usize, EngineError> {
        let sequence = narrow(slot)?;
        let from = narrow(keep)?;
        let whole = keep == 0;
        let removed = self
            .context
            .clear_kv_cache_seq(Some(sequence), (!whole).then_some(from), None)
            .map_err(|e| poisoned(format!("forget a part of a cache: {e}")))?;
        if removed || whole {
            return Ok(keep);
        }
        self.context
            .clear_kv_cache_seq(Some(sequence), None, None)
            .map_err(|e| poisoned(format!("forget a cache: {e}")))?;
        Ok(0)
    }

    /// Empties a slot's cache.
    fn forget(&mut self, slot: usize) -> Result<(), EngineError> {
        self.forget_behind(slot, 0)?;
        if let Some(seat) = self.seats.get_mut(slot) {
            seat.tokens.clear();
            seat.computed = 0;
        }
        Ok(())
    }

    fn check(&self, slot: Slot, prompt: &[TokenId], task: &Task) -> Result<(), Rejected> {
        let request = |words: String| Err(Rejected::Request(words));
        match self.seats.get(slot.0 as usize) {
            None => return Err(Rejected::Row(format!("there is no slot {}", slot.0))),
            Some(seat) if seat.live.is_some() => {
                return Err(Rejected::Row(format!("slot {} is taken", slot.0)));
            }
            Some(_) => {}
        }
        if prompt.is_empty() {
            return request("the prompt is empty".to_owned());
        }
        let context = self.context_tokens();
        if prompt.len() >= context {
            let length = prompt.len();
            return request(format!(
                "the prompt of {length} tokens leaves no room in a context of {context}"
            ));
        }
        if let Some(id) = prompt.iter().find(|&&id| id >= self.limits.vocabulary) {
            return request(format!("the token id {id} is outside of the vocabulary"));
        }
        if task.first_index as usize > prompt.len() {
            return request("more output than there are ids".to_owned());
        }
        sampler::check(&task.sampling, task.logprobs, self.limits.vocabulary)
            .or_else(|words| request(words.to_owned()))
    }

    /// One pass over `rows`; false where the cache has no room for them, and nothing has happened.
    fn decode(&mut self, rows: &[Row]) -> Result<bool, EngineError> {
        plan::check(
            rows,
            self.seats.len(),
            self.shape.step_tokens,
            self.context_tokens(),
        )
        .map_err(|fault| poisoned(fault.to_owned()))?;
        self.batch.clear();
        for row in rows {
            let sequence = i32::try_from(row.slot).map_err(|e| poisoned(e.to_string()))?;
            let tokens = self
                .seats
                .get(row.slot)
                .and_then(|seat| seat.tokens.get(row.position..row.position + row.count))
                .ok_or_else(|| poisoned("a row without tokens".to_owned()))?;
            for (offset, &token) in tokens.iter().enumerate() {
                let last = row.completes && offset + 1 == row.count;
                let position =
                    i32::try_from(row.position + offset).map_err(|e| poisoned(e.to_string()))?;
                let token = i32::try_from(token).map_err(|e| poisoned(e.to_string()))?;
                self.batch
                    .add(LlamaToken(token), position, &[sequence], last)
                    .map_err(|e| poisoned(e.to_string()))?;
            }
        }
        match self.context.decode(&mut self.batch) {
            Ok(()) => {
                // A GPU works on after the call; the time of a step is until it is done.
                self.context.synchronize();
                Ok(true)
            }
            Err(DecodeError::NoKvCacheSlot) => Ok(false),
            Err(other) => Err(poisoned(format!("a step failed: {other}"))),
        }
    }

    /// Makes room in a full cache: the oldest cache that nobody uses goes; where there is none, the
    /// longest row ends. An emission tells of it.
    fn make_room(&mut self, out: &mut Vec<Emission>) -> Result<(), EngineError> {
        let seats = || {
            self.seats
                .iter()
                .enumerate()
                .filter(|(_, s)| s.computed > 0)
        };
        let idle = seats()
            .filter(|(_, s)| s.live.is_none())
            .min_by_key(|(_, s)| s.used);
        if let Some((slot, _)) = idle {
            return self.forget(slot);
        }
        let longest = seats()
            .max_by_key(|(_, s)| s.computed)
            .map(|(slot, _)| slot);
        let slot =
            longest.ok_or_else(|| poisoned("an empty cache has no room for a step".to_owned()))?;
        if let Some(live) = self.seats.get_mut(slot).and_then(|s| s.live.take()) {
            // Nothing of a prompt that never got through would be told as a short answer.
            let end = if live.decoding {
                SlotEnd::Finished(FinishReason::Length)
            } else {
                SlotEnd::Failed(Rejected::Row("the KV cache is full".to_owned()))
            };
            out.push(emission(slot, end)?);
        }
        self.forget(slot)
    }

    /// Chooses the next token of each row that is complete, and sends it or the row's end.
    fn choose(&mut self, rows: &[Row], out: &mut Vec<Emission>) -> Result<(), EngineError> {
        let sampled = self.sample(rows)?;
        for (slot, outcome) in sampled {
            let sampled = match outcome {
                Ok(sampled) => sampled,
                Err(unusable) => {
                    let fault = SlotEnd::Failed(Rejected::Row(unusable.to_string()));
                    out.push(emission(slot, fault)?);
                    if let Some(seat) = self.seats.get_mut(slot) {
                        seat.live = None;
                    }
                    // What made these numbers must not reach the next sequence.
                    self.forget(slot)?;
                    continue;
                }
            };
            let logprobs = sampled.logprobs.map(|l| self.with_bytes(sampled.token, &l));
            let context = self.context_tokens();
            let ends = self.text.is_end(sampled.token);
            let Some(seat) = self.seats.get_mut(slot) else {
                continue;
            };
            let Some(live) = seat.live.as_mut() else {
                continue;
            };
            live.decoding = true;
            if ends && !live.task.ignore_eos {
                out.push(emission(slot, SlotEnd::Finished(FinishReason::Stop))?);
                seat.live = None;
                continue;
            }
            live.index = live.index.saturating_add(1);
            seat.tokens.push(sampled.token);
            let full = seat.tokens.len() >= context;
            if full {
                seat.stop();
            }
            out.push(Emission {
                slot: Slot(narrow(slot)?),
                tokens: vec![sampled.token],
                logprobs: logprobs.into_iter().collect(),
                end: full.then_some(SlotEnd::Finished(FinishReason::Length)),
            });
        }
        Ok(())
    }

    /// The sampler's answer for each complete row, in the order of the rows.
    #[expect(
        clippy::type_complexity,
        reason = "a list of pairs that lives for three lines"
    )]
    fn sample(
        &mut self,
        rows: &[Row],
    ) -> Result<Vec<(usize, Result<Sampled, Unusable>)>, EngineError> {
        let mut at = vec![None; self.seats.len()];
        let mut end = 0;
        for row in rows {
            end += row.count;
            if let (true, Some(entry)) = (row.completes, at.get_mut(row.slot)) {
                *entry = Some(end - 1);
            }
        }
        let mut jobs = Vec::new();
        for (slot, seat) in self.seats.iter_mut().enumerate() {
            let (Some(index), Some(live)) = (at[slot], seat.live.as_mut()) else {
                continue;
            };
            let index = i32::try_from(index).map_err(|e| poisoned(e.to_string()))?;
            // The row was marked for output above, so that this can't panic.
            let logits = self.context.get_logits_ith(index);
            jobs.push(sampler::Job {
                slot,
                sampler: &mut live.sampler,
                logits,
                index: live.index,
            });
        }
        Ok(sampler::sample_rows(jobs, self.shape.sampling_lanes))
    }

    fn with_bytes(&self, token: TokenId, logprobs: &TokenLogprobs) -> Logprobs {
        let bytes = |token| {
            let mut bytes = Vec::new();
            self.text.piece(token, &mut bytes);
            bytes
        };
        let top = logprobs.top.iter();
        let top = top
            .map(|&(id, logprob)| TopLogprob {
                id,
                bytes: bytes(id),
                logprob,
            })
            .collect();
        Logprobs {
            chosen: logprobs.chosen,
            bytes: bytes(token),
            top,
        }
    }

    /// One pass of `tokens` tokens in each of `slots` slots, for warm-up; the caches are empty before
    /// and after.
    fn rehearse(&mut self, slots: usize, tokens: usize) -> Result<Duration, EngineError> {
        let tokens = tokens.min(self.context_tokens());
        for seat in self.seats.iter_mut().take(slots) {
            // Which tokens does not matter, that they differ does: equal rows would share cache lines.
            seat.tokens = (0..self.limits.vocabulary)
                .cycle()
                .skip(1)
                .take(tokens)
                .collect();
        }
        let rows: Vec<Row> = (0..slots)
            .map(|slot| Row {
                slot,
                position: 0,
                count: tokens,
                completes: true,
                decoding: false,
            })
            .collect();
        let begun = Instant::now();
        let fits = self.decode(&rows)?;
        let took = begun.elapsed();
        self.context.clear_kv_cache();
        for seat in &mut self.seats {
            seat.tokens.clear();
        }
        if fits {
            Ok(took)
        } else {
            Err(poisoned("the cache is too small for a step".to_owned()))
        }
    }
}

impl Engine for LlamaEngine {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn warm(&mut self, pulse: &Pulse) -> Result<(), EngineError> {
        let begun = Instant::now();
        let slots = self.seats.len();
        let mut shapes: Vec<usize> = std::iter::successors(Some(1), |n| Some(n * 2))
            .take_while(|&n| n < slots)
            .collect();
        shapes.push(slots);
        for rows in shapes {
            if begun.elapsed() > WARM_UP_MAX {
                break;
            }
            self.rehearse(rows, 1)?;
            pulse.beat();
        }
        // Prefill from the smallest chunk to that of the target, which also finds its size.
        loop {
            let tokens = self.chunk.tokens().min(self.context_tokens());
            let took = self.rehearse(1, tokens)?;
            pulse.beat();
            self.chunk.observe(tokens, took);
            let grown = self.chunk.tokens().min(self.context_tokens());
            if grown <= tokens + tokens / 4 || begun.elapsed() > WARM_UP_MAX {
                return Ok(());
            }
        }
    }

    fn admit(&mut self, slot: Slot, prompt: &[TokenId], task: &Task) -> Result<u32, EngineError> {
        self.check(slot, prompt, task)?;
        let at = slot.0 as usize;
        let kept = self.seats.get(at).map_or(0, |seat| {
            if task.cache_prompt && !task.batch_invariant {
                // The last token is always computed: its logits choose the next one.
                seat.shared_with(prompt).min(prompt.len() - 1)
            } else {
                0
            }
        });
        let computed = self.seats.get(at).map_or(0, |seat| seat.computed);
        let kept = if kept < computed {
            self.forget_behind(at, kept)?
        } else {
            kept
        };
        self.admissions += 1;
        let order = self.admissions;
        if let Some(seat) = self.seats.get_mut(at) {
            seat.tokens.clear();
            seat.tokens.extend_from_slice(prompt);
            seat.computed = kept;
            seat.used = order;
            let original = prompt.len() - task.first_index as usize;
            let (asked, emitted) = prompt.split_at(original);
            seat.live = Some(Live {
                sampler: Sampler::new(&task.sampling, task.logprobs, asked, emitted),
                task: task.clone(),
                index: task.first_index,
                original,
                order,
                decoding: false,
            });
        }
        u32::try_from(kept).map_err(|e| poisoned(e.to_string()))
    }

    fn step(&mut self, pulse: &Pulse, out: &mut Vec<Emission>) -> Result<StepReport, EngineError> {
        loop {
            let wants: Vec<_> = self
                .seats
                .iter()
                .enumerate()
                .filter_map(|(slot, seat)| seat.want(slot, ALONE_CHUNK))
                .collect();
            let rows = self
                .turn
                .plan(&wants, self.chunk.tokens(), self.shape.step_tokens);
            if rows.is_empty() {
                return Ok(StepReport::default());
            }
            let begun = Instant::now();
            let fits = self.decode(&rows)?;
            pulse.beat();
            if !fits {
                self.make_room(out)?;
                continue;
            }
            let took = begun.elapsed();
            let decoded = rows.iter().filter(|r| r.decoding).count();
            let prefilled = rows.iter().filter(|r| !r.decoding).map(|r| r.count).sum();
            if !wants
                .iter()
                .any(|w| w.alone.is_some() && rows.iter().any(|r| r.slot == w.slot))
            {
                self.chunk.observe(prefilled, took);
            }
            for row in &rows {
                if let Some(seat) = self.seats.get_mut(row.slot) {
                    seat.computed = row.position + row.count;
                }
            }
            self.choose(&rows, out)?;
            return Ok(StepReport {
                batch: narrow(decoded)?,
                prefill_tokens: narrow(prefilled)?,
            });
        }
    }

    fn release(&mut self, slot: Slot) {
        if let Some(seat) = self.seats.get_mut(slot.0 as usize) {
            seat.stop();
        }
    }

    fn best_slot(&self, prompt: &[TokenId], free: &[Slot]) -> Option<Slot> {
        // The longest prefix; of equals the one whose cache was not used for the longest time.
        free.iter().copied().max_by_key(|slot| {
            self.seats
                .get(slot.0 as usize)
                .map_or((0, std::cmp::Reverse(u64::MAX)), |seat| {
                    (seat.shared_with(prompt), std::cmp::Reverse(seat.used))
                })
        })
    }
}

fn emission(slot: usize, end: SlotEnd) -> Result<Emission, EngineError> {
    let slot = Slot(narrow(slot)?);
    Ok(Emission {
        slot,
        tokens: Vec::new(),
        logprobs: Vec::new(),
        end: Some(end),
    })
}

fn poisoned(words: String) -> EngineError {
    EngineError::Poisoned(words)
}

fn narrow(n: usize) -> Result<u32, EngineError> {
    u32::try_from(n).map_err(|e| poisoned(e.to_string()))
}
