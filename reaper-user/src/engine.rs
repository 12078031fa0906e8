//! The engine: owns the source, the model and the reaper, and what is known of each session.
//!
//! ```text
//!   ring readable ─┐
//!   a timer ───────┼─▶ settle: drain ─▶ decide ─▶ claim ─▶ open pidfds ─▶ drain ─▶ signal ─▶ report
//!   a pidfd ───────┘             ▲                                                     │
//!                                └──────────── while anything is queued ◀──────────────┘
//! ```
//!
//! Nothing polls. A timer runs only while there is something to wait for: a record that did not wake the thread, the
//! deadline of an escalation. With nothing happening the thread sleeps for good.
//!
//! Invariants:
//! - Only [`event_loop`] drains the source. What writes the kernel's maps never changes the model by events.
//! - All contact with the machine goes through [`Kernel`], [`Source`], [`KeepStore`] and the [`Sink`].

mod attribution;
mod cgroups;
mod decide;
mod deferred;
mod event_loop;
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
#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::config::{Config, EventScope, Mode};
use crate::export::{EventBody, EventRecord, ProcessRef, Sink, Totals};
use crate::journal::JournalKeep;
use crate::reap::{Reaper, Times};
use cgroups::Cgroups;
use deferred::Deferred;
use failover::Failover;
use gaps::Gap;
use ingest::{Ingest, Tally};
pub use keeps::KeepStore;
use keeps::UnsavedKeep;
use map_sync::MapSync;
use reaper_host::kernel::Kernel;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::procfs::ProcfsError;
use reaper_host::source::{Lost, Source, SourceError};
use reaper_host::sys;
use reaper_model::event::{Event, ProcessKey};
use reaper_model::session::SessionId;
use reaper_model::{Model, Output, Scope};
use reload::{ConfigLoader, Reloading};
use succession::Successions;

/// What the engine is to do.
pub struct EngineSettings {
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
    pub keeps: Vec<JournalKeep>,
    /// Writes down what users ask for; without it that is forgotten when the service ends.
    pub keep_store: Option<Arc<dyn KeepStore>>,
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
    kernel: Kernel,
    model: Model,
    /// What follows from the event that is being applied; empty between two events.
    outputs: Vec<Output>,
    ingest: Ingest,
    settings: EngineSettings,
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
        kernel: Kernel,
        source: Box<dyn Source>,
        settings: EngineSettings,
        out: Sink,
    ) -> Result<Engine, EngineError> {
        let rules = settings.config.rules.clone();
        let own_pid = kernel.processes.own_pid();
        let mut model = Model::new(rules, settings.scope.clone(), own_pid);
        model.set_misses_moves(!source.reports_moves());
        let (clock, signals) = (Arc::clone(&kernel.clock), Arc::clone(&kernel.signals));
        let observe = settings.mode == Mode::Observe;
        let reaper = Reaper::new(own_pid, clock, signals, settings.times, observe);
        let cgroups = Cgroups::new(settings.cgroups.clone(), &settings.scope);
        let deferred = Deferred::new((kernel.start_facts)(&model.rules));
        let mut engine = Engine {
            source,
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
            started_at: kernel.clock.boot_time(),
            kernel,
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

    /// Leaves the probes at work for the next service, or ends all that was begun. Returns where they are.
    ///
    /// They also stay at work if members are due and not decided about: the next service goes on with these.
    fn leave(&mut self) -> Option<String> {
        let pinned = self.pinned();
        let undecided = match self.settings.mode {
            Mode::Enforce => self.undecided(),
            Mode::Observe => 0,
        };
        if undecided > 0 {
            let fate = match &pinned {
                Some(dir) => format!("probes and maps stay pinned at {dir} for the next service"),
                None => "they are left running".into(),
            };
            tracing::warn!("stopped before all is decided: {undecided} processes are due; {fate}");
        }
        if let Some(pinned) = pinned.filter(|_| self.settings.leave_pinned || undecided > 0) {
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
            release(ring.restart_position());
        }
        if out.is_idle() {
            release(position);
        } else if ring.unreleased() > 0 {
            out.on_written(move || release(position));
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
            time: self.kernel.clock.boot_time(),
            body,
        });
    }
}
