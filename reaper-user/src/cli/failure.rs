//! Why a command could not be done, and with which exit status it leaves.

use crate::config::ConfigError;
use crate::engine::EngineError;
use reaper_host::source::SourceError;

/// What ends a command before its time.
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
    /// It has answered, and said no.
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
    /// The exit status that says so.
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
