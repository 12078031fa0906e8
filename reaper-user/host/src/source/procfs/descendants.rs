//! Who descends from a process, by what the process table says at the time.

use hashbrown::{HashMap, HashSet};
use nix::errno::Errno;

use super::{Procfs, ProcfsError};
use crate::source::ProcessTable;
use crate::sys::proc_file::Stat;
use reaper_model::event::ProcessKey;

/// A process that descends from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descendant {
    /// The start is a whole tick.
    pub key: ProcessKey,
    /// Pid of its parent.
    pub parent: u32,
}

/// A process, and whether it is no zombie.
type Row = (Descendant, bool);

impl Procfs {
    /// All that live and descend from a process, which is not one of them, each after its parent. Behind them those whose
    /// pids are `inside`, and all that live and descend from one of these. Who cannot be read is left out.
    ///
    /// `inside` is asked before the table is read and after it, and both have to say it: one that ends in between may have
    /// left its pid to a stranger.
    ///
    /// # Errors
    /// The directory cannot be listed; those of `inside`.
    pub fn descendants(
        &self,
        of: u32,
        inside: impl Fn() -> Result<HashSet<u32>, ProcfsError>,
    ) -> Result<Vec<Descendant>, ProcfsError> {
        let (rows, pids) = self.rows_amid(inside)?;
        let found = below(&rows, vec![of]);
        Ok(with_others(found, &rows, |key| pids.contains(&key.pid)))
    }

    /// All of these that live, those whose pids are `inside`, as above, and all that live and descend from one of them.
    ///
    /// # Errors
    /// As above.
    pub fn subtrees(
        &self,
        of: &HashSet<ProcessKey>,
        inside: impl Fn() -> Result<HashSet<u32>, ProcfsError>,
    ) -> Result<Vec<Descendant>, ProcfsError> {
        let (rows, pids) = self.rows_amid(inside)?;
        let is_one = |key: ProcessKey| {
            pids.contains(&key.pid) || of.iter().any(|known| known.has_same_tick(key))
        };
        Ok(with_others(Vec::new(), &rows, is_one))
    }

    /// The pids of a process, and of all that it descends from; one that is not shown to this user ends the line.
    ///
    /// # Errors
    /// There is no telling, for want of files or memory.
    pub fn pid_and_ancestors(&self, mut pid: u32) -> Result<HashSet<u32>, ProcfsError> {
        let mut line = HashSet::new();
        let mut child = None;
        // Each but once, where the table changes while it is read.
        while pid != 0 && line.insert(pid) {
            match (self.parent(pid)?, child) {
                (Some(parent), _) => (child, pid) = (Some(pid), parent),
                // It has ended meanwhile, and its child has another parent, unless it is not shown.
                (None, Some(child)) => pid = self.parent(child)?.unwrap_or(0),
                (None, None) => break,
            }
        }
        Ok(line)
    }

    /// `None`: it is gone, or not shown.
    fn parent(&self, pid: u32) -> Result<Option<u32>, ProcfsError> {
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

    fn rows_amid(
        &self,
        inside: impl Fn() -> Result<HashSet<u32>, ProcfsError>,
    ) -> Result<(Vec<Row>, HashSet<u32>), ProcfsError> {
        let before = inside()?;
        let rows = self.rows()?;
        let mut pids = inside()?;
        pids.retain(|pid| before.contains(pid));
        Ok((rows, pids))
    }

    fn rows(&self) -> Result<Vec<Row>, ProcfsError> {
        let row = |pid| {
            self.stat(pid, |stat: Stat<'_>| {
                let descendant = Descendant {
                    key: stat.key(pid),
                    parent: stat.parent,
                };
                (descendant, !stat.is_over())
            })
        };
        Ok(self.pids()?.into_iter().filter_map(row).collect())
    }
}

/// Adds to what was found all of whom this is so, and all that live and descend from those.
fn with_others(
    mut found: Vec<Descendant>,
    rows: &[Row],
    is_one: impl Fn(ProcessKey) -> bool,
) -> Vec<Descendant> {
    let mut known: HashSet<u32> = found.iter().map(|one| one.key.pid).collect();
    let is = |(row, lives): &&Row| *lives && !known.contains(&row.key.pid) && is_one(row.key);
    let others: Vec<Descendant> = rows.iter().filter(is).map(|(row, _)| *row).collect();
    let makers: Vec<u32> = others.iter().map(|row| row.key.pid).collect();
    known.extend(&makers);
    found.extend(others);
    if !makers.is_empty() {
        let below = below(rows, makers).into_iter();
        found.extend(below.filter(|one| !known.contains(&one.key.pid)));
    }
    found
}

fn below(rows: &[Row], mut makers: Vec<u32>) -> Vec<Descendant> {
    let mut children: HashMap<u32, Vec<Row>> = HashMap::new();
    for row in rows {
        children.entry(row.0.parent).or_default().push(*row);
    }
    let mut found = Vec::new();
    while let Some(maker) = makers.pop() {
        // Taken out, so that a table that changes while it is read leads into no circle.
        for (child, lives) in children.remove(&maker).unwrap_or_default() {
            makers.push(child.key.pid);
            if lives {
                found.push(child);
            }
        }
    }
    found
}
