//! Waiting: bounds, time-outs, clients that leave, comments while nothing happens.

mod system;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use system::client::{self, Events, chat};
use system::{Start, System};

const CHAT: &str = "/v1/chat/completions";

/// Whoever computes a prompt with this word dies: it stands in prompts that must never start.
const NEVER: &str = "crash=abort,crash_on=NEVER";

fn ask(content: &str, max_tokens: u32) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": max_tokens })
}

fn await_waiting(system: &System, waiting: u32) {
    system.await_status("that many wait", |status| {
        status["queue"]["waiting"] == waiting
    });
}

#[test]
fn the_request_over_the_limit_is_refused_at_once_with_depth_and_limit() {
    let system = System::scripted("step_us=5000", &["--slots", "1", "--queue", "2"]);
    let mut running = Events::open(&system.address, CHAT, &chat("runs", 4000));
    running.next_text();
    let waiting: Vec<_> = (0..2)
        .map(|_| Events::open(&system.address, CHAT, &chat("waits", 1)))
        .collect();
    await_waiting(&system, 2);
    let begun = Instant::now();
    let refused = client::post(&system.address, CHAT, &ask("one too many", 1));
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(
        refused.head.to_ascii_lowercase().contains("retry-after: "),
        "{}",
        refused.head
    );
    let error = &refused.body["error"];
    assert_eq!(error["code"], "queue_full");
    assert_eq!((&error["depth"], &error["limit"]), (&json!(2), &json!(2)));
    let words = error["message"].as_str().unwrap();
    assert!(words.contains("2 of 2"), "{words}");
    // Those that were let in are not touched by it.
    drop(running);
    for mut stream in waiting {
        stream.whole().assert_complete();
    }
}

#[test]
fn sixteen_streams_at_default_settings_all_complete() {
    let system = System::scripted("step_us=2000", &[]);
    let slots = system.status()["instances"][0]["slots"].as_u64().unwrap();
    let most = std::thread::scope(|scope| {
        let streams: Vec<_> = (0..16)
            .map(|number| {
                let body = chat(&format!("agent {number}"), 50);
                let address = &system.address;
                scope.spawn(move || client::stream(address, &body))
            })
            .collect();
        let mut most = 0;
        while !streams.iter().all(|stream| stream.is_finished()) {
            let status = system.status();
            most = most.max(status["instances"][0]["running"].as_u64().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        for stream in streams {
            stream.join().unwrap().assert_complete();
        }
        most
    });
    assert!(most > 1, "they never ran together");
    assert!(most <= slots, "{most} on {slots} slots");
}

#[test]
fn what_waited_too_long_gets_504_and_never_starts_and_what_runs_may_take_longer() {
    let system = System::scripted(
        &format!("step_us=5000,{NEVER}"),
        &["--slots", "1", "--queue-timeout", "1s"],
    );
    let mut running = Events::open(
        &system.address,
        CHAT,
        &chat("longer than the time-out", 600),
    );
    running.next_text();
    for body in [ask("NEVER", 1), chat("NEVER", 1)] {
        let begun = Instant::now();
        let expired = client::post(&system.address, CHAT, &body);
        assert_eq!(expired.status, 504, "{expired:?}");
        assert_eq!(expired.body["error"]["code"], "queue_timeout");
        assert!(
            begun.elapsed() >= Duration::from_secs(1),
            "{:?}",
            begun.elapsed()
        );
    }
    running.whole().assert_complete();
    client::stream(&system.address, &chat("the slot is free", 3)).assert_complete();
    assert_eq!(
        system.status()["counters"]["worker_exits"],
        0,
        "it started later"
    );
}

#[test]
fn a_client_that_leaves_the_queue_never_reaches_a_worker() {
    let system = System::scripted(&format!("step_us=5000,{NEVER}"), &["--slots", "1"]);
    let mut running = Events::open(&system.address, CHAT, &chat("runs", 4000));
    running.next_text();
    let leaves = [
        Events::open(&system.address, CHAT, &chat("NEVER", 1)),
        Events::open(&system.address, CHAT, &ask("NEVER", 1)),
        Events::open(
            &system.address,
            "/v1/completions",
            &json!({ "prompt": "NEVER", "max_tokens": 1 }),
        ),
    ];
    await_waiting(&system, 3);
    drop(leaves);
    await_waiting(&system, 0);
    drop(running);
    client::stream(&system.address, &chat("the slot is free", 3)).assert_complete();
    let status = system.status();
    assert_eq!(
        status["counters"]["worker_exits"], 0,
        "it started all the same"
    );
    assert_eq!(status["counters"]["cancelled"], 4, "{status:#}");
    let counted = system.metric_with(
        "dispatcher_requests_cancelled_total",
        &["reason=\"client_disconnect\""],
    );
    assert_eq!(counted, 4.0);
}

#[test]
fn streams_that_wait_or_prefill_get_their_status_and_comments_in_time() {
    // A prompt of its own tokens at 30 ms each: more than half a minute.
    let system = System::scripted(
        "chunk=8,prefill_us=30000",
        &["--slots", "1", "--stall-after", "60s"],
    );
    let begun = Instant::now();
    let prefills = chat(&"!".repeat(1000), 3);
    let mut prefills = Events::open(&system.address, CHAT, &prefills);
    system.await_status("prefills", |status| status["queue"]["running"] == 1);
    let mut waits = Events::open(&system.address, CHAT, &chat("waits", 3));
    std::thread::scope(|scope| {
        for stream in [&mut prefills, &mut waits] {
            scope.spawn(move || {
                assert!(stream.head().starts_with("HTTP/1.1 200"));
                let head = begun.elapsed();
                // 10 s is the promise, 15 s a client's patience at its shortest.
                assert!(head >= Duration::from_secs(9), "{head:?}");
                assert!(head <= Duration::from_secs(15), "{head:?}");
                let comment = loop {
                    let event = stream.next().expect("the stream goes on");
                    if event.starts_with(':') {
                        break begun.elapsed();
                    }
                    assert!(event.contains("\"role\""), "{event}");
                };
                assert!(comment - head <= Duration::from_secs(20), "{comment:?}");
                stream.whole().assert_complete();
            });
        }
    });
}

#[test]
fn what_arrives_while_the_model_loads_waits_and_its_wait_is_in_its_times() {
    let system = Start::scripted("load_ms=1500", &["--slots", "2"]).launch();
    assert_eq!(system.status()["ready"], false);
    assert_eq!(client::get_blocking(&system.address, "/ready").0, 503);
    let whole = client::stream(&system.address, &chat("early", 5));
    whole.assert_complete();
    let timings = whole.timings.clone().unwrap();
    let (queue, ttft) = (&timings["queue_ms"], &timings["ttft_ms"]);
    assert!(ttft.as_f64().unwrap() >= 500.0, "{timings:#}");
    assert!(queue.as_f64().unwrap() >= 500.0, "{timings:#}");
    assert!(system.metric("vllm:time_to_first_token_seconds_sum") >= 0.5);
}
