//! What a service definition says, whichever manager reads it: program, arguments, limits.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Manager, ServiceError};

/// Open files of the service. launchd's own limit is 256, with which some 120 requests could wait.
pub const OPEN_FILES: u64 = 65_536;
/// From a failed end to the next start.
pub const RESTART_PAUSE_S: u64 = 10;
/// Connections that wait while no dispatcher runs.
pub const BACKLOG: u32 = 4096;

/// Whose service it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The user's own: runs while they are logged in (Linux: also otherwise, with lingering).
    User,
    /// The machine's: runs from its boot on.
    System,
}

/// All that a definition is made from. Paths are absolute, UTF-8, and without control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub scope: Scope,
    /// The dispatcher.
    pub program: PathBuf,
    pub config: PathBuf,
    pub listen: SocketAddr,
    /// Whether the manager holds the listening socket.
    pub socket: bool,
    /// From SIGTERM to SIGKILL.
    pub stop_limit: Duration,
    /// Who it runs as, where that is not who the manager runs as.
    pub user: Option<String>,
    /// `None`: where the dispatcher puts it by itself.
    pub run_dir: Option<PathBuf>,
    /// Where launchd writes its output.
    pub log: PathBuf,
}

impl Spec {
    /// # Errors
    /// Where a path cannot be written into a definition.
    pub fn check(&self, manager: Manager) -> Result<(), ServiceError> {
        let paths = [&self.program, &self.config, &self.log];
        for path in paths.into_iter().chain(&self.run_dir) {
            let refused = |problem| ServiceError::Path {
                path: path.clone(),
                problem,
            };
            let text = path
                .to_str()
                .ok_or_else(|| refused("is not UTF-8, which service definitions are"))?;
            if text.chars().any(char::is_control) {
                return Err(refused("has control characters in its name"));
            }
            if !path.is_absolute() {
                return Err(refused("is not absolute"));
            }
        }
        if text(self.folder()).ends_with('\\') {
            return Err(ServiceError::Path {
                path: self.folder().to_owned(),
                problem: "ends with a backslash, which systemd takes for a continued line",
            });
        }
        if manager == Manager::Systemd && text(&self.program).contains(['"', '\'', '\\']) {
            return Err(ServiceError::Path {
                path: self.program.clone(),
                problem: "has quotes or backslashes, and systemd runs no such program",
            });
        }
        if self.listen.port() == 0 {
            return Err(ServiceError::NoPort);
        }
        Ok(())
    }

    /// Program and arguments.
    #[must_use]
    pub fn command(&self, manager: Manager) -> Vec<String> {
        let mut words = vec![
            text(&self.program).to_owned(),
            "serve".to_owned(),
            "--service-manager".to_owned(),
            manager.as_str().to_owned(),
            "--stop-limit".to_owned(),
            format!("{}s", self.stop_limit_s()),
            "--config".to_owned(),
            text(&self.config).to_owned(),
        ];
        if let Some(run_dir) = &self.run_dir {
            words.push("--run-dir".to_owned());
            words.push(text(run_dir).to_owned());
        }
        words
    }

    /// Whole seconds, rounded up.
    #[must_use]
    pub fn stop_limit_s(&self) -> u64 {
        let whole = self.stop_limit.as_secs();
        whole + u64::from(self.stop_limit.subsec_nanos() > 0)
    }

    /// Where the service runs: relative paths in its configuration file are relative to the file.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.config.parent().unwrap_or(Path::new("/"))
    }
}

/// A checked path's text.
pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

#[cfg(test)]
pub(super) mod examples {
    use super::*;

    pub(crate) fn ordinary(scope: Scope) -> Spec {
        Spec {
            scope,
            program: "/usr/local/bin/dispatcher".into(),
            config: "/home/ada/.config/dispatcher/dispatcher.toml".into(),
            listen: ([127, 0, 0, 1], 8080).into(),
            socket: true,
            stop_limit: Duration::from_secs(45),
            user: None,
            run_dir: None,
            log: "/home/ada/Library/Logs/dispatcher/dispatcher.log".into(),
        }
    }

    pub(crate) fn awkward(scope: Scope) -> Spec {
        Spec {
            program: "/home/Zoë Ø/50% off & <more> $HOME/dispatcher".into(),
            config: "/home/Zoë O'Hara/my \"files\" & <more>\\x/dispatcher %n $PATH.toml".into(),
            listen: "[::1]:9090".parse().unwrap(),
            stop_limit: Duration::from_millis(61_500),
            user: (scope == Scope::System).then(|| "zoë".to_owned()),
            run_dir: Some("/run/a b".into()),
            log: "/home/Zoë O'Hara/Logs & more/dispatcher.log".into(),
            ..ordinary(scope)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn paths_that_no_definition_can_hold_are_refused_by_name() {
        let good = examples::awkward(Scope::User);
        assert!(good.check(Manager::Systemd).is_ok());
        let refusal = |change: fn(&mut Spec)| {
            let mut spec = good.clone();
            change(&mut spec);
            spec.check(Manager::Systemd).unwrap_err().to_string()
        };
        let not_utf8 = |spec: &mut Spec| spec.program = OsStr::from_bytes(b"/a/\xff").into();
        assert!(refusal(not_utf8).contains("not UTF-8"));
        assert!(refusal(|spec| spec.config = "/a/b\nExecStartPre=x".into()).contains("control"));
        assert!(refusal(|spec| spec.config = "b.toml".into()).contains("not absolute"));
        assert!(refusal(|spec| spec.config = "/a\\/b.toml".into()).contains("backslash"));
        let quoted = |spec: &mut Spec| spec.program = "/it's/dispatcher".into();
        assert!(refusal(quoted).contains("quotes"));
        let mut spec = good.clone();
        quoted(&mut spec);
        assert!(spec.check(Manager::Launchd).is_ok());
        assert!(refusal(|spec| spec.listen.set_port(0)).contains("port"));
    }
}
