//! Facts about a process that no event carries and that rules may need. Worker threads read them from /proc, and the
//! engine passes them to the model.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::Arc;

use super::activity::Activity;
use super::conversation::Conversations;
use super::env_marker::EnvMarkers;
pub use super::fact::{Fact, FactSet};
use super::ruleset::ProgramMatch;

/// Current session id and controlling terminal. An exec event has those from the time of the exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSession {
    /// Session id (`setsid(2)`).
    pub sid: u32,
    /// Device number, 0 for none.
    pub tty: u32,
}

/// Other ends of standard input and standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdio {
    /// Standard input is a pipe or a socket with this inode number, whose other end is open.
    Connected(u64),
    /// Both are pipes or sockets whose other ends are closed.
    HungUp,
    /// Files, terminals, or a mixture.
    Other,
}

/// Facts about one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Bit set of the ruleset's environment markers that match the environment at exec; bit 0 is `REAPER_KEEP=1`.
    /// Inherited at fork, unread again after an exec.
    pub markers: Fact<u64>,
    /// Innermost systemd unit of its cgroup, such as `foo.service` or `run-u12.scope`; empty for none. Inherited at
    /// fork.
    pub unit: Fact<Arc<str>>,
    /// Whether it has a listening TCP or Unix socket.
    pub listening: Fact<bool>,
    /// CPU use between two readings a moment apart, in percent of one processor.
    pub cpu: Fact<u32>,
    /// Session id and controlling terminal at the time of the read.
    pub kernel_session: Fact<KernelSession>,
    /// Whether standard input is a terminal. An agent that relaunches itself passes its terminal on.
    pub stdin_is_terminal: Fact<bool>,
    /// Inherited facts that show from which agent it descends.
    pub inherited: Fact<Arc<InheritedFacts>>,
    /// Ids of the agents' conversations that it belongs to.
    pub conversations: Fact<Arc<Conversations>>,
    /// Resource use and connections.
    pub activity: Fact<Arc<Activity>>,
    /// Other ends of its standard input and output.
    pub stdio: Fact<Stdio>,
    /// Match of the rules with the whole command line, if the image has only its beginning. Inherited at fork, unread
    /// again after an exec.
    pub arguments: Fact<ProgramMatch>,
    /// Match of the rules with the resolved path of an interpreter's script. Inherited at fork, unread again after an
    /// exec.
    pub script: Fact<ProgramMatch>,
    /// Unix sockets.
    pub local_sockets: Fact<Arc<LocalSockets>>,
}

/// Unix sockets of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalSockets {
    /// Names of the displays to which it is connected, such as `X0` or `wayland-0`, in order.
    pub displays: Box<[Box<[u8]>]>,
    /// Whether one listens.
    pub listens: bool,
}

/// Facts that a process inherits from its ancestors unless it changes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InheritedFacts {
    /// Markers of agents in its environment at exec.
    pub env_markers: EnvMarkers,
    /// Working directory; `None` if it is not distinctive (see [`is_distinctive`]).
    pub directory: Option<Arc<Path>>,
    /// Inode number of the pipe or socket that is its standard input, 0 if that is something else.
    pub input: u64,
    /// Login uid of the kernel's audit system, which `sudo` does not change; `None` if it is unset or unreadable.
    pub login_uid: Option<u32>,
}

/// Returns whether a working directory is evidence for descent.
///
/// Directories in which unrelated processes start are not: `/`, `/srv`, a user's home and the directories above it.
/// Neither are those below `/proc`, `/sys`, `/dev` and `/run`.
pub fn is_distinctive(directory: &Path, home: Option<&Path>) -> bool {
    let parts: Vec<Component<'_>> = directory.components().collect();
    let of = |at: usize| match parts.get(at) {
        Some(Component::Normal(name)) => name.as_bytes(),
        _ => b"",
    };
    let is_home = matches!((of(1), parts.len()), (b"home" | b"Users", 3))
        || home.is_some_and(|home| home.starts_with(directory));
    let is_system = matches!(of(1), b"proc" | b"sys" | b"dev" | b"run");
    directory.has_root() && parts.len() > 2 && !is_home && !is_system
}

impl Facts {
    /// Facts of a process of which nothing was read.
    pub const NOTHING: Facts = Facts {
        markers: Fact::Unread,
        unit: Fact::Unread,
        listening: Fact::Unread,
        cpu: Fact::Unread,
        kernel_session: Fact::Unread,
        stdin_is_terminal: Fact::Unread,
        inherited: Fact::Unread,
        conversations: Fact::Unread,
        activity: Fact::Unread,
        stdio: Fact::Unread,
        arguments: Fact::Unread,
        script: Fact::Unread,
        local_sockets: Fact::Unread,
    };

    /// Replaces the facts in `requested` by those in `found`.
    pub fn update(&mut self, requested: FactSet, found: Facts) {
        if requested.contains(FactSet::MARKERS) {
            self.markers = found.markers;
        }
        if requested.contains(FactSet::UNIT) {
            self.unit = found.unit;
        }
        if requested.contains(FactSet::LISTENING) {
            self.listening = found.listening;
        }
        if requested.contains(FactSet::CPU) {
            self.cpu = found.cpu;
        }
        if requested.contains(FactSet::KERNEL_SESSION) {
            self.kernel_session = found.kernel_session;
        }
        if requested.contains(FactSet::STDIN) {
            self.stdin_is_terminal = found.stdin_is_terminal;
        }
        if requested.contains(FactSet::INHERITED) {
            self.inherited = found.inherited;
        }
        if requested.contains(FactSet::CONVERSATIONS) {
            self.conversations = found.conversations;
        }
        if requested.contains(FactSet::ACTIVITY) {
            self.activity = found.activity;
        }
        if requested.contains(FactSet::STDIO) {
            self.stdio = found.stdio;
        }
        if requested.contains(FactSet::ARGUMENTS) {
            self.arguments = found.arguments;
        }
        if requested.contains(FactSet::SCRIPT) {
            self.script = found.script;
        }
        if requested.contains(FactSet::LOCAL_SOCKETS) {
            self.local_sockets = found.local_sockets;
        }
    }

    /// Returns the facts that were read, successfully or not.
    pub fn read_facts(&self) -> FactSet {
        let read = [
            (FactSet::MARKERS, self.markers != Fact::Unread),
            (FactSet::UNIT, self.unit != Fact::Unread),
            (FactSet::LISTENING, self.listening != Fact::Unread),
            (FactSet::CPU, self.cpu != Fact::Unread),
            (FactSet::KERNEL_SESSION, self.kernel_session != Fact::Unread),
            (FactSet::STDIN, self.stdin_is_terminal != Fact::Unread),
            (FactSet::INHERITED, self.inherited != Fact::Unread),
            (FactSet::CONVERSATIONS, self.conversations != Fact::Unread),
            (FactSet::ACTIVITY, self.activity != Fact::Unread),
            (FactSet::STDIO, self.stdio != Fact::Unread),
            (FactSet::ARGUMENTS, self.arguments != Fact::Unread),
            (FactSet::SCRIPT, self.script != Fact::Unread),
            (FactSet::LOCAL_SOCKETS, self.local_sockets != Fact::Unread),
        ];
        let known = read.into_iter().filter(|(_, read)| *read);
        known.fold(FactSet::NONE, |all, (needs, _)| all | needs)
    }

    /// Returns the facts with unreadable ones reset to unread.
    pub fn without_unreadable(&self) -> Facts {
        fn retry<T>(fact: Fact<T>) -> Fact<T> {
            match fact {
                Fact::Unreadable => Fact::Unread,
                known => known,
            }
        }
        Facts {
            markers: retry(self.markers),
            unit: retry(self.unit.clone()),
            listening: retry(self.listening),
            cpu: retry(self.cpu),
            kernel_session: retry(self.kernel_session),
            stdin_is_terminal: retry(self.stdin_is_terminal),
            inherited: retry(self.inherited.clone()),
            conversations: retry(self.conversations.clone()),
            activity: retry(self.activity.clone()),
            stdio: retry(self.stdio),
            arguments: retry(self.arguments.clone()),
            script: retry(self.script.clone()),
            local_sockets: retry(self.local_sockets.clone()),
        }
    }

    /// Returns facts that are all unreadable.
    pub fn unreadable() -> Facts {
        Facts {
            markers: Fact::Unreadable,
            unit: Fact::Unreadable,
            listening: Fact::Unreadable,
            cpu: Fact::Unreadable,
            kernel_session: Fact::Unreadable,
            stdin_is_terminal: Fact::Unreadable,
            inherited: Fact::Unreadable,
            conversations: Fact::Unreadable,
            activity: Fact::Unreadable,
            stdio: Fact::Unreadable,
            arguments: Fact::Unreadable,
            script: Fact::Unreadable,
            local_sockets: Fact::Unreadable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_projects_are_distinctive() {
        let home = Path::new("/home/ann");
        for (directory, expected) in [
            ("/", false),
            ("/srv", false),
            ("/workspace", false),
            ("/home/ann", false),
            ("/home/bob", false),
            ("/Users/bob", false),
            ("/home", false),
            ("/proc/7", false),
            ("/run/user/1000/x", false),
            ("/dev/shm/x", false),
            ("", false),
            ("work/app", false),
            ("/home/ann/app", true),
            ("/home/ann/app/web", true),
            ("/srv/app", true),
            ("/tmp/x", true),
            ("/var/lib/ci/work", true),
        ] {
            let says = is_distinctive(Path::new(directory), Some(home));
            assert_eq!(says, expected, "{directory}");
        }
        assert!(is_distinctive(Path::new("/root/app"), None));
        assert!(!is_distinctive(
            Path::new("/srv/ci"),
            Some(Path::new("/srv/ci"))
        ));
        assert!(!is_distinctive(
            Path::new("/srv/ci"),
            Some(Path::new("/srv/ci/home"))
        ));
    }
}
