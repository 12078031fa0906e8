//! Errors of the probes and of their pins.

use std::io;
use std::path::PathBuf;

use reaper_common::ABI_VERSION;

use super::btf::BtfError;
use crate::advice::Advised as _;
use crate::sys::host::Host;
use crate::sys::privileges;

/// Reason why the probes cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The kernel has no type information, or not what the probes need.
    #[error("cannot use the kernel's type information: {0}; {advice}", advice = .0.advice())]
    Btf(#[source] BtfError),
    /// The user lacks the capabilities to load programs.
    #[error(
        "not permitted to load the kernel probes{}: run as root of the host, or with CAP_BPF, CAP_PERFMON, CAP_KILL, \
         CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
        without()
    )]
    NotPermitted(#[source] BoxError),
    /// Loading is denied although the user is root and has the capabilities.
    #[error(
        "loading the kernel probes is denied even to root, by a container's seccomp profile, a security module, or before Linux \
         5.11 the limit on locked memory; run on the host, with `ulimit -l unlimited`"
    )]
    Denied(#[source] BoxError),
    /// Loading is denied by the lockdown of the kernel.
    #[error(
        "the kernel is locked down ({mode}) and refuses the probes: boot without lockdown=confidentiality"
    )]
    Lockdown {
        /// Mode of lockdown, `confidentiality`.
        mode: String,
        /// Cause.
        source: BoxError,
    },
    /// The object was built from another version of `reaper-common`.
    #[error(
        "the object file of the probes has ABI version {found}, but this program needs {ABI_VERSION}: rebuild it with \
         `cargo xtask build-ebpf`, or omit --bpf-object"
    )]
    Abi {
        /// ABI version of the object.
        found: u16,
    },
    /// A part of the object is missing or has another shape.
    #[error(
        "the object file of the probes has no {what}: it was not built for this program; rebuild it with `cargo xtask \
         build-ebpf`, or omit --bpf-object"
    )]
    InvalidObject {
        /// Name of the program, map or section; `ELF header` if the file is no object at all.
        what: String,
    },
    /// The object file given by the user cannot be read.
    #[error("cannot read {}, given by --bpf-object: {source}; check the path, or omit --bpf-object", path.display())]
    Object {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// /proc is not mounted, or shows the pids of another namespace.
    #[error("cannot use /proc: {0}; mount the one of this namespace (mount -t proc proc /proc)")]
    Proc(#[source] std::io::Error),
    /// Loading or attaching failed for a reason other than permissions.
    #[error(
        "the kernel rejects the probes: {0}; on Linux 5.10 or later, report this as a bug, with the kernel release (`uname -r`)"
    )]
    Refused(#[source] BoxError),
    /// A map cannot be read, written or mapped.
    #[error("cannot use the map {name}, which the probes share with the service: {source}")]
    Map {
        /// Name of the map.
        name: String,
        /// Cause.
        source: BoxError,
    },
    /// The pinned maps have pids of another pid namespace.
    #[error(
        "the pinned probes are those of a service in another pid namespace: run the service there, set another `pin_dir`, or run `reaper unpin`"
    )]
    OtherNamespace,
    /// The pins cannot be used.
    #[error(transparent)]
    Pin(#[from] PinError),
}

/// Reason why pins cannot be used or removed.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// Another service holds the pins.
    #[error("{} uses the pinned probes in {name}: stop it first", holder(*.pid))]
    Locked {
        /// Name of the locked directory.
        name: String,
        /// Pid of the service, if known.
        pid: Option<u32>,
    },
    /// A file or directory in the place of the pins that this program cannot use: probably, another program created it.
    #[error(
        "the directory of the pinned probes has an unexpected entry, {} ({what}): remove it, or set another `pin_dir`",
        path.display()
    )]
    UnknownPins {
        /// The pin or directory.
        path: PathBuf,
        /// Description in parentheses, such as `not a directory`.
        what: String,
    },
    /// A pin or its directory cannot be accessed.
    #[error("cannot access the pinned probes at {}: {}", path.display(), source.advised())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The BPF file system would disappear with the service.
    #[error(
        "only this service sees the BPF file system at {}, in its own mount namespace: mount it on the host, outside of the service \
         (mount -t bpf bpf /sys/fs/bpf)",
        path.display()
    )]
    PrivateMount {
        /// A directory in it.
        path: PathBuf,
    },
    /// The directory of the pins is on another kind of file system.
    #[error(
        "{} is not in a BPF file system: mount one (mount -t bpf bpf /sys/fs/bpf), or set another `pin_dir`",
        path.display()
    )]
    NotBpffs {
        /// Directory of the pins.
        path: PathBuf,
    },
}

/// Returns ` without CAP_PERFMON`, with each capability that loading needs and this process lacks.
fn without() -> String {
    let missing = privileges::missing(Host::read().capabilities);
    let missing = missing.filter(|missing| ["CAP_BPF", "CAP_PERFMON"].contains(&missing.name));
    let names: Vec<_> = missing.map(|missing| missing.name).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(" without {}", names.join(" and ")),
    }
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or("a running reaper daemon".into(), |pid| {
        format!("the reaper daemon with pid {pid}")
    })
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl EbpfError {
    pub(super) fn invalid_object(what: &str) -> EbpfError {
        EbpfError::InvalidObject {
            what: what.to_owned(),
        }
    }

    pub(super) fn map<E: Into<BoxError>>(name: &str) -> impl FnOnce(E) -> EbpfError + '_ {
        move |error| EbpfError::Map {
            name: name.to_owned(),
            source: error.into(),
        }
    }

    /// Classifies an error of loading by what the user can do about it.
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

/// Returns the errno at the end of a chain of errors.
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

/// Shortens an error to its first and last line. The verifier prints thousands in between.
fn brief(error: BoxError) -> BoxError {
    let text = error.to_string();
    // The whole text goes to the probes' debug log.
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
    fn error_for_root_does_not_advise_to_become_root() {
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
