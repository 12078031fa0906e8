//! Waits for the exits of many processes.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;
use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};

use crate::sys::pidfd::{Pidfd, exit_unwatch, exit_watch};
use crate::sys::process_handle::ProcessHandle;

/// A set of processes, readable when one of them has exited. Each exit is reported once.
#[derive(Clone)]
pub struct ExitPoll(Arc<Set>);

struct Set {
    queue: Kqueue,
    known: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    /// Tokens of the watched processes, by pid.
    waiting: HashMap<u32, u64>,
    /// Tokens of processes that have exited without an event of the queue.
    gone: Vec<u64>,
}

impl ExitPoll {
    /// Returns an empty set.
    ///
    /// # Errors
    /// As `kqueue(2)`.
    pub fn new() -> nix::Result<ExitPoll> {
        let set = Set {
            queue: Kqueue::new()?,
            known: Mutex::default(),
        };
        set.change(poke(EvFlags::EV_ADD | EvFlags::EV_CLEAR))?;
        Ok(ExitPoll(Arc::new(set)))
    }

    /// Adds a process, which can be in the set already. `ready` returns the token even if the process has exited
    /// before.
    ///
    /// # Errors
    /// As `kevent(2)`.
    pub fn add(&self, pidfd: &Pidfd, token: u64) -> nix::Result<()> {
        let (set, pid) = (&*self.0, pidfd.pid());
        let mut known = set.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = known.waiting.insert(pid, token).filter(|it| *it != token) {
            // The pid has been reused. An exit event would now be about the new process but carry the old token.
            let _ = set.change(exit_unwatch(pid));
            known.gone.push(before);
        }
        let result = set.change(exit_watch(pid, token));
        // kevent(2) watches by pid, so after a reuse the event is about another process. This process has exited
        // then. The kernel no longer finds a process that is exiting.
        let has_exited = pidfd.has_exited() || matches!(result, Err(nix::Error::ESRCH));
        if has_exited {
            known.gone.push(token);
        }
        if !known.gone.is_empty() {
            let _ = set.change(poke(EvFlags::empty()));
        }
        if has_exited { Ok(()) } else { result }
    }

    /// Returns the tokens of some processes that have exited, each once. Does not wait.
    pub fn ready(&self) -> Vec<u64> {
        let mut known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tokens = std::mem::take(&mut known.gone);
        let mut events = [poke(EvFlags::empty()); 256];
        let none = Some(libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        });
        if let Ok(count) = self.0.queue.kevent(&[], &mut events, none) {
            let received = events.iter().take(count);
            let exits = received.filter(|event| event.filter() == Ok(EventFilter::EVFILT_PROC));
            tokens.extend(exits.map(|event| (event.udata() as i64).cast_unsigned()));
        }
        known.waiting.retain(|_, token| !tokens.contains(token));
        tokens
    }
}

impl Set {
    /// Applies a change to the events that the queue watches.
    fn change(&self, event: KEvent) -> nix::Result<()> {
        self.queue.kevent(&[event], &mut [], None).map(drop)
    }
}

impl AsFd for ExitPoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.queue.as_fd()
    }
}

/// Returns an event that makes the set readable.
fn poke(flags: EvFlags) -> KEvent {
    let filter = EventFilter::EVFILT_USER;
    KEvent::new(0, filter, flags, FilterFlag::NOTE_TRIGGER, 0, 0)
}
