//! What the last pass over the process table saw, and what another one tells by being different.
//!
//! Pure: no system calls, no clock. A pass hands in one [`StatRow`] of each process; what differs from before has to be
//! read in full by somebody else, and comes back as rows, of which events are made. What could not be read is not
//! taken in either, so that the next pass finds it once more.

use hashbrown::{HashMap, HashSet};

use reaper_model::event::{EventKind, ExitStatus, ProcEntry, ProcessKey};

/// A short look at a process: enough to tell whether anything of it has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatRow {
    /// The start is a whole tick.
    pub key: ProcessKey,
    /// Pid of the parent, 0 for none.
    pub parent: u32,
    pub fingerprint: ImageFingerprint,
}

/// What changes when a process becomes something else than it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageFingerprint {
    pub sid: u32,
    pub pgid: u32,
    pub tty: u32,
    /// The kernel's name for the program, filled up with NULs.
    pub comm: [u8; 16],
    /// Addresses that are random at each exec, 0 where they are not shown.
    pub exec: [u64; 2],
}

/// What was told of a process last.
struct ScanRow {
    start: u64,
    parent: u32,
    print: ImageFingerprint,
    /// The pass in which it was there last.
    pass: u64,
    /// It has had another parent than the one told of, though that was still there.
    moves: bool,
    /// In how many passes in a row it was found to have changed and could not be read.
    unread: u32,
}

/// In so many passes whom one has borne that has changed and cannot be read waits for it: by what it was before, they may
/// be taken for what they are not.
const UNREAD_MAX: u32 = 16;

/// See the module.
#[derive(Default)]
pub struct ScanTable {
    rows: HashMap<u32, ScanRow, foldhash::fast::FixedState>,
    pass: u64,
    /// Of this pass.
    differences: Differences,
}

/// What a pass found to be other than before.
#[derive(Default)]
pub struct Differences {
    pub new: Vec<StatRow>,
    /// They run another program, perhaps.
    pub changed: Vec<StatRow>,
    /// They have another parent, whose pid stands here.
    moved: Vec<(ProcessKey, u32)>,
    pub gone: Vec<ProcessKey>,
    /// Something is on its way that the next pass will see.
    pub unsettled: bool,
}

impl ImageFingerprint {
    /// Whether an exec lies between the two, rather than a new name or another process group.
    fn is_exec(&self, before: &ImageFingerprint) -> bool {
        if self.exec == [0; 2] && before.exec == [0; 2] {
            self.comm != before.comm
        } else {
            self.exec != before.exec
        }
    }
}

impl Differences {
    /// Whom a full row is wanted of.
    pub fn wanted(&self) -> Vec<u32> {
        let all = self.new.iter().chain(&self.changed);
        all.map(|glimpse| glimpse.key.pid).collect()
    }

    /// Whether any of this is about somebody of whom `matters` holds, or who may descend from one.
    pub fn concern(&self, matters: impl Fn(u32) -> bool) -> bool {
        let born = |glimpse: &StatRow| {
            let ImageFingerprint { sid, pgid, .. } = glimpse.fingerprint;
            [glimpse.parent, sid, pgid].into_iter().any(&matters)
        };
        let moved = |(key, parent): &(ProcessKey, u32)| matters(key.pid) || matters(*parent);
        self.new.iter().any(born)
            || self.changed.iter().any(|of| matters(of.key.pid))
            || self.moved.iter().any(moved)
            || self.gone.iter().any(|key| matters(key.pid))
    }
}

impl ScanTable {
    /// Begins a pass. One that is given up half-way changes nothing.
    pub fn begin(&mut self) {
        self.pass += 1;
        self.differences = Differences::default();
    }

    /// A process is there. `fresh`: the tick in which it began was not over, so that another one may still come that
    /// has the same pid and the same start for all that can be seen. It is left for the next pass, after which nobody
    /// can be taken for it any more.
    pub fn list(&mut self, glimpse: StatRow, fresh: bool) {
        let StatRow {
            key,
            parent,
            fingerprint: print,
        } = glimpse;
        let known = self.rows.get_mut(&key.pid);
        let Some(row) = known.filter(|row| row.start == key.start) else {
            if fresh {
                self.differences.unsettled = true;
            } else {
                self.differences.new.push(glimpse);
            }
            return;
        };
        row.pass = self.pass;
        if row.print != print {
            self.differences.changed.push(glimpse);
        }
        if row.parent != parent {
            self.differences.moved.push((key, parent));
        }
    }

    /// A process is there, and there is no telling what it is by now.
    pub fn keep(&mut self, pid: u32) {
        if let Some(row) = self.rows.get_mut(&pid) {
            row.pass = self.pass;
        }
    }

    /// The parent of a process as told last.
    pub fn parent(&self, key: ProcessKey) -> Option<u32> {
        let row = self.rows.get(&key.pid);
        row.filter(|row| row.start == key.start)
            .map(|row| row.parent)
    }

    /// Removes processes whose exits the kernel has reported, and emits these: children before their parents, since no
    /// process that has exited becomes an orphan.
    pub fn emit_exits(
        &mut self,
        ended: &HashMap<ProcessKey, ExitStatus>,
        mut tell: impl FnMut(EventKind),
    ) {
        let mut keys: Vec<ProcessKey> = ended.keys().copied().collect();
        keys.sort_by_key(|key| (key.start, key.pid));
        let order = parents_first(&keys, |key| self.parent(key));
        for key in order.into_iter().rev() {
            if self.parent(key).is_some() {
                self.rows.remove(&key.pid);
            }
            tell(exit(key, ended[&key]));
        }
    }

    /// Ends the pass: what it found. `held`: of whom somebody else tells the exit.
    pub fn compare(&mut self, held: impl Fn(ProcessKey) -> bool) -> Differences {
        let mut found = std::mem::take(&mut self.differences);
        let missing = self.rows.iter().filter(|(_, row)| row.pass != self.pass);
        let missing = missing.map(|(pid, row)| ProcessKey {
            pid: *pid,
            start: row.start,
        });
        found.gone = missing.filter(|key| !held(*key)).collect();
        // A pass takes a while: who has lost a parent that was still listed is an orphan once that is gone. It is
        // believed, though, if it stays so.
        let mut moved = std::mem::take(&mut found.moved);
        moved.retain(|(key, _)| {
            let parent = self.rows.get(&key.pid).map(|row| row.parent);
            let parent = parent.and_then(|pid| self.rows.get(&pid));
            let listed = parent.is_some_and(|parent| parent.pass == self.pass);
            let row = self.rows.get_mut(&key.pid);
            let believed = row.is_none_or(|row| std::mem::replace(&mut row.moves, true));
            found.unsettled |= listed && !believed;
            !listed || believed
        });
        found.moved = moved;
        found
    }

    /// Tells of what was found. `rows` are those that could be read of whom [`Differences::wanted`] names.
    ///
    /// Other programs come before births: what a process has borne since it became another is that one's, and what is below
    /// a boundary is nobody's. Births come before exits: who has lost its makers by now may have nothing but their ids to be known by, and a
    /// session is not over while somebody of it is about to be found. Exits come before adoptions, and children's
    /// before those of their parents: nobody is orphaned who is gone.
    pub fn emit_changes(
        &mut self,
        mut found: Differences,
        rows: Vec<ProcEntry>,
        mut tell: impl FnMut(EventKind),
    ) {
        let mut rows: HashMap<ProcessKey, ProcEntry> =
            rows.into_iter().map(|row| (row.key, row)).collect();
        let order = |key: &ProcessKey| (key.start, key.pid);
        let parents = self.keys_of(found.moved.iter().map(|(key, _)| key.pid));
        found.gone.sort_by_key(order);
        let above = |key: ProcessKey| self.parent(key);
        let gone = parents_first(&found.gone, above);
        let taken: HashSet<u32> = found.new.iter().map(|new| new.key.pid).collect();
        // Whoever has a pid now that was another's.
        for key in gone.iter().rev().filter(|key| taken.contains(&key.pid)) {
            self.rows.remove(&key.pid);
            tell(exit(*key, ExitStatus::Unknown));
        }
        let mut unsure = HashSet::new();
        for glimpse in found.changed {
            let Some(row) = self.rows.get_mut(&glimpse.key.pid) else {
                continue;
            };
            let Some(seen) = rows.remove(&glimpse.key) else {
                row.unread = row.unread.saturating_add(1);
                if row.unread <= UNREAD_MAX {
                    unsure.insert(glimpse.key.pid);
                }
                continue;
            };
            row.unread = 0;
            let before = std::mem::replace(&mut row.print, glimpse.fingerprint);
            if glimpse.fingerprint.is_exec(&before) {
                tell(exec(seen));
            } else {
                tell(EventKind::Discovered(seen));
            }
        }
        let known: HashMap<ProcessKey, u32> =
            rows.iter().map(|(key, row)| (*key, row.parent)).collect();
        found.new.sort_by_key(|new| order(&new.key));
        let prints: HashMap<ProcessKey, ImageFingerprint> =
            found.new.iter().map(|g| (g.key, g.fingerprint)).collect();
        let born: Vec<ProcessKey> = found.new.iter().map(|new| new.key).collect();
        let mut unread = taken.clone();
        for key in parents_first(&born, |key| known.get(&key).copied()) {
            let (Some(row), Some(print)) = (rows.remove(&key), prints.get(&key)) else {
                continue;
            };
            // Without its parent nobody would know whose it is.
            let above = row.parent;
            if (unread.contains(&above) || unsure.contains(&above)) && above != key.pid {
                continue;
            }
            unread.remove(&key.pid);
            self.insert(key, row.parent, *print);
            tell(EventKind::Discovered(row));
        }
        for key in gone.iter().rev().filter(|key| !taken.contains(&key.pid)) {
            self.rows.remove(&key.pid);
            tell(exit(*key, ExitStatus::Unknown));
        }
        for (child, adopter) in found.moved {
            let start = self.rows.get(&adopter).map(|row| row.start);
            if let Some(row) = self.rows.get_mut(&child.pid) {
                row.moves = false;
                if unread.contains(&adopter) {
                    row.parent = 0;
                    continue;
                }
                row.parent = adopter;
                tell(EventKind::Reparent {
                    child,
                    old_parent: parents.get(&child.pid).copied(),
                    adopter: start.map(|start| ProcessKey {
                        pid: adopter,
                        start,
                    }),
                    membership: None,
                });
            }
        }
    }

    /// The keys of the parents, as told last, of those with these pids.
    fn keys_of(&self, children: impl Iterator<Item = u32>) -> HashMap<u32, ProcessKey> {
        let key = |child: u32| {
            let pid = self.rows.get(&child)?.parent;
            let start = self.rows.get(&pid)?.start;
            Some((child, ProcessKey { pid, start }))
        };
        children.filter_map(key).collect()
    }

    fn insert(&mut self, key: ProcessKey, parent: u32, print: ImageFingerprint) {
        let row = ScanRow {
            start: key.start,
            parent,
            print,
            pass: self.pass,
            moves: false,
            unread: 0,
        };
        self.rows.insert(key.pid, row);
    }
}

/// The keys in the order given, but for parents, which come before their children. A loop, which only damage could
/// make, is cut.
pub(super) fn parents_first(
    keys: &[ProcessKey],
    parent: impl Fn(ProcessKey) -> Option<u32>,
) -> Vec<ProcessKey> {
    let by_pid: HashMap<u32, ProcessKey> = keys.iter().map(|key| (key.pid, *key)).collect();
    let mut placed = HashSet::with_capacity(keys.len());
    let mut all = Vec::with_capacity(keys.len());
    for key in keys {
        let mut line = Vec::new();
        let mut next = Some(*key);
        while let Some(key) = next.filter(|key| placed.insert(*key)) {
            line.push(key);
            next = parent(key).and_then(|pid| by_pid.get(&pid)).copied();
        }
        all.extend(line.into_iter().rev());
    }
    all
}

/// The end of a process, as /proc or a pidfd has it.
pub fn exit(key: ProcessKey, ended: ExitStatus) -> EventKind {
    EventKind::Exit {
        key,
        parent: None,
        exit_status: ended,
        peak_rss: 0,
        membership: None,
    }
}

fn exec(seen: ProcEntry) -> EventKind {
    EventKind::Exec {
        key: seen.key,
        parent: None,
        uids: seen.uids,
        pidfd_inode: seen.pidfd_inode,
        image: seen.image,
        membership: None,
    }
}
