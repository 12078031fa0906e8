//! Runs the service: reads events, keeps the model, decides, and signals.
//!
//! ```text
//!   ring readable ─┐
//!   a timer ───────┼─▶ settle: drain ─▶ decide ─▶ claim ─▶ open pidfds ─▶ drain ─▶ signal ─▶ report
//!   a pidfd ───────┘             ▲                                                     │
//!                                └──────────── while anything is queued ◀──────────────┘
//! ```
//!
//! The engine has no fixed polling interval. A timer runs only for records that did not wake the thread, and for
//! deadlines such as those of an escalation. Without events the thread sleeps.
//!
//! Invariants:
//! - Only [`event_loop`] drains the source. Code that writes the kernel's maps applies no events.
//! - The engine reaches the machine only through [`Kernel`], [`Source`], [`KeepStore`] and the [`Sink`].

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
mod queue;
mod reconcile;
pub mod reload;
mod requests;
mod restore;
mod scan;
mod service_manager;
mod signal;
mod stop;
mod succession;
mod tally;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod waits;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::api::messages::RefusedReload;
use crate::config::{Config, EventScope, Mode};
use crate::export::{EventBody, EventRecord, ProcessRef, Sink, Totals};
use crate::journal::JournalKeep;
use crate::reap::{Reaper, Times};
use cgroups::Cgroups;
use deferred::Deferred;
use failover::Failover;
use gaps::Gap;
use ingest::Ingest;
pub use keeps::KeepStore;
use keeps::UnsavedKeep;
use map_sync::MapSync;
use reaper_host::advice::Advised as _;
use reaper_host::kernel::Kernel;
use reaper_host::source::kind::RejectedSource;
use reaper_host::source::procfs::ProcfsError;
use reaper_host::source::{Lost, Source, SourceError};
use reaper_host::sys;
use reaper_model::event::{Event, ProcessKey};
use reaper_model::session::SessionId;
use reaper_model::{Model, Output, Scope};
use reload::{ConfigLoader, Reloading};
use service_manager::ServiceMessages;
pub use stop::Stop;
use succession::Successions;
use tally::Tally;

/// Settings of the engine.
pub struct EngineSettings {
    pub mode: Mode,
    /// Reason why the service only observes, regardless of the config.
    pub mode_reason: Option<String>,
    pub events: EventScope,
    pub scope: Scope,
    /// Scope as the user wrote it, for the event stream.
    pub scope_names: Vec<String>,
    /// Directories of the cgroups in the scope.
    pub cgroups: Vec<PathBuf>,
    pub times: Times,
    /// Current config.
    pub config: Config,
    /// Config at the start. Some of its settings apply until the service stops.
    pub running: Config,
    /// Loader that reads the config again.
    pub load: ConfigLoader,
    /// Keeps that users requested from an earlier service, as far as the journal has them.
    pub keeps: Vec<JournalKeep>,
    /// Storage of users' keeps. Without it they are lost when the service stops.
    pub keep_store: Option<Arc<dyn KeepStore>>,
    /// Whether probes may send the first signal.
    pub kernel_reap: bool,
    /// Whether pinned probes and maps stay active after a stop.
    pub leave_pinned: bool,
    /// Higher-priority sources that could not be used.
    pub rejected_sources: Vec<RejectedSource>,
    /// Socket on which the service answers requests.
    pub socket: Option<PathBuf>,
    /// Command that shows what the service watches.
    pub next_command: Option<String>,
}

/// Reasons why the engine cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Procfs(#[from] ProcfsError),
    #[error("cannot wait for events: {}", .0.advised())]
    Wait(#[from] io::Error),
    #[error("{0}")]
    Scan(String),
}

/// Owner of the source, the model, the reaper and the state of each session.
pub struct Engine {
    source: Box<dyn Source>,
    kernel: Kernel,
    model: Model,
    /// Outputs of the event that is being applied. Empty between two events.
    outputs: Vec<Output>,
    ingest: Ingest,
    settings: EngineSettings,
    /// Processes that the reaper has claimed ([`crate::reap`]), as the stream describes them. Records after their exit
    /// need that.
    claimed: HashMap<ProcessKey, ProcessRef>,
    /// Counters of open sessions, and of recently closed ones.
    sessions: HashMap<SessionId, Tally>,
    /// Closed sessions whose tallies are still in `sessions`, oldest first.
    closed_tallies: VecDeque<SessionId>,
    /// Losses of the source for which a gap has been opened.
    lost: Lost,
    /// Number of members without room in the kernel's map for which a gap has been opened.
    untracked_members: u64,
    /// Number of probe runs that the kernel had skipped at the last check.
    skipped_probes: u64,
    /// Period with missing events that a reconciliation scan is recovering.
    gap: Option<Gap>,
    /// Reason and losses of the next gap, which were noticed while the current one was open.
    next_gap: Option<(&'static str, Lost)>,
    failover: Failover,
    service_messages: ServiceMessages,
    /// Time up to which all events have been applied, in ns since boot.
    complete_until: u64,
    /// Whether the model may be out of date because events were lost.
    has_losses: bool,
    /// Whether the pre-existing processes have been read.
    ready: bool,
    /// Whether the engine stops: sessions close without waiting for undiscovered members.
    stopping: bool,
    map_sync: MapSync,
    cgroups: Cgroups,
    deferred: Deferred,
    successions: Successions,
    reloading: Option<Reloading>,
    /// Refusal of the config at the last reload.
    refused: Option<RefusedReload>,
    /// Change of a keep that must be stored before the request is answered.
    unsaved_keep: Option<UnsavedKeep>,
    /// Whether the probes know that an escalation is open.
    escalations_announced: bool,
    count: Totals,
    /// Time when the engine began to watch, in ns since boot.
    started_at: u64,
    /// Number of gaps opened.
    gaps: u64,
    /// Number of records read since the idle timer was last updated.
    drained: u64,
    /// Closed sessions whose state is still in the kernel's map, by their first root, oldest first. Each has the ring
    /// position at which it closed.
    closed_at_position: VecDeque<(u64, ProcessKey)>,
}

impl Engine {
    /// Starts the engine with a source whose probes are already attached. It reads /proc only now, so no process is
    /// missed between the attachment and the scan.
    ///
    /// Also continues the work of an earlier service, so it may already send signals.
    ///
    /// # Errors
    /// The process table cannot be read, or a map cannot be read or written.
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
            ingest: Ingest::new(reaper, out, &settings),
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
            service_messages: ServiceMessages::default(),
            complete_until: 0,
            has_losses: false,
            ready: false,
            stopping: false,
            map_sync: MapSync::default(),
            cgroups,
            deferred,
            successions: Successions::default(),
            reloading: None,
            refused: None,
            unsaved_keep: None,
            escalations_announced: false,
            count: Totals::default(),
            started_at: kernel.clock.boot_time(),
            kernel,
            gaps: 0,
            drained: 0,
            closed_at_position: VecDeque::new(),
        };
        engine.restore()?;
        if let Some(probes) = engine.source.probes_mut() {
            probes.keep_pinned();
        }
        engine.ready = true;
        engine.notify_ready();
        sys::trim();
        Ok(engine)
    }

    /// Leaves the pinned probes active for the next service, or gives up all claims and unpins the probes.
    ///
    /// The probes stay active with `leave_pinned`. They also do in enforce mode if due members have no decision yet:
    /// the next service evaluates them. Returns the directory of the pins, `None` if no probes stay active.
    fn leave(&mut self, leave_pinned: bool) -> Option<String> {
        let pinned = self.pinned();
        let undecided = match self.settings.mode {
            Mode::Enforce => self.undecided(),
            Mode::Observe => 0,
        };
        if undecided > 0 {
            let suffix = match &pinned {
                Some(dir) => {
                    format!("the next service does (probes and their data stay pinned at {dir})")
                }
                None => "they keep running; list them with `reaper scan`".into(),
            };
            tracing::warn!(
                "the service stopped before it decided whether to reap {undecided} processes of agents that have exited; {suffix}"
            );
        }
        if let Some(pinned) = pinned.filter(|_| leave_pinned || undecided > 0) {
            self.sync_maps();
            // The probes must not try to wake a reader that is gone.
            let announced = self.source.announce_idle(false);
            if let Err(error) = announced.and_then(|()| self.source.announce_escalations(false)) {
                tracing::error!(
                    "cannot tell the pinned probes that the service stops: {error}; they keep trying to wake it, which costs some CPU \
                     time, until the next service runs"
                );
            }
            return Some(pinned);
        }
        self.ingest.reaper.stop();
        self.disarm();
        None
    }

    /// Unpins the probes, if there are any. Errors are logged.
    fn disarm(&mut self) {
        let probes = self.source.probes_mut();
        if let Some(Err(error)) = probes.map(|probes| probes.unpin()) {
            tracing::error!(
                "cannot remove the pinned probes: {error}; they stay in the kernel until `reaper unpin`, run while no service runs"
            );
        }
    }

    /// Returns the directory of the pins, if the probes are pinned.
    fn pinned(&self) -> Option<String> {
        let path = self.source.probes()?.pinned_at()?;
        Some(path.display().to_string())
    }

    /// Returns whether a process without an entry in the kernel's map is certainly not a member. False if there is no
    /// map.
    fn is_mapped(&self) -> bool {
        let maps = self.source.maps();
        maps.is_some_and(|maps| maps.is_complete()) && self.skipped_probes == 0
    }

    /// Frees the part of the ring whose records have been handled and written to the stream. Flushes the stream.
    /// Removes closed sessions from the kernel's map once the records of their close are freed.
    ///
    /// The next service reads the rest again. If the stream is slow and more than half of the ring is in use, records
    /// are freed before they are written. A crash then loses them.
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
        // If the ring were read again, a session's end would be unknown without the session's state in the map.
        let released = position - ring.unreleased();
        while let Some((_, first_root)) = self
            .closed_at_position
            .pop_front_if(|(at, _)| *at <= released)
        {
            self.forget_session(first_root);
        }
    }

    /// Applies an event that did not come from the source to the model, and handles all outputs.
    fn apply(&mut self, event: &Event) {
        self.model.apply(event, &mut self.outputs);
        for output in self.outputs.drain(..) {
            self.ingest.on_output(&self.model, event, &output);
        }
        self.after_outputs();
    }

    /// Passes changes of sessions that no event caused to [`Ingest`], with `time` in ns since boot. Drops other
    /// outputs.
    fn on_session_events(&mut self, time: u64) {
        for output in self.outputs.drain(..) {
            if let Output::Session(session_event) = output {
                self.ingest
                    .on_session_event(&self.model, time, &session_event);
            }
        }
    }

    /// Reports the queued exits of signalled processes without a claim, then the queued closed sessions. A session with
    /// claimed or undecided members is reported later.
    fn after_outputs(&mut self) {
        // These records must precede the close of their session.
        self.report_unclaimed_exits();
        if self.ingest.closed_sessions.is_empty() {
            return;
        }
        // Outcomes of members precede the close of their session.
        self.on_reap_events();
        for (id, session, last_end) in std::mem::take(&mut self.ingest.closed_sessions) {
            let tally = self.sessions.entry(id).or_default();
            (tally.closing_session, tally.last_exit_at) = (Some(session), last_end);
            // Outcomes are confirmed later than the exit records arrive.
            if !self.ingest.reaper.has_members_of(id) {
                self.close_if_decided(id);
            }
        }
    }

    /// Announces to the probes whether an escalation is open, as then every record must wake this thread. Does nothing
    /// if the probes know it. The next call retries after an error.
    fn announce_escalations(&mut self) {
        let open = self.ingest.reaper.open_escalations() > 0;
        if open != self.escalations_announced {
            match self.source.announce_escalations(open) {
                Ok(()) => self.escalations_announced = open,
                Err(error) => {
                    tracing::error!(
                        "cannot tell the probes that signals are being sent: {error}; trying again; new children may be signalled late"
                    );
                }
            }
        }
    }

    /// Queues a record with the present time for the stream.
    fn emit(&mut self, body: EventBody) {
        self.ingest.out.push(EventRecord {
            boot_ns: self.kernel.clock.boot_time(),
            body,
        });
    }
}
