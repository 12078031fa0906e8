//! Results of reading the process table, on any operating system.

use std::collections::HashMap;
use std::io;
#[cfg(target_os = "linux")]
use std::path::PathBuf;

use crate::advice::Advised as _;
use reaper_model::event::{ProcEntry, ProcessKey};

/// Failure to read or parse the process table.
#[derive(Debug, thiserror::Error)]
pub enum ProcfsError {
    /// A file in /proc cannot be read.
    #[cfg(target_os = "linux")]
    #[error("cannot read {}: {}", path.display(), source.advised())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// No thread can be started that reads /proc.
    #[cfg(target_os = "linux")]
    #[error("cannot start a thread to read /proc: {}", .0.advised())]
    Thread(#[source] io::Error),
    /// A file in /proc has another format.
    #[cfg(target_os = "linux")]
    #[error(
        "cannot parse {}: unexpected format; report this as a bug, with the kernel release (`uname -r`)",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// `sysctl(3)` returns no process table.
    #[cfg(target_os = "macos")]
    #[error("cannot list the running processes: {}", .0.advised())]
    List(#[source] io::Error),
    /// The facts of one process cannot be read.
    #[cfg(target_os = "macos")]
    #[error("cannot read process {pid}: {}", source.advised())]
    Read {
        /// Pid of the process.
        pid: u32,
        /// Cause.
        source: io::Error,
    },
}

/// Result of reading one pid.
#[derive(Debug)]
pub enum ProcessReading {
    /// A living process.
    Alive(ProcEntry),
    /// All of its threads have exited, and its parent has not waited for it yet.
    Zombie,
    /// The process does not exist, or exited while it was read.
    Vanished,
}

/// The process table, read in one pass.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// Living processes, in the order in which they were read.
    pub rows: Vec<ProcEntry>,
    /// Number of zombies, which have no row.
    pub zombies: u32,
    /// Number of processes that exited between the listing and the read.
    pub vanished: u32,
    /// Number of processes that exist but could not be read. If there are any, a missing row does not prove an exit.
    pub unreadable: u32,
}

/// Whether a process is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It has a living thread.
    Alive {
        /// Pid of the parent, 0 for none.
        parent: u32,
    },
    /// It has exited. Its pid may belong to another process now.
    Gone,
}

/// A process that has exited and that its parent has not waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zombie {
    /// Key whose start is a multiple of [`TICK_NS`](reaper_model::event::TICK_NS) on Linux.
    pub key: ProcessKey,
    /// Pid of the parent, 0 for none.
    pub parent: u32,
    /// The kernel's name of the process.
    pub comm: Vec<u8>,
    /// Effective uid.
    pub uid: u32,
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ProcessMemory {
    /// Resident memory, including pages shared with other processes.
    #[serde(rename = "memory.rss")]
    pub rss: u64,
    /// Swapped-out memory.
    #[serde(rename = "memory.swap")]
    pub swap: u64,
}

impl Snapshot {
    /// Returns the rows by depth in the process tree, so parents before their children, and then by start time.
    pub fn parents_first(mut self) -> Vec<ProcEntry> {
        let parents: HashMap<u32, u32> = self
            .rows
            .iter()
            .map(|row| (row.key.pid, row.parent))
            .collect();
        let mut depths: HashMap<u32, usize> = HashMap::with_capacity(parents.len());
        for row in &self.rows {
            let mut line = Vec::new();
            let mut pid = row.key.pid;
            // Up to a process of known depth, or the top. The length bound ends a loop, which only damaged data can form.
            while let Some(parent) = parents.get(&pid)
                && !depths.contains_key(&pid)
                && line.len() <= parents.len()
            {
                line.push(pid);
                pid = *parent;
            }
            let base = depths.get(&pid).copied().unwrap_or(0);
            for (n, pid) in line.into_iter().rev().enumerate() {
                depths.insert(pid, base + n + 1);
            }
        }
        self.rows.sort_by_key(|row| {
            (
                depths.get(&row.key.pid).copied(),
                row.key.start,
                row.key.pid,
            )
        });
        self.rows
    }

    /// Adds a row for a living process. Only counts zombies, processes that have vanished, and errors.
    pub(super) fn add(&mut self, reading: Result<ProcessReading, impl Sized>) {
        match reading {
            Ok(ProcessReading::Alive(row)) => self.rows.push(row),
            Ok(ProcessReading::Zombie) => self.zombies += 1,
            Ok(ProcessReading::Vanished) => self.vanished += 1,
            Err(_) => self.unreadable += 1,
        }
    }
}
