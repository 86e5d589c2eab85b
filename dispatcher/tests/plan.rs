//! What `dispatcher plan` says before anything is loaded: tables, recommendations, refusals.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A folder to run in, with an empty environment and a cache of its own.
struct Place(tempfile::TempDir);

fn place() -> Place {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("models")).unwrap();
    Place(directory)
}

impl Place {
    fn gguf(self, name: &str, extra: &[(&str, u32)], tensors: &[(&str, u64)]) -> Self {
        fs::write(
            self.0.path().join("models").join(name),
            gguf(extra, tensors),
        )
        .unwrap();
        self
    }

    fn run(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_dispatcher"))
            .current_dir(self.0.path())
            .env_clear()
            .env("HOME", self.0.path())
            .arg("plan")
            .args(words)
            .output()
            .unwrap()
    }

    fn says(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn refusal(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.stdout.is_empty(), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let code = output.status.code().unwrap();
        format!(
            "$ dispatcher plan {}\n{text}[exit {code}]\n",
            words.join(" ")
        )
    }
}

/// A GGUF file of F32 tensors whose bytes are a hole in the file: 28 layers, 1,024 bytes of KV cache
/// a token and layer.
fn gguf(extra: &[(&str, u32)], tensors: &[(&str, u64)]) -> Vec<u8> {
    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    let mut numbers = vec![
        ("m.block_count", 28_u32),
        ("m.context_length", 8192),
        ("m.attention.head_count_kv", 2),
        ("m.attention.key_length", 128),
        ("m.attention.value_length", 128),
    ];
    numbers.extend(extra);
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((1 + numbers.len() as u64).to_le_bytes());
    text(&mut bytes, "general.architecture");
    bytes.extend(8_u32.to_le_bytes());
    text(&mut bytes, "m");
    for (key, number) in numbers {
        text(&mut bytes, key);
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    let mut at = 0_u64;
    for (name, numbers) in tensors {
        text(&mut bytes, name);
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(numbers.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(at.to_le_bytes());
        at += numbers * 4;
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.resize(bytes.len() + usize::try_from(at).unwrap(), 0);
    bytes
}

const DENSE: [(&str, u64); 3] = [
    ("token_embd.weight", 1 << 20),
    ("blk.0.ffn_up.weight", 4 << 20),
    ("output.weight", 1 << 20),
];

const GIVEN: [&str; 6] = [
    "--bandwidth",
    "25",
    "--memory-limit",
    "4GiB",
    "--ctx-size",
    "4096",
];

#[test]
fn a_dense_model_has_a_table_and_a_recommendation_with_its_reasons() {
    let place = place().gguf("dense.gguf", &[], &DENSE);
    insta::assert_snapshot!(place.says(&[&["dense"], &GIVEN[..]].concat()));
}

#[test]
fn a_mixture_says_how_many_of_its_experts_a_step_reads() {
    let experts = [("m.expert_count", 8), ("m.expert_used_count", 2)];
    let tensors = [
        ("token_embd.weight", 1 << 20),
        ("blk.0.ffn_up_exps.weight", 16 << 20),
        ("output.weight", 1 << 20),
    ];
    let place = place().gguf("mixture.gguf", &experts, &tensors);
    insta::assert_snapshot!(place.says(&[&["mixture"], &GIVEN[..]].concat()));
}

#[test]
fn json_says_what_the_table_says() {
    let place = place().gguf("dense.gguf", &[], &DENSE);
    let text = place.says(&[&["dense", "--json"], &GIVEN[..]].concat());
    let plan: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(plan["model"], "dense");
    assert_eq!(plan["weights"]["always_bytes"], 5 * (4 << 20));
    assert_eq!(
        plan["bandwidth"],
        json!({"source": "given", "gb_per_s": 25.0})
    );
    assert_eq!(plan["estimates"], "assumed");
    let cells = plan["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 3 * 6);
    for cell in cells {
        let number = |key: &str| cell[key].as_f64().unwrap();
        assert!(
            number("estimate_tokens_per_s") <= number("ceiling_tokens_per_s"),
            "{cell}"
        );
        assert_eq!(number("streams"), number("instances") * number("slots"));
        // BW·N / (K·W + N·KV), with 64 + 128 tokens of cache a stream.
        let kv = 28.0 * 1024.0 * 192.0;
        let bytes = number("instances") * 20_971_520.0 + number("streams") * kv;
        let ceiling = 25e9 * number("streams") / bytes;
        assert!(
            (number("ceiling_tokens_per_s") / ceiling - 1.0).abs() < 1e-9,
            "{cell}"
        );
    }
    let run = &plan["recommendation"];
    assert_eq!((&run["instances"], &run["slots"]), (&json!(1), &json!(16)));
}

#[test]
fn the_memory_is_measured_once_and_then_a_plan_takes_less_than_a_second() {
    let place = place().gguf("dense.gguf", &[], &DENSE);
    let first: Value = serde_json::from_str(&place.says(&["dense", "--json"])).unwrap();
    let began = Instant::now();
    let second: Value = serde_json::from_str(&place.says(&["dense", "--json"])).unwrap();
    let took = began.elapsed();
    assert_eq!(first["bandwidth"], second["bandwidth"], "measured once");
    assert_eq!(first["bandwidth"]["source"], "measured");
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn what_cannot_be_planned_is_said_with_what_to_do() {
    let place = place()
        .gguf("a.gguf", &[], &DENSE)
        .gguf("b c.gguf", &[], &DENSE);
    let folder = place.0.path().join("models/folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    let runs: [&[&str]; 7] = [
        &[],
        &["none"],
        &["models/folder"],
        &["a", "--bandwidth", "0"],
        &["a", "--bandwidth", "25", "--measure"],
        &["a", "--slots", "0"],
        &["a", "--devices", "0"],
    ];
    let texts: Vec<String> = runs.iter().map(|words| place.refusal(words)).collect();
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_model_whose_load_fails_is_not_timed() {
    let place = place().gguf("a.gguf", &[], &DENSE);
    // It has the engine by its own word, and then cannot load anything.
    let script = "#!/bin/sh\n[ \"$1\" = --engines ] && echo llama && exit 0\nexit 78\n";
    let program = place.0.path().join("no-worker");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    let output = place.run(&["a", "--measure", "--worker", "no-worker"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(71), "{text}");
    assert!(
        text.contains("the steps could not be timed: the server ended"),
        "{text}"
    );
}
