//! Errors of the scan.

use crate::advice::Advised as _;
#[cfg(target_os = "macos")]
use crate::source::snapshot::ProcfsError;

/// Reason why the process table cannot be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// /proc is not mounted, or shows the pids of another namespace.
    #[cfg(target_os = "linux")]
    #[error("cannot use /proc: {0}; mount the one of this namespace (mount -t proc proc /proc)")]
    Proc(#[source] std::io::Error),
    /// The directory /proc cannot be listed.
    #[cfg(target_os = "linux")]
    #[error("cannot list the processes in /proc: {}", .0.advised_or("check that /proc is mounted and readable"))]
    List(#[source] nix::Error),
    /// The process table cannot be read.
    #[cfg(target_os = "macos")]
    #[error(transparent)]
    Table(#[from] ProcfsError),
    /// No file descriptor is left to watch exits with.
    #[error("cannot wait for processes to exit: {}", .0.advised())]
    Wait(#[source] nix::Error),
}
