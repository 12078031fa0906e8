//! Ending what is left of a command.

use std::cell::Cell;
use std::sync::Arc;

use hashbrown::HashSet;

use super::cgroup::RunCgroup;
use super::received_signal::ReceivedSignal;
use super::report::{children, ended};
use super::supervise::SupervisedCommand;
use super::{RunOutcome, RunReport, Survivor};
use crate::reap::{Due, PollingReaper, ReapResult};
use reaper_host::source::procfs::descendants::Descendant;
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_model::event::ProcessKey;

/// More than so many who are started amid the end are no clean-up.
const BIRTHS_MAX: usize = 256;

impl SupervisedCommand<'_> {
    /// Ends all that descend from this process, the command too if it lives. Gives what became of each.
    pub(super) fn end_tree(&mut self) -> Vec<ReapResult> {
        if !self.has_processes() {
            return Vec::new();
        }
        // Each of them takes one.
        let _files = sys::many_files();
        let led = self.end.is_some() || !self.run.leader_first || self.end_leader();
        let cgroup = self.leaf.as_ref().map(RunCgroup::cgroup);
        let exits = Arc::clone(&self.exits);
        let mut endings = PollingReaper::new(exits, self.run.times, self.run.signal).within(cgroup);
        if !led {
            endings.hasten();
        }
        let (procfs, own) = (Procfs::default(), std::process::id());
        while self.has_processes() && !endings.is_over() {
            let (gentle, births) = (endings.is_gentle(), Cell::new(0));
            let find = |held: &HashSet<ProcessKey>| -> Result<Due, ProcfsError> {
                let inside = || {
                    let inside = self.leaf.as_ref().map(RunCgroup::pids).transpose();
                    let inside = inside.inspect_err(|error| tracing::debug!("{error}"));
                    // That there is no telling what is in there is no reason to spare the others.
                    Ok(inside.ok().flatten().unwrap_or_default())
                };
                let mut all = procfs.descendants(own, inside)?;
                if gentle && !held.is_empty() {
                    births.set(leave_to_makers(&mut all, held));
                }
                Ok(all.into_iter().map(|one| (one.key, None)).collect())
            };
            let fresh = match endings.round(find) {
                Ok(fresh) => fresh,
                Err(error) => {
                    tracing::error!("{error}");
                    0
                }
            };
            let mut at_once = births.get() > BIRTHS_MAX;
            let again = fresh > 0 && !endings.is_gentle();
            // Who forks without end is not to have time for it.
            if !again && !at_once {
                endings.wait(Some(self.signals()));
            }
            at_once |= self
                .read_signals()
                .iter()
                .any(ReceivedSignal::requests_termination);
            if at_once {
                endings.hasten();
            }
        }
        endings.results()
    }

    /// A child of this process, or whoever is in the command's cgroup.
    fn has_processes(&mut self) -> bool {
        // If there is no telling, it is asked again, as long as there is time.
        let in_leaf = |leaf: &RunCgroup| leaf.pids().map_or(true, |pids| !pids.is_empty());
        self.wait_children() || self.leaf.as_ref().is_some_and(in_leaf)
    }

    pub(super) fn report(&mut self, outcome: RunOutcome, endings: &[ReapResult]) -> RunReport {
        let mut living = HashSet::new();
        if self.has_processes() {
            living = children();
            let inside = self.leaf.as_ref().and_then(|leaf| leaf.pids().ok());
            living.extend(inside.unwrap_or_default());
        }
        let others = endings.iter().filter(|ending| ending.key.pid != self.pid);
        let (count, killed) = ended(others.clone());
        let memory = others.filter_map(|ending| ending.memory);
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
            ended: count,
            killed,
            memory_rss: memory.map(|memory| memory.rss).sum(),
            survivors: Survivor::all(endings, living),
            errors: Vec::new(),
        }
    }
}

/// Takes out whoever was started by one who has been asked to end, as what that needs for a clean-up: it has the same
/// time. Gives how many these are.
fn leave_to_makers(all: &mut Vec<Descendant>, held: &HashSet<ProcessKey>) -> usize {
    let mut makers: HashSet<u32> = held.iter().map(|key| key.pid).collect();
    let before = all.len();
    all.retain(|one| {
        let left = makers.contains(&one.parent) && !held.contains(&one.key);
        if left {
            makers.insert(one.key.pid);
        }
        !left
    });
    before - all.len()
}
