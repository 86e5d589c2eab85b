//! The yardstick: a single sequence on the bare library, with nothing of ours between.

use std::num::NonZeroU32;
use std::path::Path;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;

const CONTEXT: u32 = 2048;

pub struct Plain {
    backend: LlamaBackend,
    model: LlamaModel,
}

impl Plain {
    /// One a process: the library's backend is a singleton.
    pub fn load(path: &Path) -> Self {
        let mut backend = LlamaBackend::init().unwrap();
        backend.void_logs();
        let model =
            LlamaModel::load_from_file(&backend, path, &LlamaModelParams::default()).unwrap();
        Self { backend, model }
    }

    fn context(&self) -> LlamaContext<'_> {
        let parameters = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(CONTEXT))
            .with_n_batch(CONTEXT)
            .with_n_seq_max(1)
            .with_n_threads(2)
            .with_n_threads_batch(2);
        self.model.new_context(&self.backend, parameters).unwrap()
    }

    /// Greedy choice of `count` tokens after `prompt`, a token at a time; end tokens do not end it.
    pub fn greedy(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut context = self.context();
        let mut chosen = Vec::new();
        feed(&mut context, prompt, 0);
        let mut index = i32::try_from(prompt.len()).unwrap() - 1;
        for position in prompt.len()..prompt.len() + count {
            let token = best(context.get_logits_ith(index));
            chosen.push(token);
            feed(&mut context, &[token], position);
            index = 0;
        }
        chosen
    }

    /// Logits after `ids`, fed as one prompt.
    pub fn logits_after(&self, ids: &[u32]) -> Vec<f32> {
        let mut context = self.context();
        feed(&mut context, ids, 0);
        context
            .get_logits_ith(i32::try_from(ids.len()).unwrap() - 1)
            .to_vec()
    }

    /// How far apart the two candidates' logits are after `prefix`.
    pub fn gap(&self, prefix: &[u32], one: u32, other: u32) -> f32 {
        let logits = self.logits_after(prefix);
        (logits[one as usize] - logits[other as usize]).abs()
    }
}

fn feed(context: &mut LlamaContext<'_>, ids: &[u32], position: usize) {
    let mut batch = LlamaBatch::new(ids.len(), 1);
    for (offset, &id) in ids.iter().enumerate() {
        let token = LlamaToken::new(i32::try_from(id).unwrap());
        let position = i32::try_from(position + offset).unwrap();
        batch
            .add(token, position, &[0], offset + 1 == ids.len())
            .unwrap();
    }
    context.decode(&mut batch).unwrap();
}

/// The likeliest token; the lowest id among equals.
fn best(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    u32::try_from(best).unwrap()
}

/// Where two runs of tokens part; `None` where they are equal.
pub fn parting(one: &[u32], other: &[u32]) -> Option<usize> {
    let shared = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    (shared < one.len().max(other.len())).then_some(shared)
}
