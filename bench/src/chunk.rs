//! What the data of one event of a completion stream means.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The server's own account of one request, all in milliseconds. A foreign server gives none, or other members.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerTimings {
    pub queue_ms: Option<f64>,
    pub prefill_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub decode_ms: Option<f64>,
    pub total_ms: Option<f64>,
    pub instance: Option<u32>,
    pub attempts: Option<u32>,
    pub batch_mean: Option<f64>,
    pub cached_tokens: Option<u64>,
}

/// Tokens as the server counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptTokensDetails {
    pub cached_tokens: u64,
}

/// One event, understood.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Text of the answer, reasoning included: a hidden token costs as much as a shown one.
    pub text: String,
    pub finish_reason: Option<String>,
    pub usage: Option<Usage>,
    pub timings: Option<ServerTimings>,
    /// The server reports a failure in the stream.
    pub error: Option<String>,
}

#[derive(Debug, Error)]
#[error("understand an event: {0}")]
pub struct ChunkError(#[from] serde_json::Error);

#[derive(Deserialize)]
struct Wire {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    timings: Option<ServerTimings>,
    #[serde(default)]
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Option<Delta>,
    #[serde(default)]
    message: Option<Delta>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
}

impl Chunk {
    /// Reads the data of one event, or the body of an answer that was not streamed.
    ///
    /// # Errors
    /// It is no JSON of this shape.
    pub fn parse(data: &str) -> Result<Self, ChunkError> {
        let wire: Wire = serde_json::from_str(data)?;
        let mut chunk = Self {
            usage: wire.usage,
            timings: wire.timings,
            error: wire.error.as_ref().map(error_text),
            ..Self::default()
        };
        for choice in wire.choices {
            for delta in [choice.delta, choice.message].into_iter().flatten() {
                // Some servers give the same reasoning under both names.
                let hidden = delta.reasoning_content.or(delta.reasoning);
                chunk.text.extend(hidden);
                chunk.text.extend(delta.content);
            }
            chunk.text.extend(choice.text);
            chunk.finish_reason = choice.finish_reason.or(chunk.finish_reason);
        }
        Ok(chunk)
    }
}

/// A server's error object in few words: its code, or its type, and its message.
#[must_use]
pub fn error_text(error: &serde_json::Value) -> String {
    let field = |name: &str| {
        error.get(name).and_then(|value| match value {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Null => None,
            other => Some(other.to_string()),
        })
    };
    match (field("code").or_else(|| field("type")), field("message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(text), None) | (None, Some(text)) => text,
        (None, None) => match error {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_of_our_server_is_understood() {
        let chunk = Chunk::parse(
            r#"{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" é"},"finish_reason":"length"}],"timings":{"queue_ms":1.5,"ttft_ms":9,"instance":2,"attempts":2,"cached_tokens":7}}"#,
        )
        .unwrap();
        assert_eq!(chunk.text, " é");
        assert_eq!(chunk.finish_reason.as_deref(), Some("length"));
        let timings = chunk.timings.unwrap();
        assert_eq!(
            (timings.attempts, timings.queue_ms, timings.instance),
            (Some(2), Some(1.5), Some(2))
        );
    }

    #[test]
    fn usage_reasoning_and_errors_are_found() {
        let usage = Chunk::parse(
            r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":2}}}"#,
        )
        .unwrap();
        assert_eq!(usage.usage.unwrap().completion_tokens, 9);
        let hidden = Chunk::parse(
            r#"{"choices":[{"delta":{"reasoning_content":"hm","reasoning":"hm","content":null}}]}"#,
        )
        .unwrap();
        assert_eq!(hidden.text, "hm");
        let failed = Chunk::parse(
            r#"{"error":{"message":"gone","type":"server_error","code":"worker_oom"}}"#,
        )
        .unwrap();
        assert_eq!(failed.error.as_deref(), Some("worker_oom: gone"));
        assert!(Chunk::parse("{").is_err());
    }

    #[test]
    fn a_foreign_servers_timings_do_not_matter() {
        let chunk = Chunk::parse(
            r#"{"choices":[{"text":"a","index":0,"finish_reason":null}],"timings":{"prompt_n":4,"predicted_ms":3.5}}"#,
        )
        .unwrap();
        assert_eq!(chunk.text, "a");
        assert_eq!(chunk.timings, Some(ServerTimings::default()));
    }
}
