//! What the service leaves in maps for the probes, and for the service that comes after it.

use core::mem::size_of;

use crate::{Member, RawKey};

/// Longest name of a rule that is kept with a session, in bytes.
pub const RULE_MAX: usize = 64;
/// Bytes of a name that the table of names looks at, the last of them NUL.
pub const NAME_LEN: usize = 16;
/// Bytes of a name that a rule may end with `*` after, as the table has it: what such rules have in
/// common is looked up by the first so many bytes, and what begins with less by its first byte alone.
pub const PREFIX_LEN: usize = 4;

/// A session, as the service has it. The key is the process that was its root first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionState {
    /// The root now.
    pub root: RawKey,
    /// The session that this one is nested in, nobody for none.
    pub outer: RawKey,
    /// Parent of the root when it became one.
    pub parent: RawKey,
    pub opened_ns: u64,
    /// When the session came to its end with its root, 0 while it has not.
    pub root_exit_ns: u64,
    /// When SIGKILL is due, in ns of the monotonic clock, 0 if no ladder is open.
    pub kill_at_ns: u64,
    /// Records lost while it was open.
    pub lost: u64,
    /// Id of the cgroup in which the root was when it became one, 0 if it is not known.
    pub cgroup_id: u64,
    /// Uids of the root when it became one.
    pub uid: u32,
    pub euid: u32,
    /// `SESSION_*`.
    pub flags: u32,
    /// [`RawKey::check`] of the first root: see [`Member`].
    pub check: u32,
    /// How the root ended with which the session did, as `wait(2)` tells it.
    pub exit_status: u32,
    /// Counted so far.
    pub reaped: u32,
    pub kept: u32,
    pub failed: u32,
    /// Controlling terminal of the root, as in an exec's record.
    pub tty: u32,
    pub _pad: u32,
    /// Name of its rule, NUL-padded.
    pub rule: [u8; RULE_MAX],
}

/// The exit of a session's root, left by the probe in case that its record is lost; what follows from it is
/// for the service to say. The key is the process that was its root first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootExit {
    /// In ns since boot.
    pub time_ns: u64,
    /// As `wait(2)` tells it.
    pub status: u32,
    pub _pad: u32,
}

/// Sessions that there is room for.
pub const SESSIONS_MAX: u32 = 4096;

/// Its ladder has reached SIGKILL: its members are killed as they fork or exec.
pub const SESSION_KILL_ON_FORK: u32 = 1;
/// When its root exits the probe sends SIGTERM to those of the root's children of whom no rule knows more.
pub const SESSION_KERNEL_REAP: u32 = 2;
/// That it is over has been told: what lives of it is kept.
pub const SESSION_CLOSE_EMITTED: u32 = 4;
/// The root was sent a signal by the service before it ended.
pub const SESSION_ROOT_SIGNALLED: u32 = 8;
/// That nobody knows how the root ended.
pub const EXIT_STATUS_UNKNOWN: u32 = u32::MAX;

impl Default for SessionState {
    fn default() -> SessionState {
        SessionState {
            root: RawKey::NONE,
            outer: RawKey::NONE,
            parent: RawKey::NONE,
            opened_ns: 0,
            root_exit_ns: 0,
            kill_at_ns: 0,
            lost: 0,
            cgroup_id: 0,
            uid: 0,
            euid: 0,
            flags: 0,
            check: 0,
            exit_status: 0,
            reaped: 0,
            kept: 0,
            failed: 0,
            tty: 0,
            _pad: 0,
            rule: [0; RULE_MAX],
        }
    }
}

/// A rule that makes an agent knows programs of this name.
pub const NAME_AGENT: u32 = 1;
/// A rule that makes a boundary does.
pub const NAME_BOUNDARY: u32 = 2;
/// A rule that keeps does.
pub const NAME_KEEP: u32 = 4;
/// Of all names that begin with this byte: look the whole name up.
pub const NAME_INDEX_EXACT: u32 = 8;
/// Of all names that begin with this byte: look the first [`PREFIX_LEN`] bytes up.
pub const NAME_INDEX_PREFIX: u32 = 16;
/// Where the table of first bytes has 16 bits for the second ones of the names that are to be looked up:
/// see [`second_bit`].
const SECOND_SHIFT: u32 = 16;

/// Bit of the table of first bytes for a second byte, 0 for none: unless it is set no name that goes on so
/// is to be looked up. Bytes share bits, so that it may be set for another's sake.
pub const fn second_bit(byte: u8) -> u32 {
    1 << (SECOND_SHIFT + (byte & 15) as u32)
}
/// Values in the table of first bytes.
pub const NAME_INDEX_SLOTS: usize = 256;

/// A value of a map, as the bytes that system calls take.
pub trait MapValue<const N: usize>: Sized {
    fn to_bytes(&self) -> [u8; N];
    fn from_bytes(bytes: &[u8; N]) -> Self;
}

/// Puts fields one behind the other.
struct Pack<const N: usize>([u8; N], usize);

impl<const N: usize> Pack<N> {
    fn put(mut self, bytes: &[u8]) -> Self {
        self.0[self.1..self.1 + bytes.len()].copy_from_slice(bytes);
        self.1 += bytes.len();
        self
    }
    fn u32(self, n: u32) -> Self {
        self.put(&n.to_ne_bytes())
    }
    fn u64(self, n: u64) -> Self {
        self.put(&n.to_ne_bytes())
    }
    fn key(self, key: RawKey) -> Self {
        self.u32(key.pid).u32(0).u64(key.start_ns)
    }
}

/// Takes them apart again.
struct Unpack<'a>(&'a [u8]);

impl Unpack<'_> {
    fn take<const M: usize>(&mut self) -> [u8; M] {
        let (head, tail) = self.0.split_at(M);
        self.0 = tail;
        let mut taken = [0; M];
        taken.copy_from_slice(head);
        taken
    }
    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }
    fn key(&mut self) -> RawKey {
        RawKey {
            pid: self.u32(),
            _pad: self.u32(),
            start_ns: self.u64(),
        }
    }
}

impl MapValue<16> for RawKey {
    fn to_bytes(&self) -> [u8; 16] {
        Pack([0; 16], 0).key(*self).0
    }
    fn from_bytes(bytes: &[u8; 16]) -> RawKey {
        Unpack(bytes).key()
    }
}

impl MapValue<24> for Member {
    fn to_bytes(&self) -> [u8; 24] {
        let packed = Pack([0; 24], 0).key(self.session);
        packed.u32(self.flags).u32(self.check).0
    }
    fn from_bytes(bytes: &[u8; 24]) -> Member {
        let mut b = Unpack(bytes);
        Member {
            session: b.key(),
            flags: b.u32(),
            check: b.u32(),
        }
    }
}

impl MapValue<16> for RootExit {
    fn to_bytes(&self) -> [u8; 16] {
        Pack([0; 16], 0).u64(self.time_ns).u32(self.status).0
    }
    fn from_bytes(bytes: &[u8; 16]) -> RootExit {
        let mut b = Unpack(bytes);
        RootExit {
            time_ns: b.u64(),
            status: b.u32(),
            _pad: 0,
        }
    }
}

/// Bytes of a [`SessionState`].
pub const SESSION_LEN: usize = size_of::<SessionState>();

impl MapValue<SESSION_LEN> for SessionState {
    fn to_bytes(&self) -> [u8; SESSION_LEN] {
        let keys = Pack([0; SESSION_LEN], 0).key(self.root).key(self.outer);
        let times = keys.key(self.parent).u64(self.opened_ns);
        let times = times.u64(self.root_exit_ns);
        let times = times.u64(self.kill_at_ns).u64(self.lost);
        let times = times.u64(self.cgroup_id);
        let small = times.u32(self.uid).u32(self.euid);
        let small = small.u32(self.flags).u32(self.check).u32(self.exit_status);
        let counts = small.u32(self.reaped).u32(self.kept).u32(self.failed);
        counts.u32(self.tty).u32(0).put(&self.rule).0
    }
    fn from_bytes(bytes: &[u8; SESSION_LEN]) -> SessionState {
        let mut b = Unpack(bytes);
        SessionState {
            root: b.key(),
            outer: b.key(),
            parent: b.key(),
            opened_ns: b.u64(),
            root_exit_ns: b.u64(),
            kill_at_ns: b.u64(),
            lost: b.u64(),
            cgroup_id: b.u64(),
            uid: b.u32(),
            euid: b.u32(),
            flags: b.u32(),
            check: b.u32(),
            exit_status: b.u32(),
            reaped: b.u32(),
            kept: b.u32(),
            failed: b.u32(),
            tty: b.u32(),
            _pad: b.u32(),
            rule: b.take(),
        }
    }
}

const _: () = assert!(size_of::<SessionState>() == 48 + 40 + 40 + RULE_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pid: u32) -> RawKey {
        RawKey {
            pid,
            _pad: 0,
            start_ns: u64::from(pid) << 33,
        }
    }

    #[test]
    fn what_is_stored_is_what_is_read_and_what_the_probes_see() {
        let member = Member {
            session: key(7),
            flags: 0x205,
            check: 77,
        };
        assert_eq!(Member::from_bytes(&member.to_bytes()), member);
        assert_eq!(RawKey::from_bytes(&key(9).to_bytes()), key(9));
        let state = SessionState {
            root: key(1),
            outer: key(2),
            parent: key(15),
            opened_ns: 3,
            root_exit_ns: 4,
            kill_at_ns: 5,
            lost: 6,
            cgroup_id: 16,
            uid: 8,
            euid: 9,
            flags: 10,
            check: 15,
            exit_status: 7,
            reaped: 11,
            kept: 12,
            failed: 13,
            tty: 18,
            _pad: 0,
            rule: [14; RULE_MAX],
        };
        let bytes = state.to_bytes();
        assert_eq!(SessionState::from_bytes(&bytes), state);
        let at = core::mem::offset_of!(SessionState, flags);
        assert_eq!(bytes[at..at + 4], 10u32.to_ne_bytes());
        let at = core::mem::offset_of!(SessionState, root_exit_ns);
        assert_eq!(bytes[at..at + 8], 4u64.to_ne_bytes());
    }
}
