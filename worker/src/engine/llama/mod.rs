//! The llama.cpp engine: every live sequence in one `llama_decode` a step.
//!
//! The library ends the process on a batch that it does not accept; `plan::check` stands before it.
//! Each slot has a cache of its own, as long as its context, so that a full context is seen before
//! the library is asked; whatever a step then answers but success ends the process.

mod chunk;
mod curve;
mod gguf;
mod load;
mod log;
mod place;
mod plan;
mod seat;
mod text;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
use self::curve::Curve;
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
/// A copied prefix spares so many tokens at least; fewer are computed as fast.
const COPIED_TOKENS_MIN: usize = 32;
/// Caches up to this size are copied, so that the copy delays the next step by less than a prefill
/// chunk: some 50 ms of a CPU's memory, some 5 ms of a GPU's.
const COPIED_BYTES_MAX_CPU: u64 = 256 << 20;
const COPIED_BYTES_MAX_GPU: u64 = 4 << 30;
/// Warm-up runs no further shape after this.
const WARM_UP_MAX: Duration = Duration::from_secs(60);

/// What the load found out about one step.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Tokens of the largest batch.
    step_tokens: usize,
    /// Threads that sample rows side by side.
    sampling_lanes: usize,
    /// A slot can forget its last token.
    can_fill: bool,
    /// The layers are on a GPU.
    on_gpu: bool,
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
    /// Gaps between the rows' slots are filled up to this length.
    fill_longest: usize,
    /// On a GPU what a step of so many rows takes; empty on a CPU.
    curve: Curve,
    /// Prompt tokens that a pass of its own costs: neighbouring prompts are padded where that spares
    /// passes. 0: never.
    pad_price: usize,
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
            fill_longest: 0,
            curve: Curve::default(),
            pad_price: 0,
            admissions: 0,
        }
    }

    /// Prompt tokens that the next step may take.
    #[must_use]
    pub fn prefill_chunk(&self) -> usize {
        self.chunk.tokens()
    }

    /// Sets up to which length gaps between the rows' slots are filled with rows that are thrown
    /// away. Warm-up finds what pays; this is for tests.
    pub fn fill_gaps_up_to(&mut self, slots: usize) {
        self.fill_longest = if self.shape.can_fill { slots } else { 0 };
    }

    /// Sets what a pass of its own costs, in prompt tokens. Warm-up finds it on a GPU; on a CPU it is
    /// nothing. This is for tests.
    pub fn pad_prompts_up_to(&mut self, tokens: usize) {
        self.pad_price = if self.shape.can_fill { tokens } else { 0 };
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

    /// Computes `rows`, which are in the order of their slots.
    fn decode(&mut self, rows: &[Row]) -> Result<(), EngineError> {
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
            let known = self
                .seats
                .get(row.slot)
                .map_or(&[][..], |seat| &seat.tokens);
            let tokens = if row.filler {
                &[0]
            } else {
                known
                    .get(row.position..row.position + row.count)
                    .ok_or_else(|| poisoned("a row without tokens".to_owned()))?
            };
            let padding = std::iter::repeat_n(&0, row.padding);
            for (offset, &token) in tokens.iter().chain(padding).enumerate() {
                let last = row.completes && offset + 1 == row.count;
                let position =
                    i32::try_from(row.position + offset).map_err(|e| poisoned(e.to_string()))?;
                let token = i32::try_from(token).map_err(|e| poisoned(e.to_string()))?;
                self.batch
                    .add(LlamaToken(token), position, &[sequence], last)
                    .map_err(|e| poisoned(e.to_string()))?;
            }
        }
        self.context
            .decode(&mut self.batch)
            .map_err(|e| poisoned(format!("a step failed: {e}")))?;
        // A GPU works on after the call; the time of a step is until it is done.
        self.context.synchronize();
        for row in rows.iter().filter(|r| r.filler || r.padding > 0) {
            let own = if row.filler { 0 } else { row.count };
            let kept = self.forget_behind(row.slot, row.position + own)?;
            if kept != row.position + own {
                return Err(poisoned("a filler can't be taken back".to_owned()));
            }
        }
        Ok(())
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
            if let (true, Some(entry)) = (row.completes, at.get_mut(row.slot)) {
                *entry = Some(end + row.count - 1);
            }
            end += row.length();
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
            // Which tokens does not matter, but for a router of experts that they differ.
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
                filler: false,
                padding: 0,
            })
            .collect();
        let begun = Instant::now();
        self.decode(&rows)?;
        let took = begun.elapsed();
        self.context.clear_kv_cache();
        for seat in &mut self.seats {
            seat.tokens.clear();
        }
        Ok(took)
    }

    /// Finds how long a gap pays to be filled: a filler costs what one more row in a pass costs,
    /// and spares what a pass costs whatever is in it.
    fn weigh_fillers(&mut self, pulse: &Pulse) -> Result<(), EngineError> {
        let (mut one, mut two) = (Duration::MAX, Duration::MAX);
        for _ in 0..3 {
            one = one.min(self.rehearse(1, 1)?);
            two = two.min(self.rehearse(2, 1)?);
            pulse.beat();
        }
        let row = two.saturating_sub(one).as_secs_f64();
        let pass = (one.as_secs_f64() - row).max(0.0);
        let most = self.seats.len();
        let pays = (1..=most).take_while(|&n| n as f64 * row < pass).count();
        self.fill_gaps_up_to(pays);
        Ok(())
    }
}

impl LlamaEngine {
    /// Times steps of few and of many rows. A GPU's take milliseconds.
    fn learn_curve(&mut self, pulse: &Pulse) -> Result<(), EngineError> {
        if !self.shape.can_fill {
            return Ok(());
        }
        let mut measured = Vec::new();
        for rows in Curve::sizes(self.seats.len()) {
            let mut best = Duration::MAX;
            for _ in 0..4 {
                best = best.min(self.rehearse(rows, 1)?);
                pulse.beat();
            }
            measured.push((rows, best));
        }
        self.curve = Curve::new(measured);
        Ok(())
    }

    /// A prefix of `prompt` that another slot's cache holds, and that is worth to be copied into `at`,
    /// which holds `own` tokens of it: that slot, and how many tokens.
    fn donor(&self, at: usize, own: usize, prompt: &[TokenId]) -> Option<(usize, usize)> {
        // A slot's whole cache is copied, whatever is in it.
        let cells = u64::from(
            self.limits
                .context_tokens
                .next_multiple_of(load::CELLS_MULTIPLE),
        );
        let bytes = cells.saturating_mul(self.limits.kv_bytes_per_token);
        let most = if self.shape.on_gpu {
            COPIED_BYTES_MAX_GPU
        } else {
            COPIED_BYTES_MAX_CPU
        };
        if bytes > most || !self.shape.can_fill {
            return None;
        }
        let others = self.seats.iter().enumerate().filter(|&(n, _)| n != at);
        others
            .map(|(n, seat)| (n, seat.shared_with(prompt).min(prompt.len() - 1)))
            .max_by_key(|&(n, shared)| (shared, std::cmp::Reverse(n)))
            .filter(|&(_, shared)| shared >= own + COPIED_TOKENS_MIN)
    }

    /// Copies slot `from`'s cache over slot `to`'s and keeps the first `tokens` of it.
    fn copy(&mut self, from: usize, to: usize, tokens: usize) -> Result<usize, EngineError> {
        let sequence = |slot: usize| i32::try_from(slot).map_err(|e| poisoned(e.to_string()));
        self.forget(to)?;
        // Whole: with a cache for each slot llama.cpp ends the process on a part.
        self.context
            .copy_kv_cache_seq(sequence(from)?, sequence(to)?, None, None)
            .map_err(|e| poisoned(format!("copy a cache: {e}")))?;
        self.forget_behind(to, tokens)
    }

    /// Finds what a pass costs in prompt tokens, given what a pass of `tokens` took. On a CPU padding
    /// is not done: passes are nearly free there, and rows would no longer be computed as they would
    /// be alone.
    fn weigh_padding(&mut self, tokens: usize, took: Duration) -> Result<(), EngineError> {
        if !self.shape.on_gpu || self.seats.len() < 2 {
            return Ok(());
        }
        let mut pass = Duration::MAX;
        for _ in 0..3 {
            pass = pass.min(self.rehearse(1, 1)?);
        }
        let token = took.saturating_sub(pass).as_secs_f64() / tokens.max(1) as f64;
        let price = (1..=self.shape.step_tokens)
            .take_while(|&n| n as f64 * token < pass.as_secs_f64())
            .count();
        self.pad_prompts_up_to(price);
        Ok(())
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
        if slots > 1 && self.shape.on_gpu {
            self.learn_curve(pulse)?;
        } else if slots > 1 {
            self.weigh_fillers(pulse)?;
        }
        // Prefill from the smallest chunk to that of the target, which also finds its size.
        loop {
            let tokens = self.chunk.tokens().min(self.context_tokens());
            let took = self.rehearse(1, tokens)?;
            pulse.beat();
            self.chunk.observe(tokens, took);
            let grown = self.chunk.tokens().min(self.context_tokens());
            if grown <= tokens + tokens / 4 || begun.elapsed() > WARM_UP_MAX {
                return self.weigh_padding(tokens, took);
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
        let donor = if task.cache_prompt && !task.batch_invariant {
            self.donor(at, kept, prompt)
        } else {
            None
        };
        let kept = match donor {
            Some((from, shared)) => self.copy(from, at, shared)?,
            None if kept < computed => self.forget_behind(at, kept)?,
            None => kept,
        };
        self.admissions += 1;
        let order = self.admissions;
        if let Some(seat) = self.seats.get_mut(at) {
            seat.tokens.clear();
            seat.tokens.extend_from_slice(prompt);
            seat.computed = kept;
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
        let wants: Vec<_> = self
            .seats
            .iter()
            .enumerate()
            .filter_map(|(slot, seat)| seat.want(slot, ALONE_CHUNK))
            .collect();
        let room = self.shape.step_tokens;
        let whole = self.pad_price > 0;
        let mut rows = self.turn.plan(&wants, self.chunk.tokens(), room, whole);
        if rows.is_empty() {
            return Ok(StepReport::default());
        }
        let context = self.context_tokens();
        let position = |slot: usize| {
            let seat = self.seats.get(slot)?;
            Some(seat.computed).filter(|&computed| computed < context)
        };
        let joins =
            |before, gap, after| gap <= self.fill_longest || self.curve.joins(before, gap, after);
        plan::fill(&mut rows, room, joins, position);
        plan::round_up(&mut rows, |n| self.curve.missing(n), position);
        plan::pad(&mut rows, self.pad_price, room, context);
        let begun = Instant::now();
        self.decode(&rows)?;
        let took = begun.elapsed();
        pulse.beat();
        let decoded = rows.iter().filter(|r| r.decoding).count();
        let prefilled = rows
            .iter()
            .filter(|r| !r.decoding && !r.filler)
            .map(|r| r.count)
            .sum();
        if !wants
            .iter()
            .any(|w| w.alone.is_some() && rows.iter().any(|r| r.slot == w.slot))
        {
            self.chunk.observe(prefilled, took);
        }
        for row in rows.iter().filter(|r| !r.filler) {
            if let Some(seat) = self.seats.get_mut(row.slot) {
                seat.computed = row.position + row.count;
            }
        }
        self.choose(&rows, out)?;
        Ok(StepReport {
            batch: narrow(decoded)?,
            prefill_tokens: narrow(prefilled)?,
        })
    }

    fn release(&mut self, slot: Slot) {
        if let Some(seat) = self.seats.get_mut(slot.0 as usize) {
            seat.stop();
        }
    }

    fn best_slot(&self, prompt: &[TokenId], free: &[Slot]) -> Option<Slot> {
        // What is spared, less a part of what is thrown away: a long conversation's cache is not
        // given up for a few words that every prompt begins with. Of equals the lowest slot, so that
        // the live ones lie close together.
        if self.shape.on_gpu {
            // A gap between the live slots costs a pass in every step, and a prefix elsewhere can be
            // copied: the lowest slot, whatever it holds.
            return free.iter().copied().min();
        }
        free.iter().copied().max_by_key(|slot| {
            let score = self.seats.get(slot.0 as usize).map_or(i64::MIN, |seat| {
                let shared = seat.shared_with(prompt);
                let lost = seat.computed - shared;
                i64::try_from(shared * 4).unwrap_or(i64::MAX)
                    - i64::try_from(lost).unwrap_or(i64::MAX)
            });
            (score, std::cmp::Reverse(*slot))
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
