//! The configuration read again by a running dispatcher: `dispatcher reload`, good and bad.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod system;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use system::client::{Events, chat};
use system::{System, dispatcher_program};

/// A dispatcher whose configuration is a file, and the file's folder.
fn configured(text: &str) -> (System, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dispatcher.toml");
    std::fs::write(&file, text).unwrap();
    let system = System::start(&[
        "--engine",
        "scripted",
        "--scripted",
        "step_us=2000",
        "--config",
        file.to_str().unwrap(),
    ]);
    (system, folder)
}

fn reload(run_directory: &Path) -> Output {
    Command::new(dispatcher_program())
        .arg("reload")
        .arg("--run-dir")
        .arg(run_directory)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn all(status: &Value, slots: u64) -> bool {
    let mut instances = status["instances"].as_array().unwrap().iter();
    instances.all(|one| one["slots"] == slots && one["state"] == "ready")
}

#[test]
fn a_reload_takes_over_what_can_change_and_names_what_cannot() {
    let (system, folder) = configured("slots = 2\ninstances = 2\nqueue-timeout = \"1m\"\n");
    let run_directory = system.run_directory.path().join("run");
    let before = system.worker_pids();
    let mut running = Events::open(&system.address, "/v1/chat/completions", &chat("on", 300));
    running.next_text();
    std::fs::write(
        folder.path().join("dispatcher.toml"),
        "slots = 3\ninstances = 4\nhost = \"127.0.0.2\"\nqueue = 7\n",
    )
    .unwrap();
    let output = reload(&run_directory);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let told = text(&output.stdout);
    assert!(told.contains(&format!("pid {}", system.pid())), "{told}");
    let status = system.await_status("three slots everywhere", |status| all(status, 3));
    assert_eq!(status["instances"].as_array().unwrap().len(), 2);
    assert_eq!(status["reloads"], 1);
    assert!(status["last_reload_error"].is_null());
    running.whole().assert_complete();
    let after = system.worker_pids();
    assert!(before.iter().all(|pid| !after.contains(pid)), "{after:?}");
    let log = system.read_log();
    for setting in ["instances", "host", "queue"] {
        assert!(
            log.lines()
                .any(|line| line.contains("hold from the next start on") && line.contains(setting)),
            "{setting} is not named in:\n{log}"
        );
    }
}

#[test]
fn a_bad_configuration_keeps_the_old_one_and_says_why() {
    let (system, folder) = configured("slots = 2\n");
    let run_directory = system.run_directory.path().join("run");
    let before = system.worker_pids();
    let file = folder.path().join("dispatcher.toml");
    for (content, words) in [
        ("slots = 0\n", "slots"),
        ("slotz = 4\n", "did you mean `slots`"),
        ("slots = ", "cannot be used"),
    ] {
        std::fs::write(&file, content).unwrap();
        let output = reload(&run_directory);
        assert_eq!(output.status.code(), Some(78), "{content}: {output:?}");
        let said = text(&output.stderr);
        assert!(said.contains("keeps its configuration"), "{said}");
        assert!(said.contains(words), "{said}");
        let status = system.status();
        let error = status["last_reload_error"].as_str().unwrap();
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(system.worker_pids(), before);
    let mut still = Events::open(&system.address, "/v1/chat/completions", &chat("on", 5));
    still.whole().assert_complete();
    assert!(system.read_log().contains("the old one goes on"));
    // A good one afterwards is taken, and clears the error.
    std::fs::write(&file, "slots = 5\n").unwrap();
    assert_eq!(reload(&run_directory).status.code(), Some(0));
    let status = system.await_status("five slots", |status| all(status, 5));
    assert!(status["last_reload_error"].is_null());
}

#[test]
fn without_a_dispatcher_nothing_is_signalled_and_the_exit_code_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let output = reload(folder.path());
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(text(&output.stderr).contains("no dispatcher runs"));
}
