//! Facts about the host that decide which features can be used. Reading never fails: what cannot be read is unknown.

mod mounts;
#[cfg_attr(target_os = "macos", path = "host/darwin.rs")]
mod this;

pub use mounts::{Mount, Mounts};

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::proc_file::{field, number, uids, words};
use crate::advice::Advised as _;

/// Inode of the initial pid namespace, the same on every kernel (`PROC_PID_INIT_INO`).
pub(super) const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
/// Inode of the initial user namespace, the same on every kernel (`PROC_USER_INIT_INO`).
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// Capabilities that the service can use, with their numbers in include/uapi/linux/capability.h.
const CAPABILITIES: [(&str, u32); 10] = [
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_DAC_READ_SEARCH", 2),
    ("CAP_KILL", 5),
    ("CAP_NET_ADMIN", 12),
    ("CAP_SYS_PTRACE", 19),
    ("CAP_SYS_ADMIN", 21),
    ("CAP_SYS_NICE", 23),
    ("CAP_SYS_RESOURCE", 24),
    ("CAP_PERFMON", 38),
    ("CAP_BPF", 39),
];

/// Effective capabilities of this process, as a bit set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// Returns whether the set has the capability of this name, such as `CAP_KILL`. Knows only those that the service
    /// can use, and returns false for any other.
    pub fn has(self, name: &str) -> bool {
        Capabilities::bit(name).is_some_and(|bit| self.0 >> bit & 1 == 1)
    }

    /// Returns the names of those that the service can use.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let names = CAPABILITIES.iter().map(|(name, _)| *name);
        names.filter(move |name| self.has(name))
    }

    /// Returns the number of a capability that the service can use.
    pub(super) fn bit(name: &str) -> Option<u32> {
        let known = CAPABILITIES.iter().find(|(known, _)| *known == name);
        known.map(|(_, bit)| *bit)
    }

    #[cfg(test)]
    pub(super) fn from_bits(bits: u64) -> Capabilities {
        Capabilities(bits)
    }

    /// Returns whether they suffice to load the probes.
    pub fn may_load_probes(self) -> bool {
        self.has("CAP_SYS_ADMIN") || (self.has("CAP_BPF") && self.has("CAP_PERFMON"))
    }
}

/// A namespace of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// Inode number; 0 if unknown.
    pub inode: u64,
    /// Whether it is the initial namespace of the host.
    pub is_initial: bool,
}

/// Resource limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Limit in bytes.
    Bytes(u64),
    /// No limit.
    Unlimited,
    /// The limit could not be read.
    Unknown,
}

/// Facts about the host, and about this process on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Kernel release as in `uname -r`; empty if unknown.
    pub release: String,
    /// Random id of this boot; empty if unknown.
    pub boot_id: String,
    /// Effective uid of this process; `None` if unknown.
    pub euid: Option<u32>,
    /// Effective capabilities of this process.
    pub capabilities: Capabilities,
    /// `none`, `integrity` or `confidentiality`, or why it is unknown.
    pub lockdown: Result<String, String>,
    /// Pid namespace of this process.
    pub pid_namespace: Namespace,
    /// User namespace of this process.
    pub user_namespace: Namespace,
    /// Whether the kernel provides its type information (BTF).
    pub btf: bool,
    /// Soft limit on the memory that this process may lock. BPF maps counted towards it before Linux 5.11.
    pub memlock: Limit,
    /// Value of the sysctl of this name. If 0, every user may load some types of BPF programs.
    pub unprivileged_bpf_disabled: Option<u8>,
    /// Signs of a container or of WSL, each with the place where it was found.
    pub container: Vec<String>,
    /// Whether /proc shows processes of other users, that is, whether pid 1 is visible. Not with `hidepid`.
    pub proc_shows_others: bool,
    /// Whether /proc is mounted and shows the pids of this process's own pid namespace. [`Host::read_at`] assumes so.
    pub proc_matches_pid_namespace: bool,
    /// Mounts that this process sees.
    pub mounts: Mounts,
}

impl Host {
    /// Reads the facts from `proc`, `sys`, `run` and other files below `root`. A missing file makes its fact unknown.
    pub fn read_at(root: &Path) -> Host {
        let bytes = |path: &str| std::fs::read(root.join(path)).unwrap_or_default();
        // Capabilities belong to a thread, and those of the main thread may be others.
        let status = match bytes("proc/thread-self/status") {
            own if !own.is_empty() => own,
            _ => bytes("proc/self/status"),
        };
        let limits = bytes("proc/self/limits");
        let first = |file, name| words(field(file, name).unwrap_or_default()).next();
        let effective = first(&status, b"CapEff:").and_then(|hex| str::from_utf8(hex).ok());
        let release = bytes("proc/sys/kernel/osrelease");
        let release = String::from_utf8_lossy(&release).trim().to_owned();
        Host {
            boot_id: boot_id(root),
            euid: uids(&status).map(|uids| uids.effective),
            capabilities: Capabilities(
                effective.map_or(0, |hex| u64::from_str_radix(hex, 16).unwrap_or(0)),
            ),
            lockdown: lockdown_at(root),
            pid_namespace: namespace(&root.join("proc/self/ns/pid"), INITIAL_PID_NAMESPACE),
            user_namespace: namespace(&root.join("proc/self/ns/user"), INITIAL_USER_NAMESPACE),
            btf: root.join("sys/kernel/btf/vmlinux").is_file(),
            memlock: match first(&limits, b"Max locked memory") {
                Some(b"unlimited") => Limit::Unlimited,
                Some(bytes) => number(bytes).map_or(Limit::Unknown, Limit::Bytes),
                None => Limit::Unknown,
            },
            unprivileged_bpf_disabled: number(
                bytes("proc/sys/kernel/unprivileged_bpf_disabled").trim_ascii(),
            ),
            container: container(root, &release),
            proc_shows_others: root.join("proc/1/stat").exists(),
            proc_matches_pid_namespace: true,
            mounts: Mounts::parse(&bytes("proc/self/mountinfo")),
            release,
        }
    }

    /// Returns whether this process is in the initial user namespace, so that its capabilities apply to the host. They
    /// do not in a rootless container. Also true if the namespace is unknown.
    pub fn in_initial_user_namespace(&self) -> bool {
        // 0 if the kernel has no user namespaces, or does not show them.
        self.user_namespace.is_initial || self.user_namespace.inode == 0
    }

    /// Returns the major and minor version of the kernel; `None` if unknown.
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self
            .release
            .split(|c: char| !c.is_ascii_digit())
            .map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
}

/// Returns the kernel's lockdown mode, or `None` if it has none or does not show it.
pub fn lockdown() -> Option<String> {
    lockdown_at(Path::new("/")).ok()
}

/// Returns whether this process has the capabilities to load probes, in the initial user namespace. If so, a refusal of
/// the kernel has another cause than missing privileges.
pub fn is_root_with_bpf() -> bool {
    let host = Host::read();
    host.capabilities.may_load_probes() && host.in_initial_user_namespace()
}

/// Path of the file with the lockdown mode, without the root.
const LOCKDOWN: &str = "sys/kernel/security/lockdown";

/// Returns the kernel's lockdown mode, from the file below `root`. The error says why it is unknown.
fn lockdown_at(root: &Path) -> Result<String, String> {
    match std::fs::read_to_string(root.join(LOCKDOWN)) {
        Ok(modes) => bracketed(&modes).ok_or_else(|| format!("/{LOCKDOWN} names no mode")),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(format!(
            "there is no /{LOCKDOWN}, so the kernel has no lockdown, or securityfs is not mounted here"
        )),
        Err(error) => Err(format!("cannot read /{LOCKDOWN}: {}", error.advised())),
    }
}

/// Returns the selected item of a list like `none [integrity] confidentiality`, without the brackets.
fn bracketed(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Reads a namespace from a link in `/proc/self/ns`. `initial` is the inode of the initial namespace.
fn namespace(link: &Path, initial: u64) -> Namespace {
    let inode = std::fs::metadata(link).map_or(0, |m| m.ino());
    Namespace {
        inode,
        is_initial: inode == initial,
    }
}

/// Returns the signs of a container or of WSL, each with its place. `release` is that of the kernel.
fn container(root: &Path, release: &str) -> Vec<String> {
    let mut signs = vec![];
    for (file, name) in [(".dockerenv", "docker"), ("run/.containerenv", "podman")] {
        if root.join(file).exists() {
            signs.push(format!("{name} (/{file})"));
        }
    }
    if let Ok(name) = std::fs::read_to_string(root.join("run/systemd/container")) {
        signs.push(format!("{} (/run/systemd/container)", name.trim()));
    }
    // Readable by root only.
    let environ = std::fs::read(root.join("proc/1/environ")).unwrap_or_default();
    let named = environ
        .split(|&b| b == 0)
        .find_map(|v| v.strip_prefix(b"container="));
    if let Some(name) = named.filter(|name| !name.is_empty()) {
        signs.push(format!(
            "{} (environment of pid 1)",
            OsStr::from_bytes(name).display()
        ));
    }
    if release.to_ascii_lowercase().contains("microsoft") {
        signs.push("wsl (kernel release)".to_owned());
    }
    signs
}

/// Returns the random id of this boot from the files below `root`; empty if unknown.
pub fn boot_id(root: &Path) -> String {
    let id = std::fs::read_to_string(root.join("proc/sys/kernel/random/boot_id"));
    id.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::{arbitrary_bytes, proc_self_file};

    proptest! {
        // Each case creates files.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_content_of_host_files_can_be_read(
            status in arbitrary_bytes(proc_self_file("status")),
            limits in arbitrary_bytes(proc_self_file("limits")),
            mounts in arbitrary_bytes(proc_self_file("mountinfo")),
            release in arbitrary_bytes("6.12.1-test"),
            lockdown in arbitrary_bytes("none [integrity] confidentiality"),
        ) {
            let dir = tempfile::tempdir().unwrap();
            for (path, content) in [
                ("proc/self/status", &status),
                ("proc/self/limits", &limits),
                ("proc/self/mountinfo", &mounts),
                ("proc/sys/kernel/osrelease", &release),
                ("sys/kernel/security/lockdown", &lockdown),
            ] {
                let path = dir.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, content).unwrap();
            }
            let host = Host::read_at(dir.path());
            prop_assert!(host.version().is_none() || host.release.contains(|c: char| c.is_ascii_digit()));
        }
    }

    fn put(root: &Path, path: &str, content: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    #[test]
    fn facts_without_files_are_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::read_at(dir.path());
        assert_eq!(
            (host.release.as_str(), host.version(), host.euid),
            ("", None, None)
        );
        assert_eq!(
            (host.memlock, host.btf, host.lockdown.is_err()),
            (Limit::Unknown, false, true)
        );
        assert_eq!(
            host.pid_namespace,
            Namespace {
                inode: 0,
                is_initial: false
            }
        );
        assert_eq!(host.capabilities, Capabilities::default());
        assert!(host.container.is_empty() && !host.capabilities.may_load_probes());
    }

    #[test]
    fn host_facts_are_read_from_files() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        put(
            root,
            "proc/self/status",
            "Name:\tx\nUid:\t1\t2\t3\t4\nCapPrm:\tff\nCapEff:\t000000c000000020\n",
        );
        put(
            root,
            "proc/self/limits",
            "Limit    Soft   Hard\nMax locked memory         8388608   8388608   bytes\n",
        );
        put(
            root,
            "proc/sys/kernel/osrelease",
            "6.6.87.2-microsoft-standard-WSL2\n",
        );
        put(root, "proc/sys/kernel/random/boot_id", "a-b-c\n");
        put(root, "proc/sys/kernel/unprivileged_bpf_disabled", "2\n");
        put(
            root,
            "sys/kernel/security/lockdown",
            "none integrity [confidentiality]\n",
        );
        put(root, "proc/1/environ", "PATH=/bin\0container=lxc\0");
        put(root, ".dockerenv", "");
        let host = Host::read_at(root);
        assert_eq!(host.euid, Some(2));
        let held = CAPABILITIES.map(|(name, _)| (name, host.capabilities.has(name)));
        let held: Vec<_> = held.iter().filter(|(_, has)| *has).collect();
        assert_eq!(
            held,
            [
                &("CAP_KILL", true),
                &("CAP_PERFMON", true),
                &("CAP_BPF", true)
            ]
        );
        assert!(host.capabilities.may_load_probes());
        assert_eq!(host.memlock, Limit::Bytes(8_388_608));
        assert_eq!(host.version(), Some((6, 6)));
        assert_eq!(
            (host.boot_id.as_str(), host.unprivileged_bpf_disabled),
            ("a-b-c", Some(2))
        );
        assert_eq!(host.lockdown.as_deref(), Ok("confidentiality"));
        assert_eq!(
            host.container,
            [
                "docker (/.dockerenv)",
                "lxc (environment of pid 1)",
                "wsl (kernel release)"
            ]
        );
    }

    #[test]
    fn facts_of_this_host_are_read() {
        let host = Host::read();
        assert!(host.version().is_some_and(|v| v > (2, 6)));
        assert_eq!(host.boot_id.len(), 36);
        assert!(host.euid.is_some());
        assert!(host.mounts.of(Path::new("/proc/self")).is_some());
        assert_ne!(
            (host.pid_namespace.inode, host.user_namespace.inode),
            (0, 0)
        );
    }
}
