//! Errors that end a command, and their exit statuses.

use std::io;

use anyhow::anyhow;

use super::hint::hints;
use crate::config::ConfigError;
use crate::engine::EngineError;
use crate::export::message;
use reaper_host::advice::Advised;
use reaper_host::source::SourceError;

/// Exit status of `run`, `stop`, `wait` and `logs` if they fail themselves, as with `env`, `timeout` and `nohup`.
pub(super) const OWN_FAILURE: u8 = 125;

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
    #[error("{}", with_causes(.0))]
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

/// Returns the message of an error, followed by the causes that it does not contain yet.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

impl Failure {
    /// Creates the error for a failed system call. `what` says what cannot be done.
    pub(super) fn system<E: Advised>(what: &str) -> impl FnOnce(E) -> Failure {
        move |error| {
            let error = error.advised_or("try again, and report a bug if it persists");
            anyhow!("{what}: {error}").into()
        }
    }

    /// Creates the error for output that cannot be written.
    pub(super) fn stdout(error: io::Error) -> Failure {
        Failure::Other(anyhow::Error::new(error).context("cannot write to stdout"))
    }

    /// Prints the error to standard error, one line per problem of a config or per socket.
    pub(super) fn print(&self) {
        let text = hints(&format!("reaper: {self}"));
        match self {
            // Names are already escaped. One line per problem or socket.
            Failure::Config(_) | Failure::NoService(_) => {
                text.lines().for_each(|line| message!("{line}"))
            }
            _ => message!("{text}"),
        }
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

/// Returns whether the reader of the output has closed it, as `head` does.
pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_is_named_once() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let plain = Failure::Other(anyhow::Error::new(denied()).context("cannot read it"));
        assert_eq!(plain.to_string(), format!("cannot read it: {}", denied()));
        let path = "/etc/x".into();
        let source = denied();
        let named = anyhow::Error::new(crate::api::server::ServerError::Listen { path, source });
        let text = Failure::Other(named).to_string();
        assert_eq!(text.matches(&denied().to_string()).count(), 1, "{text}");
    }
}
