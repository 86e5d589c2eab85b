//! Living as a service: what service managers are told, and what they are given to start us by.

pub mod notifier;
pub mod notify;

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
}
