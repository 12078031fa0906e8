//! Waits for a run that a child process supervises.
//!
//! A process keeps its children when it becomes `reaper run` by exec: a shell's background job, or a process
//! substitution. They do not belong to the command, and must not be signalled or waited for. But a supervisor counts
//! all its children as the command's, and adopts their orphans. So a process with children forks a supervisor, and only
//! forwards signals, job control and the exit status.
//!
//! ```text
//!   reaper run ─┬─ sleep 971                    pre-existing: not touched
//!               └─ reaper run (supervisor) ─── command ─── …
//! ```

use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, raise};
use nix::unistd::{Pid, getppid};

use super::RunError;
use super::received_signal::ReceivedSignal;
use crate::reap;
use reaper_host::sys::child::{self, BlockedSignals, ChildChange};
use reaper_host::sys::pidfd::Pidfd;

/// Role of this process in a run.
#[derive(Debug)]
pub enum Role {
    /// The supervisor.
    Supervisor(Supervisor),
    /// The process that was started as `reaper run`. Its forked supervisor has exited with this status.
    StandIn(u8),
}

/// Proof that this process had no children, so that it may supervise a run.
#[derive(Debug)]
pub struct Supervisor {
    /// Process that waits for this one, if this one was forked.
    stand_in: Option<Pid>,
}

impl Supervisor {
    /// Returns whether the process that waits for this one has exited. Returns false if this one was not forked by
    /// [`role`].
    pub(super) fn is_abandoned(&self) -> bool {
        self.stand_in.is_some_and(|stand_in| getppid() != stand_in)
    }
}

/// Decides which process supervises the run.
///
/// If this process has children it forks the supervisor. In the parent, this function forwards signals to it, and
/// returns when it has exited; if SIGINT killed it, that also kills this process. Must be called before this process
/// starts any threads or children.
///
/// # Errors
/// The supervisor cannot be started, so the command was not started either. Or this process cannot wait for the
/// supervisor. Then it stops the run, which may have started its command.
pub fn role() -> Result<Role, RunError> {
    let failed = RunError::system(
        "cannot start the process that supervises the run, so the command was not started",
    );
    let this = nix::unistd::getpid();
    if !child::has_children().map_err(&failed)? {
        return Ok(Role::Supervisor(Supervisor { stand_in: None }));
    }
    // Before the fork: the command may have started, and a signal for it may arrive, before this process runs again.
    let held = BlockedSignals::begin().map_err(&failed)?;
    match child::fork_dependent().map_err(&failed)? {
        None => {
            held.release();
            Ok(Role::Supervisor(Supervisor {
                stand_in: Some(this),
            }))
        }
        Some(supervisor) => {
            let status = stand_in(supervisor, held);
            let failed =
                "cannot wait for the process that supervises the run, so the run is stopped";
            status.map(Role::StandIn).map_err(RunError::system(failed))
        }
    }
}

/// Forwards signals to the supervisor, and stops this process whenever the supervisor is stopped.
///
/// Returns the exit status of the supervisor as a shell reports it. Kills this process with SIGINT if SIGINT has killed
/// the supervisor.
fn stand_in(supervisor: Pid, held: BlockedSignals) -> nix::Result<u8> {
    let pid = supervisor.as_raw().cast_unsigned();
    // The pid cannot have been reused: this process has not waited for it.
    let pidfd = Pidfd::open(pid)?;
    loop {
        while let Ok(Some(info)) = held.signals.read_signal() {
            let received = ReceivedSignal::of(&info);
            if !received.is_of_child()
                && !received.sent_to_group()
                && let Err(error) = reap::forward(&pidfd, received.number())
            {
                tracing::debug!(
                    "pid {pid}: cannot forward signal {}: {error}",
                    received.number()
                );
            }
        }
        match child::change_of(supervisor)? {
            Some(ChildChange::Exited(status)) => return Ok(status),
            Some(ChildChange::Killed(signal)) => {
                drop(held);
                if signal == Signal::SIGINT as i32 {
                    // A shell aborts its script or loop only if SIGINT has killed its child.
                    let _ = raise(Signal::SIGINT);
                }
                return Ok(u8::try_from(128 + signal).unwrap_or(u8::MAX));
            }
            Some(ChildChange::Stopped(signal)) => {
                if let Ok(signal) = Signal::try_from(signal) {
                    child::stop_self(signal)?;
                }
            }
            None => {
                let mut fds = [PollFd::new(held.signals.as_fd(), PollFlags::POLLIN)];
                // A wake-up without a signal only repeats the loop.
                let _ = poll(&mut fds, PollTimeout::NONE);
            }
        }
    }
}
