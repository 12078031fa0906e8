//! All that runs, as of a moment: what /proc says of each process, with what the kernel alone knows of it.

use std::collections::HashMap;

use hashbrown::HashSet;

use super::EngineError;
use crate::model::event::{Key, Mark, Seen, TICK_NS};
use crate::source::Source;
use crate::source::ebpf::SourceError;
use crate::source::ebpf::{Roster, Table};
use crate::source::procfs::Procfs;
use crate::sys;

/// Takes surveys, from any thread.
pub struct Surveyor {
    /// What the kernel alone knows, where there are probes.
    kernel: Option<(Table, Roster)>,
    procfs: Procfs,
    /// Who is not in the kernel's map is no member.
    complete: bool,
    /// The source may have no better names than pid and tick.
    by_tick: bool,
}

/// See the module.
pub struct Survey {
    /// Parents before their children.
    pub rows: Vec<Seen>,
    /// Who was there, also where it could not be read.
    pub pids: HashSet<u32>,
    /// All who are followed.
    pub marks: HashMap<Key, Mark>,
    /// How many of them could not be read.
    pub unreadable: u32,
    /// When it began, in ns since boot: who has come since may be missing.
    pub began: u64,
}

/// Whom to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    Everybody,
    /// Those whom the kernel's map has.
    Followed,
}

impl Surveyor {
    /// `complete`: who is not in the kernel's map is no member.
    ///
    /// # Errors
    /// A map cannot be shared.
    pub fn new(source: &Source, complete: bool) -> Result<Surveyor, EngineError> {
        let kernel = source.probes().map(|probes| {
            let roster = probes.state.roster()?;
            Ok::<_, SourceError>((probes.table().clone(), roster))
        });
        Ok(Surveyor {
            kernel: kernel.transpose()?,
            procfs: Procfs::default(),
            complete,
            by_tick: source.looks(),
        })
    }

    /// Looks at all of them. Takes tens of microseconds for each.
    ///
    /// # Errors
    /// The kernel does not list its processes, or no thread can be started to read them.
    pub fn survey(&self, whom: Whom) -> Result<Survey, EngineError> {
        let began = sys::boot_time();
        let roster = || match &self.kernel {
            Some((_, roster)) => roster.read(),
            None => HashMap::new(),
        };
        let before = roster();
        let table = self.kernel.as_ref().map(|(table, _)| table.read());
        let table = table.transpose()?.unwrap_or_default();
        let pids: HashSet<u32> = match whom {
            // The kernel's list may lack some, and says nothing of that.
            Whom::Everybody => self.procfs.pids()?.into_iter().collect(),
            Whom::Followed => before.keys().map(|key| key.pid).collect(),
        };
        let table: HashMap<u32, _> = table.iter().map(|row| (row.key.pid, row)).collect();
        let snapshot = self.procfs.snapshot_of(pids.iter().copied().collect())?;
        let unreadable = snapshot.unreadable;
        // Last: whoever was there to be looked at was put into it before.
        let marks = roster();
        let mut rows = snapshot.parents_first();
        // Before the tick of a birth is over another may get the same name; the next look finds it.
        rows.retain(|row| !self.by_tick || row.exact || row.key.start + TICK_NS <= row.at);
        for row in &mut rows {
            let listed = table.get(&row.key.pid);
            // Known to the tick only, it cannot be told from a successor in the kernel's map.
            let Some(listed) = listed.filter(|listed| listed.key.same_tick(row.key)) else {
                continue;
            };
            row.key = listed.key;
            row.exact = true;
            row.pidfd_inode = listed.pidfd_inode;
            // Who has exited since is not in it any more, and was before; unless it came after that.
            let mark = marks.get(&row.key).or_else(|| before.get(&row.key));
            let unmarked = (self.complete && row.key.start < began).then(Mark::default);
            row.mark = mark.copied().or(unmarked);
        }
        Ok(Survey {
            rows,
            pids,
            marks,
            unreadable,
            began,
        })
    }
}
