//! Asking a command whether a run is done.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;
use nix::sys::signal::Signal;

use super::DoneWhen;
use crate::reap::{Due, PollingReaper, Times};
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_host::sys::child::{self, ChildChange, InheritedSignals};
use reaper_host::sys::exit_poll::ExitPoll;

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Asks again and again, one at a time.
pub(super) struct DoneProbe<'a> {
    what: &'a DoneWhen,
    inherited: InheritedSignals,
    /// Who is being asked, since when, and whether the command was gone by then.
    asked: Option<RunningProbe>,
    /// When to ask next.
    next: u64,
    done: bool,
    last_word: bool,
    /// It has been said that it gives no answers.
    failing: bool,
}

#[derive(Clone, Copy)]
struct RunningProbe {
    pid: u32,
    until: u64,
    at_the_end: bool,
}

impl<'a> DoneProbe<'a> {
    pub(super) fn new(what: &'a DoneWhen, inherited: InheritedSignals) -> DoneProbe<'a> {
        DoneProbe {
            what,
            inherited,
            asked: None,
            next: sys::after(what.every),
            done: false,
            last_word: false,
            failing: false,
        }
    }

    /// Whether the last answer was yes.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether it has answered since the command has ended.
    pub(super) fn is_final(&self) -> bool {
        self.last_word
    }

    /// Asks if it is time to, or the command has ended; gives up who does not answer.
    pub(super) fn go_on(&mut self, ended: bool) {
        let now = sys::monotonic();
        match self.asked {
            Some(asked) if asked.until <= now => {
                self.complain(&format!("has not answered in {PATIENCE:?}"));
                end_below(asked.pid);
                self.answered(asked, false);
            }
            Some(_) => return,
            None => {}
        }
        if !self.last_word && (ended || self.next <= now) && !self.done {
            self.ask(ended);
        }
    }

    /// Nobody waits for an answer any more.
    pub(super) fn give_up(&mut self) {
        if let Some(asked) = self.asked {
            end_below(asked.pid);
            self.answered(asked, false);
        }
        self.last_word = true;
    }

    /// When there is something to do, in ns on the monotonic clock.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.asked {
            Some(asked) => Some(asked.until),
            None => (!self.last_word).then_some(self.next),
        }
    }

    /// A child of this process has changed.
    pub(super) fn note(&mut self, pid: u32, change: ChildChange) {
        match (self.asked, change) {
            (Some(asked), ChildChange::Exited(_) | ChildChange::Killed(_)) if asked.pid == pid => {
                self.answered(asked, change == ChildChange::Exited(0));
            }
            _ => {}
        }
    }

    fn ask(&mut self, at_the_end: bool) {
        let mut command = Command::new("sh");
        command.arg("-c").arg(&self.what.command);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // What the terminal sends is not for it.
        command.process_group(0);
        self.inherited.restore_signals(&mut command);
        // It is asked too often to be written down, so nobody else would know of it.
        child::kill_on_parent_death(&mut command);
        match command.spawn() {
            Ok(child) => {
                self.asked = Some(RunningProbe {
                    pid: child.id(),
                    until: sys::after(PATIENCE),
                    at_the_end,
                });
            }
            Err(error) => {
                self.complain(&format!("cannot be asked: {error}"));
                self.next = sys::after(self.what.every);
                self.last_word = at_the_end;
            }
        }
    }

    fn answered(&mut self, asked: RunningProbe, done: bool) {
        self.asked = None;
        self.done = done;
        self.last_word = asked.at_the_end;
        self.next = sys::after(self.what.every);
    }

    fn complain(&mut self, why: &str) {
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!("--done-when {}: {why}", self.what.command);
        }
    }
}

/// Kills a child of this process, which has not been waited for, and all that descends from it.
fn end_below(pid: u32) {
    let procfs = Procfs::default();
    let exits = match ExitPoll::new() {
        Ok(exits) => Arc::new(exits),
        Err(error) => return tracing::warn!("cannot wait for exits: {error}"),
    };
    let mut endings = PollingReaper::new(exits, Times::default(), Signal::SIGKILL);
    endings.hasten();
    let find = |_: &_| -> Result<Due, ProcfsError> {
        let child = || Ok(HashSet::from_iter([pid]));
        let all = procfs.subtrees(&HashSet::new(), child)?;
        Ok(all.into_iter().map(|one| (one.key, None)).collect())
    };
    // Once: what it has forked meanwhile goes with all the rest.
    if let Err(error) = endings.round(find) {
        tracing::warn!("{error}");
    }
}

#[cfg(test)]
mod tests;
