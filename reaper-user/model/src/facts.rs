//! What no event tells of a process, and a rule may ask for: it is read from /proc, by others, and told to the
//! model like all else.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::Arc;

use super::activity::Activity;
use super::agent::Matched;
use super::conversation::Conversations;
pub use super::fact::{Known, Needs};
use super::trace::Trace;

/// Session id and controlling terminal as of now: an exec's record has them as they were then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionNow {
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
    pub marks: Known<u64>,
    /// The innermost systemd unit of its cgroup, such as `foo.service` or `run-u12.scope`; empty for none.
    /// Inherited at fork.
    pub unit: Known<Arc<str>>,
    /// Whether it has a socket that listens.
    pub listening: Known<bool>,
    /// CPU use between two looks a moment apart, in percent of one processor.
    pub cpu: Known<u32>,
    pub session: Known<SessionNow>,
    /// Whether its standard input is a terminal: who hands over to another hands that on.
    pub input: Known<bool>,
    /// What it has from its makers and may tell whose it is.
    pub inherited: Known<Arc<Inherited>>,
    /// Ids of agents' conversations that the process belongs to.
    pub conversations: Known<Arc<Conversations>>,
    /// What the process has used, and its connections.
    pub activity: Known<Arc<Activity>>,
    /// What is at the other ends of its standard input and output.
    pub stdio: Known<Stdio>,
    /// What the rules say of the whole command line, where the model has only its beginning. Inherited at fork, unasked
    /// again at exec.
    pub arguments: Known<Matched>,
    /// What the rules say of an interpreter by the resolved path of its script. Unasked again at exec.
    pub script: Known<Matched>,
}

/// What a process has from its makers, where it has not changed that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inherited {
    /// The agents' marks in the environment that it was started with.
    pub trace: Trace,
    /// Where it works; `None`: in a place that says nothing of whose it is (see [`says_something`]).
    pub directory: Option<Arc<Path>>,
}

/// Whether to work in a directory says anything of whose a process is: not in one where anything may have been started,
/// such as `/`, `/srv`, a user's home or what is above that, and not below those that are the kernel's or a login's.
pub fn says_something(directory: &Path, home: Option<&Path>) -> bool {
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
        marks: Known::Unasked,
        unit: Known::Unasked,
        listening: Known::Unasked,
        cpu: Known::Unasked,
        session: Known::Unasked,
        input: Known::Unasked,
        inherited: Known::Unasked,
        conversations: Known::Unasked,
        activity: Known::Unasked,
        stdio: Known::Unasked,
        arguments: Known::Unasked,
        script: Known::Unasked,
    };

    /// Takes in what has been found out of `asked`; the rest stays as it was.
    pub fn learn(&mut self, asked: Needs, found: Facts) {
        if asked.has(Needs::MARKS) {
            self.marks = found.marks;
        }
        if asked.has(Needs::UNIT) {
            self.unit = found.unit;
        }
        if asked.has(Needs::LISTENING) {
            self.listening = found.listening;
        }
        if asked.has(Needs::CPU) {
            self.cpu = found.cpu;
        }
        if asked.has(Needs::SESSION) {
            self.session = found.session;
        }
        if asked.has(Needs::INPUT) {
            self.input = found.input;
        }
        if asked.has(Needs::INHERITED) {
            self.inherited = found.inherited;
        }
        if asked.has(Needs::CONVERSATIONS) {
            self.conversations = found.conversations;
        }
        if asked.has(Needs::ACTIVITY) {
            self.activity = found.activity;
        }
        if asked.has(Needs::STDIO) {
            self.stdio = found.stdio;
        }
        if asked.has(Needs::ARGUMENTS) {
            self.arguments = found.arguments;
        }
        if asked.has(Needs::SCRIPT) {
            self.script = found.script;
        }
    }

    /// Those that somebody has looked for.
    pub fn known(&self) -> Needs {
        let looked = [
            (Needs::MARKS, self.marks != Known::Unasked),
            (Needs::UNIT, self.unit != Known::Unasked),
            (Needs::LISTENING, self.listening != Known::Unasked),
            (Needs::CPU, self.cpu != Known::Unasked),
            (Needs::SESSION, self.session != Known::Unasked),
            (Needs::INPUT, self.input != Known::Unasked),
            (Needs::INHERITED, self.inherited != Known::Unasked),
            (Needs::CONVERSATIONS, self.conversations != Known::Unasked),
            (Needs::ACTIVITY, self.activity != Known::Unasked),
            (Needs::STDIO, self.stdio != Known::Unasked),
            (Needs::ARGUMENTS, self.arguments != Known::Unasked),
            (Needs::SCRIPT, self.script != Known::Unasked),
        ];
        let known = looked.into_iter().filter(|(_, looked)| *looked);
        known.fold(Needs::NONE, |all, (needs, _)| all | needs)
    }

    /// The same, with what could not be read as if nobody had looked.
    pub fn without_unreadable(&self) -> Facts {
        fn again<T>(fact: Known<T>) -> Known<T> {
            match fact {
                Known::Unreadable => Known::Unasked,
                known => known,
            }
        }
        Facts {
            marks: again(self.marks),
            unit: again(self.unit.clone()),
            listening: again(self.listening),
            cpu: again(self.cpu),
            session: again(self.session),
            input: again(self.input),
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
            marks: Known::Unreadable,
            unit: Known::Unreadable,
            listening: Known::Unreadable,
            cpu: Known::Unreadable,
            session: Known::Unreadable,
            input: Known::Unreadable,
            inherited: Known::Unreadable,
            conversations: Known::Unreadable,
            activity: Known::Unreadable,
            stdio: Known::Unreadable,
            arguments: Known::Unreadable,
            script: Known::Unreadable,
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
            let says = says_something(Path::new(directory), Some(home));
            assert_eq!(says, expected, "{directory}");
        }
        assert!(says_something(Path::new("/root/app"), None));
        assert!(!says_something(
            Path::new("/srv/ci"),
            Some(Path::new("/srv/ci"))
        ));
        assert!(!says_something(
            Path::new("/srv/ci"),
            Some(Path::new("/srv/ci/home"))
        ));
    }
}
