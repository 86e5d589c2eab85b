//! The whole system on MLX: dispatcher, queue, link, workers, and MLX itself.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use worker::engine::mlx::Unpacking;

use super::plain::{Parting, case, load, parting};
use super::system::client::{self, Events, chat};
use super::system::{self, Start, System};

const TOKENS: usize = 16;

/// Workers on the quickstart's model.
fn start(arguments: &[&str]) -> System {
    let folder = case("smollm2");
    let named = ["--engine", "mlx", "--model", folder.to_str().unwrap()];
    System::start(&[&named[..], arguments].concat())
}

#[derive(Default)]
struct Ids {
    prompt: Vec<u32>,
    output: Vec<u32>,
    attempts: u64,
}

impl Ids {
    fn take(&mut self, event: &str) {
        let Ok(value) = serde_json::from_str::<Value>(event) else {
            return;
        };
        assert!(value.get("error").is_none(), "{value}");
        let ids = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone());
        if let Ok(prompt) = ids(&value["prompt_token_ids"]) {
            self.prompt = prompt;
        }
        self.output
            .extend(ids(&value["choices"][0]["token_ids"]).unwrap_or_default());
        if let Some(attempts) = value["timings"]["attempts"].as_u64() {
            self.attempts = attempts;
        }
    }
}

/// One stream; the worker that serves it is killed once `cut` tokens have come.
fn stream(system: &System, ask: &str, cut: Option<usize>) -> Ids {
    let body = json!({
        "messages": [{ "role": "user", "content": ask }],
        "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true, "stream": true,
        "return_token_ids": true, "cache_prompt": false,
    });
    let mut events = Events::open(&system.address, "/v1/chat/completions", &body);
    let mut ids = Ids::default();
    let mut cut = cut;
    while let Some(event) = events.next() {
        ids.take(&event);
        if cut.is_some_and(|cut| ids.output.len() >= cut) {
            cut = None;
            let status = system.status();
            let places = status["instances"].as_array().unwrap();
            let busy = places.iter().find(|place| place["running"] == 1).unwrap();
            let pid = u32::try_from(busy["pid"].as_u64().unwrap()).unwrap();
            system::kill(pid, Signal::SIGKILL);
        }
    }
    ids
}

#[test]
fn streams_whose_worker_is_killed_end_as_they_would_have_or_part_at_a_near_tie() {
    let system = start(&["--instances", "2", "--slots", "1", "--suspect-after", "100"]);
    let mut pairs = Vec::new();
    for (index, subject) in ["a lighthouse", "bread", "bees", "winter"]
        .into_iter()
        .enumerate()
    {
        let ask = format!("Write about {subject}.");
        let whole = stream(&system, &ask, None);
        let cut = 2 + 3 * index;
        let resumed = stream(&system, &ask, Some(cut));
        assert_eq!((whole.attempts, whole.output.len()), (1, TOKENS), "{ask}");
        assert_eq!(
            (resumed.attempts, resumed.output.len()),
            (2, TOKENS),
            "{ask}"
        );
        assert_eq!(
            whole.output[..cut],
            resumed.output[..cut],
            "{ask}: before the cut"
        );
        pairs.push((whole, resumed));
        system.await_status("both instances ready", |status| {
            let mut places = status["instances"].as_array().unwrap().iter();
            places.all(|place| place["state"] == "ready")
        });
    }
    drop(system);
    let mut loaded = load(&case("smollm2"), Unpacking::Always).unwrap();
    let mut ties = 0;
    for (whole, resumed) in &pairs {
        match parting(&mut loaded, &whole.prompt, &whole.output, &resumed.output) {
            Parting::Equal => {}
            Parting::NearTie(..) => ties += 1,
            apart @ Parting::Apart(..) => panic!("{apart:?}"),
        }
    }
    println!("{ties} near ties in {}", pairs.len());
}

#[test]
fn streams_that_come_together_share_steps() {
    let system = start(&["--instances", "1", "--slots", "4"]);
    std::thread::scope(|scope| {
        for index in 0..6 {
            let address = &system.address;
            let ask = format!("Write a story about {index} cats.");
            scope.spawn(move || {
                client::stream(address, &chat(&ask, 12)).assert_complete();
            });
        }
    });
    let mean =
        system.metric("dispatcher_batch_size_sum") / system.metric("dispatcher_batch_size_count");
    println!("mean batch occupancy {mean}");
    assert!(mean > 1.5, "mean batch occupancy is {mean}");
    let status = system.status();
    let device = status["instances"][0]["device"].as_str().unwrap();
    assert!(device.starts_with("MLX"), "{device}");
}

/// Threads of a process by the name that the kernel has for them.
#[cfg(target_os = "linux")]
fn threads_named(pid: u32, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|comm| comm.trim() == name)
        .count()
}

/// A BLAS starts its threads with the process; they bear its name, as the first one does. Every
/// other thread of a worker has a name of its own.
#[cfg(target_os = "linux")]
#[test]
fn three_instances_found_without_a_name_have_one_computing_thread_each() {
    let models = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(case("smollm2"), models.path().join("smollm2")).unwrap();
    let directory = models.path().to_str().unwrap();
    let arguments = [
        "--instances",
        "3",
        "--engine",
        "mlx",
        "--models-dir",
        directory,
    ];
    let system = Start::new(&arguments)
        .environment("OPENBLAS_NUM_THREADS", "7")
        .start();
    system.await_status("all ready", |status| {
        let mut places = status["instances"].as_array().unwrap().iter();
        places.all(|place| place["state"] == "ready")
    });
    let cores = std::thread::available_parallelism().unwrap().get();
    client::stream(&system.address, &chat("Say hello.", 4)).assert_complete();
    for pid in system.worker_pids() {
        let own = threads_named(pid, "dispatcher-work");
        assert!(own <= (cores / 3).max(1), "{own} threads of the BLAS's");
    }
    if cores < 3 {
        system.await_log("each computes with one thread");
    }
}

/// A dispatcher with two workers on a spoilt copy of a folder; what it ended with.
fn refused(name: &str, spoil: impl FnOnce(&std::path::Path)) -> system::Refused {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(case(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    spoil(copy.path());
    let folder = copy.path().to_str().unwrap();
    Start::new(&["--engine", "mlx", "--model", folder, "--instances", "2"]).refused()
}

fn replace(folder: &std::path::Path, file: &str, from: &str, to: &str) {
    let path = folder.join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file} has no {from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn folders_that_cannot_be_served_end_the_dispatcher_with_78_and_the_cause_and_no_second_try() {
    type Spoil = Box<dyn FnOnce(&std::path::Path)>;
    let shard = "model-00002-of-00002.safetensors";
    let cases: [(&str, &str, Spoil); 6] = [
        (
            "llama-tied",
            "mlp.gate_proj.weight has the shape",
            Box::new(|f| {
                replace(
                    f,
                    "config.json",
                    "\"intermediate_size\": 256",
                    "\"intermediate_size\": 512",
                )
            }),
        ),
        (
            "llama-tied",
            "gemma3",
            Box::new(|f| replace(f, "config.json", "\"llama\"", "\"gemma3\"")),
        ),
        (
            "llama-untied-4bit",
            shard,
            Box::new(move |f| std::fs::remove_file(f.join(shard)).unwrap()),
        ),
        (
            "llama-untied-4bit",
            shard,
            Box::new(move |f| {
                let whole = std::fs::read(f.join(shard)).unwrap();
                std::fs::write(f.join(shard), &whole[..whole.len() / 2]).unwrap();
            }),
        ),
        (
            "llama-tied",
            "tokenizer.json",
            Box::new(|f| std::fs::remove_file(f.join("tokenizer.json")).unwrap()),
        ),
        (
            "llama-tied",
            "chat template",
            Box::new(|f| std::fs::write(f.join("chat_template.jinja"), "{% for m in").unwrap()),
        ),
    ];
    for (name, words, spoil) in cases {
        let refused = refused(name, spoil);
        assert_eq!(refused.code, Some(78), "{refused:?}");
        let cause = refused.log.lines().last().unwrap();
        assert!(
            cause.starts_with("dispatcher: no instance can start: "),
            "{refused:?}"
        );
        assert!(cause.contains(words), "`{words}`: {refused:?}");
        let spawned = refused.log.matches("worker spawned").count();
        assert!(spawned <= 2, "one try an instance: {refused:?}");
    }
}

#[test]
fn a_gguf_file_named_for_mlx_is_refused_before_a_worker_starts() {
    let model = system::model();
    let refused = Start::new(&["--engine", "mlx", "--model", model.to_str().unwrap()]).refused();
    assert_eq!(refused.code, Some(78), "{refused:?}");
    assert!(
        refused.log.contains("scripts/convert-gguf-to-mlx"),
        "{refused:?}"
    );
    assert!(!refused.log.contains("worker spawned"), "{refused:?}");
}

#[test]
fn a_hostile_chat_template_costs_its_own_request_and_nobody_elses() {
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 4000000000 }}",
    ] {
        let copy = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(case("llama-tied")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        std::fs::write(copy.path().join("chat_template.jinja"), source).unwrap();
        let folder = copy.path().to_str().unwrap();
        let system = System::start(&["--engine", "mlx", "--model", folder]);
        let pids = system.worker_pids();
        let asked = Instant::now();
        let chat = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
        let answer = client::post(&system.address, "/v1/chat/completions", &chat);
        assert!((400..600).contains(&answer.status), "{source}: {answer:?}");
        assert!(asked.elapsed() < Duration::from_secs(30), "{source}");
        let plain = json!({ "prompt": "hi", "max_tokens": 2, "ignore_eos": true });
        let answer = client::post(&system.address, "/v1/completions", &plain);
        assert_eq!(answer.status, 200, "{source}: {answer:?}");
        assert_eq!(system.worker_pids(), pids, "{source}: the worker lives");
    }
}
