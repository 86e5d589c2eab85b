//! Engines and workers that die: what clients see, what is served meanwhile, what is left on disk.

mod system;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system::client::{self, Events, chat};
use system::{Start, System};

const CHAT: &str = "/v1/chat/completions";

/// The text of a stream that nothing interrupts: the scripted engine's words depend on the prompt alone.
fn undisturbed(body: &Value) -> String {
    let system = System::scripted("", &["--slots", "1"]);
    client::stream(&system.address, body)
        .assert_complete()
        .text
        .clone()
}

fn all_ready(status: &Value) -> bool {
    let instances = status["instances"].as_array().unwrap();
    instances
        .iter()
        .all(|instance| instance["state"] == "ready")
}

/// Asks for `/health` until `over`; how often it answered.
fn watch_health(address: &str, over: &AtomicBool) -> u32 {
    let mut answers = 0;
    while !over.load(Ordering::Relaxed) {
        assert_eq!(client::get_blocking(address, "/health").0, 200);
        answers += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    answers
}

#[test]
fn however_an_engine_dies_its_streams_go_on_and_the_server_answers_throughout() {
    let body = chat("whatever happens", 60);
    let expected = undisturbed(&body);
    for (crash, signal, code, last_line) in [
        ("abort", Some(6), None, None),
        ("segv", Some(11), None, None),
        ("exit:3", None, Some(3), None),
        ("panic", Some(6), None, Some("the script asks for a panic")),
        ("poison", None, Some(70), Some("the script says so")),
    ] {
        let system = System::scripted(
            &format!(
                "step_us=5000,crash={crash},crash_at_token=20,only_instance=0,only_generation=1"
            ),
            &["--instances", "2", "--slots", "2"],
        );
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let health = scope.spawn(|| watch_health(&system.address, &over));
            let streams: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| client::stream(&system.address, &body)))
                .collect();
            for stream in streams {
                let whole = stream.join().unwrap();
                whole.assert_complete();
                assert_eq!(whole.text, expected, "{crash}");
            }
            over.store(true, Ordering::Relaxed);
            assert!(health.join().unwrap() > 0);
        });
        let status = system.await_status("both instances are ready again", all_ready);
        assert_eq!(status["counters"]["worker_exits"], 1, "{crash}");
        assert_eq!(status["instances"][0]["crashes"], 1, "{crash}");
        assert_eq!(status["instances"][1]["crashes"], 0, "{crash}");

        let records = system.crash_records();
        assert_eq!(records.len(), 1, "{crash}: {records:?}");
        let record = &records[0];
        assert_eq!(record["signal"], json!(signal), "{crash}: {record:#}");
        assert_eq!(record["exit_code"], json!(code), "{crash}: {record:#}");
        assert_eq!(record["cause"], "engine", "{crash}");
        assert_eq!(
            (&record["instance"], &record["generation"]),
            (&json!(0), &json!(1))
        );
        assert_eq!(record["engine"], "scripted", "{record:#}");
        assert!(record["model"].is_string(), "{record:#}");
        assert!(record["uptime_ms"].as_u64().unwrap() > 50, "{record:#}");
        let fingerprints = record["fingerprints"].as_array().unwrap();
        assert!(!fingerprints.is_empty(), "{crash}: {record:#}");
        assert!(
            fingerprints
                .iter()
                .all(|hash| hash.as_str().unwrap().len() == 16)
        );
        if let Some(words) = last_line {
            assert!(record["tail"].to_string().contains(words), "{record:#}");
        }
    }
}

#[test]
fn a_stream_that_no_worker_can_finish_ends_with_one_error_event_and_the_server_goes_on() {
    let system = System::scripted(
        "step_us=2000,crash=abort,crash_at_token=10",
        &["--instances", "1", "--slots", "2"],
    );
    let whole = client::stream(&system.address, &chat("never past ten", 40));
    assert_eq!(whole.status, 200, "{whole:?}");
    assert_eq!(whole.errors.len(), 1, "{whole:?}");
    assert_eq!(whole.errors[0]["error"]["code"], "worker_crashed");
    assert!(whole.finish_reasons.is_empty(), "{whole:?}");
    assert_eq!(whole.done, 0, "{whole:?}");
    system.await_status("the worker is back", all_ready);
    client::stream(&system.address, &chat("only nine", 9)).assert_complete();
    let ended: f64 = system.metric_with("dispatcher_requests_failed_total", &["worker"]);
    assert!(ended >= 1.0, "counted with its reason");
}

#[test]
fn a_kill_from_outside_is_recorded_as_such_and_records_are_bounded() {
    let system = System::scripted("", &["--instances", "1", "--slots", "1"]);
    let folder = system.run_directory.path().join("run/crashes");
    std::fs::create_dir_all(&folder).unwrap();
    for number in 0..130 {
        let path = folder.join(format!("crash-{number:012}-00000001-000001.json"));
        std::fs::write(path, "{}").unwrap();
    }
    system::kill(system.worker_pids()[0], Signal::SIGKILL);
    system.await_status("it was restarted", |status| {
        status["counters"]["worker_exits"] == 1 && all_ready(status)
    });
    let records = system.crash_records();
    assert_eq!(records.len(), 100);
    assert_eq!(records[0]["signal"], 9, "{:#}", records[0]);
    assert_eq!(records[0]["cause"], "external", "{:#}", records[0]);
    assert_eq!(records[0]["fingerprints"], json!([]), "{:#}", records[0]);
}

#[test]
fn a_crash_loop_is_parked_with_its_reason_everywhere_and_sighup_ends_that() {
    let start = Start::scripted(
        "",
        &["--instances", "1", "--slots", "1", "--max-crashes", "2"],
    );
    let system = start
        .workers_after_shell("[ -e \"${0%/*}/mended\" ] || { echo 'no luck today'; exit 3; }")
        .launch();
    // Asked while it still tries: it waits, and is told at once when nothing will come.
    let asked = client::post(
        &system.address,
        CHAT,
        &json!({ "messages": [{ "role": "user", "content": "anyone?" }] }),
    );
    assert_eq!(asked.status, 503, "{asked:?}");
    assert_eq!(asked.body["error"]["code"], "no_instance");
    assert!(
        asked.head.to_ascii_lowercase().contains("retry-after: "),
        "{}",
        asked.head
    );

    let status = system.await_status("parked", |status| {
        status["instances"][0]["state"] == "quarantined"
    });
    let reason = status["instances"][0]["reason"].as_str().unwrap();
    assert!(reason.contains('3'), "the exit code is said: {reason}");
    let (code, ready) = client::get_blocking(&system.address, "/ready");
    assert_eq!(code, 503);
    let ready: Value = serde_json::from_str(&ready).unwrap();
    let why = ready["reason"].as_str().unwrap();
    assert!(why.contains(reason), "`{why}` does not say `{reason}`");
    assert_eq!(status["not_ready_reason"], why);
    assert_eq!(client::get_blocking(&system.address, "/health").0, 200);
    assert_eq!(
        status["counters"]["worker_exits"], 3,
        "parked means no further try"
    );
    assert!(
        system.crash_records()[0]["tail"]
            .to_string()
            .contains("no luck today")
    );

    std::fs::write(system.run_directory.path().join("mended"), "").unwrap();
    system.signal(Signal::SIGHUP);
    system.await_ready();
    client::stream(&system.address, &chat("there you are", 3)).assert_complete();
}

#[test]
fn one_instance_that_can_never_load_is_parked_while_the_other_serves() {
    let system = System::scripted(
        "load=permanent,only_instance=1",
        &["--instances", "2", "--slots", "1"],
    );
    let status = system.await_status("one parked, one ready", |status| {
        status["instances"][1]["state"] == "quarantined" && status["ready"] == true
    });
    assert!(status["instances"][1]["reason"].is_string(), "{status:#}");
    assert_eq!(status["instances"][1]["restarts"], 0, "{status:#}");
    client::stream(&system.address, &chat("the other serves", 5)).assert_complete();
    assert_eq!(client::get_blocking(&system.address, "/ready").0, 200);
}

#[test]
fn a_load_that_can_never_succeed_is_said_once_and_ends_the_dispatcher() {
    let refused =
        Start::scripted("load=permanent", &["--instances", "2", "--slots", "1"]).refused();
    assert_eq!(refused.code, Some(78), "{refused:?}");
    let said = refused
        .log
        .lines()
        .filter(|line| line.starts_with("dispatcher: no instance can start"))
        .count();
    assert_eq!(said, 1, "{refused:?}");
    assert_eq!(
        refused.log.matches("worker spawned").count(),
        2,
        "{refused:?}"
    );
}

#[test]
fn a_dispatcher_that_was_killed_is_followed_by_one_that_serves_at_once() {
    let system = System::scripted("step_us=5000", &["--instances", "2", "--slots", "2"]);
    let mut stream = Events::open(&system.address, CHAT, &chat("cut off", 4000));
    stream.next_text();
    let old = system.worker_pids();
    system.signal(Signal::SIGKILL);
    let next = Start::scripted("step_us=5000", &["--instances", "2", "--slots", "2"])
        .in_place_of(&system)
        .start();
    for pid in old {
        assert!(
            system::await_gone(pid, Duration::from_secs(5)),
            "worker {pid} lives"
        );
    }
    client::stream(&next.address, &chat("the next one", 5)).assert_complete();
}

#[test]
fn a_worker_that_outlived_its_dispatcher_is_swept_by_the_next() {
    let arguments = ["--instances", "1", "--slots", "1"];
    let first = Start::scripted("", &arguments);
    let flag = "stuck";
    let first = {
        let start = first.workers_after_shell(&format!(
            "while [ -e \"${{0%/*}}/{flag}\" ]; do sleep 1 <&-; done"
        ));
        std::fs::write(start.folder().join(flag), "").unwrap();
        start.launch()
    };
    let status = first.await_status("spawned", |status| status["instances"][0]["pid"].is_u64());
    let stuck = u32::try_from(status["instances"][0]["pid"].as_u64().unwrap()).unwrap();
    first.signal(Signal::SIGKILL);
    assert!(system::await_gone(first.pid(), Duration::from_secs(10)));
    // It never came so far as to tie itself to its parent.
    assert!(system::alive(stuck));
    let next = Start::scripted("", &arguments).in_place_of(&first).start();
    assert!(
        system::await_gone(stuck, Duration::from_secs(5)),
        "it was not swept"
    );
    next.await_log("workers of a dead dispatcher were swept");
    client::stream(&next.address, &chat("clean again", 5)).assert_complete();
}

#[test]
fn a_run_directory_in_use_is_refused_in_words_and_its_owner_serves_on() {
    let system = System::scripted("", &["--instances", "1", "--slots", "1"]);
    let worker = system.worker_pids();
    let refused = Start::scripted("", &["--slots", "1"])
        .in_place_of(&system)
        .refused();
    assert_eq!(refused.code, Some(78), "{refused:?}");
    assert!(
        refused.log.contains("another dispatcher runs in it"),
        "{refused:?}"
    );
    client::stream(&system.address, &chat("still mine", 5)).assert_complete();
    assert_eq!(system.worker_pids(), worker, "its worker was left alone");
}
