//! The units that systemd is given: text from a [`Spec`], and nothing else.

use std::fmt::Write as _;

use super::Manager;
use super::spec::{BACKLOG, OPEN_FILES, Scope, Spec, text};

pub const SERVICE: &str = "dispatcher.service";
pub const SOCKET: &str = "dispatcher.socket";

/// Without a sign of life from the driver loop for so long, the service is ended and started again.
/// Longer than a machine that swaps makes one turn of the loop.
const WATCHDOG_S: u64 = 60;
/// From the start to the first sign that loading advances; each such sign asks for more.
const START_TIMEOUT_S: u64 = 90;
/// More ends than this within [`START_LIMIT_S`] are a loop.
const STARTS_MAX: u32 = 5;
const START_LIMIT_S: u64 = 120;

/// Closed to all services alike: nothing of it needs a privilege, so that a user's manager can do it too.
const HARDENING: [&str; 7] = [
    "NoNewPrivileges=yes",
    "UMask=0077",
    "LockPersonality=yes",
    "RestrictSUIDSGID=yes",
    "RestrictRealtime=yes",
    "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
];

/// What the machine's own manager closes beside. Devices stay open: a GPU is one.
const HARDENING_SYSTEM: [&str; 8] = [
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "RestrictNamespaces=yes",
];

/// The service unit.
#[must_use]
pub fn service(spec: &Spec) -> String {
    let mut unit = String::new();
    let mut line = |words: &str| {
        unit.push_str(words);
        unit.push('\n');
    };
    line("[Unit]");
    line(&format!(
        "Description=dispatcher, an LLM server on {}",
        spec.listen
    ));
    if spec.scope == Scope::System {
        line("After=network.target");
    }
    if spec.socket {
        line(&format!("Requires={SOCKET}"));
        line(&format!("After={SOCKET}"));
    }
    line(&format!("StartLimitIntervalSec={START_LIMIT_S}"));
    line(&format!("StartLimitBurst={STARTS_MAX}"));
    line("");
    line("[Service]");
    line("Type=notify");
    line("NotifyAccess=main");
    line(&format!(
        "ExecStart={}",
        command(&spec.command(Manager::Systemd))
    ));
    line("ExecReload=/bin/kill -HUP $MAINPID");
    line(&format!(
        "WorkingDirectory={}",
        specifiers(text(spec.folder()))
    ));
    if let Some(user) = &spec.user {
        line(&format!("User={}", specifiers(user)));
    }
    if spec.scope == Scope::System {
        // It holds the crash records, which are wanted after the end.
        line("RuntimeDirectory=dispatcher");
        line("RuntimeDirectoryMode=0700");
        line("RuntimeDirectoryPreserve=yes");
    }
    if spec.socket {
        line(&format!("Sockets={SOCKET}"));
    }
    line("Restart=on-failure");
    line("RestartSec=1");
    line("# What was configured cannot work: to try again would not help.");
    line("RestartPreventExitStatus=78");
    line(&format!("TimeoutStartSec={START_TIMEOUT_S}"));
    line(&format!("TimeoutStopSec={}", spec.stop_limit_s()));
    line(&format!("WatchdogSec={WATCHDOG_S}"));
    line("# The dispatcher ends its workers; what it leaves is killed.");
    line("KillMode=mixed");
    line(&format!("LimitNOFILE={OPEN_FILES}"));
    for words in HARDENING {
        line(words);
    }
    if spec.scope == Scope::System {
        for words in HARDENING_SYSTEM {
            line(words);
        }
    }
    line("");
    line("[Install]");
    line(&format!("WantedBy={}", target(spec.scope)));
    unit
}

/// The socket unit.
#[must_use]
pub fn socket(spec: &Spec) -> String {
    let mut unit = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        unit,
        "[Unit]\nDescription=dispatcher's listening socket\n\n\
         [Socket]\nListenStream={}\nAccept=no\nBacklog={BACKLOG}\nNoDelay=yes\n\n\
         [Install]\nWantedBy=sockets.target\n",
        spec.listen
    );
    unit
}

fn target(scope: Scope) -> &'static str {
    match scope {
        Scope::User => "default.target",
        Scope::System => "multi-user.target",
    }
}

/// A command line: each word in double quotes where it needs them. A `$` means a variable everywhere but in
/// the program's own path.
fn command(words: &[String]) -> String {
    let mut line = String::new();
    for (place, word) in words.iter().enumerate() {
        if place > 0 {
            line.push(' ');
        }
        let word = specifiers(word);
        let word = if place > 0 {
            word.replace('$', "$$")
        } else {
            word
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-=:%$+,@".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            line.push_str(&word);
        } else {
            let escaped = word.replace('\\', "\\\\").replace('"', "\\\"");
            let _ = write!(line, "\"{escaped}\"");
        }
    }
    line
}

/// `%` begins a specifier everywhere in a unit.
fn specifiers(text: &str) -> String {
    text.replace('%', "%%")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::process::Command;

    use super::super::spec::examples::{awkward, ordinary};
    use super::*;

    fn both(spec: &Spec) -> String {
        format!(
            "# {SERVICE}\n{}\n# {SOCKET}\n{}",
            service(spec),
            socket(spec)
        )
    }

    #[test]
    fn units_of_an_ordinary_user_read_as_their_snapshot() {
        insta::assert_snapshot!(both(&ordinary(Scope::User)));
    }

    #[test]
    fn units_of_the_system_with_awkward_paths_read_as_their_snapshot() {
        insta::assert_snapshot!(both(&awkward(Scope::System)));
    }

    #[test]
    fn without_a_socket_the_service_names_none() {
        let spec = Spec {
            socket: false,
            ..ordinary(Scope::User)
        };
        assert!(!service(&spec).contains("dispatcher.socket"));
    }

    /// Has systemd's own checker read the units. What it says is the error.
    fn verify(spec: &Spec, folder: &Path) -> Result<(), String> {
        std::fs::write(folder.join(SERVICE), service(spec)).unwrap();
        std::fs::write(folder.join(SOCKET), socket(spec)).unwrap();
        let mut analyze = Command::new("systemd-analyze");
        if spec.scope == Scope::User {
            analyze.arg("--user");
        }
        let output = analyze
            .env("XDG_RUNTIME_DIR", folder)
            .args(["--man=no", "--recursive-errors=no", "verify"])
            .args([folder.join(SERVICE), folder.join(SOCKET)])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() && said.is_empty() {
            Ok(())
        } else {
            Err(said)
        }
    }

    #[test]
    fn systemd_itself_finds_no_fault_with_ordinary_and_awkward_units() {
        if Command::new("systemd-analyze")
            .arg("--version")
            .output()
            .is_err()
        {
            println!("NOT CHECKED: there is no systemd-analyze here");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("Zoë Ø/50% off $HOME");
        let quoted = folder.path().join("Zoë O'Hara/\"q\" \\x");
        std::fs::create_dir_all(&home).unwrap();
        std::fs::create_dir_all(&quoted).unwrap();
        let program = home.join("dispatcher");
        std::fs::write(&program, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        for scope in [Scope::User, Scope::System] {
            for spec in [ordinary(scope), awkward(scope)] {
                let spec = Spec {
                    program: program.clone(),
                    config: quoted.join("dispatcher %n $PATH.toml"),
                    user: spec.user.as_ref().map(|_| "root".to_owned()),
                    ..spec
                };
                assert_eq!(verify(&spec, folder.path()), Ok(()), "{}", service(&spec));
            }
        }
        // The checker does find faults: a wrong word must not pass.
        let wrong = Spec {
            program: home.join("not there"),
            ..ordinary(Scope::User)
        };
        assert!(verify(&wrong, folder.path()).is_err());
    }

    #[test]
    fn each_word_of_a_command_is_one_word_for_systemd() {
        let words = ["/a b/c", "x", "", "50%", "$HOME", "q\"u", "b\\s", "ë"];
        let words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
        assert_eq!(
            command(&words),
            r#""/a b/c" x "" 50%% $$HOME "q\"u" "b\\s" "ë""#
        );
    }
}
