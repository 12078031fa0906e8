//! What no event tells of a process, and a rule may ask for: it is read from /proc, by others, and told to the
//! model like all else.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::Arc;

use super::activity::Activity;
use super::conversation::Conversations;
use super::env_marker::EnvMarkers;
pub use super::fact::{Fact, FactSet};
use super::ruleset::ProgramMatch;

/// Session id and controlling terminal as of now: an exec's record has them as they were then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSession {
    pub sid: u32,
    /// Device number, 0 for none.
    pub tty: u32,
}

/// What is at the other ends of standard input and standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdio {
    /// Standard input is a pipe or a socket whose other end is open.
    Connected,
    /// Both are pipes or sockets whose other ends are closed.
    HungUp,
    /// Files, terminals, or a mixture.
    Other,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Bit n: some variable of the environment that it was started with matches the ruleset's mark n; bit 0 is
    /// `REAPER_KEEP=1`. Inherited at fork, unasked again at exec.
    pub markers: Fact<u64>,
    /// The innermost systemd unit of its cgroup, such as `foo.service` or `run-u12.scope`; empty for none.
    /// Inherited at fork.
    pub unit: Fact<Arc<str>>,
    /// Whether it has a socket that listens.
    pub listening: Fact<bool>,
    /// CPU use between two looks a moment apart, in percent of one processor.
    pub cpu: Fact<u32>,
    pub kernel_session: Fact<KernelSession>,
    /// Whether its standard input is a terminal: who hands over to another hands that on.
    pub stdin_is_terminal: Fact<bool>,
    /// What it has from its makers and may tell whose it is.
    pub inherited: Fact<Arc<InheritedFacts>>,
    /// Ids of agents' conversations that the process belongs to.
    pub conversations: Fact<Arc<Conversations>>,
    /// What the process has used, and its connections.
    pub activity: Fact<Arc<Activity>>,
    /// What is at the other ends of its standard input and output.
    pub stdio: Fact<Stdio>,
    /// What the rules say of the whole command line, where the model has only its beginning. Inherited at fork, unasked
    /// again at exec.
    pub arguments: Fact<ProgramMatch>,
    /// What the rules say of an interpreter by the resolved path of its script. Unasked again at exec.
    pub script: Fact<ProgramMatch>,
}

/// What a process has from its makers, where it has not changed that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InheritedFacts {
    /// The agents' marks in the environment that it was started with.
    pub env_markers: EnvMarkers,
    /// Where it works; `None`: in a place that says nothing of whose it is (see [`is_distinctive`]).
    pub directory: Option<Arc<Path>>,
}

/// Whether to work in a directory says anything of whose a process is: not in one where anything may have been started,
/// such as `/`, `/srv`, a user's home or what is above that, and not below those that are the kernel's or a login's.
pub fn is_distinctive(directory: &Path, home: Option<&Path>) -> bool {
    let parts: Vec<Component<'_>> = directory.components().collect();
    let of = |at: usize| match parts.get(at) {
        Some(Component::Normal(name)) => name.as_bytes(),
        _ => b"",
    };
    let is_home = matches!((of(1), parts.len()), (b"home" | b"Users", 3))
        || home.is_some_and(|home| home.starts_with(directory));
    let is_nobodys = matches!(of(1), b"proc" | b"sys" | b"dev" | b"run");
    directory.has_root() && parts.len() > 2 && !is_home && !is_nobodys
}

impl Facts {
    /// Of whom nobody has asked anything.
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
    };

    /// Takes in what has been found out of `asked`; the rest stays as it was.
    pub fn update(&mut self, asked: FactSet, found: Facts) {
        if asked.contains(FactSet::MARKERS) {
            self.markers = found.markers;
        }
        if asked.contains(FactSet::UNIT) {
            self.unit = found.unit;
        }
        if asked.contains(FactSet::LISTENING) {
            self.listening = found.listening;
        }
        if asked.contains(FactSet::CPU) {
            self.cpu = found.cpu;
        }
        if asked.contains(FactSet::KERNEL_SESSION) {
            self.kernel_session = found.kernel_session;
        }
        if asked.contains(FactSet::STDIN) {
            self.stdin_is_terminal = found.stdin_is_terminal;
        }
        if asked.contains(FactSet::INHERITED) {
            self.inherited = found.inherited;
        }
        if asked.contains(FactSet::CONVERSATIONS) {
            self.conversations = found.conversations;
        }
        if asked.contains(FactSet::ACTIVITY) {
            self.activity = found.activity;
        }
        if asked.contains(FactSet::STDIO) {
            self.stdio = found.stdio;
        }
        if asked.contains(FactSet::ARGUMENTS) {
            self.arguments = found.arguments;
        }
        if asked.contains(FactSet::SCRIPT) {
            self.script = found.script;
        }
    }

    /// Those that somebody has looked for.
    pub fn read_facts(&self) -> FactSet {
        let looked = [
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
        ];
        let known = looked.into_iter().filter(|(_, looked)| *looked);
        known.fold(FactSet::NONE, |all, (needs, _)| all | needs)
    }

    /// The same, with what could not be read as if nobody had looked.
    pub fn without_unreadable(&self) -> Facts {
        fn again<T>(fact: Fact<T>) -> Fact<T> {
            match fact {
                Fact::Unreadable => Fact::Unread,
                known => known,
            }
        }
        Facts {
            markers: again(self.markers),
            unit: again(self.unit.clone()),
            listening: again(self.listening),
            cpu: again(self.cpu),
            kernel_session: again(self.kernel_session),
            stdin_is_terminal: again(self.stdin_is_terminal),
            inherited: again(self.inherited.clone()),
            conversations: again(self.conversations.clone()),
            activity: again(self.activity.clone()),
            stdio: again(self.stdio),
            arguments: again(self.arguments.clone()),
            script: self.script.clone(),
        }
    }

    /// What is said of `asked` when there was no reading it.
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_says_something_where_not_everything_begins() {
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
