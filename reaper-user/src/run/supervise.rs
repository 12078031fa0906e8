//! Standing in for a command until it is over: what it is sent reaches it, and what becomes of it reaches the caller.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getpgid, getpgrp};

use super::cgroup::RunCgroup;
use super::output_monitor::OutputMonitor;
use super::probe::DoneProbe;
use super::received_signal::ReceivedSignal;
use super::stand_in::Supervisor;
use super::{CommandExit, Progress, Run, RunError, RunOutcome, RunReport, RunState, outcome};
use crate::reap;
use reaper_host::sys;
use reaper_host::sys::child::{self, BlockedSignals, ChildChange};
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_host::sys::pidfd::Pidfd;

/// Signals by which a terminal stops a process.
const STOP_SIGNALS: [Signal; 3] = [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];
const NO_HANDLE: &str = "no handle on a process is to be had";

/// A command that runs, and what is known of it.
pub(super) struct SupervisedCommand<'a> {
    pub(super) run: &'a Run,
    held: &'a BlockedSignals,
    pub(super) pid: u32,
    pidfd: Pidfd,
    /// Confirms exits when its tree is ended.
    pub(super) exits: Arc<ExitPoll>,
    /// The cgroup that it was born in, if it has one for itself.
    pub(super) leaf: Option<RunCgroup>,
    pub(super) end: Option<CommandExit>,
    /// When that was, in ns on the monotonic clock.
    ended: u64,
    /// Numbers of the signals that have come by which somebody asks for an end, and when each came last.
    stop_signals: Vec<(i32, u64)>,
    /// Whoever has claimed the run for a stop has said so.
    stopped: Cell<bool>,
    /// The word of a child has been read, and the children have not been asked since.
    child_told: Cell<bool>,
    probe: Option<DoneProbe<'a>>,
    silence: Option<OutputMonitor>,
    began: u64,
}

/// Runs it, up to where nothing is left of it.
pub(super) fn attend(
    run: &mut Run,
    held: &BlockedSignals,
    leaf: Option<RunCgroup>,
) -> Result<RunReport, RunError> {
    // To be had for others only where it can be had for this one: asked before there is a tree to be ended.
    Pidfd::open(std::process::id()).map_err(RunError::system(NO_HANDLE))?;
    let exits = Arc::new(ExitPoll::new().map_err(RunError::system(NO_HANDLE))?);
    held.inherited.restore_signals(&mut run.command);
    let silence = run.idle.map(|_| OutputMonitor::begin(&mut run.command));
    let silence = silence.transpose()?;
    if let Some(signal) = held.pending_termination() {
        return Err(RunError::Stopped(signal));
    }
    if let Some(leaf) = &leaf {
        leaf.take_in(&mut run.command)?;
    }
    let began = sys::monotonic();
    let started =
        run.command
            .spawn()
            .map_err(|source| match (&leaf, child::not_entered(&source)) {
                (Some(leaf), Some(errno)) => leaf.not_entered(errno.into()).into(),
                _ => RunError::Start {
                    program: run.command.get_program().into(),
                    source,
                },
            })?;
    if silence.is_some() {
        OutputMonitor::let_go(&mut run.command);
    }
    let pid = started.id();
    run.tell(Progress::Started(pid));
    // It has not been waited for, so the pid is its own.
    let pidfd = Pidfd::open(pid).map_err(RunError::system(NO_HANDLE))?;
    let done_when = run.done_when.as_ref();
    let mut attended = SupervisedCommand {
        held,
        pid,
        pidfd,
        exits,
        leaf,
        end: None,
        ended: 0,
        stop_signals: Vec::new(),
        stopped: Cell::new(false),
        child_told: Cell::new(false),
        probe: done_when.map(|done_when| DoneProbe::new(done_when, held.inherited)),
        silence,
        began,
        run,
    };
    let outcome = attended.await_outcome();
    let outcome = match &attended.run.recording {
        Some(recording) => recording.claim(outcome),
        None => outcome,
    };
    let endings = attended.end_tree();
    if let Some(silence) = attended.silence.take() {
        silence.finish(|| {
            attended
                .read_signals()
                .iter()
                .any(ReceivedSignal::requests_termination)
        });
    }
    let report = attended.report(outcome, &endings);
    // Who is left is told of already.
    let leaf = attended.leaf.take().filter(|_| report.survivors.is_empty());
    if let Some(leaf) = leaf {
        leaf.remove();
    }
    Ok(report)
}

impl SupervisedCommand<'_> {
    fn await_outcome(&mut self) -> RunOutcome {
        // What the terminal sent before the command was there has reached this process alone. What it has sent as the
        // command came to be that may have twice: it has only just begun.
        let mut both = false;
        loop {
            let (now, over) = (sys::monotonic(), self.end.is_some());
            self.wait_children();
            // Afterwards: what was sent to the command and this process alike is there before the command has ended of it.
            for received in self.read_signals() {
                if received.requests_termination() {
                    self.on_stop_signal(received, now, over);
                }
                self.forward(received, both);
            }
            both = true;
            if let Some(probe) = &mut self.probe {
                probe.go_on(self.end.is_some());
            }
            let facts = self.facts();
            if let Some(outcome) = outcome(&facts) {
                return outcome;
            }
            self.wait(self.deadline(&facts));
        }
    }

    fn facts(&self) -> RunState {
        let now = sys::monotonic();
        // With a probe the end counts once that has been asked about it.
        let probe = self.probe.as_ref();
        let settled = probe.is_none_or(|probe| probe.is_final());
        // What has ended takes no time any more, however long that is asked.
        let lives = self.end.is_none();
        RunState {
            done: probe.map(DoneProbe::is_done),
            end: self.end.filter(|_| settled),
            stop: self.stopped_by(),
            age: Duration::from_nanos(now.saturating_sub(self.began)),
            budget: self.run.timeout.filter(|_| lives),
            silent: self
                .silence
                .as_ref()
                .map_or(Duration::ZERO, OutputMonitor::idle_for),
            idle: self.run.idle.filter(|_| lives),
        }
    }

    /// `over`: nothing but the probe is waited for.
    fn on_stop_signal(&mut self, received: ReceivedSignal, now: u64, over: bool) {
        self.stop_signals
            .retain(|(number, _)| *number != received.number());
        self.stop_signals.push((received.number(), now));
        if over && let Some(probe) = &mut self.probe {
            probe.give_up();
        }
    }

    /// Which of the signals that came the command has ended of, if any. One that catches it may leave with any status:
    /// after SIGTERM that is what it was asked for, the others are also used for something else, and count for as long
    /// as the grace.
    fn stopped_by(&self) -> Option<i32> {
        if self.stopped.get() {
            return Some(Signal::SIGTERM as i32);
        }
        let end = self.end?;
        let grace = sys::nanoseconds(self.run.times.grace);
        let explains = |(number, at): &&(i32, u64)| {
            // As shells and the like do it that have seen to it.
            let said = CommandExit::Exited(CommandExit::Killed(*number).status());
            *number == Signal::SIGTERM as i32
                || [CommandExit::Killed(*number), said].contains(&end)
                || self.ended.saturating_sub(*at) < grace
        };
        let mut before = self.stop_signals.iter().filter(|(_, at)| *at <= self.ended);
        before.find(explains).map(|(number, _)| *number)
    }

    /// When to look again, if nothing happens before.
    fn deadline(&self, facts: &RunState) -> Option<Duration> {
        let RunState { budget, idle, .. } = *facts;
        let probe = self.probe.as_ref().and_then(DoneProbe::deadline);
        let probe = probe.map(|at| Duration::from_nanos(at.saturating_sub(sys::monotonic())));
        [
            budget.map(|budget| budget.saturating_sub(facts.age)),
            idle.map(|idle| idle.saturating_sub(facts.silent)),
            probe,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Waits for a signal, for so long; not at all where one has been read that is still to be seen to.
    pub(super) fn wait(&self, timeout: Option<Duration>) {
        if self.child_told.get() {
            return;
        }
        let round_up = |time: Duration| {
            let time = time.saturating_add(Duration::from_nanos(999_999));
            PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)
        };
        let timeout = timeout.map_or(PollTimeout::NONE, round_up);
        let mut fds = [PollFd::new(self.signals(), PollFlags::POLLIN)];
        // It may be too early: then what there is to do is found not to be due.
        let _ = poll(&mut fds, timeout);
    }

    /// What can be waited on for signals.
    pub(super) fn signals(&self) -> BorrowedFd<'_> {
        self.held.signals.as_fd()
    }

    /// The signals that have come, but for those that tell of children, which are asked for in any case.
    pub(super) fn read_signals(&self) -> Vec<ReceivedSignal> {
        let mut pending = Vec::new();
        while let Ok(Some(info)) = self.held.signals.read_signal() {
            // What it writes where nobody reads is its own affair.
            let own = info.ssi_code == libc::SI_USER && info.ssi_pid == std::process::id();
            if info.ssi_signo == Signal::SIGCHLD as u32 {
                self.child_told.set(true);
                continue;
            }
            let told = info.ssi_code == libc::SI_QUEUE && info.ssi_int == reap::STOP_SIGVAL;
            if !self.take_stop_request(info.ssi_signo, told) && !own {
                pending.push(ReceivedSignal::of(&info));
            }
        }
        pending
    }

    /// Whether that is the word of who has claimed the run to stop it, or has `told` so because that could not be written. It
    /// is heard once: a second one cuts the grace short.
    fn take_stop_request(&self, number: u32, told: bool) -> bool {
        let first = number == Signal::SIGTERM as u32 && !self.stopped.get();
        let is_stopped = || match &self.run.recording {
            Some(recording) => told || recording.is_stop_requested(),
            None => false,
        };
        // The kernel sends SIGTERM when the process that waits for this one has died.
        let is_abandoned = || {
            self.run
                .supervisor
                .as_ref()
                .is_some_and(Supervisor::is_abandoned)
        };
        let stop = first && (is_stopped() || is_abandoned());
        self.stopped.set(self.stopped.get() || stop);
        stop
    }

    /// Waits for all who have exited; whether there are children left.
    pub(super) fn wait_children(&mut self) -> bool {
        // Before they are asked: of whoever ends from now on there is to be another.
        self.child_told.set(false);
        loop {
            match child::next_change() {
                Ok(Some((pid, change))) if pid == self.pid => {
                    match change {
                        ChildChange::Exited(status) => self.end = Some(CommandExit::Exited(status)),
                        ChildChange::Killed(signal) => self.end = Some(CommandExit::Killed(signal)),
                        ChildChange::Stopped(signal) => self.on_command_stopped(signal),
                    }
                    self.ended = sys::monotonic();
                }
                Ok(Some((pid, change))) => {
                    if let Some(probe) = &mut self.probe {
                        probe.note(pid, change);
                    }
                }
                Ok(None) => return true,
                Err(Errno::ECHILD) => return false,
                Err(_) => return true,
            }
        }
    }

    /// Sends the command what this process was sent, unless it has had it as well: with `both` what the terminal sends to one it
    /// sends to the other.
    fn forward(&self, received: ReceivedSignal, both: bool) {
        if self.end.is_some() || both && received.sent_to_group() && self.shares_terminal() {
            return;
        }
        // The shell sent the SIGCONT to the command too, which may have stopped the whole group since then.
        let is_late = received.number() == Signal::SIGCONT as i32
            && STOP_SIGNALS.into_iter().any(child::is_pending);
        if is_late && self.shares_terminal() {
            return;
        }
        if let Err(error) = reap::forward(&self.pidfd, received.number()) {
            let (pid, number) = (self.pid, received.number());
            tracing::debug!("pid {pid}: signal {number} cannot be forwarded: {error}");
        }
    }

    /// Sends the command alone the signal to end, and waits for at most the grace. Returns whether it exited.
    pub(super) fn end_leader(&mut self) -> bool {
        let until = sys::after(self.run.times.grace);
        if let Err(error) = reap::terminate_own(&self.pidfd, self.pid, self.run.signal) {
            tracing::debug!("pid {}: it cannot be asked to end: {error}", self.pid);
        }
        loop {
            self.wait_children();
            let left = until.saturating_sub(sys::monotonic());
            if self.end.is_some() || left == 0 {
                return self.end.is_some();
            }
            self.wait(Some(Duration::from_nanos(left)));
            if self
                .read_signals()
                .iter()
                .any(ReceivedSignal::requests_termination)
            {
                return false;
            }
        }
    }

    /// What the terminal sends to one of them it sends to both, so each goes its own way.
    fn shares_terminal(&self) -> bool {
        let pid = i32::try_from(self.pid).unwrap_or_default();
        getpgid(Some(Pid::from_raw(pid))) == Ok(getpgrp())
    }

    /// Job control: whoever waits for this process is to see that the command has been stopped.
    fn on_command_stopped(&self, signal: i32) {
        let signal = Signal::try_from(signal);
        let Some(signal) = signal.ok().filter(|signal| STOP_SIGNALS.contains(signal)) else {
            return;
        };
        if self.shares_terminal()
            && let Err(error) = child::stop_self(signal)
        {
            tracing::debug!("cannot stop as the command has: {error}");
        }
    }

    pub(super) fn age(&self) -> Duration {
        Duration::from_nanos(sys::monotonic().saturating_sub(self.began))
    }
}
