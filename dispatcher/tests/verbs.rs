//! The commands beside `serve`: what they print, and that it is of use.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(home: &Path, words: &[&str]) -> Output {
    fs::write(home.join("worker"), "").unwrap();
    Command::new(env!("CARGO_BIN_EXE_dispatcher"))
        .current_dir(home)
        .env_clear()
        .env("HOME", home)
        .env("PATH", "/usr/bin:/bin")
        .env("DISPATCHER_WORKER", home.join("worker"))
        .args(words)
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn a_first_configuration_is_written_found_checked_and_shown() {
    let home = tempfile::tempdir().unwrap();
    let written = run(home.path(), &["config", "init"]);
    assert!(written.status.success(), "{written:?}");
    let file = home.path().join(".config/dispatcher/dispatcher.toml");
    let commented = fs::read_to_string(&file).unwrap();
    insta::assert_snapshot!(commented);
    assert_eq!(
        run(home.path(), &["config", "init"]).status.code(),
        Some(78)
    );
    // It is read without being named.
    fs::write(
        &file,
        format!("{commented}\nslots = 3\nengine = \"scripted\"\n"),
    )
    .unwrap();
    let checked = run(home.path(), &["config", "check"]);
    assert!(checked.status.success(), "{}", text(&checked));
    let shown = run(home.path(), &["config", "show", "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let slots = shown["settings"].as_array().unwrap().iter();
    let slots = slots.clone().find(|one| one["key"] == "slots").unwrap();
    assert_eq!(slots["value"], 3);
    assert_eq!(slots["source"], format!("file {}", file.display()));
    fs::write(&file, "slots = 3\nslots = 4\n").unwrap();
    let twice = run(home.path(), &["config", "check"]);
    assert_eq!(twice.status.code(), Some(78));
    assert!(text(&twice).contains("duplicate key"), "{}", text(&twice));
}

#[test]
fn the_committed_schema_is_the_programs() {
    let home = tempfile::tempdir().unwrap();
    let schema = run(home.path(), &["config", "schema"]);
    let page = String::from_utf8(schema.stdout).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/dispatcher.schema.json");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    assert!(
        committed == page,
        "docs/dispatcher.schema.json: run scripts/generate-docs"
    );
    let schema: Value = serde_json::from_str(&page).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    assert!(schema["properties"]["ctx-size"]["description"].is_string());
    assert!(
        schema["properties"]["scripted"].is_null(),
        "it is for tests"
    );
}

#[test]
fn without_a_dispatcher_each_command_that_wants_one_says_so() {
    let home = tempfile::tempdir().unwrap();
    for words in [["status"], ["reload"]] {
        let output = run(home.path(), &[&words[..], &["--run-dir", "none"]].concat());
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(
            text(&output).contains("no dispatcher runs in none"),
            "{}",
            text(&output)
        );
    }
    let output = run(home.path(), &["status", "--crashes", "--run-dir", "none"]);
    assert_eq!(text(&output), "no worker's death is recorded\n");
    let output = run(home.path(), &["chat", "hello", "--run-dir", "none"]);
    assert_eq!(output.status.code(), Some(71), "{output:?}");
    assert!(
        text(&output).contains("none can be started"),
        "{}",
        text(&output)
    );
}

#[test]
fn the_doctor_says_of_each_wrong_thing_what_to_do_and_its_exit_code_says_whether_any_is() {
    let home = tempfile::tempdir().unwrap();
    let output = run(home.path(), &["doctor", "--json", "--run-dir", "run"]);
    assert_eq!(
        output.status.code(),
        Some(78),
        "there is no model: {output:?}"
    );
    let all: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let subjects: Vec<_> = all
        .iter()
        .map(|one| one["subject"].as_str().unwrap())
        .collect();
    for subject in [
        "memory",
        "swap",
        "cores",
        "GPU",
        "power",
        "heat",
        "open files",
        "configuration",
        "service",
    ] {
        assert!(
            subjects.contains(&subject),
            "{subject} is missing: {subjects:?}"
        );
    }
    for one in &all {
        let bad = ["wrong", "warning"].contains(&one["level"].as_str().unwrap());
        assert_eq!(bad, one["todo"].is_string(), "{one}");
    }
    let output = run(home.path(), &["doctor", "--run-dir", "run"]);
    let said = text(&output);
    assert!(said.contains("wrong   configuration"), "{said}");
    assert!(said.contains("-> mend that"), "{said}");
    assert!(!said.contains('\x1b'), "a pipe gets no colours");
}

#[test]
fn completions_and_the_manual_know_every_verb() {
    let home = tempfile::tempdir().unwrap();
    let verbs = [
        "serve", "status", "doctor", "service", "chat", "bench", "reload", "config",
    ];
    for words in [
        &["completions", "bash"][..],
        &["completions", "zsh"],
        &["completions", "fish"],
        &["man"],
    ] {
        let output = run(home.path(), words);
        assert!(output.status.success(), "{words:?}");
        let page = text(&output);
        for verb in verbs {
            assert!(page.contains(verb), "{words:?} has no {verb}");
        }
    }
}

#[test]
fn the_bench_gets_its_words_as_they_are() {
    let home = tempfile::tempdir().unwrap();
    let program = home.path().join("dispatcher");
    fs::copy(env!("CARGO_BIN_EXE_dispatcher"), &program).unwrap();
    let bench = || {
        Command::new(&program)
            .args(["bench", "scale", "--model", "x y", "--help"])
            .output()
            .unwrap()
    };
    let missing = bench();
    assert_eq!(missing.status.code(), Some(78), "{missing:?}");
    assert!(
        text(&missing).contains("dispatcher-bench"),
        "{}",
        text(&missing)
    );
    let path = home.path().join("dispatcher-bench");
    fs::write(&path, "#!/bin/sh\nprintf '%s|' \"$@\"\nexit 7\n").unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let handed = bench();
    assert_eq!(text(&handed), "scale|--model|x y|--help|");
    assert_eq!(handed.status.code(), Some(7));
}

#[test]
fn help_of_every_verb_is_its_snapshot() {
    use clap::CommandFactory as _;
    let mut command = dispatcher::cli::Args::command();
    command.build();
    let mut all = String::new();
    let mut stack: Vec<_> = command.get_subcommands().cloned().collect();
    stack.reverse();
    while let Some(verb) = stack.pop() {
        let mut below: Vec<_> = verb.get_subcommands().cloned().collect();
        below.reverse();
        stack.extend(below);
        // The settings are the same for all, and have their own page.
        let own = verb
            .clone()
            .mut_args(|argument| {
                let shared = argument.get_help_heading().is_some();
                let hidden = shared || argument.is_hide_set();
                argument.hide(hidden)
            })
            .term_width(100);
        all.push_str(&format!(
            "---- {}\n{}\n",
            verb.get_bin_name().unwrap(),
            own.clone().render_help()
        ));
    }
    insta::assert_snapshot!(all);
}
