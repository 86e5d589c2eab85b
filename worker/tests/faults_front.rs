//! The front under siege: descriptors that run out, slow senders, keys, and what must not be logged.

mod system;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system::client::{self, Events, chat};
use system::{Start, System};

const CHAT: &str = "/v1/chat/completions";

/// The text of a stream that nothing interrupts.
fn undisturbed(body: &Value) -> String {
    let system = System::scripted("", &["--slots", "1"]);
    client::stream(&system.address, body)
        .assert_complete()
        .text
        .clone()
}

#[test]
fn a_flood_of_connections_leaves_a_worker_its_descriptors_and_is_over_when_it_is_over() {
    let system = Start::scripted("step_us=5000", &["--instances", "1", "--slots", "2"])
        .after_shell("ulimit -n 96")
        .start();
    let body = chat("goes on", 3000);
    let expected = undisturbed(&body);
    let mut running = Events::open(&system.address, CHAT, &body);
    let mut text = running.next_text();
    let flood: Vec<_> = (0..200)
        .map(|_| TcpStream::connect(&system.address).unwrap())
        .collect();
    text.push_str(&running.next_text());
    // A new worker needs pipes and a link.
    system::kill(running_worker(&system), Signal::SIGKILL);
    for _ in 0..50 {
        text.push_str(&running.next_text());
    }
    assert!(expected.starts_with(&text), "the stream was disturbed");
    drop(flood);
    // Those that waited in the backlog are still to be seen off.
    let begun = Instant::now();
    while client::stream(&system.address, &chat("let in again", 3)).status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(15), "never let in");
    }
}

#[test]
fn descriptors_that_run_out_pause_the_door_without_a_spin_and_streams_go_on() {
    let system = System::scripted("step_us=5000", &["--instances", "1", "--slots", "2"]);
    let body = chat("goes on", 3000);
    let expected = undisturbed(&body);
    let mut running = Events::open(&system.address, CHAT, &body);
    let mut text = running.next_text();
    limit_descriptors(system.pid(), "10");
    let outside: Vec<_> = (0..20)
        .map(|_| TcpStream::connect(&system.address).unwrap())
        .collect();
    system.await_log("failed to accept a connection");
    let (begun, before) = (Instant::now(), system::processor_time(system.pid()));
    // The stream says how time passes.
    while begun.elapsed() < Duration::from_secs(3) {
        text.push_str(&running.next_text());
    }
    let taken = system::processor_time(system.pid()) - before;
    assert!(
        taken < begun.elapsed() / 3,
        "{taken:?} of processor time in {:?}",
        begun.elapsed()
    );
    let failures = system
        .read_log()
        .matches("failed to accept a connection")
        .count();
    assert!(failures < 20, "{failures} tries in some seconds");
    limit_descriptors(system.pid(), "1024");
    drop(outside);
    let begun = Instant::now();
    assert_eq!(client::get_blocking(&system.address, "/health").0, 200);
    // The longest pause is 1 s.
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    text.push_str(&running.next_text());
    assert!(expected.starts_with(&text), "the stream was disturbed");
    assert!(system.metric("dispatcher_accept_failures_total") >= 1.0);
}

/// Sets the soft limit of a running process.
fn limit_descriptors(pid: u32, soft: &str) {
    let status = std::process::Command::new("prlimit")
        .args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")])
        .status()
        .unwrap();
    assert!(status.success());
}

/// The worker's pid from its pid file: `/status` cannot be asked while the door is shut.
fn running_worker(system: &System) -> u32 {
    let run = system.run_directory.path().join("run");
    let mut found = std::fs::read_dir(run).unwrap().filter_map(|entry| {
        let path = entry.unwrap().path();
        let is_record = path.extension().is_some_and(|suffix| suffix == "pid");
        let record: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
        (is_record).then(|| u32::try_from(record["pid"].as_u64().unwrap()).unwrap())
    });
    found.next().unwrap()
}

/// What comes back on a connection that sent `begun` and nothing more, and when it ended.
fn left_hanging(address: &str, begun: &str) -> (String, Duration) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(system::PATIENCE)).unwrap();
    let start = Instant::now();
    stream.write_all(begun.as_bytes()).unwrap();
    let mut told = Vec::new();
    // A reset is an end as well.
    let _ = stream.read_to_end(&mut told);
    (String::from_utf8(told).unwrap(), start.elapsed())
}

#[test]
fn heads_and_bodies_that_never_end_are_given_up_while_others_are_served() {
    let system = System::scripted("", &["--slots", "1"]);
    let address = &system.address;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n");
    let body = format!("{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{\"me");
    std::thread::scope(|scope| {
        let silent = scope.spawn(move || left_hanging(address, ""));
        let head = scope.spawn(move || left_hanging(address, &head));
        let body = scope.spawn(move || left_hanging(address, &body));
        for (given_up, what) in [(silent, "nothing"), (head, "half a head")] {
            let (told, after) = given_up.join().unwrap();
            assert!(after >= Duration::from_secs(9), "{what}: {after:?}");
            assert!(after <= Duration::from_secs(20), "{what}: {after:?}");
            assert!(
                told.is_empty() || told.starts_with("HTTP/1.1 408"),
                "{what}: {told}"
            );
            client::stream(address, &chat("meanwhile", 3)).assert_complete();
        }
        let (told, after) = body.join().unwrap();
        assert!(told.starts_with("HTTP/1.1 408"), "{told}");
        assert!(told.contains("body_timeout"), "{told}");
        assert!(after >= Duration::from_secs(29), "{after:?}");
        assert!(after <= Duration::from_secs(45), "{after:?}");
    });
}

#[test]
fn keys_are_asked_for_and_never_shown_nor_given_to_workers() {
    let system = Start::scripted("", &["--slots", "1", "--api-key", "sk-from-a-flag"])
        .environment("DISPATCHER_LOG", "trace")
        .start();
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
    let bytes = body.to_string();
    let post = |headers: &[(&str, &str)]| {
        client::post_bytes(&system.address, CHAT, bytes.as_bytes(), headers)
    };
    for headers in [
        &[][..],
        &[("authorization", "Bearer sk-wrong-guess")],
        &[("authorization", "sk-from-a-flag-and-more")],
    ] {
        let refused = post(headers);
        assert_eq!(refused.status, 401, "{headers:?}: {refused:?}");
        assert_eq!(refused.body["error"]["code"], "invalid_api_key");
        assert!(!refused.body.to_string().contains("sk-"), "{refused:?}");
    }
    assert_eq!(client::get_blocking(&system.address, "/v1/models").0, 401);
    for open in ["/health", "/ready", "/status", "/metrics"] {
        let (status, text) = client::get_blocking(&system.address, open);
        assert_eq!(status, 200, "{open}");
        assert!(!text.contains("sk-"), "{open}: {text}");
    }
    let let_in = post(&[("authorization", "Bearer sk-from-a-flag")]);
    assert_eq!(let_in.status, 200, "{let_in:?}");
    let log = system.read_log();
    assert!(
        !log.contains("sk-from") && !log.contains("sk-wrong"),
        "{log}"
    );
    let worker = system.worker_pids()[0];
    for file in ["cmdline", "environ"] {
        let bytes = std::fs::read(format!("/proc/{worker}/{file}")).unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(!text.contains("sk-from"), "{file}: {text}");
    }
}

#[test]
fn no_word_of_a_prompt_or_an_answer_is_logged_or_kept_whatever_happens_to_it() {
    const MARKER: &str = "xyzzyplugh";
    let system = Start::scripted(
        "step_us=2000,crash=abort,crash_on=poisonous,fail_row=unlucky,reject=unwanted",
        &["--instances", "1", "--slots", "2"],
    )
    .environment("DISPATCHER_LOG", "trace")
    .start();
    let said = |rest: &str| format!("{MARKER} {rest} repeat: {MARKER}");
    let answer = client::post(
        &system.address,
        CHAT,
        &json!({ "messages": [{ "role": "user", "content": said("good") }], "max_tokens": 40 }),
    );
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(
        answer.body.to_string().contains(MARKER),
        "it is echoed: {answer:?}"
    );
    for rest in ["poisonous", "unlucky", "unwanted"] {
        let answer = client::post(
            &system.address,
            CHAT,
            &json!({ "messages": [{ "role": "user", "content": said(rest) }], "max_tokens": 4 }),
        );
        assert_ne!(answer.status, 200, "{rest}: {answer:?}");
    }
    system.await_ready();
    let long = format!("{MARKER} {}", said("long").repeat(2000));
    let wrong = [
        json!({ "messages": [{ "role": MARKER, "content": "x" }] }),
        json!({ "model": MARKER, "messages": [{ "role": "user", "content": "x" }] }),
        json!({ "messages": [{ "role": "user", "content": long }] }),
    ];
    for body in wrong {
        let answer = client::post(&system.address, CHAT, &body);
        assert!((400..500).contains(&answer.status), "{answer:?}");
    }
    let mut left = Events::open(&system.address, CHAT, &chat(&said("left"), 4000));
    left.next_text();
    drop(left);
    system.await_log("client_disconnect");
    let log = system.read_log();
    assert!(log.len() > 1000, "{log}");
    assert!(!log.contains(MARKER), "{log}");
    for record in system.crash_records() {
        assert!(!record.to_string().contains(MARKER), "{record:#}");
    }
    for path in ["/status", "/metrics"] {
        assert!(
            !client::get_blocking(&system.address, path)
                .1
                .contains(MARKER),
            "{path}"
        );
    }
}

#[test]
fn every_end_is_logged_with_its_true_cause() {
    let system = System::scripted(
        "step_us=2000,fail_row=unlucky,reject=unwanted,length=30",
        &["--slots", "1", "--ctx-size", "512", "--queue", "1"],
    );
    let outcomes = || -> Vec<String> {
        let log = system.read_log();
        log.lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter_map(|line| Some(line["outcome"].as_str()?.to_owned()))
            .collect()
    };
    let mut expected = Vec::new();
    let mut ended = |cause: &str| {
        expected.push(cause.to_owned());
        system.await_log(&format!("\"{cause}\""));
        assert_eq!(outcomes(), expected);
    };
    client::stream(&system.address, &chat("to its own end", 100)).assert_complete();
    ended("stop");
    client::stream(&system.address, &chat("to its bound", 5)).assert_complete();
    ended("length");
    let ask = |content: &str| {
        let body =
            json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 400 });
        client::post(&system.address, CHAT, &body).status
    };
    assert_eq!(ask("unwanted"), 400);
    ended("rejected");
    assert_eq!(ask("unlucky"), 500);
    ended("engine_error");
    assert_eq!(ask(&"!".repeat(600)), 400);
    ended("context_length_exceeded");
    let mut leaves = Events::open(
        &system.address,
        CHAT,
        &json!({
            "messages": [{ "role": "user", "content": "leaves" }], "stream": true, "ignore_eos": true,
        }),
    );
    leaves.next_text();
    drop(leaves);
    ended("client_disconnect");
}
