//! Handles on processes, in place of Linux's pidfds. The service signals a process only through its handle.
//!
//! macOS has no handle that pins a process. Instead a handle stores the unique number of the process, and checks it
//! right before each signal. Between the check and kill(2) lie microseconds, in which a signal could hit another
//! process: the process would have to exit, be waited for, and its pid be reused. Pids are allocated in order, so all
//! other pids (about 100,000) would have to be used in between.

use std::time::Duration;

use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sys::darwin::{identity, process};
use crate::sys::kinfo::KinfoProc;
use crate::sys::process_handle::ProcessHandle;
use reaper_model::event::Uids;

/// A handle on one process. It never refers to another process.
#[derive(Debug)]
pub struct Pidfd {
    pid: u32,
    unique: u64,
}

/// The kernel does not report unique numbers of processes, so that no process can be signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot tell processes with the same pid apart: {0}; {advice}", advice = PidfdUnavailable::ADVICE)]
pub struct PidfdUnavailable(pub nix::Error);

impl PidfdUnavailable {
    /// Advice for the user.
    pub const ADVICE: &str = "run reaper outside of a sandbox";
}

/// Checks that the kernel reports the unique number of this process.
///
/// # Errors
/// The error of the kernel.
pub fn probe() -> Result<(), PidfdUnavailable> {
    Pidfd::open(std::process::id())
        .map(drop)
        .map_err(PidfdUnavailable)
}

impl Pidfd {
    /// Opens a handle on the process that currently has the pid.
    ///
    /// # Errors
    /// `ESRCH` if there is no such process.
    pub fn open(pid: u32) -> nix::Result<Pidfd> {
        let unique = identity(pid)?.unique;
        Ok(Pidfd { pid, unique })
    }

    /// Returns the unique number of the process, which is not reused.
    pub fn unique_inode(&self) -> Option<u64> {
        self.inode()
    }

    /// Returns the pid, for watching the exit.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl ProcessHandle for Pidfd {
    fn file(&self) -> u64 {
        0
    }

    fn inode(&self) -> Option<u64> {
        Some(self.unique)
    }

    fn has_exited(&self) -> bool {
        match identity(self.pid) {
            Ok(identity) => identity.unique != self.unique,
            Err(error) => error == nix::Error::ESRCH,
        }
    }

    fn wait(&self, timeout: Duration) -> bool {
        if timeout.is_zero() || self.has_exited() {
            return self.has_exited();
        }
        let exits = Kqueue::new().and_then(|queue| {
            let mut events = [exit_watch(self.pid, 0)];
            queue.kevent(&[exit_watch(self.pid, 0)], &mut [], None)?;
            // kevent(2) watches by pid. If the pid was reused, this process has exited before.
            match self.has_exited() {
                true => Ok(1),
                false => queue.kevent(&[], &mut events, Some(timespec(timeout))),
            }
        });
        exits.map_or_else(
            |_| {
                // The process is exiting, or there are no resources. The pause keeps the caller from a busy loop.
                std::thread::sleep(timeout.min(Duration::from_millis(10)));
                self.has_exited()
            },
            |count| count > 0 || self.has_exited(),
        )
    }

    fn uids(&self, pid: u32) -> Option<Uids> {
        let bytes = process(pid).ok()?;
        let uids = KinfoProc::all(&bytes).next()?.uids;
        (!self.has_exited()).then_some(uids)
    }

    fn send_signal(&self, signal: Signal) -> nix::Result<()> {
        let pid = i32::try_from(self.pid).map_err(|_| nix::Error::ESRCH)?;
        // kill(2) takes such a pid for a process group.
        if pid <= 0 {
            return Err(nix::Error::ESRCH);
        }
        if identity(self.pid)?.unique != self.unique {
            return Err(nix::Error::ESRCH);
        }
        kill(Pid::from_raw(pid), signal)
    }
}

/// Returns the request to watch for the exit of the process that has the pid.
pub fn exit_watch(pid: u32, token: u64) -> KEvent {
    KEvent::new(
        pid as usize,
        EventFilter::EVFILT_PROC,
        EvFlags::EV_ADD | EvFlags::EV_ONESHOT,
        FilterFlag::NOTE_EXIT,
        0,
        token.cast_signed() as isize,
    )
}

/// Returns the request to stop watching the process that has the pid.
pub fn exit_unwatch(pid: u32) -> KEvent {
    KEvent::new(
        pid as usize,
        EventFilter::EVFILT_PROC,
        EvFlags::EV_DELETE,
        FilterFlag::empty(),
        0,
        0,
    )
}

fn timespec(timeout: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    }
}
