//! Errors of the scan.

#[cfg(target_os = "macos")]
use crate::source::snapshot::ProcfsError;

/// Reason why the process table cannot be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// /proc is not mounted, or shows the pids of another namespace.
    #[cfg(target_os = "linux")]
    #[error(
        "/proc cannot be used: {0}; mount this pid namespace's own, as `unshare --mount-proc` does"
    )]
    Proc(#[source] std::io::Error),
    /// The directory /proc cannot be listed.
    #[cfg(target_os = "linux")]
    #[error("cannot list the processes in /proc: {0}; check that /proc is mounted and readable")]
    List(#[source] nix::Error),
    /// The process table cannot be read.
    #[cfg(target_os = "macos")]
    #[error(transparent)]
    Table(#[from] ProcfsError),
    /// No file descriptor is left to watch exits with.
    #[error("cannot wait for processes to exit: {0}; raise the limit on open files (ulimit -n)")]
    Wait(#[source] nix::Error),
}
