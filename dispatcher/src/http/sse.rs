//! Batches of tokens to the bytes of server-sent events, without I/O.
//!
//! One event a token with text, many events a write. What is the same in every event of a request is
//! rendered once.

use std::sync::Arc;

use proto::{FinishReason, TokenId};
use serde_json::json;

use super::error::ApiError;
use super::logprobs::Pending;
use super::timings::{Timings, UsageBody};
use super::validate::Route;
use crate::relay::Batch;

/// Keeps a connection alive that has nothing to say; clients skip it.
pub(crate) const KEEPALIVE: &[u8] = b": keepalive\n\n";

const DONE: &[u8] = b"data: [DONE]\n\n";

/// What an answer is called in all of its parts.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// What a client wants beside the text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extras {
    pub(crate) usage: bool,
    /// The ids of prompt and output.
    pub(crate) token_ids: bool,
}

/// Renders one request's stream.
#[derive(Debug)]
pub(crate) struct Renderer {
    route: Route,
    extras: Extras,
    /// The prompt's ids, until the first chunk has said them.
    prompt: Option<Arc<[TokenId]>>,
    /// `data: {"id":…,"model":…,"choices":[`
    head: Vec<u8>,
    /// `head` and what leads up to a token's text.
    prefix: Vec<u8>,
    /// What follows a token's text in an event without log probabilities.
    suffix: Vec<u8>,
    pending: Pending,
    /// Characters of text so far; counted only where log probabilities are asked for.
    characters: usize,
}

impl Renderer {
    #[must_use]
    pub(crate) fn new(route: Route, identity: &Identity, extras: Extras) -> Self {
        let object = match route {
            Route::Chat => "chat.completion.chunk",
            Route::Completions => "text_completion",
        };
        let mut head = br#"data: {"id":""#.to_vec();
        escape(&identity.id, &mut head);
        head.extend_from_slice(br#"","object":""#);
        head.extend_from_slice(object.as_bytes());
        head.extend_from_slice(br#"","created":"#);
        head.extend_from_slice(itoa::Buffer::new().format(identity.created).as_bytes());
        head.extend_from_slice(br#","model":""#);
        escape(&identity.model, &mut head);
        head.extend_from_slice(br#"","choices":["#);
        let mut prefix = head.clone();
        prefix.extend_from_slice(match route {
            Route::Chat => br#"{"index":0,"delta":{"content":""#.as_slice(),
            Route::Completions => br#"{"index":0,"text":""#.as_slice(),
        });
        let mut renderer = Self {
            route,
            extras,
            prompt: None,
            head,
            prefix,
            suffix: Vec::new(),
            pending: Pending::default(),
            characters: 0,
        };
        let mut suffix = Vec::new();
        renderer.after_text(&[], &mut suffix);
        renderer.suffix = suffix;
        renderer
    }

    /// The first event of a chat stream, which names the role. The other route has none. `prompt`,
    /// where it is there, goes with the first chunk of either.
    pub(crate) fn begin(&mut self, prompt: Option<Arc<[TokenId]>>, out: &mut Vec<u8>) {
        self.prompt = prompt;
        if self.route == Route::Chat {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(
                br#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]"#,
            );
            self.close(out);
        }
    }

    /// Renders pieces of `batch` from `piece` on until all are done or `out` holds `bytes_max` bytes
    /// or more. Returns the next piece to render. Takes the log probabilities out of the batch.
    pub(crate) fn pieces(
        &mut self,
        batch: &mut Batch,
        mut piece: usize,
        bytes_max: usize,
        out: &mut Vec<u8>,
    ) -> usize {
        let mut start = match piece.checked_sub(1) {
            Some(before) => batch.pieces[before].text_end,
            None => 0,
        };
        while out.len() < bytes_max
            && let Some(one) = batch.pieces.get_mut(piece)
        {
            let text = &batch.text[start..one.text_end];
            start = one.text_end;
            piece += 1;
            if let Some(logprobs) = one.logprobs.take() {
                self.pending.push(logprobs, self.characters);
                self.characters += text.chars().count();
            }
            // A piece without text is held back: what it was said to be comes with the next one,
            // but for its id.
            if text.is_empty() && !self.extras.token_ids {
                continue;
            }
            out.extend_from_slice(&self.prefix);
            escape(text, out);
            if self.extras.token_ids {
                let ids = if one.repeated { &[][..] } else { &[one.id] };
                self.after_text(ids, out);
            } else if self.pending.is_empty() {
                out.extend_from_slice(&self.suffix);
            } else {
                self.after_text(&[], out);
            }
        }
        piece
    }

    /// The last chunk with a choice, the usage chunk where it was asked for, and `[DONE]`.
    pub(crate) fn finish(
        &mut self,
        reason: FinishReason,
        timings: &Timings,
        usage: &UsageBody,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(&self.head);
        out.extend_from_slice(match self.route {
            Route::Chat => br#"{"index":0,"delta":{},"logprobs":"#.as_slice(),
            Route::Completions => br#"{"index":0,"text":"","logprobs":"#.as_slice(),
        });
        self.logprobs(out);
        out.extend_from_slice(br#","finish_reason":""#);
        out.extend_from_slice(reason.as_str().as_bytes());
        out.push(b'"');
        self.end_choice(&[], out);
        self.say_prompt(out);
        if self.extras.usage {
            out.extend_from_slice(br#","usage":null"#);
        }
        out.extend_from_slice(br#","timings":"#);
        out.extend_from_slice(json!(timings).to_string().as_bytes());
        out.extend_from_slice(b"}\n\n");
        if self.extras.usage {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(br#"],"usage":"#);
            out.extend_from_slice(json!(usage).to_string().as_bytes());
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(DONE);
    }

    fn after_text(&mut self, ids: &[TokenId], out: &mut Vec<u8>) {
        out.extend_from_slice(match self.route {
            Route::Chat => br#""},"logprobs":"#.as_slice(),
            Route::Completions => br#"","logprobs":"#.as_slice(),
        });
        self.logprobs(out);
        out.extend_from_slice(br#","finish_reason":null"#);
        self.end_choice(ids, out);
        self.close(out);
    }

    /// Ends the choice, and the list of them.
    fn end_choice(&self, ids: &[TokenId], out: &mut Vec<u8>) {
        if self.extras.token_ids {
            numbers(br#","token_ids":["#, ids, out);
            if let (Route::Completions, Some(prompt)) = (self.route, &self.prompt) {
                numbers(br#","prompt_token_ids":["#, prompt, out);
            }
        }
        out.extend_from_slice(b"}]");
    }

    fn say_prompt(&mut self, out: &mut Vec<u8>) {
        if let Some(prompt) = self.prompt.take() {
            numbers(br#","prompt_token_ids":["#, &prompt, out);
        }
    }

    fn logprobs(&mut self, out: &mut Vec<u8>) {
        if self.pending.is_empty() {
            out.extend_from_slice(b"null");
            return;
        }
        let value = match self.route {
            Route::Chat => self.pending.take_chat(),
            Route::Completions => self.pending.take_completions(),
        };
        out.extend_from_slice(value.to_string().as_bytes());
    }

    /// Ends an event after its choices.
    fn close(&mut self, out: &mut Vec<u8>) {
        self.say_prompt(out);
        out.extend_from_slice(if self.extras.usage {
            b",\"usage\":null}\n\n".as_slice()
        } else {
            b"}\n\n".as_slice()
        });
    }
}

/// The one event of a stream that failed: it ends after it, without a finish reason and without `[DONE]`.
pub(crate) fn error(error: &ApiError, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(error.body().to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

/// Appends `lead` and then `ids` as the rest of a JSON array.
fn numbers(lead: &[u8], ids: &[TokenId], out: &mut Vec<u8>) {
    out.extend_from_slice(lead);
    let mut buffer = itoa::Buffer::new();
    for (index, id) in ids.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(buffer.format(*id).as_bytes());
    }
    out.push(b']');
}

/// Appends `text` as the inside of a JSON string.
fn escape(text: &str, out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let bytes = text.as_bytes();
    let mut plain = 0;
    for (index, &byte) in bytes.iter().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[plain..index]);
        plain = index + 1;
        let short = match byte {
            b'"' | b'\\' => byte,
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            0x08 => b'b',
            0x0c => b'f',
            _ => {
                let (high, low) = (usize::from(byte >> 4), usize::from(byte & 15));
                out.extend_from_slice(&[b'\\', b'u', b'0', b'0', HEX[high], HEX[low]]);
                continue;
            }
        };
        out.extend_from_slice(&[b'\\', short]);
    }
    out.extend_from_slice(&bytes[plain..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Tick;
    use crate::relay::{Piece, Timeline};
    use proptest::prelude::*;
    use proto::to_dispatcher::{Logprobs, TopLogprob};

    fn identity() -> Identity {
        Identity {
            id: "chatcmpl-1".into(),
            created: 1_700_000_000,
            model: "tiny \"q\"".into(),
        }
    }

    fn batch(texts: &[&str]) -> Batch {
        let mut batch = Batch::default();
        for text in texts {
            batch.text.push_str(text);
            batch.pieces.push(Piece {
                id: 7,
                text_end: batch.text.len(),
                logprobs: None,
                repeated: false,
            });
        }
        batch
    }

    fn end() -> (Timings, UsageBody) {
        let timeline = Timeline {
            prompt_tokens: 3,
            completion_tokens: 2,
            ..Timeline::default()
        };
        (
            Timings::new(&timeline, Tick::from_micros(1500)),
            UsageBody::new(&timeline),
        )
    }

    #[test]
    fn a_whole_stream_of_each_route_reads_as_its_snapshot() {
        let mut out = Vec::new();
        for (route, usage) in [(Route::Chat, true), (Route::Completions, false)] {
            let extras = Extras {
                usage,
                ..Extras::default()
            };
            let mut renderer = Renderer::new(route, &identity(), extras);
            renderer.begin(None, &mut out);
            let mut tokens = batch(&["Hel", "", "lo 🦀\n"]);
            let next = renderer.pieces(&mut tokens, 0, usize::MAX, &mut out);
            assert_eq!(next, 3);
            let (timings, usage) = end();
            renderer.finish(FinishReason::Stop, &timings, &usage, &mut out);
        }
        error(&ApiError::invalid("x", "why \"so\""), &mut out);
        insta::assert_snapshot!(String::from_utf8(out).unwrap());
    }

    #[test]
    fn ids_are_said_for_every_token_once_and_the_prompts_with_the_first_chunk() {
        for route in [Route::Chat, Route::Completions] {
            let extras = Extras {
                usage: false,
                token_ids: true,
            };
            let mut renderer = Renderer::new(route, &identity(), extras);
            let mut out = Vec::new();
            renderer.begin(Some([5, 6].as_slice().into()), &mut out);
            let mut tokens = batch(&["a", "", "bc", "d"]);
            for (piece, id) in tokens.pieces.iter_mut().zip([10, 11, 12, 12]) {
                piece.id = id;
            }
            tokens.pieces[3].repeated = true;
            renderer.pieces(&mut tokens, 0, usize::MAX, &mut out);
            let (timings, usage) = end();
            renderer.finish(FinishReason::Stop, &timings, &usage, &mut out);
            let out = String::from_utf8(out).unwrap();
            let chunks: Vec<serde_json::Value> = out
                .split_terminator("\n\n")
                .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
                .collect();
            let said: Vec<_> = chunks
                .iter()
                .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array())
                .flatten()
                .collect();
            assert_eq!(said, [10, 11, 12], "{out}");
            assert_eq!(chunks[0]["prompt_token_ids"], json!([5, 6]), "{out}");
            let times = out.matches("prompt_token_ids").count();
            assert_eq!(times, if route == Route::Chat { 1 } else { 2 }, "{out}");
        }
    }

    #[test]
    fn log_probabilities_of_held_back_tokens_come_with_the_next_text() {
        let mut out = Vec::new();
        for route in [Route::Chat, Route::Completions] {
            let mut renderer = Renderer::new(route, &identity(), Extras::default());
            let mut tokens = batch(&["", "né", ""]);
            for (piece, bytes) in tokens
                .pieces
                .iter_mut()
                .zip([&b"n"[..], &b"\xc3"[..], b"!"])
            {
                piece.logprobs = Some(Logprobs {
                    chosen: -0.5,
                    bytes: bytes.to_vec(),
                    top: vec![TopLogprob {
                        id: 1,
                        bytes: b"x".to_vec(),
                        logprob: f32::NEG_INFINITY,
                    }],
                });
            }
            renderer.pieces(&mut tokens, 0, usize::MAX, &mut out);
            let (timings, usage) = end();
            renderer.finish(FinishReason::Length, &timings, &usage, &mut out);
        }
        insta::assert_snapshot!(String::from_utf8(out).unwrap());
    }

    #[test]
    fn rendering_in_small_steps_gives_the_same_bytes() {
        let texts: Vec<String> = (0..100).map(|index| format!(" {index}\n")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut whole = Vec::new();
        let mut renderer = Renderer::new(Route::Chat, &identity(), Extras::default());
        renderer.pieces(&mut batch(&texts), 0, usize::MAX, &mut whole);
        let mut steps = Vec::new();
        let mut tokens = batch(&texts);
        let mut piece = 0;
        while piece < texts.len() {
            let mut step = Vec::new();
            piece = renderer.pieces(&mut tokens, piece, 300, &mut step);
            steps.extend_from_slice(&step);
        }
        assert!(whole == steps);
    }

    #[test]
    fn two_million_events_a_second_are_rendered_on_one_core() {
        let texts: Vec<String> = (0..64).map(|index| format!(" word{index}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut tokens = batch(&texts);
        let mut renderer = Renderer::new(Route::Chat, &identity(), Extras::default());
        let mut out = Vec::with_capacity(1 << 16);
        // The best of several rounds: a shared machine's other work is not what is measured.
        let per_second = (0..20)
            .map(|_| {
                let start = std::time::Instant::now();
                for _ in 0..500 {
                    out.clear();
                    renderer.pieces(&mut tokens, 0, usize::MAX, &mut out);
                    std::hint::black_box(&out);
                }
                (500.0 * texts.len() as f64) / start.elapsed().as_secs_f64()
            })
            .fold(0.0, f64::max);
        eprintln!("sse: {:.1} M events/s", per_second / 1e6);
        // A debug build is not what is promised.
        if !cfg!(debug_assertions) {
            assert!(per_second >= 2e6, "{per_second:.0} events/s");
        }
    }

    proptest! {
        #[test]
        fn escaped_text_is_read_back_as_it_was(text in any::<String>()) {
            let mut out = b"\"".to_vec();
            escape(&text, &mut out);
            out.push(b'"');
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }
    }
}
