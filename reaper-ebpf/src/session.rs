//! What the service has left of a session, as far as the probes act on it.

use reaper_common::{RawKey, SESSION_KERNEL_REAP, SESSION_KILL_ON_FORK};

use crate::maps::SESSIONS;

/// A part of `SessionState`.
#[derive(Clone, Copy)]
pub struct Session {
    pub root: RawKey,
    pub uid: u32,
    pub euid: u32,
    flags: u32,
}

impl Session {
    pub fn is_condemned(&self) -> bool {
        self.flags & SESSION_KILL_ON_FORK != 0
    }

    pub fn ends_in_kernel(&self) -> bool {
        self.flags & SESSION_KERNEL_REAP != 0
    }
}

/// The session of this name; `None` if there is none, or the service is writing it at this very moment: what
/// is not known for sure is left to it.
#[inline(always)]
pub fn of(first_root: &RawKey) -> Option<Session> {
    let found = SESSIONS.get_ptr(first_root)?;
    // A value that is replaced may be another session's before it has been read: whose it is stands beside
    // the flags, and is read before and after the rest.
    // SAFETY: it points into the map, which outlives the program.
    unsafe {
        let last: *const u64 = (&raw const (*found).flags).cast();
        let before = core::ptr::read_volatile(last);
        let session = Session {
            root: core::ptr::read_volatile(&raw const (*found).root),
            uid: core::ptr::read_volatile(&raw const (*found).uid),
            euid: core::ptr::read_volatile(&raw const (*found).euid),
            flags: before as u32,
        };
        let whose = (before >> 32) as u32;
        (before == core::ptr::read_volatile(last) && whose == first_root.check()).then_some(session)
    }
}
