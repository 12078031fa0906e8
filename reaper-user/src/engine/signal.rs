//! Signals the claimed processes in rounds, and checks each process again after its pidfd is open.

use std::cell::LazyCell;
use std::mem;
use std::time::Duration;

use hashbrown::HashSet;

use super::Engine;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{Event, EventKind, ProcessKey, Provenance};

/// Time limit for reading the processes that are about to be signalled.
const REREAD_TIMEOUT: Duration = Duration::from_millis(100);
/// Limit of processes whose memory is measured after a round. The next round waits for that.
const MEASURED_MAX: usize = 256;

/// State at the time when the pidfds were opened, for the checks after the drain.
pub(super) struct OpenedRound {
    /// Number of records lost so far.
    lost: u64,
    /// Whether events had been lost before. The processes were then read again.
    had_losses: bool,
    /// Whether some pidfds are certain to refer to the right process only if no event is lost until the signal.
    needs_confirmation: bool,
}

impl Engine {
    /// Opens pidfds of the queued processes. After lost events, also reads these processes from /proc again. The source
    /// must be drained before [`Engine::signal_opened`].
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

    /// Signals the opened processes that are still due, and releases the others. Then measures the memory of up to
    /// [`MEASURED_MAX`] signalled processes.
    pub(super) fn signal_opened(&mut self, round: &OpenedRound) {
        // The loss was noticed during the drain, so the processes were not reread for it.
        let missed = self.has_losses;
        self.has_losses |= round.had_losses;
        // The ring reports a loss only in the next record. Where the check depends on it, the source's counter is read.
        let lost = match round.needs_confirmation {
            true => self.source.lost_total(),
            false => round.lost,
        };
        let lossless = lost == round.lost && self.lost.total == round.lost && !missed;
        if missed || self.source.has_undrained() {
            // Events about these processes were lost or not drained yet.
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

    /// Takes processes out of this round if the source does not confirm their identity: their pid may have been reused.
    ///
    /// The exit of one that has exited is applied to the model. The others are retried later, a limited number of
    /// times. Does nothing if the source has probes.
    fn release_unconfirmed(&mut self) {
        if self.source.probes().is_some() {
            return;
        }
        for key in self.ingest.reaper.unsignalled() {
            let known = self.model.tree.get(key).is_some();
            if !known || self.source.confirms_identity(key) {
                continue;
            }
            let liveness = self.kernel.processes.probe(key);
            if liveness.is_ok_and(|liveness| liveness == Liveness::Gone) {
                self.exited_unseen(key, Provenance::Procfs);
            } else if let Some(errno) = self.source.pidfd_error() {
                self.ingest.reaper.release_failed(key, errno);
            } else {
                self.defer_unreadable(key);
            }
        }
    }

    /// Releases the claim on a process that cannot be read, so it gets no signal. Schedules another evaluation, unless
    /// the retries of the process are used up.
    fn defer_unreadable(&mut self, key: ProcessKey) {
        let session = self
            .model
            .tree
            .get(key)
            .and_then(|node| node.state.member.session);
        self.ingest.reaper.release_unreadable(key);
        if let Some(session) = session {
            let retry = self.deferred.next_retry(key, self.kernel.clock.monotonic());
            self.defer(key, session, retry);
        }
    }

    /// Reads from /proc the processes that are about to get their first signal, for up to [`REREAD_TIMEOUT`]. Releases
    /// those that cannot be read, unless they have exited. Used after lost events: a process may have executed a
    /// program that is kept.
    fn reread_unsignalled(&mut self) {
        let keys = self.ingest.reaper.unsignalled();
        let pids = keys.iter().map(|key| key.pid).collect();
        let rows = match self.kernel.processes.snapshot_within(REREAD_TIMEOUT, pids) {
            Ok(snapshot) => snapshot.rows,
            Err(error) => {
                tracing::error!(
                    "events were lost, so {} processes must be read again before they are signalled: {error}; they are not \
                     signalled for now",
                    keys.len()
                );
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
                    .is_ok_and(|liveness| liveness == Liveness::Gone)
            {
                self.ingest.reaper.release_unreadable(key);
            }
        }
    }
}
