//! Asks launchd (`launchctl`) and systemd (`systemctl`) to do things, and says in words what they refuse.

use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::intent::Owner;
use super::spec::Scope;
use super::{Manager, ServiceError, launchd, systemd};

/// Between two looks at a service that ends.
const LOOK: Duration = Duration::from_millis(200);
/// What a manager may take beyond the service's own time to stop.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// A service's state, as its manager says it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    /// The manager knows it.
    pub(super) loaded: bool,
    /// The manager's own word.
    pub(super) word: String,
    pub(super) pid: Option<u32>,
    pub(super) last_exit: Option<i32>,
}

/// The manager, for one owner's service.
#[derive(Debug)]
pub(super) struct Control<'a> {
    pub(super) owner: &'a Owner,
}

impl Control<'_> {
    /// Refuses where the manager could not run the service: before anything is written.
    pub(super) fn check(&self) -> Result<(), ServiceError> {
        match self.owner.manager {
            Manager::Launchd => {
                let domain = self.domain();
                if self.call(&["print", &domain])?.status.success() {
                    return Ok(());
                }
                Err(ServiceError::NoSession(match self.owner.scope {
                    Scope::User => format!(
                        "launchd has no {domain}: nobody with this user id is logged in at the screen, and an agent lives \
                         in that session; log in there, or install a daemon, which needs no session: \
                         `sudo dispatcher service install --system`"
                    ),
                    Scope::System => "launchd does not answer for the domain `system`".to_owned(),
                }))
            }
            Manager::Systemd => {
                let output = self.call(&["show-environment"])?;
                if output.status.success() {
                    return Ok(());
                }
                let said = said(&output);
                Err(ServiceError::NoSession(match self.owner.scope {
                    Scope::User => format!(
                        "systemd has no session of this user ({said}): log in (not with su or sudo), or \
                         install a service of the machine: `sudo dispatcher service install --system`"
                    ),
                    Scope::System => format!(
                        "systemd does not run this machine ({said}): have your own supervisor run \
                         `dispatcher serve` and restart it unless it exits with 0 or 78"
                    ),
                }))
            }
        }
    }

    /// Takes new definitions over and starts the service. `socket_changed`: the listening socket is
    /// another one.
    pub(super) fn install(
        &self,
        with_socket: bool,
        socket_changed: bool,
        stop_limit: Duration,
    ) -> Result<(), ServiceError> {
        match self.owner.manager {
            Manager::Launchd => {
                self.stop(stop_limit)?;
                self.start(with_socket)
            }
            Manager::Systemd => {
                self.must(&["daemon-reload"])?;
                let units: &[&str] = if with_socket {
                    &[systemd::SOCKET, systemd::SERVICE]
                } else {
                    &[systemd::SERVICE]
                };
                self.must(&[&["enable", "--quiet"], units].concat())?;
                if socket_changed {
                    self.stop(stop_limit)?;
                    return self.start(with_socket);
                }
                self.must(&["restart", systemd::SERVICE])
            }
        }
    }

    /// Before definitions are removed.
    pub(super) fn uninstall(&self, stop_limit: Duration) -> Result<(), ServiceError> {
        self.stop(stop_limit)?;
        if self.owner.manager == Manager::Systemd {
            // A unit that is not there is as disabled as it can be.
            self.call(&["disable", "--quiet", systemd::SERVICE])?;
            self.call(&["disable", "--quiet", systemd::SOCKET])?;
        }
        Ok(())
    }

    /// After definitions were removed.
    pub(super) fn forget(&self) -> Result<(), ServiceError> {
        match self.owner.manager {
            Manager::Launchd => Ok(()),
            Manager::Systemd => self.must(&["daemon-reload"]),
        }
    }

    pub(super) fn start(&self, with_socket: bool) -> Result<(), ServiceError> {
        match self.owner.manager {
            Manager::Launchd => {
                if self.standing()?.loaded {
                    return self.must(&["kickstart", &self.target()]);
                }
                self.must(&["enable", &self.target()])?;
                let definition = self.owner.definition();
                let path = definition.to_string_lossy();
                self.must(&["bootstrap", &self.domain(), &path])
            }
            Manager::Systemd => {
                if with_socket {
                    self.must(&["start", systemd::SOCKET])?;
                }
                self.must(&["start", systemd::SERVICE])
            }
        }
    }

    /// Ends the service and closes its socket. One that does not run is as good as ended.
    pub(super) fn stop(&self, limit: Duration) -> Result<(), ServiceError> {
        match self.owner.manager {
            Manager::Launchd => {
                if !self.standing()?.loaded {
                    return Ok(());
                }
                // It answers before the job has ended, with a status that differs between versions: what
                // counts is that the job is gone.
                let output = self.call(&["bootout", &self.target()])?;
                self.until(limit, |standing| !standing.loaded)
                    .map_err(|error| match error {
                        ServiceError::StillRunning(_) if !output.status.success() => {
                            self.failed(&["bootout", &self.target()], &output)
                        }
                        other => other,
                    })
            }
            // The socket first: a connection that comes between would start the service again.
            Manager::Systemd => {
                self.stop_unit(systemd::SOCKET)?;
                self.stop_unit(systemd::SERVICE)
            }
        }
    }

    /// Ends the service, its requests finished, and starts it; a socket that the manager holds stays.
    pub(super) fn restart(&self, limit: Duration) -> Result<(), ServiceError> {
        match self.owner.manager {
            Manager::Launchd => {
                let before = self.standing()?;
                if !before.loaded {
                    return self.start(true);
                }
                if before.pid.is_some() {
                    self.must(&["kill", "SIGTERM", &self.target()])?;
                    // A connection may have had it started anew already.
                    self.until(limit, |standing| standing.pid != before.pid)?;
                }
                self.must(&["kickstart", &self.target()])
            }
            Manager::Systemd => self.must(&["restart", systemd::SERVICE]),
        }
    }

    pub(super) fn standing(&self) -> Result<Standing, ServiceError> {
        match self.owner.manager {
            Manager::Launchd => {
                let output = self.call(&["print", &self.target()])?;
                if !output.status.success() {
                    return Ok(Standing {
                        word: "not loaded".to_owned(),
                        ..Standing::default()
                    });
                }
                Ok(read_launchd(&String::from_utf8_lossy(&output.stdout)))
            }
            Manager::Systemd => {
                let properties = "--property=LoadState,ActiveState,SubState,MainPID,ExecMainStatus";
                let output = self.call(&["show", systemd::SERVICE, properties])?;
                if !output.status.success() {
                    return Err(self.failed(&["show", systemd::SERVICE], &output));
                }
                Ok(read_systemd(&String::from_utf8_lossy(&output.stdout)))
            }
        }
    }

    fn stop_unit(&self, unit: &str) -> Result<(), ServiceError> {
        let output = self.call(&["stop", unit])?;
        // 5: there is no such unit.
        if output.status.success() || output.status.code() == Some(5) {
            return Ok(());
        }
        Err(self.failed(&["stop", unit], &output))
    }

    fn until(
        &self,
        limit: Duration,
        holds: impl Fn(&Standing) -> bool,
    ) -> Result<(), ServiceError> {
        let limit = limit + STOP_GRACE;
        let deadline = Instant::now() + limit;
        while !holds(&self.standing()?) {
            if Instant::now() >= deadline {
                return Err(ServiceError::StillRunning(limit.as_secs()));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn domain(&self) -> String {
        match self.owner.scope {
            Scope::User => format!("gui/{}", self.owner.uid),
            Scope::System => "system".to_owned(),
        }
    }

    fn target(&self) -> String {
        format!("{}/{}", self.domain(), launchd::LABEL)
    }

    fn words<'a>(&self, arguments: &[&'a str]) -> Vec<&'a str> {
        let scope: &[&str] = match (self.owner.manager, self.owner.scope) {
            (Manager::Systemd, Scope::User) => &["--user"],
            (Manager::Systemd, Scope::System) => &["--system"],
            (Manager::Launchd, _) => &[],
        };
        [scope, arguments].concat()
    }

    fn must(&self, arguments: &[&str]) -> Result<(), ServiceError> {
        let output = self.call(arguments)?;
        if output.status.success() {
            Ok(())
        } else {
            Err(self.failed(arguments, &output))
        }
    }

    fn call(&self, arguments: &[&str]) -> Result<Output, ServiceError> {
        let tool = self.owner.manager.tool();
        Command::new(tool)
            .args(self.words(arguments))
            .stdin(Stdio::null())
            .output()
            .map_err(|cause| match cause.kind() {
                io::ErrorKind::NotFound => ServiceError::NoManager(self.owner.manager),
                _ => ServiceError::file(Path::new(tool), cause),
            })
    }

    fn failed(&self, arguments: &[&str], output: &Output) -> ServiceError {
        let tool = self.owner.manager.tool();
        ServiceError::Command {
            line: format!("{tool} {}", self.words(arguments).join(" ")),
            said: said(output),
        }
    }
}

/// What a tool said, on one line, or its status where it said nothing.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() {
        output.status.to_string()
    } else {
        line
    }
}

/// `launchctl print` is for people, and may change: what is not found is not known.
fn read_launchd(text: &str) -> Standing {
    // Deeper lines are of its sockets and endpoints.
    let value = |key: &str| {
        text.lines().find_map(|line| {
            let line = line.strip_prefix('\t')?;
            line.strip_prefix(key)?.strip_prefix(" = ")
        })
    };
    Standing {
        loaded: true,
        word: value("state").unwrap_or("loaded").to_owned(),
        pid: value("pid").and_then(|pid| pid.parse().ok()),
        last_exit: value("last exit code").and_then(|code| {
            let number = code.split(':').next().unwrap_or(code);
            number.trim().parse().ok()
        }),
    }
}

fn read_systemd(text: &str) -> Standing {
    let value = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    };
    let number = |key: &str| value(key).and_then(|text| text.parse::<u32>().ok());
    Standing {
        loaded: value("LoadState") == Some("loaded"),
        word: format!(
            "{} ({})",
            value("ActiveState").unwrap_or("unknown"),
            value("SubState").unwrap_or("unknown")
        ),
        pid: number("MainPID").filter(|pid| *pid > 0),
        last_exit: number("ExecMainStatus").and_then(|code| i32::try_from(code).ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_launchctl_prints_is_read_at_its_first_depth() {
        let text = "gui/501/local.dispatcher = {\n\tactive count = 2\n\tpath = /x\n\tstate = running\n\n\
                    \tsockets = {\n\t\t\"Listeners\" = {\n\t\t\tstate = no\n\t\t\tpid = 1\n\t\t}\n\t}\n\
                    \tpid = 4711\n\tlast exit code = 78: EX_CONFIG\n}\n";
        let wanted = Standing {
            loaded: true,
            word: "running".to_owned(),
            pid: Some(4711),
            last_exit: Some(78),
        };
        assert_eq!(read_launchd(text), wanted);
        let never =
            read_launchd("x = {\n\tstate = not running\n\tlast exit code = (never exited)\n}");
        assert_eq!((never.pid, never.last_exit), (None, None));
        assert_eq!(read_launchd("").word, "loaded");
    }

    #[test]
    fn what_systemctl_shows_is_read() {
        let text = "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=4711\nExecMainStatus=0\n";
        let wanted = Standing {
            loaded: true,
            word: "active (running)".to_owned(),
            pid: Some(4711),
            last_exit: Some(0),
        };
        assert_eq!(read_systemd(text), wanted);
        let none =
            read_systemd("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\n");
        assert_eq!((none.loaded, none.pid), (false, None));
    }
}
