//! The last look, and the signal.

use nix::sys::signal::Signal;

use super::Released;
use crate::model::Model;
use crate::model::event::Key;
use crate::model::policy::{Decision, Verdict};
use crate::sys::pidfd::Pidfd;

/// Whether a pidfd that was opened by pid is that of the process that is meant, and it is still due.
/// The ring has been drained past the opening.
pub(super) fn verify(model: &mut Model, key: Key, pidfd: &Pidfd) -> Result<Decision, Released> {
    let node = model.tree.get(key).ok_or(Released::Gone)?;
    let (uids, inode) = (node.uids, node.pidfd_inode);
    if inode != 0 && pidfd.inode() != Some(inode) {
        return Err(Released::Identity);
    }
    // A process may have changed its uid without anybody telling; a keep may follow from that.
    match pidfd.uids(key.pid) {
        Some(now) if now != uids => model.set_uids(key, now),
        Some(_) => {}
        None if pidfd.has_exited() => return Err(Released::Gone),
        None => return Err(Released::Unreadable),
    }
    let decision = model.decide(key);
    match decision.verdict {
        Verdict::Reap => Ok(decision),
        Verdict::Keep => Err(Released::NotDue(decision.reason)),
    }
}

/// Sends a signal; after SIGTERM a SIGCONT, without which a stopped process would not see it.
pub(super) fn send(pidfd: &Pidfd, pid: u32, own_pid: u32, signal: Signal) -> nix::Result<()> {
    // The model never decides so; that it cannot happen is worth a second line of defence.
    if pid <= 1 || pid == own_pid {
        return Err(nix::Error::EPERM);
    }
    pidfd.send_signal(signal)?;
    if signal == Signal::SIGTERM {
        // If it is gone already, so much the better.
        let _ = pidfd.send_signal(Signal::SIGCONT);
    }
    Ok(())
}

/// Signals a process that this program, or what it started, has started. The caller has made sure of
/// that after it opened the pidfd.
///
/// # Errors
/// As `pidfd_send_signal(2)`.
pub fn end_own(pidfd: &Pidfd, signal: Signal) -> nix::Result<()> {
    pidfd.send_signal(signal)
}
