//! From what was typed to what is to be installed: whose service, its configuration, its definitions.

use std::path::{Path, PathBuf};

use super::files::Definition;
use super::spec::{Scope, Spec};
use super::stamp::Syntax;
use super::{Manager, ServiceError, launchd, place, systemd};
use crate::cli::Settings;
use crate::config::{Config, STOP_MARGIN, Source, Surroundings};

/// Whose service is meant, and whom it runs as.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) manager: Manager,
    pub(super) scope: Scope,
    pub(super) home: PathBuf,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// `None`: who runs this.
    pub(super) user: Option<String>,
    config_home: Option<PathBuf>,
    runtime: Option<PathBuf>,
}

impl Owner {
    /// `user`: as was typed; a service of the machine else runs as who called sudo.
    pub(super) fn find(
        manager: Manager,
        system: bool,
        user: Option<&str>,
    ) -> Result<Self, ServiceError> {
        let variable = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        if !system {
            if user.is_some() {
                return Err(ServiceError::UserWithoutSystem);
            }
            return Ok(Self {
                manager,
                scope: Scope::User,
                home: variable("HOME").unwrap_or_else(|| "/".into()),
                uid: nix::unistd::getuid().as_raw(),
                gid: nix::unistd::getgid().as_raw(),
                user: None,
                config_home: variable("XDG_CONFIG_HOME"),
                runtime: variable("XDG_RUNTIME_DIR"),
            });
        }
        let name = user
            .map(str::to_owned)
            .or_else(|| {
                std::env::var("SUDO_USER")
                    .ok()
                    .filter(|name| !name.is_empty())
            })
            .unwrap_or_else(|| "root".to_owned());
        let known = nix::unistd::User::from_name(&name).ok().flatten();
        let known = known.ok_or_else(|| ServiceError::NoUser(name.clone()))?;
        Ok(Self {
            manager,
            scope: Scope::System,
            home: known.dir,
            uid: known.uid.as_raw(),
            gid: known.gid.as_raw(),
            user: Some(name),
            config_home: None,
            runtime: None,
        })
    }

    /// The main definition's path.
    pub(super) fn definition(&self) -> PathBuf {
        self.folder().join(place::name(self.manager))
    }

    fn folder(&self) -> PathBuf {
        let config_home = self.config_home.as_deref();
        place::definitions(self.manager, self.scope, &self.home, config_home)
    }

    /// The file that the service reads.
    pub(super) fn config(&self, typed: Option<&str>) -> Result<PathBuf, ServiceError> {
        let default = || match self.scope {
            Scope::System => place::system_config_path(self.manager),
            Scope::User => {
                let is_mac = self.manager == Manager::Launchd;
                place::config_path(&self.home, self.config_home.as_deref(), is_mac)
            }
        };
        let path = typed.map_or_else(default, PathBuf::from);
        let path = std::path::absolute(&path).map_err(|cause| ServiceError::file(&path, cause))?;
        if path.is_file() {
            Ok(path)
        } else {
            Err(ServiceError::NoConfig(path))
        }
    }

    /// The machine as the service will find it: not the caller's shell.
    pub(super) fn surroundings(&self, folder: &Path) -> Surroundings {
        let around = Surroundings::probe();
        let mut environment = std::collections::BTreeMap::new();
        let mut set = |name: &str, path: &Path| {
            environment.insert(name.to_owned(), path.to_string_lossy().into_owned());
        };
        set("HOME", &self.home);
        if let Some(runtime) = &self.runtime {
            set("XDG_RUNTIME_DIR", runtime);
        }
        Surroundings {
            environment,
            current_directory: folder.to_owned(),
            user: self.uid,
            ..around
        }
    }

    /// The definitions that `spec` comes to, the main one first.
    pub(super) fn definitions(&self, spec: &Spec) -> Result<Vec<Definition>, ServiceError> {
        let folder = self.folder();
        let unit = |name: &str, text: String| Definition {
            path: folder.join(name),
            text,
            syntax: Syntax::Unit,
        };
        Ok(match self.manager {
            Manager::Launchd => vec![Definition {
                path: self.definition(),
                text: launchd::definition(spec)?,
                syntax: Syntax::Xml,
            }],
            Manager::Systemd => {
                let mut all = vec![unit(systemd::SERVICE, systemd::service(spec))];
                if spec.socket {
                    all.push(unit(systemd::SOCKET, systemd::socket(spec)));
                }
                all
            }
        })
    }

    /// All definitions that may be there, for what removes or reads them.
    pub(super) fn possible(&self) -> Vec<Definition> {
        let names: &[&str] = match self.manager {
            Manager::Launchd => &[],
            Manager::Systemd => &[systemd::SOCKET],
        };
        let paths = std::iter::once(self.definition())
            .chain(names.iter().map(|name| self.folder().join(name)));
        paths
            .map(|path| Definition {
                path,
                text: String::new(),
                syntax: Syntax::Unit,
            })
            .collect()
    }
}

/// What is to be installed.
#[derive(Debug)]
pub(super) struct Intent {
    pub(super) config: Config,
    pub(super) spec: Spec,
    pub(super) definitions: Vec<Definition>,
}

/// What the configuration file comes to for the service. Changes this process's directory to the file's.
///
/// # Errors
/// Where another setting was typed than the file, or what the file says cannot work.
pub(super) fn intent(
    owner: &Owner,
    settings: &Settings,
    with_socket: bool,
) -> Result<Intent, ServiceError> {
    let path = owner.config(settings.config.as_deref())?;
    if let Some(key) = settings.first_typed() {
        return Err(ServiceError::Typed {
            key: key.to_owned(),
            config: path,
        });
    }
    let config = resolve(owner, &path)?;
    let ours = Source::File(path.to_string_lossy().into_owned());
    let named = config
        .effective
        .iter()
        .any(|one| one.key == "run-dir" && one.source == ours);
    // The system unit may write into its own runtime directory alone, whatever the file says.
    let confined = owner.manager == Manager::Systemd && owner.scope == Scope::System;
    let run_dir = (confined || !named)
        .then(|| place::run_directory(owner.manager, owner.scope, &owner.home, owner.uid))
        .flatten();
    let program = std::env::current_exe()
        .map_err(|cause| ServiceError::file(Path::new("dispatcher"), cause))?;
    let spec = Spec {
        scope: owner.scope,
        program,
        config: path,
        listen: config.listen,
        socket: with_socket,
        stop_limit: config.drain_timeout + config.worker_grace + STOP_MARGIN,
        user: owner.user.clone(),
        run_dir,
        log: place::log(&owner.home),
    };
    spec.check(owner.manager)?;
    let definitions = owner.definitions(&spec)?;
    Ok(Intent {
        config,
        spec,
        definitions,
    })
}

/// The configuration as the service reads it.
pub(super) fn resolve(owner: &Owner, path: &Path) -> Result<Config, ServiceError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    // Relative paths in the file are relative to it: the definitions name it as the working directory.
    std::env::set_current_dir(folder).map_err(|cause| ServiceError::file(folder, cause))?;
    let settings = Settings {
        config: Some(path.to_string_lossy().into_owned()),
        service_manager: Some(owner.manager),
        ..Settings::default()
    };
    Ok(Config::resolve(&settings, &owner.surroundings(folder))?)
}
