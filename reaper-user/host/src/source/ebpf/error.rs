//! Why the probes cannot be used, in one sentence each, with what to do.

use std::io;
use std::path::PathBuf;

use reaper_common::ABI_VERSION;

use super::btf::BtfError;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    #[error(
        "the kernel's type information is not to be had: {0}; a kernel with CONFIG_DEBUG_INFO_BTF=y is needed"
    )]
    Btf(#[source] BtfError),
    #[error(
        "not permitted to load the kernel probes: run as root of the host, or with CAP_BPF, CAP_PERFMON, CAP_KILL and CAP_SYS_PTRACE ({0})"
    )]
    NotPermitted(#[source] BoxError),
    #[error(
        "the kernel probes are denied to root too: by a container's seccomp profile or a security module, or before Linux 5.11 for want of locked memory; run on the host, with `ulimit -l unlimited` ({0})"
    )]
    Denied(#[source] BoxError),
    #[error(
        "the kernel is locked down ({mode}) and refuses the probes: boot without lockdown=confidentiality ({source})"
    )]
    Lockdown { mode: String, source: BoxError },
    #[error(
        "the probes' object has abi version {found}, this program needs {ABI_VERSION}: rebuild it with `cargo xtask build-ebpf`"
    )]
    Abi { found: u16 },
    #[error("the probes' object has no {what}: this is not an object of this program")]
    InvalidObject { what: String },
    #[error("cannot read the probes' object {}: {source}", path.display())]
    Object {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "/proc cannot be used: {0}; mount this namespace's own, as `unshare --mount-proc` does"
    )]
    Proc(#[source] std::io::Error),
    #[error("the kernel does not take the probes: {0}")]
    Refused(#[source] BoxError),
    #[error("a map of the probes cannot be used: {0}")]
    Map(#[source] BoxError),
    #[error(
        "what is pinned here numbers processes by another pid namespace: run it there, name another `pin_dir`, or run `reaper unpin`"
    )]
    OtherNamespace,
    #[error(transparent)]
    Pin(#[from] PinError),
}

/// Why what is pinned cannot be used or removed.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("{} holds {name}: stop it first", holder(*.pid))]
    Locked { name: String, pid: Option<u32> },
    #[error("{} is {what}: no reaper has pinned it; move it, or give another pin_dir", path.display())]
    UnknownPins { path: PathBuf, what: String },
    #[error("cannot use {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{} is not in a BPF file system: mount one (mount -t bpf bpf /sys/fs/bpf), or name another `pin_dir`",
        path.display()
    )]
    NotBpffs { path: PathBuf },
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or("a running reaper daemon".into(), |pid| {
        format!("the reaper daemon with pid {pid}")
    })
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl EbpfError {
    pub(super) fn foreign(what: &str) -> EbpfError {
        EbpfError::InvalidObject {
            what: what.to_owned(),
        }
    }

    pub(super) fn map(error: aya::maps::MapError) -> EbpfError {
        EbpfError::Map(error.into())
    }

    /// Sorts a failure to load by what its reader can do about it.
    pub(super) fn load(error: BoxError) -> EbpfError {
        let errno = errno_of(&*error);
        if !matches!(errno, Some(libc::EPERM | libc::EACCES))
            || crate::sys::host::is_root_with_bpf() && errno == Some(libc::EACCES)
        {
            return EbpfError::Refused(brief(error));
        }
        match crate::sys::host::lockdown() {
            Some(mode) if mode == "confidentiality" => EbpfError::Lockdown {
                mode,
                source: brief(error),
            },
            _ if crate::sys::host::is_root_with_bpf() => EbpfError::Denied(brief(error)),
            _ => EbpfError::NotPermitted(brief(error)),
        }
    }
}

/// The errno at the bottom of a chain of errors.
fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.raw_os_error();
        }
        next = error.source();
    }
    None
}

/// The first and the last line of an error: between them the verifier prints thousands.
fn brief(error: BoxError) -> BoxError {
    let text = error.to_string();
    // All of it for whoever asks for the probes' diagnostics.
    tracing::debug!(target: "reaper_ebpf", "{text}");
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().unwrap_or_default().to_owned();
    match lines.rfind(|line| !line.starts_with("processed ") && !line.contains("verification time"))
    {
        Some(last) => format!("{first}: {last}").into(),
        None => first.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_load_probes_is_not_told_to_become_root() {
        let refused = |errno| EbpfError::load(std::io::Error::from_raw_os_error(errno).into());
        let may = crate::sys::host::is_root_with_bpf();
        match refused(libc::EPERM) {
            EbpfError::Denied(_) => assert!(may),
            EbpfError::NotPermitted(_) => assert!(!may),
            EbpfError::Lockdown { .. } => {}
            other => panic!("{other}"),
        }
        assert!(matches!(refused(libc::EINVAL), EbpfError::Refused(_)));
    }
}
