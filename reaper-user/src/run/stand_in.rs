//! Waits for a run that a child process supervises.
//!
//! A process keeps its children when it becomes `reaper run` by exec: a shell's background job, or a process
//! substitution. They are not the command's, and nothing of theirs may be signalled or waited for. The supervisor of a run
//! counts all its children as the command's, and adopts their orphans. So where there are children already, the supervisor
//! is a fresh fork, and this process only passes on signals, job control and the exit status.
//!
//! ```text
//!   reaper run ─┬─ sleep 971                    from before: not touched
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

/// Which process this one is.
#[derive(Debug)]
pub enum Role {
    /// The supervisor.
    Supervisor(Supervisor),
    /// The process that was started as `reaper run`. Its supervisor exited with this status.
    StandIn(u8),
}

/// Permission to supervise a run: this process had no children when it was given.
#[derive(Debug)]
pub struct Supervisor {
    /// The process that waits for this one, if it is not the same.
    stand_in: Option<Pid>,
}

impl Supervisor {
    /// Returns whether the process that waits for this one has died.
    pub(super) fn is_abandoned(&self) -> bool {
        self.stand_in.is_some_and(|stand_in| getppid() != stand_in)
    }
}

/// Decides which process supervises the run. A stand-in forks the supervisor, and this returns only when that has exited.
/// Must be called before this process starts threads or children of its own.
///
/// # Errors
/// The supervisor cannot be started.
pub fn role() -> Result<Role, RunError> {
    let failed = RunError::system("the supervisor cannot be started");
    let this = nix::unistd::getpid();
    if !child::has_children().map_err(&failed)? {
        return Ok(Role::Supervisor(Supervisor { stand_in: None }));
    }
    // Before the fork: the command may be up, and be sent a signal, before this process runs again.
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
            status.map(Role::StandIn).map_err(failed)
        }
    }
}

/// Passes signals and stops on until the supervisor has ended. Returns its status as a shell has it.
fn stand_in(supervisor: Pid, held: BlockedSignals) -> nix::Result<u8> {
    let pid = supervisor.as_raw().cast_unsigned();
    // The process id cannot be reused: only this process waits for it.
    let pidfd = Pidfd::open(pid)?;
    loop {
        while let Ok(Some(info)) = held.signals.read_signal() {
            let received = ReceivedSignal::of(&info);
            if !received.is_of_child()
                && !received.sent_to_group()
                && let Err(error) = reap::forward(&pidfd, received.number())
            {
                tracing::debug!(
                    "pid {pid}: signal {} cannot be forwarded: {error}",
                    received.number()
                );
            }
        }
        match child::change_of(supervisor)? {
            Some(ChildChange::Exited(status)) => return Ok(status),
            Some(ChildChange::Killed(signal)) => {
                drop(held);
                if signal == Signal::SIGINT as i32 {
                    // A shell that waits stops its loop only for a process that SIGINT has ended.
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
