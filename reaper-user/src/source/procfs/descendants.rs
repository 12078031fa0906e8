//! Who descends from a process, by what the process table says at the time.

use hashbrown::{HashMap, HashSet};

use super::parse::Stat;
use super::{Procfs, ProcfsError};
use crate::model::event::{Key, TICK_NS};

/// A process that descends from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descendant {
    /// The start is a whole tick.
    pub key: Key,
    /// Pid of its parent.
    pub parent: u32,
    /// Processor time that it has used, and those of its children that it has waited for, in ticks of [`TICK_NS`].
    pub cpu: u64,
}

/// A process, and whether it is no zombie.
type Row = (Descendant, bool);

impl Procfs {
    /// All that live and descend from a process, which is not one of them, each after its parent; who cannot be read
    /// is left out.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn descendants(&self, of: u32) -> Result<Vec<Descendant>, ProcfsError> {
        Ok(below(self.rows()?, vec![of]))
    }

    /// All of these that live, those whose pids are `inside`, and all that live and descend from one of them.
    ///
    /// `inside` is asked before the table is read and after it, and both have to say it: one that ends in between may have
    /// left its pid to a stranger.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn families(
        &self,
        of: &HashSet<Key>,
        inside: impl Fn() -> HashSet<u32>,
    ) -> Result<Vec<Descendant>, ProcfsError> {
        let before = inside();
        let rows = self.rows()?;
        let mut pids = inside();
        pids.retain(|pid| before.contains(pid));
        let is_one =
            |key: Key| pids.contains(&key.pid) || of.iter().any(|known| known.same_tick(key));
        let is = |(row, lives): &&Row| *lives && is_one(row.key);
        let mut found: Vec<Descendant> = rows.iter().filter(is).map(|(row, _)| *row).collect();
        let makers: Vec<u32> = found.iter().map(|row| row.key.pid).collect();
        let known: HashSet<u32> = makers.iter().copied().collect();
        let below = below(rows, makers).into_iter();
        found.extend(below.filter(|one| !known.contains(&one.key.pid)));
        Ok(found)
    }

    /// The pids of a process, and of all that it descends from.
    pub fn line(&self, mut pid: u32) -> HashSet<u32> {
        let mut line = HashSet::new();
        // Each but once, where the table changes while it is read.
        while pid != 0 && line.insert(pid) {
            pid = self.stat(pid, |stat| stat.parent).unwrap_or(0);
        }
        line
    }

    fn rows(&self) -> Result<Vec<Row>, ProcfsError> {
        let row = |pid| {
            self.stat(pid, |stat: Stat<'_>| {
                let start = stat.start.saturating_mul(TICK_NS);
                let descendant = Descendant {
                    key: Key { pid, start },
                    parent: stat.parent,
                    cpu: stat.cpu.saturating_add(stat.waited_cpu),
                };
                // The first of its threads may be dead, and others not.
                (descendant, !stat.dead() || stat.threads > 1)
            })
        };
        Ok(self.pids()?.into_iter().filter_map(row).collect())
    }
}

fn below(rows: Vec<Row>, mut makers: Vec<u32>) -> Vec<Descendant> {
    let mut children: HashMap<u32, Vec<Row>> = HashMap::new();
    for row in rows {
        children.entry(row.0.parent).or_default().push(row);
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
