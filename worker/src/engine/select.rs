//! From the name of an engine to a loaded one.

#[cfg(not(all(feature = "llama", feature = "mlx")))]
use std::path::Path;

use super::scripted::{self, Script};
use super::{LoadError, LoadOptions, Loaded, Progress};

/// Which runtime holds the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineKind {
    Llama,
    Mlx,
    /// A test double; never a default.
    Scripted,
}

impl EngineKind {
    /// Its name on the command line and on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mlx => "mlx",
            Self::Scripted => "scripted",
        }
    }
}

/// The engines that this build has, the test double last.
pub const BUILT_IN: &[EngineKind] = &[
    #[cfg(feature = "llama")]
    EngineKind::Llama,
    #[cfg(feature = "mlx")]
    EngineKind::Mlx,
    EngineKind::Scripted,
];

/// An engine and what it needs beside the options that all engines share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    Llama,
    Mlx,
    Scripted(Box<Script>),
}

/// Loads the model on the calling thread, which is to be the engine's own.
///
/// # Errors
///
/// [`LoadError::Permanent`] also where this build has no such engine.
pub fn load(
    selection: Selection,
    options: &LoadOptions,
    progress: Progress,
) -> Result<Loaded, LoadError> {
    match selection {
        Selection::Scripted(script) => scripted::load(options, *script, progress),
        #[cfg(feature = "llama")]
        Selection::Llama => super::llama::load(options, progress),
        #[cfg(not(feature = "llama"))]
        Selection::Llama => absent(EngineKind::Llama, &options.model),
        #[cfg(feature = "mlx")]
        Selection::Mlx => super::mlx::load(options, progress),
        #[cfg(not(feature = "mlx"))]
        Selection::Mlx => absent(EngineKind::Mlx, &options.model),
    }
}

#[cfg(not(all(feature = "llama", feature = "mlx")))]
fn absent(kind: EngineKind, model: &Path) -> Result<Loaded, LoadError> {
    Err(LoadError::Permanent(format!(
        "this build has no {} engine for {}",
        kind.as_str(),
        model.display()
    )))
}
