//! A round of signals: whom they are for is looked at once more.

use std::cell::LazyCell;
use std::mem;
use std::time::Duration;

use hashbrown::HashSet;

use super::Engine;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{Event, EventKind, ProcessKey, Provenance};

/// How long a look at a process may take that is about to be signalled.
const PATIENCE: Duration = Duration::from_millis(100);
/// Processes whose memory is read after a round of signals, at most: the next round waits for that.
const MEASURED_MAX: usize = 256;

/// What is known when pidfds are opened, for the check after the drain that follows.
pub(super) struct OpenedRound {
    /// Records lost by then.
    lost: u64,
    had_losses: bool,
    /// Whether some pidfds can only be verified by the source having lost nothing since.
    needs_confirmation: bool,
}

impl Engine {
    /// Opens pidfds of the processes that are queued. The source must be drained before [`Engine::signal_opened`].
    pub(super) fn open_queued(&mut self) -> OpenedRound {
        for key in self.ingest.reaper.queued() {
            self.source.watch_exit(*key, true);
        }
        self.ingest.reaper.open_queued();
        if self.source.lost_total() != self.lost.total {
            self.look_for_loss();
        }
        if self.has_losses {
            self.reread_unsignalled();
        }
        self.source.scan_now();
        OpenedRound {
            lost: self.lost.total,
            had_losses: mem::take(&mut self.has_losses),
            needs_confirmation: self.ingest.reaper.needs_confirmation(&self.model),
        }
    }

    /// Signals the opened processes that are still due.
    pub(super) fn signal_opened(&mut self, round: &OpenedRound) {
        // Known only now, so the rereading before the drain has not covered it.
        let missed = self.has_losses;
        self.has_losses |= round.had_losses;
        // The ring reports a loss only in the next record. Where the check relies on there being none, the source is asked.
        let lost = match round.needs_confirmation {
            true => self.source.lost_total(),
            false => round.lost,
        };
        let lossless = lost == round.lost && self.lost.total == round.lost && !missed;
        if missed || self.source.has_undrained() {
            // What has happened to them is not known, or not yet.
            self.reread_unsignalled();
        }
        self.release_unconfirmed();
        self.ingest.reaper.signal_queued(&mut self.model, lossless);
        let processes = &self.kernel.processes;
        let swaps = LazyCell::new(|| processes.is_swap_used());
        self.ingest
            .reaper
            .measure_memory(MEASURED_MAX, |pid| processes.memory(pid, *swaps));
    }

    /// Lets those alone for whom the source does not vouch: their pids may be others' by now.
    fn release_unconfirmed(&mut self) {
        if self.source.probes().is_some() {
            return;
        }
        for key in self.ingest.reaper.unsignalled() {
            let known = self.model.tree.get(key).is_some();
            if !known || self.source.confirms_identity(key) {
                continue;
            }
            let glance = self.kernel.processes.probe(key);
            if glance.is_ok_and(|glance| glance == Liveness::Gone) {
                self.exited_unseen(key, Provenance::Procfs);
            } else if let Some(errno) = self.source.pidfd_error() {
                self.ingest.reaper.release_failed(key, errno);
            } else {
                self.defer_unreadable(key);
            }
        }
    }

    /// Leaves one alone of which it cannot be told what it is by now, and decides anew a few times.
    fn defer_unreadable(&mut self, key: ProcessKey) {
        let session = self
            .model
            .tree
            .get(key)
            .and_then(|node| node.state.member.session);
        self.ingest.reaper.release_unreadable(key);
        if let Some(session) = session {
            let again = self.deferred.next_retry(key, self.kernel.clock.monotonic());
            self.defer(key, session, again);
        }
    }

    /// Reads from /proc what those are by now who are to be signalled: where events are missing, one may run
    /// a program that is kept. One that cannot be read is left alone.
    fn reread_unsignalled(&mut self) {
        let keys = self.ingest.reaper.unsignalled();
        let pids = keys.iter().map(|key| key.pid).collect();
        let rows = match self.kernel.processes.snapshot_within(PATIENCE, pids) {
            Ok(snapshot) => snapshot.rows,
            Err(error) => {
                tracing::error!("{error}");
                Vec::new()
            }
        };
        let read: HashSet<u32> = rows.iter().map(|row| row.key.pid).collect();
        for row in rows {
            self.apply(&Event {
                time: self.kernel.clock.boot_time(),
                provenance: Provenance::Procfs,
                kind: EventKind::Discovered(row),
            });
        }
        for key in keys {
            let unread = !read.contains(&key.pid);
            if unread
                && !self
                    .kernel
                    .processes
                    .probe(key)
                    .is_ok_and(|glance| glance == Liveness::Gone)
            {
                self.ingest.reaper.release_unreadable(key);
            }
        }
    }
}
