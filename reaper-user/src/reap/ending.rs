//! Ending processes of which no events tell: who is to be ended is looked for again and
//! again, and identity comes from the order of things. A pidfd is opened, then all are looked at anew: one that is
//! found then, and whose pidfd has not become readable, is the one that the pidfd is on. Where it matters under which
//! uids it runs, that is asked once more right before each signal.

mod target;

use std::cmp::Reverse;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::sys::signal::Signal;

use super::{Escalation, ReapOutcome, SignalStep, Times, files_max, send};
use reaper_host::kernel::{ProcessHandle, ProcessTable};
use reaper_host::source::procfs::{ProcessMemory, Procfs};
use reaper_host::sys;
use reaper_host::sys::cgroup::Cgroup;
use reaper_host::sys::pidfd::{self, Pidfd};
use reaper_model::event::{ExitStatus, ProcessKey, Uids};
use target::Target;

/// How long all of it may take beyond grace and patience: who goes on forking for longer is told of.
const LIMIT: Duration = Duration::from_secs(20);
/// How often those who have come meanwhile are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Who is to be ended, each with the uids under which it is to run, if that matters.
pub type Due = HashMap<ProcessKey, Option<Uids>>;

/// What became of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReapResult {
    pub key: ProcessKey,
    pub outcome: ReapOutcome,
    /// The strongest signal it was sent.
    pub signal: Option<Signal>,
    /// From its first signal to its confirmed end, in ns.
    pub duration: Option<u64>,
    /// What it had right after its first signal; given back once it has ended.
    pub memory: Option<ProcessMemory>,
}

/// Ends all that `find` says is to be ended, up to where it finds nobody new. It is given those who are being
/// ended, who may have lost by that what they were known by, and is to say of each whether it still is to be.
///
/// # Errors
/// Those of `find`; what has been signalled by then stays so.
pub fn reap_all<E>(
    mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    times: Times,
) -> Result<Vec<ReapResult>, E> {
    let mut endings = PollingReaper::new(times, Signal::SIGTERM);
    while !endings.is_over() {
        endings.round(&mut find)?;
        if endings.wait(None) == 0 && endings.holds_all(&find(&endings.held())?) {
            break;
        }
    }
    Ok(endings.told())
}

/// Processes on their way to their end.
pub struct PollingReaper {
    targets: HashMap<ProcessKey, Target>,
    ladder: Escalation,
    /// Whatever is in there is to be ended.
    cgroup: Option<Arc<Cgroup>>,
    procfs: Procfs,
    /// Their memory at the last look, in bytes.
    resident: u64,
    /// Nothing has moved for too long.
    stuck: bool,
    /// When to give up, in ns on the monotonic clock.
    end: u64,
    /// See [`files_max`].
    files_max: u64,
}

impl PollingReaper {
    /// Begins with nobody. After the grace SIGKILL follows the signal that is sent first.
    pub fn new(times: Times, gentle: Signal) -> PollingReaper {
        let now = sys::monotonic();
        let limit = times.grace.saturating_add(times.kill_timeout);
        let limit = limit.saturating_add(LIMIT).as_nanos();
        PollingReaper {
            targets: HashMap::new(),
            ladder: Escalation::new(times, now).with_first_signal(gentle),
            cgroup: None,
            procfs: Procfs::default(),
            resident: u64::MAX,
            stuck: false,
            end: now.saturating_add(u64::try_from(limit).unwrap_or(u64::MAX)),
            files_max: files_max(),
        }
    }

    /// Whatever is in a cgroup of their own is killed at once when the grace is over, found or not.
    pub fn within(self, cgroup: Option<Arc<Cgroup>>) -> PollingReaper {
        PollingReaper { cgroup, ..self }
    }

    /// The grace is over now.
    pub fn hasten(&mut self) {
        if self.ladder.is_before_kill() {
            self.ladder.kill(sys::monotonic());
        }
    }

    /// Whether it is not time for SIGKILL.
    pub fn is_gentle(&self) -> bool {
        self.ladder.is_before_kill()
    }

    /// Whether nothing more can be done about those who are left.
    pub fn is_over(&self) -> bool {
        self.stuck || sys::monotonic() >= self.end
    }

    /// Looks who is to be ended, and signals whoever has not had the signal that is due by now. Gives how many have
    /// come. Of more than files can be open for, the rest has its turn when some have ended.
    ///
    /// # Errors
    /// Those of `find`.
    pub fn round<E>(
        &mut self,
        find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<usize, E> {
        let came = self.signal_found(find);
        if !self.is_gentle() {
            self.kill_cgroup();
        }
        came
    }

    fn signal_found<E>(
        &mut self,
        mut find: impl FnMut(&HashSet<ProcessKey>) -> Result<Due, E>,
    ) -> Result<usize, E> {
        let held = self.held();
        let mut due = find(&held)?;
        let mut opened = HashMap::new();
        let before = self.targets.len();
        let open = self.targets.values().any(|target| target.pidfd.is_some());
        for key in due.keys().filter(|key| !held.contains(*key)) {
            match Pidfd::open(key.pid) {
                Ok(pidfd) if pidfd.file() >= self.files_max && (open || !opened.is_empty()) => {
                    break;
                }
                Ok(pidfd) => {
                    opened.insert(*key, Target::new(pidfd));
                }
                Err(nix::Error::ESRCH) => {}
                Err(error) => tracing::warn!("pid {}: no handle on it: {error}", key.pid),
            }
        }
        if !opened.is_empty() {
            let all = held.into_iter().chain(opened.keys().copied()).collect();
            due = find(&all)?;
            opened.retain(|key, target| due.contains_key(key) && !target.has_exited());
            opened.keys().for_each(|key| self.ladder.on_claim(*key));
            self.targets.extend(opened);
        }
        let now = sys::monotonic();
        if self.ladder.is_before_kill() && self.ladder.deadline() <= now {
            self.ladder.kill(now);
        }
        let (own, step) = (std::process::id(), self.ladder.step(0, false));
        let left = self.targets.iter_mut();
        let mut signalled = Vec::new();
        for (key, target) in left.filter(|(_, target)| target.done.is_none()) {
            target.spared = match due.get(key) {
                Some(None) => false,
                Some(Some(uids)) => target.uids(key.pid) != Some(*uids),
                None => true,
            };
            if !target.spared && target.signal(*key, own, step) {
                signalled.push((key, target));
            }
        }
        if matches!(step, SignalStep::Terminate(_)) {
            signalled.sort_unstable_by_key(|(key, _)| Reverse((key.start, key.pid)));
            for (key, target) in &signalled {
                if let Some(pidfd) = &target.pidfd {
                    // If it is gone already, so much the better.
                    let _ = send::send(pidfd, key.pid, own, SignalStep::Continue);
                }
            }
        }
        for (key, target) in signalled {
            target.measure_memory(*key, &self.procfs);
        }
        Ok(self.targets.len() - before)
    }

    /// Ends whoever may not be signalled, or has forked since they were looked for.
    fn kill_cgroup(&mut self) {
        let Some(cgroup) = &self.cgroup else { return };
        let inside = match send::kill_cgroup(cgroup, &self.procfs) {
            Ok(inside) => inside,
            // Whoever was found has been sent SIGKILL anyway.
            Err(error) => return tracing::debug!("a cgroup cannot be killed as one: {error}"),
        };
        let refused = self.targets.iter_mut().filter(|(key, target)| {
            target.done.is_none() && target.refused.is_some() && inside.contains(&key.pid)
        });
        for (_, target) in refused {
            target.strongest = Some(Signal::SIGKILL);
            target.refused = None;
            target.first_signal = target.first_signal.or_else(|| Some(sys::boot_time()));
        }
    }

    /// Waits until one may have to be looked for again, or something else can be read, which is waited for also when
    /// nobody is left. Gives how many are.
    pub fn wait(&mut self, wake: Option<BorrowedFd<'_>>) -> usize {
        let mut until = sys::monotonic() + LOOK_EVERY.as_nanos() as u64;
        if self.ladder.is_before_kill() {
            until = until.min(self.ladder.deadline());
        }
        loop {
            let left = self.confirm();
            let rest = until.saturating_sub(sys::monotonic());
            if left == 0 && wake.is_none() || rest == 0 {
                self.look_for_progress(left);
                return left;
            }
            let one = self.targets.values().find(|target| target.done.is_none());
            // What has ended meanwhile is seen when its turn comes.
            let rest = Duration::from_nanos(rest.saturating_add(999_999));
            let woken = pidfd::wait_exit_or_readable(
                one.and_then(|target| target.pidfd.as_ref()),
                wake,
                rest,
            );
            if woken {
                return self.confirm();
            }
        }
    }

    /// Whoever is on it.
    pub fn held(&self) -> HashSet<ProcessKey> {
        self.targets.keys().copied().collect()
    }

    /// Whether all of these are on it.
    pub fn holds_all(&self, due: &Due) -> bool {
        due.keys().all(|key| self.targets.contains_key(key))
    }

    /// Takes note of who has ended; how many are left.
    fn confirm(&mut self) -> usize {
        let mut left = 0;
        for (key, target) in self
            .targets
            .iter_mut()
            .filter(|(_, target)| target.done.is_none())
        {
            if target.has_exited() {
                target.pidfd = None;
                target.done = Some((ReapOutcome::Exited(ExitStatus::Unknown), sys::boot_time()));
                self.ladder.on_finished(*key, sys::monotonic());
            } else {
                left += 1;
            }
        }
        left
    }

    fn look_for_progress(&mut self, left: usize) {
        if left == 0 || self.ladder.is_before_kill() || self.ladder.deadline() > sys::monotonic() {
            return;
        }
        let left = self.targets.iter();
        let (mut resident, mut runs) = (0, false);
        for (key, target) in left.filter(|(_, target)| target.done.is_none()) {
            resident += self.procfs.rss_bytes(key.pid).unwrap_or_default();
            // On a busy machine a killed process waits for a processor to exit on.
            runs |= target.strongest == Some(Signal::SIGKILL)
                && self.procfs.state(key.pid) == Some('R');
        }
        if runs || resident < self.resident || !self.ladder.on_stall() {
            self.resident = resident;
            self.ladder.on_progress(sys::monotonic());
        } else {
            self.stuck = true;
        }
    }

    /// What became of each, by pid.
    pub fn told(mut self) -> Vec<ReapResult> {
        // Somebody else may have seen their end first.
        self.confirm();
        let targets = self.targets.into_iter();
        let told = targets.map(|(key, target)| target.told(key, &self.procfs));
        let mut told: Vec<ReapResult> = told.collect();
        told.sort_by_key(|ending| ending.key);
        told
    }
}

#[cfg(test)]
mod tests;
