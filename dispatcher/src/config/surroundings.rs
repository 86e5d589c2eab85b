//! What a configuration needs to know of the machine and the user, asked once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::devices::{self, Device};
use crate::memory::{self, Limit};

/// Facts about where we run. Plain data, so that tests can make any machine up.
#[derive(Clone, Debug)]
pub struct Surroundings {
    pub environment: BTreeMap<String, String>,
    pub cores: u32,
    pub memory: Limit,
    /// This program's own path.
    pub executable: PathBuf,
    pub current_directory: PathBuf,
    pub is_mac: bool,
    pub user: u32,
    pub process: u32,
    /// Lists the devices of this machine; asked only where some are named.
    pub devices: fn() -> Vec<Device>,
}

impl Surroundings {
    /// Asks the machine. What it will not say is assumed at its least.
    #[must_use]
    pub fn probe() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Self {
            environment: std::env::vars_os()
                .filter_map(|(key, value)| {
                    Some((key.into_string().ok()?, value.into_string().ok()?))
                })
                .collect(),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            memory: memory::probe(),
            executable: std::env::current_exe().unwrap_or_default(),
            current_directory: std::env::current_dir().unwrap_or_default(),
            is_mac: cfg!(target_os = "macos"),
            user: nix::unistd::getuid().as_raw(),
            process: std::process::id(),
            devices: devices::probe,
        }
    }

    fn variable(&self, name: &str) -> Option<&Path> {
        self.environment
            .get(name)
            .filter(|value| !value.is_empty())
            .map(Path::new)
    }

    /// The configuration file that is read where none is named.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        let home = self.variable("HOME").unwrap_or_else(|| Path::new("/"));
        let config_home = self.variable("XDG_CONFIG_HOME");
        crate::service::config_path(home, config_home, self.is_mac)
    }

    /// `./models` where it exists, else the user's data directory.
    pub(crate) fn models_directory(&self) -> PathBuf {
        let here = self.current_directory.join("models");
        if here.is_dir() {
            // The short form is the one that people paste.
            return PathBuf::from("models");
        }
        let home = self.variable("HOME").unwrap_or_else(|| Path::new("/"));
        let data = if self.is_mac {
            home.join("Library/Application Support")
        } else {
            self.variable("XDG_DATA_HOME")
                .map_or_else(|| home.join(".local/share"), Path::to_path_buf)
        };
        data.join("dispatcher/models")
    }

    /// One for each user and port, so that a successor finds what its predecessor left. A port that
    /// is yet to be chosen has none to share, so the process's own number stands in.
    pub(super) fn run_directory(&self, port: u16) -> PathBuf {
        let place = if port == 0 {
            format!("p{}", self.process)
        } else {
            port.to_string()
        };
        match self.variable("XDG_RUNTIME_DIR") {
            Some(runtime) if !self.is_mac => runtime.join(format!("dispatcher-{place}")),
            _ => {
                let base = self.variable("TMPDIR").unwrap_or_else(|| Path::new("/tmp"));
                base.join(format!("dispatcher-{}-{place}", self.user))
            }
        }
    }

    /// Where what was measured is kept from one run to the next.
    #[must_use]
    pub fn cache_directory(&self) -> PathBuf {
        let home = self.variable("HOME").unwrap_or_else(|| Path::new("/"));
        let cache = if self.is_mac {
            home.join("Library/Caches")
        } else {
            self.variable("XDG_CACHE_HOME")
                .map_or_else(|| home.join(".cache"), Path::to_path_buf)
        };
        cache.join("dispatcher")
    }

    pub(crate) fn worker_beside(&self) -> PathBuf {
        self.executable
            .parent()
            .unwrap_or_else(|| Path::new("."))
            .join("dispatcher-worker")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(variables: &[(&str, &str)], is_mac: bool) -> Surroundings {
        Surroundings {
            environment: variables
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            cores: 2,
            memory: Limit::smaller(1 << 30, None),
            executable: PathBuf::from("/opt/dispatcher/dispatcher"),
            current_directory: PathBuf::from("/nonexistent"),
            is_mac,
            user: 501,
            process: 77,
            devices: Vec::new,
        }
    }

    #[test]
    fn models_are_looked_for_where_the_platform_keeps_data() {
        let home = [("HOME", "/h")];
        assert_eq!(
            around(&home, false).models_directory(),
            Path::new("/h/.local/share/dispatcher/models")
        );
        assert_eq!(
            around(&home, true).models_directory(),
            Path::new("/h/Library/Application Support/dispatcher/models")
        );
        let xdg = [("HOME", "/h"), ("XDG_DATA_HOME", "/d")];
        assert_eq!(
            around(&xdg, false).models_directory(),
            Path::new("/d/dispatcher/models")
        );
    }

    #[test]
    fn each_port_has_a_run_directory_of_its_own() {
        let plain = around(&[], false);
        assert_eq!(
            plain.run_directory(8080),
            Path::new("/tmp/dispatcher-501-8080")
        );
        assert_eq!(plain.run_directory(0), Path::new("/tmp/dispatcher-501-p77"));
        let runtime = around(&[("XDG_RUNTIME_DIR", "/run/user/501")], false);
        assert_eq!(
            runtime.run_directory(8080),
            Path::new("/run/user/501/dispatcher-8080")
        );
    }

    #[test]
    fn the_worker_is_found_beside_the_dispatcher() {
        assert_eq!(
            around(&[], false).worker_beside(),
            Path::new("/opt/dispatcher/dispatcher-worker")
        );
    }
}
