//! Bad input by name, through the whole system: each gets a clear answer, and nobody else notices.

mod system;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};
use system::client::{self, Events, chat};
use system::{Start, System};

const CHAT: &str = "/v1/chat/completions";

/// A good chat request with `more` members.
fn with(more: &str) -> Vec<u8> {
    format!(r#"{{"messages":[{{"role":"user","content":"hello"}}]{more}}}"#).into_bytes()
}

/// Everything that a client can send wrong: name, path, body, status, code.
fn wrong() -> Vec<(&'static str, &'static str, Vec<u8>, u16, &'static str)> {
    let deep = format!(r#","x":{}{}"#, "[".repeat(10_000), "]".repeat(10_000));
    let long = format!(
        r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#,
        " the".repeat(5000)
    );
    let mut not_utf8 = with(r#","user":"?""#);
    let at = not_utf8.len() - 3;
    not_utf8[at] = 0xff;
    let mut cases = vec![
        ("malformed JSON", b"{nope".to_vec(), 400, "invalid_json"),
        ("an empty body", Vec::new(), 400, "invalid_json"),
        ("nested 10,000 deep", with(&deep), 400, "invalid_json"),
        ("invalid UTF-8", not_utf8, 400, "invalid_utf8"),
        (
            "an unknown role",
            br#"{"messages":[{"role":"wizard","content":"x"}]}"#.to_vec(),
            400,
            "invalid_value",
        ),
        (
            "no messages",
            br#"{"messages":[]}"#.to_vec(),
            400,
            "invalid_value",
        ),
        (
            "messages of a wrong type",
            br#"{"messages":"hi"}"#.to_vec(),
            400,
            "invalid_type",
        ),
        (
            "more than the context",
            long.into_bytes(),
            400,
            "context_length_exceeded",
        ),
    ];
    for (name, more, status, code) in [
        (
            "an unknown model",
            r#","model":"gpt-4""#,
            404,
            "model_not_found",
        ),
        (
            "max_tokens of a wrong type",
            r#","max_tokens":"many""#,
            400,
            "invalid_type",
        ),
        (
            "a negative max_tokens",
            r#","max_tokens":-1"#,
            400,
            "invalid_value",
        ),
        (
            "temperature 1e9",
            r#","temperature":1e9"#,
            400,
            "invalid_value",
        ),
        ("top_p -1", r#","top_p":-1"#, 400, "invalid_value"),
        ("n 2", r#","n":2"#, 400, "unsupported_parameter"),
    ] {
        cases.push((name, with(more), status, code));
    }
    let mut all: Vec<_> = cases
        .into_iter()
        .map(|(name, body, status, code)| (name, CHAT, body, status, code))
        .collect();
    all.push((
        "a token id of no vocabulary",
        "/v1/completions",
        br#"{"prompt":[99999999]}"#.to_vec(),
        400,
        "invalid_prompt",
    ));
    all
}

/// What the server says before it closes, though the client is not done with its body.
fn told_while_sending(address: &str, head: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(system::PATIENCE)).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    // The server may close before it has read all of it.
    let _ = stream.write_all(body);
    let mut told = Vec::new();
    let mut read = [0; 4096];
    while let Ok(length) = stream.read(&mut read) {
        if length == 0 {
            break;
        }
        told.extend_from_slice(&read[..length]);
    }
    String::from_utf8(told).unwrap()
}

/// A stream of `chat(content, …)` on an undisturbed server, as long as `text` and more.
fn undisturbed(content: &str) -> String {
    let system = System::scripted("", &["--slots", "1"]);
    client::stream(&system.address, &chat(content, 4000))
        .assert_complete()
        .text
        .clone()
}

#[test]
fn nothing_that_a_client_sends_wrong_reaches_a_slot_or_disturbs_a_stream() {
    let system = System::scripted("step_us=5000", &["--instances", "1", "--slots", "2"]);
    let mut running = Events::open(&system.address, CHAT, &chat("undisturbed", 4000));
    let mut text = running.next_text();
    for (name, path, body, status, code) in wrong() {
        let answer = client::post_bytes(&system.address, path, &body, &[]);
        assert_eq!(answer.status, status, "{name}: {answer:?}");
        let error = &answer.body["error"];
        assert_eq!(error["code"], code, "{name}: {answer:?}");
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|words| words.len() > 8),
            "{name}: {answer:?}"
        );
        text.push_str(&running.next_text());
    }
    let large = with(&format!(r#","user":"{}""#, "a".repeat(10 << 20)));
    let told = told_while_sending(
        &system.address,
        &format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            large.len()
        ),
        &large,
    );
    assert!(told.starts_with("HTTP/1.1 413"), "{told}");
    assert!(told.contains("request_too_large"), "{told}");
    // Words that are no HTTP at all.
    let told = told_while_sending(&system.address, "\u{16}\u{3}\u{1}\0 hello\r\n\r\n", b"");
    assert!(
        told.is_empty() || told.starts_with("HTTP/1.1 400"),
        "{told}"
    );

    for _ in 0..20 {
        text.push_str(&running.next_text());
    }
    let status = system.status();
    assert_eq!(status["counters"]["worker_exits"], 0);
    assert_eq!(status["queue"]["running"], 1, "{status:#}");
    assert_eq!(status["queue"]["waiting"], 0, "{status:#}");
    // One slot was used, by the stream: what was refused never had another.
    let after = client::post(
        &system.address,
        CHAT,
        &json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 2 }),
    );
    assert_eq!(after.status, 200, "{after:?}");
    drop(running);
    system.await_status("the stream is cancelled", |status| {
        status["counters"]["cancelled"] == 1
    });
    let counters = &system.status()["counters"];
    assert_eq!(counters["completed"], 1, "{counters:#}");
    assert!(
        undisturbed("undisturbed").starts_with(&text),
        "the stream was disturbed"
    );
}

#[test]
fn a_prompt_longer_than_the_context_never_takes_a_slot() {
    let system = System::scripted("step_us=1000", &["--slots", "1", "--ctx-size", "64"]);
    let prompt: Vec<u32> = vec![97; 64];
    let answer = client::post(
        &system.address,
        "/v1/completions",
        &json!({ "prompt": prompt }),
    );
    assert_eq!(answer.status, 400, "{answer:?}");
    assert_eq!(answer.body["error"]["code"], "context_length_exceeded");
    let words = answer.body["error"]["message"].as_str().unwrap();
    assert!(words.contains("64"), "{words}");
    let status = system.await_status("it is counted", |status| status["counters"]["denied"] == 1);
    assert_eq!(status["instances"][0]["steps"], 0, "{status:#}");
    let fits = json!({ "prompt": &prompt[1..] });
    let answer = client::post(&system.address, "/v1/completions", &fits);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.body["usage"]["completion_tokens"], 1);
}

#[test]
fn a_huge_max_tokens_means_as_much_as_the_context_holds() {
    let system = System::scripted("", &["--slots", "1", "--ctx-size", "64"]);
    for max_tokens in ["65", "4294967296", "9223372036854775807"] {
        let body: Value = serde_json::from_str(&format!(
            r#"{{"prompt":[97,98,99],"max_tokens":{max_tokens}}}"#
        ))
        .unwrap();
        let answer = client::post(&system.address, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{max_tokens}: {answer:?}");
        assert_eq!(answer.body["usage"]["completion_tokens"], 61);
        assert_eq!(answer.body["choices"][0]["finish_reason"], "length");
    }
}

/// A GGUF header of a small model of 2,048 tokens of context.
fn header(architecture: &str) -> Vec<u8> {
    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    let numbers = [
        ("block_count", 4_u32),
        ("context_length", 2048),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
    ];
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend((1 + numbers.len() as u64).to_le_bytes());
    text(&mut bytes, "general.architecture");
    bytes.extend(8_u32.to_le_bytes());
    text(&mut bytes, architecture);
    for (key, number) in numbers {
        text(&mut bytes, &format!("{architecture}.{key}"));
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

#[cfg(feature = "llama")]
#[test]
fn a_model_that_the_engine_cannot_load_ends_with_78_and_its_cause_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("strange.gguf");
    std::fs::write(&model, header("strange")).unwrap();
    let refused = Start::new(&["--model", model.to_str().unwrap(), "--threads", "1"]).refused();
    assert_eq!(refused.code, Some(78), "{refused:?}");
    let cause = refused.log.lines().last().unwrap();
    assert!(
        cause.starts_with("dispatcher: no instance can start: "),
        "{refused:?}"
    );
    assert!(cause.contains("strange"), "{refused:?}");
    let spawned = refused.log.matches("worker spawned").count();
    assert_eq!(spawned, 1, "no second try: {refused:?}");
}

#[test]
fn what_the_header_says_wrong_is_refused_before_any_worker_starts() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("cut.gguf"), &header("m")[..60]).unwrap();
    std::fs::write(path("text.gguf"), "no model at all").unwrap();
    for (model, words) in [
        (path("none.gguf"), "none.gguf"),
        (path("cut.gguf"), "cut.gguf"),
        (path("text.gguf"), "text.gguf"),
    ] {
        let refused = Start::new(&["--model", &model]).refused();
        assert_eq!(refused.code, Some(78), "{refused:?}");
        assert_eq!(refused.log.lines().count(), 1, "once: {refused:?}");
        assert!(refused.log.contains(words), "{refused:?}");
    }
}

#[test]
fn a_count_of_zero_is_refused_by_the_whole_program() {
    for (flag, name) in [("--instances", "instances"), ("--slots", "slots")] {
        let refused = Start::scripted("", &[flag, "0"]).refused();
        assert_eq!(refused.code, Some(78), "{refused:?}");
        assert!(refused.log.contains(name), "{refused:?}");
        assert!(refused.log.contains('1'), "the least is said: {refused:?}");
    }
}

#[test]
fn memory_that_cannot_hold_the_instances_is_refused_at_once_with_the_arithmetic() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    std::fs::write(&model, header("m")).unwrap();
    let refused = Start::new(&[
        "--model",
        model.to_str().unwrap(),
        "--instances",
        "8",
        "--slots",
        "8",
        "--memory-limit",
        "100MiB",
    ])
    .refused();
    assert_eq!(refused.code, Some(78), "{refused:?}");
    assert!(refused.took < Duration::from_secs(5), "{refused:?}");
    for words in [
        "640 MiB of the usable 100 MiB",
        "8 x (",
        "8 slots x 2048 tokens",
        "`--instances 1",
    ] {
        assert!(refused.log.contains(words), "`{words}`: {refused:?}");
    }
    assert!(!refused.log.contains("worker spawned"), "{refused:?}");
}

#[test]
fn a_port_in_use_is_refused_and_its_holder_serves_on() {
    let system = System::scripted("", &["--slots", "1"]);
    let port = system.address.rsplit(':').next().unwrap();
    let refused = Start::scripted("", &["--port", port]).refused();
    assert_eq!(refused.code, Some(78), "{refused:?}");
    assert!(refused.log.contains("--port"), "{refused:?}");
    assert!(!refused.log.contains("worker spawned"), "{refused:?}");
    client::stream(&system.address, &chat("still here", 3)).assert_complete();
}
