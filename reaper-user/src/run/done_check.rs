//! Runs the done check (`--done-when`): a command whose status 0 says that the run is done.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;
use nix::sys::signal::Signal;

use super::DoneWhen;
use crate::reap::{Due, DueProcess, PollingReaper, Times};
use reaper_host::advice::Advised as _;
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_host::sys::child::{self, ChildChange, InheritedSignals};
use reaper_host::sys::exit_poll::ExitPoll;

/// Time limit for one check.
const CHECK_MAX: Duration = Duration::from_secs(30);

/// Done check of a run. At most one process of it runs at a time.
pub(super) struct DoneCheck<'a> {
    done_when: &'a DoneWhen,
    inherited: InheritedSignals,
    running: Option<RunningCheck>,
    /// Time of the next check (`CLOCK_MONOTONIC`, ns).
    next_ns: u64,
    /// Whether the last check succeeded.
    done: bool,
    /// Whether no more checks follow: one has finished that started after the command's exit, or they were cancelled.
    is_final: bool,
    /// Whether a warning about the check has been logged.
    warned: bool,
}

#[derive(Clone, Copy)]
struct RunningCheck {
    pid: u32,
    /// Time limit (`CLOCK_MONOTONIC`, ns).
    deadline_ns: u64,
    /// Whether the command had exited before the check started.
    after_exit: bool,
}

impl<'a> DoneCheck<'a> {
    pub(super) fn new(done_when: &'a DoneWhen, inherited: InheritedSignals) -> DoneCheck<'a> {
        DoneCheck {
            done_when,
            inherited,
            running: None,
            next_ns: sys::after(done_when.every),
            done: false,
            is_final: false,
            warned: false,
        }
    }

    /// Returns whether the last check that has finished succeeded; false before the first.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// Returns whether no more checks follow.
    pub(super) fn is_final(&self) -> bool {
        self.is_final
    }

    /// Starts a check if one is due or the command has exited, but not after a success or the final check. At most one
    /// runs at a time. Kills a check that runs longer than [`CHECK_MAX`], which counts as failed.
    pub(super) fn poll(&mut self, command_exited: bool) {
        let now = sys::monotonic();
        match self.running {
            Some(running) if running.deadline_ns <= now => {
                self.warn(&format!(
                    "did not exit within {CHECK_MAX:?}; it was killed, and the run counts as not done yet"
                ));
                kill_subtree(running.pid);
                self.finish(running, false);
            }
            Some(_) => return,
            None => {}
        }
        if !self.is_final && (command_exited || self.next_ns <= now) && !self.done {
            self.start(command_exited);
        }
    }

    /// Kills a running check, which counts as failed. No more checks follow.
    pub(super) fn cancel(&mut self) {
        if let Some(running) = self.running {
            kill_subtree(running.pid);
            self.finish(running, false);
        }
        self.is_final = true;
    }

    /// Returns when [`Self::poll`] has something to do (`CLOCK_MONOTONIC`, ns). Returns `None` if no more checks
    /// follow.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.running {
            Some(running) => Some(running.deadline_ns),
            None => (!self.is_final).then_some(self.next_ns),
        }
    }

    /// Records the result of the running check if it is this child and has exited. Does nothing for other children.
    pub(super) fn on_child_change(&mut self, pid: u32, change: ChildChange) {
        match (self.running, change) {
            (Some(running), ChildChange::Exited(_) | ChildChange::Killed(_))
                if running.pid == pid =>
            {
                self.finish(running, change == ChildChange::Exited(0));
            }
            _ => {}
        }
    }

    fn start(&mut self, after_exit: bool) {
        let mut command = Command::new("sh");
        command.arg("-c").arg(&self.done_when.command);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Its own process group, so that the terminal does not signal it.
        command.process_group(0);
        self.inherited.restore_signals(&mut command);
        // The record does not name it: there are too many checks. So it must not outlive this process.
        child::kill_on_parent_death(&mut command);
        match command.spawn() {
            Ok(child) => {
                self.running = Some(RunningCheck {
                    pid: child.id(),
                    deadline_ns: sys::after(CHECK_MAX),
                    after_exit,
                });
            }
            Err(error) => {
                self.warn(&format!(
                    "cannot be started: {}; the run counts as not done yet",
                    error.advised()
                ));
                self.next_ns = sys::after(self.done_when.every);
                self.is_final = after_exit;
            }
        }
    }

    fn finish(&mut self, running: RunningCheck, done: bool) {
        self.running = None;
        self.done = done;
        self.is_final = running.after_exit;
        self.next_ns = sys::after(self.done_when.every);
    }

    /// Logs a problem with the check, but only the first one of a run.
    fn warn(&mut self, problem: &str) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                "the --done-when check `{}` {problem}",
                self.done_when.command
            );
        }
    }
}

/// Sends SIGKILL to a child of this process and to its descendants, and does not wait for their exit. The child must
/// not have been waited for. Logs a warning if that fails.
fn kill_subtree(pid: u32) {
    let procfs = Procfs::default();
    let exits = match ExitPoll::new() {
        Ok(exits) => Arc::new(exits),
        Err(error) => {
            return tracing::warn!(
                "cannot kill the --done-when check (pid {pid}), which is ended with the run: {}",
                error.advised()
            );
        }
    };
    let mut reaper = PollingReaper::new(exits, Times::default(), Signal::SIGKILL);
    reaper.end_grace();
    let find = |_: &_| -> Result<Due, ProcfsError> {
        let child = || Ok(HashSet::from_iter([pid]));
        let all = procfs.subtrees(&HashSet::new(), child)?;
        Ok(all
            .into_iter()
            .map(|process| (process.key, DueProcess::default()))
            .collect())
    };
    // One round is enough: processes that it forks meanwhile are ended with the rest of the run.
    if let Err(error) = reaper.round(find) {
        tracing::warn!(
            "cannot kill the --done-when check (pid {pid}), which is ended with the run: {error}"
        );
    }
}

#[cfg(test)]
mod tests;
