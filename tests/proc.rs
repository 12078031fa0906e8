//! Who a process is and whether it lives, read from /proc; and the one way in which the tests end one.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::libc;

/// A process by pid and start: the pid alone may be somebody else's by the time it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessKey {
    pub pid: i32,
    /// Start in clock ticks since boot, as /proc has it.
    pub ticks: u64,
}

/// What /proc/PID/stat says of a process, as far as the tests need it.
#[derive(Clone, Copy, Debug)]
pub struct Stat {
    pub id: ProcessKey,
    pub parent: i32,
    pub state: u8,
    threads: u32,
}

impl Stat {
    /// Zombies are dead. A leader that exited before its threads looks like one and is not.
    pub fn is_alive(&self) -> bool {
        !matches!(self.state, b'Z' | b'X') || self.threads > 1
    }
}

/// Reads `/proc/WHO/stat`; `who` is a pid or `self`.
pub fn stat(who: impl std::fmt::Display) -> Option<Stat> {
    let text = std::fs::read(format!("/proc/{who}/stat")).ok()?;
    // The name in brackets may hold anything, brackets included.
    let close = text.iter().rposition(|b| *b == b')')?;
    let pid = std::str::from_utf8(text.get(..text.iter().position(|b| *b == b' ')?)?).ok()?;
    let rest: Vec<&str> = std::str::from_utf8(text.get(close + 2..)?)
        .ok()?
        .split(' ')
        .collect();
    Some(Stat {
        id: ProcessKey {
            pid: pid.parse().ok()?,
            ticks: rest.get(19)?.parse().ok()?,
        },
        parent: rest.get(1)?.parse().ok()?,
        state: *rest.first()?.as_bytes().first()?,
        threads: rest.get(17)?.parse().ok()?,
    })
}

/// Every process that can be seen.
pub fn all() -> Vec<Stat> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(stat)
        .collect()
}

/// Every process below `root`, dead ones that nobody has waited for included.
pub fn descendants(root: ProcessKey) -> Vec<Stat> {
    let mut rest = all();
    let mut found: Vec<Stat> = Vec::new();
    let mut parents: std::collections::HashSet<i32> = [root.pid].into();
    loop {
        let (below, others): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|s| parents.contains(&s.parent));
        if below.is_empty() {
            return found;
        }
        parents = below.iter().map(|s| s.id.pid).collect();
        found.extend(below);
        rest = others;
    }
}

impl ProcessKey {
    /// Whether this very process is still running.
    pub fn is_alive(self) -> bool {
        stat(self.pid).is_some_and(|s| s.id == self && s.is_alive())
    }

    /// Sends a signal, through a pidfd that was opened before the identity was read again.
    /// Says whether it was sent.
    pub fn signal(self, signal: nix::sys::signal::Signal) -> bool {
        // SAFETY: takes a number and flags, returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        let Ok(fd @ 0..) = i32::try_from(fd) else {
            return false;
        };
        // SAFETY: the call above has just returned it, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if stat(self.pid).is_none_or(|s| s.id != self) {
            return false;
        }
        // SAFETY: the descriptor is open; a null siginfo is allowed.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                fd.as_raw_fd(),
                signal as i32,
                std::ptr::null::<u8>(),
                0,
            )
        };
        sent == 0
    }
}
