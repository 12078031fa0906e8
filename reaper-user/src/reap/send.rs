//! Checks a process right before its signal, and sends the signal.

use std::io;
#[cfg(target_os = "linux")]
use std::process::Child;

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

/// Checks that a pidfd refers to the process `key`, and updates its uids in the model. The ring must be drained since
/// the opening. Without a known inode of the pidfd, it is enough that the process is alive in the model.
///
/// # Errors
/// Returns the reason to release the process.
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
    // No event reports a change of uids, which may require to keep the process.
    match pidfd.uids(key.pid) {
        Some(current) if current != uids => model.set_uids(key, current),
        Some(_) => {}
        None if pidfd.has_exited() => return Err(ReleaseReason::AlreadyExited),
        None => return Err(ReleaseReason::UidUnreadable),
    }
    Ok(())
}

/// Returns the decision if the process is still to be reaped.
///
/// # Errors
/// Returns the reason to release the process.
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

/// Sends the signal of a step. After [`SignalStep::Terminate`] the process must be woken, see there.
///
/// # Errors
/// As [`signal_own`].
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

/// Kills all processes of a cgroup that this program created. Returns their pids.
///
/// The open handle prevents that another cgroup of the same name is hit. Processes that were moved into it are killed
/// too.
///
/// # Errors
/// Fails with `EPERM`, and kills nothing, if this program or an ancestor of it is in the cgroup. So does a process of
/// another pid namespace there. Also fails if the cgroup or /proc cannot be used.
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

/// Rejects init and this program. No decision names them; this is a second line of defence.
fn check_never_list(pid: u32, own_pid: u32) -> nix::Result<()> {
    if pid <= 1 || pid == own_pid {
        return Err(nix::Error::EPERM);
    }
    Ok(())
}

/// Forwards a signal that this program received to a child, which must not have been waited for.
///
/// # Errors
/// Fails as `pidfd_send_signal(2)`.
#[cfg(target_os = "linux")]
pub fn forward(pidfd: &Pidfd, number: i32) -> nix::Result<()> {
    pidfd.send_number(number)
}

/// Value of a SIGTERM that tells the supervisor of a run to end the run, and not to forward the signal to the command.
/// Used if the request could not be recorded.
#[cfg(target_os = "linux")]
pub const STOP_SIGVAL: i32 = 0x7265_6170;

/// Tells the supervisor of a run to end it, by a SIGTERM with [`STOP_SIGVAL`].
///
/// # Errors
/// As [`signal_own`].
#[cfg(target_os = "linux")]
pub fn stop_supervisor(pidfd: &Pidfd, pid: u32) -> nix::Result<()> {
    check_never_list(pid, std::process::id())?;
    pidfd.send_signal_with(Signal::SIGTERM, STOP_SIGVAL)?;
    pidfd.send_signal(Signal::SIGCONT)
}

/// Sends a process `signal`, and wakes it if it is stopped.
///
/// # Errors
/// As [`signal_own`].
#[cfg(target_os = "linux")]
pub fn terminate_own(pidfd: &Pidfd, pid: u32, signal: Signal) -> nix::Result<()> {
    signal_own(pidfd, pid, signal)?;
    pidfd.send_signal(Signal::SIGCONT)
}

/// Kills a child of which no pidfd could be opened. The pid is its own as long as it has not been waited for.
///
/// # Errors
/// As `kill(2)`.
#[cfg(target_os = "linux")]
pub fn kill_child(child: &mut Child) -> io::Result<()> {
    check_never_list(child.id(), std::process::id())?;
    child.kill()
}

/// Signals a process that this program, or a child of it, has started. The caller must check that after opening the
/// pidfd, and that the pidfd refers to the process of this pid.
///
/// # Errors
/// Fails as `pidfd_send_signal(2)`, and with `EPERM` for init and this program.
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
