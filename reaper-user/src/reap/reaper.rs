//! The claims, and what becomes of them.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use nix::sys::signal::Signal;

use super::{Confirm, Failure, Ladder, Outcome, Released, Report, Sent, Times, send};
use crate::model::Model;
use crate::model::event::{Ended, Key};
use crate::model::policy::{Decision, Reason};
use crate::model::session::SessionId;
use crate::sys;
use crate::sys::pidfd::Pidfd;

/// A claimed process.
struct Target {
    /// The session on whose ladder it is.
    ladder: SessionId,
    /// The session it is a member of: that one, or one nested in it.
    session: SessionId,
    /// That it is to be reaped has been told.
    told: bool,
    pidfd: Option<Pidfd>,
    /// Number under which the pidfd is waited on.
    token: u64,
    /// What made it due, in ns since boot; `None` for one that was left to its maker at first.
    due_at: Option<u64>,
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
    own_pid: u32,
    times: Times,
    /// Nothing is signalled.
    observe: bool,
    targets: HashMap<Key, Target>,
    ladders: BTreeMap<SessionId, Ladder>,
    /// How many of the targets are members of each session.
    members: HashMap<SessionId, usize>,
    /// How many of the targets have a pidfd.
    open: usize,
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
    pub fn new(times: Times, observe: bool) -> nix::Result<Reaper> {
        Ok(Reaper {
            own_pid: std::process::id(),
            times,
            observe,
            targets: HashMap::new(),
            ladders: BTreeMap::new(),
            members: HashMap::new(),
            open: 0,
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

    /// Whether members of this very session are claimed, be it on another's ladder.
    pub fn has_members_of(&self, session: SessionId) -> bool {
        self.members.contains_key(&session)
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
        let Some(node) = model.tree.get(key).filter(|_| !self.is_claimed(key)) else {
            return false;
        };
        let Some(session) = node.session else {
            return false;
        };
        let Some((ladder, _)) = model.sessions.due(session) else {
            return false;
        };
        let Some(due) = decision.due else {
            return false;
        };
        let (ladder, late) = (ladder.id, decision.reason == Reason::BornWhileDue);
        let held = !self.observe && self.step_on(ladder, late) && node.orphaned.is_none();
        self.last_token += 1;
        self.tokens.insert(self.last_token, key);
        let due_at = if late { key.start } else { due.at };
        let target = Target {
            ladder,
            session,
            told: held,
            pidfd: None,
            token: self.last_token,
            due_at: (!held).then_some(due_at),
            first_signal: None,
            strongest: None,
            ended: None,
            refused: None,
            rss: u64::MAX,
        };
        self.targets.insert(key, target);
        *self.members.entry(session).or_default() += 1;
        if held {
            let decision = decision.clone();
            self.reports.push(Report::Decided { key, decision });
        } else {
            self.queue.push(key);
        }
        true
    }

    /// One more on a ladder. True for one that was born into a tree which has been sent SIGTERM: a
    /// handler of that may have made it to clean up, so it is left to its maker while that lives.
    fn step_on(&mut self, session: SessionId, late: bool) -> bool {
        let now = sys::monotonic();
        let ladder = self.ladders.entry(session);
        let ladder = ladder.or_insert_with(|| Ladder::new(self.times, now));
        ladder.claimed();
        if late && ladder.birth(now) {
            self.queue_all(session);
            return false;
        }
        late && ladder.is_gentle()
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
                    self.open += 1;
                    self.queue.push(key);
                }
                Err(nix::Error::ESRCH) => self.finish(key, Outcome::Released(Released::Gone)),
                Err(nix::Error::EMFILE | nix::Error::ENFILE) if self.open > 0 => {
                    self.starved.push(key)
                }
                Err(errno) => self.finish(key, Outcome::Failed(Failure::Errno(errno as i32))),
            }
        }
    }

    /// Whether something is queued that the kernel has given no number by which its pidfd could be told:
    /// only the tree can vouch for that, and only if nothing was lost between opening and signalling.
    pub fn needs_vouching(&self, model: &Model) -> bool {
        let unnumbered = |key: &Key| {
            model
                .tree
                .get(*key)
                .is_some_and(|node| node.pidfd_inode == 0)
        };
        self.queue.iter().any(unnumbered)
    }

    /// Signals what is queued and is, by what the model knows now, still due. Where records were lost
    /// since the opening (`lossless` is false), what has no number is opened anew in the next round.
    pub fn signal_queued(&mut self, model: &mut Model, lossless: bool) {
        for key in std::mem::take(&mut self.queue) {
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            let numbered = model.tree.get(key).is_none_or(|node| node.pidfd_inode != 0);
            if !lossless
                && !numbered
                && target.first_signal.is_none()
                && target.pidfd.take().is_some()
            {
                self.open -= 1;
            }
            if target.pidfd.is_none() {
                // Its turn to be opened comes in the next round.
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
        // One that has had a signal and is gone now has its end confirmed by its pidfd.
        let waited_for = target.first_signal.is_some();
        if target.ended.is_some() {
            return if waited_for {
                Ok(())
            } else {
                Err(Released::Gone)
            };
        }
        let decision = match send::verify(model, key, pidfd) {
            Err(Released::Gone) if waited_for => return Ok(()),
            verified => verified?,
        };
        if !std::mem::replace(&mut target.told, true) {
            self.reports.push(Report::Decided { key, decision });
        }
        let Some(ladder) = self.ladders.get(&target.ladder) else {
            return Err(Released::Observed);
        };
        // The init of a pid namespace ignores SIGTERM unless it has a handler for it.
        let namespace_init = model.tree.get(key).is_some_and(|node| node.namespace_init);
        let gentle = ladder.is_gentle() && !namespace_init;
        let signal = if gentle {
            Signal::SIGTERM
        } else {
            Signal::SIGKILL
        };
        if target.strongest == Some(signal) {
            return Ok(());
        }
        match send::send(pidfd, key.pid, self.own_pid, signal) {
            Ok(()) => {
                let now = sys::boot_time();
                let due_at = target.due_at.filter(|_| target.first_signal.is_none());
                let latency = due_at.map(|due_at| now.saturating_sub(due_at));
                target.first_signal.get_or_insert(now);
                target.refused = None;
                target.strongest = Some(signal);
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
        if let Err(error) = self.confirm.add(pidfd, target.token) {
            tracing::error!("pid {}: its end cannot be waited for: {error}", key.pid);
        }
        Ok(())
    }

    /// Confirms the ends of some that have exited. Gives how many there were, 0 if there are no more,
    /// and those of which no exit record was read: these must be told by [`Reaper::ended_unrecorded`]
    /// before the next call.
    pub fn confirm_ended(&mut self) -> (usize, Vec<Key>) {
        let mut unrecorded = Vec::new();
        let ready = self.confirm.ready();
        for token in &ready {
            let Some(key) = self.tokens.get(token).copied() else {
                continue;
            };
            match self.targets.get(&key).and_then(|target| target.ended) {
                Some(ended) => self.finish(key, Outcome::Ended(ended)),
                None => unrecorded.push(key),
            }
        }
        (ready.len(), unrecorded)
    }

    /// Ends a claim whose exit is confirmed, whether or not anything told how it came.
    pub fn ended_unrecorded(&mut self, key: Key) {
        if let Some(target) = self.targets.get(&key) {
            self.finish(key, Outcome::Ended(target.ended.unwrap_or(Ended::Unknown)));
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
            .filter(|(_, target)| target.ladder == session)
        {
            let (state, rss) = memory(*key);
            progress |= rss < target.rss && target.rss != u64::MAX;
            target.rss = rss;
            match target.refused {
                Some(failure) => stuck.push((*key, failure)),
                None if target.strongest == Some(Signal::SIGKILL) => {
                    stuck.push((*key, Failure::Stuck(state)));
                }
                // It has come since, and has not had its signal yet.
                None => self.queue.push(*key),
            }
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

    fn queue_all(&mut self, session: SessionId) {
        self.queue.extend(
            self.targets
                .iter()
                .filter(|(_, target)| target.ladder == session)
                .map(|(key, _)| *key),
        );
    }

    fn finish(&mut self, key: Key, outcome: Outcome) {
        let Some(target) = self.targets.remove(&key) else {
            return;
        };
        self.tokens.remove(&target.token);
        self.open -= usize::from(target.pidfd.is_some());
        if let Some(members) = self.members.get_mut(&target.session) {
            *members -= 1;
            if *members == 0 {
                self.members.remove(&target.session);
            }
        }
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
        if let Some(ladder) = self.ladders.get_mut(&target.ladder) {
            ladder.finished(sys::monotonic());
        }
    }

    /// Gives up what is still claimed: this program goes.
    pub fn stop(&mut self) {
        let keys: Vec<Key> = self.targets.keys().copied().collect();
        for key in keys {
            self.finish(key, Outcome::Failed(Failure::Stopped));
        }
    }

    /// Closes the ladders on which nobody is left. Only for when all is decided about that has been read:
    /// a process may have left one to its child a moment ago, and a new ladder would begin at its foot.
    pub fn close_empty(&mut self) {
        let reports = &mut self.reports;
        self.ladders.retain(|session, ladder| {
            let done = ladder.is_empty();
            if done {
                reports.push(Report::Done { session: *session });
            }
            !done
        });
    }

    /// What has happened since the last call.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }
}
