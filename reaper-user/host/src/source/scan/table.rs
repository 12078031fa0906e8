//! Compares each pass over the process table with the previous one and makes events of the differences.
//!
//! Pure: no system calls, no clock. A pass provides one [`StatRow`] of each process. The caller then reads the new and
//! changed processes in full and passes their rows back, from which the events are made. A process that could not be
//! read stays unchanged in the table, so the next pass finds the same difference again.

use hashbrown::{HashMap, HashSet};

use reaper_model::event::{EventKind, ExitStatus, ProcEntry, ProcessKey};

/// Brief facts about a process, enough to detect a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatRow {
    /// Key whose start is a whole tick on Linux.
    pub key: ProcessKey,
    /// Pid of the parent, 0 for none.
    pub parent: u32,
    /// Facts that show whether the process runs another program.
    pub fingerprint: ImageFingerprint,
}

/// Facts that change when a process runs another program, or changes its name, group or terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageFingerprint {
    /// Session id (`setsid(2)`).
    pub sid: u32,
    /// Process group id.
    pub pgid: u32,
    /// Controlling terminal, as in the `stat` file.
    pub tty: u32,
    /// The kernel's name of the process, padded with NULs.
    pub comm: [u8; 16],
    /// Numbers that differ after each exec; 0 if unknown. On Linux they are addresses that each exec randomises.
    pub exec: [u64; 2],
}

/// Last reported state of a process.
struct ScanRow {
    start: u64,
    parent: u32,
    fingerprint: ImageFingerprint,
    /// Number of the last pass that listed it.
    pass: u64,
    /// Whether a pass has seen another parent than the reported one.
    parent_changed: bool,
    /// Number of successive passes in which it had changed but could not be read.
    unread_passes: u32,
}

/// Number of passes for which the new children of a process that has changed and cannot be read are held back.
///
/// Reported earlier, they would be taken for children of its previous program.
const UNREAD_PASSES_MAX: u32 = 16;

/// The reported processes, and the differences found by the current pass.
#[derive(Default)]
pub struct ScanTable {
    /// Reported processes by pid.
    rows: HashMap<u32, ScanRow, foldhash::fast::FixedState>,
    /// Number of the current pass.
    pass: u64,
    /// Differences found so far in the current pass.
    differences: Differences,
}

/// Differences between a pass and the reported state.
#[derive(Default)]
pub struct Differences {
    /// Processes that the table does not have.
    pub new: Vec<StatRow>,
    /// Processes with another fingerprint.
    pub changed: Vec<StatRow>,
    /// Processes with another parent, and its pid.
    moved: Vec<(ProcessKey, u32)>,
    /// Processes that were not listed and whose exit the kernel will not report.
    pub gone: Vec<ProcessKey>,
    /// Whether another pass is needed soon, because a difference could not be reported yet.
    pub unsettled: bool,
}

impl ImageFingerprint {
    /// Returns whether the process has run another program, rather than changed its name or process group. Only its
    /// name decides if both [`ImageFingerprint::exec`] are unknown.
    fn is_exec(&self, before: &ImageFingerprint) -> bool {
        if self.exec == [0; 2] && before.exec == [0; 2] {
            self.comm != before.comm
        } else {
            self.exec != before.exec
        }
    }
}

impl Differences {
    /// Returns the pids of the processes to read in full: the new and the changed ones.
    pub fn wanted(&self) -> Vec<u32> {
        let all = self.new.iter().chain(&self.changed);
        all.map(|stat| stat.key.pid).collect()
    }

    /// Returns whether any difference concerns a watched process, or a process that may descend from one.
    pub fn concerns(&self, is_watched: impl Fn(u32) -> bool) -> bool {
        let born = |stat: &StatRow| {
            let ImageFingerprint { sid, pgid, .. } = stat.fingerprint;
            [stat.parent, sid, pgid].into_iter().any(&is_watched)
        };
        let moved = |(key, parent): &(ProcessKey, u32)| is_watched(key.pid) || is_watched(*parent);
        self.new.iter().any(born)
            || self.changed.iter().any(|of| is_watched(of.key.pid))
            || self.moved.iter().any(moved)
            || self.gone.iter().any(|key| is_watched(key.pid))
    }
}

impl ScanTable {
    /// Begins a pass. A pass that is abandoned changes nothing.
    pub fn begin(&mut self) {
        self.pass += 1;
        self.differences = Differences::default();
    }

    /// Records that the pass has listed a process.
    ///
    /// `fresh` says that the tick of its start has not ended yet. Until then its pid could be reused by a process with the
    /// same start tick, so a fresh process is left for the next pass.
    pub fn list(&mut self, stat: StatRow, fresh: bool) {
        let StatRow {
            key,
            parent,
            fingerprint,
        } = stat;
        let known = self.rows.get_mut(&key.pid);
        let Some(row) = known.filter(|row| row.start == key.start) else {
            if fresh {
                self.differences.unsettled = true;
            } else {
                self.differences.new.push(stat);
            }
            return;
        };
        row.pass = self.pass;
        if row.fingerprint != fingerprint {
            self.differences.changed.push(stat);
        }
        if row.parent != parent {
            self.differences.moved.push((key, parent));
        }
    }

    /// Records that a process exists whose current state cannot be read. It then counts as unchanged, not as gone.
    pub fn mark_present(&mut self, pid: u32) {
        if let Some(row) = self.rows.get_mut(&pid) {
            row.pass = self.pass;
        }
    }

    /// Returns the pid of the last reported parent of a process; `None` if the process is not in the table.
    pub fn parent(&self, key: ProcessKey) -> Option<u32> {
        let row = self.rows.get(&key.pid);
        row.filter(|row| row.start == key.start)
            .map(|row| row.parent)
    }

    /// Removes processes whose exits the kernel has reported, and emits the exits.
    ///
    /// Children come before their parents, so that no process becomes an orphan that has exited as well.
    pub fn emit_exits(
        &mut self,
        ended: &HashMap<ProcessKey, ExitStatus>,
        mut emit: impl FnMut(EventKind),
    ) {
        let mut keys: Vec<ProcessKey> = ended.keys().copied().collect();
        keys.sort_by_key(|key| (key.start, key.pid));
        let order = parents_first(&keys, |key| self.parent(key));
        for key in order.into_iter().rev() {
            if self.parent(key).is_some() {
                self.rows.remove(&key.pid);
            }
            emit(exit(key, ended[&key]));
        }
    }

    /// Ends the pass and returns the differences. `held` says whether the kernel will report the exit of a process, which
    /// is then not taken as gone.
    pub fn compare(&mut self, held: impl Fn(ProcessKey) -> bool) -> Differences {
        let mut found = std::mem::take(&mut self.differences);
        let missing = self.rows.iter().filter(|(_, row)| row.pass != self.pass);
        let missing = missing.map(|(pid, row)| ProcessKey {
            pid: *pid,
            start: row.start,
        });
        found.gone = missing.filter(|key| !held(*key)).collect();
        // A pass takes a while: a parent can be listed and exit before its child is listed. The child's new parent is
        // reported once the old one is missing, or once two passes have seen it.
        let mut moved = std::mem::take(&mut found.moved);
        moved.retain(|(key, _)| {
            let parent = self.rows.get(&key.pid).map(|row| row.parent);
            let parent = parent.and_then(|pid| self.rows.get(&pid));
            let listed = parent.is_some_and(|parent| parent.pass == self.pass);
            let row = self.rows.get_mut(&key.pid);
            let confirmed = row.is_none_or(|row| std::mem::replace(&mut row.parent_changed, true));
            found.unsettled |= listed && !confirmed;
            !listed || confirmed
        });
        found.moved = moved;
        found
    }

    /// Emits the differences. `rows` are the processes of [`Differences::wanted`] that could be read.
    ///
    /// A new or changed process without a row is left for the next pass, and so are its new children. The children of a
    /// changed process are held back for a limited number of passes.
    ///
    /// The order matters:
    ///
    /// 1. Execs come before new processes, because a child counts as one of its parent's current program, which may be a
    ///    boundary.
    /// 2. New processes come before exits. A process that has lost its parent may be attributed only by ids that its
    ///    ancestors gave it. And a session must not close before its last members are reported.
    /// 3. Exits come before reparenting, children's before those of their parents. A process that has exited becomes no
    ///    orphan.
    pub fn emit_changes(
        &mut self,
        mut found: Differences,
        rows: Vec<ProcEntry>,
        mut emit: impl FnMut(EventKind),
    ) {
        let mut rows: HashMap<ProcessKey, ProcEntry> =
            rows.into_iter().map(|row| (row.key, row)).collect();
        let order = |key: &ProcessKey| (key.start, key.pid);
        let parents = self.keys_of(found.moved.iter().map(|(key, _)| key.pid));
        found.gone.sort_by_key(order);
        let parent = |key: ProcessKey| self.parent(key);
        let gone = parents_first(&found.gone, parent);
        let new_pids: HashSet<u32> = found.new.iter().map(|new| new.key.pid).collect();
        // Exits of processes whose pid belongs to a new process now.
        for key in gone.iter().rev().filter(|key| new_pids.contains(&key.pid)) {
            self.rows.remove(&key.pid);
            emit(exit(*key, ExitStatus::Unknown));
        }
        let mut unread_parents = HashSet::new();
        for stat in found.changed {
            let Some(row) = self.rows.get_mut(&stat.key.pid) else {
                continue;
            };
            let Some(seen) = rows.remove(&stat.key) else {
                row.unread_passes = row.unread_passes.saturating_add(1);
                if row.unread_passes <= UNREAD_PASSES_MAX {
                    unread_parents.insert(stat.key.pid);
                }
                continue;
            };
            row.unread_passes = 0;
            let before = std::mem::replace(&mut row.fingerprint, stat.fingerprint);
            if stat.fingerprint.is_exec(&before) {
                emit(exec(seen));
            } else {
                emit(EventKind::Discovered(seen));
            }
        }
        let known: HashMap<ProcessKey, u32> =
            rows.iter().map(|(key, row)| (*key, row.parent)).collect();
        found.new.sort_by_key(|new| order(&new.key));
        let fingerprints: HashMap<ProcessKey, ImageFingerprint> =
            found.new.iter().map(|g| (g.key, g.fingerprint)).collect();
        let born: Vec<ProcessKey> = found.new.iter().map(|new| new.key).collect();
        let mut unread_new = new_pids.clone();
        for key in parents_first(&born, |key| known.get(&key).copied()) {
            let (Some(row), Some(fingerprint)) = (rows.remove(&key), fingerprints.get(&key)) else {
                continue;
            };
            // Without its parent it could not be attributed to a session.
            let parent = row.parent;
            if (unread_new.contains(&parent) || unread_parents.contains(&parent))
                && parent != key.pid
            {
                continue;
            }
            unread_new.remove(&key.pid);
            self.insert(key, row.parent, *fingerprint);
            emit(EventKind::Discovered(row));
        }
        for key in gone.iter().rev().filter(|key| !new_pids.contains(&key.pid)) {
            self.rows.remove(&key.pid);
            emit(exit(*key, ExitStatus::Unknown));
        }
        for (child, adopter) in found.moved {
            let start = self.rows.get(&adopter).map(|row| row.start);
            if let Some(row) = self.rows.get_mut(&child.pid) {
                row.parent_changed = false;
                if unread_new.contains(&adopter) {
                    row.parent = 0;
                    continue;
                }
                row.parent = adopter;
                emit(EventKind::Reparent {
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

    /// Returns the keys of the last reported parents, by pid of the child.
    fn keys_of(&self, children: impl Iterator<Item = u32>) -> HashMap<u32, ProcessKey> {
        let key = |child: u32| {
            let pid = self.rows.get(&child)?.parent;
            let start = self.rows.get(&pid)?.start;
            Some((child, ProcessKey { pid, start }))
        };
        children.filter_map(key).collect()
    }

    /// Adds a process that is about to be reported.
    fn insert(&mut self, key: ProcessKey, parent: u32, fingerprint: ImageFingerprint) {
        let row = ScanRow {
            start: key.start,
            parent,
            fingerprint,
            pass: self.pass,
            parent_changed: false,
            unread_passes: 0,
        };
        self.rows.insert(key.pid, row);
    }
}

/// Returns the keys in the given order, but with parents moved before their children. Cuts loops, which only damaged data
/// can form.
pub(super) fn parents_first(
    keys: &[ProcessKey],
    parent: impl Fn(ProcessKey) -> Option<u32>,
) -> Vec<ProcessKey> {
    let by_pid: HashMap<u32, ProcessKey> = keys.iter().map(|key| (key.pid, *key)).collect();
    let mut placed = HashSet::with_capacity(keys.len());
    let mut all = Vec::with_capacity(keys.len());
    for key in keys {
        let mut chain = Vec::new();
        let mut next = Some(*key);
        while let Some(key) = next.filter(|key| placed.insert(*key)) {
            chain.push(key);
            next = parent(key).and_then(|pid| by_pid.get(&pid)).copied();
        }
        all.extend(chain.into_iter().rev());
    }
    all
}

/// Returns the event of an exit.
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
