//! What must hold while all is well: overlap, measured times, bounded memory, whole characters, no long gap.

mod system;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use system::System;
use system::client::{self, Events, chat};

const CHAT: &str = "/v1/chat/completions";

fn ask(content: &str, max_tokens: u32) -> Value {
    let mut body = chat(content, max_tokens);
    body["stream"] = json!(false);
    body.as_object_mut().unwrap().remove("stream_options");
    body
}

#[test]
fn equal_requests_run_together_and_the_metrics_show_it() {
    let system = System::scripted("step_us=5000", &["--instances", "1", "--slots", "4"]);
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..4)
            .map(|_| {
                let body = ask("equal", 100);
                let address = &system.address;
                scope.spawn(move || client::post(address, CHAT, &body))
            })
            .collect();
        for answer in asked {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 200, "{answer:?}");
            let batch = answer.body["timings"]["batch_mean"].as_f64().unwrap();
            assert!(batch > 1.5, "{answer:?}");
        }
    });
    let label = ["instance=\"0\""];
    let sum = system.metric_with("dispatcher_batch_size_sum", &label);
    let count = system.metric_with("dispatcher_batch_size_count", &label);
    assert!(sum / count > 1.5, "{sum} / {count}");
    assert!(count < 300.0, "{count} steps for 4 × 100 tokens");
}

#[test]
fn waiting_counts_into_the_first_tokens_time_in_both_modes() {
    let system = System::scripted("step_us=5000", &["--instances", "1", "--slots", "1"]);
    for (done, stream) in [(0.0, true), (2.0, false)] {
        let before = system.metric("vllm:time_to_first_token_seconds_sum");
        assert_eq!(
            system.metric("vllm:time_to_first_token_seconds_count"),
            done
        );
        let mut first = Events::open(&system.address, CHAT, &chat("before it", 100));
        first.next_text();
        let timings = if stream {
            client::stream(&system.address, &chat("waits", 2))
                .timings
                .unwrap()
        } else {
            client::post(&system.address, CHAT, &ask("waits", 2)).body["timings"].clone()
        };
        first.whole().assert_complete();
        let ms = |name: &str| timings[name].as_f64().unwrap();
        assert!(ms("queue_ms") >= 200.0, "{timings:#}");
        assert!(ms("ttft_ms") >= ms("queue_ms"), "{timings:#}");
        assert!(ms("total_ms") >= ms("ttft_ms"), "{timings:#}");
        system.await_status("recorded", |status| status["queue"]["running"] == 0);
        let waited = system.metric("vllm:time_to_first_token_seconds_sum") - before;
        assert!(waited >= 0.2, "{waited}");
    }
    assert_eq!(system.metric("vllm:request_queue_time_seconds_count"), 4.0);
    assert!(system.metric("vllm:request_queue_time_seconds_sum") >= 0.4);
}

#[test]
fn streamed_text_is_the_whole_texts_bytes_whatever_the_tokens_are() {
    for text in ["words", "bytes", "invalid"] {
        let system = System::scripted(&format!("text={text},length=200"), &["--slots", "2"]);
        for content in ["one", "two", "three"] {
            for max_tokens in [1, 2, 3, 50, 400] {
                let whole = client::post(&system.address, CHAT, &ask(content, max_tokens));
                let whole = whole.body["choices"][0]["message"]["content"]
                    .as_str()
                    .unwrap()
                    .to_owned();
                let streamed = client::stream(&system.address, &chat(content, max_tokens));
                assert_eq!(
                    streamed.assert_complete().text,
                    whole,
                    "{text} {max_tokens}"
                );
                if text == "words" {
                    assert!(!whole.contains('\u{fffd}'), "{whole}");
                }
            }
        }
    }
}

#[test]
fn a_stop_string_of_several_tokens_ends_the_stream_and_no_part_of_it_is_sent() {
    let system = System::scripted("", &["--slots", "2"]);
    let all = client::stream(&system.address, &chat("stop somewhere", 60)).text;
    let cut = all.char_indices().nth(40).unwrap().0;
    let end = all.char_indices().nth(54).unwrap().0;
    let stop = &all[cut..end];
    let first = all.find(stop).unwrap();
    let mut body = chat("stop somewhere", 60);
    body["stop"] = json!([stop]);
    let whole = client::stream(&system.address, &body);
    assert_eq!(whole.assert_complete().text, all[..first]);
    assert_eq!(whole.finish_reasons, ["stop"]);
}

#[test]
fn a_long_prompt_that_joins_leaves_no_long_gap_in_running_streams_and_still_advances() {
    // 20,000 tokens at 0.4 ms, 256 a step: 8 s of prefill in steps of 0.1 s.
    let system = System::scripted(
        "step_us=2000,chunk=256,prefill_us=400",
        &["--instances", "1", "--slots", "2", "--ctx-size", "32000"],
    );
    let mut running = Events::open(&system.address, CHAT, &chat("runs", 30_000));
    running.next_text();
    let long = chat(&"!".repeat(20_000), 3);
    std::thread::scope(|scope| {
        let joins = scope.spawn(|| client::stream(&system.address, &long));
        let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
        while !joins.is_finished() {
            running.next_text();
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        joins.join().unwrap().assert_complete();
        // The promise is 500 ms on a machine of its own.
        assert!(longest < Duration::from_millis(2500), "{longest:?}");
    });
}

#[test]
fn ten_thousand_requests_leave_memory_where_it_was() {
    let system = System::scripted("length=8", &["--instances", "1", "--slots", "8"]);
    let round = |requests: u32| {
        std::thread::scope(|scope| {
            for client in 0..8 {
                let address = &system.address;
                scope.spawn(move || {
                    for number in 0..requests / 8 {
                        let content = format!("request {client} {number}");
                        let whole = client::stream(address, &chat(&content, 8));
                        whole.assert_complete();
                    }
                });
            }
        });
    };
    round(3000);
    let worker = system.worker_pids()[0];
    let sizes = || [system.pid(), worker].map(system::resident_bytes);
    let before = sizes();
    round(8000);
    let after = sizes();
    system.await_status("all are counted", |status| {
        status["counters"]["completed"] == 11_000
    });
    for (before, after) in before.into_iter().zip(after) {
        // A kilobyte kept of each request would be 8 MiB.
        assert!(after < before + (6 << 20), "{before} bytes became {after}");
    }
}
