//! Supervises a running command: forwards signals and job control to it, and decides the outcome of the run.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getpgid, getpgrp};

use super::cgroup::RunCgroup;
use super::done_check::DoneCheck;
use super::output_monitor::OutputMonitor;
use super::received_signal::ReceivedSignal;
use super::report::EndedProcess;
use super::stand_in::Supervisor;
use super::{CommandExit, Progress, Run, RunError, RunOutcome, RunReport, RunState, outcome};
use crate::reap::{self, Due, DueProcess, Times};
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys;
use reaper_host::sys::child::{self, BlockedSignals, ChildChange};
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_host::sys::pidfd::Pidfd;

/// Signals by which a terminal stops a process.
const STOP_SIGNALS: [Signal; 3] = [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];
/// Number of files that must be free when the command starts. To end what it leaves behind takes four: a pidfd, the list
/// of a cgroup, and two to read /proc. A start of the done check takes five.
const FILES: usize = 5;
const NO_PIDFD: &str =
    "cannot open a pidfd, through which processes are ended, so the command was not started";

/// A running command and its state.
pub(super) struct SupervisedCommand<'a> {
    pub(super) run: &'a Run,
    blocked_signals: &'a BlockedSignals,
    pub(super) pid: u32,
    pidfd: Pidfd,
    /// Poll that confirms exits while the tree is being ended.
    pub(super) exits: Arc<ExitPoll>,
    /// The command's own cgroup, if it has one.
    pub(super) cgroup: Option<RunCgroup>,
    /// Exit of the command; `None` while it runs.
    pub(super) end: Option<CommandExit>,
    /// The command, if it was signalled alone and has exited.
    pub(super) leader: Option<EndedProcess>,
    /// Time of the last stop or exit of the command (`CLOCK_MONOTONIC`, ns).
    ended_ns: u64,
    /// Numbers of the received termination signals, each with the time of its last arrival (`CLOCK_MONOTONIC`, ns).
    stop_signals: Vec<(i32, u64)>,
    /// Whether a stop request has arrived (see [`Self::take_stop_request`]).
    stop_requested: Cell<bool>,
    /// Whether a SIGCHLD was read since the last [`Self::wait_children`].
    sigchld_read: Cell<bool>,
    check: Option<DoneCheck<'a>>,
    output: Option<OutputMonitor>,
    /// Start time (`CLOCK_MONOTONIC`, ns).
    start_ns: u64,
}

/// Runs the command of a run, and then ends all processes that are left of it. Claims the outcome in the record, but
/// does not close the record and runs no hooks. Removes the cgroup, unless processes survive.
///
/// # Errors
/// The command cannot start, or was stopped before.
pub(super) fn supervise_command(
    run: &mut Run,
    blocked_signals: &BlockedSignals,
    cgroup: Option<RunCgroup>,
) -> Result<RunReport, RunError> {
    // Without pidfds a tree could not be ended, so this fails before there is one. Held until the command has started,
    // so that a file can be opened for its pidfd.
    let reserve = Pidfd::open(std::process::id()).map_err(RunError::system(NO_PIDFD))?;
    let exits = Arc::new(ExitPoll::new().map_err(RunError::system(NO_PIDFD))?);
    blocked_signals.inherited.restore_signals(&mut run.command);
    let output = run.idle.map(|_| OutputMonitor::begin(&mut run.command));
    let output = output.transpose()?;
    if let Some(signal) = blocked_signals.pending_termination() {
        return Err(RunError::Stopped(signal));
    }
    if let Some(cgroup) = &cgroup {
        cgroup.enter_on_start(&mut run.command)?;
    }
    sys::check_free_files(FILES).map_err(|source| RunError::System {
        what: "cannot open the files that are needed to end what the command leaves behind, so it was not started",
        source,
    })?;
    let start_ns = sys::monotonic();
    let mut started =
        run.command
            .spawn()
            .map_err(|source| match (&cgroup, child::not_entered(&source)) {
                (Some(cgroup), Some(errno)) => cgroup.not_entered(errno.into()).into(),
                _ => RunError::Start {
                    program: run.command.get_program().into(),
                    source,
                },
            })?;
    if output.is_some() {
        OutputMonitor::close_pipes(&mut run.command);
    }
    let pid = started.id();
    run.report_progress(Progress::Started(pid));
    drop(reserve);
    // The pid cannot have been reused: this process has not waited for the command.
    let pidfd = match Pidfd::open(pid) {
        Ok(pidfd) => pidfd,
        Err(errno) => return Err(kill_without_pidfd(&mut started, run.times, errno)),
    };
    let done_when = run.done_when.as_ref();
    let mut supervised = SupervisedCommand {
        blocked_signals,
        pid,
        pidfd,
        exits,
        cgroup,
        end: None,
        leader: None,
        ended_ns: 0,
        stop_signals: Vec::new(),
        stop_requested: Cell::new(false),
        sigchld_read: Cell::new(false),
        check: done_when.map(|done_when| DoneCheck::new(done_when, blocked_signals.inherited)),
        output,
        start_ns,
        run,
    };
    let outcome = supervised.await_outcome();
    let outcome = match &supervised.run.recording {
        Some(recording) => recording.claim(outcome),
        None => outcome,
    };
    let (results, names) = supervised.end_tree();
    if let Some(output) = supervised.output.take() {
        output.finish(|| {
            supervised
                .read_signals()
                .iter()
                .any(ReceivedSignal::requests_termination)
        });
    }
    let report = supervised.report(outcome, &results, &names);
    // With survivors it cannot be removed. They are in the report already.
    let cgroup = supervised
        .cgroup
        .take()
        .filter(|_| report.survivors.is_empty());
    if let Some(cgroup) = cgroup {
        cgroup.remove();
    }
    Ok(report)
}

/// Ends a command of which no pidfd could be opened, with all its descendants, and returns the error.
fn kill_without_pidfd(command: &mut Child, times: Times, errno: Errno) -> RunError {
    let killed = reap::kill_child(command).and_then(|()| command.wait());
    // This process has adopted what the command has started meanwhile.
    let (procfs, own) = (Procfs::default(), std::process::id());
    let find = || -> Result<Due, ProcfsError> {
        let all = procfs.descendants(own, || Ok(HashSet::new()))?;
        Ok(all
            .into_iter()
            .map(|process| (process.key, DueProcess::default()))
            .collect())
    };
    let is_alone = killed.is_ok()
        && reap::reap_all(|_| find(), times).is_ok()
        && find().is_ok_and(|left| left.is_empty());
    RunError::system(match is_alone {
        true => "cannot open a pidfd of the command, so it was killed right after its start",
        false => {
            "cannot open a pidfd of the command, so it was killed; end what it had started (find it with `ps`)"
        }
    })(errno)
}

impl SupervisedCommand<'_> {
    /// Forwards signals and polls the check until the run has an outcome. Ends no process.
    fn await_outcome(&mut self) -> RunOutcome {
        // In the first round all signals are forwarded: those of the terminal may have come before the command existed.
        // The command may receive a signal that arrived during its start twice.
        let mut skip_terminal_signals = false;
        loop {
            let (now, command_exited) = (sys::monotonic(), self.end.is_some());
            self.wait_children();
            // After the children: a signal that has ended the command too is in the queue before its exit is reported.
            for received in self.read_signals() {
                if received.requests_termination() {
                    self.on_stop_signal(received, now, command_exited);
                }
                self.forward(received, skip_terminal_signals);
            }
            skip_terminal_signals = true;
            if let Some(check) = &mut self.check {
                check.poll(self.end.is_some());
            }
            let state = self.state();
            if let Some(outcome) = outcome(&state) {
                return outcome;
            }
            self.wait(self.time_left(&state));
        }
    }

    fn state(&self) -> RunState {
        let now = sys::monotonic();
        // With a check, the exit counts only after a check that started after it.
        let check = self.check.as_ref();
        let settled = check.is_none_or(|check| check.is_final());
        // The time limits apply only while the command runs, not to the last check.
        let lives = self.end.is_none();
        RunState {
            done: check.map(DoneCheck::is_done),
            end: self.end.filter(|_| settled),
            stop: self.stopped_by(),
            age: Duration::from_nanos(now.saturating_sub(self.start_ns)),
            budget: self.run.timeout.filter(|_| lives),
            silent: self
                .output
                .as_ref()
                .map_or(Duration::ZERO, OutputMonitor::idle_for),
            idle: self.run.idle.filter(|_| lives),
        }
    }

    /// Notes the time `now` of a termination signal. If the command had exited before this signal was read, cancels the
    /// check, which alone still runs.
    fn on_stop_signal(&mut self, received: ReceivedSignal, now: u64, command_exited: bool) {
        self.stop_signals
            .retain(|(number, _)| *number != received.number());
        self.stop_signals.push((received.number(), now));
        if command_exited && let Some(check) = &mut self.check {
            check.cancel();
        }
    }

    /// Returns the number of the received signal that has ended the command, if any. While the command runs, only a
    /// stop request counts, as SIGTERM.
    ///
    /// A command that catches a signal may exit with any status. SIGTERM always means a stop. The other signals have
    /// more uses, so they count only if the status names them or the command exits within the grace.
    fn stopped_by(&self) -> Option<i32> {
        if self.stop_requested.get() {
            return Some(Signal::SIGTERM as i32);
        }
        let end = self.end?;
        let grace = sys::nanoseconds(self.run.times.grace);
        let explains = |(number, at): &&(i32, u64)| {
            // Shells exit with this status if a signal has killed the last command.
            let shell_status = CommandExit::Exited(CommandExit::Killed(*number).status());
            *number == Signal::SIGTERM as i32
                || [CommandExit::Killed(*number), shell_status].contains(&end)
                || self.ended_ns.saturating_sub(*at) < grace
        };
        let signals = self.stop_signals.iter();
        let mut before = signals.filter(|(_, at)| *at <= self.ended_ns);
        before.find(explains).map(|(number, _)| *number)
    }

    /// Returns the time until a limit expires or the check is due. Returns `None` if there is neither.
    fn time_left(&self, state: &RunState) -> Option<Duration> {
        let RunState { budget, idle, .. } = *state;
        let check = self.check.as_ref().and_then(DoneCheck::deadline);
        let check = check.map(|at| Duration::from_nanos(at.saturating_sub(sys::monotonic())));
        [
            budget.map(|budget| budget.saturating_sub(state.age)),
            idle.map(|idle| idle.saturating_sub(state.silent)),
            check,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Waits for a signal or until the timeout. Returns at once if a SIGCHLD was read but not handled yet.
    pub(super) fn wait(&self, timeout: Option<Duration>) {
        if self.sigchld_read.get() {
            return;
        }
        let round_up = |time: Duration| {
            let time = time.saturating_add(Duration::from_nanos(999_999));
            PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)
        };
        let timeout = timeout.map_or(PollTimeout::NONE, round_up);
        let mut fds = [PollFd::new(self.signals(), PollFlags::POLLIN)];
        // An early wake-up is harmless: the caller checks what is due.
        let _ = poll(&mut fds, timeout);
    }

    /// Returns the signalfd.
    pub(super) fn signals(&self) -> BorrowedFd<'_> {
        self.blocked_signals.signals.as_fd()
    }

    /// Reads the signals that have arrived. Returns those to forward: not SIGCHLD, not the first stop request, and not
    /// signals from this process. A SIGCHLD only makes the next [`Self::wait`] return at once.
    pub(super) fn read_signals(&self) -> Vec<ReceivedSignal> {
        let mut pending = Vec::new();
        while let Ok(Some(info)) = self.blocked_signals.signals.read_signal() {
            // The SIGPIPE of a write by this process, which is not for the command.
            let own = info.ssi_code == libc::SI_USER && info.ssi_pid == std::process::id();
            if info.ssi_signo == Signal::SIGCHLD as u32 {
                self.sigchld_read.set(true);
                continue;
            }
            let marked = info.ssi_code == libc::SI_QUEUE && info.ssi_int == reap::STOP_SIGVAL;
            if !self.take_stop_request(info.ssi_signo, marked) && !own {
                pending.push(ReceivedSignal::of(&info));
            }
        }
        pending
    }

    /// Returns whether a signal is the first stop request, and notes that one has arrived.
    ///
    /// Its sender has claimed the run in the record, or has `marked` the signal because it could not write the record.
    /// A second request counts as a termination signal, which ends the grace.
    fn take_stop_request(&self, number: u32, marked: bool) -> bool {
        let first = number == Signal::SIGTERM as u32 && !self.stop_requested.get();
        let is_stopped = || match &self.run.recording {
            Some(recording) => marked || recording.is_stop_requested(),
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
        self.stop_requested.set(self.stop_requested.get() || stop);
        stop
    }

    /// Reaps the children that have exited, and records the exit of the command and of the check. If the terminal has
    /// stopped the command, also stops this process. Returns whether children are left.
    pub(super) fn wait_children(&mut self) -> bool {
        // Before the wait: a child that exits later sends another SIGCHLD.
        self.sigchld_read.set(false);
        loop {
            match child::next_change() {
                Ok(Some((pid, change))) if pid == self.pid => {
                    match change {
                        ChildChange::Exited(status) => self.end = Some(CommandExit::Exited(status)),
                        ChildChange::Killed(signal) => self.end = Some(CommandExit::Killed(signal)),
                        ChildChange::Stopped(signal) => self.on_command_stopped(signal),
                    }
                    self.ended_ns = sys::monotonic();
                }
                Ok(Some((pid, change))) => {
                    if let Some(check) = &mut self.check {
                        check.on_child_change(pid, change);
                    }
                }
                Ok(None) => return true,
                Err(Errno::ECHILD) => return false,
                Err(_) => return true,
            }
        }
    }

    /// Forwards a signal to the command. Does nothing if the command has exited.
    ///
    /// With `skip_terminal_signals`, signals that the terminal has sent to both are not forwarded.
    fn forward(&self, received: ReceivedSignal, skip_terminal_signals: bool) {
        if self.end.is_some()
            || skip_terminal_signals && received.sent_to_group() && self.shares_process_group()
        {
            return;
        }
        // The shell has sent the SIGCONT to the command too. The command may have stopped the whole group since then.
        let is_late = received.number() == Signal::SIGCONT as i32
            && STOP_SIGNALS.into_iter().any(child::is_pending);
        if is_late && self.shares_process_group() {
            return;
        }
        if let Err(error) = reap::forward(&self.pidfd, received.number()) {
            let (pid, number) = (self.pid, received.number());
            tracing::debug!("pid {pid}: cannot forward signal {number}: {error}");
        }
    }

    /// Sends the first signal to the command alone, and waits for at most the grace. Returns whether it exited. A
    /// further termination signal ends the wait.
    pub(super) fn end_leader(&mut self) -> bool {
        let until = sys::after(self.run.times.grace);
        let leader = EndedProcess {
            pid: self.pid,
            command: Procfs::default().comm(self.pid).unwrap_or_default(),
            signal: self.run.signal.as_str(),
        };
        if let Err(error) = reap::terminate_own(&self.pidfd, self.pid, self.run.signal) {
            tracing::debug!("pid {}: cannot send {}: {error}", self.pid, self.run.signal);
        }
        loop {
            self.wait_children();
            let left = until.saturating_sub(sys::monotonic());
            if self.end.is_some() {
                self.leader = Some(leader);
                return true;
            }
            if left == 0 {
                return false;
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

    /// Returns whether the command is in the process group of this process, so that the terminal signals both.
    fn shares_process_group(&self) -> bool {
        let pid = i32::try_from(self.pid).unwrap_or_default();
        getpgid(Some(Pid::from_raw(pid))) == Ok(getpgrp())
    }

    /// Stops this process too when a terminal signal has stopped the command, so that the shell sees a stopped job.
    fn on_command_stopped(&self, signal: i32) {
        let signal = Signal::try_from(signal);
        let Some(signal) = signal.ok().filter(|signal| STOP_SIGNALS.contains(signal)) else {
            return;
        };
        if self.shares_process_group()
            && let Err(error) = child::stop_self(signal)
        {
            tracing::debug!("cannot stop this process with the command: {error}");
        }
    }

    pub(super) fn age(&self) -> Duration {
        Duration::from_nanos(sys::monotonic().saturating_sub(self.start_ns))
    }
}
