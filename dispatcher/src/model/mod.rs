//! What can be known of a model before a worker loads it: where it is, what kind it is, how large.

pub mod discover;
pub mod folder;
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

    /// The engine of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Llama, Self::Mlx, Self::Scripted]
            .into_iter()
            .find(|kind| kind.as_str() == name)
    }
}

/// The engines that a worker program was built with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Engines {
    llama: bool,
    mlx: bool,
    scripted: bool,
}

impl Engines {
    #[must_use]
    pub fn has(self, kind: EngineKind) -> bool {
        match kind {
            EngineKind::Llama => self.llama,
            EngineKind::Mlx => self.mlx,
            EngineKind::Scripted => self.scripted,
        }
    }
}

impl FromIterator<EngineKind> for Engines {
    fn from_iter<I: IntoIterator<Item = EngineKind>>(kinds: I) -> Self {
        let mut engines = Self::default();
        for kind in kinds {
            match kind {
                EngineKind::Llama => engines.llama = true,
                EngineKind::Mlx => engines.mlx = true,
                EngineKind::Scripted => engines.scripted = true,
            }
        }
        engines
    }
}

/// Those that serve a model, for people.
impl fmt::Display for Engines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.llama, self.mlx) {
            (true, true) => "`llama` and `mlx`",
            (true, false) => "`llama`",
            (false, true) => "`mlx`",
            (false, false) => "none",
        })
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
