//! The installation: the programs, and whether the service's user may read what it needs.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Finding;
use crate::config::{Config, EngineKind};
use crate::service;

/// Whether the worker runs and is of this version, and what of it the engine needs beside.
pub(super) fn programs(config: &Config) -> Vec<Finding> {
    let worker = &config.worker;
    let shown = worker.display();
    let mut all = Vec::new();
    all.push(match Command::new(worker).arg("--version").output() {
        Err(error) => Finding::bad(
            "worker",
            format!("{shown} cannot be run: {error}"),
            "build it with `cargo build --release`, or name another with `--worker`",
        ),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            let version = said.split_whitespace().last().unwrap_or_default();
            if output.status.success() && version == env!("CARGO_PKG_VERSION") {
                Finding::good("worker", format!("{shown}, {version}"))
            } else {
                Finding::poor(
                    "worker",
                    format!(
                        "{shown} says that it is {version:?}, this is {}",
                        env!("CARGO_PKG_VERSION")
                    ),
                    "install both from one build",
                )
            }
        }
    });
    all.push(Finding::good(
        "engine",
        format!("`{}` is chosen", config.engine),
    ));
    if config.engine == EngineKind::Mlx && cfg!(target_os = "macos") {
        let library = worker.with_file_name("mlx.metallib");
        all.push(if library.is_file() {
            Finding::good("mlx.metallib", format!("{} is there", library.display()))
        } else {
            Finding::bad(
                "mlx.metallib",
                format!("{} is missing", library.display()),
                "MLX looks for its GPU code beside the worker: copy it there from the build",
            )
        });
    }
    all
}

/// Of each service that is installed: its definition, and what its user may read.
pub(super) fn examine(config: Option<&Config>) -> Vec<Finding> {
    let installed = service::installed();
    if installed.is_empty() {
        return vec![Finding::unknown(
            "service",
            "none is installed; `dispatcher service install` does it",
        )];
    }
    let mut all = Vec::new();
    for one in installed {
        let path = one.definition.display();
        all.push(match &one.trouble {
            None => Finding::good("service", format!("{path}: {}", one.state)),
            Some(trouble) => Finding::poor(
                "service",
                format!("{path}: {trouble}"),
                "`dispatcher service install` writes it anew",
            ),
        });
        let mut needed = one.programs.clone();
        if let Some(config) = config {
            needed.push(config.worker.clone());
            needed.extend(config.model.clone());
            let library = config.worker.with_file_name("mlx.metallib");
            if library.exists() {
                needed.push(library);
            }
        }
        for path in needed {
            if let Err(obstacle) = readable(&path, one.uid, one.gid) {
                all.push(Finding::bad(
                    "service",
                    format!(
                        "its user (uid {}) may not read {}: {obstacle}",
                        one.uid,
                        path.display()
                    ),
                    "give it the right, or move the file where it may",
                ));
            }
        }
    }
    all
}

/// Whether `uid` may read `path` by the modes of it and of the folders above; lists beyond the modes
/// are not asked.
fn readable(path: &Path, uid: u32, gid: u32) -> Result<(), String> {
    if uid == 0 {
        return Ok(());
    }
    let path: PathBuf = fs::canonicalize(path).map_err(|error| error.to_string())?;
    for part in path.ancestors() {
        let found = fs::metadata(part).map_err(|error| format!("{}: {error}", part.display()))?;
        let mode = found.permissions().mode();
        let bits = if found.uid() == uid {
            mode >> 6
        } else if found.gid() == gid {
            mode >> 3
        } else {
            mode
        };
        let (wanted, word) = if found.is_dir() {
            (0o1, "be entered")
        } else {
            (0o4, "be read")
        };
        if bits & wanted == 0 {
            return Err(format!(
                "{} may not {word} by it (mode {:o})",
                part.display(),
                mode & 0o7777
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_closed_folder_hides_is_found_with_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let closed = folder.path().join("closed");
        fs::create_dir(&closed).unwrap();
        let file = closed.join("model.gguf");
        fs::write(&file, "x").unwrap();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(folder.path(), 0o755);
        mode(&closed, 0o700);
        mode(&file, 0o644);
        let stranger = 54_321;
        let obstacle = readable(&file, stranger, stranger).unwrap_err();
        assert!(obstacle.contains("closed may not be entered"), "{obstacle}");
        mode(&closed, 0o711);
        assert_eq!(readable(&file, stranger, stranger), Ok(()));
        mode(&file, 0o600);
        assert!(readable(&file, stranger, stranger).is_err());
        let owner = fs::metadata(&file).unwrap().uid();
        assert_eq!(readable(&file, owner, stranger), Ok(()));
    }
}
