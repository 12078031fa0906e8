//! Claims without events: `run` and `scan` find the processes to end in the process table, again and again.
//!
//! Identity comes from the order of things. A pidfd is opened, then the table is read anew: a process that is found then,
//! and whose pidfd has not become readable, is the one that the pidfd is on. Where it matters under which uids it runs,
//! these are read once more right before each signal.

use std::collections::BTreeMap;
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::Reaper;
use crate::reap::target::Target;
use crate::reap::{
    Escalation, ReapEvent, ReapFailure, ReapOutcome, ReapResult, ReleaseReason, Times, send,
};
use reaper_host::kernel::{ProcessTable, SystemClock};
use reaper_host::source::procfs::Procfs;
use reaper_host::sys;
use reaper_host::sys::cgroup::Cgroup;
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_model::event::{ProcessKey, Uids};
use reaper_model::session::SessionId;

/// Time limit beyond grace and kill timeout: a tree that goes on forking for longer is reported.
const LIMIT: Duration = Duration::from_secs(20);
/// Interval at which new processes are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Time limit for stopping (SIGSTOP) the whole tree.
const HOLD_MAX: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// All claims are on one escalation, that of a default [`Target`].
const ESCALATION: SessionId = SessionId(0);

/// Processes to end, each with the uids under which it is to run, if that matters.
pub type Due = HashMap<ProcessKey, Option<Uids>>;

/// Ends all that `find` finds, until it finds nothing new. `find` is given the processes that are being ended: by that
/// they may have lost what they were found by. It returns those of them that still are to be ended, too.
///
/// # Errors
/// Those of `find`; what has been signalled by then stays so.
pub fn reap_all<E>(
    find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    times: Times,
) -> Result<Vec<ReapResult>, E> {
    match ExitPoll::new() {
        Ok(exits) => PollingReaper::new(Arc::new(exits), times, Signal::SIGTERM).end(false, find),
        Err(error) => {
            tracing::error!("cannot wait for exits: {error}");
            Ok(Vec::new())
        }
    }
}

/// See the module.
pub struct PollingReaper {
    reaper: Reaper,
    results: BTreeMap<ProcessKey, ReapResult>,
    /// Whatever is in there is to be ended.
    cgroup: Option<Arc<Cgroup>>,
    /// See [`PollingReaper::end`].
    holds: bool,
    procfs: Procfs,
    /// SIGKILL has no effect on those that are left.
    stuck: bool,
    /// When to give up, in ns on the monotonic clock.
    end: u64,
}

impl PollingReaper {
    /// Begins without processes. After the grace SIGKILL follows `first_signal`.
    pub fn new(exits: Arc<ExitPoll>, times: Times, first_signal: Signal) -> PollingReaper {
        let (own, clock) = (std::process::id(), Arc::new(SystemClock));
        let mut reaper = Reaper::new(own, clock, exits, times, false);
        let mut ladder = Escalation::new(times, sys::monotonic());
        ladder.first_signal = first_signal;
        reaper.escalations.insert(ESCALATION, ladder);
        // Adds its deadline.
        reaper.update(ESCALATION, |_| ());
        let limit = times.grace.saturating_add(times.kill_timeout);
        PollingReaper {
            reaper,
            results: BTreeMap::new(),
            cgroup: None,
            holds: false,
            procfs: Procfs::default(),
            stuck: false,
            end: sys::after(limit.saturating_add(LIMIT)),
        }
    }

    /// Kills all of the cgroup, found or not, at once when the grace is over.
    pub fn within(self, cgroup: Option<Arc<Cgroup>>) -> PollingReaper {
        PollingReaper { cgroup, ..self }
    }

    /// Ends the grace now.
    pub fn hasten(&mut self) {
        if self.is_gentle() {
            self.reaper
                .update(ESCALATION, |ladder| ladder.kill(sys::monotonic()));
        }
    }

    /// Whether it is not time for SIGKILL.
    pub fn is_gentle(&self) -> bool {
        let escalation = self.reaper.escalations.get(&ESCALATION);
        escalation.is_some_and(Escalation::is_before_kill)
    }

    /// Whether nothing more can be done about those that are left.
    pub fn is_over(&self) -> bool {
        self.stuck || sys::monotonic() >= self.end
    }

    /// Ends all that `find` finds, as [`reap_all`]. Returns what became of each process.
    ///
    /// With `holds` it stops the whole tree first, and again when the grace is over, so that no process ends and leaves a
    /// child that was born after the last look: nothing could tell whose that is. Each goes on with its signal.
    ///
    /// # Errors
    /// Those of `find`.
    pub fn end<E>(
        mut self,
        holds: bool,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<Vec<ReapResult>, E> {
        self.holds = holds;
        if holds {
            self.hold(&mut find)?;
            self.reaper.restart_grace(ESCALATION);
        }
        while !self.is_over() {
            self.round(&mut find)?;
            if self.wait(None) > 0 || find(&self.held())?.keys().any(|key| !self.holds_key(*key)) {
                continue;
            }
            let inside = self.cgroup.as_ref().map(|cgroup| cgroup.pids());
            let hidden = inside.and_then(Result::ok).unwrap_or_default();
            // 0 stands for those of other pid namespaces.
            if !hidden.into_iter().any(|pid| pid > 1) {
                break;
            }
            // /proc shows it to others alone: it can be killed with the cgroup, and not be asked.
            self.hasten();
            thread::sleep(LOOK_AGAIN);
        }
        Ok(self.results())
    }

    /// Looks which processes are to be ended, and sends each the signal that is due by now, unless it has had that. Returns
    /// how many are new. Of more than files can be open for, the rest has its turn when some have ended.
    ///
    /// # Errors
    /// Those of `find`.
    pub fn round<E>(
        &mut self,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<usize, E> {
        self.confirm();
        let deadline = self.reaper.next_deadline();
        if deadline.is_some_and(|at| at <= sys::monotonic()) {
            if self.holds && self.is_gentle() {
                self.hold(&mut find)?;
            }
            self.tick();
        }
        let claimed = self.claim_found(find);
        let claimed = claimed.map(|(count, due)| {
            self.signal_due(&due);
            count
        });
        if !self.is_gentle() {
            self.kill_cgroup();
        }
        claimed
    }

    /// Ends the grace, or looks for progress after that.
    fn tick(&mut self) {
        self.reaper.tick(|key| {
            let state = self.procfs.state(key.pid).unwrap_or('?');
            (state, self.procfs.rss_bytes(key.pid).unwrap_or_default())
        });
        self.stuck |= !self.reaper.reports.is_empty();
        self.collect();
    }

    /// Claims what `find` finds. Returns how many processes are new, and which ones are to be ended.
    fn claim_found<E>(
        &mut self,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<(usize, Due), E> {
        let mut due = find(&self.held());
        let found = due.iter().flat_map(HashMap::keys);
        let mut fresh: Vec<_> = found.copied().filter(|key| !self.holds_key(*key)).collect();
        for key in &fresh {
            self.reaper.insert(*key, Target::default());
            self.reaper.queue.push(*key);
        }
        self.reaper.open_queued();
        for report in self.reaper.take_reports() {
            if let ReapEvent::Outcome { result, .. } = report
                && let ReapOutcome::Failed(ReapFailure::Errno(errno)) = result.outcome
            {
                let (pid, error) = (result.key.pid, nix::Error::from_raw(errno));
                tracing::warn!("pid {pid}: no handle on it: {error}");
            }
        }
        if !fresh.is_empty() {
            due = find(&self.held());
        }
        fresh.retain(|key| {
            let target = self.reaper.targets.get(key);
            let is_found = due.as_ref().is_ok_and(|due| due.contains_key(key));
            let opened = target.filter(|target| target.pidfd.is_some() && !target.has_exited());
            if let Some(target) = opened.filter(|_| is_found) {
                target.watch_exit(*key);
                return true;
            }
            // It is found again, or it is gone.
            self.reaper
                .finish(*key, ReapOutcome::NotSent(ReleaseReason::AlreadyExited));
            false
        });
        self.reaper.update(ESCALATION, |ladder| {
            fresh.iter().for_each(|key| ladder.on_claim(*key));
        });
        self.reaper.queue.clear();
        self.reaper.reports.clear();
        due.map(|due| (fresh.len(), due))
    }

    /// Sends what the escalation asks for, to the oldest first.
    fn signal_due(&mut self, due: &Due) {
        let mut claimed: Vec<_> = self.reaper.targets.keys().copied().collect();
        claimed.sort_unstable_by_key(|key| (key.start, key.pid));
        let mut signalled = Vec::new();
        for key in claimed {
            let Some(target) = self.reaper.targets.get_mut(&key) else {
                continue;
            };
            let uids = || target.pidfd.as_ref()?.handle().uids(key.pid);
            let is_due = |expected: &Option<Uids>| expected.is_none() || *expected == uids();
            if !due.get(&key).is_some_and(is_due) {
                target.obstacle = Some(ReapOutcome::NotSent(ReleaseReason::UidUnreadable));
                continue;
            }
            target.obstacle = None;
            if self.reaper.signal(key, Ok(None), false) {
                signalled.push(key);
            }
        }
        self.reaper.wake(&signalled);
        self.reaper
            .measure_memory(usize::MAX, |pid| self.procfs.memory(pid, true));
    }

    fn hold<E>(
        &mut self,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<(), E> {
        let until = sys::after(HOLD_MAX);
        let mut stopped = HashSet::new();
        while sys::monotonic() < until {
            let (_, due) = self.claim_found(&mut find)?;
            let mut moves = false;
            for (key, target) in &self.reaper.targets {
                let Some(pidfd) = target.pidfd.as_ref().filter(|_| !target.has_exited()) else {
                    continue;
                };
                if due.contains_key(key) && stopped.insert(*key) {
                    moves = true;
                    if let Err(error) = send::signal_own(pidfd.handle(), key.pid, Signal::SIGSTOP) {
                        tracing::debug!("pid {}: cannot be stopped: {error}", key.pid);
                    }
                } else {
                    // Whether it could still start something.
                    moves |= matches!(self.procfs.state(key.pid), Some('R' | 'S' | 'D'));
                }
            }
            if !moves {
                break;
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Kills also what may not be signalled, or was forked since the last look.
    fn kill_cgroup(&mut self) {
        let Some(cgroup) = &self.cgroup else { return };
        let inside = match send::kill_cgroup(cgroup, &self.procfs) {
            Ok(inside) => inside,
            // What was found has been sent SIGKILL anyway.
            Err(error) => return tracing::debug!("a cgroup cannot be killed as one: {error}"),
        };
        for (key, target) in &mut self.reaper.targets {
            if matches!(target.obstacle, Some(ReapOutcome::Failed(_))) && inside.contains(&key.pid)
            {
                target.last_signal = Some(Signal::SIGKILL);
                target.obstacle = None;
                target.first_signal.get_or_insert_with(sys::boot_time);
            }
        }
    }

    /// Waits until it is time to look again, or `wake` is readable. Without `wake` it also returns when no process is left.
    /// Returns how many are.
    pub fn wait(&mut self, wake: Option<BorrowedFd<'_>>) -> usize {
        let mut until = sys::after(LOOK_EVERY);
        if self.is_gentle() {
            until = until.min(self.reaper.next_deadline().unwrap_or(until));
        }
        loop {
            let left = self.confirm();
            let rest = until.saturating_sub(sys::monotonic());
            if left == 0 && wake.is_none() || rest == 0 {
                return left;
            }
            let exits = Arc::clone(&self.reaper.signals);
            let fds = iter::once(exits.as_fd()).chain(wake);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            let rest = Duration::from_nanos(rest.saturating_add(999_999));
            let timeout = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
            let polled = poll(&mut fds, timeout).is_ok();
            if polled && fds.iter().skip(1).any(|fd| fd.any() == Some(true)) {
                return self.confirm();
            }
        }
    }

    /// Processes that are being ended, or were.
    fn held(&self) -> HashSet<ProcessKey> {
        let opened = |(_, target): &(_, &Target)| target.pidfd.is_some();
        let targets = self.reaper.targets.iter().filter(opened);
        let targets = targets.map(|(key, _)| *key);
        targets.chain(self.results.keys().copied()).collect()
    }

    fn holds_key(&self, key: ProcessKey) -> bool {
        self.reaper.is_claimed(key) || self.results.contains_key(&key)
    }

    /// Takes note of exits. Returns how many processes are left.
    fn confirm(&mut self) -> usize {
        while let (1.., exited) = self.reaper.confirm_exits() {
            for key in exited {
                self.reaper.on_unrecorded_exit(key);
            }
        }
        self.collect();
        self.reaper.targets.len()
    }

    /// Moves what is done to the results.
    fn collect(&mut self) {
        for report in self.reaper.take_reports() {
            if let ReapEvent::Outcome { mut result, .. } = report {
                if result.signal.is_none() && matches!(result.outcome, ReapOutcome::Exited(_)) {
                    result.outcome = ReapOutcome::NotSent(ReleaseReason::AlreadyExited);
                }
                self.results.insert(result.key, result);
            }
        }
    }

    /// Returns what became of each process, by pid.
    pub fn results(mut self) -> Vec<ReapResult> {
        self.reaper.give_up(|key, target| {
            let state = || self.procfs.state(key.pid).unwrap_or('?');
            let stuck = || ReapOutcome::Failed(ReapFailure::KillTimeout(state()));
            target.obstacle.unwrap_or_else(stuck)
        });
        self.collect();
        self.results.into_values().collect()
    }
}

#[cfg(test)]
mod tests;
