//! Log probabilities of tokens in the two forms of the OpenAI API.

use proto::to_dispatcher::Logprobs;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// JSON has no infinity; this is what the OpenAI API says instead.
const IMPOSSIBLE: f32 = -9999.0;

/// Tokens whose log probabilities have not been sent yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending {
    tokens: Vec<(Logprobs, usize)>,
}

impl Pending {
    /// `text_offset`: characters of text before this token.
    pub(crate) fn push(&mut self, logprobs: Logprobs, text_offset: usize) {
        self.tokens.push((logprobs, text_offset));
    }

    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The chat route's `logprobs` object. Empties this.
    pub(crate) fn take_chat(&mut self) -> Value {
        let content: Vec<Value> = self
            .tokens
            .drain(..)
            .map(|(token, _)| {
                let top: Vec<Value> = token
                    .top
                    .iter()
                    .map(|other| {
                        json!({
                            "token": String::from_utf8_lossy(&other.bytes),
                            "logprob": finite(other.logprob),
                            "bytes": other.bytes,
                        })
                    })
                    .collect();
                json!({
                    "token": String::from_utf8_lossy(&token.bytes),
                    "logprob": finite(token.chosen),
                    "bytes": token.bytes,
                    "top_logprobs": top,
                })
            })
            .collect();
        json!({ "content": content, "refusal": null })
    }

    /// The completions route's `logprobs` object. Empties this.
    pub(crate) fn take_completions(&mut self) -> Value {
        let mut columns = Columns::default();
        for (token, text_offset) in self.tokens.drain(..) {
            columns
                .tokens
                .push(String::from_utf8_lossy(&token.bytes).into_owned());
            columns.token_logprobs.push(finite(token.chosen));
            columns.top_logprobs.push(
                token
                    .top
                    .iter()
                    .map(|other| {
                        (
                            String::from_utf8_lossy(&other.bytes).into_owned(),
                            json!(finite(other.logprob)),
                        )
                    })
                    .collect(),
            );
            columns.text_offset.push(text_offset);
        }
        json!(columns)
    }
}

#[derive(Debug, Default, Serialize)]
struct Columns {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Map<String, Value>>,
    text_offset: Vec<usize>,
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        IMPOSSIBLE
    }
}
