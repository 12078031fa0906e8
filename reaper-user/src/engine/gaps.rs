//! Handles gaps: lost records, malformed records, and members without room in the kernel's map.
//!
//! A gap is announced in the stream. A reconciliation scan runs on its own thread and finds what was missed. Until its
//! results are applied, no new decision is made.

use std::time::Duration;

use tokio::sync::oneshot;

use super::reconcile::Reconciled;
use super::scan::{ScanResult, ScanScope, Scanner};
use super::{Engine, EngineError};
use crate::export::EventBody;
use reaper_host::advice::Advised as _;
use reaper_host::kernel::Clock;
use reaper_host::source::Lost;
use reaper_host::source::procfs::Liveness;
use reaper_model::event::{Event, EventKind, Provenance};

/// Delays before the next attempt if no reconciliation scan can be started: the first and the longest.
const DELAY_MIN: Duration = Duration::from_millis(50);
const DELAY_MAX: Duration = Duration::from_secs(1);

/// Period in which events may be missing.
pub struct Gap {
    reason: &'static str,
    /// Number of missing records or processes, 0 if unknown.
    total: u64,
    /// Time of the opening, in ns since boot.
    opened: u64,
    search: Search,
    /// Delay before the next attempt if a scan cannot be started. It doubles with each failed scan.
    delay: Duration,
}

enum Search {
    Scan(oneshot::Receiver<Result<ScanResult, EngineError>>),
    /// The scan could not be started. The next attempt is at this time, in ns of CLOCK_MONOTONIC.
    Retry(u64),
}

impl Gap {
    /// Returns the reason, as in [`EventBody::GapOpen`].
    pub(super) fn reason(&self) -> &'static str {
        self.reason
    }
}

fn log_failed_scan(error: &EngineError) {
    tracing::error!(
        "events were lost, and the processes cannot be scanned for what they reported: {error}; trying again; the service reaps \
         nothing new until that works"
    );
}

impl Engine {
    /// Opens a gap if records were lost, or if members had no room in the map, since the last call. Adds lost records
    /// to the counters of all open sessions.
    pub(super) fn look_for_loss(&mut self) {
        let lost = self.source.lost();
        if lost.total != self.lost.total {
            let since = lost.since(&self.lost);
            self.count.lost += since.total;
            self.lost = lost;
            for session in self.model.sessions.iter() {
                self.sessions.entry(session.id).or_default().lost += since.total;
                self.map_sync.dirty.insert(session.id);
            }
            let maps = self.source.maps_mut();
            if let Some(Err(error)) = maps.map(|maps| maps.set_lost_reported(lost.total)) {
                tracing::error!(
                    "cannot save the number of lost events in the kernel: {error}; a service that restarts may report the loss again"
                );
            }
            self.open_gap("records_lost", since);
        }
        let untracked = self.source.untracked_members();
        if untracked != self.untracked_members {
            let count = untracked - self.untracked_members.min(untracked);
            self.untracked_members = untracked;
            let capacity = self.source.maps().map_or(0, |maps| maps.capacity());
            self.emit(EventBody::MemberMapFull { count, capacity });
            let total = Lost {
                total: count,
                ..Lost::default()
            };
            self.open_gap("member_map_full", total);
        }
    }

    /// Opens a gap if the kernel skipped runs of a probe since the last call. The gap has the number of skipped runs,
    /// as that of missed events is unknown.
    pub(super) fn look_for_skips(&mut self) {
        let skipped = self.source.skipped();
        if skipped > self.skipped_probes {
            let total = Lost {
                total: skipped - self.skipped_probes,
                ..Lost::default()
            };
            self.skipped_probes = skipped;
            self.open_gap("probes_missed", total);
        }
    }

    /// Opens a gap for the malformed records of a drain, which together count as one lost record.
    pub(super) fn note_malformed(&mut self) {
        let total = Lost {
            total: 1,
            ..Lost::default()
        };
        self.open_gap("record_malformed", total);
    }

    /// Opens a gap: reports it and starts a scan. If one is open already, the next gap opens when that closes.
    /// The total of `missing` is 0 if the loss is unknown.
    pub(super) fn open_gap(&mut self, reason: &'static str, missing: Lost) {
        self.has_losses = true;
        let (total, by_kind) = (missing.total, missing.named());
        if self.gap.is_some() {
            // The running scan may have started too early for these.
            let (_, before) = self.next_gap.get_or_insert((reason, Lost::default()));
            before.add(&missing);
            return;
        }
        self.gaps += 1;
        self.emit(EventBody::GapOpen {
            reason,
            source: self.source.name(),
            total,
            by_kind,
        });
        self.gap = Some(Gap {
            reason,
            total,
            opened: self.kernel.clock.boot_time(),
            search: self.search(DELAY_MIN),
            delay: DELAY_MIN,
        });
    }

    /// Starts a reconciliation scan on its own thread. If that fails, the next attempt is due after `delay`.
    fn search(&self, delay: Duration) -> Search {
        // Untracked processes are not in the map. If members may be missing from it, all of /proc must be read.
        let complete = self.is_mapped();
        let reads_all = !self.source.is_filtered() || !complete;
        let scope = if reads_all {
            ScanScope::All
        } else {
            ScanScope::Members
        };
        let started = Scanner::new(&self.kernel, &*self.source, complete).and_then(|scanner| {
            let (done, scan) = oneshot::channel();
            // The engine may have stopped meanwhile.
            let work = move || drop(done.send(scanner.scan(scope)));
            std::thread::Builder::new()
                .name("reconcile".into())
                .spawn(work)
                .map_err(|error| {
                    EngineError::Scan(format!("cannot start a thread: {}", error.advised()))
                })?;
            Ok(scan)
        });
        match started {
            Ok(scan) => Search::Scan(scan),
            Err(error) => {
                log_failed_scan(&error);
                Search::Retry(self.kernel.clock.after(delay))
            }
        }
    }

    /// Waits for the scan of a gap, forever if there is no gap. Returns `None` when it is time for another attempt to
    /// start a scan.
    pub(super) async fn scan_done(
        clock: &dyn Clock,
        gap: &mut Option<Gap>,
    ) -> Option<Result<ScanResult, EngineError>> {
        match gap.as_mut().map(|gap| &mut gap.search) {
            Some(Search::Scan(scan)) => Some(match scan.await {
                Ok(scan) => scan,
                Err(_) => Err(EngineError::Scan(
                    "the scan's thread has panicked; report this as a bug".into(),
                )),
            }),
            Some(Search::Retry(at)) => {
                clock.sleep_until(*at).await;
                None
            }
            None => std::future::pending().await,
        }
    }

    /// Prepares the model for the results of a scan. Takes the result of [`Engine::scan_done`]. If there are no
    /// results, returns `None`. Another scan then starts at once or, after a failed one, after a delay that grows.
    pub(super) fn prepare_scan_result(
        &mut self,
        scan: Option<Result<ScanResult, EngineError>>,
    ) -> Option<ScanResult> {
        let scan = match scan {
            Some(Ok(scan)) => scan,
            failed => {
                let delay = self.gap.as_ref().map_or(DELAY_MIN, |gap| gap.delay);
                let search = match failed {
                    Some(Err(error)) => {
                        log_failed_scan(&error);
                        Search::Retry(self.kernel.clock.after(delay))
                    }
                    _ => self.search(delay),
                };
                if let Some(gap) = &mut self.gap {
                    gap.delay = (2 * delay).min(DELAY_MAX);
                    gap.search = search;
                }
                return None;
            }
        };
        self.model.forget_program_facts();
        // Some facts can be read only while their process is alive.
        let members = self.model.tree.iter();
        let members = members.filter(|node| node.state.member.session.is_some());
        self.ingest.new_images.extend(members.map(|node| node.key));
        // Without probes, sessions must be inferred from what processes inherited.
        self.model
            .set_infers_membership(self.source.probes().is_none());
        self.attribute_late_discovered();
        Some(scan)
    }

    /// Closes a gap and makes the queued decisions. `unreadable` is the number of processes that could not be read. The
    /// gap closes even if more events were lost meanwhile: a ring that is always full must not prevent reaping. After
    /// the decisions, the next gap opens for these events.
    pub(super) fn close_gap(&mut self, reconciled: Reconciled, unreadable: u32) {
        let Reconciled { found, exited } = reconciled;
        if self.source.is_filtered() {
            self.model.forget_untracked();
        }
        let Some(gap) = self.gap.take() else { return };
        self.emit(EventBody::GapClose {
            reason: gap.reason,
            total: gap.total,
            processes_recovered: found,
            exits_recovered: exited,
            duration: self.kernel.clock.boot_time().saturating_sub(gap.opened),
        });
        // Unreadable processes are read again before a signal.
        self.has_losses = self.next_gap.is_some() || unreadable > 0;
        self.decide();
        if let Some((reason, missing)) = self.next_gap.take() {
            self.open_gap(reason, missing);
        }
        self.sync_maps();
    }

    /// Looks up in /proc the adopters of orphans for which no reparent record has arrived, and applies them to the
    /// model. An orphan whose parent is still exiting is looked up again at the next call.
    pub(super) fn find_adopters(&mut self) {
        for child in std::mem::take(&mut self.ingest.without_adopter) {
            let node = self.model.tree.get(child);
            let Some(node) = node.filter(|node| node.parent.is_none()) else {
                continue;
            };
            let old_parent = node.orphaned.map(|orphaned| orphaned.old_parent);
            let Ok(Liveness::Alive { parent }) = self.kernel.processes.probe(child) else {
                continue;
            };
            let Some(adopter) = self.model.tree.by_pid(parent).map(|node| node.key) else {
                if old_parent.is_some_and(|old| old.pid == parent) {
                    // Its parent is still exiting. The next poll tries again.
                    self.ingest.without_adopter.push(child);
                }
                continue;
            };
            let kind = EventKind::Reparent {
                child,
                old_parent,
                adopter: Some(adopter),
                membership: None,
            };
            self.apply(&Event {
                time: self.kernel.clock.boot_time(),
                provenance: Provenance::Procfs,
                kind,
            });
        }
    }
}
