//! Handles on processes, in the place of Linux's pidfds: the only names by which a process is signalled.
//!
//! macOS has none that the kernel would hold on to. A handle remembers what the kernel calls the process, which is a number
//! that is never used again, and asks for that right before each signal. What that leaves open is the time between
//! the question and kill(2), which is microseconds: in that the process would have to exit, be waited for, and its pid
//! be given away. Pids are given in order, so that all others (some 100,000) would have to be used up in between.

use std::time::Duration;

use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sys::darwin::{identity, process};
use crate::sys::kinfo::KinfoProc;
use crate::sys::process_handle::ProcessHandle;
use reaper_model::event::Uids;

/// A handle on one process, for ever the same one.
#[derive(Debug)]
pub struct Pidfd {
    pid: u32,
    unique: u64,
}

/// The kernel does not tell who a process is, and so nothing can be signalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a process cannot be told from another that has its pid: {0}; {advice}", advice = PidfdUnavailable::ADVICE)]
pub struct PidfdUnavailable(pub nix::Error);

impl PidfdUnavailable {
    /// What to do about it.
    pub const ADVICE: &str = "run it outside of a sandbox";
}

/// Whether it does, tried on this process.
///
/// # Errors
/// What the kernel says.
pub fn probe() -> Result<(), PidfdUnavailable> {
    Pidfd::open(std::process::id())
        .map(drop)
        .map_err(PidfdUnavailable)
}

impl Pidfd {
    /// Makes a handle on whoever has the pid now.
    ///
    /// # Errors
    /// `ESRCH` if nobody has.
    pub fn open(pid: u32) -> nix::Result<Pidfd> {
        let unique = identity(pid)?.unique;
        Ok(Pidfd { pid, unique })
    }

    /// What the kernel calls the process; a name that is never used again.
    pub fn unique_inode(&self) -> Option<u64> {
        self.inode()
    }

    /// Pid under which its exit can be waited for.
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
        let told = Kqueue::new().and_then(|queue| {
            let mut told = [exit_of(self.pid, 0)];
            queue.kevent(&[exit_of(self.pid, 0)], &mut [], None)?;
            // Asked by pid, it may be another's exit that is waited for: then this one has gone before.
            match self.has_exited() {
                true => Ok(1),
                false => queue.kevent(&[], &mut told, Some(timespec(timeout))),
            }
        });
        told.map_or_else(
            |_| {
                // It is on its way out, or there is no room: whoever asks again is not to do so all the time.
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
        // To kill(2) these name groups.
        if pid <= 0 {
            return Err(nix::Error::ESRCH);
        }
        if identity(self.pid)?.unique != self.unique {
            return Err(nix::Error::ESRCH);
        }
        kill(Pid::from_raw(pid), signal)
    }
}

/// Asks for word of the exit of whoever has the pid.
pub fn exit_of(pid: u32, token: u64) -> KEvent {
    KEvent::new(
        pid as usize,
        EventFilter::EVFILT_PROC,
        EvFlags::EV_ADD | EvFlags::EV_ONESHOT,
        FilterFlag::NOTE_EXIT,
        0,
        token.cast_signed() as isize,
    )
}

/// Takes back what was asked of whoever has, or had, the pid.
pub fn no_word_of(pid: u32) -> KEvent {
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
