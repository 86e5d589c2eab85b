//! Why there is no plan.

use std::io;

use thiserror::Error;

use super::model::ModelError;
use crate::config::ConfigError;
use crate::error::Fault;
use crate::model::discover::DiscoverError;

/// Texts are fragments that fit after "dispatcher: ".
#[derive(Debug, Error)]
pub enum PlanError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    #[error("{0}")]
    Argument(String),
    /// A server could not be started or asked.
    #[error("the steps could not be timed: {problem}")]
    Measure { problem: String },
    #[error("what was measured cannot be kept in {path}: {cause}")]
    Keep { path: String, cause: io::Error },
}

impl PlanError {
    /// Who has to do something about it.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Config(_) | Self::Model(_) | Self::Discover(_) | Self::Argument(_) => {
                Fault::Configuration
            }
            Self::Measure { .. } | Self::Keep { .. } => Fault::Machine,
        }
    }
}
