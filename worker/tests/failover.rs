//! Workers die in every way a process can; no request is lost, and no token is said twice.

mod system;

use nix::sys::signal::Signal;
use serde_json::json;
use system::System;
use system::client::{self, Events, chat};

/// The text of an uninterrupted stream of the same request.
fn uninterrupted(system: &System, body: &serde_json::Value) -> String {
    client::stream(&system.address, body)
        .assert_complete()
        .text
        .clone()
}

fn attempts(whole: &client::Whole) -> u64 {
    whole.timings.as_ref().unwrap()["attempts"]
        .as_u64()
        .unwrap()
}

fn victim_of(system: &System) -> u32 {
    let status = system.await_status("one instance is running a request", |status| {
        status["instances"]
            .as_array()
            .unwrap()
            .iter()
            .any(|instance| instance["running"] == 1)
    });
    let instances = status["instances"].as_array().unwrap();
    let busy = instances
        .iter()
        .find(|instance| instance["running"] == 1)
        .unwrap();
    u32::try_from(busy["pid"].as_u64().unwrap()).unwrap()
}

#[test]
fn a_stream_whose_worker_is_killed_goes_on_byte_for_byte() {
    let system = System::scripted("step_us=5000", &["--instances", "2", "--slots", "2"]);
    let body = chat("a stream that is cut", 100);
    let expected = uninterrupted(&system, &body);
    let mut stream = Events::open(&system.address, "/v1/chat/completions", &body);
    for _ in 0..20 {
        stream.next_text();
    }
    system::kill(victim_of(&system), Signal::SIGKILL);
    let mut rest = client::Whole::default();
    while let Some(event) = stream.next() {
        rest.take(&event);
    }
    assert_eq!(rest.done, 1, "{rest:?}");
    assert!(rest.errors.is_empty(), "{rest:?}");
    assert_eq!(attempts(&rest), 2);
    assert!(
        expected.ends_with(&rest.text),
        "{expected:?} does not end with {:?}",
        rest.text
    );
    assert_eq!(rest.usage.unwrap()["completion_tokens"], 100);
}

#[test]
fn a_stream_cut_inside_a_character_goes_on_byte_for_byte() {
    let system = System::scripted(
        "step_us=5000,text=bytes",
        &["--instances", "2", "--slots", "2"],
    );
    let body = chat("characters of several tokens each", 90);
    let expected = uninterrupted(&system, &body);
    for cut in [7, 8, 9, 10] {
        let mut stream = Events::open(&system.address, "/v1/chat/completions", &body);
        let mut text = String::new();
        for _ in 0..cut {
            text.push_str(&stream.next_text());
        }
        system::kill(victim_of(&system), Signal::SIGKILL);
        let mut rest = client::Whole::default();
        while let Some(event) = stream.next() {
            rest.take(&event);
        }
        text.push_str(&rest.text);
        assert_eq!(text, expected);
        assert_eq!(attempts(&rest), 2);
        system.await_status("both ready", |status| {
            status["instances"]
                .as_array()
                .unwrap()
                .iter()
                .all(|i| i["state"] == "ready")
        });
    }
}

#[test]
fn a_worker_that_dies_before_the_first_token_costs_the_client_only_delay() {
    let system = System::scripted(
        "crash=abort,crash_after_prefill=1,only_generation=1,only_instance=0",
        &["--instances", "2", "--slots", "2"],
    );
    let body = chat("dies before the first token", 10);
    let whole = client::stream(&system.address, &body);
    whole.assert_complete();
    assert_eq!(attempts(&whole), 2);
}

#[test]
fn the_only_worker_dies_and_its_stream_waits_for_the_next_one() {
    let system = System::scripted("step_us=5000", &["--instances", "1", "--slots", "2"]);
    let body = chat("one worker only", 60);
    let expected = uninterrupted(&system, &body);
    let mut stream = Events::open(&system.address, "/v1/chat/completions", &body);
    let mut text = stream.next_text();
    system::kill(victim_of(&system), Signal::SIGKILL);
    let rest = stream.whole();
    text.push_str(&rest.text);
    assert_eq!(text, expected);
    assert_eq!(rest.done, 1);
}

#[test]
fn a_poisonous_prompt_takes_two_workers_with_it_and_no_third() {
    let system = System::scripted(
        "step_us=2000,crash=abort,crash_on=POISON",
        &["--instances", "2", "--slots", "2"],
    );
    let mate = chat("an innocent batch-mate", 400);
    let expected = uninterrupted(&system, &mate);
    std::thread::scope(|scope| {
        let mates: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| client::stream(&system.address, &mate)))
            .collect();
        let poison = client::post(
            &system.address,
            "/v1/chat/completions",
            &json!({ "messages": [{ "role": "user", "content": "POISON" }], "max_tokens": 5 }),
        );
        assert_eq!(poison.status, 503, "{poison:?}");
        assert_eq!(poison.body["error"]["code"], "worker_crashed");
        for mate in mates {
            let whole = mate.join().unwrap();
            whole.assert_complete();
            assert_eq!(whole.text, expected);
        }
        let again = client::post(
            &system.address,
            "/v1/chat/completions",
            &json!({ "messages": [{ "role": "user", "content": "POISON" }], "max_tokens": 5 }),
        );
        assert_eq!(again.status, 503, "{again:?}");
    });
    system.await_status("two deaths and no more", |status| {
        status["counters"]["worker_exits"] == 2
    });
}

#[test]
fn a_hung_engine_is_killed_and_its_stream_goes_on() {
    let system = System::scripted(
        "step_us=2000,crash=hang,crash_at_token=10,only_generation=1",
        &[
            "--instances",
            "1",
            "--slots",
            "2",
            "--stall-after",
            "1s",
            "--worker-grace",
            "500ms",
        ],
    );
    let whole = client::stream(&system.address, &chat("hangs once", 40));
    whole.assert_complete();
    assert_eq!(attempts(&whole), 2);
    assert_eq!(whole.usage.unwrap()["completion_tokens"], 40);
}

#[test]
fn a_stopped_process_is_killed_and_its_stream_goes_on() {
    let system = System::scripted(
        "step_us=5000",
        &[
            "--instances",
            "2",
            "--slots",
            "2",
            "--stall-after",
            "1s",
            "--worker-grace",
            "500ms",
        ],
    );
    let body = chat("stopped by a signal", 60);
    let expected = uninterrupted(&system, &body);
    let mut stream = Events::open(&system.address, "/v1/chat/completions", &body);
    let mut text = stream.next_text();
    system::kill(victim_of(&system), Signal::SIGSTOP);
    let rest = stream.whole();
    text.push_str(&rest.text);
    assert_eq!(text, expected);
}

#[test]
fn a_slow_engine_that_advances_is_never_killed() {
    let system = System::scripted(
        "step_us=400000",
        &["--instances", "1", "--slots", "2", "--stall-after", "1s"],
    );
    let whole = client::stream(&system.address, &chat("slow but alive", 6));
    whole.assert_complete();
    assert_eq!(attempts(&whole), 1);
    assert_eq!(system.status()["counters"]["worker_exits"], 0);
}

#[test]
fn an_instance_that_keeps_crashing_is_parked_and_says_why() {
    let system = System::launch(&[
        "--engine",
        "scripted",
        "--scripted",
        "load=transient",
        "--model",
        "scripted",
        "--instances",
        "1",
        "--slots",
        "1",
        "--max-crashes",
        "2",
    ]);
    let status = system.await_status("parked", |status| {
        status["instances"][0]["state"] == "quarantined"
    });
    assert!(status["instances"][0]["reason"].is_string(), "{status:#}");
    assert_eq!(client::get_blocking(&system.address, "/health").0, 200);
    let (code, body) = client::get_blocking(&system.address, "/ready");
    assert_eq!(code, 503, "{body}");
    let refused = client::post(
        &system.address,
        "/v1/chat/completions",
        &json!({ "messages": [{ "role": "user", "content": "hello" }] }),
    );
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(
        refused.head.to_ascii_lowercase().contains("retry-after"),
        "{}",
        refused.head
    );
}

#[test]
fn a_permanent_load_error_never_loops() {
    let mut system = System::launch(&[
        "--engine",
        "scripted",
        "--scripted",
        "load=permanent",
        "--model",
        "scripted",
        "--instances",
        "2",
        "--slots",
        "1",
    ]);
    assert_eq!(system.wait(), Some(78), "{}", system.read_log());
}

#[test]
fn sigkill_of_the_dispatcher_leaves_no_worker_behind_even_in_a_long_step() {
    let system = System::scripted("step_us=30000000", &["--instances", "2", "--slots", "2"]);
    let _stream = Events::open(
        &system.address,
        "/v1/chat/completions",
        &chat("a long step", 10),
    );
    system.await_status("running", |status| status["queue"]["running"] == 1);
    let workers = system.worker_pids();
    assert_eq!(workers.len(), 2);
    system.signal(Signal::SIGKILL);
    for pid in workers {
        assert!(
            system::await_gone(pid, std::time::Duration::from_secs(5)),
            "worker {pid} outlived its dispatcher"
        );
    }
}
