//! Where things of a service are: its configuration, its definitions, its run directory, its log.

use std::path::{Path, PathBuf};

use super::spec::Scope;
use super::{Manager, launchd, systemd};
use crate::config::RUN_DIR_BYTES_MAX;

/// The folder of a user's configuration and data on macOS, under the home.
const APPLICATION_SUPPORT: &str = "Library/Application Support/dispatcher";

/// The configuration file that is read where none is named. `config_home`: `$XDG_CONFIG_HOME`.
#[must_use]
pub fn config_path(home: &Path, config_home: Option<&Path>, is_mac: bool) -> PathBuf {
    let folder = if is_mac {
        home.join(APPLICATION_SUPPORT)
    } else {
        config_home
            .map_or_else(|| home.join(".config"), Path::to_path_buf)
            .join("dispatcher")
    };
    folder.join("dispatcher.toml")
}

/// The same for a service of the machine.
pub(super) fn system_config_path(manager: Manager) -> PathBuf {
    match manager {
        Manager::Launchd => Path::new("/")
            .join(APPLICATION_SUPPORT)
            .join("dispatcher.toml"),
        Manager::Systemd => "/etc/dispatcher/dispatcher.toml".into(),
    }
}

/// Where a service's dispatcher has its sockets and records; `None`: where any dispatcher would have
/// them. `TMPDIR` is not the place on macOS: what is not used for three days is removed there.
#[must_use]
pub fn run_directory(manager: Manager, scope: Scope, home: &Path, uid: u32) -> Option<PathBuf> {
    match (manager, scope) {
        (Manager::Systemd, Scope::User) => None,
        (Manager::Systemd, Scope::System) => Some("/run/dispatcher".into()),
        (Manager::Launchd, _) => {
            let directory = home.join(APPLICATION_SUPPORT).join("run");
            let fits = directory.as_os_str().len() <= RUN_DIR_BYTES_MAX;
            Some(if fits {
                directory
            } else {
                format!("/tmp/dispatcher-{uid}-service").into()
            })
        }
    }
}

/// The folder of the manager's definitions.
pub(super) fn definitions(
    manager: Manager,
    scope: Scope,
    home: &Path,
    config_home: Option<&Path>,
) -> PathBuf {
    match (manager, scope) {
        (Manager::Launchd, Scope::User) => home.join("Library/LaunchAgents"),
        (Manager::Launchd, Scope::System) => "/Library/LaunchDaemons".into(),
        (Manager::Systemd, Scope::User) => config_home
            .map_or_else(|| home.join(".config"), Path::to_path_buf)
            .join("systemd/user"),
        (Manager::Systemd, Scope::System) => "/etc/systemd/system".into(),
    }
}

/// The main definition's name.
pub(super) fn name(manager: Manager) -> String {
    match manager {
        Manager::Launchd => format!("{}.plist", launchd::LABEL),
        Manager::Systemd => systemd::SERVICE.to_owned(),
    }
}

/// Where launchd writes the output.
pub(super) fn log(home: &Path) -> PathBuf {
    home.join("Library/Logs/dispatcher/dispatcher.log")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_platform_has_its_places() {
        let home = Path::new("/home/Zoë O");
        assert_eq!(
            config_path(home, None, false),
            home.join(".config/dispatcher/dispatcher.toml")
        );
        assert_eq!(
            config_path(home, Some(Path::new("/c")), false),
            Path::new("/c/dispatcher/dispatcher.toml")
        );
        assert_eq!(
            config_path(home, Some(Path::new("/c")), true),
            home.join("Library/Application Support/dispatcher/dispatcher.toml")
        );
        assert_eq!(
            definitions(Manager::Launchd, Scope::User, home, None),
            home.join("Library/LaunchAgents")
        );
        assert_eq!(
            definitions(Manager::Systemd, Scope::User, home, None),
            home.join(".config/systemd/user")
        );
    }

    #[test]
    fn a_run_directory_is_never_too_long_for_a_socket() {
        let at = |home: &str| run_directory(Manager::Launchd, Scope::User, Path::new(home), 501);
        assert_eq!(
            at("/Users/ada").unwrap(),
            Path::new("/Users/ada/Library/Application Support/dispatcher/run")
        );
        let long = format!("/Users/{}", "ë".repeat(40));
        assert_eq!(at(&long).unwrap(), Path::new("/tmp/dispatcher-501-service"));
    }
}
