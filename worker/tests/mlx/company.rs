//! A sequence gives the same tokens alone and among others that come and go.

use std::collections::BTreeMap;

use proto::TokenId;
use proto::generate::Sampling;
use worker::engine::mlx::{LoadedMlx, Unpacking};
use worker::engine::{Engine, Slot, Task};

use super::plain::{CASES, Parting, Random, alone, case, greedy, load, parting, step, turn};

struct Request {
    prompt: Vec<TokenId>,
    task: Task,
    count: usize,
    alone: Vec<TokenId>,
}

/// What a request does to those beside it: joins at a step, and leaves when it has its tokens, or
/// midway where nobody waits for the rest.
fn requests(
    loaded: &mut LoadedMlx,
    random: &mut Random,
    count: usize,
    longest: usize,
) -> Vec<Request> {
    (0..count)
        .map(|number| {
            let length = 1 + random.index(longest);
            let prompt = random.tokens(length);
            let mut task = greedy();
            if number % 3 == 1 {
                task.sampling = Sampling {
                    temperature: 0.8,
                    top_p: 0.9,
                    repetition_penalty: 1.1,
                    seed: random.below(1 << 40),
                    ..Sampling::default()
                };
            }
            task.batch_invariant = number % 7 == 3;
            task.cache_prompt = number % 2 == 0;
            let count = 1 + random.index(16);
            let alone_task = Task {
                cache_prompt: false,
                ..task.clone()
            };
            let alone = alone(&mut loaded.engine, &prompt, &alone_task, count);
            Request {
                prompt,
                task,
                count,
                alone,
            }
        })
        .collect()
}

/// Runs all requests on 8 slots, joining at random steps; what each got.
fn together(
    loaded: &mut LoadedMlx,
    random: &mut Random,
    requests: &[Request],
) -> Vec<Vec<TokenId>> {
    let mut found = vec![Vec::new(); requests.len()];
    let mut seated: BTreeMap<Slot, usize> = BTreeMap::new();
    let mut next = 0;
    while next < requests.len() || !seated.is_empty() {
        while next < requests.len() && random.below(2) == 0 {
            let free: Vec<Slot> = (0..8)
                .map(Slot)
                .filter(|s| !seated.contains_key(s))
                .collect();
            let request = &requests[next];
            let Some(slot) = loaded.engine.best_slot(&request.prompt, &free) else {
                break;
            };
            loaded
                .engine
                .admit(slot, &request.prompt, &request.task)
                .unwrap();
            seated.insert(slot, next);
            next += 1;
        }
        let (_, emissions) = step(&mut loaded.engine);
        for emission in emissions {
            let number = seated[&emission.slot];
            found[number].extend(emission.tokens);
            if found[number].len() >= requests[number].count {
                loaded.engine.release(emission.slot);
                seated.remove(&emission.slot);
            }
        }
    }
    found
}

fn compare(name: &str, unpacking: Unpacking, seed: u64, count: usize, longest: usize) {
    let mut random = Random(seed);
    let mut loaded = load(&case(name), unpacking).unwrap();
    let requests = requests(&mut loaded, &mut random, count, longest);
    let found = together(&mut loaded, &mut random, &requests);
    let mut ties = 0;
    for (number, (request, found)) in requests.iter().zip(found).enumerate() {
        if request.task.sampling.temperature > 0.0 {
            assert_eq!(
                found, request.alone,
                "{name}, seed {seed}, request {number}"
            );
            continue;
        }
        match parting(&mut loaded, &request.prompt, &found, &request.alone) {
            Parting::Equal => {}
            Parting::NearTie(..) => ties += 1,
            apart @ Parting::Apart(..) => {
                panic!("{name}, seed {seed}, request {number}: {apart:?}")
            }
        }
    }
    println!("{name}, seed {seed}: {count} requests, {ties} near ties");
}

#[test]
fn who_else_is_in_the_batch_changes_no_token() {
    let _turn = turn();
    for (number, (name, packed)) in (0..).zip(CASES) {
        compare(name, Unpacking::Never, 7_000 + number, 24, 60);
        if packed {
            compare(name, Unpacking::Always, 8_000 + number, 12, 60);
        }
    }
}

#[test]
fn real_model_mlx_who_else_is_in_the_batch_changes_no_token() {
    let _turn = turn();
    compare("smollm2", Unpacking::Always, 9_000, 12, 40);
}

#[test]
fn rows_that_step_alone_give_the_very_same_logprobs_in_any_company() {
    let _turn = turn();
    let mut loaded = load(&case("qwen3-untied"), Unpacking::Never).unwrap();
    let mut random = Random(31);
    let prompt = random.tokens(50);
    let task = Task {
        batch_invariant: true,
        cache_prompt: true,
        logprobs: Some(5),
        ..greedy()
    };
    let mut runs = Vec::new();
    for neighbours in [0, 3, 7] {
        for slot in 0..neighbours {
            let other = random.tokens(5 + 9 * slot as usize);
            loaded.engine.admit(Slot(slot), &other, &greedy()).unwrap();
        }
        loaded.engine.admit(Slot(7), &prompt, &task).unwrap();
        let mut told = Vec::new();
        while told.len() < 10 {
            let (_, emissions) = step(&mut loaded.engine);
            let own = emissions.into_iter().filter(|e| e.slot == Slot(7));
            told.extend(own.flat_map(|e| e.logprobs));
        }
        runs.push(told);
        for slot in 0..8 {
            loaded.engine.release(Slot(slot));
        }
    }
    assert!(runs.windows(2).all(|pair| pair[0] == pair[1]));
}
