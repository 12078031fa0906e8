//! Ends the process tree of a command.

use std::cell::Cell;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::cgroup::RunCgroup;
use super::received_signal::ReceivedSignal;
use super::report::{EndedProcess, LISTED_MAX, children, ended};
use super::supervise::SupervisedCommand;
use super::{RunOutcome, RunReport, Survivor};
use crate::reap::{Due, DueProcess, PollingReaper, ReapOutcome, ReapResult};
use reaper_host::source::procfs::descendants::Descendant;
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_model::event::ProcessKey;

/// Names (`comm`) of the processes of a tree, read before they are signalled. At most [`LISTED_MAX`].
pub(super) type Names = HashMap<ProcessKey, String>;

/// Number of living processes, forked during the grace, above which SIGKILL follows at once: that many are no clean-up.
const FORKS_MAX: usize = 256;

impl SupervisedCommand<'_> {
    /// Ends the command, all other descendants of this process, and the processes in the command's cgroup. Returns the
    /// result for each process that it signalled or tried to signal, and the names of the processes; nothing if none is
    /// left.
    pub(super) fn end_tree(&mut self) -> (Vec<ReapResult>, Names) {
        let mut names = Names::new();
        if !self.has_processes() {
            return (Vec::new(), names);
        }
        // Each process takes a pidfd.
        let _files = sys::many_files();
        let leader_done = self.end.is_some() || !self.run.leader_first || self.end_leader();
        let cgroup = self.cgroup.as_ref().map(RunCgroup::cgroup);
        let exits = Arc::clone(&self.exits);
        let mut reaper =
            PollingReaper::new(exits, self.run.times, self.run.signal).with_cgroup(cgroup);
        if !leader_done {
            reaper.end_grace();
        }
        let (procfs, own) = (Procfs::default(), std::process::id());
        let mut warned = false;
        while self.has_processes() && !reaper.is_finished() {
            let (gentle, forks) = (reaper.is_in_grace(), Cell::new(0));
            let find = |signalled: &HashSet<ProcessKey>| -> Result<Due, ProcfsError> {
                let inside = || {
                    let inside = self.cgroup.as_ref().map(RunCgroup::pids).transpose();
                    let inside = inside.inspect_err(|error| tracing::debug!("{error}"));
                    // Descendants are ended even if the cgroup cannot be read.
                    Ok(inside.ok().flatten().unwrap_or_default())
                };
                let mut all = procfs.descendants(own, inside)?;
                for process in &all {
                    if names.len() < LISTED_MAX && !names.contains_key(&process.key) {
                        names.insert(process.key, process.comm());
                    }
                }
                if gentle && !signalled.is_empty() {
                    forks.set(remove_forked_since(&mut all, signalled));
                }
                Ok(all
                    .into_iter()
                    .map(|process| (process.key, DueProcess::default()))
                    .collect())
            };
            let new = match reaper.round(find) {
                Ok(new) => new,
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::error!(
                            "cannot find what the command left behind: {error}; trying again until the time limit of \
                             the clean-up, then listing what is left"
                        );
                    }
                    0
                }
            };
            let mut at_once = forks.get() > FORKS_MAX;
            let again = new > 0 && !reaper.is_in_grace();
            // No wait while processes fork: it would give a fork bomb time.
            if !again && !at_once {
                reaper.wait(Some(self.signals()));
            }
            at_once |= self
                .read_signals()
                .iter()
                .any(ReceivedSignal::requests_termination);
            if at_once {
                reaper.end_grace();
            }
        }
        (reaper.results(), names)
    }

    /// Reaps exited children. Returns whether this process has other children or the command's cgroup has processes.
    fn has_processes(&mut self) -> bool {
        // An unreadable cgroup counts as occupied. The time limit of the reaper ends the loop.
        let is_occupied = |cgroup: &RunCgroup| cgroup.pids().map_or(true, |pids| !pids.is_empty());
        self.wait_children() || self.cgroup.as_ref().is_some_and(is_occupied)
    }

    /// Creates the report. `results` and `names` are those of [`Self::end_tree`]. Processes that still live are
    /// survivors. The counts of ended processes leave out the command itself.
    pub(super) fn report(
        &mut self,
        outcome: RunOutcome,
        results: &[ReapResult],
        names: &Names,
    ) -> RunReport {
        let mut living = HashSet::new();
        if self.has_processes() {
            living = children();
            let inside = self.cgroup.as_ref().and_then(|cgroup| cgroup.pids().ok());
            living.extend(inside.unwrap_or_default());
        }
        let others = results.iter().filter(|result| result.key.pid != self.pid);
        let (count, killed) = ended(others.clone());
        let memory = others.filter_map(|result| result.memory);
        let command = std::iter::once(self.run.command.get_program());
        let command = command.chain(self.run.command.get_args());
        RunReport {
            schema: 1,
            run_id: self.run.recording.as_ref().map(|own| own.id().to_owned()),
            name: self.run.name.clone(),
            session: self.run.session.clone(),
            agent: self.run.agent.clone(),
            command: command
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            pid: self.pid,
            outcome,
            end: self.end,
            duration: self.age(),
            limit: match outcome {
                RunOutcome::Timeout => self.run.timeout,
                RunOutcome::Idle => self.run.idle,
                _ => None,
            },
            ended: count,
            killed,
            processes: self.listed(results, names),
            memory_rss: memory.map(|memory| memory.rss).sum(),
            survivors: Survivor::all(results, living),
            errors: Vec::new(),
        }
    }

    /// Returns the processes that were ended, the command first. With `leader_first` the command may have been ended
    /// before there were results.
    fn listed(&self, results: &[ReapResult], names: &Names) -> Vec<EndedProcess> {
        let one = |result: &ReapResult| {
            let is_exited = matches!(result.outcome, ReapOutcome::Exited(_));
            let signal = result.signal.filter(|_| is_exited)?;
            Some(EndedProcess {
                pid: result.key.pid,
                command: names.get(&result.key).cloned().unwrap_or_default(),
                signal: signal.as_str(),
            })
        };
        let (command, others): (Vec<_>, Vec<_>) = results
            .iter()
            .filter_map(one)
            .partition(|process| process.pid == self.pid);
        let alone = self.leader.clone().filter(|_| command.is_empty());
        let all = alone.into_iter().chain(command).chain(others);
        all.take(LISTED_MAX).collect()
    }
}

/// Removes the new descendants of signalled processes from `all`, and returns how many it removed.
///
/// A signalled process may start others to clean up. They get no signal of their own before the grace expires.
fn remove_forked_since(all: &mut Vec<Descendant>, signalled: &HashSet<ProcessKey>) -> usize {
    let mut parents: HashSet<u32> = signalled.iter().map(|key| key.pid).collect();
    let before = all.len();
    all.retain(|process| {
        let is_new = parents.contains(&process.parent) && !signalled.contains(&process.key);
        if is_new {
            parents.insert(process.key.pid);
        }
        !is_new
    });
    before - all.len()
}
