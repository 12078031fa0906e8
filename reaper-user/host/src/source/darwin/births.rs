//! Those who have come since the last pass over the process table, as events.
//!
//! The kernel has for each process whom it was born to, also when that is gone: a table that only has parents would show one
//! that was orphaned before anybody looked as a child of pid 1.

use crate::source::scan::table::exit;
use reaper_model::event::{EventKind, ExitStatus, ProcEntry, ProcessKey, Uids};

/// One of them.
pub struct Birth {
    pub key: ProcessKey,
    /// Whom it was born to, if that was ever seen and is not its parent by now.
    pub birth_parent: Option<ProcessKey>,
    pub uids: Uids,
    /// Pid of its parent by now.
    pub parent: u32,
    /// `None` for one that has exited since.
    pub row: Option<ProcEntry>,
}

/// All of a pass.
#[derive(Default)]
pub struct Births(pub Vec<Birth>);

impl Births {
    /// Makers before those they have made, as they began; then the ends of those who are gone already.
    pub fn tell(&mut self, mut tell: impl FnMut(EventKind)) {
        self.0.sort_by_key(|birth| (birth.key.start, birth.key.pid));
        for birth in &self.0 {
            if let Some(maker) = birth.birth_parent {
                tell(birth.fork(maker));
            }
            if let Some(row) = &birth.row {
                tell(EventKind::Discovered(row.clone()));
            }
        }
        // Nobody is orphaned who is gone.
        for birth in self.0.iter().rev().filter(|birth| birth.row.is_none()) {
            tell(exit(birth.key, ExitStatus::Unknown));
        }
    }

    /// Who has those whose makers were gone before they were found: nothing else tells. `living` gives who has a pid.
    pub fn tell_adoptions(
        &self,
        living: impl Fn(u32) -> Option<ProcessKey>,
        mut tell: impl FnMut(EventKind),
    ) {
        for birth in self.0.iter().filter(|birth| birth.row.is_some()) {
            if let Some(maker) = birth.birth_parent
                && living(maker.pid) != Some(maker)
            {
                tell(EventKind::Reparent {
                    child: birth.key,
                    old_parent: Some(maker),
                    adopter: living(birth.parent),
                    membership: None,
                });
            }
        }
    }
}

impl Birth {
    /// What would have been told when it was made.
    fn fork(&self, maker: ProcessKey) -> EventKind {
        EventKind::Fork {
            child: self.key,
            parent: Some(maker),
            creator: Some(maker),
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

    fn birth(pid: u32, maker: Option<u32>, parent: u32, lives: bool) -> Birth {
        Birth {
            key: key(pid),
            birth_parent: maker.map(key),
            uids: Uids::default(),
            parent,
            row: lives.then(|| row(pid, parent)),
        }
    }

    fn told(mut births: Births, living: impl Fn(u32) -> Option<ProcessKey>) -> Vec<EventKind> {
        let mut told = Vec::new();
        births.tell(|kind| told.push(kind));
        births.tell_adoptions(living, |kind| told.push(kind));
        told
    }

    #[test]
    fn an_orphan_of_one_that_was_never_seen_alive_has_its_lineage() {
        let (agent, forked, orphan) = (20, 30, 31);
        let births = Births(vec![
            birth(orphan, Some(forked), 1, true),
            birth(forked, Some(agent), agent, false),
        ]);
        let living = |pid| [1, agent, orphan].contains(&pid).then(|| key(pid));
        let known = [row(1, 0), row(agent, 1)].map(EventKind::Discovered);
        let mut tree = Tree::default();
        for kind in known.into_iter().chain(told(births, living)) {
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
        fn makers_come_first_and_ends_last(
            births in prop::collection::btree_map(2..40_u32, (prop::option::of(2..40_u32), any::<bool>()), 0..12),
            order in any::<prop::sample::Index>(),
        ) {
            let mut births: Vec<Birth> = births
                .into_iter()
                // Nobody is made by one that has begun later.
                .map(|(pid, (maker, lives))| birth(pid, maker.filter(|m| *m < pid), 1, lives))
                .collect();
            let count = births.len();
            if count > 0 {
                births.rotate_left(order.index(count));
            }
            let makers: Vec<(ProcessKey, ProcessKey)> =
                births.iter().filter_map(|birth| Some((birth.birth_parent?, birth.key))).collect();
            let dead = births.iter().filter(|birth| birth.row.is_none()).count();
            let told = told(Births(births), |pid| (pid == 1).then(|| key(1)));
            let at = |key: ProcessKey| told.iter().position(|kind| match kind {
                EventKind::Fork { child, .. } => *child == key,
                EventKind::Discovered(seen) => seen.key == key,
                _ => false,
            });
            for (maker, made) in makers {
                prop_assert!(at(maker).is_none() || at(maker) < at(made));
            }
            let is_end = |kind: &&EventKind| matches!(kind, EventKind::Exit { .. });
            let after = told.iter().skip_while(|kind| !is_end(kind));
            let is_birth = |kind: &EventKind| {
                matches!(kind, EventKind::Fork { .. } | EventKind::Discovered(_))
            };
            prop_assert!(!after.into_iter().any(is_birth));
            prop_assert_eq!(told.iter().filter(is_end).count(), dead);
        }
    }
}
