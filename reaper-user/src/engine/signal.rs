//! A round of signals: whom they are for is looked at once more.

use std::cell::LazyCell;
use std::mem;
use std::time::Duration;

use hashbrown::HashSet;

use super::Engine;
use crate::source::procfs::Glance;
use crate::sys;
use reaper_model::event::{Event, EventKind, ProcessKey, Provenance};

/// How long a look at a process may take that is about to be signalled.
const PATIENCE: Duration = Duration::from_millis(100);

impl Engine {
    /// Opens what is queued, reads what has happened by then, and signals what is still due.
    pub(super) fn signal(&mut self) -> u64 {
        for key in self.follow.reaper.queued() {
            self.source.follow(*key, true);
        }
        self.follow.reaper.open_queued();
        if self.source.lost_total() != self.lost.total {
            self.look_for_loss();
        }
        if self.lossy {
            self.look_again();
        }
        self.source.look_now();
        let vouching = self.follow.reaper.needs_vouching(&self.model);
        let lost = self.lost.total;
        let was_lossy = mem::take(&mut self.lossy);
        let read = self.drain();
        // Known only now, so that nothing has been looked at for it.
        let missed = self.lossy;
        self.lossy |= was_lossy;
        // A record that was dropped says so only in the next one: what rests on there being none asks.
        let now = if vouching {
            self.source.lost_total()
        } else {
            lost
        };
        let lossless = now == lost && self.lost.total == lost && !missed;
        if missed || self.source.has_untold() {
            // What has happened to them is not known, or not yet.
            self.look_again();
        }
        self.leave_unvouched();
        self.follow.reaper.signal_queued(&mut self.model, lossless);
        let swaps = LazyCell::new(sys::swaps);
        let procfs = &self.procfs;
        self.follow.reaper.weigh(|pid| procfs.memory(pid, *swaps));
        read
    }

    /// Lets those alone for whom the source does not vouch: their pids may be others' by now.
    fn leave_unvouched(&mut self) {
        if self.source.probes().is_some() {
            return;
        }
        for key in self.follow.reaper.unsignalled() {
            let known = self.model.tree.get(key).is_some();
            if !known || self.source.vouches(key) {
                continue;
            }
            let glance = self.procfs.glance(key);
            if glance.is_ok_and(|glance| glance == Glance::Gone) {
                self.exited_unseen(key, Provenance::Procfs);
            } else if let Some(errno) = self.source.starved() {
                self.follow.reaper.set_aside(key, errno);
            } else {
                self.spare_for_now(key);
            }
        }
    }

    /// Leaves one alone of which it cannot be told what it is by now, and decides anew a few times.
    fn spare_for_now(&mut self, key: ProcessKey) {
        let session = self
            .model
            .tree
            .get(key)
            .and_then(|node| node.state.member.session);
        self.follow.reaper.spare(key);
        if let Some(session) = session {
            let again = self.undecided.again(key);
            self.wait(key, session, again);
        }
    }

    /// Reads from /proc what those are by now who are to be signalled: where events are missing, one may run
    /// a program that is kept. One that cannot be read is left alone.
    fn look_again(&mut self) {
        let keys = self.follow.reaper.unsignalled();
        let pids = keys.iter().map(|key| key.pid).collect();
        let rows = match self.procfs.snapshot_within(PATIENCE, pids) {
            Ok(snapshot) => snapshot.rows,
            Err(error) => {
                tracing::error!("{error}");
                Vec::new()
            }
        };
        let read: HashSet<u32> = rows.iter().map(|row| row.key.pid).collect();
        for row in rows {
            self.apply(&Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind: EventKind::Discovered(row),
            });
        }
        for key in keys {
            let unread = !read.contains(&key.pid);
            if unread
                && !self
                    .procfs
                    .glance(key)
                    .is_ok_and(|glance| glance == Glance::Gone)
            {
                self.follow.reaper.spare(key);
            }
        }
    }
}
