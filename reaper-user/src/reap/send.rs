//! The last look, and the signal.

use std::io;

use hashbrown::HashSet;
use nix::sys::signal::Signal;

use super::{ReleaseReason, SignalStep};
use reaper_host::kernel::ProcessHandle;
use reaper_host::source::procfs::Procfs;
use reaper_host::sys::cgroup::Cgroup;
#[cfg(target_os = "linux")]
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::Model;
use reaper_model::event::ProcessKey;
use reaper_model::policy::{Decision, Evaluation, Verdict};

/// Whether a pidfd that was opened by pid is that of the process that is meant, and what that has become is known.
/// The ring has been drained past the opening.
pub(super) fn verify_identity(
    model: &mut Model,
    key: ProcessKey,
    pidfd: &dyn ProcessHandle,
) -> Result<(), ReleaseReason> {
    let node = model.tree.get(key).ok_or(ReleaseReason::AlreadyExited)?;
    let (uids, inode) = (node.uids, node.pidfd_inode);
    if inode != 0 && pidfd.inode() != Some(inode) {
        return Err(ReleaseReason::PidReused);
    }
    // A process may have changed its uid without anybody telling; a keep may follow from that.
    match pidfd.uids(key.pid) {
        Some(now) if now != uids => model.set_uids(key, now),
        Some(_) => {}
        None if pidfd.has_exited() => return Err(ReleaseReason::AlreadyExited),
        None => return Err(ReleaseReason::UidUnreadable),
    }
    Ok(())
}

/// Whether it is still due.
pub(super) fn check_due(
    round: &Evaluation<'_>,
    key: ProcessKey,
) -> Result<Decision, ReleaseReason> {
    let decision = round.decide(key);
    match decision.verdict {
        Verdict::Reap => Ok(decision),
        Verdict::Keep | Verdict::Report | Verdict::Wait => {
            Err(ReleaseReason::NotDue(decision.reason))
        }
    }
}

/// Sends what the step asks for. Who is asked has to be woken, once all are that are asked together: see [`SignalStep::Terminate`].
pub(super) fn send(
    pidfd: &dyn ProcessHandle,
    pid: u32,
    own_pid: u32,
    step: SignalStep,
) -> nix::Result<()> {
    check_never_list(pid, own_pid)?;
    match step {
        SignalStep::Terminate(signal) => pidfd.send_signal(signal),
        SignalStep::Continue => pidfd.send_signal(Signal::SIGCONT),
        SignalStep::Kill => pidfd.send_signal(Signal::SIGKILL),
    }
}

/// Kills all that is in a cgroup, and gives who that was: one that this program has made for what it started, by a handle on
/// it, so that none is hit that was there before, or in another one of that name. Whoever has got there since belongs to it by
/// somebody's doing; this program and its ancestors are looked for all the same.
pub(super) fn kill_cgroup(cgroup: &Cgroup, procfs: &Procfs) -> io::Result<HashSet<u32>> {
    let own = std::process::id();
    let inside = cgroup.pids()?;
    for pid in &inside {
        check_never_list(*pid, own)?;
    }
    for pid in procfs.pid_and_ancestors(own).map_err(io::Error::other)? {
        if cgroup.contains(pid)? {
            return Err(nix::Error::EPERM.into());
        }
    }
    cgroup.kill()?;
    Ok(inside)
}

/// Nobody decides so; that it cannot happen is worth a second line of defence.
fn check_never_list(pid: u32, own_pid: u32) -> nix::Result<()> {
    if pid <= 1 || pid == own_pid {
        return Err(nix::Error::EPERM);
    }
    Ok(())
}

/// Hands a signal on to a child of this process that has not been waited for, on behalf of whoever has sent it to this one.
///
/// # Errors
/// As `pidfd_send_signal(2)`.
#[cfg(target_os = "linux")]
pub fn forward(pidfd: &Pidfd, number: i32) -> nix::Result<()> {
    pidfd.send_number(number)
}

/// What goes with a signal by which the owner of a run is to end it, where it could not be written down that it is: then it is
/// for the owner, and not for the command.
#[cfg(target_os = "linux")]
pub const STOP_SIGVAL: i32 = 0x7265_6170;

/// Has the owner of a run end it, by SIGTERM and that number.
///
/// # Errors
/// As [`signal_own`].
#[cfg(target_os = "linux")]
pub fn stop_supervisor(pidfd: &Pidfd, pid: u32) -> nix::Result<()> {
    check_never_list(pid, std::process::id())?;
    pidfd.send_signal_with(Signal::SIGTERM, STOP_SIGVAL)?;
    pidfd.send_signal(Signal::SIGCONT)
}

/// Asks a process to end by this signal, and has it go on if it is stopped.
///
/// # Errors
/// As [`signal_own`].
#[cfg(target_os = "linux")]
pub fn terminate_own(pidfd: &Pidfd, pid: u32, signal: Signal) -> nix::Result<()> {
    signal_own(pidfd, pid, signal)?;
    pidfd.send_signal(Signal::SIGCONT)
}

/// Signals a process that this program, or what it started, has started. The caller has made sure of
/// that after it opened the pidfd, and that this is on the process of this pid.
///
/// # Errors
/// As `pidfd_send_signal(2)`; `EPERM` for those that are never signalled.
pub fn signal_own(pidfd: &dyn ProcessHandle, pid: u32, signal: Signal) -> nix::Result<()> {
    check_never_list(pid, std::process::id())?;
    pidfd.send_signal(signal)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    #[test]
    fn own_process_and_init_are_never_signalled() {
        let refused = Err(nix::Error::EPERM);
        for (pid, expected) in [(0, refused), (1, refused), (2, Ok(())), (7, refused)] {
            assert_eq!(check_never_list(pid, 7), expected, "{pid}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn stopped_supervisor_is_woken_and_ends() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pidfd = Pidfd::open(child.id()).unwrap();
        signal_own(&pidfd, child.id(), Signal::SIGSTOP).unwrap();
        let sent = stop_supervisor(&pidfd, child.id());
        let has_ended = pidfd.wait(Duration::from_secs(10));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((sent, has_ended), (Ok(()), true));
    }
}
