//! What a look at the process table finds, whichever system's it is.

use std::collections::HashMap;
use std::io;
#[cfg(target_os = "linux")]
use std::path::PathBuf;

use reaper_model::event::{ProcEntry, ProcessKey};

/// Something that cannot be read of the process table, or not understood.
#[derive(Debug, thiserror::Error)]
pub enum ProcfsError {
    #[cfg(target_os = "linux")]
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[cfg(target_os = "linux")]
    #[error("cannot start a thread to read /proc: {0}; raise the limit of processes")]
    Thread(#[source] io::Error),
    #[cfg(target_os = "linux")]
    #[error("cannot understand {}", path.display())]
    Malformed { path: PathBuf },
    #[cfg(target_os = "macos")]
    #[error("cannot read the process table: {0}")]
    List(#[source] io::Error),
    #[cfg(target_os = "macos")]
    #[error("cannot read process {pid}: {source}")]
    Read { pid: u32, source: io::Error },
}

/// What a look at one pid found.
#[derive(Debug)]
pub enum ProcessReading {
    Alive(ProcEntry),
    /// Nothing of it runs any more; only its parent has not waited for it yet.
    Zombie,
    /// There is no such process, or no more.
    Vanished,
}

/// The process table, read in one pass.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// All living processes, by pid as the directory lists them.
    pub rows: Vec<ProcEntry>,
    /// Left out because nothing of them runs any more.
    pub zombies: u32,
    /// Gone between the listing and the look.
    pub vanished: u32,
    /// There, but not to be read; whoever concludes from an absence has to mind these.
    pub unreadable: u32,
}

/// What a short look at a process found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    Alive {
        /// Pid of the parent, 0 for none.
        parent: u32,
    },
    /// It has exited, whoever has its pid now.
    Gone,
}

/// A process that has exited and is not waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zombie {
    /// Start is a whole number of [`TICK_NS`](reaper_model::event::TICK_NS).
    pub key: ProcessKey,
    pub parent: u32,
    pub comm: Vec<u8>,
    /// Effective.
    pub uid: u32,
}

/// What a process has of the host's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ProcessMemory {
    /// Resident, pages that it shares with others included.
    #[serde(rename = "memory.rss")]
    pub rss: u64,
    /// Swapped out.
    #[serde(rename = "memory.swap")]
    pub swap: u64,
}

impl Snapshot {
    /// The rows, parents before their children.
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
            // Up to where the depth is known, or the top; a loop, which only damage could make, ends it too.
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

    pub(super) fn add(&mut self, look: Result<ProcessReading, impl Sized>) {
        match look {
            Ok(ProcessReading::Alive(row)) => self.rows.push(row),
            Ok(ProcessReading::Zombie) => self.zombies += 1,
            Ok(ProcessReading::Vanished) => self.vanished += 1,
            Err(_) => self.unreadable += 1,
        }
    }
}
