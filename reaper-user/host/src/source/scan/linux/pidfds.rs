//! Holds watched processes by pidfds, which report their exits.

use hashbrown::HashMap;
use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};

use super::read::{Reader, ScanReading};
use super::{Scan, tick};
use crate::advice::Advised as _;
use crate::sys;
use crate::sys::pidfd::Pidfd;
use crate::sys::process_handle::ProcessHandle;
use reaper_model::event::{EventKind, ExitStatus, ProcessKey};

/// A process whose exit matters.
pub(super) struct WatchedProcess {
    /// Start in ns since boot, a whole tick.
    start: u64,
    /// `None` if no pidfd could be opened.
    pidfd: Option<Pidfd>,
}

impl WatchedProcess {
    pub(super) fn is_held(&self) -> bool {
        self.pidfd.is_some()
    }
}

/// Returns the entry of a process; `None` if it is not watched. The start in `key` must be a whole tick.
pub(super) fn watched_as(
    watched: &HashMap<u32, WatchedProcess>,
    key: ProcessKey,
) -> Option<&WatchedProcess> {
    watched
        .get(&key.pid)
        .filter(|known| known.start == key.start)
}

/// Reason why no pidfd of a process can be opened.
enum PidfdFailure {
    /// The process has exited.
    Gone,
    /// The kernel refuses it, temporarily or permanently.
    Refused(Errno),
}

impl Scan {
    /// Starts (`true`) or stops watching a process. A watched process is held by a pidfd, which reports its exit.
    ///
    /// If no pidfd can be opened, the process is watched without one, and each pass tries again. A process that has
    /// exited is not watched.
    pub(super) fn set_exit_watch(&mut self, key: ProcessKey, wanted: bool) {
        let key = tick(key);
        let known = watched_as(&self.watched, key);
        if !wanted {
            if known.is_some() {
                self.release(key.pid);
            }
            return;
        }
        let news = known.is_none();
        if known.is_some_and(WatchedProcess::is_held) {
            return;
        }
        let pidfd = match self.open_pidfd(key) {
            Ok(pidfd) => Some(pidfd),
            // The next pass finds the exit.
            Err(PidfdFailure::Gone) => return,
            Err(PidfdFailure::Refused(errno)) => {
                if self.pidfd_refused.is_none() && self.pidfd_missing.replace(errno).is_none() {
                    tracing::warn!(
                        "cannot watch process {} and maybe others for their exit: {}; until that works, scans find the exits, \
                         and these processes are not signalled",
                        key.pid,
                        errno.advised()
                    );
                }
                None
            }
        };
        // An earlier process with this pid has exited.
        self.release(key.pid);
        self.held_count += usize::from(pidfd.is_some());
        let start = key.start;
        self.watched
            .insert(key.pid, WatchedProcess { start, pidfd });
        if news {
            self.schedule.on_activity();
            self.set_timer();
        }
    }

    /// Returns whether the process is held by a pidfd and has not exited. Then its pid has been its own since it was
    /// reported.
    ///
    /// Returns false if its current program could not be read.
    pub(super) fn is_confirmed(&self, key: ProcessKey) -> bool {
        if self.is_failing || self.unread.contains(&key.pid) {
            return false;
        }
        let known = watched_as(&self.watched, tick(key));
        let pidfd = known.and_then(|known| known.pidfd.as_ref());
        pidfd.is_some_and(|pidfd| !pidfd.has_exited())
    }

    /// Opens a pidfd of the process with this key, and adds it to the epoll set.
    ///
    /// Refuses if pidfds occupy half of the permitted file descriptors.
    fn open_pidfd(&mut self, key: ProcessKey) -> Result<Pidfd, PidfdFailure> {
        if let Some(errno) = self.pidfd_refused {
            return Err(PidfdFailure::Refused(errno));
        }
        if self.held_count >= self.held_max {
            return Err(PidfdFailure::Refused(Errno::EMFILE));
        }
        let pidfd = Pidfd::open(key.pid).map_err(|errno| match errno {
            // No process has the pid, or it is the id of a thread.
            Errno::ESRCH | Errno::EINVAL | Errno::ENOENT => PidfdFailure::Gone,
            errno => PidfdFailure::Refused(errno),
        })?;
        match self.reader.read_row(key.pid) {
            ScanReading::Alive(now) if now.key == key && !pidfd.has_exited() => {}
            ScanReading::Unreadable(errno) => return Err(PidfdFailure::Refused(errno)),
            _ => return Err(PidfdFailure::Gone),
        }
        let event = EpollEvent::new(EpollFlags::EPOLLIN, key.pid.into());
        self.epoll
            .add(&pidfd, event)
            .map_err(PidfdFailure::Refused)?;
        Ok(pidfd)
    }

    /// Stops watching the process with this pid, if it is watched.
    pub(super) fn release(&mut self, pid: u32) {
        let known = self.watched.remove(&pid);
        // Dropping the pidfd also removes it from the epoll set.
        self.held_count -= usize::from(known.is_some_and(|known| known.is_held()));
    }

    /// Emits the exits that pidfds report, and stops watching these processes. Returns whether there were any.
    ///
    /// A pass then follows soon, because the children have new parents.
    pub(super) fn emit_exits(&mut self, emit: &mut impl FnMut(EventKind)) -> bool {
        let mut ended = HashMap::new();
        loop {
            let mut events = [EpollEvent::empty(); 64];
            let ready = self.epoll.wait(&mut events, EpollTimeout::ZERO);
            let ready = &events[..ready.unwrap_or(0).min(events.len())];
            let pids = ready.iter().map(EpollEvent::data);
            let before = ended.len();
            for pid in pids.filter_map(|pid| u32::try_from(pid).ok()) {
                let Some(known) = self.watched.get(&pid) else {
                    continue;
                };
                let key = ProcessKey {
                    pid,
                    start: known.start,
                };
                let status = status(&mut self.reader, key, known.pidfd.as_ref());
                ended.insert(key, status.unwrap_or(ExitStatus::Unknown));
                self.release(pid);
            }
            if ended.len() == before {
                break;
            }
        }
        if ended.is_empty() {
            return false;
        }
        self.table.emit_exits(&ended, emit);
        self.schedule.on_exit(sys::monotonic());
        true
    }

    /// Retries to open pidfds for watched processes that lack one.
    pub(super) fn open_missing_pidfds(&mut self) {
        if self.pidfd_missing.is_none() {
            return;
        }
        let unheld = self.watched.iter().filter(|(_, of)| of.pidfd.is_none());
        let unheld: Vec<ProcessKey> = unheld
            .map(|(pid, of)| ProcessKey {
                pid: *pid,
                start: of.start,
            })
            .collect();
        if unheld.is_empty() {
            self.pidfd_missing = None;
        }
        if self.held_count < self.held_max {
            unheld
                .into_iter()
                .for_each(|key| self.set_exit_watch(key, true));
        }
    }
}

/// Returns the exit status of a held process. The pidfd provides it if the process has been waited for, /proc if not.
fn status(reader: &mut Reader, key: ProcessKey, pidfd: Option<&Pidfd>) -> Option<ExitStatus> {
    let from_pidfd = || pidfd.and_then(Pidfd::exit_status);
    from_pidfd()
        .or_else(|| reader.status(key))
        .or_else(from_pidfd)
}
