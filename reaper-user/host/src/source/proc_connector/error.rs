//! Why the proc connector cannot be used, in one sentence each, with what to do.

use nix::errno::Errno;

use crate::source::snapshot::ProcfsError;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum ConnectorError {
    #[error(
        "the kernel has no connector to tell of processes: one with CONFIG_CONNECTOR=y and CONFIG_PROC_EVENTS=y is needed"
    )]
    Absent,
    #[error(
        "not permitted to listen to the kernel's proc connector: run as root, or with CAP_NET_ADMIN"
    )]
    NotPermitted,
    #[error(
        "the kernel's proc connector does not reach this network namespace: run in the first one, as with a container's `--network host`"
    )]
    OtherNetwork,
    #[error(
        "the kernel's proc connector does not answer: run in the first pid and user namespace, on a kernel with CONFIG_PROC_EVENTS=y"
    )]
    Silent,
    #[error("the kernel's proc connector cannot be used: {0}")]
    Refused(#[source] Errno),
    #[error("the kernel's proc connector tells nothing any more: {0}")]
    Broken(#[source] Errno),
    #[error("the kernel's proc connector tells more than can be read")]
    Behind,
    #[error(
        "/proc cannot be used: {0}; mount this pid namespace's own, as `unshare --mount-proc` does"
    )]
    Proc(#[source] std::io::Error),
    #[error("who runs already cannot be found: {0}")]
    Survey(#[from] ProcfsError),
}

impl ConnectorError {
    /// A socket cannot be had.
    pub(super) fn open(error: Errno) -> ConnectorError {
        match error {
            Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => ConnectorError::Absent,
            other => ConnectorError::ask(other),
        }
    }

    /// The kernel cannot be asked through it.
    pub(super) fn ask(error: Errno) -> ConnectorError {
        match error {
            Errno::EPERM | Errno::EACCES => ConnectorError::NotPermitted,
            Errno::ECONNREFUSED => ConnectorError::OtherNetwork,
            other => ConnectorError::Refused(other),
        }
    }

    /// Its answer is an error, which kernels give with either sign.
    pub(super) fn answer(errno: u32) -> ConnectorError {
        ConnectorError::ask(Errno::from_raw(errno.cast_signed().wrapping_abs()))
    }
}
