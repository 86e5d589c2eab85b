//! What the dispatcher says to a worker.

use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};
use crate::generate::Generate;
use crate::id::{Attempt, RequestId, TokenId};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub enum ToWorker {
    /// Answer to the worker's `Hello`: accepted.
    Hello { protocol: u32, build: String },
    /// Answer to the worker's `Hello`: not accepted, and why. The link closes after it.
    Refused { reason: String },
    /// Render and tokenise, without occupying a slot.
    Tokenise {
        request: RequestId,
        input: PromptInput,
    },
    /// Produce a stream.
    Generate(Box<Generate>),
    /// Stop producing this attempt and free its slot.
    Cancel {
        request: RequestId,
        attempt: Attempt,
    },
    /// Take no new `Generate`, finish what runs, say `Drained`, exit 0.
    Drain,
}

/// A prompt before it is token ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub enum PromptInput {
    /// Chat messages, rendered by the model's own template.
    Chat {
        messages: Vec<ChatMessage>,
        add_generation_prompt: bool,
    },
    /// Plain text; the model's leading special token is added where the model wants one.
    Text(String),
    /// Token ids as they are; checked against the vocabulary.
    Ids(Vec<TokenId>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Encode, Decode)]
pub struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    pub content: String,
    pub name: Option<String>,
}
