//! Who descends from a process, by what the process table says at the time.

use hashbrown::HashMap;

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

impl Procfs {
    /// All that live and descend from a process, which is not one of them, each after its parent; who cannot be read
    /// is left out.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn descendants(&self, of: u32) -> Result<Vec<Descendant>, ProcfsError> {
        let mut children: HashMap<u32, Vec<(Descendant, bool)>> = HashMap::new();
        for pid in self.pids()? {
            let found = self.stat(pid, |stat: Stat<'_>| {
                let start = stat.start.saturating_mul(TICK_NS);
                let descendant = Descendant {
                    key: Key { pid, start },
                    parent: stat.parent,
                    cpu: stat.cpu.saturating_add(stat.waited_cpu),
                };
                // The first of its threads may be dead, and others not.
                (stat.parent, (descendant, !stat.dead() || stat.threads > 1))
            });
            if let Some((parent, child)) = found {
                children.entry(parent).or_default().push(child);
            }
        }
        let mut found = Vec::new();
        let mut makers = vec![of];
        while let Some(maker) = makers.pop() {
            // Taken out, so that a table that changes while it is read leads into no circle.
            for (child, lives) in children.remove(&maker).unwrap_or_default() {
                makers.push(child.key.pid);
                if lives {
                    found.push(child);
                }
            }
        }
        Ok(found)
    }
}
