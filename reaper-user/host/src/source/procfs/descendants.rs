//! Finds the descendants of a process in the current process table.

use hashbrown::{HashMap, HashSet};
use nix::errno::Errno;

use super::{Procfs, ProcfsError};
use crate::source::ProcessTable;
use crate::sys::proc_file::Stat;
use reaper_model::event::ProcessKey;

/// A descendant of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descendant {
    /// Key whose start is a whole tick.
    pub key: ProcessKey,
    /// Pid of its parent.
    pub parent: u32,
    /// Kernel's short name, padded with zeros.
    comm: [u8; COMM_MAX],
}

/// Maximum length of a name, as of `TASK_COMM_LEN` in the kernel.
const COMM_MAX: usize = 16;

impl Descendant {
    /// Returns the kernel's short name (`comm`).
    pub fn comm(&self) -> String {
        let bytes = self.comm.split(|byte| *byte == 0).next();
        String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
    }
}

/// A process, and whether it is alive (not a zombie).
type Row = (Descendant, bool);

impl Procfs {
    /// Returns the living descendants of a process, parents first, without the process itself. Then follow the living
    /// processes whose pids `inside` returns, and their living descendants. Unreadable processes are left out.
    ///
    /// `inside` is called before and after the table is read, and only pids in both results count: a process that exits
    /// in between may have left its pid to an untracked process.
    ///
    /// # Errors
    /// /proc cannot be listed, or `inside` fails.
    pub fn descendants(
        &self,
        of: u32,
        inside: impl Fn() -> Result<HashSet<u32>, ProcfsError>,
    ) -> Result<Vec<Descendant>, ProcfsError> {
        let (rows, pids) = self.rows_and_inside(inside)?;
        let found = below(&rows, vec![of]);
        Ok(with_inside(found, &rows, |key| pids.contains(&key.pid)))
    }

    /// Returns those of the given processes that are alive, the living processes whose pids `inside` returns, and the
    /// living descendants of both. `inside` is called twice, as by [`Procfs::descendants`].
    ///
    /// # Errors
    /// As [`Procfs::descendants`].
    pub fn subtrees(
        &self,
        of: &HashSet<ProcessKey>,
        inside: impl Fn() -> Result<HashSet<u32>, ProcfsError>,
    ) -> Result<Vec<Descendant>, ProcfsError> {
        let (rows, pids) = self.rows_and_inside(inside)?;
        let is_inside = |key: ProcessKey| {
            pids.contains(&key.pid) || of.iter().any(|known| known.has_same_tick(key))
        };
        Ok(with_inside(Vec::new(), &rows, is_inside))
    }

    /// Returns the pids of a process and of its ancestors, up to one that is hidden from this user.
    ///
    /// # Errors
    /// There are not enough file descriptors or memory to read them.
    pub fn pid_and_ancestors(&self, mut pid: u32) -> Result<HashSet<u32>, ProcfsError> {
        let mut chain = HashSet::new();
        let mut child = None;
        // Each pid only once: the table can change while it is read, and form a loop.
        while pid != 0 && chain.insert(pid) {
            match (self.parent(pid)?, child) {
                (Some(parent), _) => (child, pid) = (Some(pid), parent),
                // The parent has exited meanwhile, so its child has another one, or it is hidden from this user.
                (None, Some(child)) => pid = self.parent(child)?.unwrap_or(0),
                (None, None) => break,
            }
        }
        Ok(chain)
    }

    /// Returns the parent of a process; `None` if the process is gone or hidden.
    ///
    /// # Errors
    /// There are not enough file descriptors or memory to read it.
    pub fn parent(&self, pid: u32) -> Result<Option<u32>, ProcfsError> {
        let path = self.root.join(pid.to_string()).join("stat");
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Stat::parse(&bytes).map(|stat| stat.parent)),
            Err(source) => match source.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => {
                    Err(ProcfsError::Read { path, source })
                }
                _ => Ok(None),
            },
        }
    }

    /// Reads the table, and the pids that are `inside` both before and after that.
    fn rows_and_inside(
        &self,
        inside: impl Fn() -> Result<HashSet<u32>, ProcfsError>,
    ) -> Result<(Vec<Row>, HashSet<u32>), ProcfsError> {
        let before = inside()?;
        let rows = self.rows()?;
        let mut pids = inside()?;
        pids.retain(|pid| before.contains(pid));
        Ok((rows, pids))
    }

    /// Returns all processes, zombies included. Unreadable ones are left out.
    fn rows(&self) -> Result<Vec<Row>, ProcfsError> {
        let row = |pid| {
            self.stat(pid, |stat: Stat<'_>| {
                let mut comm = [0; COMM_MAX];
                let length = stat.comm.len().min(COMM_MAX);
                comm[..length].copy_from_slice(&stat.comm[..length]);
                let descendant = Descendant {
                    key: stat.key(pid),
                    parent: stat.parent,
                    comm,
                };
                (descendant, !stat.has_exited())
            })
        };
        Ok(self.pids()?.into_iter().filter_map(row).collect())
    }
}

/// Adds the living processes for which `is_inside` holds, and their living descendants.
fn with_inside(
    mut found: Vec<Descendant>,
    rows: &[Row],
    is_inside: impl Fn(ProcessKey) -> bool,
) -> Vec<Descendant> {
    let mut known: HashSet<u32> = found.iter().map(|one| one.key.pid).collect();
    let is_new =
        |(row, lives): &&Row| *lives && !known.contains(&row.key.pid) && is_inside(row.key);
    let others: Vec<Descendant> = rows.iter().filter(is_new).map(|(row, _)| *row).collect();
    let roots: Vec<u32> = others.iter().map(|row| row.key.pid).collect();
    known.extend(&roots);
    found.extend(others);
    if !roots.is_empty() {
        let below = below(rows, roots).into_iter();
        found.extend(below.filter(|one| !known.contains(&one.key.pid)));
    }
    found
}

/// Returns the living descendants of the processes with these pids, parents first, without the roots themselves.
/// Zombies are left out, but not their descendants.
fn below(rows: &[Row], mut roots: Vec<u32>) -> Vec<Descendant> {
    let mut children: HashMap<u32, Vec<Row>> = HashMap::new();
    for row in rows {
        children.entry(row.0.parent).or_default().push(*row);
    }
    let mut found = Vec::new();
    while let Some(parent) = roots.pop() {
        // Removed from the map, so that a loop ends. The table can change while it is read.
        for (child, lives) in children.remove(&parent).unwrap_or_default() {
            roots.push(child.key.pid);
            if lives {
                found.push(child);
            }
        }
    }
    found
}
