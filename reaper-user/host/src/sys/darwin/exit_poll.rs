//! Waits for the exits of many processes at once.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;
use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};

use crate::sys::pidfd::{Pidfd, exit_of, no_word_of};
use crate::sys::process_handle::ProcessHandle;

/// A set of processes, readable when one of them has exited. Each is told once.
#[derive(Clone)]
pub struct ExitPoll(Arc<Set>);

struct Set {
    queue: Kqueue,
    known: Mutex<Fact>,
}

#[derive(Default)]
struct Fact {
    /// The tokens of those that are waited for, by pid.
    waiting: HashMap<u32, u64>,
    /// Those of whom it is known otherwise that they have exited.
    gone: Vec<u64>,
}

impl ExitPoll {
    /// # Errors
    /// As `kqueue(2)`.
    pub fn new() -> nix::Result<ExitPoll> {
        let set = Set {
            queue: Kqueue::new()?,
            known: Mutex::default(),
        };
        set.ask(poke(EvFlags::EV_ADD | EvFlags::EV_CLEAR))?;
        Ok(ExitPoll(Arc::new(set)))
    }

    /// Adds a process, which may be in the set already.
    ///
    /// # Errors
    /// As `kevent(2)`.
    pub fn add(&self, pidfd: &Pidfd, token: u64) -> nix::Result<()> {
        let (set, pid) = (&*self.0, pidfd.pid());
        let mut known = set.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = known.waiting.insert(pid, token).filter(|it| *it != token) {
            // Its pid is another's by now. The kernel would tell of its end as if it were this one's.
            let _ = set.ask(no_word_of(pid));
            known.gone.push(before);
        }
        let asked = set.ask(exit_of(pid, token));
        // Asked by pid, it may be of another: whoever is told of then, its token means the one that is gone. One that is
        // on its way out is not found any more.
        let has_exited = pidfd.has_exited() || matches!(asked, Err(nix::Error::ESRCH));
        if has_exited {
            known.gone.push(token);
        }
        if !known.gone.is_empty() {
            let _ = set.ask(poke(EvFlags::empty()));
        }
        if has_exited { Ok(()) } else { asked }
    }

    /// Returns the tokens of some processes that have exited.
    pub fn ready(&self) -> Vec<u64> {
        let mut known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tokens = std::mem::take(&mut known.gone);
        let mut events = [poke(EvFlags::empty()); 256];
        let none = Some(libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        });
        if let Ok(count) = self.0.queue.kevent(&[], &mut events, none) {
            let told = events.iter().take(count);
            let ends = told.filter(|event| event.filter() == Ok(EventFilter::EVFILT_PROC));
            tokens.extend(ends.map(|event| (event.udata() as i64).cast_unsigned()));
        }
        known.waiting.retain(|_, token| !tokens.contains(token));
        tokens
    }
}

impl Set {
    fn ask(&self, what: KEvent) -> nix::Result<()> {
        self.queue.kevent(&[what], &mut [], None).map(drop)
    }
}

impl AsFd for ExitPoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.queue.as_fd()
    }
}

/// What makes the set readable for those who are gone.
fn poke(flags: EvFlags) -> KEvent {
    let filter = EventFilter::EVFILT_USER;
    KEvent::new(0, filter, flags, FilterFlag::NOTE_TRIGGER, 0, 0)
}
