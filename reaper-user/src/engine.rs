//! The loop: owns the source, the model, the reaper, the clock, and the order in which they act.
//!
//! ```text
//!   ring readable ─┐
//!   a timer ───────┼─▶ settle: drain ─▶ decide ─▶ claim ─▶ open pidfds ─▶ drain ─▶ signal ─▶ tell
//!   a pidfd ───────┘             ▲                                                    │
//!                                └──────────── while anything is queued ◀─────────────┘
//! ```
//!
//! Nothing here polls. A timer runs only while there is something to wait for: a record that was not
//! worth waking for, a ladder's deadline. With nothing happening the thread sleeps for good.

mod attribution;
mod cgroups;
mod decide;
mod deferred;
mod end;
mod failover;
mod gaps;
mod idle_timer;
mod ingest;
mod keeps;
mod map_sync;
mod reconcile;
pub mod reload;
mod requests;
mod restore;
mod signal;
mod succession;
mod survey;

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::path::PathBuf;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::api::messages::EngineRequest;
use crate::config::{Config, EventScope, Mode};
use crate::export::{EventBody, EventRecord, ProcessRef, Sink, Totals};
use crate::journal::{self, Keeper};
use crate::reap::{Reaper, Times};
use cgroups::Cgroups;
use deferred::Deferred;
use failover::Failover;
use gaps::Gap;
use idle_timer::{IdleTimer, at};
use ingest::{Ingest, Tally};
use keeps::UnsavedKeep;
use map_sync::MapSync;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::source::{Lost, Source, SourceError};
use reaper_host::sys;
use reaper_model::event::{Event, ProcessKey, Provenance};
use reaper_model::session::SessionId;
use reaper_model::{Model, Output, Scope};
use reload::{ConfigLoader, Reloading};
use succession::Successions;

/// Rounds of deciding and signalling before timers have their turn.
const ROUNDS_MAX: usize = 64;
/// Most drains in a row before the differences that a scan has found are applied.
const DRAINS_MAX: usize = 10;

/// What the engine is to do.
pub struct Settings {
    pub mode: Mode,
    /// Why the service only observes, whatever the config says.
    pub mode_reason: Option<String>,
    pub events: EventScope,
    pub scope: Scope,
    /// The scope as it was given, for the stream.
    pub scope_names: Vec<String>,
    /// Directories of the cgroups in it.
    pub cgroups: Vec<PathBuf>,
    pub times: Times,
    /// What is configured by now.
    pub config: Config,
    /// What it was at the start: some of it holds until the end.
    pub running: Config,
    /// Reads that anew.
    pub load: ConfigLoader,
    /// What users asked the service before this one to keep, as far as that is known.
    pub keeps: Vec<journal::JournalKeep>,
    /// Writes down what users ask for; without it that is forgotten when the service ends.
    pub keeper: Option<Keeper>,
    /// Let the probes send the first signal where they can.
    pub kernel_reap: bool,
    /// Leave what is pinned at work when stopped.
    pub leave_pinned: bool,
    /// The better sources that could not be used.
    pub rejected_sources: Vec<RejectedSource>,
}

/// Why the engine cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Procfs(#[from] ProcfsError),
    #[error("cannot wait for events: {0}")]
    Wait(#[from] io::Error),
}

/// See the module.
pub struct Engine {
    source: Box<dyn Source>,
    procfs: Procfs,
    model: Model,
    /// What follows from the event that is being applied; empty between two events.
    outputs: Vec<Output>,
    ingest: Ingest,
    settings: Settings,
    /// Claimed processes, for telling of them when they are gone.
    claimed: HashMap<ProcessKey, ProcessRef>,
    sessions: HashMap<SessionId, Tally>,
    /// Closed sessions whose tallies are still in `sessions`, oldest first.
    closed_tallies: VecDeque<SessionId>,
    lost: Lost,
    untracked_members: u64,
    /// How often the kernel has left a probe out.
    skipped_probes: u64,
    /// Events are missing, and are being looked for.
    gap: Option<Gap>,
    /// More that were missing before those were found.
    next_gap: Option<(&'static str, Lost)>,
    failover: Failover,
    /// All that had happened by then has been told, in ns since boot.
    complete_until: u64,
    /// What is known of a process may be out of date.
    has_losses: bool,
    /// All that ran already has been taken in.
    ready: bool,
    /// Nothing is waited for any more.
    stopping: bool,
    map_sync: MapSync,
    cgroups: Cgroups,
    deferred: Deferred,
    successions: Successions,
    reloading: Option<Reloading>,
    /// To be written down before it is answered.
    unsaved_keep: Option<UnsavedKeep>,
    escalations_announced: bool,
    count: Totals,
    /// When it began to watch, in ns since boot.
    started_at: u64,
    /// Gaps that were opened.
    gaps: u64,
    /// In observe: processes that would have been reaped.
    would_have_reaped: u64,
    /// Records read since the engine has last asked how long it may rest.
    drained: u64,
    /// Sessions that are over, and where the ring stood when they were.
    closed_at_position: VecDeque<(u64, ProcessKey)>,
}

impl Engine {
    /// Attaches nothing itself: takes a source whose probes are attached, and only now reads /proc, so
    /// that nothing falls between the two.
    ///
    /// # Errors
    /// The process table, or a map, cannot be read.
    pub fn start(
        source: Box<dyn Source>,
        settings: Settings,
        out: Sink,
    ) -> Result<Engine, EngineError> {
        let rules = settings.config.rules.clone();
        let mut model = Model::new(rules, settings.scope.clone(), std::process::id());
        model.set_misses_moves(!source.reports_moves());
        let reaper =
            Reaper::new(settings.times, settings.mode == Mode::Observe).map_err(io::Error::from)?;
        let cgroups = Cgroups::new(settings.cgroups.clone(), &settings.scope);
        let deferred = Deferred::new(&model.rules)?;
        let mut engine = Engine {
            source,
            procfs: Procfs::default(),
            model,
            outputs: Vec::new(),
            ingest: Ingest::new(
                reaper,
                out,
                settings.events,
                !settings.scope.roots.is_empty(),
            ),
            settings,
            claimed: HashMap::new(),
            sessions: HashMap::new(),
            closed_tallies: VecDeque::new(),
            lost: Lost::default(),
            untracked_members: 0,
            skipped_probes: 0,
            gap: None,
            next_gap: None,
            failover: Failover::default(),
            complete_until: 0,
            has_losses: false,
            ready: false,
            stopping: false,
            map_sync: MapSync::default(),
            cgroups,
            deferred,
            successions: Successions::default(),
            reloading: None,
            unsaved_keep: None,
            escalations_announced: false,
            count: Totals::default(),
            started_at: sys::boot_time(),
            gaps: 0,
            would_have_reaped: 0,
            drained: 0,
            closed_at_position: VecDeque::new(),
        };
        engine.restore()?;
        if let Some(probes) = engine.source.probes_mut() {
            probes.keep_pinned();
        }
        engine.ready = true;
        sys::trim();
        Ok(engine)
    }

    /// Works until `stop` is done, and answers what is asked; gives what `stop` answers and what was done.
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
        let mut rest = IdleTimer::default();
        tokio::pin!(stop);
        let reason = loop {
            if self.failover.is_new(sys::monotonic()) {
                match sys::readable(&self.source) {
                    Ok(new) => {
                        events = new;
                        self.failover.on_registered();
                    }
                    Err(error) => {
                        tracing::error!(
                            "the new source cannot be waited on: {error}; trying again"
                        );
                        self.failover.put_off(sys::monotonic());
                    }
                }
                rest.on_records(1);
            }
            // Both by the clock and not by a timer's word, which a busy ring could keep from being heard.
            if self
                .ingest
                .reaper
                .next_deadline()
                .is_some_and(|at| at <= sys::monotonic())
            {
                let procfs = &self.procfs;
                self.ingest.reaper.tick(|key| {
                    let state = procfs.state(key.pid).unwrap_or('?');
                    (state, procfs.rss_bytes(key.pid).unwrap_or(0))
                });
                rest.on_records(self.settle());
            }
            if rest.has_expired() {
                self.look_for_skips();
                rest.on_poll(self.settle());
                self.find_adopters();
                if rest.goes_idle() {
                    if let Err(error) = self.source.announce_idle(true) {
                        self.on_source_failure(&error);
                        rest.on_records(1 + self.settle());
                        continue;
                    }
                    self.look_for_loss();
                }
            }
            // What was read on the way may be what a probe was to wake this thread for.
            rest.on_records(mem::take(&mut self.drained));
            let timers = [
                self.ingest.reaper.next_deadline(),
                self.deferred.next(),
                self.successions.next().filter(|_| self.gap.is_none()),
                self.failover.next(),
            ];
            let deadline = timers.into_iter().flatten().min().map(|at| {
                Instant::now() + Duration::from_nanos(at.saturating_sub(sys::monotonic()))
            });
            tokio::select! {
                biased;
                reason = &mut stop => break reason,
                ready = events.readable() => {
                    ready?.clear_ready();
                    let read = self.settle();
                    // More of what wakes nobody may follow, where there is such.
                    rest.on_records(if self.source.probes().is_some() { 1 } else { read });
                }
                () = self.deferred.facts.ready() => rest.on_records(self.settle()),
                loaded = Engine::reloaded(&mut self.reloading) => {
                    let read = self.on_config_loaded(loaded);
                    rest.on_records(1 + read);
                }
                survey = Engine::surveyed(&mut self.gap) => {
                    self.drain_all();
                    self.close_gap(survey);
                    rest.on_records(1 + self.settle());
                }
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.on_pidfds_readable();
                    rest.on_records(self.settle());
                }
                Some(ask) = asks.recv() => rest.on_records(self.on_request(ask)),
                () = at(deadline) => rest.on_records(self.settle()),
                () = at(rest.until) => {}
                // Not before all others have had their turn.
                () = yield_now(), if self.has_work() || self.source.has_undrained() => {
                    rest.on_records(self.settle());
                }
            }
        };
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
            armed,
        });
        self.ingest.out.flush();
        Ok(count)
    }

    /// Leaves the probes at work for the next service, or ends all that was begun. Gives where they are.
    fn leave(&mut self) -> Option<String> {
        if let Some(pinned) = self.pinned().filter(|_| self.settings.leave_pinned) {
            self.sync_maps();
            // Nobody is there to be woken.
            let said = self.source.announce_idle(false);
            if let Err(error) = said.and_then(|()| self.source.announce_escalations(false)) {
                tracing::error!("{error}");
            }
            return Some(pinned);
        }
        self.ingest.reaper.stop();
        self.disarm();
        None
    }

    /// Ends the work of the probes, if there are any.
    fn disarm(&mut self) {
        let probes = self.source.probes_mut();
        if let Some(Err(error)) = probes.map(|probes| probes.unpin()) {
            tracing::error!("{error}");
        }
    }

    /// Returns the directory of the pins, if anything is pinned.
    fn pinned(&self) -> Option<String> {
        let path = self.source.probes()?.pinned_at()?;
        Some(path.display().to_string())
    }

    /// Whether each process that is not in the kernel's map is no member.
    fn is_mapped(&self) -> bool {
        let maps = self.source.maps();
        maps.is_some_and(|maps| maps.is_complete()) && self.skipped_probes == 0
    }

    /// Drains, decides and acts until nothing is left to do. Gives the number of records read.
    ///
    /// The signals come first: whatever else follows from what was read waits until they are sent.
    fn settle(&mut self) -> u64 {
        let mut read = self.drain();
        self.apply_facts();
        self.attribute();
        // A tree that forks without end must not keep the timers waiting.
        for _ in 0..ROUNDS_MAX {
            self.find_successors();
            self.decide();
            // Before the signals: whoever forks from now on is not to outrun them.
            self.sync_kill_on_fork();
            read += self.on_exits_before_membership();
            if self.ingest.reaper.has_queued() {
                read += self.signal();
            }
            self.on_reap_events();
            self.announce_escalations();
            // What was born before the probes knew of the ladder has woken nobody.
            read += self.drain();
            self.ingest.out.flush();
            if !self.has_work() {
                // All that is due by now is claimed, so a ladder without a claim is at its end; unless a
                // gap keeps some from being decided about.
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

    /// Handles the exits that came before a process had its mark in the kernel. Returns the number of records read.
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
        // The exits may have been reported all the same.
        let read = self.drain();
        for key in gone {
            if self.model.tree.get(key).is_some() {
                self.exited_unseen(key, Provenance::Procfs);
            }
        }
        read
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

    /// Gives room in the ring back for what has been seen to and told: a service that comes after this one
    /// reads the rest again. Where the stream is not written as fast as that, room counts for more.
    fn release_ring(&mut self) {
        let out = &mut self.ingest.out;
        let Some(probes) = self.source.probes() else {
            self.closed_at_position.clear();
            return out.flush();
        };
        let ring = probes.ring();
        let (position, release) = (ring.position(), ring.release());
        if ring.unreleased() > ring.size() / 2 {
            release.up_to(ring.restart_position());
        }
        if out.is_idle() {
            release.up_to(position);
        } else if ring.unreleased() > 0 {
            out.on_written(move || release.up_to(position));
        }
        out.flush();
        // Read again, the end of a session would tell nothing if nothing were known of it.
        let given_back = position - ring.unreleased();
        while let Some((_, first_root)) = self
            .closed_at_position
            .pop_front_if(|(at, _)| *at <= given_back)
        {
            self.forget_session(first_root);
        }
    }

    fn has_work(&self) -> bool {
        !self.ingest.queued.is_empty() && self.gap.is_none() || self.ingest.reaper.has_queued()
    }

    /// Reads the ring into the model, and what the model makes of it into what is to be told and done.
    fn drain(&mut self) -> u64 {
        let Engine {
            source,
            model,
            ingest: follow,
            cgroups,
            outputs,
            ready,
            ..
        } = self;
        model.set_infers_membership(source.is_polling());
        let began = sys::boot_time();
        follow.emits_discovered = *ready;
        follow.notes_late_discovered = !source.is_filtered();
        let drained = source.drain(&mut |event| {
            cgroups.meet(model, &event);
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
            // What is found by looking is looked at again: nothing is missing for good.
            if !self.source.is_polling() {
                self.note_malformed();
            }
        }
        if drained.lost > self.lost.total {
            self.look_for_loss();
        }
        if !self.fail_over() && !self.source.has_unreported() && self.gap.is_none() {
            self.complete_until = began;
        }
        drained.records
    }

    /// Takes in one event that did not come through the ring.
    fn apply(&mut self, event: &Event) {
        self.model.apply(event, &mut self.outputs);
        for output in self.outputs.drain(..) {
            self.ingest.on_output(&self.model, event, &output);
        }
        self.after_outputs();
    }

    /// Handles what has happened to sessions without an event, at `time` in ns since boot.
    fn on_session_events(&mut self, time: u64) {
        for output in self.outputs.drain(..) {
            if let Output::Session(session_event) = output {
                self.ingest
                    .on_session_event(&self.model, time, &session_event);
            }
        }
    }

    /// Does what following the model's steps has left to do.
    fn after_outputs(&mut self) {
        // Before it is said that their session is over.
        self.report_unclaimed_exits();
        if self.ingest.closed_sessions.is_empty() {
            return;
        }
        // What has become of its members comes before its end.
        self.on_reap_events();
        for (id, session, last_end) in std::mem::take(&mut self.ingest.closed_sessions) {
            let tally = self.sessions.entry(id).or_default();
            (tally.closing_session, tally.last_exit_at) = (Some(session), last_end);
            // Told once the ends are confirmed, which comes after the exit records.
            if !self.ingest.reaper.has_members_of(id) {
                self.close_if_decided(id);
            }
        }
    }

    /// Tells the probes whether every record matters now.
    fn announce_escalations(&mut self) {
        let open = self.ingest.reaper.open_escalations() > 0;
        if open != self.escalations_announced {
            match self.source.announce_escalations(open) {
                Ok(()) => self.escalations_announced = open,
                Err(error) => tracing::error!("{error}"),
            }
        }
    }

    fn emit(&mut self, body: EventBody) {
        self.ingest.out.push(EventRecord {
            time: sys::boot_time(),
            body,
        });
    }
}
