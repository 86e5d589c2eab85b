//! The test double: an engine of scripted tokens, delays, stalls and crashes. Never a default.

use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, raise};
use proto::TokenId;
use proto::generate::FinishReason;
use proto::to_dispatcher::{Logprobs, TopLogprob};

use super::identity::Identity;
use super::{
    Emission, Engine, EngineError, Limits, LoadError, LoadOptions, Loaded, Progress, Pulse,
    Rejected, Slot, SlotEnd, StepReport, Task, TextModel,
};
use crate::exit;

mod script;
mod text;

pub use script::{Crash, LoadOutcome, Script, ScriptError, TextShape};
pub use text::ScriptedText;

/// A prompt that has this text is answered with what follows it, up to the next special token.
const ECHO: &[u8] = b"repeat: ";

/// Stands for a special token where a prompt is read back as bytes; it is no byte of UTF-8.
const CUT: u8 = 0xff;

/// A context where none is asked for.
const CONTEXT_TOKENS: u32 = 4096;

/// Bytes per step and per token that it claims to read, for tests of the bus figures.
const WEIGHT_BYTES: u64 = 64 << 20;
const KV_BYTES_PER_TOKEN: u64 = 1024;

/// Emits, in each row, tokens that are a function of (prompt, index, seed) alone.
#[derive(Debug)]
pub struct ScriptedEngine {
    script: Script,
    slots: Vec<Place>,
    context_tokens: u32,
    steps: u64,
}

#[derive(Debug, Default)]
struct Place {
    row: Option<Row>,
    /// What the slot's sequence holds or held: the prefix cache.
    sequence: Vec<TokenId>,
}

#[derive(Debug)]
struct Row {
    /// Stands for prompt and seed.
    key: u64,
    /// Index of the next token.
    index: u32,
    /// Prompt tokens still to compute.
    prefill: u32,
    /// Tokens that are given before any other.
    echo: Option<Vec<TokenId>>,
    logprobs: Option<u32>,
    ignore_eos: bool,
    fails: bool,
    crashes: bool,
}

/// Plays the load of `script`, then gives the engine.
///
/// # Errors
///
/// Those that the script asks for.
pub fn load(
    options: &LoadOptions,
    script: Script,
    mut progress: Progress,
) -> Result<Loaded, LoadError> {
    const PARTS: u32 = 10;
    progress(0);
    if script.load_outcome == LoadOutcome::Stall {
        hang();
    }
    for part in 1..=PARTS {
        wait(script.load / PARTS);
        progress(part * 1000 / PARTS);
    }
    match script.load_outcome {
        LoadOutcome::Permanent => {
            return Err(LoadError::Permanent("the script fails the load".into()));
        }
        LoadOutcome::Transient => {
            return Err(LoadError::Transient(
                "the script fails the load for now".into(),
            ));
        }
        LoadOutcome::Loaded | LoadOutcome::Stall => {}
    }
    let mut identity = Identity::new();
    identity.part(b"scripted");
    identity.part(format!("{:?}", script.text).as_bytes());
    identity.part(&script.length.to_le_bytes());
    let name = options
        .name
        .clone()
        .unwrap_or_else(|| "scripted".to_string());
    Ok(Loaded {
        engine: Box::new(ScriptedEngine::new(
            script,
            options.slots,
            options.context_tokens,
        )),
        text: Arc::new(ScriptedText),
        identity: identity.finish(name),
    })
}

impl ScriptedEngine {
    /// An engine of `slots` slots (at least one) with `context_tokens` each (0: a default).
    #[must_use]
    pub fn new(script: Script, slots: u32, context_tokens: u32) -> Self {
        Self {
            script,
            slots: (0..slots.max(1)).map(|_| Place::default()).collect(),
            context_tokens: if context_tokens == 0 {
                CONTEXT_TOKENS
            } else {
                context_tokens
            },
            steps: 0,
        }
    }

    fn place(&mut self, slot: Slot) -> Option<&mut Place> {
        self.slots.get_mut(usize::try_from(slot.0).ok()?)
    }

    /// Ends the process, or this thread's part in it, in the script's way.
    fn crash(&self) -> Result<(), EngineError> {
        match self.script.crash {
            None => Ok(()),
            Some(Crash::Abort) => std::process::abort(),
            Some(Crash::Segv) => loop {
                // The first only takes the runtime's own handler away.
                let _ = raise(Signal::SIGSEGV);
            },
            Some(Crash::Exit(code)) => exit::now(code),
            #[expect(clippy::panic, reason = "the script asks for a panic")]
            Some(Crash::Panic) => panic!("the script asks for a panic"),
            Some(Crash::Poison) => Err(EngineError::Poisoned("the script says so".into())),
            Some(Crash::Hang) => hang(),
        }
    }

    /// Computes prompt tokens of the rows that wait for it; returns how many.
    fn prefill(&mut self) -> Result<u32, EngineError> {
        let mut budget = self.script.chunk;
        let mut ready = false;
        for row in self.slots.iter_mut().filter_map(|place| place.row.as_mut()) {
            let computed = row.prefill.min(budget);
            row.prefill -= computed;
            budget -= computed;
            ready |= computed > 0 && row.prefill == 0;
        }
        if ready && self.script.crash_after_prefill {
            self.crash()?;
        }
        Ok(self.script.chunk - budget)
    }

    /// Whether a fault strikes in this step.
    fn is_struck(&self) -> bool {
        let mut rows = self.slots.iter().filter_map(|place| place.row.as_ref());
        self.script.crash_at_step == Some(self.steps)
            || rows.any(|row| {
                row.crashes
                    || self
                        .script
                        .crash_at_token
                        .is_some_and(|at| (row.index..row.index + self.script.burst).contains(&at))
            })
    }
}

/// It computes on no device, but tells which one it was shown: that is what a test can see of it.
fn seen_device() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(seen) => format!("script on {seen}"),
        Err(_) => "script".to_owned(),
    }
}

impl Engine for ScriptedEngine {
    fn limits(&self) -> Limits {
        Limits {
            slots: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            context_tokens: self.context_tokens,
            vocabulary: ScriptedText.vocabulary(),
            weight_bytes_per_step: WEIGHT_BYTES,
            kv_bytes_per_token: KV_BYTES_PER_TOKEN,
            device: seen_device(),
        }
    }

    fn warm(&mut self, pulse: &Pulse) -> Result<(), EngineError> {
        if self.script.warm_stalls {
            hang();
        }
        for _ in 0..self.script.warm_steps {
            wait(self.script.warm_step);
            pulse.beat();
        }
        Ok(())
    }

    fn admit(&mut self, slot: Slot, prompt: &[TokenId], task: &Task) -> Result<u32, EngineError> {
        let context = usize::try_from(self.context_tokens).unwrap_or(usize::MAX);
        let emitted = usize::try_from(task.first_index).unwrap_or(usize::MAX);
        let Some(asked) = prompt.len().checked_sub(emitted).filter(|asked| *asked > 0) else {
            return Err(rejected("the prompt is empty"));
        };
        if prompt.len() >= context {
            return Err(rejected("the prompt fills the context"));
        }
        let asked = &prompt[..asked];
        let text = read_back(asked);
        let has = |marker: &Option<String>| {
            let marker = marker.as_deref().unwrap_or_default().as_bytes();
            !marker.is_empty() && text.windows(marker.len()).any(|part| part == marker)
        };
        if has(&self.script.reject) {
            return Err(rejected("the script refuses this prompt"));
        }
        let (fails, crashes) = (has(&self.script.fail_row), has(&self.script.crash_on));
        let seed = if task.sampling.temperature > 0.0 {
            task.sampling.seed
        } else {
            0
        };
        let Some(place) = self.place(slot).filter(|place| place.row.is_none()) else {
            return Err(EngineError::Poisoned(format!(
                "slot {} is not free",
                slot.0
            )));
        };
        let cached = if task.cache_prompt {
            common_prefix(&place.sequence, prompt)
        } else {
            0
        };
        place.sequence.clear();
        place.sequence.extend_from_slice(prompt);
        place.row = Some(Row {
            key: mix(asked.iter().fold(seed, |key, id| mix(key ^ u64::from(*id)))),
            index: task.first_index,
            prefill: u32::try_from(prompt.len() - cached).unwrap_or(u32::MAX),
            echo: echo(&text),
            logprobs: task.logprobs,
            ignore_eos: task.ignore_eos,
            fails,
            crashes,
        });
        Ok(u32::try_from(cached).unwrap_or(u32::MAX))
    }

    fn step(&mut self, pulse: &Pulse, out: &mut Vec<Emission>) -> Result<StepReport, EngineError> {
        self.steps += 1;
        if self.is_struck() {
            self.crash()?;
        }
        let prefill_tokens = self.prefill()?;
        wait(self.script.step + self.script.prefill_token * prefill_tokens);
        pulse.beat();
        let mut batch = 0;
        for (place, slot) in self.slots.iter_mut().zip(0..) {
            let Some(row) = place.row.as_mut().filter(|row| row.prefill == 0) else {
                continue;
            };
            batch += 1;
            let sequence = &mut place.sequence;
            let emission = emit(&self.script, Slot(slot), self.context_tokens, row, sequence);
            if emission.end.is_some() {
                place.row = None;
            }
            out.push(emission);
        }
        Ok(StepReport {
            batch,
            prefill_tokens,
        })
    }

    fn release(&mut self, slot: Slot) {
        if let Some(place) = self.place(slot)
            && let Some(row) = place.row.take()
        {
            // What was not computed yet is not in the cache.
            let left = usize::try_from(row.prefill).unwrap_or(usize::MAX);
            let computed = place.sequence.len().saturating_sub(left);
            place.sequence.truncate(computed);
        }
    }

    fn best_slot(&self, prompt: &[TokenId], free: &[Slot]) -> Option<Slot> {
        let cached = |slot: &Slot| {
            let at = usize::try_from(slot.0).ok()?;
            Some(common_prefix(&self.slots.get(at)?.sequence, prompt))
        };
        // The first of equals, so that an idle engine fills from slot 0.
        free.iter().rev().max_by_key(|slot| cached(slot)).copied()
    }
}

/// One row's share of a step.
fn emit(
    script: &Script,
    slot: Slot,
    context_tokens: u32,
    row: &mut Row,
    sequence: &mut Vec<TokenId>,
) -> Emission {
    let mut emission = Emission {
        slot,
        tokens: Vec::with_capacity(usize::try_from(script.burst).unwrap_or(1)),
        logprobs: Vec::new(),
        end: None,
    };
    if row.fails {
        let fault = Rejected::Row("the script fails this row".to_string());
        emission.end = Some(SlotEnd::Failed(fault));
        return emission;
    }
    for _ in 0..script.burst {
        let Some(token) = token_at(script, row) else {
            emission.end = Some(SlotEnd::Finished(FinishReason::Stop));
            break;
        };
        if let Some(alternatives) = row.logprobs {
            emission.logprobs.push(logprobs(token, alternatives));
        }
        emission.tokens.push(token);
        sequence.push(token);
        row.index += 1;
        if u32::try_from(sequence.len()).unwrap_or(u32::MAX) >= context_tokens {
            emission.end = Some(SlotEnd::Finished(FinishReason::Length));
            break;
        }
    }
    emission
}

/// The row's next token; `None`: the end token.
fn token_at(script: &Script, row: &Row) -> Option<TokenId> {
    if let Some(echo) = &row.echo {
        let at = usize::try_from(row.index).unwrap_or(usize::MAX);
        if let Some(token) = echo.get(at) {
            return Some(*token);
        }
        if !row.ignore_eos {
            return None;
        }
    }
    if script.length > 0 && row.index >= script.length && !row.ignore_eos {
        return None;
    }
    let drawn = |index: u32| mix(row.key ^ u64::from(index));
    Some(match script.text {
        TextShape::Words => {
            let (first, count) = text::WORD_TOKENS;
            first + below(drawn(row.index), count)
        }
        TextShape::Bytes => {
            // Four tokens a character, each character drawn by the index of its first.
            let character = char::from_u32(0x1_f600 + below(drawn(row.index / 4), 64));
            let mut bytes = [0; 4];
            character.unwrap_or('🦀').encode_utf8(&mut bytes);
            TokenId::from(bytes[usize::try_from(row.index % 4).unwrap_or(0)])
        }
        TextShape::Invalid => below(drawn(row.index), 256),
    })
}

fn logprobs(token: TokenId, alternatives: u32) -> Logprobs {
    let bytes = |id: TokenId| {
        let mut bytes = Vec::new();
        ScriptedText.piece(id, &mut bytes);
        bytes
    };
    let mut logprob = 0.0;
    let top = (0..alternatives).map(|rank| {
        logprob -= 0.5;
        let id = (token + rank) % ScriptedText.vocabulary();
        TopLogprob {
            id,
            bytes: bytes(id),
            logprob,
        }
    });
    Logprobs {
        top: top.collect(),
        chosen: -0.5,
        bytes: bytes(token),
    }
}

/// The tokens that an echo prompt asks for.
fn echo(text: &[u8]) -> Option<Vec<TokenId>> {
    let begin = memchr::memmem::rfind(text, ECHO)? + ECHO.len();
    let asked = &text[begin..];
    let asked = &asked[..memchr::memchr(CUT, asked).unwrap_or(asked.len())];
    Some(ScriptedText.tokenise(&String::from_utf8_lossy(asked), false))
}

/// The prompt's bytes, with [`CUT`] for each special token.
fn read_back(prompt: &[TokenId]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(prompt.len() * 4);
    for &id in prompt {
        if ScriptedText::is_special(id) {
            bytes.push(CUT);
        } else {
            ScriptedText.piece(id, &mut bytes);
        }
    }
    bytes
}

/// Tokens that need not be computed: at least the last of a prompt always is.
fn common_prefix(cached: &[TokenId], prompt: &[TokenId]) -> usize {
    let common = cached
        .iter()
        .zip(prompt)
        .take_while(|(a, b)| a == b)
        .count();
    common.min(prompt.len().saturating_sub(1))
}

/// The finaliser of SplitMix64: well-spread bits of `value`.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `drawn` brought to 0..`bound`.
fn below(drawn: u64, bound: u32) -> u32 {
    u32::try_from(drawn % u64::from(bound)).unwrap_or(0)
}

fn rejected(words: &str) -> EngineError {
    Rejected::Request(words.to_string()).into()
}

fn wait(duration: Duration) {
    if !duration.is_zero() {
        std::thread::sleep(duration);
    }
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}
