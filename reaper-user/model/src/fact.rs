//! State of one fact that no event carries, and sets of such facts.

use std::ops::{BitOr, BitOrAssign};

/// Fact about a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fact<T> {
    /// Not read yet.
    #[default]
    Unread,
    /// Could not be read, or not in time. A condition on it keeps the process.
    Unreadable,
    /// Value as it was read.
    Known(T),
}

/// Set of facts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FactSet(u16);

impl FactSet {
    /// Empty set.
    pub const NONE: FactSet = FactSet(0);
    /// [`Facts::markers`](crate::facts::Facts::markers).
    pub const MARKERS: FactSet = FactSet(1);
    /// [`Facts::unit`](crate::facts::Facts::unit).
    pub const UNIT: FactSet = FactSet(2);
    /// [`Facts::listening`](crate::facts::Facts::listening).
    pub const LISTENING: FactSet = FactSet(4);
    /// [`Facts::cpu`](crate::facts::Facts::cpu).
    pub const CPU: FactSet = FactSet(8);
    /// [`Facts::kernel_session`](crate::facts::Facts::kernel_session).
    pub const KERNEL_SESSION: FactSet = FactSet(16);
    /// [`Facts::stdin_is_terminal`](crate::facts::Facts::stdin_is_terminal).
    pub const STDIN: FactSet = FactSet(32);
    /// [`Facts::inherited`](crate::facts::Facts::inherited).
    pub const INHERITED: FactSet = FactSet(64);
    /// Unit of the session's root, for comparison with that of the process. It is read as [`FactSet::UNIT`] of another
    /// process; no [`Decision`](crate::policy::Decision) contains it.
    pub(crate) const ROOT_UNIT: FactSet = FactSet(128);
    /// [`Facts::conversations`](crate::facts::Facts::conversations).
    pub const CONVERSATIONS: FactSet = FactSet(256);
    /// [`Facts::activity`](crate::facts::Facts::activity).
    pub const ACTIVITY: FactSet = FactSet(512);
    /// [`Facts::stdio`](crate::facts::Facts::stdio).
    pub const STDIO: FactSet = FactSet(1024);
    /// [`Facts::arguments`](crate::facts::Facts::arguments).
    pub const ARGUMENTS: FactSet = FactSet(2048);
    /// [`Facts::script`](crate::facts::Facts::script).
    pub const SCRIPT: FactSet = FactSet(4096);
    /// [`Facts::local_sockets`](crate::facts::Facts::local_sockets).
    pub const LOCAL_SOCKETS: FactSet = FactSet(8192);

    /// Returns whether the set contains no fact.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether all facts in `other` are in this set.
    pub fn contains(self, other: FactSet) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether some facts in `other` are in this set.
    pub fn intersects(self, other: FactSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the facts that are in this set or in `other`.
    pub const fn union(self, other: FactSet) -> FactSet {
        FactSet(self.0 | other.0)
    }

    /// Returns the facts in this set that are not in `other`.
    pub fn without(self, other: FactSet) -> FactSet {
        FactSet(self.0 & !other.0)
    }
}

impl BitOr for FactSet {
    type Output = FactSet;
    fn bitor(self, other: FactSet) -> FactSet {
        self.union(other)
    }
}

impl BitOrAssign for FactSet {
    fn bitor_assign(&mut self, other: FactSet) {
        self.0 |= other.0;
    }
}
