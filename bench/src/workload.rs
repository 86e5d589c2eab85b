//! What is asked: prompts, output lengths, sampling.

mod prompts;
mod trace;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::client::Ask;
use crate::random::Random;

pub use prompts::{STUDY_PROMPTS, WARM_UP_PROMPTS};
pub use trace::Entry;

/// How long answers may be, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OutputLength {
    Fixed {
        tokens: u32,
    },
    /// Uniform, both ends included, drawn once per request from the seed.
    Uniform {
        low: u32,
        high: u32,
    },
}

/// Everything in a request but its prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// `None`: the server's own.
    pub model: Option<String>,
    pub output: OutputLength,
    pub temperature: f64,
    /// Sent as `seed`, where given.
    pub sampling_seed: Option<u64>,
    /// Answers always have their full length.
    pub ignore_eos: bool,
    /// Further members of the body, for a foreign server's sake.
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl Shape {
    /// The study's: greedy, 256 tokens.
    #[must_use]
    pub fn study() -> Self {
        Self {
            model: None,
            output: OutputLength::Fixed { tokens: 256 },
            temperature: 0.0,
            sampling_seed: None,
            ignore_eos: false,
            extra: serde_json::Map::new(),
        }
    }
}

/// A set of prompts and the shape that they are sent in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    pub name: String,
    pub prompts: Vec<String>,
    /// None of them is among `prompts`: a warm-up must not fill the cache for what is measured.
    pub warm_up: Vec<String>,
    pub shape: Shape,
    /// Draws output lengths.
    pub seed: u64,
    /// Of a trace: when each request is to be sent, microseconds since the first, and its own bound.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trace: Vec<Entry>,
}

impl Workload {
    /// The study's kind of set: 5 short, 5 medium and 2 long prompts, in this project's own wording. Frozen.
    #[must_use]
    pub fn study() -> Self {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
        Self {
            name: "study-12".into(),
            prompts: owned(&STUDY_PROMPTS),
            warm_up: owned(&WARM_UP_PROMPTS),
            shape: Shape::study(),
            seed: 0,
            trace: Vec::new(),
        }
    }

    /// Prompts of about `tokens` tokens each, made of common short words, all different from the first word on,
    /// so that no cache helps.
    #[must_use]
    pub fn random(count: usize, tokens: (u32, u32), shape: Shape, seed: u64) -> Self {
        let mut random = Random::new(seed, "prompt");
        let mut some = |label: &str, count: usize| -> Vec<String> {
            (0..count)
                .map(|index| {
                    let words = random.within(u64::from(tokens.0), u64::from(tokens.1));
                    // The number parts two prompts that chance made equal.
                    format!("{label} {index}: {}", word_salad(words, &mut random))
                })
                .collect()
        };
        Self {
            name: format!("random-{}-{}", tokens.0, tokens.1),
            prompts: some("Note", count),
            warm_up: some("Draft", count.min(32)),
            shape,
            seed,
            trace: Vec::new(),
        }
    }

    /// Prompts that begin with the same `shared` words and go on with `own` words of their own.
    #[must_use]
    pub fn shared_prefix(count: usize, shared: u32, own: u32, shape: Shape, seed: u64) -> Self {
        let mut random = Random::new(seed, "prompt");
        let prefix = word_salad(u64::from(shared), &mut random);
        let prompts = (0..count)
            .map(|index| {
                format!(
                    "{prefix}. Part {index}: {}",
                    word_salad(u64::from(own), &mut random)
                )
            })
            .collect();
        Self {
            name: format!("shared-prefix-{shared}-{own}"),
            prompts,
            warm_up: Self::random(4, (shared + own, shared + own), shape.clone(), seed).warm_up,
            shape,
            seed,
            trace: Vec::new(),
        }
    }

    /// A long text of about `tokens` tokens with a question at its end, all different from the first word on:
    /// nearly all of the work is reading.
    #[must_use]
    pub fn long_context(count: usize, tokens: u32, shape: Shape, seed: u64) -> Self {
        let question = "Which of the words above names a place? Answer in one sentence.";
        let mut workload = Self::random(count, (tokens, tokens), shape, seed);
        for prompt in workload.prompts.iter_mut().chain(&mut workload.warm_up) {
            *prompt = format!("{prompt}. {question}");
        }
        Self {
            name: format!("long-context-{tokens}"),
            ..workload
        }
    }

    /// The request with number `id`. Prompts go round; `chat`: as one user message.
    #[must_use]
    pub fn ask(&self, id: u64, chat: bool) -> Ask {
        let prompt = index_of(id, self.prompts.len());
        Ask {
            id,
            prompt: u32::try_from(prompt).unwrap_or(u32::MAX),
            body: self.body(
                self.prompts.get(prompt).map_or("", String::as_str),
                id,
                chat,
            ),
            max_tokens: self.max_tokens(id),
        }
    }

    /// The warm-up request with number `id`.
    #[must_use]
    pub fn warm_up_ask(&self, id: u64, chat: bool) -> Ask {
        let prompt = index_of(id, self.warm_up.len());
        Ask {
            id,
            prompt: u32::MAX,
            body: self.body(
                self.warm_up.get(prompt).map_or("", String::as_str),
                id,
                chat,
            ),
            max_tokens: self.max_tokens(id),
        }
    }

    /// Output bound of request `id`, tokens.
    #[must_use]
    pub fn max_tokens(&self, id: u64) -> u32 {
        let entry = self.trace.get(index_of(id, self.trace.len()));
        if let Some(tokens) = entry.and_then(|entry| entry.max_tokens) {
            return tokens;
        }
        match self.shape.output {
            OutputLength::Fixed { tokens } => tokens,
            OutputLength::Uniform { low, high } => {
                let mut random = Random::new(self.seed ^ id.rotate_left(32), "length");
                u32::try_from(random.within(u64::from(low), u64::from(high))).unwrap_or(high)
            }
        }
    }

    fn body(&self, prompt: &str, id: u64, chat: bool) -> Bytes {
        let shape = &self.shape;
        let mut body = serde_json::Map::new();
        let mut put = |name: &str, value: serde_json::Value| body.insert(name.to_owned(), value);
        if let Some(model) = &shape.model {
            put("model", model.as_str().into());
        }
        if chat {
            put(
                "messages",
                serde_json::json!([{"role": "user", "content": prompt}]),
            );
        } else {
            put("prompt", prompt.into());
        }
        put("max_tokens", self.max_tokens(id).into());
        put("temperature", shape.temperature.into());
        if let Some(seed) = shape.sampling_seed {
            put("seed", seed.into());
        }
        if shape.ignore_eos {
            put("ignore_eos", true.into());
        }
        put("stream", true.into());
        put("stream_options", serde_json::json!({"include_usage": true}));
        for (name, value) in &shape.extra {
            put(name, value.clone());
        }
        Bytes::from(serde_json::Value::Object(body).to_string())
    }

    /// Blake3 over all that is sent, warm-up included: equal hashes, equal load.
    #[must_use]
    pub fn hash(&self) -> String {
        // Maps keep their order, and floats have one shortest form, so the text is canonical.
        let text = serde_json::to_string(self).unwrap_or_default();
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }
}

fn index_of(id: u64, length: usize) -> usize {
    usize::try_from(id % (length.max(1) as u64)).unwrap_or_default()
}

fn word_salad(words: u64, random: &mut Random) -> String {
    let mut text = String::new();
    for word in 0..words {
        if word > 0 {
            text.push(' ');
        }
        text.push_str(prompts::WORDS[random.index(prompts::WORDS.len())]);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Words and punctuation marks: within a tenth of what common tokenisers make of plain English.
    fn token_estimate(text: &str) -> usize {
        let words = text.split_whitespace().count();
        words + text.chars().filter(char::is_ascii_punctuation).count()
    }

    #[test]
    fn the_study_set_has_its_lengths() {
        let estimates: Vec<usize> = STUDY_PROMPTS
            .iter()
            .map(|text| token_estimate(text))
            .collect();
        assert_eq!(estimates.len(), 12);
        assert!(estimates[..5].iter().all(|&n| n < 26), "{estimates:?}");
        assert!(
            estimates[5..10].iter().all(|&n| (34..=72).contains(&n)),
            "{estimates:?}"
        );
        assert!(estimates[10..].iter().all(|&n| n > 115), "{estimates:?}");
    }

    #[test]
    fn the_study_workload_is_frozen() {
        insta::assert_snapshot!(Workload::study().hash(), @"905ea8e120e41d88b11b50b44b9a55567d759892f8477f1992a0a2a84453fe17");
    }

    #[test]
    fn no_warm_up_prompt_is_measured() {
        let shape = Shape::study();
        for workload in [
            Workload::study(),
            Workload::random(64, (8, 16), shape.clone(), 3),
            Workload::long_context(64, 300, shape.clone(), 3),
            Workload::shared_prefix(64, 30, 5, shape, 3),
        ] {
            let measured: HashSet<&String> = workload.prompts.iter().collect();
            assert_eq!(measured.len(), workload.prompts.len(), "{}", workload.name);
            assert!(
                workload
                    .warm_up
                    .iter()
                    .all(|prompt| !measured.contains(prompt))
            );
            assert!(!workload.warm_up.is_empty());
        }
    }

    #[test]
    fn shared_prefixes_are_shared_and_random_prompts_are_not() {
        let shared = Workload::shared_prefix(8, 50, 5, Shape::study(), 9);
        let prefix = &shared.prompts[0][..100];
        assert!(
            shared
                .prompts
                .iter()
                .all(|prompt| prompt.starts_with(prefix))
        );
        let random = Workload::random(8, (50, 50), Shape::study(), 9);
        let starts: HashSet<&str> = random.prompts.iter().map(|prompt| &prompt[..7]).collect();
        assert_eq!(starts.len(), 8);
    }

    #[test]
    fn a_body_says_all_that_the_shape_says() {
        let mut workload = Workload::study();
        workload.shape.output = OutputLength::Uniform { low: 5, high: 9 };
        workload.shape.sampling_seed = Some(4);
        workload.shape.ignore_eos = true;
        workload
            .shape
            .extra
            .insert("cache_prompt".into(), false.into());
        let body: serde_json::Value = serde_json::from_slice(&workload.ask(13, true).body).unwrap();
        assert_eq!(body["messages"][0]["content"], STUDY_PROMPTS[1]);
        assert_eq!(body["seed"], 4);
        assert_eq!(body["ignore_eos"], true);
        assert_eq!(body["cache_prompt"], false);
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert!((5..=9).contains(&body["max_tokens"].as_u64().unwrap()));
        assert_eq!(workload.max_tokens(13), workload.max_tokens(13));
    }
}
