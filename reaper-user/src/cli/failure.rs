//! Errors that end a command, and their exit statuses.

use std::io;

use crate::config::ConfigError;
use crate::engine::EngineError;
use reaper_host::source::SourceError;

/// Error that ends a command.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Source(SourceError),
    #[error("{0}")]
    Locked(String),
    #[error(transparent)]
    Engine(EngineError),
    /// The service refused the request.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NoService(String),
    #[error(transparent)]
    Other(#[from] anyhow::Error),
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        match error {
            EngineError::Source(source) => source.into(),
            other => Failure::Engine(other),
        }
    }
}

impl Failure {
    /// Creates the error for output that cannot be written.
    pub(super) fn stdout(error: io::Error) -> Failure {
        Failure::Other(anyhow::Error::new(error).context("cannot write to stdout"))
    }

    /// Returns the exit status for this error.
    pub(super) fn status(&self) -> u8 {
        match self {
            Failure::Engine(_) | Failure::Refused(_) | Failure::Other(_) => 1,
            Failure::Config(_) | Failure::Usage(_) => 2,
            Failure::Source(_) => 3,
            Failure::Locked(_) => 4,
            Failure::NoService(_) => 5,
        }
    }
}
