//! Markers in an environment that show from which agent its process descends.

use std::hash::{DefaultHasher, Hasher};

/// Variable that an agent sets for the processes that it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvMarker {
    /// Name of the agent's rule.
    pub agent: &'static str,
    /// Name of the environment variable.
    pub variable: &'static str,
    /// Pid of the agent in the agent's PID namespace, if the variable holds it.
    pub agent_pid: Option<u32>,
    /// Conversation of the agent, if the variable holds its id.
    pub conversation: Option<ConversationDigest>,
}

/// Digest of the id of an agent's conversation. The id stays the same when another agent continues the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConversationDigest(u64);

impl ConversationDigest {
    /// Minimum length of an id in bytes: a shorter word is not distinctive.
    const SHORTEST: usize = 8;

    /// Returns the digest of an id, or `None` if it is too short to identify a conversation.
    fn of(id: &[u8]) -> Option<ConversationDigest> {
        let mut hasher = DefaultHasher::new();
        hasher.write(id);
        (id.len() >= ConversationDigest::SHORTEST).then(|| ConversationDigest(hasher.finish()))
    }

    /// Returns the digests of all words in an argument vector that may be ids, also within paths and options. A word
    /// has at least 8 letters, digits, `-` or `_`.
    pub fn named_in(argv: &[u8]) -> impl Iterator<Item = ConversationDigest> {
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        argv.split(move |byte| !is_part(byte))
            .filter_map(ConversationDigest::of)
    }
}

/// Terminal multiplexer or a similar program in which the process was started, directly or through an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Multiplexer {
    /// Name of the environment variable.
    pub variable: &'static str,
    /// Pid of the server, if the variable holds it.
    pub server: Option<u32>,
}

/// Markers of one environment. Contains no values, because environments hold secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvMarkers {
    /// Markers of agents, those with a pid first; at most 32.
    pub markers: Vec<EnvMarker>,
    /// Multiplexers and terminals; at most 32.
    pub multiplexers: Vec<Multiplexer>,
    /// Whether `REAPER_KEEP=1` is set.
    pub keep: bool,
    /// Whether the environment was passed on by `sudo`, `pkexec` or `doas`.
    pub switched: bool,
    /// Whether only a part of the environment was read, so that markers may be missing.
    pub cut: bool,
}

/// Maximum number of markers and of multiplexers per environment. Each agent in a chain of agents sets a few.
const MARKERS_MAX: usize = 32;
/// Variables that are set by programs which run others as another user.
const SWITCHED: &[&[u8]] = &[b"SUDO_UID", b"SUDO_USER", b"PKEXEC_UID", b"DOAS_USER"];
/// Variables of other programs in which users start processes. They hold no pid of a server.
const SILENT: &[&str] = &[
    "KITTY_PID",
    "ALACRITTY_SOCKET",
    "WEZTERM_PANE",
    "ABDUCO_SESSION",
    "SHPOOL_SESSION_NAME",
    "NVIM",
];

/// Expected value of a variable.
#[derive(Clone, Copy)]
enum Value {
    Any,
    Begins(&'static str),
    /// Pid of the agent.
    Owner,
    /// Id of the agent's conversation.
    Conversation,
}

const MARKERS: &[(&str, Value, &str)] = &[
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
    /// Reads an environment in the form of /proc/pid/environ: `NAME=value`, each terminated by NUL. `whole` says that
    /// it is complete.
    pub fn of(environ: &[u8], whole: bool) -> EnvMarkers {
        let mut env_markers = EnvMarkers {
            cut: !whole,
            ..EnvMarkers::default()
        };
        for entry in environ.split(|b| *b == 0) {
            let Some(equals) = entry.iter().position(|b| *b == b'=') else {
                continue;
            };
            let (name, value) = (&entry[..equals], &entry[equals + 1..]);
            env_markers.keep |= entry == b"REAPER_KEEP=1";
            env_markers.switched |= SWITCHED.contains(&name);
            env_markers.add_multiplexer(name, value);
            for (variable, wanted, agent) in MARKERS.iter().filter(|m| m.0.as_bytes() == name) {
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
                    let marker = EnvMarker {
                        agent,
                        variable,
                        agent_pid: owner,
                        conversation,
                    };
                    env_markers.cut |= !insert_bounded(&mut env_markers.markers, marker);
                }
            }
        }
        // Markers with a pid come first, as they are the strongest evidence.
        env_markers
            .markers
            .sort_by_key(|marker| marker.agent_pid.is_none());
        env_markers
    }

    fn add_multiplexer(&mut self, name: &[u8], value: &[u8]) {
        // Values such as `/tmp/tmux-1000/default,4242,0`, `4242.pts-3.host` or `12`.
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
            self.cut |= !insert_bounded(&mut self.multiplexers, Multiplexer { variable, server });
        }
    }

    /// Returns the pids of agents in the markers.
    pub fn agent_pids(&self) -> impl Iterator<Item = u32> {
        self.markers.iter().filter_map(|marker| marker.agent_pid)
    }

    /// Returns the conversations in the markers.
    pub fn conversations(&self) -> impl Iterator<Item = ConversationDigest> {
        self.markers.iter().filter_map(|marker| marker.conversation)
    }

    /// Returns whether another variable is a marker of the same agent. Any program could have set a pid alone.
    pub fn has_second_marker(&self, marker: &EnvMarker) -> bool {
        let mut markers = self.markers.iter();
        markers.any(|other| other.agent == marker.agent && other.variable != marker.variable)
    }

    /// Returns whether both environments have a marker that may come from the same agent. If this one has markers with
    /// a pid, only pids are compared. Otherwise, the agents of the markers without a pid are compared.
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
        // If there are pids, only they are compared.
        let has_pid = self.agent_pids().next().is_some();
        self.markers
            .iter()
            .filter(|marker| marker.agent_pid.is_some() == has_pid)
            .any(same)
    }
}

/// Inserts an item unless the list is full. Returns whether the item is in the list.
fn insert_bounded<T: PartialEq>(all: &mut Vec<T>, one: T) -> bool {
    let known = all.contains(&one);
    let room = all.len() < MARKERS_MAX;
    if !known && room {
        all.push(one);
    }
    known || room
}

/// Returns the pid that the digits name; `None` for no number, 0 and 1.
fn pid(digits: &[u8]) -> Option<u32> {
    let pid = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (pid > 1).then_some(pid)
}
