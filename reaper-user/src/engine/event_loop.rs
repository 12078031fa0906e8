//! The order in which source, model and reaper act. Only this module drains the source.

use std::mem;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::yield_now;

use super::idle_timer::{IdleTimer, at};
use super::reconcile::Reconciled;
use super::survey::{Survey, SurveyScope, Surveyor};
use super::{Engine, EngineError};
use crate::api::messages::EngineRequest;
use crate::export::{EventBody, Totals};
use reaper_host::sys;
use reaper_model::event::Provenance;

/// Rounds of deciding and signalling before timers have their turn.
const ROUNDS_MAX: usize = 64;
/// Most drains in a row before the differences that a scan has found are applied.
const DRAINS_MAX: usize = 10;
/// Rounds of writing memberships while new processes appear.
const SEED_ROUNDS_MAX: usize = 100;
/// Longest time in which a stopped service decides about what is due, in nanoseconds.
const FINISH_MAX_NS: u64 = 2_000_000_000;

impl Engine {
    /// Takes in all that runs, and what an earlier service has left. What happens meanwhile waits in the ring, and is
    /// applied after the processes that a survey has found and before the exits that it has missed.
    pub(super) fn restore(&mut self) -> Result<(), EngineError> {
        let (restored, survey) = self.begin_restore()?;
        self.apply_entries(survey.rows);
        // Before what has happened since: children of kept processes are kept.
        self.restore_keeps();
        self.announce_ready(&restored);
        self.drain();
        self.ingest.out.flush_backlog();
        // The ring reports a loss only in a record that was written after it.
        self.look_for_loss();
        self.drain();
        self.apply_missing(&survey.pids, survey.began);
        self.finish_restore(&restored, &survey.marks)?;
        self.seed_maps()?;
        self.allow_kernel_reap()?;
        self.settle();
        self.announce_caught_up(&restored);
        Ok(())
    }

    /// Writes all memberships, until the probes follow each process that is to be followed. Only then do they leave out the
    /// others.
    fn seed_maps(&mut self) -> Result<(), EngineError> {
        self.ingest.map_changes = self.model.tree.iter().map(|node| node.key).collect();
        if self.source.maps().is_none() {
            self.write_memberships()?;
            return Ok(());
        }
        for _ in 0..SEED_ROUNDS_MAX {
            while self.write_memberships()? > 0 {
                self.on_exits_before_membership();
                self.drain();
            }
            // A probe that looked for a membership before it was written reports later, or finds that it need not report.
            if let Some(maps) = self.source.maps().filter(|_| self.source.is_filtered()) {
                maps.await_probes();
                self.drain();
                if self.write_memberships()? > 0 {
                    continue;
                }
            }
            self.set_seeded(true)?;
            // Children of a process without a membership have been reported, if they were born before this.
            self.drain();
            if self.write_memberships()? == 0 {
                return Ok(());
            }
            self.set_seeded(false)?;
            // Children of the processes that were written only now may not have been reported.
            let survey =
                Surveyor::new(&self.kernel, &*self.source, false)?.survey(SurveyScope::All)?;
            self.reconcile(survey);
            if self.source.is_filtered() {
                self.model.forget_untracked();
            }
        }
        self.set_seeded(true)?;
        Ok(())
    }

    /// Runs until `stop` is ready, and answers requests meanwhile. Returns the totals; the stream's summary has the reason
    /// that `stop` gives.
    ///
    /// # Errors
    /// The source or a file descriptor cannot be waited on.
    pub async fn run(
        mut self,
        stop: impl Future<Output = &'static str>,
        mut asks: mpsc::Receiver<EngineRequest>,
    ) -> Result<Totals, EngineError> {
        let mut events = sys::readable(&self.source)?;
        let confirm = sys::readable(self.ingest.reaper.exit_poll())?;
        let clock = Arc::clone(&self.kernel.clock);
        let mut rest = IdleTimer::new(clock.monotonic());
        tokio::pin!(stop);
        let reason = loop {
            if self.failover.is_new(clock.monotonic()) {
                match sys::readable(&self.source) {
                    Ok(new) => {
                        events = new;
                        self.failover.on_registered();
                    }
                    Err(error) => {
                        tracing::error!(
                            "the new source cannot be waited on: {error}; trying again"
                        );
                        self.failover.put_off(clock.monotonic());
                    }
                }
                rest.on_records(1, clock.monotonic());
            }
            // By the clock, not by a timer branch below: a busy ring could keep that from being polled.
            if self
                .ingest
                .reaper
                .next_deadline()
                .is_some_and(|at| at <= clock.monotonic())
            {
                let procfs = &self.kernel.processes;
                self.ingest.reaper.tick(|key| {
                    let state = procfs.state(key.pid).unwrap_or('?');
                    (state, procfs.rss_bytes(key.pid).unwrap_or(0))
                });
                rest.on_records(self.settle(), clock.monotonic());
            }
            if rest.has_expired(clock.monotonic()) {
                self.look_for_skips();
                rest.on_poll(self.settle(), clock.monotonic());
                self.find_adopters();
                if rest.goes_idle() {
                    if let Err(error) = self.source.announce_idle(true) {
                        self.on_source_failure(&error);
                        rest.on_records(1 + self.settle(), clock.monotonic());
                        continue;
                    }
                    self.look_for_loss();
                }
            }
            // Records that were drained on the way do not wake this thread any more.
            rest.on_records(mem::take(&mut self.drained), clock.monotonic());
            let timers = [
                self.ingest.reaper.next_deadline(),
                self.deferred.next(),
                self.successions.next().filter(|_| self.gap.is_none()),
                self.failover.next(),
            ];
            let deadline = timers.into_iter().flatten().min();
            tokio::select! {
                biased;
                reason = &mut stop => break reason,
                ready = events.readable() => {
                    ready?.clear_ready();
                    let read = self.settle();
                    // Records that do not wake this thread may follow, if probes are the source.
                    rest.on_records(if self.source.probes().is_some() { 1 } else { read }, clock.monotonic());
                }
                () = self.deferred.facts.ready() => rest.on_records(self.settle(), clock.monotonic()),
                loaded = Engine::reloaded(&mut self.reloading) => {
                    let read = self.on_config_loaded(loaded);
                    rest.on_records(1 + read, clock.monotonic());
                }
                survey = Engine::surveyed(&*clock, &mut self.gap) => {
                    self.on_surveyed(survey);
                    rest.on_records(1 + self.settle(), clock.monotonic());
                }
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.on_pidfds_readable();
                    rest.on_records(self.settle(), clock.monotonic());
                }
                Some(ask) = asks.recv() => rest.on_records(self.on_request(ask), clock.monotonic()),
                () = at(&*clock, deadline) => rest.on_records(self.settle(), clock.monotonic()),
                () = at(&*clock, rest.until) => {}
                // Last, after all other branches.
                () = yield_now(), if self.has_work() || self.source.has_undrained() => {
                    rest.on_records(self.settle(), clock.monotonic());
                }
            }
        };
        self.finish_due().await;
        self.stopping = true;
        self.settle();
        let armed = self.leave();
        self.on_reap_events();
        let count = Totals {
            sessions: self.ingest.sessions_opened,
            kept: self.kept(),
            signals: self.count.signals + self.ingest.kernel_signals,
            ..self.count
        };
        self.emit(EventBody::Summary {
            count,
            reason,
            pin_dir: armed,
        });
        self.ingest.out.flush();
        Ok(count)
    }

    /// Decides about the members that are due, for which facts may have to be read, for a limited time.
    async fn finish_due(&mut self) {
        let clock = Arc::clone(&self.kernel.clock);
        let end = clock.monotonic() + FINISH_MAX_NS;
        self.settle();
        while self.undecided() > 0 && self.deferred.is_reading() && clock.monotonic() < end {
            tokio::select! {
                biased;
                () = self.deferred.facts.ready() => {}
                () = at(&*clock, Some(end)) => {}
            }
            self.settle();
        }
    }

    /// Drains, decides and acts until nothing is left to do. Returns the number of records read.
    ///
    /// Signals come first. All other consequences of what was read wait until they are sent.
    pub(super) fn settle(&mut self) -> u64 {
        let mut read = self.drain();
        self.apply_facts();
        self.attribute();
        // A tree that forks without end must not keep the timers waiting.
        for _ in 0..ROUNDS_MAX {
            self.find_successors();
            self.decide();
            // Before the signals: a process that forks from now on must not outrun them.
            self.sync_kill_on_fork();
            read += self.on_exits_before_membership();
            if !self.ingest.reaper.queued().is_empty() {
                read += self.signal_round();
            }
            self.on_reap_events();
            self.announce_escalations();
            // Processes born before the probes knew of the escalation did not wake this thread.
            read += self.drain();
            self.ingest.out.flush();
            if !self.has_work() {
                // All that is due is claimed, so an escalation without a claim is done, unless decisions wait for a
                // gap.
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

    /// Handles exits that came before the kernel's map had the process. Returns the number of records read.
    fn on_exits_before_membership(&mut self) -> u64 {
        let gone = match self.exited_before_membership() {
            Ok(gone) => gone,
            Err(error) => {
                tracing::error!("{error}");
                return 0;
            }
        };
        if gone.is_empty() {
            return 0;
        }
        // Some of the exits may have been reported.
        let read = self.drain();
        for key in gone {
            if self.model.tree.get(key).is_some() {
                self.exited_unseen(key, Provenance::Procfs);
            }
        }
        read
    }

    /// Opens what is queued, drains what has happened by then, and signals what is still due. Returns the number of records
    /// read.
    pub(super) fn signal_round(&mut self) -> u64 {
        let round = self.open_queued();
        let read = self.drain();
        self.signal_opened(&round);
        read
    }

    /// Closes a gap by what a survey has found: births before what has happened since, and that before the exits.
    fn on_surveyed(&mut self, survey: Option<Result<Survey, EngineError>>) {
        self.drain_all();
        let Some(survey) = self.gap_survey(survey) else {
            return;
        };
        let unreadable = survey.unreadable;
        let reconciled = self.reconcile(survey);
        self.close_gap(reconciled, unreadable);
    }

    /// Applies the differences between a survey and the model, with what has happened since in between.
    fn reconcile(&mut self, survey: Survey) -> Reconciled {
        let found = self.apply_entries(survey.rows);
        self.drain();
        let gone = self.apply_missing(&survey.pids, survey.began);
        Reconciled { found, gone }
    }

    /// Drains until the source has nothing more, but not forever: what a scan has found must not be known before the
    /// events that led to it.
    fn drain_all(&mut self) {
        for _ in 0..DRAINS_MAX {
            self.drain();
            if !self.source.has_undrained() {
                break;
            }
        }
    }

    /// Handles the exits that pidfds report.
    fn on_pidfds_readable(&mut self) {
        loop {
            let (ready, unrecorded) = self.ingest.reaper.confirm_exits();
            if ready == 0 {
                return;
            }
            if !unrecorded.is_empty() {
                // The exit's record is written before the pidfd can report it: it is there, or it is lost.
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

    fn has_work(&self) -> bool {
        !self.ingest.queued.is_empty() && self.gap.is_none()
            || !self.ingest.reaper.queued().is_empty()
    }

    /// Applies all waiting events to the model, and hands its outputs to [`Ingest`](super::ingest::Ingest).
    fn drain(&mut self) -> u64 {
        let Engine {
            kernel,
            source,
            model,
            ingest: follow,
            cgroups,
            outputs,
            ready,
            ..
        } = self;
        model.set_infers_membership(source.is_polling());
        let began = kernel.clock.boot_time();
        follow.emits_discovered = *ready;
        follow.notes_late_discovered = !source.is_filtered();
        let drained = source.drain(&mut |event| {
            cgroups.meet(&*kernel.processes, model, &event);
            model.apply(&event, outputs);
            for output in outputs.drain(..) {
                follow.on_output(model, &event, &output);
            }
        });
        self.ingest.emits_discovered = false;
        self.after_outputs();
        self.count.events += drained.records;
        self.drained += drained.records;
        if let Some(flaw) = drained.malformation {
            self.emit(EventBody::Malformed {
                count: drained.malformed,
                reason: flaw.to_string(),
            });
            // A source that polls finds it with the next poll.
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
