//! Defines the order in which source, model and reaper act.

use std::mem;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::yield_now;

use super::idle_timer::{IdleTimer, sleep_until};
use super::reconcile::Reconciled;
use super::scan::{ScanResult, ScanScope, Scanner};
use super::{Engine, EngineError, Stop};
use crate::api::messages::EngineRequest;
use crate::export::{EventBody, Totals};
use reaper_host::advice::Advised as _;
use reaper_host::sys;
use reaper_model::event::Provenance;

/// Limit of rounds of deciding and signalling before timers run.
const ROUNDS_MAX: usize = 64;
/// Limit of drains in a row before the results of a reconciliation scan are applied.
const DRAINS_MAX: usize = 10;
/// Limit of rounds of writing memberships while new processes appear.
const SEED_ROUNDS_MAX: usize = 100;

impl Engine {
    /// Reads all running processes and the state that an earlier service left. Events that arrive meanwhile wait in the
    /// ring. They are applied after the processes that the scan found, and before the exits that it inferred. Then
    /// writes the kernel's maps, and evaluates and signals the members that are due.
    pub(super) fn restore(&mut self) -> Result<(), EngineError> {
        let (restored, scan) = self.begin_restore()?;
        self.apply_entries(scan.rows);
        // Before later events are applied: children of kept processes are kept.
        self.restore_keeps();
        self.announce_ready(&restored);
        self.drain();
        self.ingest.out.flush_backlog();
        // The ring reports a loss only in a record that is written after the loss.
        self.look_for_loss();
        self.drain();
        self.apply_missing(&scan.pids, scan.began);
        self.finish_restore(&restored, &scan.memberships)?;
        self.seed_maps()?;
        self.allow_kernel_reap()?;
        self.settle();
        self.announce_caught_up(&restored);
        Ok(())
    }

    /// Writes all memberships to the kernel's map, until the probes track every process that must be tracked. From then
    /// on they filter out all other processes. After [`SEED_ROUNDS_MAX`] rounds they do so even if some processes are
    /// not tracked yet.
    fn seed_maps(&mut self) -> Result<(), EngineError> {
        let all = self.model.tree.iter().map(|node| node.key);
        self.ingest.map_changes.extend(all);
        if self.source.maps().is_none() {
            self.write_memberships()?;
            return Ok(());
        }
        for _ in 0..SEED_ROUNDS_MAX {
            while self.write_memberships()? > 0 {
                self.on_exits_before_membership();
                self.drain();
            }
            // A probe that looked up a membership before it was written either reports later or has nothing to report.
            if let Some(maps) = self.source.maps().filter(|_| self.source.is_filtered()) {
                maps.await_probes();
                self.drain();
                if self.write_memberships()? > 0 {
                    continue;
                }
            }
            self.set_seeded(true)?;
            // Children that were born earlier to a process without a membership have been reported.
            self.drain();
            if self.write_memberships()? == 0 {
                return Ok(());
            }
            self.set_seeded(false)?;
            // Children of processes whose membership was written only now may not have been reported.
            let scan = Scanner::new(&self.kernel, &*self.source, false)?.scan(ScanScope::All)?;
            self.reconcile(scan);
            if self.source.is_filtered() {
                self.model.forget_untracked();
            }
        }
        self.set_seeded(true)?;
        Ok(())
    }

    /// Runs until `stop` completes, and answers requests meanwhile. Then ends what is due, within limits, unless the
    /// next service does. Returns the totals. The summary in the stream contains the reason that `stop` returned.
    ///
    /// # Errors
    /// The source or a file descriptor cannot be polled.
    pub async fn run(
        mut self,
        stop: impl Future<Output = Stop>,
        mut requests: mpsc::Receiver<EngineRequest>,
    ) -> Result<Totals, EngineError> {
        let mut events = sys::readable(&self.source)?;
        let confirm = sys::readable(self.ingest.reaper.exit_poll())?;
        let clock = Arc::clone(&self.kernel.clock);
        let mut idle_timer = IdleTimer::new(clock.monotonic());
        tokio::pin!(stop);
        let stop = loop {
            if self.failover.must_register(clock.monotonic()) {
                match sys::readable(&self.source) {
                    Ok(new) => {
                        events = new;
                        self.failover.on_registered();
                    }
                    Err(error) => {
                        tracing::error!(
                            "cannot wait for events of the source {}: {}; trying again",
                            self.source.name(),
                            error.advised()
                        );
                        self.failover.retry_registration(clock.monotonic());
                    }
                }
                idle_timer.on_records(1, clock.monotonic());
            }
            // Checked here as well as by the timer branch: a busy ring could prevent that branch from being polled.
            let escalation = self.ingest.reaper.next_deadline();
            if escalation.is_some_and(|at| at <= clock.monotonic()) {
                self.advance_escalations();
                idle_timer.on_records(self.settle(), clock.monotonic());
            }
            self.notify_alive();
            if idle_timer.has_expired(clock.monotonic()) {
                self.look_for_skips();
                idle_timer.on_poll(self.settle(), clock.monotonic());
                self.find_adopters();
                if idle_timer.goes_idle() {
                    self.notify_status();
                    if let Err(error) = self.source.announce_idle(true) {
                        self.on_source_failure(&error);
                        idle_timer.on_records(1 + self.settle(), clock.monotonic());
                        continue;
                    }
                    self.look_for_loss();
                }
            }
            // More records may follow the drained ones without waking this thread.
            idle_timer.on_records(mem::take(&mut self.drained), clock.monotonic());
            let timers = [
                self.ingest.reaper.next_deadline(),
                self.deferred.next(),
                self.successions.next().filter(|_| self.gap.is_none()),
                self.failover.next(),
                self.service_messages.next_alive,
            ];
            let deadline = timers.into_iter().flatten().min();
            tokio::select! {
                biased;
                stop = &mut stop => break stop,
                ready = events.readable() => {
                    ready?.clear_ready();
                    let read = self.settle();
                    // With probes, records may follow that do not wake this thread.
                    idle_timer.on_records(if self.source.probes().is_some() { 1 } else { read }, clock.monotonic());
                }
                () = self.deferred.facts.ready() => idle_timer.on_records(self.settle(), clock.monotonic()),
                loaded = Engine::reloaded(&mut self.reloading) => {
                    let read = self.on_config_loaded(loaded);
                    idle_timer.on_records(1 + read, clock.monotonic());
                }
                scan = Engine::scan_done(&*clock, &mut self.gap) => {
                    self.on_scan_done(scan);
                    idle_timer.on_records(1 + self.settle(), clock.monotonic());
                }
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.on_pidfds_readable();
                    idle_timer.on_records(self.settle(), clock.monotonic());
                }
                Some(request) = requests.recv() => idle_timer.on_records(self.on_request(request), clock.monotonic()),
                () = sleep_until(&*clock, deadline) => idle_timer.on_records(self.settle(), clock.monotonic()),
                () = sleep_until(&*clock, idle_timer.until) => {}
                // Last, so that all other branches have priority.
                () = yield_now(), if self.has_work() || self.source.has_undrained() => {
                    idle_timer.on_records(self.settle(), clock.monotonic());
                }
            }
        };
        // Each descriptor can be registered once.
        drop((events, confirm));
        self.notify_stopping(stop.reason);
        let hands_over = self.settings.leave_pinned || stop.hands_over;
        if !hands_over || self.pinned().is_none() {
            self.finish_due(stop.at_once, &mut requests).await;
        }
        self.stopping = true;
        self.settle();
        let armed = self.leave(hands_over);
        self.on_reap_events();
        let (waiting, first_waiting) = self.waiting();
        let count = Totals {
            sessions: self.ingest.sessions_opened,
            kept: self.kept(),
            waiting,
            signals: self.count.signals + self.ingest.kernel_signals,
            ..self.count
        };
        self.emit(EventBody::Summary {
            count,
            reason: stop.reason,
            pin_dir: armed,
            first_waiting,
        });
        self.ingest.out.flush();
        Ok(count)
    }

    /// Sends the signals and makes the checks of the escalations whose deadline has passed.
    pub(super) fn advance_escalations(&mut self) {
        let procfs = &self.kernel.processes;
        self.ingest.reaper.tick(|key| {
            let state = procfs.state(key.pid).unwrap_or('?');
            (state, procfs.rss_bytes(key.pid).unwrap_or(0))
        });
    }

    /// Drains, decides and signals until no work is queued, for at most [`ROUNDS_MAX`] rounds. Then writes the kernel's
    /// maps and prefetches facts, so these do not delay signals. Returns the number of records read.
    pub(super) fn settle(&mut self) -> u64 {
        let mut read = self.drain();
        self.apply_facts();
        self.attribute();
        self.look_for_display();
        // Limited, so that a tree that forks forever cannot delay the timers.
        for _ in 0..ROUNDS_MAX {
            self.find_successors();
            self.decide();
            // Before the signals, so that a process cannot escape them by forking.
            self.sync_kill_on_fork();
            read += self.on_exits_before_membership();
            if !self.ingest.reaper.queued().is_empty() {
                read += self.signal_round();
            }
            self.on_reap_events();
            self.announce_escalations();
            // Processes that were born before the probes knew of the escalation did not wake this thread.
            read += self.drain();
            self.ingest.out.flush();
            if !self.has_work() {
                // All due members are claimed, so an escalation without claims is finished, unless a gap defers
                // decisions.
                if self.ingest.queued.is_empty() && !self.deferred.is_reading() {
                    self.ingest.reaper.close_empty();
                }
                self.on_reap_events();
                self.announce_escalations();
                break;
            }
        }
        self.attribute();
        self.prefetch();
        self.sync_maps();
        read += self.on_exits_before_membership();
        self.release_ring();
        read
    }

    /// Drains, and then applies the exits of processes that exited before their map entry was written. The probes do
    /// not report these. Returns the number of records read.
    fn on_exits_before_membership(&mut self) -> u64 {
        let exited = self.exited_before_membership();
        if exited.is_empty() {
            return 0;
        }
        // Some of the exits may already be in the ring.
        let read = self.drain();
        for key in exited {
            if self.model.tree.get(key).is_some() {
                self.exited_unseen(key, Provenance::Procfs);
            }
        }
        read
    }

    /// Opens the queued processes, drains, and signals those that are still due. Returns the number of records read.
    pub(super) fn signal_round(&mut self) -> u64 {
        let round = self.open_queued();
        let read = self.drain();
        self.signal_opened(&round);
        read
    }

    /// Closes a gap with the results of a scan: first births, then later events, then exits that the scan inferred.
    /// After a failed scan, starts another one instead.
    fn on_scan_done(&mut self, scan: Option<Result<ScanResult, EngineError>>) {
        self.drain_all();
        let Some(scan) = self.prepare_scan_result(scan) else {
            return;
        };
        let unreadable = scan.unreadable;
        let reconciled = self.reconcile(scan);
        self.close_gap(reconciled, unreadable);
    }

    /// Applies the differences between a scan and the model. Drains later events between births and exits.
    fn reconcile(&mut self, scan: ScanResult) -> Reconciled {
        let found = self.apply_entries(scan.rows);
        self.drain();
        let exited = self.apply_missing(&scan.pids, scan.began);
        Reconciled { found, exited }
    }

    /// Drains until the source is empty, with a limit: results of a scan must follow the events that led to them.
    fn drain_all(&mut self) {
        for _ in 0..DRAINS_MAX {
            self.drain();
            if !self.source.has_undrained() {
                break;
            }
        }
    }

    /// Finishes the claims of processes whose pidfds report the exit. An exit without a record, even after a drain, is
    /// applied to the model as inferred.
    pub(super) fn on_pidfds_readable(&mut self) {
        loop {
            let (ready, unrecorded) = self.ingest.reaper.confirm_exits();
            if ready == 0 {
                return;
            }
            if !unrecorded.is_empty() {
                // The exit record is written before the pidfd becomes readable: it is in the ring, or lost.
                self.drain();
            }
            for key in unrecorded {
                if self.model.tree.get(key).is_some() {
                    self.exited_unseen(key, Provenance::Inferred);
                }
                self.ingest.reaper.on_unrecorded_exit(key);
            }
        }
    }

    /// Returns whether signals or decisions are queued. During a gap, queued decisions do not count.
    fn has_work(&self) -> bool {
        !self.ingest.queued.is_empty() && self.gap.is_none()
            || !self.ingest.reaper.queued().is_empty()
    }

    /// Applies the waiting events to the model, and passes its outputs to [`Ingest`](super::ingest::Ingest). Opens a
    /// gap for lost or malformed records, and replaces a source that has failed. Returns the number of records read.
    fn drain(&mut self) -> u64 {
        let Engine {
            kernel,
            source,
            model,
            ingest,
            cgroups,
            outputs,
            ready,
            ..
        } = self;
        model.set_infers_membership(source.is_polling());
        let began = kernel.clock.boot_time();
        ingest.emits_discovered = *ready;
        ingest.notes_late_discovered = !source.is_filtered();
        let drained = source.drain(&mut |event| {
            cgroups.on_event(&*kernel.processes, model, &event);
            model.apply(&event, outputs);
            for output in outputs.drain(..) {
                ingest.on_output(model, &event, &output);
            }
        });
        self.ingest.emits_discovered = false;
        self.after_outputs();
        self.count.events += drained.records;
        self.drained += drained.records;
        if let Some(reason) = drained.malformation {
            self.emit(EventBody::Malformed {
                count: drained.malformed,
                reason: reason.to_string(),
            });
            // The next poll of a polling source finds what was missed.
            if !self.source.is_polling() {
                self.note_malformed();
            }
        }
        if drained.lost > self.lost.total {
            self.look_for_loss();
        }
        if !self.fail_over() && !self.source.has_undrained() && self.gap.is_none() {
            self.complete_until = began;
        }
        drained.records
    }
}
