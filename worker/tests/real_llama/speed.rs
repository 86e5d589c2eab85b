//! How fast it is here and now: figures for people, no bounds that a busy machine could break.

use std::time::{Duration, Instant};

use worker::engine::{Engine, Pulse, Task};

use crate::stream::{Driver, engine, greedy, long_prompt, prompts};

#[test]
#[ignore = "measures for a minute, and means something on a quiet machine only"]
fn real_model_speed() {
    for slots in [1_u32, 2, 4, 8, 16] {
        let (mut engine, text) = engine(slots, 512);
        engine.warm(&Pulse::default()).expect("warm");
        let chunk = engine.prefill_chunk();
        let mut driver = Driver::new(engine);
        let prompts = prompts(&text);
        let task = Task {
            ignore_eos: true,
            ..greedy()
        };
        for slot in 0..slots {
            driver.admit(slot, &prompts[slot as usize % prompts.len()], &task);
        }
        while driver.outputs.iter().any(|o| o.tokens.is_empty()) {
            driver.step();
        }
        let steps = 96;
        let begun = Instant::now();
        for _ in 0..steps {
            driver.step();
        }
        let took = begun.elapsed().as_secs_f64();
        let rate = f64::from(steps) * f64::from(slots) / took;
        let step = took * 1000.0 / f64::from(steps);
        eprintln!("batch {slots}: {rate:.1} tok/s, {step:.1} ms a step, prefill chunk {chunk}");
    }
    let (mut engine, text) = engine(4, 1024);
    engine.warm(&Pulse::default()).expect("warm");
    let mut driver = Driver::new(engine);
    let task = Task {
        ignore_eos: true,
        ..greedy()
    };
    for slot in 0..3 {
        driver.admit(slot, &prompts(&text)[slot as usize], &task);
        while driver.outputs[slot as usize].tokens.is_empty() {
            driver.step();
        }
    }
    driver.admit(3, &long_prompt(&text, 900), &task);
    let begun = Instant::now();
    let mut longest = Duration::ZERO;
    while driver.outputs[3].tokens.is_empty() {
        let step = Instant::now();
        driver.step();
        longest = longest.max(step.elapsed());
    }
    eprintln!(
        "900 tokens joined 3 streams in {:?}, longest step {longest:?}",
        begun.elapsed()
    );
}
