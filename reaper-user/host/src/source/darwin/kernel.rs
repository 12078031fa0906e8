//! Implements the scan's kernel interface for macOS by kqueue(2), sysctl(3) and libproc.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};

use super::scan::{self, Kernel, KernelEvent};
use super::table::{all, key, proc_entry, rows};
use crate::source::scan::error::ScanError;
use crate::source::scan::interval::ScanOptions;
use crate::source::snapshot::ProcfsError;
use crate::sys;
use crate::sys::darwin;
use crate::sys::kinfo::{Identity, KinfoProc};
use crate::sys::pidfd::exit_unwatch;
use reaper_model::event::{ProcEntry, ProcessKey};

/// Identifier of the timer.
const TIMER: usize = 1;
/// Number of events read at a time.
const BATCH: usize = 64;

/// Scan of this system.
pub type Scan = scan::Scan<Queue>;

/// Kernel queue of process events.
pub struct Queue(Kqueue);

impl Scan {
    /// Opens the queue. The first [`Source::drain`](crate::source::Source::drain) reports and watches pre-existing
    /// processes.
    ///
    /// # Errors
    /// No file descriptor is left, or the process table cannot be read.
    pub fn open(options: &ScanOptions) -> Result<Scan, ScanError> {
        all()?;
        let queue = Kqueue::new().map_err(ScanError::Wait)?;
        Ok(Scan::of(Queue(queue), options))
    }
}

impl Kernel for Queue {
    type Error = ProcfsError;

    fn now(&self) -> u64 {
        sys::monotonic()
    }

    fn boot_time(&self) -> u64 {
        sys::boot_time()
    }

    fn rows(&mut self) -> Result<(Vec<KinfoProc>, usize), ProcfsError> {
        rows()
    }

    fn key(&self, process: &KinfoProc) -> ProcessKey {
        key(process)
    }

    fn proc_entry(&self, process: &KinfoProc) -> Option<ProcEntry> {
        proc_entry(process)
    }

    fn identity(&self, pid: u32) -> Option<Identity> {
        darwin::identity(pid).ok()
    }

    fn identity_of_any(&self, pid: u32) -> Option<Identity> {
        darwin::identity_of_any(pid).ok()
    }

    /// Watches a process. The kernel reports exit statuses only of processes that this user may signal.
    fn watch(&mut self, pid: u32) -> bool {
        // Pending events of an earlier process with the pid would be taken for events of this one.
        let _ = self.0.kevent(&[exit_unwatch(pid)], &mut [], None);
        let all = FilterFlag::NOTE_EXIT | FilterFlag::NOTE_FORK | FilterFlag::NOTE_EXEC;
        [all | FilterFlag::NOTE_EXITSTATUS, all]
            .into_iter()
            .any(|what| {
                let flags = EvFlags::EV_ADD | EvFlags::EV_CLEAR;
                let change = event(pid as usize, EventFilter::EVFILT_PROC, flags, what);
                self.0.kevent(&[change], &mut [], None).is_ok()
            })
    }

    fn read_events(&mut self) -> Vec<KernelEvent> {
        let nothing = event(
            0,
            EventFilter::EVFILT_USER,
            EvFlags::empty(),
            FilterFlag::empty(),
        );
        let mut events = [nothing; BATCH];
        let mut all = Vec::new();
        loop {
            let none = Some(libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            });
            let count = match self.0.kevent(&[], &mut events, none) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(error) => {
                    tracing::error!(
                        "cannot read process events from the kernel: {error}; the next scan finds the processes that exited"
                    );
                    0
                }
            };
            all.extend(events[..count.min(BATCH)].iter().filter_map(read_event));
            if count < BATCH {
                return all;
            }
        }
    }

    fn wake_in(&mut self, time: Duration) -> bool {
        let micros = time.as_nanos().div_ceil(1000).max(1);
        let timer = KEvent::new(
            TIMER,
            EventFilter::EVFILT_TIMER,
            EvFlags::EV_ADD | EvFlags::EV_ONESHOT,
            FilterFlag::NOTE_USECONDS,
            isize::try_from(micros).unwrap_or(isize::MAX),
            0,
        );
        let set = self.0.kevent(&[timer], &mut [], None);
        set.inspect_err(|error| {
            tracing::error!(
                "cannot set the timer for the next scan: {error}; new processes may be noticed late"
            )
        })
        .is_ok()
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Converts an event; `None` if it is not about a process.
fn read_event(event: &KEvent) -> Option<KernelEvent> {
    let of_process = event.filter() == Ok(EventFilter::EVFILT_PROC);
    let pid = u32::try_from(event.ident()).ok().filter(|_| of_process)?;
    let what = event.fflags();
    if what.contains(FilterFlag::NOTE_EXIT) {
        let status = u32::try_from(event.data()).ok();
        let status = status.filter(|_| what.contains(FilterFlag::NOTE_EXITSTATUS));
        return Some(KernelEvent::Exit { pid, status });
    }
    let exec = what.contains(FilterFlag::NOTE_EXEC);
    Some(KernelEvent::Change { pid, exec })
}

fn event(ident: usize, filter: EventFilter, flags: EvFlags, what: FilterFlag) -> KEvent {
    KEvent::new(ident, filter, flags, what, 0, 0)
}
