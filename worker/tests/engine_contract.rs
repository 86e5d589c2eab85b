//! One suite that every engine must pass. An engine is added by one line of `contract!`.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod near_tie;

use std::path::PathBuf;

use proto::TokenId;
use proto::generate::{FinishReason, Sampling};
use worker::engine::select::{self, Selection};
use worker::engine::{
    Emission, Engine, EngineError, LoadOptions, Loaded, Pulse, Rejected, Slot, SlotEnd, Task,
};

/// An engine under test.
struct Subject {
    selection: Selection,
    model: PathBuf,
    /// Output does not depend on batch-mates or on how tokens were computed. Where arithmetic makes
    /// it depend, only the first token after a common prefix is compared.
    is_exact: bool,
}

const CONTEXT_TOKENS: u32 = 256;

impl Subject {
    fn load(&self, slots: u32) -> Loaded {
        let options = LoadOptions {
            model: self.model.clone(),
            name: None,
            slots,
            context_tokens: CONTEXT_TOKENS,
            // With more, its threads would wait for each other on a busy machine.
            threads: 1,
            gpu_layers: None,
        };
        let mut highest = 0;
        let progress = Box::new(move |permille| {
            assert!((highest..=1000).contains(&permille), "progress falls");
            highest = permille;
        });
        select::load(self.selection.clone(), &options, progress).unwrap()
    }

    fn warm(&self, slots: u32) -> Bench {
        let mut loaded = self.load(slots);
        let pulse = Pulse::default();
        loaded.engine.warm(&pulse).unwrap();
        assert!(pulse.read() > 0, "warm-up moves the pulse");
        Bench {
            loaded,
            pulse,
            is_exact: self.is_exact,
        }
    }
}

/// A warm engine and its pulse.
struct Bench {
    loaded: Loaded,
    pulse: Pulse,
    is_exact: bool,
}

fn greedy() -> Task {
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

impl Bench {
    fn engine(&mut self) -> &mut dyn Engine {
        &mut *self.loaded.engine
    }

    fn ids(&self, text: &str) -> Vec<TokenId> {
        self.loaded.text.tokenise(text, true)
    }

    fn step(&mut self) -> Vec<Emission> {
        let mut out = Vec::new();
        let before = self.pulse.read();
        self.loaded.engine.step(&self.pulse, &mut out).unwrap();
        assert!(self.pulse.read() > before, "a step moves the pulse");
        let vocabulary = self.loaded.text.vocabulary();
        for emission in &out {
            assert!(emission.tokens.iter().all(|id| *id < vocabulary));
            let logprobs = emission.logprobs.len();
            assert!(logprobs == 0 || logprobs == emission.tokens.len());
        }
        let mut slots: Vec<Slot> = out.iter().map(|emission| emission.slot).collect();
        slots.dedup();
        assert_eq!(slots.len(), out.len(), "one emission a slot");
        out
    }

    /// Up to `count` tokens of `slot`, and its end if it came.
    fn take(&mut self, slot: Slot, count: usize) -> (Vec<TokenId>, Option<SlotEnd>) {
        let mut tokens = Vec::new();
        while tokens.len() < count {
            for emission in self.step() {
                if emission.slot == slot {
                    tokens.extend(emission.tokens);
                    if emission.end.is_some() {
                        tokens.truncate(count);
                        return (tokens, emission.end);
                    }
                }
            }
        }
        tokens.truncate(count);
        (tokens, None)
    }

    /// `count` tokens after `prompt`, in slot 0 alone.
    fn answer(&mut self, prompt: &[TokenId], task: &Task, count: usize) -> Vec<TokenId> {
        self.engine().admit(Slot(0), prompt, task).unwrap();
        let (tokens, _) = self.take(Slot(0), count);
        self.engine().release(Slot(0));
        tokens
    }

    /// Compares a continuation with the expected one, as far as the engine's arithmetic allows.
    fn assert_same(&self, found: &[TokenId], expected: &[TokenId], what: &str) {
        if self.is_exact {
            assert_eq!(found, expected, "{what}");
        } else {
            assert_eq!(found.first(), expected.first(), "{what}");
        }
    }
}

fn limits_are_those_that_were_asked_for(subject: &Subject) {
    let bench = subject.warm(3);
    let limits = bench.loaded.engine.limits();
    assert_eq!((limits.slots, limits.context_tokens), (3, CONTEXT_TOKENS));
    assert_eq!(limits.vocabulary, bench.loaded.text.vocabulary());
    assert!(limits.weight_bytes_per_step > 0 && limits.kv_bytes_per_token > 0);
    assert!(!limits.device.is_empty());
}

fn the_same_model_has_the_same_identity(subject: &Subject) {
    assert_eq!(subject.load(1).identity, subject.load(2).identity);
}

fn text_survives_the_way_to_ids_and_back(subject: &Subject) {
    let loaded = subject.load(1);
    let text = "The river runs near the old stone: 12 naïve cafés, 東京, 🦀.";
    let ids = loaded.text.tokenise(text, false);
    let mut bytes = Vec::new();
    for id in ids {
        let before = bytes.len();
        loaded.text.piece(id, &mut bytes);
        let length = u32::try_from(bytes.len() - before).unwrap();
        assert!(length <= loaded.text.longest_token_bytes());
    }
    assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), text);
}

fn no_token_is_longer_than_the_longest(subject: &Subject) {
    let loaded = subject.load(1);
    let mut piece = Vec::new();
    for id in 0..loaded.text.vocabulary() {
        piece.clear();
        loaded.text.piece(id, &mut piece);
        assert!(piece.len() <= usize::try_from(loaded.text.longest_token_bytes()).unwrap());
    }
}

fn the_same_prompt_gives_the_same_tokens(subject: &Subject) {
    let mut bench = subject.warm(2);
    let prompt = bench.ids("Once upon a time");
    let first = bench.answer(&prompt, &greedy(), 12);
    assert_eq!(first.len(), 12);
    assert_eq!(bench.answer(&prompt, &greedy(), 12), first);
}

fn a_prompt_is_prefilled_once_and_then_each_step_decodes(subject: &Subject) {
    let mut bench = subject.warm(2);
    let prompt = bench.ids("Count the prompt's tokens as they are computed");
    let cached = bench.engine().admit(Slot(1), &prompt, &greedy()).unwrap();
    assert_eq!(cached, 0, "no reuse was allowed");
    let (mut prefilled, mut decoded) = (0, 0);
    while decoded < 5 {
        let mut out = Vec::new();
        let pulse = bench.pulse.clone();
        let report = bench.engine().step(&pulse, &mut out).unwrap();
        prefilled += report.prefill_tokens;
        decoded += out
            .iter()
            .map(|emission| emission.tokens.len())
            .sum::<usize>();
        assert!(report.batch <= 1);
    }
    assert_eq!(usize::try_from(prefilled).unwrap(), prompt.len());
}

fn a_row_is_the_same_alone_and_in_company(subject: &Subject) {
    let mut bench = subject.warm(4);
    let prompt = bench.ids("The weather today is");
    let alone = bench.answer(&prompt, &greedy(), 10);
    for slot in [0, 1, 3] {
        let other = bench.ids(&format!("Neighbour number {slot} talks about"));
        bench.engine().admit(Slot(slot), &other, &greedy()).unwrap();
    }
    bench.step();
    bench.engine().admit(Slot(2), &prompt, &greedy()).unwrap();
    let mut company = Vec::new();
    while company.len() < alone.len() {
        let emissions = bench.step();
        let own = emissions.into_iter().filter(|e| e.slot == Slot(2));
        company.extend(own.flat_map(|emission| emission.tokens));
        // One leaves while the row runs.
        bench.engine().release(Slot(1));
    }
    company.truncate(alone.len());
    bench.assert_same(&company, &alone, "in company");
}

fn a_stream_resumes_from_its_ids(subject: &Subject) {
    let mut bench = subject.warm(2);
    let prompt = bench.ids("The list goes on:");
    let sampled = Task {
        sampling: Sampling {
            temperature: 0.8,
            seed: 42,
            ..Sampling::default()
        },
        ..greedy()
    };
    for task in [greedy(), sampled] {
        let whole = bench.answer(&prompt, &task, 12);
        for cut in [1, 5, 11] {
            let resumed = [&prompt[..], &whole[..cut]].concat();
            let rest = Task {
                first_index: u32::try_from(cut).unwrap(),
                ..task.clone()
            };
            let found = bench.answer(&resumed, &rest, 12 - cut);
            bench.assert_same(&found, &whole[cut..], &format!("resumed at {cut}"));
        }
    }
}

fn the_seed_decides_what_is_drawn(subject: &Subject) {
    let mut bench = subject.warm(1);
    let prompt = bench.ids("Say anything at all:");
    let task = |seed| Task {
        sampling: Sampling {
            temperature: 1.0,
            seed,
            ..Sampling::default()
        },
        ..greedy()
    };
    let first = bench.answer(&prompt, &task(1), 16);
    assert_eq!(bench.answer(&prompt, &task(1), 16), first);
    assert_ne!(bench.answer(&prompt, &task(2), 16), first);
}

fn a_full_context_ends_the_row_and_frees_the_slot(subject: &Subject) {
    let mut bench = subject.warm(2);
    let prompt = bench.ids("Run until there is no more room");
    bench.engine().admit(Slot(0), &prompt, &greedy()).unwrap();
    let (tokens, end) = bench.take(Slot(0), 10_000);
    assert_eq!(end, Some(SlotEnd::Finished(FinishReason::Length)));
    let context = usize::try_from(CONTEXT_TOKENS).unwrap();
    let total = prompt.len() + tokens.len();
    // Whether the last token, which needs no place in the cache, counts is the engine's to say.
    assert!((context..=context + 1).contains(&total), "{total}");
    bench.engine().admit(Slot(0), &prompt, &greedy()).unwrap();
    assert!(!bench.take(Slot(0), 1).0.is_empty());
}

fn what_cannot_be_admitted_is_rejected_and_the_engine_lives(subject: &Subject) {
    let mut bench = subject.warm(1);
    let some = bench.ids("word ")[0];
    let too_long = vec![some; usize::try_from(CONTEXT_TOKENS).unwrap() + 1];
    for prompt in [&[][..], &too_long] {
        let refused = bench.engine().admit(Slot(0), prompt, &greedy());
        assert!(
            matches!(refused, Err(EngineError::Rejected(Rejected::Request(_)))),
            "{refused:?}"
        );
    }
    let prompt = bench.ids("Still here");
    assert_eq!(bench.answer(&prompt, &greedy(), 3).len(), 3);
}

fn logprobs_come_with_every_token(subject: &Subject) {
    let mut bench = subject.warm(1);
    let prompt = bench.ids("How sure are you?");
    let task = Task {
        logprobs: Some(3),
        ..greedy()
    };
    bench.engine().admit(Slot(0), &prompt, &task).unwrap();
    let mut seen = 0;
    while seen < 4 {
        for emission in bench.step() {
            assert_eq!(emission.logprobs.len(), emission.tokens.len());
            for (logprobs, token) in emission.logprobs.iter().zip(&emission.tokens) {
                let mut piece = Vec::new();
                bench.loaded.text.piece(*token, &mut piece);
                assert_eq!(logprobs.bytes, piece);
                assert_eq!(logprobs.top.len(), 3);
                assert_eq!(logprobs.top[0].id, *token, "greedy takes the likeliest");
                assert!(logprobs.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
                assert!(logprobs.chosen <= 0.0);
                seen += 1;
            }
        }
    }
}

fn a_cached_prefix_changes_no_token(subject: &Subject) {
    let mut bench = subject.warm(2);
    let prompt = bench.ids("A long common beginning that two prompts share, word by word, until");
    let cold = bench.answer(&prompt, &greedy(), 6);
    let task = Task {
        cache_prompt: true,
        ..greedy()
    };
    let free = [Slot(0), Slot(1)];
    let slot = bench.engine().best_slot(&prompt, &free).unwrap();
    assert!(free.contains(&slot));
    let cached = bench.engine().admit(slot, &prompt, &task).unwrap();
    assert!(
        usize::try_from(cached).unwrap() < prompt.len(),
        "the last token is always computed"
    );
    let (warm, _) = bench.take(slot, 6);
    bench.assert_same(&warm, &cold, "with a cached prefix");
}

fn what_was_not_computed_before_the_release_is_not_cached(subject: &Subject) {
    let mut bench = subject.warm(1);
    let prompt = bench.ids(&"One word and then another. ".repeat(20));
    let prompt = &prompt[..100];
    let task = Task {
        cache_prompt: true,
        ..greedy()
    };
    bench.engine().admit(Slot(0), prompt, &task).unwrap();
    let mut out = Vec::new();
    let report = bench.loaded.engine.step(&bench.pulse, &mut out).unwrap();
    bench.engine().release(Slot(0));
    let cached = bench.engine().admit(Slot(0), prompt, &task).unwrap();
    assert!(
        cached <= report.prefill_tokens,
        "{cached} of {} computed tokens",
        report.prefill_tokens
    );
    bench.take(Slot(0), 1);
}

fn no_slot_is_best_where_none_is_free(subject: &Subject) {
    let mut bench = subject.warm(1);
    let prompt = bench.ids("anywhere");
    assert_eq!(bench.engine().best_slot(&prompt, &[]), None);
}

fn releasing_a_free_slot_is_harmless(subject: &Subject) {
    let mut bench = subject.warm(2);
    bench.engine().release(Slot(1));
    let prompt = bench.ids("Nothing happened");
    bench.engine().admit(Slot(0), &prompt, &greedy()).unwrap();
    bench.engine().release(Slot(1));
    assert_eq!(bench.take(Slot(0), 3).0.len(), 3);
    bench.engine().release(Slot(0));
    bench.engine().release(Slot(0));
    let mut out = Vec::new();
    let Bench { loaded, pulse, .. } = &mut bench;
    loaded.engine.step(pulse, &mut out).unwrap();
    assert!(out.is_empty(), "nobody sits anywhere");
}

fn end_tokens_are_never_emitted(subject: &Subject) {
    let mut bench = subject.warm(1);
    let prompt = bench.ids("Hello");
    let task = Task {
        ignore_eos: false,
        ..greedy()
    };
    bench.engine().admit(Slot(0), &prompt, &task).unwrap();
    let (tokens, _) = bench.take(Slot(0), 100);
    assert!(tokens.iter().all(|id| !bench.loaded.text.is_end(*id)));
}

macro_rules! contract {
    ($engine:ident, $subject:expr; $($promise:ident)*) => {
        mod $engine {
            $(
                #[test]
                fn $promise() {
                    super::$promise(&$subject);
                }
            )*
        }
    };
}

/// The promises of the trait, for one engine.
macro_rules! every_promise {
    ($engine:ident, $subject:expr) => {
        contract! { $engine, $subject;
            limits_are_those_that_were_asked_for
            the_same_model_has_the_same_identity
            text_survives_the_way_to_ids_and_back
            no_token_is_longer_than_the_longest
            the_same_prompt_gives_the_same_tokens
            a_prompt_is_prefilled_once_and_then_each_step_decodes
            a_row_is_the_same_alone_and_in_company
            a_stream_resumes_from_its_ids
            the_seed_decides_what_is_drawn
            a_full_context_ends_the_row_and_frees_the_slot
            what_cannot_be_admitted_is_rejected_and_the_engine_lives
            logprobs_come_with_every_token
            a_cached_prefix_changes_no_token
            what_was_not_computed_before_the_release_is_not_cached
            no_slot_is_best_where_none_is_free
            releasing_a_free_slot_is_harmless
            end_tokens_are_never_emitted
        }
    };
}

/// A scripted engine under test.
fn scripted(script: &str) -> Subject {
    Subject {
        selection: Selection::Scripted(Box::new(script.parse().unwrap())),
        model: PathBuf::from("dummy"),
        is_exact: true,
    }
}

every_promise!(plain, super::scripted(""));
every_promise!(chunked, super::scripted("chunk=3,text=bytes"));
every_promise!(speculative, super::scripted("burst=3,length=40"));

/// The MLX engine on a folder with random weights that scripts/mlx-reference made. Its float32 rows
/// came out the same in any company so far; an exact comparison says when that ends.
#[cfg(feature = "mlx")]
fn mlx(case: &str) -> Subject {
    Subject {
        selection: Selection::Mlx,
        model: PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/mlx-cases"))
            .join(case),
        is_exact: true,
    }
}

#[cfg(feature = "mlx")]
every_promise!(mlx_plain, super::mlx("llama-scaled"));
#[cfg(feature = "mlx")]
every_promise!(mlx_packed, super::mlx("qwen2-tied-4bit"));

/// The llama.cpp engine on the model that scripts/fetch-model brings. Four slots of it are exact
/// where near_tie.toml says so of this processor; the contract asks for first tokens elsewhere.
#[cfg(feature = "llama")]
fn llama() -> Subject {
    let fetched = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    let named = std::env::var_os("DISPATCHER_TEST_MODEL");
    Subject {
        selection: Selection::Llama,
        model: named.map_or_else(|| PathBuf::from(fetched), PathBuf::from),
        is_exact: near_tie::epsilon("llama", "q4_1") == 0.0,
    }
}

#[cfg(feature = "llama")]
every_promise!(real_model_llama, super::llama());
