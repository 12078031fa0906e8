//! State that the service stores in maps, for the probes and for the next instance of the service.

use core::mem::size_of;

use crate::{Member, RawKey};

/// Maximum length of a rule name that is stored with a session, in bytes.
pub const RULE_MAX: usize = 64;
/// Length of a name in the table of names, in bytes. The last byte is NUL.
pub const NAME_LEN: usize = 16;
/// Length of the prefixes in the table of names, in bytes. A rule for names with a shorter prefix before `*` is found by
/// the first byte alone, in the index of names.
pub const PREFIX_LEN: usize = 4;

/// State of a session. The map key is its first root.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionState {
    /// Current root.
    pub root: RawKey,
    /// Session that this one is nested in; [`RawKey::NONE`] if there is no such session.
    pub outer: RawKey,
    /// Parent of the root when it became the root.
    pub parent: RawKey,
    /// Time at which the session was opened (ns since boot).
    pub opened_ns: u64,
    /// Exit time of the root with which the session became due; 0 while it has not.
    pub root_exit_ns: u64,
    /// Time at which SIGKILL is due (CLOCK_MONOTONIC, ns); 0 if no escalation is open.
    pub kill_at_ns: u64,
    /// Number of records lost while the session was open.
    pub lost: u64,
    /// Id of the root's cgroup when it became the root; 0 if unknown.
    pub cgroup_id: u64,
    /// Real uid of the root when it became the root.
    pub uid: u32,
    /// Effective uid of the root when it became the root.
    pub euid: u32,
    /// Flags `SESSION_*`.
    pub flags: u32,
    /// [`RawKey::check`] of the first root: see [`Member`].
    pub check: u32,
    /// Exit status of the root with which the session became due, as `wait(2)` reports it.
    pub exit_status: u32,
    /// Number of members reaped up to now.
    pub reaped: u32,
    /// Number of members kept up to now.
    pub kept: u32,
    /// Number of members up to now that could not be reaped.
    pub failed: u32,
    /// Controlling terminal of the root, as in an exec record.
    pub tty: u32,
    /// Hash of the name of the root's systemd unit; 0 if unknown.
    pub unit_hash: u32,
    /// Name of its rule, padded with NUL.
    pub rule: [u8; RULE_MAX],
}

/// Exit of a session's root, stored by the probe in case its record is lost. The service decides what follows from it.
/// The map key is the first root of the session.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootExit {
    /// Time of the exit (ns since boot).
    pub time_ns: u64,
    /// Exit status as `wait(2)` reports it.
    pub status: u32,
    /// Padding, 0.
    pub _pad: u32,
}

/// Maximum number of sessions in the map.
pub const SESSIONS_MAX: u32 = 4096;

/// The escalation has reached SIGKILL: the probes kill members that fork or exec.
pub const SESSION_KILL_ON_FORK: u32 = 1;
/// When the root exits, the probe sends SIGTERM to those of its children that are cleared for it.
pub const SESSION_KERNEL_REAP: u32 = 2;
/// The close of the session has been emitted. Its living members are kept.
pub const SESSION_CLOSE_EMITTED: u32 = 4;
/// The service had signalled the root before it exited.
pub const SESSION_ROOT_SIGNALLED: u32 = 8;
/// The exit status of the root is unknown.
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
            unit_hash: 0,
            rule: [0; RULE_MAX],
        }
    }
}

/// Some agent rule can match programs with this name.
pub const NAME_AGENT: u32 = 1;
/// Some boundary rule can match them.
pub const NAME_BOUNDARY: u32 = 2;
/// Some keep rule can match them.
pub const NAME_KEEP: u32 = 4;
/// For names that start with this byte, the probe must look up the whole name.
pub const NAME_INDEX_EXACT: u32 = 8;
/// For names that start with this byte, the probe must look up the first [`PREFIX_LEN`] bytes.
pub const NAME_INDEX_PREFIX: u32 = 16;
/// Position of 16 bits in the index of names that say which second bytes need a lookup: see [`second_bit`].
const SECOND_SHIFT: u32 = 16;

/// Returns the bit in the index of names for a second byte (0 at the end of a name). If the bit is not set, no name with
/// this second byte needs a lookup. Several bytes share a bit, so it can be set for another byte.
pub const fn second_bit(byte: u8) -> u32 {
    1 << (SECOND_SHIFT + (byte & 15) as u32)
}
/// Number of slots of the index of names.
pub const NAME_INDEX_SLOTS: usize = 256;

/// A map value that converts to and from the bytes used by system calls.
pub trait MapValue<const N: usize>: Sized {
    /// Returns the bytes of the value in the map.
    fn to_bytes(&self) -> [u8; N];
    /// Returns the value that the map holds as these bytes.
    fn from_bytes(bytes: &[u8; N]) -> Self;
}

/// Writer of consecutive fields.
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

/// Reader of consecutive fields.
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

/// Length of a [`SessionState`] in bytes.
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
        counts.u32(self.tty).u32(self.unit_hash).put(&self.rule).0
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
            unit_hash: b.u32(),
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
    fn map_values_have_the_layout_of_the_probes_structures() {
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
            unit_hash: 19,
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
