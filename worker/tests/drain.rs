//! Stop, drain and reload: what was begun ends well, what comes later is told when to come again.

mod system;

use nix::sys::signal::Signal;
use serde_json::json;
use system::System;
use system::client::{self, Events, chat};

#[test]
fn sigterm_lets_running_streams_finish_and_turns_new_ones_away() {
    let mut system = System::scripted("step_us=10000", &["--instances", "1", "--slots", "4"]);
    let mut running = Events::open(
        &system.address,
        "/v1/chat/completions",
        &chat("runs on", 150),
    );
    running.next_text();
    system.signal(Signal::SIGTERM);
    system.await_status("draining", |status| status["draining"] == true);
    let late = client::post(
        &system.address,
        "/v1/chat/completions",
        &json!({ "messages": [{ "role": "user", "content": "too late" }] }),
    );
    assert_eq!(late.status, 503, "{late:?}");
    assert!(
        late.head.to_ascii_lowercase().contains("retry-after"),
        "{}",
        late.head
    );
    assert_eq!(client::get_blocking(&system.address, "/ready").0, 503);
    let whole = running.whole();
    whole.assert_complete();
    assert_eq!(system.wait(), Some(0), "{}", system.read_log());
}

#[test]
fn what_outlives_the_drain_gets_one_error_event_and_no_finish() {
    let mut system = System::scripted(
        "step_us=10000",
        &["--instances", "1", "--slots", "4", "--drain-timeout", "1s"],
    );
    let mut running = Events::open(
        &system.address,
        "/v1/chat/completions",
        &chat("too long", 4000),
    );
    running.next_text();
    system.signal(Signal::SIGTERM);
    let whole = running.whole();
    assert_eq!(whole.errors.len(), 1, "{whole:?}");
    assert!(whole.finish_reasons.is_empty(), "{whole:?}");
    assert_eq!(system.wait(), Some(0), "{}", system.read_log());
}

#[test]
fn a_second_sigterm_ends_at_once() {
    let mut system = System::scripted("step_us=10000", &["--instances", "1", "--slots", "4"]);
    let mut running = Events::open(&system.address, "/v1/chat/completions", &chat("cut", 4000));
    running.next_text();
    let begun = std::time::Instant::now();
    system.signal(Signal::SIGTERM);
    system.await_status("draining", |status| status["draining"] == true);
    system.signal(Signal::SIGTERM);
    let whole = running.whole();
    assert_eq!(whole.errors.len(), 1, "{whole:?}");
    system.wait();
    assert!(
        begun.elapsed().as_secs() < 20,
        "waited for the drain time-out"
    );
}

#[test]
fn reload_replaces_every_worker_and_no_request_notices() {
    for instances in ["1", "2"] {
        let system = System::scripted("step_us=2000", &["--instances", instances, "--slots", "4"]);
        let before = system.worker_pids();
        let body = chat("through the reload", 300);
        let expected = client::stream(&system.address, &body)
            .assert_complete()
            .text
            .clone();
        std::thread::scope(|scope| {
            let streams: Vec<_> = (0..6)
                .map(|_| scope.spawn(|| client::stream(&system.address, &body)))
                .collect();
            system.await_status("running", |status| status["queue"]["running"] != 0);
            system.signal(Signal::SIGHUP);
            for stream in streams {
                let whole = stream.join().unwrap();
                whole.assert_complete();
                assert_eq!(whole.text, expected);
            }
        });
        system.await_status("all replaced", |status| {
            status["instances"]
                .as_array()
                .unwrap()
                .iter()
                .all(|instance| {
                    instance["state"] == "ready"
                        && instance["pid"]
                            .as_u64()
                            .is_some_and(|pid| !before.contains(&u32::try_from(pid).unwrap()))
                })
        });
    }
}
