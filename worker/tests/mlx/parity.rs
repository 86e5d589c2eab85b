//! Logits and greedy text equal to those of mlx-lm.

use std::path::Path;

use serde_json::Value;
use worker::engine::mlx::Unpacking;
use worker::engine::{LoadOptions, Slot, TextModel};

use super::plain::{CASES, Parting, alone, case, greedy, load, parting, step, together, turn};

/// As many as the reference's greedy texts of the real model have at most.
const GREEDY_TOKENS: usize = 64;
const PROMPTS: usize = 12;

fn expected(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn logits_of_every_family_are_those_of_mlx_lm() {
    let _turn = turn();
    for (name, packed) in CASES {
        let want = expected(&case(name));
        let rows: Vec<Vec<f32>> = serde_json::from_value(want["logits"].clone()).unwrap();
        let forms = [Unpacking::Never, Unpacking::Always];
        for unpacking in &forms[..if packed { 2 } else { 1 }] {
            let mut loaded = load(&case(name), *unpacking).unwrap();
            let found = loaded.engine.score(&ids(&want["prompt"])).unwrap();
            assert_eq!(found.len(), rows.len());
            let pairs = found.iter().flatten().zip(rows.iter().flatten());
            let worst = pairs.fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
            println!("{name}, {unpacking:?}: {worst:e} apart at most");
            assert!(worst <= 1e-4, "{name}, {unpacking:?}: {worst:e} apart");
        }
    }
}

#[test]
fn greedy_tokens_of_every_family_are_those_of_mlx_lm() {
    let _turn = turn();
    let mut ties = 0;
    for (name, _) in CASES {
        let want = expected(&case(name));
        let (prompt, tokens) = (ids(&want["prompt"]), ids(&want["greedy"]));
        let mut loaded = load(&case(name), Unpacking::Never).unwrap();
        let found = alone(&mut loaded.engine, &prompt, &greedy(), tokens.len());
        match parting(&mut loaded, &prompt, &found, &tokens) {
            Parting::Equal => {}
            Parting::NearTie(..) => ties += 1,
            apart @ Parting::Apart(..) => panic!("{name}: {apart:?}"),
        }
    }
    println!("{ties} near ties");
}

#[test]
fn real_model_mlx_answers_as_mlx_lm_does() {
    let _turn = turn();
    let folder = case("smollm2");
    let mut loaded = load(&folder, Unpacking::Always).unwrap();
    let mut ties = 0;
    let rows = expected(&folder);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), PROMPTS);
    let task = worker::engine::Task {
        ignore_eos: false,
        ..greedy()
    };
    let prompts: Vec<Vec<u32>> = rows.iter().map(|row| ids(&row["prompt"])).collect();
    let answers = together(&mut loaded.engine, &prompts, &task, GREEDY_TOKENS);
    for ((row, prompt), found) in rows.iter().zip(prompts).zip(answers) {
        let text = row["text"].as_str().unwrap();
        let tokens = ids(&row["greedy"]);
        assert_eq!(loaded.text.tokenise(text, false), prompt, "{text:?}");
        match parting(&mut loaded, &prompt, &found, &tokens) {
            Parting::Equal => {
                let mut bytes = Vec::new();
                for token in found {
                    loaded.text.piece(token, &mut bytes);
                }
                let answer = row["answer"].as_str().unwrap();
                // A cut may fall inside of a character, which the two spell differently.
                let ours = String::from_utf8_lossy(&bytes);
                let whole = |s: &str| s.trim_end_matches('\u{fffd}').to_owned();
                assert_eq!(whole(&ours), whole(answer));
            }
            Parting::NearTie(..) => ties += 1,
            apart @ Parting::Apart(..) => panic!("{text:?}: {apart:?}"),
        }
    }
    println!("{ties} near ties");
}

#[test]
fn real_model_mlx_packed_and_unpacked_weights_agree() {
    let _turn = turn();
    let folder = case("smollm2");
    let prompt = ids(&expected(&folder)[0]["prompt"]);
    let rows: Vec<Vec<Vec<f32>>> = [Unpacking::Never, Unpacking::Always]
        .into_iter()
        .map(|unpacking| {
            let mut loaded = load(&folder, unpacking).unwrap();
            loaded.engine.score(&prompt).unwrap()
        })
        .collect();
    let pairs = rows[0].iter().flatten().zip(rows[1].iter().flatten());
    let worst = pairs.fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
    println!("{worst:e} apart at most");
    assert!(worst <= 1e-3, "{worst:e} apart");
}

#[test]
fn real_model_mlx_speed_is_printed() {
    let _turn = turn();
    let options = LoadOptions {
        slots: 32,
        ..super::plain::options(&case("smollm2"), 32)
    };
    for unpacking in [Unpacking::Always, Unpacking::Never] {
        let load = worker::engine::mlx::load_unpacking(&options, unpacking, Box::new(|_| {}));
        let mut engine = load.unwrap().engine;
        let batches: &[u32] = if unpacking == Unpacking::Always {
            &[1, 4, 8, 16, 32]
        } else {
            &[1, 4]
        };
        for &batch in batches {
            for slot in 0..batch {
                let prompt = [slot + 1, 2 * slot + 1, 5, 7];
                worker::engine::Engine::admit(&mut engine, Slot(slot), &prompt, &greedy()).unwrap();
            }
            while step(&mut engine).0.prefill_tokens > 0 {}
            let start = std::time::Instant::now();
            let steps = 8;
            for _ in 0..steps {
                let (report, emissions) = step(&mut engine);
                assert_eq!(report.batch, batch);
                assert_eq!(emissions.len(), batch as usize);
            }
            let rate = f64::from(steps * batch) / start.elapsed().as_secs_f64();
            println!("{unpacking:?} batch {batch}: {rate:.1} tok/s");
            for slot in 0..batch {
                worker::engine::Engine::release(&mut engine, Slot(slot));
            }
        }
    }
}
