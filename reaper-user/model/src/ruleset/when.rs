//! Conditions of a rule besides the program: on the session, on the process, and on facts read from /proc.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

use super::{Pattern, PatternError};
use crate::event::{ExitStatus, Uids};
use crate::value::{choice, list, nanoseconds, number, write_nanoseconds};

/// Longest delay or age in a rule, in milliseconds: ten years.
pub(crate) const LONGEST: u64 = 3650 * 24 * 3_600_000;

/// Condition on the state of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionCondition {
    /// The root has exited, in whatever way.
    #[default]
    Gone,
    /// The root is alive.
    Alive,
    /// The root is alive or has exited.
    Any,
    /// The root has exited without a signal.
    Exited,
    /// The root has exited with status 0.
    Ok,
    /// The root has exited with another status.
    Failed,
    /// A signal has killed the root.
    Signalled,
}

/// Condition on the uids of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(
    rename_all = "kebab-case",
    expecting = "write \"other\", \"other-login\", \"same\" or a number"
)]
pub enum UidCondition {
    /// The real or the effective uid differs from that of the session's root.
    Other,
    /// As [`UidCondition::Other`], unless `sudo` of the same login started the process: both have the same login uid
    /// (`/proc/PID/loginuid`), real and effective uid are equal, and `sudo` executed the process or an ancestor of it.
    OtherLogin,
    /// The real and the effective uid equal those of the session's root.
    Same,
    /// The effective uid is this one.
    #[serde(untagged)]
    Id(u32),
}

impl UidCondition {
    /// Returns whether the condition is about processes of other users.
    pub fn is_other(self) -> bool {
        matches!(self, UidCondition::Other | UidCondition::OtherLogin)
    }

    /// Returns whether the condition holds for a member with the uids `own` in a session whose root has `root`. For
    /// [`UidCondition::OtherLogin`], true means only that it may hold: the logins decide.
    pub fn holds(self, own: Uids, root: Uids) -> bool {
        match self {
            UidCondition::Other | UidCondition::OtherLogin => own != root,
            UidCondition::Same => own == root,
            UidCondition::Id(uid) => own.effective == uid,
        }
    }
}

/// Conditions that must all hold; `None` and empty ones always do. The fields are keys of a rule.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct When {
    /// State of the session.
    #[serde(deserialize_with = "choice")]
    pub session: SessionCondition,
    /// Names of agents, one of which opened the session.
    #[serde(rename = "agent", deserialize_with = "names")]
    pub agents: Vec<Arc<str>>,
    /// Whether its parent has exited.
    pub orphan: Option<bool>,
    /// Whether only evidence makes the process a member. A rule reaps such a member only if this is true.
    pub inferred: Option<bool>,
    /// Minimum time since the process started, in nanoseconds without suspends.
    #[serde(deserialize_with = "age", serialize_with = "write_nanoseconds")]
    pub min_age: Option<u64>,
    /// Time since the process started after which the condition fails, in nanoseconds without suspends.
    #[serde(deserialize_with = "age", serialize_with = "write_nanoseconds")]
    pub max_age: Option<u64>,
    /// Uids in comparison with those of the root, or one effective uid.
    pub uid: Option<UidCondition>,
    /// Globs over the name of the innermost systemd unit.
    #[serde(rename = "unit", deserialize_with = "units")]
    pub units: Vec<Pattern>,
    /// Whether the process is in a systemd unit that is not its root's. A process in no unit counts as not.
    pub own_unit: Option<bool>,
    /// Whether the process has a controlling terminal.
    pub tty: Option<bool>,
    /// Whether the process descends from tmux, screen or zellij.
    pub multiplexed: Option<bool>,
    /// Whether a person may look after what the agent leaves; see [`Session::attended`](crate::session::Session).
    pub attended: Option<bool>,
    /// Whether a process other than the root started it through `nohup` or `setsid`.
    pub detached: Option<bool>,
    /// Whether its session id (`setsid(2)`) differs from that of its root.
    pub new_session: Option<bool>,
    /// Least CPU use, in percent of one processor.
    #[serde(deserialize_with = "percent")]
    pub min_cpu: Option<u32>,
    /// Whether the process has a listening TCP or Unix socket.
    pub listening: Option<bool>,
    /// Whether the process has a listening Unix socket.
    pub listening_unix: Option<bool>,
    /// Whether its standard input is a pipe or a socket whose other end is open, and not that of the root.
    pub piped: Option<bool>,
    /// Whether the process must be connected to a display server (X11 or Wayland) that does not belong to its session.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub window: bool,
    /// Whether the process has living children.
    pub children: Option<bool>,
    /// Nanoseconds for which the session's tree has been idle. Holds only for a living root.
    #[serde(deserialize_with = "idle", serialize_with = "write_nanoseconds")]
    pub idle: Option<u64>,
    /// Whether its standard input and output must be pipes or sockets whose other ends have been closed for as long as
    /// `idle`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hung_up: bool,
    /// Whether the process must be the living root of a server's session.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub server: bool,
    /// Globs over `NAME=value`, one of which must match a variable of its environment.
    #[serde(rename = "environment", deserialize_with = "markers")]
    pub markers: Vec<Pattern>,
    /// Bits of `markers` in [`Facts::markers`](crate::facts::Facts::markers), assigned by the ruleset.
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

/// Compiles a glob. A glob of stars alone is an error, because it matches everything.
fn narrowing(
    glob: &str,
    compile: fn(&str) -> Result<Pattern, PatternError>,
) -> Result<Pattern, String> {
    if glob.chars().all(|c| c == '*') {
        return Err(format!(
            "{glob:?} matches everything: narrow it or leave it out"
        ));
    }
    compile(glob).map_err(|error| format!("{glob:?} is not a valid glob: {error}"))
}

impl SessionCondition {
    /// Returns whether the condition holds for a session whose root has this exit status, `None` for a living root.
    ///
    /// Returns `None` if the exit status is needed and unknown.
    pub fn holds(self, status: Option<ExitStatus>) -> Option<bool> {
        Some(match (self, status) {
            (SessionCondition::Any, _) => true,
            (SessionCondition::Alive, _) => status.is_none(),
            (SessionCondition::Gone, _) => status.is_some(),
            (_, Some(ExitStatus::Unknown)) => return None,
            (SessionCondition::Exited, _) => matches!(status, Some(ExitStatus::Exited(_))),
            (SessionCondition::Ok, _) => status == Some(ExitStatus::Exited(0)),
            (SessionCondition::Failed, _) => matches!(status, Some(ExitStatus::Exited(1..))),
            (SessionCondition::Signalled, _) => {
                matches!(status, Some(ExitStatus::Signalled { .. }))
            }
        })
    }

    /// Returns whether the condition holds in every case in which `other` does.
    pub fn covers(self, other: SessionCondition) -> bool {
        match self {
            SessionCondition::Any => true,
            SessionCondition::Gone => {
                !matches!(other, SessionCondition::Any | SessionCondition::Alive)
            }
            SessionCondition::Exited => {
                matches!(
                    other,
                    SessionCondition::Exited | SessionCondition::Ok | SessionCondition::Failed
                )
            }
            _ => self == other,
        }
    }
}

impl When {
    /// Returns whether the conditions can hold for a member whose root is alive or, if `alive` is false, has exited.
    pub fn is_of(&self, alive: bool) -> bool {
        match self.session {
            SessionCondition::Any => true,
            SessionCondition::Alive => alive,
            _ => !alive,
        }
    }

    /// Returns whether `own_unit = true` is the only condition apart from that on the session.
    pub(crate) fn is_of_own_unit_alone(&self) -> bool {
        let rest = When {
            own_unit: None,
            ..self.clone()
        };
        self.own_unit == Some(true)
            && rest.is_lasting()
            && (rest.uid, rest.inferred) == (None, None)
            && (rest.attended, rest.detached) == (None, None)
            && rest.agents.is_empty()
    }

    /// Returns whether the conditions can change their answer only at an exec, a change of uids or the root's exit.
    pub fn is_lasting(&self) -> bool {
        let flags = [
            self.orphan,
            self.own_unit,
            self.tty,
            self.multiplexed,
            self.new_session,
            self.listening,
            self.listening_unix,
            self.piped,
            self.children,
        ];
        !self.window
            && flags.iter().all(Option::is_none)
            && (self.min_age, self.max_age, self.min_cpu) == (None, None, None)
            && self.units.is_empty()
            && self.markers.is_empty()
            && !self.is_of_root()
    }

    /// Returns whether the conditions can hold only for the root of a session.
    pub fn is_of_root(&self) -> bool {
        self.idle.is_some() || self.server
    }
}
