//! Finds the model, loads engines on it, and drives them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::TokenId;
use proto::generate::Sampling;
use proto::to_worker::ChatMessage;
use worker::engine::llama::{LlamaEngine, LlamaText, open};
use worker::engine::{
    Emission, Engine, LoadOptions, Pulse, Slot, SlotEnd, StepReport, Task, TextModel,
};
use worker::prompt;

/// Compute threads: one, because OpenMP threads that have to share cores with anything else wait for
/// each other at every operation, and a test then takes minutes.
pub(crate) const THREADS: u32 = 1;

/// The test model's path. That it is missing is a failure, not a reason to skip.
pub(crate) fn model() -> PathBuf {
    let path = std::env::var_os("DISPATCHER_TEST_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    assert!(
        path.is_file(),
        "the test model is missing: {} (get it with scripts/fetch-model, or name another place in \
         DISPATCHER_TEST_MODEL)",
        path.display()
    );
    path
}

pub(crate) fn options(slots: u32, context_tokens: u32) -> LoadOptions {
    LoadOptions {
        model: model(),
        name: None,
        slots,
        context_tokens,
        threads: THREADS,
        gpu_layers: Some(0),
    }
}

pub(crate) fn engine(slots: u32, context_tokens: u32) -> (LlamaEngine, Arc<LlamaText>) {
    let loaded = open(&options(slots, context_tokens), None, Box::new(|_| {}));
    let (engine, text, _) = loaded.expect("the model loads");
    (engine, text)
}

/// Twelve prompts as a chat would send them.
pub(crate) fn prompts(text: &LlamaText) -> Vec<Vec<TokenId>> {
    [
        "What is the capital of France?",
        "Write a haiku about the sea.",
        "Explain why the sky is blue in two sentences.",
        "List three prime numbers above 100.",
        "Translate 'good morning' into Spanish.",
        "Who wrote Pride and Prejudice?",
        "Give me a recipe for pancakes.",
        "What does a compiler do?",
        "Tell me a short story about a fox and a crow.",
        "How many legs does a spider have?",
        "Summarise the water cycle.",
        "Name the planets of the solar system in order.",
    ]
    .iter()
    .map(|words| chat(text, words))
    .collect()
}

pub(crate) fn chat(text: &LlamaText, words: &str) -> Vec<TokenId> {
    let message = ChatMessage {
        role: "user".to_owned(),
        content: words.to_owned(),
        name: None,
    };
    let template = text.chat_template();
    let rendered = prompt::render(template.as_ref(), &[message], true).expect("renders");
    text.tokenise(&rendered, true)
}

/// A prompt of about so many tokens.
pub(crate) fn long_prompt(text: &LlamaText, tokens: usize) -> Vec<TokenId> {
    let words: Vec<String> = (0..tokens).map(|n| format!("item {n},")).collect();
    let mut ids = chat(text, &words.join(" "));
    ids.truncate(tokens);
    ids
}

pub(crate) fn greedy() -> Task {
    Task {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        logprobs: None,
        first_index: 0,
        ignore_eos: false,
        batch_invariant: false,
        cache_prompt: false,
    }
}

/// One slot's output so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Output {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) end: Option<SlotEnd>,
}

/// An engine and what its slots have said.
pub(crate) struct Driver {
    pub(crate) engine: LlamaEngine,
    pub(crate) pulse: Pulse,
    pub(crate) outputs: Vec<Output>,
}

impl Driver {
    pub(crate) fn new(engine: LlamaEngine) -> Self {
        let slots = engine.limits().slots as usize;
        Self {
            engine,
            pulse: Pulse::default(),
            outputs: vec![Output::default(); slots],
        }
    }

    pub(crate) fn admit(&mut self, slot: u32, prompt: &[TokenId], task: &Task) -> u32 {
        self.outputs[slot as usize] = Output::default();
        self.engine
            .admit(Slot(slot), prompt, task)
            .expect("admitted")
    }

    pub(crate) fn step(&mut self) -> StepReport {
        let mut out: Vec<Emission> = Vec::new();
        let report = self.engine.step(&self.pulse, &mut out).expect("a step");
        for emission in out {
            let output = &mut self.outputs[emission.slot.0 as usize];
            assert_eq!(output.end, None, "a slot spoke after its end");
            output.tokens.extend(emission.tokens);
            output.end = emission.end;
        }
        report
    }

    /// Steps until the slot ended or has `most` tokens; then frees it and gives its output.
    pub(crate) fn finish(&mut self, slot: u32, most: usize) -> Output {
        while !self.done(slot, most) {
            assert_ne!(
                self.step(),
                StepReport::default(),
                "slot {slot} does not move"
            );
        }
        self.engine.release(Slot(slot));
        self.outputs[slot as usize].clone()
    }

    pub(crate) fn done(&self, slot: u32, most: usize) -> bool {
        let output = &self.outputs[slot as usize];
        output.end.is_some() || output.tokens.len() >= most
    }

    /// One request alone in the engine.
    pub(crate) fn alone(&mut self, prompt: &[TokenId], task: &Task, most: usize) -> Output {
        self.admit(0, prompt, task);
        self.finish(0, most)
    }
}
