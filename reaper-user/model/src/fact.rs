//! Facts about a process that no event reports: whether one is known, and sets of them.

use std::ops::{BitOr, BitOrAssign};

/// A fact, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Known<T> {
    /// Nobody has looked yet.
    #[default]
    Unasked,
    /// It could not be read, or not in time: what rests on it speaks for the process.
    Unreadable,
    Is(T),
}

/// Which facts are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Needs(u16);

impl Needs {
    pub const NONE: Needs = Needs(0);
    /// [`Facts::marks`](crate::facts::Facts::marks).
    pub const MARKS: Needs = Needs(1);
    /// [`Facts::unit`](crate::facts::Facts::unit).
    pub const UNIT: Needs = Needs(2);
    /// [`Facts::listening`](crate::facts::Facts::listening).
    pub const LISTENING: Needs = Needs(4);
    /// [`Facts::cpu`](crate::facts::Facts::cpu).
    pub const CPU: Needs = Needs(8);
    /// [`Facts::session`](crate::facts::Facts::session).
    pub const SESSION: Needs = Needs(16);
    /// [`Facts::input`](crate::facts::Facts::input).
    pub const INPUT: Needs = Needs(32);
    /// [`Facts::inherited`](crate::facts::Facts::inherited).
    pub const INHERITED: Needs = Needs(64);
    /// The unit of the root of its session, which its own is compared with. Read of another process as [`Needs::UNIT`]
    /// of that; no [`Decision`](crate::policy::Decision) asks for it by this name.
    pub(crate) const ROOT_UNIT: Needs = Needs(128);
    /// [`Facts::conversations`](crate::facts::Facts::conversations).
    pub const CONVERSATIONS: Needs = Needs(256);
    /// [`Facts::activity`](crate::facts::Facts::activity).
    pub const ACTIVITY: Needs = Needs(512);
    /// [`Facts::stdio`](crate::facts::Facts::stdio).
    pub const STDIO: Needs = Needs(1024);
    /// [`Facts::arguments`](crate::facts::Facts::arguments).
    pub const ARGUMENTS: Needs = Needs(2048);
    /// [`Facts::script`](crate::facts::Facts::script).
    pub const SCRIPT: Needs = Needs(4096);

    pub fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are among these.
    pub fn has(self, other: Needs) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether some of `other` are among these.
    pub fn has_any(self, other: Needs) -> bool {
        self.0 & other.0 != 0
    }

    /// These and `other`.
    pub const fn and(self, other: Needs) -> Needs {
        Needs(self.0 | other.0)
    }

    /// These without `other`.
    pub fn without(self, other: Needs) -> Needs {
        Needs(self.0 & !other.0)
    }
}

impl BitOr for Needs {
    type Output = Needs;
    fn bitor(self, other: Needs) -> Needs {
        self.and(other)
    }
}

impl BitOrAssign for Needs {
    fn bitor_assign(&mut self, other: Needs) {
        self.0 |= other.0;
    }
}
