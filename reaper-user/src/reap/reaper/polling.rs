//! Claims without events: `run` and `scan` search the process table repeatedly.
//!
//! The order of the steps proves the identity. A pidfd is opened, and then the table is read again. If the process is
//! found then, and its pidfd is not readable, the pidfd refers to that process. If the uids matter, they are read once
//! more right before each signal.

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
use reaper_host::advice::Advised as _;
use reaper_host::kernel::{ProcessTable, SystemClock};
use reaper_host::source::procfs::Procfs;
use reaper_host::sys;
use reaper_host::sys::cgroup::Cgroup;
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_model::event::{ProcessKey, Uids};
use reaper_model::leftover::Grace;
use reaper_model::session::SessionId;

/// Time limit beyond grace and kill timeout. A tree that still forks after that is reported as not ended.
const LIMIT: Duration = Duration::from_secs(20);
/// Interval of the searches for new processes.
const SEARCH_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for stopping (SIGSTOP) the whole tree.
const HOLD_MAX: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The only escalation, which is that of a default [`Target`].
const ESCALATION: SessionId = SessionId(0);

/// Processes to end.
pub type Due = HashMap<ProcessKey, DueProcess>;

/// Process to end.
#[derive(Clone, Default)]
pub struct DueProcess {
    /// Uids without which it gets no signal, if they matter.
    pub uids: Option<Uids>,
    /// Grace of its program, and the process that it is left to. `reaper run` has none, because its user sets the grace.
    pub grace: Grace,
}

/// Ends all processes that `find` returns, until it returns no new one. `find` gets the claimed processes, since a
/// signalled process may no longer match what it was found by. It must return those that are still to be ended, too.
///
/// Sends SIGTERM, and SIGKILL after the grace. Gives up when SIGKILL has no effect, or 20 s after grace and kill
/// timeout. Returns the result for each process. If exits cannot be watched, logs that, signals nothing, and returns no
/// result.
///
/// # Errors
/// Returns the error of `find`. Signals that were sent before cannot be taken back.
pub fn reap_all<E>(
    find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    times: Times,
) -> Result<Vec<ReapResult>, E> {
    match ExitPoll::new() {
        Ok(exits) => PollingReaper::new(Arc::new(exits), times, Signal::SIGTERM).end(false, find),
        Err(error) => {
            tracing::error!(
                "nothing was signalled, as process exits cannot be watched: {}",
                error.advised()
            );
            Ok(Vec::new())
        }
    }
}

/// Reaper that searches the process table instead of following events.
pub struct PollingReaper {
    reaper: Reaper,
    results: BTreeMap<ProcessKey, ReapResult>,
    /// Cgroup whose processes are all to be ended.
    cgroup: Option<Arc<Cgroup>>,
    /// Whether the tree is stopped before it is signalled, see [`PollingReaper::end`].
    holds: bool,
    procfs: Procfs,
    /// Whether the remaining processes do not exit after SIGKILL.
    stuck: bool,
    /// Time limit of the whole work, in ns of CLOCK_MONOTONIC.
    end: u64,
}

impl PollingReaper {
    /// Creates a reaper without claims. SIGKILL follows `first_signal` after the grace.
    pub fn new(exits: Arc<ExitPoll>, times: Times, first_signal: Signal) -> PollingReaper {
        let (own_pid, clock) = (std::process::id(), Arc::new(SystemClock));
        let mut reaper = Reaper::new(own_pid, clock, exits, times, false);
        let mut escalation = Escalation::new(times, sys::monotonic());
        escalation.first_signal = first_signal;
        reaper.escalations.insert(ESCALATION, escalation);
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

    /// Adds a cgroup. When the grace expires, all of its processes are killed at once, whether found or not.
    #[cfg(target_os = "linux")]
    pub fn with_cgroup(self, cgroup: Option<Arc<Cgroup>>) -> PollingReaper {
        PollingReaper { cgroup, ..self }
    }

    /// Ends the grace now, so the next round sends SIGKILL. Does nothing after that.
    pub fn end_grace(&mut self) {
        if self.is_in_grace() {
            self.reaper
                .update(ESCALATION, |escalation| escalation.kill(sys::monotonic()));
        }
    }

    /// Returns whether the grace has not expired yet.
    pub fn is_in_grace(&self) -> bool {
        let escalation = self.reaper.escalations.get(&ESCALATION);
        escalation.is_some_and(Escalation::is_before_kill)
    }

    /// Returns whether the remaining processes cannot be ended, or the time limit is reached.
    pub fn is_finished(&self) -> bool {
        self.stuck || sys::monotonic() >= self.end
    }

    /// Ends all processes that `find` returns, as [`reap_all`]. Returns the result for each.
    ///
    /// With `holds`, the whole tree is stopped first, and again when the grace expires. A process then cannot exit and
    /// leave a child that was forked after the last search and has no known parent. SIGCONT follows the signal.
    /// Stopping takes at most one second.
    ///
    /// # Errors
    /// Returns the error of `find`.
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
        while !self.is_finished() {
            self.round(&mut find)?;
            if self.wait(None) > 0 || find(&self.known())?.keys().any(|key| !self.knows(*key)) {
                continue;
            }
            let inside = self.cgroup.as_ref().map(|cgroup| cgroup.pids());
            let hidden = inside.and_then(Result::ok).unwrap_or_default();
            // Processes of other pid namespaces are listed as 0.
            if !hidden.into_iter().any(|pid| pid > 1) {
                break;
            }
            // /proc hides it from this user. It can be killed with the cgroup, but gets no SIGTERM.
            self.end_grace();
            thread::sleep(RETRY_INTERVAL);
        }
        Ok(self.results())
    }

    /// Searches for new processes and sends each claimed process the signal that is due. Returns the number of new
    /// processes. If too many files are open, further processes are handled in later rounds.
    ///
    /// # Errors
    /// Returns the error of `find`.
    pub fn round<E>(
        &mut self,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<usize, E> {
        self.confirm();
        let deadline = self.reaper.next_deadline();
        if deadline.is_some_and(|at| at <= sys::monotonic()) {
            if self.holds && self.is_in_grace() {
                self.hold(&mut find)?;
            }
            self.tick();
        }
        let claimed = self.claim_found(find);
        let claimed = claimed.map(|(count, due)| {
            self.signal_due(&due);
            count
        });
        if !self.is_in_grace() {
            self.kill_cgroup();
        }
        claimed
    }

    /// Ends the grace, or checks for progress after that.
    fn tick(&mut self) {
        self.reaper.tick(|key| {
            let state = self.procfs.state(key.pid).unwrap_or('?');
            (state, self.procfs.rss_bytes(key.pid).unwrap_or_default())
        });
        self.stuck |= !self.reaper.reports.is_empty();
        self.collect();
    }

    /// Claims what `find` returns, opens pidfds, and calls `find` again to confirm the new processes. Unconfirmed ones
    /// are released. Returns the number of new processes, and all processes to end.
    fn claim_found<E>(
        &mut self,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<(usize, Due), E> {
        let mut due = find(&self.known());
        let found = due.iter().flat_map(HashMap::keys);
        let mut new: Vec<_> = found.copied().filter(|key| !self.knows(*key)).collect();
        for key in &new {
            self.reaper.insert(*key, Target::default());
            self.reaper.queue.push(*key);
        }
        self.reaper.open_queued();
        for report in self.reaper.take_reports() {
            if let ReapEvent::Outcome { result, .. } = report
                && let ReapOutcome::Failed(ReapFailure::Errno(errno)) = result.outcome
            {
                let (pid, error) = (result.key.pid, nix::Error::from_raw(errno));
                tracing::warn!(
                    "cannot open a pidfd to signal process {pid}: {}; trying again",
                    error.advised()
                );
            }
        }
        if !new.is_empty() {
            due = find(&self.known());
        }
        new.retain(|key| {
            let target = self.reaper.targets.get_mut(key);
            let found = due.as_ref().ok().and_then(|due| due.get(key));
            let opened = target.filter(|target| target.pidfd.is_some() && !target.has_exited());
            if let (Some(target), Some(found)) = (opened, found) {
                target.watch_exit(*key);
                if found.grace != Grace::default() {
                    let kill_at = sys::monotonic().saturating_add(found.grace.ns);
                    (target.grace, target.kill_at) = (found.grace.ns, kill_at);
                    target.needed_by = found.grace.needed_by;
                    let limit =
                        sys::nanoseconds(self.reaper.times.kill_timeout.saturating_add(LIMIT));
                    self.end = self.end.max(kill_at.saturating_add(limit));
                }
                return true;
            }
            // It has exited, or the next search finds it again.
            self.reaper
                .finish(*key, ReapOutcome::NotSent(ReleaseReason::AlreadyExited));
            false
        });
        self.reaper.update(ESCALATION, |escalation| {
            new.iter().for_each(|key| escalation.on_claim(*key));
        });
        self.reaper.queue.clear();
        self.reaper.reports.clear();
        due.map(|due| (new.len(), due))
    }

    /// Sends each claimed process the signal that is due, oldest first. Skips those that are not in `due`, or no longer
    /// have the uids there.
    fn signal_due(&mut self, due: &Due) {
        let mut claimed: Vec<_> = self.reaper.targets.keys().copied().collect();
        claimed.sort_unstable_by_key(|key| (key.start, key.pid));
        let mut signalled = Vec::new();
        for key in claimed {
            let Some(target) = self.reaper.targets.get_mut(&key) else {
                continue;
            };
            let uids = || target.pidfd.as_ref()?.handle().uids(key.pid);
            let is_due = |due: &DueProcess| due.uids.is_none() || due.uids == uids();
            if !due.get(&key).is_some_and(is_due) {
                target.obstacle = Some(ReapOutcome::NotSent(ReleaseReason::UidUnreadable));
                continue;
            }
            target.obstacle = None;
            if self.reaper.is_left(key) {
                continue;
            }
            if self.reaper.signal(key, Ok(None), false) {
                signalled.push(key);
            }
        }
        self.reaper.wake(&signalled);
        self.reaper
            .measure_memory(usize::MAX, |pid| self.procfs.memory(pid, true));
    }

    /// Stops the whole tree by SIGSTOP. Searches for new processes until all are stopped, for at most [`HOLD_MAX`].
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
                        tracing::debug!("pid {}: cannot stop it: {error}", key.pid);
                    }
                } else {
                    // In these states it can still fork.
                    moves |= matches!(self.procfs.state(key.pid), Some('R' | 'S' | 'D'));
                }
            }
            if !moves {
                break;
            }
            thread::sleep(RETRY_INTERVAL);
        }
        Ok(())
    }

    /// Kills the cgroup, with processes that may not be signalled or were forked after the last search. Does nothing
    /// without a cgroup.
    fn kill_cgroup(&mut self) {
        let Some(cgroup) = &self.cgroup else { return };
        let inside = match send::kill_cgroup(cgroup, &self.procfs) {
            Ok(inside) => inside,
            // All known processes have been sent SIGKILL already.
            Err(error) => return tracing::debug!("cannot kill the cgroup: {error}"),
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

    /// Waits until the next search or until `wake` is readable. Without `wake`, it also returns when no process is
    /// left. The next search is after 200 ms, or earlier if the grace expires. Returns the number of
    /// claimed processes that are left.
    pub fn wait(&mut self, wake: Option<BorrowedFd<'_>>) -> usize {
        let mut until = sys::after(SEARCH_INTERVAL);
        if self.is_in_grace() {
            until = until.min(self.reaper.next_deadline().unwrap_or(until));
        }
        loop {
            let left = self.confirm();
            let remaining_ns = until.saturating_sub(sys::monotonic());
            if left == 0 && wake.is_none() || remaining_ns == 0 {
                return left;
            }
            let exits = Arc::clone(&self.reaper.signals);
            let fds = iter::once(exits.as_fd()).chain(wake);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            let remaining = Duration::from_nanos(remaining_ns.saturating_add(999_999));
            let timeout = PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX);
            let polled = poll(&mut fds, timeout).is_ok();
            if polled && fds.iter().skip(1).any(|fd| fd.any() == Some(true)) {
                return self.confirm();
            }
        }
    }

    /// Returns the claimed processes with a pidfd, and those with a result.
    fn known(&self) -> HashSet<ProcessKey> {
        let opened = |(_, target): &(_, &Target)| target.pidfd.is_some();
        let targets = self.reaper.targets.iter().filter(opened);
        let targets = targets.map(|(key, _)| *key);
        targets.chain(self.results.keys().copied()).collect()
    }

    /// Returns whether a process is claimed or has a result.
    fn knows(&self, key: ProcessKey) -> bool {
        self.reaper.is_claimed(key) || self.results.contains_key(&key)
    }

    /// Finishes the claims of processes that have exited. Returns the number of claims that are left.
    fn confirm(&mut self) -> usize {
        while let (1.., exited) = self.reaper.confirm_exits() {
            for key in exited {
                self.reaper.on_unrecorded_exit(key);
            }
        }
        self.collect();
        self.reaper.targets.len()
    }

    /// Moves reported outcomes to the results, and drops all other reports. An exit without any signal becomes
    /// `AlreadyExited`.
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

    /// Returns the result for each claimed process, by pid. Gives up the remaining claims: living processes count as
    /// failed, or have the reason why they could not be signalled.
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
