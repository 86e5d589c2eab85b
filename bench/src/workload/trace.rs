//! Requests as somebody recorded them: a file with one JSON object a line.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Shape, Workload, word_salad};
use crate::error::BenchError;
use crate::random::Random;

/// When one request is to be sent, and how long its answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Since the first request of the trace.
    pub at_us: u64,
    /// `None`: as the shape says.
    pub max_tokens: Option<u32>,
}

/// A line: the moment, and either the prompt or its length.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Milliseconds since any moment, the same for all lines.
    at_ms: f64,
    prompt: Option<String>,
    prompt_tokens: Option<u32>,
    max_tokens: Option<u32>,
}

/// A prompt longer than this is refused: it is a mistake in the file.
const PROMPT_TOKENS_MAX: u32 = 1_000_000;

impl Workload {
    /// Reads a trace. A line that has no prompt of its own gets one of its length, drawn from `seed`.
    ///
    /// # Errors
    /// The file cannot be read, or a line is none of a trace; the line's number is told.
    pub fn trace(path: &Path, shape: Shape, seed: u64) -> Result<Self, BenchError> {
        let text = std::fs::read_to_string(path).map_err(|source| BenchError::File {
            path: path.to_owned(),
            source,
        })?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::trace_of(&name, &text, shape, seed)
            .map_err(|reason| BenchError::Usage(format!("{}: {reason}", path.display())))
    }

    fn trace_of(name: &str, text: &str, shape: Shape, seed: u64) -> Result<Self, String> {
        let mut random = Random::new(seed, "trace");
        let mut requests: Vec<(f64, String, Option<u32>)> = Vec::new();
        let lines = text.lines().enumerate();
        for (number, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let bad = |reason: String| format!("line {}: {reason}", number + 1);
            let line: Line = serde_json::from_str(line).map_err(|error| bad(error.to_string()))?;
            if !line.at_ms.is_finite() || line.at_ms < 0.0 {
                return Err(bad("at_ms is no moment".into()));
            }
            let prompt = match (line.prompt, line.prompt_tokens) {
                (Some(prompt), None) => prompt,
                (None, Some(tokens)) if (1..=PROMPT_TOKENS_MAX).contains(&tokens) => {
                    let words = word_salad(u64::from(tokens), &mut random);
                    format!("Note {number}: {words}")
                }
                (None, Some(_)) => return Err(bad("prompt_tokens is out of range".into())),
                _ => return Err(bad("give either prompt or prompt_tokens".into())),
            };
            requests.push((line.at_ms, prompt, line.max_tokens));
        }
        if requests.is_empty() {
            return Err("it holds no request".into());
        }
        requests.sort_by(|a, b| a.0.total_cmp(&b.0));
        let first_ms = requests[0].0;
        let trace = requests.iter().map(|(at_ms, _, max_tokens)| Entry {
            at_us: crate::clock::micros_of_ms(at_ms - first_ms),
            max_tokens: *max_tokens,
        });
        Ok(Self {
            name: format!("trace-{name}"),
            trace: trace.collect(),
            warm_up: Self::random(8, (16, 64), shape.clone(), seed).warm_up,
            prompts: requests.into_iter().map(|(_, prompt, _)| prompt).collect(),
            shape,
            seed,
        })
    }

    /// Starts of the first `count` requests of the trace, `speed` times as fast as recorded. It goes round
    /// where it is shorter, with the mean gap between the rounds.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a trace is far shorter than 2^52 microseconds"
    )]
    pub fn starts_us(&self, count: usize, speed: f64) -> Vec<u64> {
        let Some(last) = self.trace.last() else {
            return Vec::new();
        };
        let length = self.trace.len();
        let gap_us = if length > 1 {
            last.at_us / (length as u64 - 1)
        } else {
            1_000_000
        };
        let round_us = last.at_us + gap_us;
        let starts = (0..count).map(|number| {
            let at_us = self.trace[number % length].at_us + (number / length) as u64 * round_us;
            (at_us as f64 / speed) as u64
        });
        starts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &str) -> Result<Workload, String> {
        Workload::trace_of("day", text, Shape::study(), 1)
    }

    #[test]
    fn a_trace_keeps_its_moments_prompts_and_lengths_and_goes_round() {
        let workload = trace(
            "{\"at_ms\": 1500.5, \"prompt_tokens\": 7, \"max_tokens\": 9}\n\n{\"at_ms\": 500.5, \"prompt\": \"Hello\"}\n",
        )
        .unwrap();
        assert_eq!(workload.prompts[0], "Hello");
        assert_eq!(workload.prompts[1].split(' ').count(), 2 + 7);
        assert_eq!((workload.max_tokens(0), workload.max_tokens(1)), (256, 9));
        assert_eq!(
            workload.starts_us(4, 1.0),
            [0, 1_000_000, 2_000_000, 3_000_000]
        );
        assert_eq!(workload.starts_us(2, 4.0), [0, 250_000]);
        assert_eq!(workload.max_tokens(3), 9);
        assert_ne!(
            workload.hash(),
            trace("{\"at_ms\":0,\"prompt\":\"Hello\"}").unwrap().hash()
        );
    }

    #[test]
    fn a_line_that_is_none_of_a_trace_is_named() {
        let error = |text: &str| trace(text).unwrap_err();
        assert!(error("{\"at_ms\": 1, \"prompt\": \"x\"}\n{").contains("line 2"));
        assert!(error("{\"at_ms\": 1}").contains("either"));
        assert!(error("{\"at_ms\": -1, \"prompt\": \"x\"}").contains("moment"));
        assert!(error("{\"at_ms\": 1, \"prompt_tokens\": 0}").contains("range"));
        assert!(error("{\"at_ms\": 1, \"prompt\": \"x\", \"when\": 2}").contains("when"));
        assert!(error("\n").contains("no request"));
    }
}
