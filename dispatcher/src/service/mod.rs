//! Living as a service: what service managers are told, and what they are given to start us by.

mod command;
mod control;
mod files;
mod installed;
mod intent;
pub mod launchd;
pub mod notifier;
pub mod notify;
mod place;
mod report;
pub mod spec;
pub mod stamp;
pub mod systemd;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use command::{InstallArgs, ServiceVerb, WhichService, run};
pub(crate) use files::write_whole;
pub use installed::{Installed, installed};
pub use place::{config_path, run_directory};
use stamp::Origin;

use crate::config::ConfigError;
use crate::error::Fault;

/// Who starts, watches and ends the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Manager {
    Launchd,
    Systemd,
}

impl Manager {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Launchd => "launchd",
            Self::Systemd => "systemd",
        }
    }

    /// The platform's own.
    #[must_use]
    pub fn native() -> Self {
        if cfg!(target_os = "macos") {
            Self::Launchd
        } else {
            Self::Systemd
        }
    }

    fn tool(self) -> &'static str {
        match self {
            Self::Launchd => "launchctl",
            Self::Systemd => "systemctl",
        }
    }
}

/// Why a service verb did not do what it was asked for.
#[derive(Debug, Error)]
pub enum ServiceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "`--{key}` would not reach the service, which has its settings from {}: write `{key}` there", .config.display()
    )]
    Typed { key: String, config: PathBuf },
    #[error(
        "there is no configuration file {}: write one with `dispatcher config init`, or name another with `--config`", .0.display()
    )]
    NoConfig(PathBuf),
    #[error("the path {} {problem}: put it elsewhere", .path.display())]
    Path {
        path: PathBuf,
        problem: &'static str,
    },
    #[error("a service needs a port that stays the same: set `port` to another number than 0")]
    NoPort,
    #[error("`--user` is for a service of the machine: say `--system` too")]
    UserWithoutSystem,
    #[error("there is no user `{0}` on this machine")]
    NoUser(String),
    #[error("{} {}: look at it, then say `--force` to replace it", .path.display(), occupied(.origin))]
    Occupied { path: PathBuf, origin: Origin },
    #[error("{} cannot be used: {cause}{}", .path.display(), permission_hint(.cause))]
    File { path: PathBuf, cause: io::Error },
    #[error("there is no `{}` here to manage services with: {}", .0.tool(), elsewhere(*.0))]
    NoManager(Manager),
    #[error("{0}")]
    NoSession(String),
    #[error("`{line}` failed: {said}")]
    Command { line: String, said: String },
    #[error("no service is installed ({} is not there): `dispatcher service install`", .0.display())]
    NotInstalled(PathBuf),
    #[error("the service did not end within {0} s")]
    StillRunning(u64),
    #[error("internal fault: {0}")]
    Internal(String),
}

impl ServiceError {
    fn file(path: &Path, cause: io::Error) -> Self {
        Self::File {
            path: path.to_owned(),
            cause,
        }
    }

    /// Who has to do something about it.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Config(_)
            | Self::Typed { .. }
            | Self::NoConfig(_)
            | Self::Path { .. }
            | Self::NoPort
            | Self::UserWithoutSystem
            | Self::NoUser(_)
            | Self::Occupied { .. }
            | Self::NoManager(_)
            | Self::NoSession(_) => Fault::Configuration,
            Self::File { cause, .. } => match cause.kind() {
                io::ErrorKind::PermissionDenied => Fault::Configuration,
                _ => Fault::Machine,
            },
            Self::Command { .. } | Self::StillRunning(_) => Fault::Machine,
            Self::NotInstalled(_) => Fault::Absence,
            Self::Internal(_) => Fault::Internal,
        }
    }
}

fn occupied(origin: &Origin) -> String {
    match origin {
        Origin::Newer(version) => format!("was written by a newer dispatcher ({version})"),
        Origin::Edited => "was edited after it was written".to_owned(),
        Origin::Foreign | Origin::Ours => {
            "was not written by `dispatcher service install`".to_owned()
        }
    }
}

fn permission_hint(cause: &io::Error) -> &'static str {
    if cause.kind() == io::ErrorKind::PermissionDenied {
        "; a service of the machine (`--system`) is for root, with sudo"
    } else {
        ""
    }
}

fn elsewhere(manager: Manager) -> &'static str {
    match manager {
        Manager::Launchd => "launchd is macOS's; elsewhere leave `--service-manager` out",
        Manager::Systemd => {
            "without systemd, have your own supervisor run `dispatcher serve` and restart it unless it exits with 0 or 78"
        }
    }
}
