//! The whole system on the real model: dispatcher, queue, link, workers, llama.cpp.

mod system;

use serde_json::json;
use system::System;
use system::client::{self, Events, chat};

const STREAMS: usize = 16;

#[test]
fn real_model_two_instances_answer_sixteen_streams_each_with_its_own_number() {
    let system = System::llama(&["--instances", "2", "--slots", "4"]);
    let numbers: Vec<String> = (0..STREAMS)
        .map(|index| format!("{}", 3107 + 577 * index))
        .collect();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let streams: Vec<_> = numbers
            .iter()
            .map(|number| {
                let address = &system.address;
                let ask = format!("Repeat this number and nothing else: {number}");
                scope.spawn(move || client::stream(address, &chat(&ask, 24)))
            })
            .collect();
        streams
            .into_iter()
            .map(|stream| stream.join().unwrap())
            .collect()
    });
    let mut own = 0;
    let mut instances = std::collections::BTreeSet::new();
    for (number, answer) in numbers.iter().zip(&answers) {
        answer.assert_complete();
        own += usize::from(answer.text.contains(number));
        for other in numbers.iter().filter(|other| *other != number) {
            assert!(
                !answer.text.contains(other),
                "asked for {number}, got {other}: {}",
                answer.text
            );
        }
        instances.insert(
            answer.timings.as_ref().unwrap()["instance"]
                .as_u64()
                .unwrap(),
        );
    }
    // A model this small may garble one; most must come back whole, or nothing was compared.
    assert!(
        own >= STREAMS * 3 / 4,
        "only {own} of {STREAMS} repeated their number: {answers:#?}"
    );
    assert_eq!(instances.len(), 2, "one instance served all");
    let mean =
        system.metric("dispatcher_batch_size_sum") / system.metric("dispatcher_batch_size_count");
    assert!(mean > 1.0, "mean batch occupancy is {mean}");
}

#[test]
fn real_model_kill_of_one_worker_leaves_the_listener_and_the_other_streams_alone() {
    let system = System::llama(&["--instances", "2", "--slots", "4"]);
    let mut streams: Vec<_> = (0..6)
        .map(|index| {
            let body = chat(&format!("Write a story about {index} cats."), 48);
            Events::open(&system.address, "/v1/chat/completions", &body)
        })
        .collect();
    for stream in &mut streams {
        stream.next_text();
    }
    let before = system.status();
    let victim = u32::try_from(before["instances"][0]["pid"].as_u64().unwrap()).unwrap();
    system::kill(victim, nix::sys::signal::Signal::SIGKILL);
    for _ in 0..20 {
        assert_eq!(client::get_blocking(&system.address, "/health").0, 200);
    }
    let mut resumed = 0;
    for mut stream in streams {
        let whole = stream.whole();
        whole.assert_complete();
        resumed += usize::from(whole.timings.unwrap()["attempts"].as_u64().unwrap() > 1);
    }
    assert!(resumed >= 1, "the killed worker served none of the streams");
    assert!(resumed < 6, "streams of the other worker were touched");
    system.await_status("both instances ready again", |status| {
        status["instances"]
            .as_array()
            .unwrap()
            .iter()
            .all(|instance| instance["state"] == "ready")
    });
    assert_ne!(system.worker_pids()[0], victim);
}

#[test]
fn real_model_a_reload_to_another_file_lets_streams_end_on_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dispatcher.toml");
    let write = |model: &std::path::Path| {
        let words = format!(
            "engine = \"llama\"\nmodel = \"{}\"\nslots = 2\nthreads = 1\nctx-size = 512\n",
            model.display()
        );
        std::fs::write(&file, words).unwrap();
    };
    write(&system::model());
    let system = System::start(&["--config", file.to_str().unwrap()]);
    let before = system.worker_pids();
    let mut running = Events::open(
        &system.address,
        "/v1/chat/completions",
        &chat("Tell me a long story about the sea.", 96),
    );
    running.next_text();
    let other = folder.path().join("another.gguf");
    std::fs::copy(system::model(), &other).unwrap();
    write(&other);
    system.signal(nix::sys::signal::Signal::SIGHUP);
    let status = system.await_status("a worker of the new model", |status| {
        let one = &status["instances"][0];
        one["state"] == "ready" && one["pid"] != before[0]
    });
    let whole = running.whole();
    whole.assert_complete();
    assert_eq!(
        whole.timings.unwrap()["attempts"],
        1,
        "it ended where it began"
    );
    assert_eq!(status["reloads"], 1);
    // The served name is what clients know it by, and stays until the next start.
    let log = system.read_log();
    assert!(log.contains("served-model-name") && log.contains("\"model\":\"another\""));
    client::stream(&system.address, &chat("Say hello.", 8)).assert_complete();
}

#[test]
fn real_model_a_prompt_over_the_context_is_refused_before_it_takes_a_slot() {
    let system = System::llama(&["--instances", "1", "--slots", "2", "--ctx-size", "256"]);
    let long = "word ".repeat(2000);
    let answer = client::post(
        &system.address,
        "/v1/chat/completions",
        &json!({ "messages": [{ "role": "user", "content": long }], "max_tokens": 4 }),
    );
    assert_eq!(answer.status, 400, "{answer:?}");
    assert_eq!(answer.body["error"]["code"], "context_length_exceeded");
    let next = client::stream(&system.address, &chat("Say hello.", 8));
    next.assert_complete();
}

#[test]
fn real_model_streamed_and_whole_answers_are_the_same_text() {
    let system = System::llama(&["--instances", "1", "--slots", "1"]);
    let ask = "Answer with three emoji and the word caf\u{e9}.";
    let streamed = client::stream(&system.address, &chat(ask, 40));
    streamed.assert_complete();
    let mut body = chat(ask, 40);
    body["stream"] = json!(false);
    body.as_object_mut().unwrap().remove("stream_options");
    let whole = client::post(&system.address, "/v1/chat/completions", &body);
    assert_eq!(whole.status, 200, "{whole:?}");
    assert_eq!(
        whole.body["choices"][0]["message"]["content"],
        streamed.text.as_str()
    );
    let usage = streamed.usage.unwrap();
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(whole.body["usage"][count], usage[count], "{count}");
    }
}

#[test]
fn real_model_the_bus_is_measured_in_an_idle_moment_and_its_use_is_shown() {
    let system = System::llama(&["--slots", "2"]);
    let measured = system.await_status("a measured bus", |status| {
        status["bus"][0]["source"] == "measured"
    });
    let bus = &measured["bus"][0];
    assert_eq!(bus["device"], "CPU", "{bus}");
    assert!(
        bus["best_gb_per_s"].as_f64() >= bus["median_gb_per_s"].as_f64(),
        "{bus}"
    );
    let mut running = Events::open(
        &system.address,
        "/v1/chat/completions",
        &chat("Count slowly to one hundred.", 400),
    );
    running.next_text();
    let busy = system.await_status("a use of it", |status| {
        let advice = status["bus"][0]["advice"].as_str();
        advice.is_some_and(|words| words.contains("busy at batch 1:"))
    });
    let (bus, instance) = (&busy["bus"][0], &busy["instances"][0]);
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    // Weights of each counted step, and a little of the cache.
    let weights = number(&instance["steps_per_s"]) * number(&instance["weight_bytes_per_step"]);
    let read = number(&instance["bus_bytes_per_s"]);
    assert!(read >= weights && read < weights * 1.2, "{instance}");
    let usage = read / 1e9 / number(&bus["best_gb_per_s"]);
    assert!((number(&bus["usage"]) / usage - 1.0).abs() < 1e-6, "{bus}");
    assert!(
        bus["advice"].as_str().unwrap().contains("busy at batch 1"),
        "{bus}"
    );
    assert!(system.metric("dispatcher_bus_usage_ratio") >= 0.0);
}
