//! Errors of the proc connector.

use nix::errno::Errno;

use crate::advice::Advised as _;
use crate::source::snapshot::ProcfsError;

/// Reason why the proc connector cannot be used, or has stopped delivering events.
#[derive(Debug, thiserror::Error)]
pub enum ConnectorError {
    /// The kernel was built without it.
    #[error(
        "this kernel has no proc connector: use a kernel with CONFIG_CONNECTOR=y and CONFIG_PROC_EVENTS=y"
    )]
    Absent,
    /// The user lacks CAP_NET_ADMIN in the initial user namespace.
    #[error("not permitted to subscribe to the proc connector: run as root, or with CAP_NET_ADMIN")]
    NotPermitted,
    /// The network namespace is not the initial one, the only one that the connector sends to.
    #[error(
        "the proc connector does not reach this network namespace: run in the host's (`--network host` for a container)"
    )]
    OtherNetwork,
    /// The kernel did not answer the subscription in time.
    #[error(
        "the proc connector does not answer: run in the host's pid and user namespaces, on a kernel with CONFIG_PROC_EVENTS=y"
    )]
    Silent,
    /// The subscription failed for another reason.
    #[error("cannot subscribe to the proc connector: {}", .0.advised())]
    Refused(#[source] Errno),
    /// Receiving failed after the subscription.
    #[error("the proc connector stopped delivering events: {}", .0.advised())]
    Broken(#[source] Errno),
    /// The backlog of messages has grown for too long.
    #[error("the proc connector delivers events faster than they can be read")]
    Behind,
    /// /proc is not mounted, or shows the pids of another namespace.
    #[error("cannot use /proc: {0}; mount the one of this namespace (mount -t proc proc /proc)")]
    Proc(#[source] std::io::Error),
    /// The pre-existing processes cannot be listed.
    #[error(transparent)]
    List(#[from] ProcfsError),
}

impl ConnectorError {
    /// Converts the error of opening a socket.
    pub(super) fn open(error: Errno) -> ConnectorError {
        match error {
            Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => ConnectorError::Absent,
            other => ConnectorError::request(other),
        }
    }

    /// Converts the error of sending or receiving.
    pub(super) fn request(error: Errno) -> ConnectorError {
        match error {
            Errno::EPERM | Errno::EACCES => ConnectorError::NotPermitted,
            Errno::ECONNREFUSED => ConnectorError::OtherNetwork,
            other => ConnectorError::Refused(other),
        }
    }

    /// Converts an error in the kernel's answer, which kernels give with either sign.
    pub(super) fn answer(errno: u32) -> ConnectorError {
        ConnectorError::request(Errno::from_raw(errno.cast_signed().wrapping_abs()))
    }
}
