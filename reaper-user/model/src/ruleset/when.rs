//! What a rule can ask for besides the program: of the session, of the process, and what has to be read.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

use super::{Pattern, PatternError};
use crate::event::{ExitStatus, Uids};
use crate::value::{choice, list, nanoseconds, number, write_nanoseconds};

/// Longest delay and age that a rule may name, in milliseconds.
pub(crate) const LONGEST: u64 = 3650 * 24 * 3_600_000;

/// What has become of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionIs {
    /// Its root is gone, however it ended.
    #[default]
    Gone,
    Alive,
    Any,
    /// Its root has exited by itself.
    Exited,
    /// The same, with status 0.
    Ok,
    /// The same, with another status.
    Failed,
    /// A signal has ended its root.
    Signalled,
}

/// Under which uids a member runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(
    rename_all = "lowercase",
    expecting = "write \"other\", \"same\" or a number"
)]
pub enum UidIs {
    /// Another real or another effective one than the root of its session.
    Other,
    Same,
    /// This effective one.
    #[serde(untagged)]
    Id(u32),
}

impl UidIs {
    /// Whether it holds of one that runs under `own`, in a session whose root runs under `root`.
    pub fn holds(self, own: Uids, root: Uids) -> bool {
        match self {
            UidIs::Other => own != root,
            UidIs::Same => own == root,
            UidIs::Id(uid) => own.effective == uid,
        }
    }
}

/// A conjunction of conditions; what is `None` or empty asks for nothing. A rule has them as keys.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct When {
    #[serde(deserialize_with = "choice")]
    pub session: SessionIs,
    /// Names of agents: the session is one of them.
    #[serde(rename = "agent", deserialize_with = "names")]
    pub agents: Vec<Arc<str>>,
    pub orphan: Option<bool>,
    /// Nothing but evidence makes it a member. What reaps such has to ask for it.
    pub inferred: Option<bool>,
    /// Nanoseconds.
    #[serde(deserialize_with = "age", serialize_with = "write_nanoseconds")]
    pub min_age: Option<u64>,
    /// Nanoseconds.
    #[serde(deserialize_with = "age", serialize_with = "write_nanoseconds")]
    pub max_age: Option<u64>,
    pub uid: Option<UidIs>,
    /// Over the name of the innermost systemd unit.
    #[serde(rename = "unit", deserialize_with = "units")]
    pub units: Vec<Pattern>,
    /// It has a systemd unit, and not its root's.
    pub own_unit: Option<bool>,
    /// It has a controlling terminal.
    pub tty: Option<bool>,
    /// It descends from tmux, screen or zellij.
    pub multiplexed: Option<bool>,
    /// Its session id is not that of its root.
    pub new_session: Option<bool>,
    /// Percent of one processor.
    #[serde(deserialize_with = "percent")]
    pub min_cpu: Option<u32>,
    pub listening: Option<bool>,
    /// It has living children.
    pub children: Option<bool>,
    /// It is the root of a session, and nothing in that session's tree has worked for so many ns.
    #[serde(deserialize_with = "idle", serialize_with = "write_nanoseconds")]
    pub idle: Option<u64>,
    /// Its standard input and output are pipes or sockets whose other ends are closed, for as long as `idle` says.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hung_up: bool,
    /// It is an agent's server.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub server: bool,
    /// Over `NAME=value` of its environment: one of them is there.
    #[serde(rename = "environment", deserialize_with = "markers")]
    pub markers: Vec<Pattern>,
    /// Bits of `marks` in [`Facts::markers`](crate::facts::Facts::markers); a ruleset says which.
    #[serde(skip)]
    pub marker_bits: u64,
}

fn age<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    nanoseconds::<D, 1, LONGEST>(value)
}

fn idle<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    nanoseconds::<D, 1000, LONGEST>(value)
}

fn percent<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u32>, D::Error> {
    number::<D, 1, 1_000_000>(value).map(Some)
}

fn names<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<Arc<str>>, D::Error> {
    list(value, |name| Ok(name.into()))
}

fn units<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<Pattern>, D::Error> {
    list(value, |glob| narrowing(glob, Pattern::unit))
}

fn markers<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<Pattern>, D::Error> {
    list(value, |glob| narrowing(glob, Pattern::marker))
}

fn narrowing(
    glob: &str,
    compile: fn(&str) -> Result<Pattern, PatternError>,
) -> Result<Pattern, String> {
    if glob.chars().all(|c| c == '*') {
        return Err(format!(
            "{glob:?} matches everything: narrow it or leave it out"
        ));
    }
    compile(glob).map_err(|error| format!("{glob:?} is no good glob: {error}"))
}

impl SessionIs {
    /// Whether it holds of a session whose root has ended so; `None`: it lives. The answer is `None` where nobody
    /// saw how it ended.
    pub fn holds(self, ended: Option<ExitStatus>) -> Option<bool> {
        Some(match (self, ended) {
            (SessionIs::Any, _) => true,
            (SessionIs::Alive, _) => ended.is_none(),
            (SessionIs::Gone, _) => ended.is_some(),
            (_, Some(ExitStatus::Unknown)) => return None,
            (SessionIs::Exited, _) => matches!(ended, Some(ExitStatus::Exited(_))),
            (SessionIs::Ok, _) => ended == Some(ExitStatus::Exited(0)),
            (SessionIs::Failed, _) => matches!(ended, Some(ExitStatus::Exited(1..))),
            (SessionIs::Signalled, _) => matches!(ended, Some(ExitStatus::Signalled { .. })),
        })
    }

    /// Whether it holds wherever the other does.
    pub fn covers(self, other: SessionIs) -> bool {
        match self {
            SessionIs::Any => true,
            SessionIs::Gone => !matches!(other, SessionIs::Any | SessionIs::Alive),
            SessionIs::Exited => {
                matches!(other, SessionIs::Exited | SessionIs::Ok | SessionIs::Failed)
            }
            _ => self == other,
        }
    }
}

impl When {
    /// Whether it can hold of a member whose root lives, or is gone.
    pub fn is_of(&self, alive: bool) -> bool {
        match self.session {
            SessionIs::Any => true,
            SessionIs::Alive => alive,
            _ => !alive,
        }
    }

    /// Whether all that it asks for is a unit of its own.
    pub(crate) fn is_of_units_alone(&self) -> bool {
        let rest = When {
            own_unit: None,
            ..self.clone()
        };
        self.own_unit.is_some()
            && rest.is_lasting()
            && (rest.uid, rest.inferred) == (None, None)
            && rest.agents.is_empty()
    }

    /// Whether it asks for nothing that a process can change without running another program: but for its
    /// uids and the end of its root, all that it rests on stays as it is.
    pub fn is_lasting(&self) -> bool {
        let flags = [
            self.orphan,
            self.own_unit,
            self.tty,
            self.multiplexed,
            self.new_session,
            self.listening,
            self.children,
        ];
        flags.iter().all(Option::is_none)
            && (self.min_age, self.max_age, self.min_cpu) == (None, None, None)
            && self.units.is_empty()
            && self.markers.is_empty()
            && !self.is_of_root()
    }

    /// Whether it can hold of the root of a session alone.
    pub fn is_of_root(&self) -> bool {
        self.idle.is_some() || self.server
    }
}
