//! Emits the processes that a pass over the process table has found.
//!
//! The kernel stores the birth parent of each process, even after that has exited. By the parents in the table alone, a
//! process that was orphaned before the pass would appear as a child of pid 1.

use crate::source::scan::table::exit;
use reaper_model::event::{EventKind, ExitStatus, ProcEntry, ProcessKey, Uids};

/// A new process.
pub struct Birth {
    pub key: ProcessKey,
    /// Birth parent, if it was ever seen. `None` for a living process whose current parent it is.
    pub birth_parent: Option<ProcessKey>,
    pub uids: Uids,
    /// Pid of the current parent.
    pub parent: u32,
    /// `None` if it has exited already.
    pub row: Option<ProcEntry>,
}

/// New processes of a pass.
#[derive(Default)]
pub struct Births(pub Vec<Birth>);

impl Births {
    /// Emits the processes in the order of their starts, so parents first. Emits a fork if the birth parent is known,
    /// and also a discovery if the process is alive.
    ///
    /// Then emits the exits of those that have exited already.
    pub fn emit(&mut self, mut emit: impl FnMut(EventKind)) {
        self.0.sort_by_key(|birth| (birth.key.start, birth.key.pid));
        for birth in &self.0 {
            if let Some(birth_parent) = birth.birth_parent {
                emit(birth.fork(birth_parent));
            }
            if let Some(row) = &birth.row {
                emit(EventKind::Discovered(row.clone()));
            }
        }
        // In reverse order, so that no process becomes an orphan that has exited as well.
        for birth in self.0.iter().rev().filter(|birth| birth.row.is_none()) {
            emit(exit(birth.key, ExitStatus::Unknown));
        }
    }

    /// Emits the reparenting of living processes whose birth parents had exited before the pass. `living` returns the
    /// key of the living process that has a pid.
    pub fn emit_adoptions(
        &self,
        living: impl Fn(u32) -> Option<ProcessKey>,
        mut emit: impl FnMut(EventKind),
    ) {
        for birth in self.0.iter().filter(|birth| birth.row.is_some()) {
            if let Some(birth_parent) = birth.birth_parent
                && living(birth_parent.pid) != Some(birth_parent)
            {
                emit(EventKind::Reparent {
                    child: birth.key,
                    old_parent: Some(birth_parent),
                    adopter: living(birth.parent),
                    membership: None,
                });
            }
        }
    }
}

impl Birth {
    /// Returns the fork event that the kernel did not report.
    fn fork(&self, birth_parent: ProcessKey) -> EventKind {
        EventKind::Fork {
            child: self.key,
            parent: Some(birth_parent),
            creator: Some(birth_parent),
            uids: self.uids,
            pidfd_inode: self.row.as_ref().map_or(0, |row| row.pidfd_inode),
            namespace_init: false,
            membership: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use reaper_model::Tree;
    use reaper_model::event::{Event, Image, Provenance};

    fn key(pid: u32) -> ProcessKey {
        ProcessKey {
            pid,
            start: u64::from(pid) * 1_000_003,
        }
    }

    fn row(pid: u32, parent: u32) -> ProcEntry {
        let image = Image {
            comm: format!("p{pid}").into(),
            exe: format!("/bin/p{pid}").into(),
            ..Image::default()
        };
        ProcEntry {
            read_at: 1 << 40,
            key: key(pid),
            exact: true,
            pidfd_inode: u64::from(pid) + 1000,
            membership: None,
            parent,
            uids: Uids::default(),
            image: Arc::new(image),
            kernel_thread: false,
            namespace_init: false,
        }
    }

    fn birth(pid: u32, birth_parent: Option<u32>, parent: u32, lives: bool) -> Birth {
        Birth {
            key: key(pid),
            birth_parent: birth_parent.map(key),
            uids: Uids::default(),
            parent,
            row: lives.then(|| row(pid, parent)),
        }
    }

    fn events(mut births: Births, living: impl Fn(u32) -> Option<ProcessKey>) -> Vec<EventKind> {
        let mut events = Vec::new();
        births.emit(|kind| events.push(kind));
        births.emit_adoptions(living, |kind| events.push(kind));
        events
    }

    #[test]
    fn orphan_of_a_parent_never_seen_alive_has_its_birth_parent() {
        let (agent, forked, orphan) = (20, 30, 31);
        let births = Births(vec![
            birth(orphan, Some(forked), 1, true),
            birth(forked, Some(agent), agent, false),
        ]);
        let living = |pid| [1, agent, orphan].contains(&pid).then(|| key(pid));
        let known = [row(1, 0), row(agent, 1)].map(EventKind::Discovered);
        let mut tree = Tree::default();
        for kind in known.into_iter().chain(events(births, living)) {
            let event = Event {
                time: 1 << 40,
                provenance: Provenance::Procfs,
                kind,
            };
            tree.apply(&event, &mut Vec::new());
        }
        let node = tree.get(key(orphan)).unwrap();
        assert_eq!(node.birth_parent, Some(key(forked)));
        assert_eq!(node.orphaned.map(|from| from.old_parent), Some(key(forked)));
        assert_eq!((node.parent, node.pidfd_inode), (Some(key(1)), 1031));
        assert_eq!(node.image.comm, b"p31");
        assert!(tree.get(key(forked)).is_none());
    }

    proptest! {
        #[test]
        fn parents_come_first_and_exits_last(
            births in prop::collection::btree_map(2..40_u32, (prop::option::of(2..40_u32), any::<bool>()), 0..12),
            order in any::<prop::sample::Index>(),
        ) {
            let mut births: Vec<Birth> = births
                .into_iter()
                // A process starts after its birth parent.
                .map(|(pid, (birth_parent, lives))| birth(pid, birth_parent.filter(|m| *m < pid), 1, lives))
                .collect();
            let count = births.len();
            if count > 0 {
                births.rotate_left(order.index(count));
            }
            let parents: Vec<(ProcessKey, ProcessKey)> =
                births.iter().filter_map(|birth| Some((birth.birth_parent?, birth.key))).collect();
            let dead = births.iter().filter(|birth| birth.row.is_none()).count();
            let events = events(Births(births), |pid| (pid == 1).then(|| key(1)));
            let at = |key: ProcessKey| events.iter().position(|kind| match kind {
                EventKind::Fork { child, .. } => *child == key,
                EventKind::Discovered(seen) => seen.key == key,
                _ => false,
            });
            for (birth_parent, child) in parents {
                prop_assert!(at(birth_parent).is_none() || at(birth_parent) < at(child));
            }
            let is_end = |kind: &&EventKind| matches!(kind, EventKind::Exit { .. });
            let after = events.iter().skip_while(|kind| !is_end(kind));
            let is_birth = |kind: &EventKind| {
                matches!(kind, EventKind::Fork { .. } | EventKind::Discovered(_))
            };
            prop_assert!(!after.into_iter().any(is_birth));
            prop_assert_eq!(events.iter().filter(is_end).count(), dead);
        }
    }
}
