//! One request for tokens: the prompt, how to sample, when to stop.

use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};
use crate::id::{Attempt, RequestId, TokenId};

/// Everything a worker needs to produce, or to go on producing, one stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Generate {
    pub request: RequestId,
    pub attempt: Attempt,
    /// The prompt as token ids, special tokens included.
    pub prompt: Vec<TokenId>,
    /// Tokens of this stream that were accepted in earlier attempts. They are prefilled after the
    /// prompt, and stop-string, UTF-8, penalty and grammar state is rebuilt from them. The first
    /// token to be produced has the index `emitted.len()`.
    pub emitted: Vec<TokenId>,
    /// How many bytes of the emitted tokens' text have been handed on; the rest was held back
    /// (a half character, or a possible stop string) and is still owed.
    pub released_bytes: u64,
    /// Bound on tokens of the whole stream, those in `emitted` included.
    pub max_tokens: u32,
    pub sampling: Sampling,
    /// Strings that end the stream when they appear in its text; never sent, in whole or in part.
    pub stop: Vec<String>,
    /// Token ids that end the stream, beside the model's own end tokens.
    pub stop_ids: Vec<TokenId>,
    /// Do not end at the model's end token.
    pub ignore_eos: bool,
    /// How many alternatives to report a token with; `None`: no logprobs at all.
    pub logprobs: Option<u32>,
    /// Step this request's rows alone, with fixed prefill chunks, so that its text does not depend
    /// on its batch-mates.
    pub batch_invariant: bool,
    /// A prefix of an earlier prompt may be reused from a slot's KV cache.
    pub cache_prompt: bool,
}

/// How the next token is chosen. Randomness is a function of (seed, token index) alone, so that a
/// stream resumed elsewhere draws the same numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from logits of tokens seen in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the named tokens' logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// Why a stream ended as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
pub enum FinishReason {
    /// The model's end token, a stop id or a stop string.
    Stop,
    /// `max_tokens`, or the context was full.
    Length,
}

impl FinishReason {
    /// The word of the OpenAI API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// True token counts of a finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens that were found in a slot's KV cache and not computed again.
    pub cached_tokens: u32,
}
