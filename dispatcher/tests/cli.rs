//! What a person at the command line sees: help, effective settings, refusals and their exit codes.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory to run in, with an empty environment: a models folder, and a worker program that only
/// says which engine it has.
struct Place {
    directory: tempfile::TempDir,
}

fn place() -> Place {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("models")).unwrap();
    let worker = directory.path().join("worker");
    fs::write(&worker, "#!/bin/sh\necho llama\n").unwrap();
    fs::set_permissions(&worker, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    Place { directory }
}

impl Place {
    fn model(self, name: &str) -> Self {
        fs::write(self.path("models").join(name), model()).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_dispatcher"))
            .current_dir(self.directory.path())
            .env_clear()
            .env("HOME", "/nonexistent")
            .env("DISPATCHER_WORKER", "worker")
            .args(words)
            .output()
            .unwrap()
    }

    /// A run that must not succeed, the way a terminal would show it.
    fn refusal(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.stdout.is_empty(), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let code = output.status.code().unwrap();
        format!("$ dispatcher {}\n{text}[exit {code}]\n", words.join(" "))
    }

    fn refusals(&self, runs: &[&[&str]]) -> String {
        let texts: Vec<String> = runs.iter().map(|words| self.refusal(words)).collect();
        texts.join("\n")
    }
}

/// The least header that is a model: 2,048 tokens of context, 1,024 bytes of KV cache a token.
fn model() -> Vec<u8> {
    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    let numbers = [
        ("m.block_count", 4_u32),
        ("m.context_length", 2048),
        ("m.attention.head_count_kv", 1),
        ("m.attention.key_length", 64),
        ("m.attention.value_length", 64),
    ];
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend((1 + numbers.len() as u64).to_le_bytes());
    text(&mut bytes, "general.architecture");
    bytes.extend(8_u32.to_le_bytes());
    text(&mut bytes, "m");
    for (key, number) in numbers {
        text(&mut bytes, key);
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

/// Help as text of a fixed width, whatever terminal the tests run in.
fn help() -> String {
    dispatcher::cli::command()
        .term_width(100)
        .render_long_help()
        .to_string()
}

#[test]
fn help_names_every_setting_and_the_exit_codes() {
    insta::assert_snapshot!(help());
}

#[test]
fn the_command_line_page_is_the_help() {
    let page = format!(
        "# Command line\n\n\
         Generated from the program's own help by `scripts/generate-docs`; a test holds the two together.\n\n\
         ```text\n{}\n```\n",
        help().trim_end()
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/CLI.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    assert!(
        committed == page,
        "docs/CLI.md is not the program's help: run scripts/generate-docs"
    );
}

#[test]
fn version_and_help_succeed() {
    let place = place();
    for words in [["version"], ["--version"], ["--help"]] {
        let output = place.run(&words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("ispatcher"), "{text}");
    }
}

#[test]
fn effective_settings_are_printed_with_their_sources() {
    let place = place().model("tiny.gguf");
    fs::write(place.path("d.toml"), "queue = 64\ninstances = 5\n").unwrap();
    let words = ["config", "show", "--instances", "2", "--threads", "1"];
    let fixed = [
        "--config",
        "d.toml",
        "--memory-limit",
        "1GiB",
        "--run-dir",
        "run",
    ];
    let output = place.run(&[&words[..], &fixed[..]].concat());
    assert!(output.status.success(), "{output:?}");
    insta::assert_snapshot!(String::from_utf8(output.stdout).unwrap());
}

#[test]
fn a_count_of_zero_is_refused() {
    let place = place().model("tiny.gguf");
    let zeros: [&[&str]; 2] = [&["--instances", "0"], &["--slots", "0"]];
    insta::assert_snapshot!(place.refusals(&zeros));
}

#[test]
fn an_unknown_flag_is_refused_as_permanently_as_a_wrong_value() {
    insta::assert_snapshot!(place().refusal(&["--instance", "2"]));
}

#[test]
fn no_model_is_said_with_what_to_do() {
    insta::assert_snapshot!(place().refusals(&[&[], &["--engine", "llama"]]));
}

#[test]
fn two_models_are_listed_with_a_command_each() {
    let place = place().model("a.gguf").model("b c.gguf");
    insta::assert_snapshot!(place.refusal(&[]));
}

#[test]
fn an_engine_that_is_not_built_in_is_said_exactly() {
    let place = place().model("tiny.gguf");
    let runs: [&[&str]; 2] = [
        &["--instances", "3", "--engine", "mlx"],
        &["--engine", "vllm"],
    ];
    insta::assert_snapshot!(place.refusals(&runs));
}

#[test]
fn a_model_that_is_not_there_or_not_one_is_said_by_name() {
    let place = place().model("tiny.gguf");
    fs::write(place.path("notes.gguf"), "no model at all").unwrap();
    fs::write(place.path("cut.gguf"), &model()[..60]).unwrap();
    let models = ["large", "notes.gguf", "cut.gguf", "models"];
    let refusals: Vec<String> = models
        .iter()
        .map(|model| place.refusal(&["--model", model]))
        .collect();
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn a_model_that_may_not_be_read_is_said_so() {
    let place = place();
    let sealed = place.path("sealed.gguf");
    fs::write(&sealed, model()).unwrap();
    fs::set_permissions(&sealed, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    // Root may read everything: there the model is simply taken.
    if fs::File::open(&sealed).is_err() {
        let refusal = place.refusal(&["--model", "sealed.gguf"]);
        assert!(refusal.contains("sealed.gguf cannot be read"), "{refusal}");
        assert!(refusal.contains("[exit 78]"), "{refusal}");
    } else {
        let words = ["config", "show", "--model", "sealed.gguf", "--threads", "1"];
        assert!(place.run(&words).status.success());
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_arithmetic_and_at_once() {
    let place = place().model("tiny.gguf");
    let runs: [&[&str]; 2] = [
        &["--memory-limit", "70MiB", "--slots", "64"],
        &["--memory-limit", "1MiB"],
    ];
    let begin = std::time::Instant::now();
    insta::assert_snapshot!(place.refusals(&runs));
    assert!(
        begin.elapsed() < std::time::Duration::from_secs(2),
        "1 s each"
    );
}

#[test]
fn a_configuration_file_is_held_to_its_words() {
    let place = place().model("tiny.gguf");
    fs::write(place.path("key.toml"), "ctx_size = 1024\n").unwrap();
    fs::write(place.path("value.toml"), "port = \"many\"\n").unwrap();
    fs::write(place.path("syntax.toml"), "port = \n").unwrap();
    let files = ["none.toml", "key.toml", "value.toml", "syntax.toml"];
    let refusals: Vec<String> = files
        .iter()
        .map(|file| place.refusal(&["--config", file]))
        .collect();
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn a_missing_worker_program_is_said_with_how_to_get_one() {
    let place = place().model("tiny.gguf");
    insta::assert_snapshot!(place.refusal(&["--worker", "nowhere"]));
}

#[test]
fn a_port_in_use_is_said_with_the_flag_to_change() {
    let place = place().model("tiny.gguf");
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let words = [
        "--port",
        &port,
        "--threads",
        "1",
        "--run-dir",
        "run",
        "--log-format",
        "text",
    ];
    let refusal = place.refusal(&words).replace(&port, "PORT");
    assert!(
        refusal.contains("cannot listen on 127.0.0.1:PORT: another process listens there"),
        "{refusal}"
    );
    assert!(refusal.contains("[exit 78]"), "{refusal}");
}
