//! That no signal to the owner of a run reaches it when it is its owner no more: an embedding program lives on.
//!
//! Whoever is about to signal it has a shared lock on the first byte of the record meanwhile (`F_OFD_SETLK`, fcntl(2)), and the owner
//! has it alone from right before it closes the record. The kernel gives it back however either ends.

use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// How long the owner waits for whoever has it: one that was stopped may have it for ever.
const PATIENCE: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The right to signal the owner, as long as this is there.
pub(super) struct Hearing<'a>(&'a File);

impl Hearing<'_> {
    /// `None` where the owner is about to be it no more.
    pub(super) fn get(record: &File) -> Option<Hearing<'_>> {
        lock(record, libc::F_RDLCK).then_some(Hearing(record))
    }
}

impl Drop for Hearing<'_> {
    fn drop(&mut self) {
        lock(self.0, libc::F_UNLCK);
    }
}

/// Waits until nobody is about to signal the owner, which is this process; nobody begins to any more.
pub(super) fn end(record: &File) {
    let until = Instant::now() + PATIENCE;
    while !lock(record, libc::F_WRLCK) && Instant::now() < until {
        thread::sleep(LOOK_AGAIN);
    }
}

/// Whether nobody is in the way.
fn lock(record: &File, how: i32) -> bool {
    let lock = libc::flock {
        l_type: how as i16, // 0 to 2
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    // Where there are no such locks it goes on without.
    fcntl(record, FcntlArg::F_OFD_SETLK(&lock)) != Err(Errno::EAGAIN)
}
