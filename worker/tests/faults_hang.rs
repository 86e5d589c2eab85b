//! Engines that stand still: who notices, how fast, and what the others do meanwhile.

mod system;

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use system::System;
use system::client::{self, Events, chat};

const CHAT: &str = "/v1/chat/completions";

fn json(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

#[test]
fn an_engine_that_stops_after_the_prefill_turns_readiness_false_and_is_replaced() {
    let system = System::scripted(
        "crash=hang,crash_after_prefill=1,only_generation=1",
        &[
            "--instances",
            "1",
            "--slots",
            "2",
            "--stall-after",
            "4s",
            "--worker-grace",
            "1s",
        ],
    );
    let mut stream = Events::open(&system.address, CHAT, &chat("stops after the prefill", 10));
    // Half of the stall's time, then it is said, long before the worker is given up.
    let status = system.await_status("not ready", |status| status["ready"] == false);
    assert_eq!(status["instances"][0]["generation"], 1, "{status:#}");
    let reason = status["not_ready_reason"].as_str().unwrap();
    assert!(!reason.is_empty() && reason != "starting", "{reason}");
    let (code, deep) = client::get_blocking(&system.address, "/health?deep=1");
    if code == 503 {
        let deep = json(&deep);
        let age = deep["instances"][0]["last_pulse_ms"].as_f64().unwrap();
        assert!(age >= 1000.0, "{deep:#}");
    } else {
        // It was replaced between the two questions.
        assert_ne!(system.status()["instances"][0]["generation"], 1);
    }
    assert_eq!(client::get_blocking(&system.address, "/health").0, 200);
    let whole = stream.whole();
    whole.assert_complete();
    assert_eq!(whole.timings.unwrap()["attempts"], 2);
    let records = system.crash_records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["cause"], "engine", "{:#}", records[0]);
    system.await_ready();
}

#[test]
fn a_worker_that_ignores_sigterm_gets_sigkill_after_the_grace() {
    let system = System::scripted(
        "step_us=5000",
        &[
            "--instances",
            "1",
            "--slots",
            "2",
            "--stall-after",
            "1s",
            "--worker-grace",
            "1s",
        ],
    );
    let mut stream = Events::open(&system.address, CHAT, &chat("stopped", 30));
    stream.next_text();
    let worker = system.worker_pids()[0];
    // A stopped process keeps SIGTERM for later.
    system::kill(worker, Signal::SIGSTOP);
    stream.whole().assert_complete();
    assert!(system::await_gone(worker, Duration::from_secs(5)));
    let records = system.crash_records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["signal"], 9, "{:#}", records[0]);
    // By our hand, for its own fault: not from outside.
    assert_eq!(records[0]["cause"], "engine", "{:#}", records[0]);
}

#[test]
fn a_worker_that_takes_long_to_kill_holds_nothing_else_up() {
    let system = System::scripted(
        "step_us=5000",
        &[
            "--instances",
            "2",
            "--slots",
            "1",
            "--stall-after",
            "1s",
            "--worker-grace",
            "100s",
        ],
    );
    let mut stuck = Events::open(&system.address, CHAT, &chat("stuck", 4000));
    stuck.next_text();
    let status = system.await_status("running", |status| status["queue"]["running"] == 1);
    let busy = usize::from(status["instances"][0]["running"] != 1);
    let pids = system.worker_pids();
    system::kill(pids[busy], Signal::SIGSTOP);
    system.await_status("being ended", |status| {
        status["instances"][busy]["state"] == "terminating"
    });
    // The other serves, dies, is loaded anew and serves again.
    client::stream(&system.address, &chat("meanwhile", 5)).assert_complete();
    system::kill(pids[1 - busy], Signal::SIGKILL);
    client::stream(&system.address, &chat("and again", 5)).assert_complete();
    let status = system.status();
    assert_eq!(
        status["instances"][busy]["state"], "terminating",
        "{status:#}"
    );
    assert_eq!(status["instances"][busy]["pid"], pids[busy], "{status:#}");
    assert_ne!(
        status["instances"][1 - busy]["pid"],
        pids[1 - busy],
        "{status:#}"
    );
}

#[test]
fn a_stop_waits_for_no_stuck_worker_longer_than_its_deadlines() {
    let mut system = System::scripted(
        "step_us=5000",
        &[
            "--instances",
            "2",
            "--slots",
            "1",
            "--drain-timeout",
            "1s",
            "--worker-grace",
            "1s",
        ],
    );
    let mut stuck = Events::open(&system.address, CHAT, &chat("stuck", 4000));
    stuck.next_text();
    let workers = system.worker_pids();
    for worker in &workers {
        system::kill(*worker, Signal::SIGSTOP);
    }
    let begun = Instant::now();
    system.signal(Signal::SIGTERM);
    let whole = stuck.whole();
    assert_eq!(whole.errors.len(), 1, "{whole:?}");
    assert!(whole.finish_reasons.is_empty(), "{whole:?}");
    assert_eq!(system.wait(), Some(0), "{}", system.read_log());
    // Drain, grace and a second for the rest, five times over.
    assert!(
        begun.elapsed() < Duration::from_secs(15),
        "{:?}",
        begun.elapsed()
    );
    for worker in workers {
        assert!(system::await_gone(worker, Duration::from_secs(5)));
    }
}
