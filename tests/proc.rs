//! Identity and state of processes from /proc, and the only function through which tests send signals to tree processes.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::libc;

/// Identity of a process: pid and start time. The pid alone can be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessKey {
    pub pid: i32,
    /// Start time in clock ticks since boot (field 22 of proc_pid_stat(5)).
    pub ticks: u64,
}

/// Fields of /proc/PID/stat that the tests read.
#[derive(Clone, Copy, Debug)]
pub struct Stat {
    pub id: ProcessKey,
    pub parent: i32,
    pub state: u8,
    threads: u32,
}

impl Stat {
    /// Returns whether the process runs. A zombie does not. A leader that exited before its other threads is in the same
    /// state, but runs.
    pub fn is_alive(&self) -> bool {
        !matches!(self.state, b'Z' | b'X') || self.threads > 1
    }
}

/// Reads `/proc/PID/stat`; `pid` is a number or `self`. Returns `None` if there is no such process.
pub fn stat(pid: impl std::fmt::Display) -> Option<Stat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses can contain any byte, parentheses included.
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

/// Returns all processes in /proc.
pub fn all() -> Vec<Stat> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(stat)
        .collect()
}

/// Returns all descendants of `root`, zombies included.
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
    /// Returns whether this process, and not a later one with its pid, is alive.
    pub fn is_alive(self) -> bool {
        stat(self.pid).is_some_and(|s| s.id == self && s.is_alive())
    }

    /// Sends a signal through a pidfd. The identity is read again after the pidfd is open. Returns whether it was sent.
    pub fn signal(self, signal: nix::sys::signal::Signal) -> bool {
        // SAFETY: pidfd_open(2) takes no pointers and returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        let Ok(fd @ 0..) = i32::try_from(fd) else {
            return false;
        };
        // SAFETY: the call above returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if stat(self.pid).is_none_or(|s| s.id != self) {
            return false;
        }
        // SAFETY: the descriptor is open, and pidfd_send_signal(2) allows a null siginfo.
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
