//! The engine's promises, each on the real model.

use proto::TokenId;
use proto::generate::{FinishReason, Sampling};
use worker::engine::{
    Engine, EngineError, Pulse, Rejected, Slot, SlotEnd, StepReport, Task, TextModel,
};

use crate::near_tie;
use crate::plain::Plain;
use crate::stream::{Driver, chat, engine, greedy, long_prompt, prompts};

const MOST: usize = 40;

#[test]
fn real_model_greedy_text_is_that_of_a_plain_loop() {
    let (engine, text) = engine(1, 1024);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let mut ties = 0;
    for (n, prompt) in prompts(&text).iter().enumerate() {
        let expected = plain.greedy(prompt, MOST);
        let got = driver.alone(prompt, &greedy(), MOST).tokens;
        ties += plain.same_or_near_tie(&format!("prompt {n}"), prompt, &expected, &got);
    }
    eprintln!("near ties: {ties} of 12");
    assert!(
        ties <= 2,
        "{ties} of 12 are near ties: more than rounding explains"
    );
}

#[test]
fn real_model_what_prefilling_moves_logits_by_is_within_the_table() {
    let (_engine, text) = engine(1, 2048);
    let mut plain = Plain::new(&text);
    let mut differences = Vec::new();
    for prompt in prompts(&text) {
        let answer = plain.greedy(&prompt, 32);
        let all = [prompt.clone(), answer].concat();
        let decoded = plain.logits_by(&all, 1);
        let prefilled = plain.logits_by(&all, 48);
        for at in prompt.len() - 1..all.len() {
            let pairs = decoded[at].iter().zip(&prefilled[at]);
            differences.extend(pairs.map(|(a, b)| (a - b).abs()));
        }
    }
    let rank = differences.len() * 999 / 1000;
    let (_, p999, above) = differences.select_nth_unstable_by(rank, f32::total_cmp);
    let (p999, largest) = (*p999, above.iter().copied().fold(0.0, f32::max));
    eprintln!("p99.9 of the difference is {p999:e}, the largest {largest:e}");
    let epsilon = near_tie::epsilon("llama", "q4_1");
    assert!(epsilon <= 0.05, "the design's bound for quantised weights");
    assert!(
        2.0 * p999 <= epsilon,
        "twice {p999:e} is over the table's {epsilon}"
    );
}

#[test]
fn real_model_a_row_in_a_changing_batch_says_what_it_says_alone() {
    let (engine, text) = engine(8, 512);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let prompts = prompts(&text);
    let seed = 20_261_201_u64;
    eprintln!("seed {seed}");
    let mut dice = Dice(seed);
    // Requests wait, join when a slot is free and the dice say so, and leave after a random length.
    let mut waiting: Vec<usize> = (0..24).map(|n| n % prompts.len()).collect();
    let mut seated: Vec<Option<(usize, usize)>> = vec![None; 8];
    let (mut ties, mut compared, mut largest) = (0, 0, 0);
    while !waiting.is_empty() || seated.iter().any(Option::is_some) {
        for slot in 0..8_u32 {
            if seated[slot as usize].is_none() && dice.below(3) == 0 {
                let Some(n) = waiting.pop() else { continue };
                driver.admit(slot, &prompts[n], &greedy());
                seated[slot as usize] = Some((n, 8 + dice.below(MOST - 8)));
            }
        }
        let report = driver.step();
        largest = largest.max(report.batch);
        for slot in 0..8_u32 {
            let Some((n, most)) = seated[slot as usize] else {
                continue;
            };
            if driver.done(slot, most) {
                let got = driver.finish(slot, most).tokens;
                let expected: Vec<TokenId> = plain.greedy(&prompts[n], got.len().max(1));
                ties +=
                    plain.same_or_near_tie(&format!("prompt {n}"), &prompts[n], &expected, &got);
                compared += 1;
                seated[slot as usize] = None;
            }
        }
    }
    eprintln!("{compared} streams, {ties} near ties, largest batch {largest}");
    assert_eq!(compared, 24);
    assert!(largest >= 5, "the batch never filled: {largest}");
    assert!(
        ties <= 2,
        "{ties} of 24 are near ties: more than rounding explains"
    );
}

#[test]
fn real_model_a_reused_prefix_gives_the_same_text() {
    let (engine, text) = engine(2, 1024);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let cached = Task {
        cache_prompt: true,
        ..greedy()
    };
    let first = chat(&text, "What is the capital of France?");
    assert_eq!(
        driver.admit(1, &first, &cached),
        0,
        "nothing is kept at first"
    );
    let answer = driver.finish(1, 24).tokens;

    // The conversation goes on: its beginning is kept in slot 1, and nowhere else.
    let mut second = [first.clone(), answer].concat();
    second.extend(text.tokenise(
        "<|im_end|>\n<|im_start|>user\nAnd of Spain?<|im_end|>\n",
        false,
    ));
    second.extend(text.tokenise("<|im_start|>assistant\n", false));
    let free = [Slot(0), Slot(1)];
    assert_eq!(driver.engine.best_slot(&second, &free), Some(Slot(1)));
    let kept = driver.admit(1, &second, &cached);
    assert!(
        kept as usize >= first.len(),
        "{kept} kept of {}",
        first.len()
    );
    let got = driver.finish(1, MOST).tokens;
    let expected = plain.greedy(&second, MOST);
    plain.same_or_near_tie("continued", &second, &expected, &got);

    // The same again: all but the last token is kept.
    assert_eq!(driver.admit(1, &second, &cached) as usize, second.len() - 1);
    let again = driver.finish(1, MOST).tokens;
    plain.same_or_near_tie("repeated", &second, &expected, &again);

    // Another prompt shares only the template's head, and one that wants no cache gets none.
    let other = chat(&text, "Name the planets of the solar system in order.");
    let kept = driver.admit(1, &other, &cached) as usize;
    assert!(kept > 0 && kept < other.len() - 1);
    let got = driver.finish(1, MOST).tokens;
    let expected = plain.greedy(&other, MOST);
    plain.same_or_near_tie("other", &other, &expected, &got);
    assert_eq!(driver.admit(1, &other, &greedy()), 0);
    let got = driver.finish(1, MOST).tokens;
    plain.same_or_near_tie("without cache", &other, &expected, &got);
}

#[test]
fn real_model_a_cancel_in_the_middle_of_a_prefill_frees_the_slot() {
    let (engine, text) = engine(2, 1024);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let long = long_prompt(&text, 700);
    driver.admit(0, &long, &greedy());
    let report = driver.step();
    assert!(report.prefill_tokens > 0 && (report.prefill_tokens as usize) < long.len());
    driver.engine.release(Slot(0));
    assert_eq!(
        driver.step(),
        StepReport::default(),
        "nothing goes on in a freed slot"
    );
    driver.engine.release(Slot(0));
    // The slot serves the next one as if nothing had been, with and without what was kept.
    for cache_prompt in [false, true] {
        let prompt = if cache_prompt {
            long.clone()
        } else {
            chat(&text, "What does a compiler do?")
        };
        let task = Task {
            cache_prompt,
            ..greedy()
        };
        driver.admit(0, &prompt, &task);
        let got = driver.finish(0, 16).tokens;
        let expected = plain.greedy(&prompt, 16);
        plain.same_or_near_tie("after the cancel", &prompt, &expected, &got);
    }
}

#[test]
fn real_model_a_full_context_ends_that_row_with_length() {
    let (engine, text) = engine(2, 64);
    let mut driver = Driver::new(engine);
    let prompt = long_prompt(&text, 50);
    let task = Task {
        ignore_eos: true,
        ..greedy()
    };
    driver.admit(0, &prompt, &task);
    let short = chat(&text, "Hi");
    driver.admit(1, &short, &task);
    let full = driver.finish(0, usize::MAX);
    assert_eq!(full.end, Some(SlotEnd::Finished(FinishReason::Length)));
    assert_eq!(
        full.tokens.len(),
        64 - 50,
        "the context holds prompt and output"
    );
    assert_eq!(driver.outputs[1].end, None, "the other row goes on");
    let other = driver.finish(1, usize::MAX);
    assert_eq!(short.len() + other.tokens.len(), 64);

    let over = long_prompt(&text, 64);
    let refused = driver.engine.admit(Slot(0), &over, &task);
    assert!(
        matches!(refused, Err(EngineError::Rejected(Rejected::Request(_)))),
        "{refused:?}"
    );
}

#[test]
fn real_model_filled_gaps_change_nothing_for_anybody() {
    let (engine, text) = engine(8, 256);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let cached = Task {
        cache_prompt: true,
        ..greedy()
    };
    // A cache that is kept in a gap, an empty slot, and a full one.
    let kept = chat(&text, "What is the capital of France?");
    driver.admit(1, &kept, &cached);
    driver.finish(1, 4);
    driver.admit(2, &long_prompt(&text, 255), &cached);
    assert_eq!(driver.finish(2, 9).tokens.len(), 1, "the context is full");
    driver.engine.fill_gaps_up_to(8);
    let streams = [
        (0_u32, "Hi"),
        (3, "Name three colours."),
        (7, "Count to five."),
    ];
    let most = 24;
    for (slot, words) in streams {
        driver.admit(slot, &chat(&text, words), &greedy());
    }
    for (slot, words) in streams {
        let prompt = chat(&text, words);
        let got = driver.finish(slot, most).tokens;
        let expected = plain.greedy(&prompt, got.len());
        plain.same_or_near_tie(words, &prompt, &expected, &got);
    }
    assert_eq!(
        driver.admit(1, &kept, &cached) as usize,
        kept.len() - 1,
        "the kept cache is whole"
    );
    let got = driver.finish(1, 16).tokens;
    let expected = plain.greedy(&kept, 16);
    plain.same_or_near_tie("from the kept cache", &kept, &expected, &got);
}

#[test]
fn real_model_a_prefix_in_another_slot_is_copied_while_that_slot_goes_on() {
    let (engine, text) = engine(3, 256);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let cached = Task {
        cache_prompt: true,
        ..greedy()
    };
    let shared = long_prompt(&text, 90);
    let with = |words: &str| {
        let mut prompt = shared.clone();
        prompt.extend(text.tokenise(words, false));
        prompt
    };
    let (one, other) = (with(" The capital of France"), with(" One, two, three,"));
    assert_eq!(driver.admit(0, &one, &cached), 0);
    while driver.outputs[0].tokens.is_empty() && driver.outputs[0].end.is_none() {
        driver.step();
    }
    let common = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    assert!(common >= shared.len());
    assert_eq!(driver.admit(2, &other, &cached) as usize, common);
    let private = Task {
        cache_prompt: false,
        ..greedy()
    };
    assert_eq!(
        driver.admit(1, &other, &private),
        0,
        "nothing is reused unasked"
    );
    for (slot, prompt) in [(0, &one), (2, &other), (1, &other)] {
        let got = driver.finish(slot, 16).tokens;
        let expected = plain.greedy(prompt, got.len());
        plain.same_or_near_tie(&format!("slot {slot}"), prompt, &expected, &got);
    }
}

#[test]
fn real_model_padded_prompts_say_what_they_say_alone() {
    let (engine, text) = engine(4, 256);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    driver.engine.pad_prompts_up_to(20);
    // Of different lengths, together within the first chunk of 16 tokens.
    let prompts: Vec<Vec<TokenId>> = ["Once upon a time there", "The sky is", "One two three"]
        .iter()
        .map(|words| text.tokenise(words, true))
        .collect();
    assert!(prompts[0].len() > prompts[1].len());
    assert!(prompts.iter().map(Vec::len).sum::<usize>() <= 16);
    let most = 24;
    for (slot, prompt) in (0..).zip(&prompts) {
        driver.admit(slot, prompt, &greedy());
    }
    assert_eq!(
        driver.step().prefill_tokens as usize,
        prompts.iter().map(Vec::len).sum::<usize>(),
        "all in one step, and padding is no prompt"
    );
    for (slot, prompt) in (0..).zip(&prompts) {
        let got = driver.finish(slot, most).tokens;
        let expected = plain.greedy(prompt, got.len());
        plain.same_or_near_tie(&format!("slot {slot}"), prompt, &expected, &got);
    }
}

#[test]
fn real_model_sixteen_slots_step_together() {
    let (engine, text) = engine(16, 256);
    let mut driver = Driver::new(engine);
    let prompts = prompts(&text);
    let task = Task {
        ignore_eos: true,
        ..greedy()
    };
    for slot in 0..16_u32 {
        driver.admit(slot, &prompts[slot as usize % prompts.len()], &task);
    }
    while driver.outputs.iter().any(|o| o.tokens.is_empty()) {
        driver.step();
    }
    let before: Vec<usize> = driver.outputs.iter().map(|o| o.tokens.len()).collect();
    assert_eq!(
        driver.step(),
        StepReport {
            batch: 16,
            prefill_tokens: 0
        }
    );
    for (output, before) in driver.outputs.iter().zip(before) {
        assert_eq!(
            output.tokens.len(),
            before + 1,
            "every row moved by one token"
        );
    }
}

#[test]
fn real_model_a_joining_prompt_shares_steps_with_running_streams() {
    let (engine, text) = engine(3, 1024);
    let mut driver = Driver::new(engine);
    let task = Task {
        ignore_eos: true,
        ..greedy()
    };
    driver.admit(
        0,
        &chat(&text, "Tell me a short story about a fox and a crow."),
        &task,
    );
    while driver.outputs[0].tokens.is_empty() {
        driver.step();
    }
    driver.admit(1, &long_prompt(&text, 400), &task);
    driver.admit(2, &long_prompt(&text, 300), &task);
    let mut steps = 0;
    let (mut first, mut prefilled) = (None, 0);
    while driver.outputs[2].tokens.is_empty() {
        let before = driver.outputs[0].tokens.len();
        let report = driver.step();
        prefilled += report.prefill_tokens;
        assert_eq!(
            driver.outputs[0].tokens.len(),
            before + 1,
            "the running stream waited"
        );
        assert!(report.prefill_tokens > 0 && report.batch >= 1, "{report:?}");
        steps += 1;
        if !driver.outputs[1].tokens.is_empty() && first.is_none() {
            first = Some(steps);
        }
    }
    assert_eq!(prefilled, 700);
    assert!(steps > 3, "the prompt went down in one piece");
    assert!(
        first.is_some_and(|f| f <= steps),
        "first come, first served"
    );
}

#[test]
fn real_model_a_seeded_stream_resumed_elsewhere_goes_on_as_the_same_stream() {
    let (engine, text) = engine(2, 512);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let mut ties = 0;
    for (seed, prompt) in (100_u64..).zip(prompts(&text).iter().take(6)) {
        let sampling = Sampling {
            temperature: 0.9,
            seed,
            ..Sampling::default()
        };
        let task = Task {
            sampling,
            ignore_eos: true,
            ..greedy()
        };
        let whole = driver.alone(prompt, &task, 40).tokens;
        for at in [1_u32, 13, 39] {
            let known = [prompt.as_slice(), &whole[..at as usize]].concat();
            let resumed = Task {
                first_index: at,
                ..task.clone()
            };
            driver.admit(1, &known, &resumed);
            let rest = driver.finish(1, 40 - at as usize).tokens;
            let got = [&whole[..at as usize], &rest].concat();
            let what = format!("seed {seed} resumed at {at}");
            ties += plain.same_or_near_draw(&what, prompt, &whole, &got, (seed, 0.9));
        }
    }
    eprintln!("near draws: {ties} of 18");
    assert!(
        ties <= 2,
        "{ties} of 18 parted: more than rounding explains"
    );
}

#[test]
fn real_model_a_batch_invariant_stream_is_the_same_in_company_and_resumed() {
    let (engine, text) = engine(4, 512);
    let mut driver = Driver::new(engine);
    let prompt = long_prompt(&text, 90);
    let invariant = Task {
        batch_invariant: true,
        ignore_eos: true,
        ..greedy()
    };
    let alone = driver.alone(&prompt, &invariant, 40).tokens;
    for slot in 1..4 {
        driver.admit(
            slot,
            &long_prompt(&text, 60 + slot as usize),
            &Task {
                ignore_eos: true,
                ..greedy()
            },
        );
    }
    driver.step();
    driver.admit(0, &prompt, &invariant);
    let company = driver.finish(0, 40).tokens;
    assert_eq!(company, alone, "the same, to the token");
    assert!(
        driver.outputs[1].tokens.len() > 20,
        "the others were not drained meanwhile"
    );

    let known = [prompt.as_slice(), &alone[..17]].concat();
    driver.admit(
        0,
        &known,
        &Task {
            first_index: 17,
            ..invariant
        },
    );
    assert_eq!(
        driver.finish(0, 23).tokens,
        alone[17..],
        "resumed: the same, to the token"
    );
}

#[test]
fn real_model_logprobs_are_those_of_the_plain_logits() {
    let (engine, text) = engine(1, 512);
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let prompt = chat(&text, "How many legs does a spider have?");
    driver.admit(
        0,
        &prompt,
        &Task {
            logprobs: Some(5),
            ..greedy()
        },
    );
    let mut out = Vec::new();
    while out.is_empty() {
        driver.engine.step(&driver.pulse, &mut out).expect("a step");
    }
    let logprobs = &out[0].logprobs[0];
    let logits = plain.logits(&prompt);
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mass: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    assert_eq!(logprobs.top.len(), 5);
    assert_eq!(logprobs.top[0].id, out[0].tokens[0]);
    for entry in &logprobs.top {
        let expected = f64::from(logits[entry.id as usize] - top) - mass.ln();
        assert!(
            (f64::from(entry.logprob) - expected).abs() < 0.1,
            "{entry:?}, {expected}"
        );
        let mut bytes = Vec::new();
        text.piece(entry.id, &mut bytes);
        assert_eq!(entry.bytes, bytes);
    }
}

#[test]
fn real_model_warm_up_beats_and_leaves_nothing_behind() {
    let (mut engine, text) = engine(6, 512);
    let pulse = Pulse::default();
    engine.warm(&pulse).expect("warm");
    // 1, 2, 4 and 6 rows, and at least one prefill.
    assert!(pulse.read() >= 5, "{} beats", pulse.read());
    assert!(
        (8..64).contains(&engine.prefill_chunk()),
        "{}",
        engine.prefill_chunk()
    );
    let mut plain = Plain::new(&text);
    let mut driver = Driver::new(engine);
    let prompt = chat(&text, "Who wrote Pride and Prejudice?");
    let cached = Task {
        cache_prompt: true,
        ..greedy()
    };
    assert_eq!(driver.admit(0, &prompt, &cached), 0);
    let got = driver.finish(0, 16).tokens;
    let expected = plain.greedy(&prompt, 16);
    plain.same_or_near_tie("after warm-up", &prompt, &expected, &got);
}

#[test]
fn real_model_what_cannot_be_admitted_is_rejected_and_harms_nobody() {
    let (engine, text) = engine(2, 128);
    let mut driver = Driver::new(engine);
    let prompt = chat(&text, "Hi");
    driver.admit(0, &prompt, &greedy());
    let vocabulary = driver.engine.limits().vocabulary;
    let biased = Sampling {
        logit_bias: vec![(vocabulary, 1.0)],
        ..Sampling::default()
    };
    let refusals = [
        driver.engine.admit(Slot(1), &[], &greedy()),
        driver.engine.admit(Slot(1), &[vocabulary], &greedy()),
        driver.engine.admit(
            Slot(1),
            &[1, 2],
            &Task {
                first_index: 3,
                ..greedy()
            },
        ),
        driver.engine.admit(
            Slot(1),
            &prompt,
            &Task {
                sampling: biased,
                ..greedy()
            },
        ),
        driver.engine.admit(Slot(2), &prompt, &greedy()),
        driver.engine.admit(Slot(0), &prompt, &greedy()),
    ];
    for refused in refusals {
        assert!(
            matches!(refused, Err(EngineError::Rejected(_))),
            "{refused:?}"
        );
    }
    assert!(!driver.finish(0, 8).tokens.is_empty());
}

/// A small generator for the tests' own choices.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % bound
    }
}
