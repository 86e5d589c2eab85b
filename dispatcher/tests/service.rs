//! `dispatcher service …` against a `systemctl` and a `launchctl` that only write down what they are asked.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A home with spaces and letters beyond ASCII, and tools in the only folder of `PATH`.
struct Home {
    folder: tempfile::TempDir,
}

/// Writes its words down. `show-environment` fails where there is no session.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "systemctl $*" >> "$HOME/calls"
case "$*" in
*show-environment*) [ ! -e "$HOME/no-session" ] || { echo "Failed to connect to bus: No medium found" >&2; exit 1; } ;;
*show*) printf 'LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=4711\nExecMainStatus=0\n' ;;
esac
"#;

/// The same; a job is loaded from `bootstrap` to `bootout`, and ends when it is told.
const LAUNCHCTL: &str = r#"#!/bin/sh
echo "launchctl $*" | sed "s|gui/[0-9]*|gui/UID|g" >> "$HOME/calls"
case "$1 $2" in
"print "*/local.dispatcher)
    [ -e "$HOME/loaded" ] || exit 113
    echo "x = {"
    printf '\tstate = running\n'
    [ ! -s "$HOME/loaded" ] || printf '\tpid = %s\n' "$(cat "$HOME/loaded")"
    echo "}" ;;
"print "*) [ ! -e "$HOME/no-session" ] || exit 113 ;;
"bootstrap "*) echo 4711 > "$HOME/loaded" ;;
"bootout "*) rm "$HOME/loaded" ;;
"kill "*) : > "$HOME/loaded" ;;
"kickstart "*) echo 4712 > "$HOME/loaded" ;;
esac
"#;

fn home() -> Home {
    let folder = tempfile::Builder::new().prefix("Zoë O ").tempdir().unwrap();
    let home = Home { folder };
    fs::create_dir(home.path("bin")).unwrap();
    home.tool("systemctl", SYSTEMCTL);
    home.tool("launchctl", LAUNCHCTL);
    home.configure("port = 9090\n");
    home
}

impl Home {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn tool(&self, name: &str, text: &str) {
        let path = self.path("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn configure(&self, text: &str) {
        fs::write(self.path("worker"), "").unwrap();
        let all = format!("engine = \"scripted\"\nworker = \"worker\"\n{text}");
        for folder in [
            ".config/dispatcher",
            "Library/Application Support/dispatcher",
        ] {
            let folder = self.path(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("worker"), "").unwrap();
            fs::write(folder.join("dispatcher.toml"), &all).unwrap();
        }
    }

    fn run(&self, manager: &str, words: &[&str]) -> Output {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        Command::new(env!("CARGO_BIN_EXE_dispatcher"))
            .env_clear()
            .env("HOME", self.folder.path())
            .env("PATH", path)
            // A shell's settings are not the service's.
            .env("DISPATCHER_PORT", "1")
            .args(["service", "--service-manager", manager])
            .args(words)
            .output()
            .unwrap()
    }

    /// What it said, and what it asked the manager for.
    fn told(&self, manager: &str, words: &[&str]) -> String {
        let output = self.run(manager, words);
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        let _ = fs::remove_file(self.path("calls"));
        let text = format!(
            "$ dispatcher service {}\n{}{}[exit {}]\n{calls}",
            words.join(" "),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
            output.status.code().unwrap()
        );
        text.replace(&*self.folder.path().to_string_lossy(), "HOME")
    }

    fn all(&self, manager: &str, runs: &[&[&str]]) -> String {
        let texts: Vec<_> = runs.iter().map(|words| self.told(manager, words)).collect();
        texts.join("\n")
    }
}

const LIFE: [&[&str]; 8] = [
    &["start"],
    &["install"],
    &["install"],
    &["restart"],
    &["stop"],
    &["start"],
    &["uninstall"],
    &["uninstall"],
];

#[test]
fn the_life_of_a_systemd_service_is_these_calls() {
    insta::assert_snapshot!(home().all("systemd", &LIFE));
}

#[test]
fn the_life_of_a_launchd_service_is_these_calls() {
    insta::assert_snapshot!(home().all("launchd", &LIFE));
}

#[test]
fn a_changed_port_makes_a_new_socket_and_a_changed_word_only_a_restart() {
    let home = home();
    home.run("systemd", &["install"]);
    let _ = fs::remove_file(home.path("calls"));
    home.configure("port = 9091\n");
    let told = home.told("systemd", &["install"]);
    assert!(told.contains("stop dispatcher.socket"), "{told}");
    home.configure("port = 9091\ndrain-timeout = \"50s\"\n");
    let told = home.told("systemd", &["install"]);
    assert!(!told.contains("stop dispatcher.socket"), "{told}");
    assert!(
        told.contains("unchanged HOME/.config/systemd/user/dispatcher.socket"),
        "{told}"
    );
    let unit = fs::read_to_string(home.path(".config/systemd/user/dispatcher.service")).unwrap();
    assert!(unit.contains("TimeoutStopSec=65\n"), "{unit}");
    // Without the socket the unit of an earlier install goes.
    home.run("systemd", &["install", "--no-socket"]);
    assert!(!home.path(".config/systemd/user/dispatcher.socket").exists());
}

#[test]
fn what_cannot_be_installed_is_refused_before_anything_is_written() {
    let home = home();
    let nothing = |home: &Home| {
        !home
            .path(".config/systemd/user/dispatcher.service")
            .exists()
            && !home
                .path("Library/LaunchAgents/local.dispatcher.plist")
                .exists()
    };
    let mut told = Vec::new();
    let systemd: [&[&str]; 4] = [
        &["install", "--instances", "2"],
        &["install", "--config", "none.toml"],
        &["install", "--user", "nobody"],
        &["install", "--system", "--user", "nobody-of-this-name"],
    ];
    for words in systemd {
        told.push(home.told("systemd", words));
        assert!(nothing(&home));
    }
    home.configure("port = 0\n");
    told.push(home.told("systemd", &["install"]));
    home.configure("slotz = 1\n");
    told.push(home.told("launchd", &["install"]));
    home.configure("port = 9090\n");
    fs::write(home.path("no-session"), "").unwrap();
    told.push(home.told("systemd", &["install"]));
    told.push(home.told("launchd", &["install"]));
    assert!(nothing(&home));
    for name in ["systemctl", "launchctl"] {
        fs::remove_file(home.path("bin").join(name)).unwrap();
    }
    told.push(home.told("launchd", &["install"]));
    assert!(nothing(&home));
    let uid = nix::unistd::getuid().to_string();
    let told = told.join("\n");
    let cwd = std::env::current_dir().unwrap();
    let told = told.replace(&*cwd.to_string_lossy(), "CWD");
    insta::assert_snapshot!(told.replace(&format!("gui/{uid}"), "gui/UID"));
}

#[test]
fn an_edited_definition_is_kept_until_force_is_said() {
    let home = home();
    home.run("launchd", &["install"]);
    let path = home.path("Library/LaunchAgents/local.dispatcher.plist");
    let text = fs::read_to_string(&path).unwrap();
    let edited = text.replace("<integer>10</integer>", "<integer>11</integer>");
    assert_ne!(edited, text);
    fs::write(&path, &edited).unwrap();
    let output = home.run("launchd", &["install"]);
    assert_eq!(output.status.code(), Some(78));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("was edited") && said.contains("--force"),
        "{said}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), edited);
    assert!(
        home.run("launchd", &["install", "--force"])
            .status
            .success()
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn the_status_has_settings_with_their_sources_and_the_last_crash() {
    let home = home();
    let run = home.path("run");
    home.configure(&format!("port = 9090\nrun-dir = {run:?}\nthreads = 1\n"));
    home.run("systemd", &["install"]);
    fs::create_dir_all(run.join("crashes")).unwrap();
    let record = serde_json::json!({
        "at_unix_s": 0, "instance": 1, "generation": 2, "cause": "engine", "exit_code": null, "signal": 6,
        "oom": false, "uptime_ms": 10, "engine": "llama", "model": "m", "fingerprints": [],
        "tail": ["GGML_ASSERT"],
    });
    fs::write(run.join("crashes/crash-1.json"), record.to_string()).unwrap();
    let output = home.run("systemd", &["status"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for words in [
        "state       active (running)",
        "pid         4711",
        "answers     no",
        "instance 1, engine, signal 6: GGML_ASSERT",
        "port = 9090",
        "# default",
    ] {
        assert!(text.contains(words), "{words} is missing:\n{text}");
    }
    let file = home.path(".config/dispatcher/dispatcher.toml");
    assert!(
        text.contains(&format!("# file {}", file.display())),
        "{text}"
    );
    let output = home.run("systemd", &["status", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["installed"], true);
    assert_eq!(json["last_crash"]["signal"], 6);
    assert_eq!(Path::new(json["config"].as_str().unwrap()), file);
}

#[test]
fn logs_of_launchd_are_the_end_of_its_file() {
    let home = home();
    let folder = home.path("Library/Logs/dispatcher");
    fs::create_dir_all(&folder).unwrap();
    let lines: String = (1..=9).map(|number| format!("line {number}\n")).collect();
    fs::write(folder.join("dispatcher.log"), lines).unwrap();
    let output = home.run("launchd", &["logs", "--lines", "2"]);
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "line 8\nline 9\n"
    );
}
