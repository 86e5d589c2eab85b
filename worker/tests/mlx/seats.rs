//! Seats: prefix reuse, resumption, the end of the context, refusals, the bounds of memory.

use proto::generate::{FinishReason, Sampling};
use worker::engine::mlx::Unpacking;
use worker::engine::{
    Engine, EngineError, LoadError, LoadOptions, Pulse, Rejected, Slot, SlotEnd, Task, TextModel,
};

use super::plain::{Random, alone, case, greedy, load, options, step, turn};

#[test]
fn a_prefix_is_reused_up_to_the_last_token_and_gives_the_same_tokens() {
    let _turn = turn();
    let mut loaded = load(&case("qwen2-untied"), Unpacking::Never).unwrap();
    let mut random = Random(5);
    let prompt = random.tokens(70);
    let cold = alone(&mut loaded.engine, &prompt, &greedy(), 12);
    let longer = [&prompt[..], &cold[..6], &random.tokens(4)].concat();
    let expected = alone(&mut loaded.engine, &longer, &greedy(), 12);
    let task = Task {
        cache_prompt: true,
        ..greedy()
    };
    let all: Vec<Slot> = (0..8).map(Slot).collect();

    // Slot 0 holds `longer` and its answer; the slot to take is that one, whatever else is free.
    assert_eq!(loaded.engine.best_slot(&longer, &all), Some(Slot(0)));
    assert_eq!(loaded.engine.admit(Slot(0), &longer, &task).unwrap(), 79);
    loaded.engine.release(Slot(0));
    let found = alone(&mut loaded.engine, &longer, &task, 12);
    assert_eq!(found, expected);
    // A prompt that parts from it after 40 tokens keeps those.
    let other = [&prompt[..40], &random.tokens(20)].concat();
    assert_eq!(loaded.engine.admit(Slot(0), &other, &task).unwrap(), 40);
    loaded.engine.release(Slot(0));
    // Neither a task that forbids it nor one that must not depend on history reuses anything.
    assert_eq!(loaded.engine.admit(Slot(0), &other, &greedy()).unwrap(), 0);
    loaded.engine.release(Slot(0));
    let invariant = Task {
        batch_invariant: true,
        ..task
    };
    assert_eq!(loaded.engine.admit(Slot(0), &other, &invariant).unwrap(), 0);
}

#[test]
fn a_sequence_released_in_the_middle_of_its_prefill_leaves_a_true_prefix() {
    let _turn = turn();
    let mut loaded = load(&case("llama-tied"), Unpacking::Never).unwrap();
    let prompt = Random(6).tokens(200);
    let expected = alone(&mut loaded.engine, &prompt, &greedy(), 8);
    let task = Task {
        cache_prompt: true,
        ..greedy()
    };
    loaded.engine.admit(Slot(1), &prompt, &greedy()).unwrap();
    let (report, _) = step(&mut loaded.engine);
    assert!(report.prefill_tokens < 200 && report.batch == 0);
    loaded.engine.release(Slot(1));
    let reused = loaded.engine.admit(Slot(1), &prompt, &task).unwrap();
    assert_eq!(reused, report.prefill_tokens);
    let mut found = Vec::new();
    while found.len() < 8 {
        found.extend(
            step(&mut loaded.engine)
                .1
                .into_iter()
                .flat_map(|e| e.tokens),
        );
    }
    assert_eq!(found, expected);
}

#[test]
fn a_resumed_stream_goes_on_as_it_would_have() {
    let _turn = turn();
    let mut loaded = load(&case("llama-scaled"), Unpacking::Never).unwrap();
    let prompt = Random(8).tokens(30);
    let sampled = Task {
        sampling: Sampling {
            temperature: 1.0,
            frequency_penalty: 0.5,
            seed: 99,
            ..Sampling::default()
        },
        ..greedy()
    };
    for task in [greedy(), sampled] {
        let whole = alone(&mut loaded.engine, &prompt, &task, 20);
        for cut in [1, 9, 19] {
            let so_far = [&prompt[..], &whole[..cut]].concat();
            let rest = Task {
                first_index: u32::try_from(cut).unwrap(),
                ..task.clone()
            };
            let found = alone(&mut loaded.engine, &so_far, &rest, 20 - cut);
            assert_eq!(found, whole[cut..], "cut at {cut}");
        }
    }
}

#[test]
fn a_full_context_ends_the_row_and_no_other() {
    let _turn = turn();
    let mut loaded = load(&case("llama-tied"), Unpacking::Never).unwrap();
    let mut random = Random(9);
    loaded
        .engine
        .admit(Slot(0), &random.tokens(250), &greedy())
        .unwrap();
    loaded
        .engine
        .admit(Slot(1), &random.tokens(3), &greedy())
        .unwrap();
    let (mut first, mut second) = (0, 0);
    let mut end = None;
    while end.is_none() {
        for emission in step(&mut loaded.engine).1 {
            if emission.slot == Slot(0) {
                first += emission.tokens.len();
                end = emission.end;
            } else {
                second += emission.tokens.len();
                assert_eq!(emission.end, None);
            }
        }
    }
    assert_eq!(end, Some(SlotEnd::Finished(FinishReason::Length)));
    assert_eq!(first, 6, "250 and 6 are the context");
    let (report, emissions) = step(&mut loaded.engine);
    assert_eq!((report.batch, emissions.len()), (1, 1));
    assert!(second > 0);
}

#[test]
fn an_end_token_ends_the_row_without_being_emitted() {
    let _turn = turn();
    let mut loaded = load(&case("llama-tied"), Unpacking::Never).unwrap();
    let prompt = Random(10).tokens(5);
    assert!(loaded.text.is_end(257));
    let task = Task {
        sampling: Sampling {
            logit_bias: vec![(257, 1e3)],
            ..greedy().sampling
        },
        ignore_eos: false,
        ..greedy()
    };
    loaded.engine.admit(Slot(2), &prompt, &task).unwrap();
    let (_, emissions) = step(&mut loaded.engine);
    assert_eq!(emissions.len(), 1);
    assert!(emissions[0].tokens.is_empty());
    assert_eq!(
        emissions[0].end,
        Some(SlotEnd::Finished(FinishReason::Stop))
    );
    let ignoring = Task {
        ignore_eos: true,
        ..task
    };
    assert_eq!(alone(&mut loaded.engine, &prompt, &ignoring, 2), [257, 257]);
}

#[test]
fn what_cannot_be_admitted_is_rejected_and_the_engine_lives() {
    let _turn = turn();
    let mut loaded = load(&case("llama-tied"), Unpacking::Never).unwrap();
    let mut random = Random(11);
    let wild = Task {
        sampling: Sampling {
            temperature: f32::NAN,
            ..Sampling::default()
        },
        ..greedy()
    };
    let beyond = Task {
        first_index: 4,
        ..greedy()
    };
    let three = random.tokens(3);
    for (prompt, task) in [
        (Vec::new(), greedy()),
        (random.tokens(256), greedy()),
        (vec![320], greedy()),
        (three.clone(), wild),
        (three.clone(), beyond),
    ] {
        let refused = loaded.engine.admit(Slot(0), &prompt, &task);
        let is_clients = matches!(refused, Err(EngineError::Rejected(Rejected::Request(_))));
        assert!(is_clients, "{refused:?}");
    }
    loaded.engine.admit(Slot(0), &three, &greedy()).unwrap();
    for slot in [0, 8] {
        let refused = loaded.engine.admit(Slot(slot), &three, &greedy());
        assert!(matches!(
            refused,
            Err(EngineError::Rejected(Rejected::Row(_)))
        ));
    }
    assert_eq!(step(&mut loaded.engine).1.len(), 1);
}

#[test]
fn the_pulse_moves_in_warm_up_and_in_every_step() {
    let _turn = turn();
    let mut loaded = load(&case("qwen3-tied-6bit"), Unpacking::Never).unwrap();
    let pulse = Pulse::default();
    loaded.engine.warm(&pulse).unwrap();
    let warmed = pulse.read();
    assert!(warmed >= 2);
    loaded
        .engine
        .admit(Slot(0), &Random(1).tokens(40), &greedy())
        .unwrap();
    let mut out = Vec::new();
    for expected in 1..=6 {
        loaded.engine.step(&pulse, &mut out).unwrap();
        assert_eq!(pulse.read(), warmed + expected);
    }
}

#[test]
fn memory_stays_bounded_while_sequences_come_and_go() {
    let _turn = turn();
    let mut loaded = load(&case("llama-tied"), Unpacking::Never).unwrap();
    let mut random = Random(12);
    let mut round = |loaded: &mut worker::engine::mlx::LoadedMlx| {
        for slot in 0..8 {
            let length = 1 + random.index(250);
            loaded
                .engine
                .admit(Slot(slot), &random.tokens(length), &greedy())
                .unwrap();
        }
        for _ in 0..12 {
            step(&mut loaded.engine);
        }
        for slot in 0..8 {
            loaded.engine.release(Slot(slot));
        }
        mlx_rs::memory::active_memory().unwrap()
    };
    for _ in 0..6 {
        round(&mut loaded);
    }
    let limits = loaded.engine.limits();
    let caches = limits.kv_bytes_per_token * u64::from(limits.context_tokens) * 8;
    for _ in 0..20 {
        let active = round(&mut loaded) as u64;
        let bound = limits.weight_bytes_per_step + caches + (4 << 20);
        assert!(
            active <= bound,
            "{active} bytes are in use, {bound} are accounted for"
        );
    }
}

#[test]
fn a_decoded_token_does_not_copy_the_cache() {
    let _turn = turn();
    let folder = case("llama-tied");
    let options = LoadOptions {
        context_tokens: 8192,
        ..options(&folder, 1)
    };
    let mut engine = worker::engine::mlx::load(&options, Box::new(|_| {}))
        .unwrap()
        .engine;
    let limits = engine.limits();
    engine
        .admit(Slot(0), &Random(13).tokens(6000), &greedy())
        .unwrap();
    while step(&mut *engine).0.batch == 0 {}
    // Within a block: a step that has to grow the cache does copy it, once in an eighth of its size.
    let mut copied = 0;
    for _ in 0..8 {
        mlx_rs::memory::reset_peak_memory().unwrap();
        let before = mlx_rs::memory::active_memory().unwrap();
        step(&mut *engine);
        let peak = mlx_rs::memory::peak_memory()
            .unwrap()
            .saturating_sub(before);
        copied = copied.max(peak as u64);
    }
    let one_layer = limits.kv_bytes_per_token * 6000 / 3;
    println!("{copied} bytes beside those in use; a layer's cache has {one_layer}");
    assert!(copied < one_layer / 2, "{copied} of {one_layer} bytes");
}

#[test]
fn a_context_that_memory_cannot_hold_is_refused_with_figures() {
    let _turn = turn();
    let folder = case("llama-tied");
    let load = |context_tokens, slots| {
        let options = LoadOptions {
            context_tokens,
            ..options(&folder, slots)
        };
        worker::engine::mlx::load(&options, Box::new(|_| {})).map(|l| l.engine.limits())
    };
    let Err(LoadError::Permanent(words)) = load(1 << 30, 64) else {
        panic!("a context of 2^30 tokens was accepted");
    };
    assert!(
        words.contains("64 slots") && words.contains("MB"),
        "{words}"
    );
    assert_eq!(
        load(0, 2).unwrap().context_tokens,
        512,
        "what config.json says"
    );
}
