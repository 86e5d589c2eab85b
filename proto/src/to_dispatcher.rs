//! What a worker says to the dispatcher.

use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};
use crate::generate::FinishReason;
use crate::id::{Attempt, Generation, InstanceId, RequestId, TokenId};
use crate::span::Micros;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub enum ToDispatcher {
    /// The first words on the link.
    Hello(Hello),
    /// Weights are being read; `permille` of 1000 done. Moves the loading deadline.
    Loading { permille: u32 },
    /// Warm-up: `done` of `of` batch shapes ran; `of` is 0 where the engine cannot tell.
    Warming { done: u32, of: u32 },
    /// The engine is warm and takes work.
    Ready(Box<Ready>),
    /// Answer to `Tokenise`.
    Tokenised {
        request: RequestId,
        outcome: Result<Tokenised, PromptError>,
    },
    /// The attempt has a slot; its prefill begins.
    Started {
        request: RequestId,
        attempt: Attempt,
        cached_tokens: u32,
    },
    /// What one engine step produced, all rows together.
    Tokens(StepTokens),
    /// The attempt ended without (further) tokens, and it is not the process's fault.
    Failed {
        request: RequestId,
        attempt: Attempt,
        error: RequestError,
    },
    /// The engine thread's step counter.
    Progress(Progress),
    /// No slot is live after `Drain`; the process exits next.
    Drained,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Hello {
    pub protocol: u32,
    /// Version and commit of the worker's build, for people.
    pub build: String,
    pub instance: InstanceId,
    pub generation: Generation,
    pub pid: u32,
    /// The one-time token from the inherited pipe.
    pub token: [u8; 32],
}

/// The engine's facts, read after warm-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Ready {
    /// `llama`, `mlx` or `scripted`.
    pub engine: String,
    pub model: ModelIdentity,
    /// For people: `CPU (2 threads)`, `CUDA0: NVIDIA H200`, `Metal: Apple M4 Pro`.
    pub device: String,
    pub slots: u32,
    /// Context of each slot in tokens, prompt and output together.
    pub context_tokens: u32,
    /// Vocabulary size in tokens.
    pub vocabulary: u32,
    /// Bytes of the longest vocabulary entry: a prompt of more than context × this many bytes cannot fit.
    pub longest_token_bytes: u32,
    /// Bytes of weights that one step reads, whatever its batch.
    pub weight_bytes_per_step: u64,
    /// Bytes of KV cache that one token of context costs, and that a step reads per cached token.
    pub kv_bytes_per_token: u64,
    pub load: Micros,
    pub warm_up: Micros,
}

/// What a model is, without reading all of it: blake3 of header, tensor inventory, size and mtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
pub struct ModelIdentity {
    pub name: String,
    pub hash: [u8; 32],
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Tokenised {
    pub ids: Vec<TokenId>,
}

/// Why a prompt could not become token ids. The client's fault, but for `Busy` and `TimedOut`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
pub enum PromptError {
    /// The template refused the messages (its own `raise_exception`), with its words.
    Template(String),
    /// An id outside of the vocabulary.
    UnknownToken(TokenId),
    /// The prompt is empty after rendering.
    Empty,
    /// Rendering or tokenising took longer than its bound.
    TimedOut,
    /// The prompt thread's queue is full.
    Busy,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct StepTokens {
    /// The engine thread's step counter after this step.
    pub step: u64,
    /// How long the forward pass and the sampling took.
    pub duration: Micros,
    /// Live slots that decoded in this step, and prompt tokens that were prefilled beside them.
    pub batch: u32,
    pub prefill_tokens: u32,
    pub rows: Vec<Row>,
}

/// What one step gave one attempt: one or more tokens, or an end alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Row {
    pub request: RequestId,
    pub attempt: Attempt,
    /// Index in the stream of the first of `tokens`.
    pub first_index: u32,
    pub tokens: Vec<Token>,
    /// Text that the end released and no token of this row carries: what had been held back for a
    /// stop string that did not come, or for the rest of a character. Empty without an end.
    pub tail: String,
    /// The row's end travels with its last token.
    pub end: Option<End>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Token {
    pub id: TokenId,
    /// Text released by this token: whole characters only; empty while text is held back; may hold
    /// text that earlier tokens held back.
    pub text: String,
    /// Bytes released so far, this token's text included.
    pub released_bytes: u64,
    pub logprobs: Option<Logprobs>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Logprobs {
    /// Natural logarithm of the chosen token's probability, before temperature and truncation.
    pub chosen: f32,
    /// The token's own bytes, which may be part of a character.
    pub bytes: Vec<u8>,
    /// The likeliest tokens, best first.
    pub top: Vec<TopLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct TopLogprob {
    pub id: TokenId,
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub enum End {
    Finished(FinishReason),
    /// Asked for by `Cancel`.
    Cancelled,
    /// The engine gave this row up, and this row only.
    Failed(RequestError),
}

/// Why one request failed while the engine lives on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
pub enum RequestError {
    /// The engine refused it: the client's fault, with words for the client.
    Rejected(String),
    /// Not a number in this row's logits, or another fault of the engine in this row alone.
    Engine(String),
    /// No slot was free: the dispatcher assigned more than the worker has. Not the client's fault; try elsewhere.
    NoSlot,
    /// The worker is draining. Not the client's fault; try elsewhere.
    Draining,
}

/// Sent at least once per [`crate::PROGRESS_INTERVAL_MS`] by a thread that never waits for the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
pub struct Progress {
    /// Moved by the engine thread only: forward passes, prefill chunks, in-step callbacks, warm-up shapes.
    pub pulse: u64,
    /// Forward passes since start.
    pub steps: u64,
    /// Slots that hold a live sequence.
    pub live_slots: u32,
    /// The longest of the last 1,000 steps.
    pub longest_step: Micros,
}
