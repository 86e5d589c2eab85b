//! The commands that ask, show and explain, beside the one that serves.

pub mod bench;
pub mod chat;
pub mod config_file;
pub mod doctor;
mod percentile;
pub mod status;

use std::io::{self, IsTerminal as _};
use std::path::PathBuf;

use thiserror::Error;

use crate::ask;
use crate::cli::Settings;
use crate::config::{Config, ConfigError, Surroundings};
use crate::error::Fault;
use crate::service;
use crate::service::Manager;
use crate::service::spec::Scope;

/// Why a command could not answer.
#[derive(Debug, Error)]
pub enum VerbError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("no dispatcher runs in {}: start one, or say which with its `--port` or `--run-dir`", .0.display())]
    NotRunning(PathBuf),
    #[error("the dispatcher at {address} does not answer: {cause}")]
    Silent { address: String, cause: io::Error },
    #[error("{} exists: say `--force` to replace it, or name another with `--config`", .0.display())]
    Exists(PathBuf),
    #[error("{} cannot be used: {cause}", .path.display())]
    File { path: PathBuf, cause: io::Error },
    #[error("the program {} cannot be run: {cause}; build it with `cargo build --release --workspace`", .path.display())]
    Program { path: PathBuf, cause: io::Error },
    #[error("{0}")]
    Ended(String),
    #[error("what is listed above keeps it from serving")]
    Unfit,
}

impl VerbError {
    /// Who has to do something about it.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Config(_) | Self::Exists(_) | Self::Program { .. } | Self::Unfit => {
                Fault::Configuration
            }
            Self::NotRunning(_) => Fault::Absence,
            Self::Silent { .. } | Self::Ended(_) => Fault::Machine,
            Self::File { cause, .. } => match cause.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Fault::Configuration,
                _ => Fault::Machine,
            },
        }
    }
}

/// Where the dispatcher that `settings` mean has its records: its own run directory, or else where a
/// service that runs has them.
///
/// # Errors
/// Where the settings that decide it cannot be understood.
pub fn run_directory(settings: &Settings, around: &Surroundings) -> Result<PathBuf, ConfigError> {
    let directory = Config::run_directory(settings, around)?;
    let named = settings.run_dir.is_some() || settings.port.is_some();
    if named || ask::running(&directory).is_some() {
        return Ok(directory);
    }
    let home = PathBuf::from(around.environment.get("HOME").map_or("/", String::as_str));
    let of_service = [Scope::User, Scope::System]
        .into_iter()
        .filter_map(|scope| service::run_directory(Manager::native(), scope, &home, around.user))
        .find(|other| ask::running(other).is_some());
    Ok(of_service.unwrap_or(directory))
}

/// Whether standard output may be coloured: a terminal, and nobody said no (<https://no-color.org>).
#[must_use]
pub fn is_coloured() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !refused && io::stdout().is_terminal()
}
