//! All that runs, as of a moment: what /proc says of each process, with what the kernel alone knows of it.

use std::collections::HashMap;
use std::sync::Arc;

use hashbrown::HashSet;

use super::EngineError;
use reaper_host::kernel::{Clock, Kernel, ProcessTable};
use reaper_host::source::Source;
use reaper_host::source::probes::KernelReader;
use reaper_model::event::{Membership, ProcEntry, ProcessKey, TICK_NS};

/// Takes surveys, from any thread.
pub struct Surveyor {
    /// What the kernel alone knows, where there are probes.
    members: Option<Box<dyn KernelReader>>,
    clock: Arc<dyn Clock>,
    processes: Arc<dyn ProcessTable>,
    /// Who is not in the kernel's map is no member.
    complete: bool,
    /// The source may have no better names than pid and tick.
    by_tick: bool,
}

/// See the module.
pub struct Survey {
    /// Parents before their children.
    pub rows: Vec<ProcEntry>,
    /// Who was there, also where it could not be read.
    pub pids: HashSet<u32>,
    /// All who are followed.
    pub marks: HashMap<ProcessKey, Membership>,
    /// How many of them could not be read.
    pub unreadable: u32,
    /// When it began, in ns since boot: who has come since may be missing.
    pub began: u64,
}

/// Which processes a survey reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SurveyScope {
    All,
    /// Processes that are in the kernel's map of members.
    Members,
}

impl Surveyor {
    /// `complete`: who is not in the kernel's map is no member.
    ///
    /// # Errors
    /// A map cannot be shared.
    pub fn new(
        kernel: &Kernel,
        source: &dyn Source,
        complete: bool,
    ) -> Result<Surveyor, EngineError> {
        let members = source.probes().map(|probes| probes.reader());
        Ok(Surveyor {
            members: members.transpose()?,
            clock: Arc::clone(&kernel.clock),
            processes: Arc::clone(&kernel.processes),
            complete,
            by_tick: source.is_polling(),
        })
    }

    /// Looks at all of them. Takes tens of microseconds for each.
    ///
    /// # Errors
    /// The kernel does not list its processes, or no thread can be started to read them.
    pub fn survey(&self, whom: SurveyScope) -> Result<Survey, EngineError> {
        let began = self.clock.boot_time();
        let roster = || match &self.members {
            Some(reader) => reader.members(),
            None => HashMap::new(),
        };
        let before = roster();
        let table = self.members.as_ref().map(|kernel| kernel.processes());
        let table = table.transpose()?.unwrap_or_default();
        let pids: HashSet<u32> = match whom {
            // The kernel's list may lack some, and says nothing of that.
            SurveyScope::All => self.processes.pids()?.into_iter().collect(),
            SurveyScope::Members => before.keys().map(|key| key.pid).collect(),
        };
        let table: HashMap<u32, _> = table.iter().map(|row| (row.key.pid, row)).collect();
        let snapshot = self.processes.snapshot_of(pids.iter().copied().collect())?;
        let unreadable = snapshot.unreadable;
        // Last: whoever was there to be looked at was put into it before.
        let marks = roster();
        let mut rows = snapshot.parents_first();
        if self.by_tick {
            drop_fresh(&mut rows);
        }
        for row in &mut rows {
            let listed = table.get(&row.key.pid);
            // Known to the tick only, it cannot be told from a successor in the kernel's map.
            let Some(listed) = listed.filter(|listed| listed.key.has_same_tick(row.key)) else {
                continue;
            };
            row.key = listed.key;
            row.exact = true;
            row.pidfd_inode = listed.pidfd_inode;
            // Who has exited since is not in it any more, and was before; unless it came after that.
            let mark = marks.get(&row.key).or_else(|| before.get(&row.key));
            let unmarked = (self.complete && row.key.start < began).then(Membership::default);
            row.membership = mark.copied().or(unmarked);
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

/// Before the tick of a birth is over another may get the same name; the next look finds it. So it does those whom such a
/// one has made: without it nobody would know whose they are. Parents stand before their children.
fn drop_fresh(rows: &mut Vec<ProcEntry>) {
    let mut dropped = HashSet::new();
    rows.retain(|row| {
        let fresh = !row.exact && row.key.start + TICK_NS > row.read_at;
        let drop = fresh || dropped.contains(&row.parent);
        if drop {
            dropped.insert(row.key.pid);
        }
        !drop
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_model::event::{Image, Uids};

    fn row(pid: u32, parent: u32, tick: u64, at: u64) -> ProcEntry {
        ProcEntry {
            read_at: at,
            key: ProcessKey {
                pid,
                start: tick * TICK_NS,
            },
            exact: false,
            pidfd_inode: 0,
            membership: None,
            parent,
            uids: Uids::default(),
            image: Arc::new(Image::default()),
            kernel_thread: false,
            namespace_init: false,
        }
    }

    #[test]
    fn nobody_is_taken_in_without_the_maker_that_was_there() {
        // The tick was over when the child was read, and not when its parent was.
        let over = 8 * TICK_NS;
        let mut rows = vec![
            row(1, 0, 0, over),
            row(20, 1, 7, over - 1),
            row(30, 20, 7, over),
            row(40, 30, 7, over),
            row(50, 1, 7, over),
        ];
        drop_fresh(&mut rows);
        let left: Vec<u32> = rows.iter().map(|row| row.key.pid).collect();
        assert_eq!(left, [1, 50]);
    }
}
