//! What can keep the bench from measuring, and the exit code that says whose fault it is.

use std::path::PathBuf;

use thiserror::Error;

/// A fault of the bench run itself. A failed request is no such fault: it is a sample.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The arguments contradict each other or name nothing usable.
    #[error("use these arguments: {0}")]
    Usage(String),
    /// The URL isn't one that the bench can speak to.
    #[error("understand the URL {url:?}: {reason}")]
    Url { url: String, reason: String },
    /// Nothing answers where the server should be.
    #[error("reach {target}: {reason}")]
    Unreachable { target: String, reason: String },
    /// The server under test did not start, stop or become ready as it should.
    #[error("run the server under test: {0}")]
    Target(String),
    /// A file of results could not be written or read.
    #[error("use the file {path}: {source}", path = path.display())]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Two result sets were made under different contracts.
    #[error("compare results of different contracts: {0}")]
    Contract(String),
    /// Somebody stopped the run; what was measured is kept.
    #[error("finish: it was interrupted{}", kept(out.as_ref()))]
    Interrupted { out: Option<PathBuf> },
    /// Anything of the operating system that a run cannot do without.
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: std::io::Error,
    },
    /// What was asked for was measured, and it does not hold.
    #[error("find the promise kept: {0}")]
    Broken(String),
}

impl BenchError {
    /// 64 the caller's arguments, 69 the server under test, 74 files and the system, 1 a promise that was measured
    /// broken, 130 a run that was interrupted.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Url { .. } | Self::Contract(_) => 64,
            Self::Unreachable { .. } | Self::Target(_) => 69,
            Self::File { .. } | Self::System { .. } => 74,
            Self::Broken(_) => 1,
            Self::Interrupted { .. } => 130,
        }
    }
}

fn kept(out: Option<&PathBuf>) -> String {
    out.map_or_else(
        || "; without --out nothing of it is kept".into(),
        |path| {
            format!(
                "; what was measured is in {}: the same command with --resume goes on from there",
                path.display()
            )
        },
    )
}
