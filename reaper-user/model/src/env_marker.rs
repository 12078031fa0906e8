//! What an environment tells of the agent that its process may come from.

use std::hash::{DefaultHasher, Hasher};

/// A variable by which an agent marks what it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvMarker {
    /// Name of the agent's rule.
    pub agent: &'static str,
    pub variable: &'static str,
    /// Pid of the agent, in the pid namespace that it runs in, where the variable tells it.
    pub agent_pid: Option<u32>,
    /// The conversation of the agent, where the variable holds its id.
    pub conversation: Option<ConversationDigest>,
}

/// Digest of the id of an agent's conversation, which outlives the process when another agent continues it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConversationDigest(u64);

impl ConversationDigest {
    /// Bytes of the shortest id: a shorter word says too little.
    const SHORTEST: usize = 8;

    /// Returns None if `id` is too short to identify a conversation.
    fn of(id: &[u8]) -> Option<ConversationDigest> {
        let mut hasher = DefaultHasher::new();
        hasher.write(id);
        (id.len() >= ConversationDigest::SHORTEST).then(|| ConversationDigest(hasher.finish()))
    }

    /// Returns all that an argument vector may name: as a word of its own, in a path or in an option.
    pub fn named_in(argv: &[u8]) -> impl Iterator<Item = ConversationDigest> {
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        argv.split(move |byte| !is_part(byte))
            .filter_map(ConversationDigest::of)
    }
}

/// A terminal multiplexer, or the like, that the process was started in, be it by way of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Multiplexer {
    /// Name of the variable.
    pub variable: &'static str,
    /// Pid of its server, where that is told.
    pub server: Option<u32>,
}

/// See the module. Holds no values: an environment is full of secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvMarkers {
    pub markers: Vec<EnvMarker>,
    pub multiplexers: Vec<Multiplexer>,
    /// `REAPER_KEEP=1`.
    pub keep: bool,
    /// It was handed on by `sudo`, `pkexec` or `doas`.
    pub switched: bool,
    /// The environment was taken in in part only: what has not been found may stand in the rest.
    pub cut: bool,
}

/// Most different marks, and multiplexers, that are taken in of one environment: agents in agents set a few each.
const MOST: usize = 32;
/// What is set by programs that run others under another user.
const SWITCHED: &[&[u8]] = &[b"SUDO_UID", b"SUDO_USER", b"PKEXEC_UID", b"DOAS_USER"];
/// What is set by other places that people start processes from, and that nobody can ask.
const SILENT: &[&str] = &[
    "KITTY_PID",
    "ALACRITTY_SOCKET",
    "WEZTERM_PANE",
    "ABDUCO_SESSION",
    "SHPOOL_SESSION_NAME",
    "NVIM",
];

/// What is to stand in a variable.
#[derive(Clone, Copy)]
enum Value {
    Any,
    Begins(&'static str),
    /// The agent's pid.
    Owner,
    /// The id of the agent's conversation.
    Conversation,
}

const MARKS: &[(&str, Value, &str)] = &[
    ("CLAUDE_PID", Value::Owner, "claude-code"),
    ("CLAUDECODE", Value::Any, "claude-code"),
    ("CLAUDE_CODE_SESSION_ID", Value::Conversation, "claude-code"),
    ("AI_AGENT", Value::Begins("claude-code"), "claude-code"),
    ("CODEX_THREAD_ID", Value::Conversation, "codex"),
    ("CODEX_CI", Value::Any, "codex"),
    ("CODEX_MANAGED_BY_NPM", Value::Any, "codex"),
    ("GEMINI_CLI", Value::Any, "gemini-cli"),
    ("GEMINI_CLI_NO_RELAUNCH", Value::Any, "gemini-cli"),
    ("COPILOT_CLI", Value::Any, "copilot-cli"),
    (
        "COPILOT_AGENT_SESSION_ID",
        Value::Conversation,
        "copilot-cli",
    ),
    ("OPENCODE_PID", Value::Owner, "opencode"),
    ("OPENCODE", Value::Any, "opencode"),
    ("QWEN_CODE", Value::Any, "qwen-code"),
    ("QWEN_CODE_NO_RELAUNCH", Value::Any, "qwen-code"),
    ("AMP_CURRENT_THREAD_ID", Value::Conversation, "amp"),
    ("AGENT", Value::Begins("amp"), "amp"),
    ("CURSOR_AGENT", Value::Any, "cursor-agent"),
    ("CRUSH", Value::Any, "crush"),
    ("AGENT", Value::Begins("crush"), "crush"),
    ("GOOSE_TERMINAL", Value::Any, "goose"),
    ("AGENT", Value::Begins("goose"), "goose"),
];

impl EnvMarkers {
    /// Of an environment as /proc has it: `NAME=value`, each ended by NUL. `whole`: that is all of it.
    pub fn of(environ: &[u8], whole: bool) -> EnvMarkers {
        let mut trace = EnvMarkers {
            cut: !whole,
            ..EnvMarkers::default()
        };
        for entry in environ.split(|b| *b == 0) {
            let Some(equals) = entry.iter().position(|b| *b == b'=') else {
                continue;
            };
            let (name, value) = (&entry[..equals], &entry[equals + 1..]);
            trace.keep |= entry == b"REAPER_KEEP=1";
            trace.switched |= SWITCHED.contains(&name);
            trace.add_multiplexer(name, value);
            for (variable, wanted, agent) in MARKS.iter().filter(|m| m.0.as_bytes() == name) {
                let (mut owner, mut conversation) = (None, None);
                let fits = match wanted {
                    Value::Any => !value.is_empty(),
                    Value::Begins(text) => value.starts_with(text.as_bytes()),
                    Value::Owner => {
                        owner = pid(value);
                        true
                    }
                    Value::Conversation => {
                        conversation = ConversationDigest::of(value);
                        !value.is_empty()
                    }
                };
                if fits {
                    let mark = EnvMarker {
                        agent,
                        variable,
                        agent_pid: owner,
                        conversation,
                    };
                    trace.cut |= !take_in(&mut trace.markers, mark);
                }
            }
        }
        // Those that name an owner say most.
        trace.markers.sort_by_key(|mark| mark.agent_pid.is_none());
        trace
    }

    fn add_multiplexer(&mut self, name: &[u8], value: &[u8]) {
        // `/tmp/tmux-1000/default,4242,0`, `4242.pts-3.host`, `12`.
        let (variable, server) = match name {
            b"TMUX" => ("TMUX", value.split(|b| *b == b',').nth(1).and_then(pid)),
            b"STY" => ("STY", value.split(|b| *b == b'.').next().and_then(pid)),
            b"ZELLIJ" => ("ZELLIJ", None),
            b"TERM_PROGRAM" if value == b"vscode" => ("TERM_PROGRAM", None),
            _ if name.starts_with(b"VSCODE_") => ("VSCODE_", None),
            _ => match SILENT.iter().find(|variable| variable.as_bytes() == name) {
                Some(variable) => (*variable, None),
                None => return,
            },
        };
        if !value.is_empty() {
            self.cut |= !take_in(&mut self.multiplexers, Multiplexer { variable, server });
        }
    }

    /// The pids that are told of agents.
    pub fn owners(&self) -> impl Iterator<Item = u32> {
        self.markers.iter().filter_map(|mark| mark.agent_pid)
    }

    /// The conversations that are told of agents.
    pub fn conversations(&self) -> impl Iterator<Item = ConversationDigest> {
        self.markers.iter().filter_map(|mark| mark.conversation)
    }

    /// Whether an agent's other marks are there too: a pid alone anybody may have put there.
    pub fn has_second_marker(&self, mark: &EnvMarker) -> bool {
        let mut marks = self.markers.iter();
        marks.any(|other| other.agent == mark.agent && other.variable != mark.variable)
    }

    /// Whether both have a mark of one and the same agent, as far as they tell.
    pub fn shares_marker(&self, other: &EnvMarkers) -> bool {
        let same = |a: &EnvMarker| {
            other
                .markers
                .iter()
                .any(|b| match (a.agent_pid, b.agent_pid) {
                    (None, None) => a.agent == b.agent,
                    (a, b) => a == b,
                })
        };
        // One that tells its owner is known by that alone.
        let told = self.owners().next().is_some();
        self.markers
            .iter()
            .filter(|mark| mark.agent_pid.is_some() == told)
            .any(same)
    }
}

/// Whether there was room, or no need of it.
fn take_in<T: PartialEq>(all: &mut Vec<T>, one: T) -> bool {
    let known = all.contains(&one);
    let room = all.len() < MOST;
    if !known && room {
        all.push(one);
    }
    known || room
}

fn pid(digits: &[u8]) -> Option<u32> {
    let pid = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (pid > 1).then_some(pid)
}
