//! Streams on the real model, each interrupted by the death of its worker, against the same streams uninterrupted.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod near_tie;
mod system;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system::System;
use system::client::Events;
use system::plain::{Plain, parting};

const STREAMS: usize = 100;
const TOKENS: usize = 64;
const SEED: u64 = 20_261_201;

const SUBJECTS: [&str; 10] = [
    "a lighthouse",
    "the sea",
    "bread",
    "a train journey",
    "winter",
    "an old clock",
    "bees",
    "a market",
    "the moon",
    "paper",
];
const TASKS: [&str; 10] = [
    "Write a short story about",
    "Explain to a child",
    "List facts about",
    "Describe",
    "Write a letter about",
    "Give advice concerning",
    "Write a poem about",
    "Summarise what you know of",
    "Ask five questions about",
    "Invent a legend of",
];

struct Ids {
    prompt: Vec<u32>,
    output: Vec<u32>,
}

fn body(index: usize) -> Value {
    json!({
        "messages": [{
            "role": "user",
            "content": format!("{} {}.", TASKS[index / 10], SUBJECTS[index % 10]),
        }],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "return_token_ids": true,
        "cache_prompt": false,
    })
}

fn collect(ids: &mut Ids, event: &str, attempts: &mut u64) {
    let Ok(value) = serde_json::from_str::<Value>(event) else {
        return;
    };
    assert!(value.get("error").is_none(), "{value}");
    let numbers = |value: &Value| -> Vec<u32> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
            .collect()
    };
    if value["prompt_token_ids"].is_array() {
        ids.prompt = numbers(&value["prompt_token_ids"]);
    }
    ids.output
        .extend(numbers(&value["choices"][0]["token_ids"]));
    if let Some(count) = value["timings"]["attempts"].as_u64() {
        *attempts = count;
    }
}

/// One stream; its worker is killed once `cut` tokens have come.
fn stream(system: &System, index: usize, cut: Option<usize>) -> (Ids, u64) {
    let mut events = Events::open(&system.address, "/v1/chat/completions", &body(index));
    let mut ids = Ids {
        prompt: Vec::new(),
        output: Vec::new(),
    };
    let mut attempts = 0;
    let mut cut = cut;
    while let Some(event) = events.next() {
        collect(&mut ids, &event, &mut attempts);
        if cut.is_some_and(|cut| ids.output.len() >= cut) {
            cut = None;
            let status = system.status();
            let busy = status["instances"]
                .as_array()
                .unwrap()
                .iter()
                .find(|instance| instance["running"].as_u64() == Some(1))
                .cloned();
            if let Some(busy) = busy {
                system::kill(
                    u32::try_from(busy["pid"].as_u64().unwrap()).unwrap(),
                    Signal::SIGKILL,
                );
            }
        }
    }
    (ids, attempts)
}

#[test]
fn real_model_streams_interrupted_once_end_as_they_would_have_or_part_at_a_near_tie() {
    println!("seed {SEED}");
    let system = System::llama(&[
        "--instances",
        "2",
        "--slots",
        "1",
        "--max-crashes",
        "1000",
        "--suspect-after",
        "1000",
    ]);
    let mut random = SEED;
    let mut equal = 0;
    let mut interrupted = 0;
    let mut partings = Vec::new();
    for index in 0..STREAMS {
        let (whole, attempts) = stream(&system, index, None);
        assert_eq!(attempts, 1);
        assert_eq!(whole.output.len(), TOKENS, "stream {index}");
        // A linear congruential generator is random enough to spread the cuts evenly.
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let cut = 1 + usize::try_from(random >> 33).unwrap() % (TOKENS - 8);
        let (resumed, attempts) = stream(&system, index, Some(cut));
        assert_eq!(resumed.output.len(), TOKENS, "stream {index} cut at {cut}");
        interrupted += usize::from(attempts == 2);
        match parting(&whole.output, &resumed.output) {
            None => equal += 1,
            Some(at) => partings.push((index, cut, at, whole, resumed)),
        }
        system.await_status("both instances ready", |status| {
            status["instances"]
                .as_array()
                .unwrap()
                .iter()
                .all(|i| i["state"] == "ready")
        });
    }
    println!("{interrupted} of {STREAMS} interrupted, {equal} equal to the uninterrupted stream");
    drop(system);
    let plain = Plain::load(&system::model());
    for (index, cut, at, whole, resumed) in &partings {
        let mut prefix = whole.prompt.clone();
        prefix.extend_from_slice(&whole.output[..*at]);
        let gap = plain.gap(&prefix, whole.output[*at], resumed.output[*at]);
        println!("stream {index}, cut at {cut}, parts at {at} with a gap of {gap}");
        assert!(*at >= *cut, "stream {index} changed before it was cut");
        assert!(
            gap <= near_tie::epsilon("llama", "q4_1"),
            "stream {index} parts at {at} where no near tie is: gap {gap}"
        );
    }
    assert!(
        interrupted >= STREAMS * 95 / 100,
        "only {interrupted} were interrupted"
    );
    assert!(
        equal >= STREAMS * 95 / 100,
        "only {equal} of {STREAMS} are equal"
    );
}

#[test]
fn real_model_greedy_text_through_the_system_is_that_of_the_bare_library() {
    let system = System::llama(&["--instances", "1", "--slots", "4", "--threads", "2"]);
    let streams: Vec<_> = (0..8)
        .map(|index| stream(&system, index * 11, None).0)
        .collect();
    drop(system);
    let plain = Plain::load(&system::model());
    let mut equal = 0;
    for (index, ids) in streams.iter().enumerate() {
        let expected = plain.greedy(&ids.prompt, TOKENS);
        match parting(&expected, &ids.output) {
            None => equal += 1,
            Some(at) => {
                let mut prefix = ids.prompt.clone();
                prefix.extend_from_slice(&expected[..at]);
                let gap = plain.gap(&prefix, expected[at], ids.output[at]);
                println!("stream {index} parts at {at} with a gap of {gap}");
                assert!(
                    gap <= near_tie::epsilon("llama", "q4_1"),
                    "stream {index} parts at {at}, no near tie: gap {gap}"
                );
            }
        }
    }
    assert!(equal >= 7, "only {equal} of 8 equal the bare library");
}
