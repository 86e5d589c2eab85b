//! Commands against a running dispatcher: every one in README.md and docs/OPERATING.md is executed, and what they say holds.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod system;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Parser as _;
use system::{System, dispatcher_program};

/// Commands that serve until they are stopped, or build everything: run by others, which say so.
const ELSEWHERE: [(&str, &str); 2] = [
    // `scripts/test` runs it with `--once`.
    ("scripts/quickstart", "scripts/quickstart --once"),
    // This very test has one running, and so has every test of the whole system.
    ("target/release/dispatcher", ""),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn page(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// The command lines of a page's shell blocks, continued lines joined and comments cut off.
fn block_commands(page: &str) -> Vec<String> {
    let mut commands = Vec::new();
    for block in page.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap().replace("\\\n", " ");
        for line in block.lines() {
            let line = line.split(" #").next().unwrap().trim();
            if !line.is_empty() && !line.starts_with('#') {
                commands.push(line.to_owned());
            }
        }
    }
    commands
}

/// `dispatcher …` in the running text.
fn inline_commands(page: &str) -> BTreeSet<String> {
    let mut outside = String::new();
    for (number, part) in page.split("```").enumerate() {
        if number % 2 == 0 {
            outside.push_str(part);
        }
    }
    outside
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|span| span.starts_with("dispatcher ") || span.starts_with("sudo dispatcher "))
        .map(str::to_owned)
        .collect()
}

/// A home in which the commands of the pages find what a user's would.
struct Home {
    system: System,
    folder: tempfile::TempDir,
}

fn home() -> Home {
    let system = System::scripted("step_us=1000", &["--slots", "4"]);
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(dispatcher_program(), bin.join("dispatcher")).unwrap();
    for (name, text) in [
        ("systemctl", "echo LoadState=loaded\n"),
        ("journalctl", "echo nothing yet\n"),
    ] {
        let path = bin.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    Home { system, folder }
}

impl Home {
    /// Runs a line as a user's shell would; says why it failed.
    fn run(&self, line: &str) -> Result<(), String> {
        // The one server that runs here has another port than the pages'.
        let line = line.replace("127.0.0.1:8080", &self.system.address);
        let path = self.folder.path();
        // What a user does between `config init` and what follows: the model is set in the file.
        let config = path.join(".config/dispatcher/dispatcher.toml");
        if config.exists() {
            let worker = env!("CARGO_BIN_EXE_dispatcher-worker");
            let text = format!("engine = \"scripted\"\nworker = {worker:?}\n");
            fs::write(&config, text).unwrap();
        }
        let output = Command::new("sh")
            .args(["-ec", &line])
            .current_dir(path)
            .env_clear()
            .env("HOME", path)
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", path.join("bin").display()),
            )
            .env(
                "DISPATCHER_RUN_DIR",
                self.system.run_directory.path().join("run"),
            )
            .env("DISPATCHER_ENGINE", "scripted")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let code = output.status.code();
        // The doctor finds what is wrong with the machine that it runs on.
        if code == Some(0) || (line.starts_with("dispatcher doctor") && code == Some(78)) {
            return Ok(());
        }
        Err(format!(
            "`{line}`: {code:?}\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ))
    }
}

#[test]
fn every_command_in_the_readme_and_the_operating_page_does_what_it_is_there_for() {
    let home = home();
    let mut unused: BTreeSet<_> = ELSEWHERE.iter().map(|(line, _)| *line).collect();
    for name in ["README.md", "docs/OPERATING.md"] {
        let commands = block_commands(&page(name));
        assert!(!commands.is_empty(), "{name} has no commands");
        for line in commands {
            if let Some((line, by)) = ELSEWHERE.iter().find(|(known, _)| *known == line) {
                assert!(page("scripts/test").contains(by), "nothing runs {line}");
                unused.remove(line);
                continue;
            }
            // Each page begins with a first configuration.
            if line.starts_with("dispatcher config init") {
                let _ = fs::remove_dir_all(home.folder.path().join(".config"));
            }
            if let Err(said) = home.run(&line) {
                panic!("{name}: {said}");
            }
        }
    }
    assert!(unused.is_empty(), "{unused:?} are in no page any more");
}

#[test]
fn every_command_in_the_running_text_is_one_that_the_program_takes() {
    let home = home();
    let mut seen = 0;
    for name in [
        "README.md",
        "docs/OPERATING.md",
        "docs/COMPARISON.md",
        "docs/MLX.md",
    ] {
        for span in inline_commands(&page(name)) {
            seen += 1;
            let words: Vec<&str> = span.trim_start_matches("sudo ").split(' ').collect();
            let words: Vec<&str> = words.into_iter().take_while(|word| *word != "…").collect();
            let parsed = dispatcher::cli::Args::try_parse_from(&words);
            assert!(parsed.is_ok(), "{name}: {span}: {}", parsed.unwrap_err());
            // What only asks is asked.
            let asks = [
                "status",
                "config show",
                "config check",
                "doctor",
                "version",
                "reload",
            ];
            let asked = asks.iter().any(|verb| span[11..].starts_with(verb));
            if !span.starts_with("sudo")
                && asked
                && let Err(said) = home.run(&span)
            {
                panic!("{name}: {said}");
            }
        }
    }
    assert!(seen >= 8, "only {seen} commands were found");
}

/// What a command prints, which must succeed.
fn said(system: &System, words: &[&str]) -> String {
    let output = Command::new(dispatcher_program())
        .args(words)
        .arg("--run-dir")
        .arg(system.run_directory.path().join("run"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_status_shows_instances_latencies_events_and_the_dead_ones_last_words() {
    let system = System::scripted("step_us=1000", &["--instances", "2", "--slots", "4"]);
    for _ in 0..8 {
        system::client::stream(&system.address, &system::client::chat("hello", 4))
            .assert_complete();
    }
    system::kill(system.worker_pids()[1], nix::sys::signal::Signal::SIGKILL);
    system.await_status("the next worker", |status| {
        status["instances"][1]["restarts"] == 1 && status["instances"][1]["state"] == "ready"
    });
    let text = said(&system, &["status"]);
    for words in [
        "\nready\n",
        "0         ready",
        "8 accepted, 8 completed",
        "the worker of instance 1 died (external): signal 9",
        "instance 1 is ready",
    ] {
        assert!(text.contains(words), "{words:?} is missing:\n{text}");
    }
    let first_token = text
        .lines()
        .find(|line| line.starts_with("first token"))
        .unwrap();
    assert!(
        first_token.contains(" ms ") && first_token.ends_with(" 8"),
        "{first_token}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&said(&system, &["status", "--json"])).unwrap();
    assert_eq!(json["pid"], system.pid());
    assert_eq!(json["latency"]["first_token"]["count"], 8);
    assert!(json["latency"]["first_token"]["p50_s"].is_f64());
    assert!(
        json["latency"]["first_token"]["p99_s"].is_null(),
        "too few to say"
    );
    let crashes = said(&system, &["status", "--crashes"]);
    assert!(
        crashes.contains("instance 1, external, signal 9"),
        "{crashes}"
    );
    // The request log has a fingerprint of the key and sizes.
    let log = system.read_log();
    let line = log
        .lines()
        .find(|line| line.contains("\"prompt_bytes\""))
        .unwrap();
    assert!(line.contains("\"key\":\"0000000000000000\""), "{line}");
}

#[test]
fn a_chat_talks_with_the_server_that_runs_and_else_starts_one_that_ends_with_it() {
    let system = System::scripted("step_us=1000,length=6", &[]);
    let answer = said(&system, &["chat", "hello", "--max-tokens", "6"]);
    assert!(answer.split_whitespace().count() >= 2, "{answer:?}");
    let folder = tempfile::Builder::new()
        .prefix("dsp")
        .tempdir_in("/tmp")
        .unwrap();
    let output = Command::new(dispatcher_program())
        .args([
            "chat",
            "hello",
            "--max-tokens",
            "6",
            "--scripted",
            "step_us=1000,length=6",
        ])
        .arg("--run-dir")
        .arg(folder.path().join("none"))
        .env("TMPDIR", folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(answer.split_whitespace().count() >= 2, "{answer:?}");
    // Its folder, and with it the server that wrote there, is gone.
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
