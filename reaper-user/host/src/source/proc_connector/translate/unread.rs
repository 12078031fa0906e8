//! Processes that /proc did not show when they were looked up.

use reaper_model::event::ProcessKey;

/// How often it is tried again to read a program, or whether one has ended, beside once at once; and of how many.
pub const TRIES: u32 = 3;
pub const UNREAD_MAX: usize = 1024;

/// One whose program could not be read when it was told that it had run one.
pub struct Unread {
    pub key: ProcessKey,
    /// When it had, in ns since boot.
    pub time: u64,
    /// How often it is still tried.
    pub tries: u32,
    /// When it is looked at again, on the monotonic clock.
    pub at: u64,
    /// It has run none: this process has made it, and is awaited too.
    pub copy_of: Option<ProcessKey>,
}

impl Unread {
    pub fn new(key: ProcessKey, time: u64) -> Unread {
        Unread {
            key,
            time,
            tries: TRIES,
            at: 0,
            copy_of: None,
        }
    }
}

/// One of whom the last thread may have exited.
pub struct Doubted {
    pub key: ProcessKey,
    pub tries: u32,
    /// When it is looked at again, on the monotonic clock.
    pub at: u64,
}
