//! What can be known of a model before a worker loads it: where it is, what kind it is, how large.

pub mod discover;
pub mod gguf;

use std::fmt;

/// Which engine a worker runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineKind {
    /// llama.cpp on GGUF files.
    Llama,
    /// MLX on Hugging Face folders.
    Mlx,
    /// The test double: no model, scripted tokens. Never chosen by default.
    Scripted,
}

impl EngineKind {
    /// The word used in flags, logs, metrics and on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mlx => "mlx",
            Self::Scripted => "scripted",
        }
    }

    /// Whether workers of this build contain it.
    #[must_use]
    pub fn built_in(self) -> bool {
        match self {
            Self::Llama | Self::Scripted => true,
            Self::Mlx => false,
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
