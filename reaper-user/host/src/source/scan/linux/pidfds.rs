//! Those who matter are held, each by a pidfd, which tells of its end.

use hashbrown::HashMap;
use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};

use super::read::{Reader, ScanReading};
use super::{Scan, tick};
use crate::sys;
use crate::sys::pidfd::Pidfd;
use crate::sys::process_handle::ProcessHandle;
use reaper_model::event::{EventKind, ExitStatus, ProcessKey};

/// A process whose exit matters.
pub(super) struct WatchedProcess {
    /// A whole tick.
    start: u64,
    /// `None`: there is no room for it.
    pidfd: Option<Pidfd>,
}

impl WatchedProcess {
    pub(super) fn is_held(&self) -> bool {
        self.pidfd.is_some()
    }
}

/// Returns what is known of a process, whose start is a whole tick, if its exit matters.
pub(super) fn watched_as(
    watched: &HashMap<u32, WatchedProcess>,
    key: ProcessKey,
) -> Option<&WatchedProcess> {
    watched
        .get(&key.pid)
        .filter(|known| known.start == key.start)
}

/// Why one is not held.
enum PidfdFailure {
    /// It is another by now, or nobody.
    Gone,
    /// It cannot be, for now or for good.
    Refused(Errno),
}

impl Scan {
    /// Holds a pidfd on a process, so that its exit is an event, or lets it go.
    pub(super) fn set_exit_watch(&mut self, key: ProcessKey, wanted: bool) {
        let key = tick(key);
        let known = watched_as(&self.watched, key);
        if !wanted {
            if known.is_some() {
                self.let_go(key.pid);
            }
            return;
        }
        let news = known.is_none();
        if known.is_some_and(WatchedProcess::is_held) {
            return;
        }
        let pidfd = match self.hold(key) {
            Ok(pidfd) => Some(pidfd),
            // The next pass finds that out.
            Err(PidfdFailure::Gone) => return,
            Err(PidfdFailure::Refused(errno)) => {
                if self.refused.is_none() && self.starved.replace(errno).is_none() {
                    tracing::warn!(
                        "pid {}: its end cannot be waited for: {errno}; raise the limit of open files",
                        key.pid
                    );
                }
                None
            }
        };
        // One that had the pid before has exited.
        self.let_go(key.pid);
        self.held += usize::from(pidfd.is_some());
        let start = key.start;
        self.watched
            .insert(key.pid, WatchedProcess { start, pidfd });
        if news {
            self.pace.on_activity();
            self.arm();
        }
    }

    /// Whether this process is held and has not exited: then its pid is its own, and was since it was told of; and what it
    /// is was read, if the last pass found that to be something else.
    pub(super) fn holds(&self, key: ProcessKey) -> bool {
        if self.failing || self.unread.contains(&key.pid) {
            return false;
        }
        let known = watched_as(&self.watched, tick(key));
        let pidfd = known.and_then(|known| known.pidfd.as_ref());
        pidfd.is_some_and(|pidfd| !pidfd.has_exited())
    }

    /// Opens a pidfd on this very process, and has its end wake whoever waits.
    fn hold(&mut self, key: ProcessKey) -> Result<Pidfd, PidfdFailure> {
        if let Some(errno) = self.refused {
            return Err(PidfdFailure::Refused(errno));
        }
        if self.held >= self.held_max {
            return Err(PidfdFailure::Refused(Errno::EMFILE));
        }
        let pidfd = Pidfd::open(key.pid).map_err(|errno| match errno {
            // Nobody, or a thread, which is no process.
            Errno::ESRCH | Errno::EINVAL | Errno::ENOENT => PidfdFailure::Gone,
            errno => PidfdFailure::Refused(errno),
        })?;
        match self.reader.look(key.pid) {
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

    pub(super) fn let_go(&mut self, pid: u32) {
        let known = self.watched.remove(&pid);
        // Closing it takes it out of the set.
        self.held -= usize::from(known.is_some_and(|known| known.is_held()));
    }

    /// Tells of the ends that pidfds know, if there are any. Who is left by them has another parent now.
    pub(super) fn emit_exits(&mut self, tell: &mut impl FnMut(EventKind)) -> bool {
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
                let how = how(&mut self.reader, key, known.pidfd.as_ref());
                ended.insert(key, how.unwrap_or(ExitStatus::Unknown));
                self.let_go(pid);
            }
            if ended.len() == before {
                break;
            }
        }
        if ended.is_empty() {
            return false;
        }
        self.table.emit_exits(&ended, tell);
        self.pace.on_exit(sys::monotonic());
        true
    }

    /// There may be room now for those for whom there was none.
    pub(super) fn hold_starved(&mut self) {
        if self.starved.is_none() {
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
            self.starved = None;
        }
        if self.held < self.held_max {
            unheld
                .into_iter()
                .for_each(|key| self.set_exit_watch(key, true));
        }
    }
}

/// How a held process has ended: the kernel tells that of one that has been waited for, /proc of one that has not.
fn how(reader: &mut Reader, key: ProcessKey, pidfd: Option<&Pidfd>) -> Option<ExitStatus> {
    let told = || pidfd.and_then(Pidfd::exit_status);
    told().or_else(|| reader.status(key)).or_else(told)
}
