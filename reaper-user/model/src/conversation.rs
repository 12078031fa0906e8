//! Conversations of agents, which identify a session that continues in another process.
//!
//! Some agents can pass a conversation to another process and exit. Claude Code does so with `/bg`: a worker of its
//! daemon continues, and uses the background jobs that the first process started. Nothing in the process tree connects
//! the two. The connection is the conversation's id, or the agent's own registry of running processes:
//!
//! - The jobs carry the id in their environment, and the worker names it in its command line or in the registry.
//! - The registry lists the jobs that the worker takes over.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::event::ProcessKey;

/// Maximum number of ids and of adopted processes per process.
const ENTRIES_MAX: usize = 64;
/// Lengths of the groups of hexadecimal digits in a UUID (RFC 9562).
const UUID: [usize; 5] = [8, 4, 4, 4, 12];
/// Length of the name of a job, in bytes.
const JOB_LEN: RangeInclusive<usize> = 1..=64;

/// Locations of an agent's conversation ids. A rule with a source declares that the agent can pass a conversation to
/// another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationSource {
    /// Environment variable that holds the id in processes started by the agent.
    pub variable: Arc<str>,
    /// Registry of the agent's running processes.
    pub registry: Option<Registry>,
}

/// JSON files in which an agent records its running processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registry {
    /// Environment variable of the agent that names the directory.
    pub directory_variable: Option<Arc<str>>,
    /// Directory below the user's home if that variable is not set.
    pub directory: Arc<str>,
    /// Paths of files below the directory; `{pid}` stands for the pid of the agent.
    pub files: Vec<Arc<str>>,
    /// Pairs of keys that identify a process: its pid, and its start time in clock ticks since boot (field 22 of
    /// `proc_pid_stat(5)`).
    pub process: Vec<(Arc<str>, Arc<str>)>,
    /// Keys of a process's job name.
    pub job: Vec<Arc<str>>,
    /// Paths of files that list the processes that a job takes over; `{job}` stands for its name.
    pub adopted: Vec<Arc<str>>,
}

/// Ids and other evidence that connect one process with conversations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversations {
    /// Values of the agents' variables in its environment. Every descendant of an agent may have them.
    pub inherited: Ids,
    /// Ids in the agent's registry, if the process is an agent.
    pub registered: Ids,
    /// Processes that it takes over according to the registry. Their starts are exact to the clock tick.
    pub adopted: Vec<ProcessKey>,
    /// Whether the registry was unreadable, so that the other fields may be incomplete.
    pub registry_unreadable: bool,
}

impl Conversations {
    /// Adds a process that is taken over. Ignores it if 64 are known.
    pub fn adopt(&mut self, key: ProcessKey) {
        if self.adopted.len() < ENTRIES_MAX {
            self.adopted.push(key);
        }
    }
}

/// Set of at most 64 conversation ids. An id is a UUID, so that no other word is mistaken for one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids(Vec<Box<str>>);

impl Ids {
    /// Adds each id that is a whole word of `text`, such as the path of a transcript, which ends with `/ID.jsonl`.
    /// Ignores those beyond 64 in all.
    pub fn insert_from(&mut self, text: &[u8]) {
        for id in ids_in(text) {
            if self.0.len() < ENTRIES_MAX && !self.contains(id) {
                self.0.push(id.into());
            }
        }
    }

    /// Adds the ids of another set, up to 64 in all.
    pub fn extend(&mut self, other: &Ids) {
        other.iter().for_each(|id| self.insert_from(id.as_bytes()));
    }

    /// Returns whether the set contains this id, which must be equal byte for byte.
    pub fn contains(&self, id: &str) -> bool {
        self.iter().any(|known| known == id)
    }

    /// Returns the ids in the order of their insertion.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|id| &**id)
    }

    /// Returns whether no id is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether an argument after the first names one of the ids. `argv` is in the form of `/proc/PID/cmdline`.
    pub fn is_named_in(&self, argv: &[u8]) -> bool {
        let mut arguments = argv.split(|byte| *byte == 0).skip(1);
        arguments.any(|argument| ids_in(argument).any(|id| self.contains(id)))
    }
}

/// Returns whether a text can be the name of a job. It cannot leave the directory when used in a path.
pub fn is_job(text: &str) -> bool {
    JOB_LEN.contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Returns the ids that are whole words of `text`. A word consists of letters, digits and `-`.
fn ids_in(text: &[u8]) -> impl Iterator<Item = &str> {
    let words = text.split(|byte| !(byte.is_ascii_alphanumeric() || *byte == b'-'));
    let words = words.filter_map(|word| std::str::from_utf8(word).ok());
    words.filter(|word| is_uuid(word))
}

fn is_uuid(word: &str) -> bool {
    let hex = |group: &str| group.bytes().all(|byte| byte.is_ascii_hexdigit());
    word.split('-').map(str::len).eq(UUID) && word.split('-').all(hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0c3d7f5e-92d4-4a44-8a3e-3a2d0f8f6c11";

    fn ids(text: &str) -> Ids {
        let mut ids = Ids::default();
        ids.insert_from(text.as_bytes());
        ids
    }

    #[test]
    fn id_in_an_argument_is_matched_as_a_word() {
        for (argv, expected) in [
            (format!("claude\0--resume\0{ID}\0"), true),
            (format!("claude\0--resume=/h/projects/{ID}.jsonl\0"), true),
            (format!("claude\0--spawned-by\0{{\"id\":\"{ID}\"}}\0"), true),
            (format!("{ID}\0--resume\0"), false),
            (format!("claude\0--resume\0{ID}0\0"), false),
            (format!("claude\0--resume\0x-{ID}\0"), false),
            (String::new(), false),
        ] {
            assert_eq!(ids(ID).is_named_in(argv.as_bytes()), expected, "{argv:?}");
        }
        assert!(!Ids::default().is_named_in(b"claude\0--resume\0"));
    }

    #[test]
    fn only_a_uuid_is_an_id() {
        for word in [
            "",
            "1",
            "0c3d7f5e",
            "two words",
            "0c3d7f5e-92d4-4a44-8a3e-3a2d0f8f6c1g",
        ] {
            assert!(ids(word).is_empty(), "{word}");
        }
        assert!(ids(&format!("/home/ann/{ID}.jsonl")).contains(ID));
    }

    #[test]
    fn set_of_ids_is_bounded() {
        let many: Vec<String> = (0..1000).map(|n| format!("{n:08x}{}", &ID[8..])).collect();
        assert_eq!(ids(&many.join(" ")).iter().count(), ENTRIES_MAX);
    }

    #[test]
    fn job_name_cannot_leave_its_directory() {
        assert!(is_job("22ab6b57"));
        for name in ["", "..", "a/b", "a.json", "x\0"] {
            assert!(!is_job(name), "{name:?}");
        }
    }
}
