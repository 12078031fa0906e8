//! Facts about a process that no event reports: whether one is known, and sets of them.

use std::ops::{BitOr, BitOrAssign};

/// A fact, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fact<T> {
    /// Nobody has looked yet.
    #[default]
    Unread,
    /// It could not be read, or not in time: what rests on it speaks for the process.
    Unreadable,
    Known(T),
}

/// Which facts are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FactSet(u16);

impl FactSet {
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
    /// The unit of the root of its session, which its own is compared with. Read of another process as [`FactSet::UNIT`]
    /// of that; no [`Decision`](crate::policy::Decision) asks for it by this name.
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

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are among these.
    pub fn contains(self, other: FactSet) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether some of `other` are among these.
    pub fn intersects(self, other: FactSet) -> bool {
        self.0 & other.0 != 0
    }

    /// These and `other`.
    pub const fn union(self, other: FactSet) -> FactSet {
        FactSet(self.0 | other.0)
    }

    /// These without `other`.
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
