//! Ending what is left of a command.

use std::cell::Cell;

use hashbrown::HashSet;
use nix::sys::signal::Signal;

use super::cgroup::RunCgroup;
use super::received_signal::ReceivedSignal;
use super::report::children;
use super::supervise::SupervisedCommand;
use super::{RunOutcome, RunReport, Survivor};
use crate::reap::{Due, PollingReaper, ReapOutcome as Reaped, ReapResult};
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
        let mut endings = PollingReaper::new(self.run.times, self.run.signal).within(cgroup);
        if !led {
            endings.hasten();
        }
        let (procfs, own) = (Procfs::default(), std::process::id());
        while self.has_processes() && !endings.is_over() {
            let (gentle, births) = (endings.is_gentle(), Cell::new(0));
            let find = |held: &HashSet<ProcessKey>| -> Result<Due, ProcfsError> {
                let with_leaf = self.leaf.as_ref().map(|leaf| {
                    let all = procfs.descendants(own, || leaf.pids());
                    all.inspect_err(|error| tracing::debug!("{error}"))
                });
                // That there is no telling who is in there is no reason to spare the others.
                let mut all = match with_leaf {
                    Some(Ok(all)) => all,
                    Some(Err(_)) | None => procfs.descendants(own, || Ok(HashSet::new()))?,
                };
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
        endings.told()
    }

    /// A child of this process, or whoever is in the command's cgroup.
    fn has_processes(&mut self) -> bool {
        // If there is no telling, it is asked again, as long as there is time.
        let in_leaf = |leaf: &RunCgroup| leaf.pids().map_or(true, |pids| !pids.is_empty());
        self.wait_children() || self.leaf.as_ref().is_some_and(in_leaf)
    }

    pub(super) fn report(&mut self, outcome: RunOutcome, endings: &[ReapResult]) -> RunReport {
        let others = endings.iter().filter(|ending| ending.key.pid != self.pid);
        let ended = others.filter(|ending| matches!(ending.outcome, Reaped::Exited(_)));
        let (mut count, mut killed, mut memory_rss) = (0, 0, 0);
        for ending in ended {
            count += 1;
            killed += usize::from(ending.signal == Some(Signal::SIGKILL));
            memory_rss += ending.memory.map_or(0, |memory| memory.rss);
        }
        let mut left = Vec::new();
        // Most leave nothing, and it takes a while to begin with /proc.
        if !endings.is_empty() {
            let procfs = Procfs::default();
            left.extend(endings.iter().filter_map(|one| Survivor::of(one, &procfs)));
        }
        if self.has_processes() {
            let mut pids = children();
            let inside = self.leaf.as_ref().and_then(|leaf| leaf.pids().ok());
            pids.extend(inside.unwrap_or_default());
            let unseen = Survivor::unseen(pids, &left);
            left.extend(unseen);
        }
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
            memory_rss,
            survivors: left,
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
