//! Reads the process table: pre-existing processes, and those that the source may have missed.
//!
//! The types have the same names as those that read /proc on Linux, so callers need not distinguish the systems. Start
//! times are exact to the µs, and each process has a unique id that is never reused.

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use hashbrown::HashSet;
use reaper_common::ARGV_MAX;

use super::args::Arguments;
use crate::source::ProcessTable;
pub use crate::source::snapshot::{
    Liveness, ProcessMemory, ProcessReading, ProcfsError, Snapshot, Zombie,
};
use crate::sys;
use crate::sys::darwin;
use crate::sys::kinfo::KinfoProc;
use reaper_model::event::{Image, ProcEntry, ProcessKey, TICK_NS};

/// Reader of the process table. Has no state, so threads can share it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Procfs(());

impl Procfs {
    /// Returns an empty path: macOS has no /proc.
    pub(crate) fn root(&self) -> &Path {
        Path::new("")
    }

    /// Reads one process.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn read(&self, pid: u32) -> Result<ProcessReading, ProcfsError> {
        Ok(match one(pid)? {
            Some(process) if process.is_zombie() => ProcessReading::Zombie,
            Some(process) => {
                proc_entry(&process).map_or(ProcessReading::Vanished, ProcessReading::Alive)
            }
            None => ProcessReading::Vanished,
        })
    }

    /// Returns the start of a process, in ticks of [`TICK_NS`] since boot; `None` if it is gone.
    pub fn start_ticks(&self, pid: u32) -> Option<u64> {
        let process = one(pid).ok()??;
        Some(key(&process).start / TICK_NS)
    }

    /// Returns the resident memory of the process with this key, in bytes; `None` if it is gone or another user's.
    pub fn rss_of(&self, key: ProcessKey) -> Option<u64> {
        let rss = self.rss_bytes(key.pid)?;
        let alive = matches!(self.probe(key), Ok(Liveness::Alive { .. }));
        // The pid still belongs to the process, so the memory read before does too.
        alive.then_some(rss)
    }

    /// Returns the pids of a process and of its ancestors.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn pid_and_ancestors(&self, mut pid: u32) -> Result<HashSet<u32>, ProcfsError> {
        let mut line = HashSet::new();
        // Each pid only once: the table can change while it is read, and form a loop.
        while pid != 0 && line.insert(pid) {
            pid = one(pid)?.map_or(0, |process| process.parent);
        }
        Ok(line)
    }

    /// Returns the parent of a process; `None` if the process is gone.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn parent(&self, pid: u32) -> Result<Option<u32>, ProcfsError> {
        Ok(one(pid)?.map(|process| process.parent))
    }

    /// Returns all zombies.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn zombies(&self) -> Result<Vec<Zombie>, ProcfsError> {
        let zombies = all()?.into_iter().filter(KinfoProc::is_zombie);
        let zombies = zombies.map(|process| Zombie {
            key: key(&process),
            parent: process.parent,
            uid: process.uids.effective,
            comm: process.comm,
        });
        Ok(zombies.collect())
    }
}

impl ProcessTable for Procfs {
    fn pids(&self) -> Result<Vec<u32>, ProcfsError> {
        Ok(all()?.iter().map(|process| process.pid).collect())
    }

    fn probe(&self, key: ProcessKey) -> Result<Liveness, ProcfsError> {
        let lives =
            |process: &KinfoProc| !process.is_zombie() && key.has_same_tick(self::key(process));
        Ok(match one(key.pid)?.filter(lives) {
            Some(KinfoProc { parent, .. }) => Liveness::Alive { parent },
            None => Liveness::Gone,
        })
    }

    fn snapshot_of(&self, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        let mut snapshot = Snapshot::default();
        for pid in pids {
            snapshot.add(self.read(pid));
        }
        Ok(snapshot)
    }

    /// Reads processes without a time limit, because no read waits for the process.
    fn snapshot_within(&self, _: Duration, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        self.snapshot_of(pids)
    }

    fn state(&self, pid: u32) -> Option<char> {
        Some(one(pid).ok()??.state())
    }

    fn rss_bytes(&self, pid: u32) -> Option<u64> {
        Some(darwin::usage(pid)?.resident)
    }

    fn memory(&self, pid: u32, _swaps: bool) -> Option<ProcessMemory> {
        let usage = darwin::usage(pid)?;
        (usage.resident > 0).then_some(ProcessMemory {
            rss: usage.resident,
            swap: 0,
        })
    }
}

/// Returns all processes, zombies included.
///
/// # Errors
/// The table cannot be read.
pub fn all() -> Result<Vec<KinfoProc>, ProcfsError> {
    Ok(rows()?.0)
}

/// Returns all processes, zombies included, and the number of malformed rows.
///
/// # Errors
/// The table cannot be read.
pub fn rows() -> Result<(Vec<KinfoProc>, usize), ProcfsError> {
    let bytes = darwin::processes().map_err(ProcfsError::List)?;
    Ok((KinfoProc::all(&bytes).collect(), KinfoProc::flawed(&bytes)))
}

/// Returns the process that has a pid; `None` if the pid is free.
///
/// # Errors
/// The table cannot be read.
pub fn one(pid: u32) -> Result<Option<KinfoProc>, ProcfsError> {
    let bytes = darwin::process(pid).map_err(|source| ProcfsError::Read { pid, source })?;
    Ok(KinfoProc::all(&bytes).find(|process| process.pid == pid))
}

/// Returns the key of a process.
///
/// The kernel stores start times by the wall clock. The key counts from the start of pid 1, so that it stays the same
/// until the next boot even if the clock is set. If the clock is set after boot, the ages of later processes are wrong by
/// that difference.
pub fn key(process: &KinfoProc) -> ProcessKey {
    static BOOT: LazyLock<u64> = LazyLock::new(|| {
        let first = one(1).ok().flatten().map(|first| first.began);
        first.or_else(darwin::booted).unwrap_or(0)
    });
    ProcessKey {
        pid: process.pid,
        start: process.began.saturating_sub(*BOOT).saturating_mul(1000),
    }
}

/// Reads a living process in full; `None` if it has exited or cannot be read.
pub fn proc_entry(process: &KinfoProc) -> Option<ProcEntry> {
    let at = sys::boot_time();
    let identity = darwin::identity(process.pid).ok()?;
    let given = darwin::arguments(process.pid).unwrap_or_default();
    let given = Arguments::parse(&given);
    let bound = given.argv.len().min(ARGV_MAX);
    let image = Image {
        comm: process.comm.clone(),
        exe: darwin::executable(process.pid),
        filename: given.path.to_vec(),
        argv: given.argv[..bound].to_vec(),
        argv_full_len: u32::try_from(given.argv.len()).unwrap_or(u32::MAX),
        truncated: given.is_cut || bound < given.argv.len(),
        pgid: process.group,
        sid: darwin::session(process.pid),
        tty: process.terminal,
        ..Image::default()
    };
    // If the process still has its pid, all facts are about it.
    let same = darwin::identity(process.pid).is_ok_and(|now| now.unique == identity.unique);
    let listed = one(process.pid)
        .ok()?
        .is_some_and(|now| now.began == process.began);
    (same && listed).then(|| ProcEntry {
        read_at: at,
        exact: true,
        pidfd_inode: identity.unique,
        membership: None,
        key: key(process),
        parent: process.parent,
        uids: process.uids,
        image: Arc::new(image),
        kernel_thread: process.is_kernel,
        namespace_init: false,
    })
}
