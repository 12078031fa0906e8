//! Ending what is due: the one place that sends a signal.
//!
//! A process is *claimed* once, whoever asks, and is then on the ladder of its session:
//!
//! ```text
//!   claim ─▶ open a pidfd ─▶ drain the ring past that ─▶ is it still due? ─▶ signal ─▶ confirm
//!            (engine)         (engine)                    (policy, again)
//! ```
//!
//! The pidfd names whoever had the pid when it was opened. Whatever had exited by then has its record
//! in the ring, so that after the draining the tree tells whether that was the process that was meant;
//! where the kernel numbers pidfds (6.9), the number says so too. From then on the pidfd cannot come
//! to mean another process.

mod confirm;
mod ladder;
mod send;

use std::collections::BTreeMap;

use hashbrown::HashMap;
use nix::sys::signal::Signal;

use crate::model::Model;
use crate::model::event::{Ended, Key};
use crate::model::policy::{Decision, Reason};
use crate::model::session::SessionId;
use crate::sys;
use crate::sys::pidfd::Pidfd;

pub use confirm::Confirm;
pub use ladder::{Ladder, Stage, Times};
pub use send::end_own;

/// What came of trying to signal a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub key: Key,
    pub signal: Signal,
    /// From what made it due to after the first signal was sent, in ns; `None` for later ones.
    pub latency: Option<u64>,
}

/// How it ended for a process that was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has exited, as its pidfd says.
    Ended(Ended),
    /// It lives on.
    Failed(Failure),
    /// It was let go without a signal: it had exited before, or is not due any more.
    Released(Released),
}

/// Why a process could not be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Not permitted to signal it.
    Eperm,
    /// Opening or using its pidfd failed.
    Errno(i32),
    /// SIGKILL has no effect; its state in /proc is this.
    Stuck(char),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    Gone,
    NotDue(Reason),
    /// The pid belongs to another process by now.
    Identity,
}

/// A report of the reaper, in the order in which things happened.
#[derive(Clone, Debug)]
pub enum Report {
    Signal(Sent),
    Outcome {
        key: Key,
        session: SessionId,
        outcome: Outcome,
        /// The strongest signal it was sent.
        signal: Option<Signal>,
        /// From the first signal to its confirmed end or the failure, in ns.
        duration: Option<u64>,
    },
    /// Nothing is left on a session's ladder.
    Done {
        session: SessionId,
    },
}

/// A claimed process.
struct Target {
    session: SessionId,
    pidfd: Option<Pidfd>,
    /// Number under which the pidfd is waited on.
    token: u64,
    /// What made it due, in ns since boot.
    due_at: u64,
    first_signal: Option<u64>,
    strongest: Option<Signal>,
    /// Its exit record, which comes before the end is confirmed.
    ended: Option<Ended>,
    refused: Option<Failure>,
    /// Memory at the last look, to tell progress from none.
    rss: u64,
}

/// See the module.
pub struct Reaper {
    times: Times,
    targets: HashMap<Key, Target>,
    ladders: BTreeMap<SessionId, Ladder>,
    /// To be signalled next: opened, if need be, and then drained past, before it is.
    queue: Vec<Key>,
    /// To be opened once there is room for more open files.
    starved: Vec<Key>,
    confirm: Confirm,
    tokens: HashMap<u64, Key>,
    last_token: u64,
    reports: Vec<Report>,
}

impl Reaper {
    /// # Errors
    /// As `epoll_create1(2)`.
    pub fn new(times: Times) -> nix::Result<Reaper> {
        Ok(Reaper {
            times,
            targets: HashMap::new(),
            ladders: BTreeMap::new(),
            queue: Vec::new(),
            starved: Vec::new(),
            confirm: Confirm::new()?,
            tokens: HashMap::new(),
            last_token: 0,
            reports: Vec::new(),
        })
    }

    /// Ladders that are open.
    pub fn open_ladders(&self) -> usize {
        self.ladders.len()
    }

    /// Whether a session's ladder is open.
    pub fn is_open(&self, session: SessionId) -> bool {
        self.ladders.contains_key(&session)
    }

    /// Whether something waits to be signalled.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// When [`Reaper::tick`] is wanted next, on the monotonic clock.
    pub fn next_deadline(&self) -> Option<u64> {
        self.ladders.values().map(Ladder::deadline).min()
    }

    /// What to wait on for ends to confirm.
    pub fn confirm(&self) -> Confirm {
        self.confirm.clone()
    }

    pub fn is_claimed(&self, key: Key) -> bool {
        self.targets.contains_key(&key)
    }

    /// Takes on a process that is to be reaped; false if somebody has already.
    pub fn claim(&mut self, model: &Model, key: Key, decision: &Decision) -> bool {
        let Some((session, due)) = model
            .tree
            .get(key)
            .and_then(|node| node.session)
            .zip(decision.due)
        else {
            return false;
        };
        let session = model
            .sessions
            .due(session)
            .map_or(session, |(due, _)| due.id);
        if self.targets.contains_key(&key) {
            return false;
        }
        let late = decision.reason == Reason::BornWhileDue;
        let due_at = if late { key.start } else { due.at };
        self.last_token += 1;
        self.tokens.insert(self.last_token, key);
        self.targets.insert(
            key,
            Target {
                session,
                pidfd: None,
                token: self.last_token,
                due_at,
                first_signal: None,
                strongest: None,
                ended: None,
                refused: None,
                rss: u64::MAX,
            },
        );
        let now = sys::monotonic();
        let ladder = self
            .ladders
            .entry(session)
            .or_insert_with(|| Ladder::new(self.times, now));
        ladder.claimed();
        let overrun = late && ladder.birth(now);
        // A clean-up that a handler of SIGTERM has started is left to its maker while that lives.
        let maker_lives = model
            .tree
            .get(key)
            .is_some_and(|node| node.orphaned.is_none());
        if !(late && maker_lives && ladder.is_gentle()) {
            self.queue.push(key);
        }
        if overrun {
            self.queue_all(session);
        }
        true
    }

    /// The exit record of a process and the orphans it left.
    pub fn exited(&mut self, key: Key, ended: Ended, orphans: &[Key]) {
        if let Some(target) = self.targets.get_mut(&key) {
            target.ended = Some(ended);
            if target.pidfd.is_none() {
                self.finish(key, Outcome::Released(Released::Gone));
            }
        }
        // The clean-up's maker is gone: nobody waits for it any more.
        for orphan in orphans {
            if self
                .targets
                .get(orphan)
                .is_some_and(|target| target.first_signal.is_none())
            {
                self.queue.push(*orphan);
            }
        }
    }

    /// Opens what is queued. Whatever the ring holds when this returns must be drained into the model
    /// before [`Reaper::signal_queued`].
    pub fn open_queued(&mut self) {
        for key in std::mem::take(&mut self.queue) {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            if target.pidfd.is_some() {
                self.queue.push(key);
                continue;
            }
            match Pidfd::open(key.pid) {
                Ok(pidfd) => {
                    target.pidfd = Some(pidfd);
                    self.queue.push(key);
                }
                Err(nix::Error::ESRCH) => self.finish(key, Outcome::Released(Released::Gone)),
                Err(nix::Error::EMFILE | nix::Error::ENFILE) if self.has_open() => {
                    self.starved.push(key)
                }
                Err(errno) => self.finish(key, Outcome::Failed(Failure::Errno(errno as i32))),
            }
        }
    }

    /// Signals what is queued and is, by what the model knows now, still due. Where records were lost
    /// since the opening (`lossless` is false), the tree cannot vouch for a pidfd: only its number can,
    /// and what has none waits for the next round.
    pub fn signal_queued(&mut self, model: &mut Model, lossless: bool) {
        for key in std::mem::take(&mut self.queue) {
            let numbered = model.tree.get(key).is_none_or(|node| node.pidfd_inode != 0);
            if !lossless && !numbered {
                self.queue.push(key);
            } else if let Err(released) = self.signal(model, key) {
                self.finish(key, Outcome::Released(released));
            }
        }
    }

    fn signal(&mut self, model: &mut Model, key: Key) -> Result<(), Released> {
        let Some(target) = self.targets.get_mut(&key) else {
            return Ok(());
        };
        let Some(pidfd) = &target.pidfd else {
            return Ok(());
        };
        let Some(ladder) = self.ladders.get(&target.session) else {
            return Ok(());
        };
        if target.ended.is_some() {
            return if target.first_signal.is_some() {
                Ok(())
            } else {
                Err(Released::Gone)
            };
        }
        send::verify(model, key, pidfd)?;
        let namespace_init = model.tree.get(key).is_some_and(|node| node.namespace_init);
        let signal = if ladder.is_gentle() && !namespace_init {
            Signal::SIGTERM
        } else {
            Signal::SIGKILL
        };
        if target.strongest == Some(signal) {
            return Ok(());
        }
        match send::send(pidfd, key.pid, signal) {
            Ok(()) => {
                let now = sys::boot_time();
                let first = target.first_signal.is_none();
                target.first_signal.get_or_insert(now);
                target.strongest = Some(signal);
                let latency = first.then(|| now.saturating_sub(target.due_at));
                self.reports.push(Report::Signal(Sent {
                    key,
                    signal,
                    latency,
                }));
            }
            // Between the last look and now: its exit record is on its way.
            Err(nix::Error::ESRCH) => {}
            Err(nix::Error::EPERM) => target.refused = Some(Failure::Eperm),
            Err(errno) => target.refused = Some(Failure::Errno(errno as i32)),
        }
        if let Some(Target {
            pidfd: Some(pidfd),
            token,
            ..
        }) = self.targets.get(&key)
            && let Err(error) = self.confirm.add(pidfd, *token)
        {
            tracing::error!("pid {}: its end cannot be waited for: {error}", key.pid);
        }
        Ok(())
    }

    /// Confirms the ends of what has exited; gives the keys of those of which no exit record was read.
    pub fn confirm_ended(&mut self) -> Vec<Key> {
        let mut unrecorded = Vec::new();
        for token in self.confirm.ready() {
            let Some(key) = self.tokens.get(&token).copied() else {
                continue;
            };
            let Some(target) = self.targets.get(&key) else {
                continue;
            };
            match target.ended {
                Some(ended) => self.finish(key, Outcome::Ended(ended)),
                None => unrecorded.push(key),
            }
        }
        unrecorded
    }

    /// Ends a claim whose exit is confirmed though nothing told how.
    pub fn ended_unrecorded(&mut self, key: Key) {
        if self.targets.contains_key(&key) {
            self.finish(key, Outcome::Ended(Ended::Unknown));
        }
    }

    /// Takes the ladders on whose time has come.
    pub fn tick(&mut self, memory: impl Fn(Key) -> (char, u64)) {
        let now = sys::monotonic();
        let expired: Vec<_> = self
            .ladders
            .iter()
            .filter(|(_, ladder)| ladder.deadline() <= now)
            .map(|(id, _)| *id)
            .collect();
        for session in expired {
            let Some(ladder) = self.ladders.get_mut(&session) else {
                continue;
            };
            if ladder.is_gentle() {
                ladder.kill(now);
                self.queue_all(session);
            } else {
                self.look_for_progress(session, now, &memory);
            }
        }
    }

    /// Nothing has ended for a while: whoever gives memory back is on its way, the rest is stuck.
    fn look_for_progress(
        &mut self,
        session: SessionId,
        now: u64,
        memory: &impl Fn(Key) -> (char, u64),
    ) {
        let mut stuck = Vec::new();
        let mut progress = false;
        for (key, target) in self
            .targets
            .iter_mut()
            .filter(|(_, target)| target.session == session)
        {
            let (state, rss) = memory(*key);
            progress |= rss < target.rss && target.rss != u64::MAX;
            target.rss = rss;
            stuck.push((*key, target.refused.unwrap_or(Failure::Stuck(state))));
        }
        let Some(ladder) = self.ladders.get_mut(&session) else {
            return;
        };
        if progress || !ladder.warned() {
            ladder.progress(now);
            return;
        }
        for (key, failure) in stuck {
            self.finish(key, Outcome::Failed(failure));
        }
    }

    fn has_open(&self) -> bool {
        self.targets.values().any(|target| target.pidfd.is_some())
    }

    fn queue_all(&mut self, session: SessionId) {
        self.queue.extend(
            self.targets
                .iter()
                .filter(|(_, t)| t.session == session)
                .map(|(key, _)| *key),
        );
    }

    fn finish(&mut self, key: Key, outcome: Outcome) {
        let Some(target) = self.targets.remove(&key) else {
            return;
        };
        self.tokens.remove(&target.token);
        // There is room for another pidfd now.
        self.queue.append(&mut self.starved);
        let now = sys::boot_time();
        self.reports.push(Report::Outcome {
            key,
            session: target.session,
            outcome,
            signal: target.strongest,
            duration: target.first_signal.map(|first| now.saturating_sub(first)),
        });
        let Some(ladder) = self.ladders.get_mut(&target.session) else {
            return;
        };
        if ladder.finished(sys::monotonic()) {
            self.ladders.remove(&target.session);
            self.reports.push(Report::Done {
                session: target.session,
            });
        }
    }

    /// What has happened since the last call.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }
}
