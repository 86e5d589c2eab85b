//! What is known of a model from its files' headers alone.

use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use thiserror::Error;

use super::mlx;
use crate::bus::Weights;
use crate::memory::Costs;
use crate::model::EngineKind;
use crate::model::gguf::{self, GgufError, Header};

/// A runtime's own memory beside an MLX model's weights, in bytes.
const MLX_WORKING_BYTES: u64 = 512 << 20;

/// Why a model's figures cannot be read.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error("the model {} does not exist (nor does it in the models directory {})", .model.display(), .directory.display())]
    Missing { model: PathBuf, directory: PathBuf },
    #[error("{} cannot be read: {cause}", .path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("the model {} {cause}", .path.display())]
    Gguf { path: PathBuf, cause: GgufError },
    #[error("{} is damaged: {problem}", .path.display())]
    Damaged { path: PathBuf, problem: String },
}

/// A model as planning needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFacts {
    pub engine: EngineKind,
    pub path: PathBuf,
    pub name: String,
    pub weights: Weights,
    pub kv_bytes_per_token: u64,
    /// Tokens that it was trained for.
    pub context_length: Option<u32>,
    /// In the machine's memory, where nothing is offloaded.
    pub costs: Costs,
    pub tensor_bytes: u64,
    /// Of a GGUF file, for what needs all of it.
    pub header: Option<Header>,
    /// Tells this file from others, without its path.
    pub identity: String,
}

impl ModelFacts {
    /// Of the file or folder at `path`.
    ///
    /// # Errors
    /// Where it cannot be read or is no model.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let metadata = std::fs::metadata(path).map_err(|cause| ModelError::Io {
            path: path.to_path_buf(),
            cause,
        })?;
        let mut facts = if metadata.is_dir() {
            Self::of_folder(path)?
        } else {
            Self::of_file(path)?
        };
        facts.identity = identity(path, &facts);
        Ok(facts)
    }

    /// The model that `name` means: a path, or a name in `directory`, with or without `.gguf`.
    ///
    /// # Errors
    /// As [`Self::read`], or where there is none.
    pub fn find(name: &Path, directory: &Path) -> Result<Self, ModelError> {
        let mut with_suffix = directory.join(name).into_os_string();
        with_suffix.push(".gguf");
        let places = [
            name.to_path_buf(),
            directory.join(name),
            PathBuf::from(with_suffix),
        ];
        match places.iter().find(|place| place.exists()) {
            Some(place) => Self::read(place),
            None => Err(ModelError::Missing {
                model: name.to_path_buf(),
                directory: directory.to_path_buf(),
            }),
        }
    }

    fn of_file(path: &Path) -> Result<Self, ModelError> {
        let header = gguf::read(path).map_err(|cause| ModelError::Gguf {
            path: path.to_path_buf(),
            cause,
        })?;
        Ok(Self {
            engine: EngineKind::Llama,
            path: path.to_path_buf(),
            name: file_name(path.file_stem()),
            weights: header.weights(),
            kv_bytes_per_token: header.kv_bytes_per_token,
            context_length: header.context_length,
            costs: Costs::of_header(&header, false),
            tensor_bytes: header.tensor_bytes,
            header: Some(header),
            identity: String::new(),
        })
    }

    fn of_folder(path: &Path) -> Result<Self, ModelError> {
        let folder = mlx::read(path)?;
        Ok(Self {
            engine: EngineKind::Mlx,
            path: path.to_path_buf(),
            name: file_name(path.file_name()),
            weights: folder.weights,
            kv_bytes_per_token: folder.kv_bytes_per_token,
            context_length: folder.context_length,
            // MLX reads weights into memory of its own: each instance has them.
            costs: Costs {
                mapped: 0,
                repacked: folder.tensor_bytes,
                kv_per_token: folder.kv_bytes_per_token,
                working: MLX_WORKING_BYTES,
            },
            tensor_bytes: folder.tensor_bytes,
            header: None,
            identity: String::new(),
        })
    }
}

fn file_name(name: Option<&std::ffi::OsStr>) -> String {
    name.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

fn identity(path: &Path, facts: &ModelFacts) -> String {
    let modified = std::fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .map_or(0, |since| since.as_nanos());
    let words = format!(
        "{} {} {:?} {} {modified}",
        facts.name, facts.tensor_bytes, facts.weights, facts.kv_bytes_per_token
    );
    blake3::hash(words.as_bytes()).to_hex()[..16].to_owned()
}
