//! Why a run ended badly: whose fault it is, and the exit code that says so.

use std::io;
use std::net::SocketAddr;

use thiserror::Error;

use crate::config::ConfigError;
use crate::plan::PlanError;
use crate::reload::ReloadError;
use crate::service::{Manager, ServiceError};
use crate::socket::SocketError;
use crate::verbs::VerbError;

/// Trying again will not help: `EX_CONFIG` of `sysexits.h`.
pub const EXIT_CONFIG: u8 = 78;
/// There is nobody to talk to: `EX_UNAVAILABLE`.
pub const EXIT_UNAVAILABLE: u8 = 69;
/// A fault of the program: `EX_SOFTWARE`.
pub const EXIT_INTERNAL: u8 = 70;
/// The machine refused something that it may grant another time: `EX_OSERR`.
pub const EXIT_MACHINE: u8 = 71;

/// Who has to do something about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Whoever wrote the command line, the environment or the file.
    Configuration,
    /// The machine: memory, descriptors, file systems.
    Machine,
    /// Nobody: no dispatcher runs.
    Absence,
    /// Us.
    Internal,
}

/// Why a run ended badly. Texts are fragments that fit after "dispatcher: ".
#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Nothing else may happen to hold the port for a moment only: who shares a port by plan hands
    /// the socket over. So the port being taken is a matter of configuration.
    #[error("cannot listen on {address}: {}", listen_cause(.cause, *.address))]
    Listen {
        address: SocketAddr,
        cause: io::Error,
    },
    #[error(transparent)]
    Reload(#[from] ReloadError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Service(#[from] ServiceError),
    #[error(transparent)]
    Verb(#[from] VerbError),
    #[error("the run directory {directory} cannot be used: {cause}")]
    RunDirectory { directory: String, cause: io::Error },
    /// Every instance failed at its start for a reason that will not go away, and none ever served.
    #[error("no instance can start: {0}")]
    NothingStarts(String),
    #[error("{what}: {cause}")]
    Machine {
        what: &'static str,
        cause: io::Error,
    },
    #[error("internal fault: {0}")]
    Internal(String),
}

impl RunError {
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Config(_) | Self::Socket(_) | Self::NothingStarts(_) => Fault::Configuration,
            Self::Service(error) => error.fault(),
            Self::Verb(error) => error.fault(),
            Self::Reload(error) => match error {
                ReloadError::NotRunning(_) => Fault::Absence,
                ReloadError::Refused { .. } => Fault::Configuration,
                ReloadError::Signal { .. } | ReloadError::Silent { .. } => Fault::Machine,
            },
            Self::Plan(error) => error.fault(),
            Self::Listen { cause, .. } => match cause.kind() {
                io::ErrorKind::AddrInUse
                | io::ErrorKind::AddrNotAvailable
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::InvalidInput => Fault::Configuration,
                _ => Fault::Machine,
            },
            Self::RunDirectory { cause, .. } => match cause.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::Interrupted => Fault::Machine,
                _ => Fault::Configuration,
            },
            Self::Machine { .. } => Fault::Machine,
            Self::Internal(_) => Fault::Internal,
        }
    }

    /// The process's exit code for a service manager that started it. launchd starts again whatever
    /// ends with another code than 0: what will never work must end with it.
    #[must_use]
    pub fn exit_code_under(&self, manager: Option<Manager>) -> u8 {
        match (manager, self.fault()) {
            (Some(Manager::Launchd), Fault::Configuration) => 0,
            _ => self.exit_code(),
        }
    }

    /// The process's exit code.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self.fault() {
            Fault::Configuration => EXIT_CONFIG,
            Fault::Machine => EXIT_MACHINE,
            Fault::Absence => EXIT_UNAVAILABLE,
            Fault::Internal => EXIT_INTERNAL,
        }
    }
}

fn listen_cause(cause: &io::Error, address: SocketAddr) -> String {
    match cause.kind() {
        io::ErrorKind::AddrInUse => format!(
            "another process listens there; stop it, or choose another port with `--port` \
             (0 takes a free one; now {})",
            address.port()
        ),
        io::ErrorKind::PermissionDenied => {
            format!("not permitted ({cause}); ports under 1024 need privileges: see `--port`")
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("this machine has no such address ({cause}): see `--host`")
        }
        _ => cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(kind: io::ErrorKind) -> RunError {
        RunError::Listen {
            address: SocketAddr::from(([127, 0, 0, 1], 8080)),
            cause: io::Error::from(kind),
        }
    }

    #[test]
    fn what_will_not_go_away_by_itself_exits_with_78() {
        assert_eq!(listen(io::ErrorKind::AddrInUse).exit_code(), EXIT_CONFIG);
        assert_eq!(
            listen(io::ErrorKind::PermissionDenied).exit_code(),
            EXIT_CONFIG
        );
        let conflict = ConfigError::Conflict("x".into());
        assert_eq!(RunError::from(conflict).exit_code(), EXIT_CONFIG);
    }

    #[test]
    fn what_may_pass_does_not() {
        assert_eq!(listen(io::ErrorKind::OutOfMemory).exit_code(), EXIT_MACHINE);
        assert_eq!(RunError::Internal("x".into()).exit_code(), EXIT_INTERNAL);
    }

    #[test]
    fn a_port_in_use_names_the_flag_to_change() {
        let text = listen(io::ErrorKind::AddrInUse).to_string();
        assert!(text.contains("127.0.0.1:8080"), "{text}");
        assert!(text.contains("--port"), "{text}");
    }
}
