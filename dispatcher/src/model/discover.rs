//! Which model to serve, and with which engine, from what the user said and what is on disk.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{EngineKind, Engines};

/// Entries of a models directory that are looked at.
const ENTRIES_MAX: usize = 10_000;
/// Candidates that a message lists.
const LISTED_MAX: usize = 20;

/// What lies in a models directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// GGUF files; of a model in several parts, the first.
    pub gguf: Vec<PathBuf>,
    /// Folders with a `config.json` and safetensors.
    pub mlx: Vec<PathBuf>,
}

/// A model, and the engine that is to run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub engine: EngineKind,
    pub model: PathBuf,
}

/// Why no model could be chosen. Each text says what to do about it.
#[derive(Debug, Error)]
pub enum DiscoverError {
    #[error("the models directory {} cannot be read: {cause}", .directory.display())]
    Directory {
        directory: PathBuf,
        cause: io::Error,
    },
    #[error("{0}")]
    Nothing(String),
    #[error("{0}")]
    Several(String),
    #[error("the model {} does not exist (nor does it in the models directory {})", .model.display(), .directory.display())]
    Missing { model: PathBuf, directory: PathBuf },
    #[error("the model {} cannot be read: {cause}", .model.display())]
    Unreadable { model: PathBuf, cause: io::Error },
    #[error("the model {} is {is}; the engine `{engine}` wants {wants}", .model.display())]
    WrongKind {
        model: PathBuf,
        engine: EngineKind,
        is: &'static str,
        wants: &'static str,
    },
    #[error(
        "the worker program {} has no engine `{engine}`, it has {has}; this builds one that has \
         it: {build}",
        .worker.display()
    )]
    NotBuiltIn {
        engine: EngineKind,
        worker: PathBuf,
        has: Engines,
        build: &'static str,
    },
}

/// What the worker program can run, by its own word.
#[derive(Clone, Copy, Debug)]
pub struct Available<'a> {
    pub worker: &'a Path,
    pub engines: Engines,
    pub is_mac: bool,
}

impl Available<'_> {
    fn require(&self, engine: EngineKind) -> Result<(), DiscoverError> {
        if self.engines.has(engine) {
            return Ok(());
        }
        Err(DiscoverError::NotBuiltIn {
            engine,
            worker: self.worker.to_path_buf(),
            has: self.engines,
            build: match engine {
                EngineKind::Mlx if self.is_mac => "cargo build --release --features worker/mlx",
                EngineKind::Mlx => {
                    "scripts/setup-mlx && cargo build --release --features worker/mlx"
                }
                EngineKind::Llama | EngineKind::Scripted => "cargo build --release",
            },
        })
    }
}

/// Lists the candidates in `directory`; one that does not exist has none.
///
/// # Errors
/// Where the directory exists and cannot be read.
pub fn scan(directory: &Path) -> Result<Found, DiscoverError> {
    let refused = |cause| DiscoverError::Directory {
        directory: directory.to_path_buf(),
        cause,
    };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::default()),
        Err(error) => return Err(refused(error)),
    };
    let mut found = Found::default();
    for entry in entries.take(ENTRIES_MAX) {
        let path = entry.map_err(refused)?.path();
        if path.is_dir() {
            if is_mlx_folder(&path) {
                found.mlx.push(path);
            }
        } else if is_gguf_name(&path) {
            found.gguf.push(path);
        }
    }
    // The order of a directory is no order.
    found.gguf.sort();
    found.mlx.sort();
    Ok(found)
}

/// The one model that is meant, when none was named.
///
/// # Errors
/// Where there is none, or more than one: with the list of what is there and a command for each.
pub fn choose(
    found: &Found,
    engine: Option<EngineKind>,
    directory: &Path,
    available: Available<'_>,
) -> Result<Choice, DiscoverError> {
    if let Some(engine) = engine {
        available.require(engine)?;
    }
    let order = match engine {
        Some(engine) => vec![engine],
        None if available.is_mac => vec![EngineKind::Mlx, EngineKind::Llama],
        None => vec![EngineKind::Llama, EngineKind::Mlx],
    };
    for engine in order {
        if let [model] = found.of(engine)
            && available.engines.has(engine)
        {
            return Ok(Choice {
                engine,
                model: model.clone(),
            });
        }
    }
    Err(found.undecided(engine, directory, available.engines))
}

/// The model that was named: a path, or a name in the models directory with or without `.gguf`.
///
/// # Errors
/// Where it does not exist, cannot be read, or is not of the engine's kind.
pub fn named(
    model: &Path,
    engine: Option<EngineKind>,
    directory: &Path,
    available: Available<'_>,
) -> Result<Choice, DiscoverError> {
    if let Some(engine) = engine {
        available.require(engine)?;
    }
    let mut with_suffix = directory.join(model).into_os_string();
    with_suffix.push(".gguf");
    let places = [
        model.to_path_buf(),
        directory.join(model),
        PathBuf::from(with_suffix),
    ];
    let mut existing = None;
    for place in places {
        match fs::metadata(&place) {
            Ok(metadata) => {
                existing = Some((place, metadata.is_dir()));
                break;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => {
                return Err(DiscoverError::Unreadable {
                    model: place,
                    cause,
                });
            }
        }
    }
    let Some((model, is_folder)) = existing else {
        return Err(DiscoverError::Missing {
            model: model.to_path_buf(),
            directory: directory.to_path_buf(),
        });
    };
    let wrong = |engine, is, wants| {
        Err(DiscoverError::WrongKind {
            model: model.clone(),
            engine,
            is,
            wants,
        })
    };
    let engine = match (engine, is_folder) {
        (Some(EngineKind::Llama), true) => {
            return wrong(EngineKind::Llama, "a folder", "a GGUF file");
        }
        (Some(EngineKind::Mlx), false) => {
            return wrong(
                EngineKind::Mlx,
                "a file",
                "a folder (scripts/convert-gguf-to-mlx makes one of a GGUF file)",
            );
        }
        (Some(engine), false) => engine,
        (None, false) => EngineKind::Llama,
        (Some(engine), true) if is_mlx_folder(&model) => engine,
        (None, true) if is_mlx_folder(&model) => EngineKind::Mlx,
        (_, true) => {
            return wrong(
                engine.unwrap_or(EngineKind::Mlx),
                "a folder without config.json and safetensors",
                "a folder with both",
            );
        }
    };
    available.require(engine)?;
    Ok(Choice { engine, model })
}

impl Found {
    fn of(&self, engine: EngineKind) -> &[PathBuf] {
        match engine {
            EngineKind::Llama => &self.gguf,
            EngineKind::Mlx => &self.mlx,
            EngineKind::Scripted => &[],
        }
    }

    fn undecided(
        &self,
        engine: Option<EngineKind>,
        directory: &Path,
        engines: Engines,
    ) -> DiscoverError {
        let kinds = match engine {
            Some(engine) => vec![engine],
            None => vec![EngineKind::Llama, EngineKind::Mlx],
        };
        let candidates: Vec<(EngineKind, &PathBuf)> = kinds
            .iter()
            .flat_map(|kind| self.of(*kind).iter().map(|path| (*kind, path)))
            .collect();
        let place = directory.display();
        if candidates.is_empty() {
            let wanted = match engine {
                Some(EngineKind::Mlx) => "no model folder (config.json and safetensors)",
                Some(_) => "no GGUF file",
                None => "no model",
            };
            return DiscoverError::Nothing(format!(
                "there is {wanted} in the models directory {place}; name one with \
                 `--model PATH`, or the directory with `--models-dir PATH`"
            ));
        }
        let mut text = format!(
            "which model? The models directory {place} holds {}:",
            candidates.len()
        );
        for (engine, path) in candidates.iter().take(LISTED_MAX) {
            let note = if engines.has(*engine) {
                ""
            } else {
                "   (the worker program is built without this engine)"
            };
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n  dispatcher --engine {engine} --model {}{note}",
                shell_word(path)
            );
        }
        if candidates.len() > LISTED_MAX {
            let _ = write!(text, "\n  and {} more", candidates.len() - LISTED_MAX);
        }
        DiscoverError::Several(text)
    }
}

/// A path as it can be pasted into a shell.
pub(crate) fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

fn is_gguf_name(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
        .to_ascii_lowercase();
    let Some(stem) = name.strip_suffix(".gguf") else {
        return false;
    };
    // Parts are named `…-00002-of-00003`; the first stands for all.
    match stem.rsplit_once("-of-") {
        Some((before, of)) if of.bytes().all(|byte| byte.is_ascii_digit()) => {
            before.ends_with("-00001")
        }
        _ => true,
    }
}

fn is_mlx_folder(path: &Path) -> bool {
    path.join("config.json").is_file()
        && fs::read_dir(path).is_ok_and(|entries| {
            entries.take(ENTRIES_MAX).flatten().any(|entry| {
                entry
                    .path()
                    .extension()
                    .is_some_and(|extension| extension == "safetensors")
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(names: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for name in names {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"").unwrap();
        }
        directory
    }

    fn llama(is_mac: bool) -> Available<'static> {
        Available {
            worker: Path::new("/opt/worker"),
            engines: [EngineKind::Llama].into_iter().collect(),
            is_mac,
        }
    }

    fn both(is_mac: bool) -> Available<'static> {
        Available {
            engines: [EngineKind::Llama, EngineKind::Mlx].into_iter().collect(),
            ..llama(is_mac)
        }
    }

    const MLX: [&str; 2] = ["q/config.json", "q/model.safetensors"];

    #[test]
    fn the_only_gguf_file_is_taken_without_being_named() {
        let directory = directory(&["a.gguf", "notes.txt"]);
        let found = scan(directory.path()).unwrap();
        let choice = choose(&found, None, directory.path(), llama(false)).unwrap();
        assert_eq!(choice.engine, EngineKind::Llama);
        assert_eq!(choice.model, directory.path().join("a.gguf"));
    }

    #[test]
    fn two_gguf_files_are_listed_with_a_command_each() {
        let directory = directory(&["b file.gguf", "a.gguf"]);
        let found = scan(directory.path()).unwrap();
        let error = choose(&found, None, directory.path(), llama(true)).unwrap_err();
        let text = error.to_string();
        let path = directory.path().display();
        assert!(
            text.contains(&format!(
                "dispatcher --engine llama --model {path}/a.gguf\n"
            )),
            "{text}"
        );
        assert!(text.contains("/b file.gguf'"), "{text}");
    }

    #[test]
    fn a_folder_for_an_engine_that_is_not_built_in_is_listed_and_never_chosen() {
        let directory = directory(&MLX);
        let found = scan(directory.path()).unwrap();
        assert_eq!(found.mlx.len(), 1);
        let error = choose(&found, None, directory.path(), llama(true)).unwrap_err();
        assert!(error.to_string().contains("without this engine"), "{error}");
        let error =
            choose(&found, Some(EngineKind::Mlx), directory.path(), llama(true)).unwrap_err();
        let told = error.to_string();
        assert!(told.contains("no engine `mlx`, it has `llama`"), "{told}");
        assert!(!told.contains("setup-mlx"), "a Mac needs none: {told}");
    }

    #[test]
    fn with_both_engines_the_one_folder_is_found_and_a_mac_takes_it_first() {
        let directory = directory(&[&MLX[..], &["a.gguf"]].concat());
        let found = scan(directory.path()).unwrap();
        let engine = |engine, available| {
            let choice = choose(&found, engine, directory.path(), available).unwrap();
            choice.engine
        };
        assert_eq!(engine(None, both(false)), EngineKind::Llama);
        assert_eq!(engine(None, both(true)), EngineKind::Mlx);
        let mlx = Some(EngineKind::Mlx);
        assert_eq!(engine(mlx, both(false)), EngineKind::Mlx);
        let choice = choose(&found, mlx, directory.path(), both(false)).unwrap();
        assert_eq!(choice.model, directory.path().join("q"));
    }

    #[test]
    fn a_gguf_file_named_for_mlx_is_refused_with_the_way_to_convert_it() {
        let directory = directory(&["a.gguf"]);
        let error = named(
            Path::new("a"),
            Some(EngineKind::Mlx),
            directory.path(),
            both(false),
        )
        .unwrap_err();
        assert!(
            error.to_string().contains("scripts/convert-gguf-to-mlx"),
            "{error}"
        );
    }

    #[test]
    fn a_model_may_be_named_by_path_or_by_its_name_in_the_models_directory() {
        let directory = directory(&["a.gguf"]);
        let whole = directory.path().join("a.gguf");
        for name in [whole.as_path(), Path::new("a.gguf"), Path::new("a")] {
            let choice = named(name, None, directory.path(), llama(false)).unwrap();
            assert_eq!(choice.model, whole);
            assert_eq!(choice.engine, EngineKind::Llama);
        }
        let error = named(Path::new("b"), None, directory.path(), llama(false)).unwrap_err();
        assert!(matches!(error, DiscoverError::Missing { .. }), "{error}");
    }

    #[test]
    fn a_folder_is_no_model_of_llama() {
        let directory = directory(&MLX);
        let error = named(
            Path::new("q"),
            Some(EngineKind::Llama),
            directory.path(),
            llama(false),
        )
        .unwrap_err();
        assert!(matches!(error, DiscoverError::WrongKind { .. }), "{error}");
        let error = named(Path::new("."), None, directory.path(), llama(false)).unwrap_err();
        assert!(matches!(error, DiscoverError::WrongKind { .. }), "{error}");
        let error = named(Path::new("q"), None, directory.path(), llama(false)).unwrap_err();
        assert!(matches!(error, DiscoverError::NotBuiltIn { .. }), "{error}");
    }

    #[test]
    fn only_the_first_part_of_a_split_model_is_a_candidate() {
        let directory = directory(&["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
        let found = scan(directory.path()).unwrap();
        assert_eq!(found.gguf, [directory.path().join("m-00001-of-00002.gguf")]);
    }

    #[test]
    fn an_absent_models_directory_is_an_empty_one() {
        let directory = directory(&[]);
        let found = scan(&directory.path().join("none")).unwrap();
        let error = choose(&found, None, directory.path(), llama(false)).unwrap_err();
        assert!(matches!(error, DiscoverError::Nothing(_)), "{error}");
    }
}
