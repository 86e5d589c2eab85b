//! What these tests share: the folders that scripts/mlx-reference makes, and an engine to drive.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::TokenId;
use proto::generate::Sampling;
use worker::engine::mlx::{LoadedMlx, Unpacking, load_unpacking};
use worker::engine::{Emission, Engine, LoadError, LoadOptions, Pulse, Slot, StepReport, Task};

use crate::near_tie;

/// The random-weight folders: name, and whether any of its weights are packed.
pub(crate) const CASES: [(&str, bool); 10] = [
    ("llama-tied", false),
    ("llama-untied-4bit", true),
    ("llama-scaled", false),
    ("llama-biased", true),
    ("llama-linear", true),
    ("qwen2-tied-4bit", true),
    ("qwen2-untied", false),
    ("qwen2-untied-3bit", true),
    ("qwen3-tied-6bit", true),
    ("qwen3-untied", false),
];

/// A folder that scripts/mlx-reference made. Missing is a failure, not a reason to skip.
pub(crate) fn case(name: &str) -> PathBuf {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/mlx-cases");
    assert!(
        cases.join("done").exists(),
        "{} is missing or incomplete: run scripts/mlx-reference",
        cases.display()
    );
    cases.join(name)
}

/// MLX belongs to one thread at a time; a runner with threads takes turns here.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn options(folder: &Path, slots: u32) -> LoadOptions {
    LoadOptions {
        model: folder.to_owned(),
        name: None,
        slots,
        context_tokens: 256,
        threads: 1,
        gpu_layers: Some(0),
    }
}

pub(crate) fn load(folder: &Path, unpacking: Unpacking) -> Result<LoadedMlx, LoadError> {
    load_unpacking(&options(folder, 8), unpacking, Box::new(|_| {}))
}

pub(crate) fn greedy() -> Task {
    Task {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        logprobs: None,
        first_index: 0,
        ignore_eos: true,
        batch_invariant: false,
        cache_prompt: false,
    }
}

/// One step; its report and what it emitted.
pub(crate) fn step(engine: &mut dyn Engine) -> (StepReport, Vec<Emission>) {
    let mut out = Vec::new();
    let report = engine.step(&Pulse::default(), &mut out).unwrap();
    (report, out)
}

/// `count` tokens after `prompt`, alone in slot 0; fewer where the sequence ended.
pub(crate) fn alone(
    engine: &mut dyn Engine,
    prompt: &[TokenId],
    task: &Task,
    count: usize,
) -> Vec<TokenId> {
    engine.admit(Slot(0), prompt, task).unwrap();
    let mut tokens = Vec::new();
    while tokens.len() < count {
        let (_, emissions) = step(engine);
        tokens.extend(emissions.iter().flat_map(|e| &e.tokens));
        if emissions.iter().any(|e| e.end.is_some()) {
            break;
        }
    }
    engine.release(Slot(0));
    tokens
}

/// As [`alone`] for each of several prompts, with up to eight of them in the engine's slots at a time.
pub(crate) fn together(
    engine: &mut dyn Engine,
    prompts: &[Vec<TokenId>],
    task: &Task,
    count: usize,
) -> Vec<Vec<TokenId>> {
    let mut answers = vec![Vec::new(); prompts.len()];
    let mut seats: [Option<usize>; 8] = [None; 8];
    let mut waiting = 0..prompts.len();
    loop {
        for (slot, seat) in (0..).map(Slot).zip(&mut seats) {
            if seat.is_none()
                && let Some(next) = waiting.next()
            {
                engine.admit(slot, &prompts[next], task).unwrap();
                *seat = Some(next);
            }
        }
        if seats.iter().all(Option::is_none) {
            return answers;
        }
        for emission in step(engine).1 {
            let seat = &mut seats[emission.slot.0 as usize];
            let answer = &mut answers[seat.unwrap()];
            answer.extend(emission.tokens);
            if emission.end.is_some() || answer.len() >= count {
                engine.release(emission.slot);
                *seat = None;
            }
        }
    }
}

/// Splitmix64: the tests' only randomness, from a seed that they print.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    pub(crate) fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }

    pub(crate) fn tokens(&mut self, count: usize) -> Vec<TokenId> {
        (0..count)
            .map(|_| u32::try_from(self.below(256)).unwrap())
            .collect()
    }
}

/// How two greedy continuations of one prompt part.
#[derive(Debug, PartialEq)]
pub(crate) enum Parting {
    Equal,
    /// At this token the two candidates' logits differ by this little.
    NearTie(usize, f32),
    Apart(usize, f32),
}

/// Judges by a single pass over the prompt and what both agree on.
pub(crate) fn parting(
    loaded: &mut LoadedMlx,
    prompt: &[TokenId],
    ours: &[TokenId],
    theirs: &[TokenId],
) -> Parting {
    let common = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    let (Some(&a), Some(&b)) = (ours.get(common), theirs.get(common)) else {
        assert_eq!(ours.len(), theirs.len(), "one continuation is shorter");
        return Parting::Equal;
    };
    let context = [prompt, &ours[..common]].concat();
    let logits = loaded.engine.score(&context).unwrap().pop().unwrap();
    let gap = (logits[a as usize] - logits[b as usize]).abs();
    if gap <= near_tie::epsilon("mlx", "float32") {
        println!("near tie at token {common}: {a} and {b} are {gap:e} apart");
        Parting::NearTie(common, gap)
    } else {
        Parting::Apart(common, gap)
    }
}
