//! The engine: one loaded model that decodes several sequences a step. One thread owns it.

pub mod identity;
#[cfg(feature = "llama")]
pub mod llama;
#[cfg(feature = "mlx")]
pub mod mlx;
pub mod scripted;
pub mod select;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::TokenId;
use proto::generate::{FinishReason, Sampling};
use proto::to_dispatcher::{Logprobs, ModelIdentity};
use thiserror::Error;

/// A seat for one sequence in the engine's batch: 0..`Limits::slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// What an engine can do. Read after the load and again after warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Sequences that one step can decode. An engine that cannot batch has one.
    pub slots: u32,
    /// Tokens of one sequence, prompt and output together.
    pub context_tokens: u32,
    /// Vocabulary size in tokens.
    pub vocabulary: u32,
    /// Bytes of weights that one step reads, whatever its batch.
    pub weight_bytes_per_step: u64,
    /// Bytes of KV cache of one token in one sequence.
    pub kv_bytes_per_token: u64,
    /// Where it runs, for people.
    pub device: String,
}

/// The counter by which the engine shows that it lives. Only the engine's thread moves it.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<AtomicU64>);

impl Pulse {
    /// Something was achieved: a forward pass, a prefill chunk, a warm-up shape.
    pub fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    #[must_use]
    pub fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a sequence is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub sampling: Sampling,
    /// How many alternatives to report with each token; `None`: no logprobs.
    pub logprobs: Option<u32>,
    /// Of `prompt` (as given to `admit`), the last so many tokens are output of earlier attempts:
    /// penalties count them as output, and the next token's index is this number.
    pub first_index: u32,
    /// End tokens do not end the sequence.
    pub ignore_eos: bool,
    /// Step this row alone, with fixed prefill chunks.
    pub batch_invariant: bool,
    /// A prefix found in a slot's KV cache may be reused.
    pub cache_prompt: bool,
}

/// What one step gave one slot.
#[derive(Clone, Debug, PartialEq)]
pub struct Emission {
    pub slot: Slot,
    /// One or more tokens, oldest first; none where only the end is told. An end token is not among them.
    pub tokens: Vec<TokenId>,
    /// As long as `tokens`, or empty.
    pub logprobs: Vec<Logprobs>,
    pub end: Option<SlotEnd>,
}

/// Which way a slot ended; the others go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotEnd {
    /// An end token, or `Length` where the context is full.
    Finished(FinishReason),
    /// This row alone failed.
    Failed(Rejected),
}

/// One request's failure; the engine lives.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Rejected {
    /// The client's fault.
    #[error("{0}")]
    Request(String),
    /// A fault of the engine in this row (not a number among its logits, say).
    #[error("{0}")]
    Row(String),
}

/// Who dies.
#[derive(Debug, Error)]
pub enum EngineError {
    /// From `admit`: the request ends, the engine lives.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The process must end: never caught, never retried in place.
    #[error("the engine is poisoned: {0}")]
    Poisoned(String),
}

/// A loaded model and its runtime, owned by one thread and never shared.
pub trait Engine {
    fn limits(&self) -> Limits;

    /// Runs every batch shape that serving will use, beating `pulse` after each.
    fn warm(&mut self, pulse: &Pulse) -> Result<(), EngineError>;

    /// Seats a sequence: `prompt` holds the prompt's ids and after them `task.first_index` ids of
    /// earlier output. May reuse a cached prefix; returns how many tokens it need not compute.
    /// The slot must be free.
    fn admit(&mut self, slot: Slot, prompt: &[TokenId], task: &Task) -> Result<u32, EngineError>;

    /// One forward pass over all live slots and a bounded prefill chunk. Slots that ended are free
    /// afterwards. An `Err` is always `Poisoned`.
    fn step(&mut self, pulse: &Pulse, out: &mut Vec<Emission>) -> Result<StepReport, EngineError>;

    /// Frees a slot; its KV may be kept for prefix reuse. Harmless on a free slot.
    fn release(&mut self, slot: Slot);

    /// Which of the `free` slots this prompt is best seated in; an engine with a prefix cache names
    /// the one that would spare it the most work. `None` only where `free` is empty.
    fn best_slot(&self, prompt: &[TokenId], free: &[Slot]) -> Option<Slot> {
        let _ = prompt;
        free.first().copied()
    }
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Rows that decoded.
    pub batch: u32,
    /// Prompt tokens computed beside them.
    pub prefill_tokens: u32,
}

/// The model's text side: shared with the prompt thread and the session thread.
pub trait TextModel: Send + Sync {
    /// Text to ids. `add_special`: put the model's leading special token where it wants one.
    /// Special tokens spelt out in the text are recognised (chat templates spell them out).
    fn tokenise(&self, text: &str, add_special: bool) -> Vec<TokenId>;
    /// The bytes of one token, which may be part of a character. Special tokens have none.
    fn piece(&self, token: TokenId, into: &mut Vec<u8>);
    fn is_end(&self, token: TokenId) -> bool;
    fn vocabulary(&self) -> u32;
    /// Bytes of the longest entry.
    fn longest_token_bytes(&self) -> u32;
    /// The chat template's source (Jinja), and the special tokens it may name.
    fn chat_template(&self) -> Option<ChatTemplateSource>;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplateSource {
    pub source: String,
    pub bos_token: String,
    pub eos_token: String,
}

/// What to load, and for how many at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// A file or a folder, as the engine wants it.
    pub model: PathBuf,
    /// The name under which the model is served; `None`: the file's or folder's own.
    pub name: Option<String>,
    /// Sequences that one step decodes.
    pub slots: u32,
    /// Tokens of one sequence, prompt and output together; 0: what the model was trained on.
    pub context_tokens: u32,
    /// Compute threads of a CPU engine.
    pub threads: u32,
    /// Layers to put on a GPU; `None`: all where there is one.
    pub gpu_layers: Option<u32>,
}

/// What a load gives: the engine for the thread that loaded it, the text side for every thread.
pub struct Loaded {
    pub engine: Box<dyn Engine>,
    pub text: Arc<dyn TextModel>,
    pub identity: ModelIdentity,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded")
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

/// Called while loading with the parts of 1000 that are done; it never falls.
pub type Progress = Box<dyn FnMut(u32)>;

/// Why a load failed, and whether another attempt may fare better.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LoadError {
    /// The file, its format or the options: the same again would fail the same way (exit 78).
    #[error("{0}")]
    Permanent(String),
    /// Memory or a device was short: later it may succeed.
    #[error("{0}")]
    Transient(String),
}
