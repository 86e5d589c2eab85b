//! Clients that leave: their slot is free at once, and nobody else notices.

mod system;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use system::System;
use system::client::{self, Events, chat};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// From the client's leaving to a free slot: the promise is 500 ms, a loaded machine gets five times that.
const FREE_WITHIN: Duration = Duration::from_millis(2500);

fn body(route: &str, prompt: &str, stream: bool) -> Value {
    let mut body = json!({ "max_tokens": 4000, "stream": stream, "temperature": 0 });
    if route == CHAT {
        body["messages"] = json!([{ "role": "user", "content": prompt }]);
    } else {
        body["prompt"] = json!(prompt);
    }
    body
}

fn assert_free_within(system: &System, what: &str) {
    let begun = Instant::now();
    system.await_status(what, |status| {
        status["queue"]["running"] == 0 && status["instances"][0]["running"] == 0
    });
    assert!(
        begun.elapsed() < FREE_WITHIN,
        "{what}: {:?}",
        begun.elapsed()
    );
    system.await_status(what, |status| status["instances"][0]["live_slots"] == 0);
    // An idle engine takes no step.
    let steps = system.status()["instances"][0]["steps"].clone();
    assert_eq!(system.status()["instances"][0]["steps"], steps, "{what}");
}

#[test]
fn leaving_frees_the_slot_on_every_route_in_every_mode_and_phase() {
    let mut left = 0;
    for script in [
        // Decoding, a token or four a step.
        "step_us=5000",
        "step_us=5000,burst=4",
        // A prefill of minutes, 16 tokens at a time.
        "chunk=16,prefill_us=5000",
    ] {
        let system = System::scripted(script, &["--instances", "1", "--slots", "2"]);
        let prompt = if script.contains("prefill") {
            "!".repeat(3000)
        } else {
            "leaves".into()
        };
        for route in [CHAT, COMPLETIONS] {
            for stream in [true, false] {
                let what = format!("{script} {route} stream={stream}");
                let client = Events::open(&system.address, route, &body(route, &prompt, stream));
                system.await_status("it is stepped", |status| {
                    status["instances"][0]["live_slots"] == 1
                });
                drop(client);
                assert_free_within(&system, &what);
                left += 1;
            }
        }
        let cancelled = system.metric_with(
            "dispatcher_requests_cancelled_total",
            &["reason=\"client_disconnect\""],
        );
        assert_eq!(cancelled, 4.0, "{script}");
        assert_eq!(system.status()["counters"]["worker_exits"], 0, "{script}");
        client::stream(&system.address, &chat("next", 3)).assert_complete();
    }
    assert_eq!(left, 12);
}

/// SplitMix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[test]
fn clients_that_leave_at_random_cost_no_worker_and_change_no_other_stream() {
    let seed = std::env::var("SOAK_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(0x5eed);
    println!("SOAK_SEED={seed}");
    let system = System::scripted("step_us=1000", &["--instances", "1", "--slots", "8"]);
    let prompts = ["one", "two", "three", "four"];
    let expected: Vec<String> = prompts
        .iter()
        .map(|prompt| client::stream(&system.address, &chat(prompt, 60)).text)
        .collect();
    let (system, expected) = (&system, &expected);
    std::thread::scope(|scope| {
        for client in 0..12_u64 {
            scope.spawn(move || {
                let mut state = seed ^ (client << 32);
                for _ in 0..25 {
                    let which = usize::try_from(draw(&mut state) % 4).unwrap();
                    let mut stream = Events::open(&system.address, CHAT, &chat(prompts[which], 60));
                    if draw(&mut state) % 10 < 3 {
                        for _ in 0..draw(&mut state) % 40 {
                            stream.next_text();
                        }
                        continue;
                    }
                    let whole = stream.whole();
                    assert_eq!(whole.assert_complete().text, expected[which]);
                }
            });
        }
    });
    let status = system.await_status("all have ended", |status| {
        status["queue"]["running"] == 0 && status["queue"]["waiting"] == 0
    });
    let counters = &status["counters"];
    let count = |name: &str| counters[name].as_u64().unwrap();
    assert_eq!(count("worker_exits"), 0, "{counters:#}");
    assert!(count("cancelled") > 30, "{counters:#}");
    // Whoever left before the request was read was never accepted.
    let accepted = count("accepted");
    assert!((290..=304).contains(&accepted), "{counters:#}");
    assert_eq!(
        count("completed") + count("cancelled"),
        accepted,
        "{counters:#}"
    );
}

#[test]
fn a_client_that_never_reads_is_cut_off_and_holds_nobody_up() {
    // Far more than the kernel keeps for a connection.
    let system = System::scripted(
        "step_us=20,burst=8",
        &["--instances", "1", "--slots", "2", "--ctx-size", "1000000"],
    );
    let deaf = Events::open(&system.address, CHAT, &chat("nobody reads this", 900_000));
    system.await_status("it is cut off", |status| {
        // Meanwhile others are served as ever.
        client::stream(&system.address, &chat("beside it", 3)).assert_complete();
        status["counters"]["cancelled"] == 1
    });
    assert_free_within(&system, "its slot is free");
    let counted = system.metric_with(
        "dispatcher_requests_cancelled_total",
        &["reason=\"slow_reader\""],
    );
    assert_eq!(counted, 1.0);
    system.await_log("\"slow_reader\"");
    drop(deaf);
}
