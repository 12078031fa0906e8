//! The part of the service's session state that the probes use.

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
    /// Returns whether the probes kill members that fork or exec.
    pub fn kills_on_fork(&self) -> bool {
        self.flags & SESSION_KILL_ON_FORK != 0
    }

    /// Returns whether the probes may send SIGTERM to the root's children when the root exits.
    pub fn allows_kernel_reap(&self) -> bool {
        self.flags & SESSION_KERNEL_REAP != 0
    }
}

/// Returns the session with this first root. Returns `None` if there is no such session or the service is just writing
/// it. Unknown cases are left to the service.
#[inline(always)]
pub fn of(first_root: &RawKey) -> Option<Session> {
    let found = SESSIONS.get_ptr(first_root)?;
    // The kernel can reuse the memory of a replaced value for another session during the read. The check value next to
    // the flags is therefore compared before and after the read.
    // SAFETY: a pointer into the map, which outlives the program.
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
