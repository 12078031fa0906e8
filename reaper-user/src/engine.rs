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

mod answer;
mod cgroups;
mod decide;
mod end;
mod fall;
mod follow;
mod gaps;
mod handover;
mod keeps;
mod mirror;
mod reconcile;
pub mod reload;
mod rest;
mod restore;
mod signal;
mod survey;
mod suspects;
mod undecided;

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::path::PathBuf;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::api::ask::Ask;
use crate::config::{Config, EventScope, Mode};
use crate::export::{Body, Count, Record, Sink, Who};
use crate::journal::{self, Keeper};
use crate::reap::{Reaper, Times};
use crate::source::ladder::Passed;
use crate::source::procfs::{Procfs, ProcfsError};
use crate::source::{Lost, Source, SourceError, ebpf};
use crate::sys;
use cgroups::Cgroups;
use fall::Fall;
use follow::{Follow, Tally};
use gaps::Gap;
use handover::Handovers;
use keeps::Note;
use mirror::Mirror;
use reaper_model::event::{Event, ProcessKey, Provenance};
use reaper_model::session::SessionId;
use reaper_model::{Model, Output, Scope};
use reload::{Load, Reloading};
use rest::{Rest, at};
use undecided::Undecided;

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
    pub load: Load,
    /// What users asked the service before this one to keep, as far as that is known.
    pub keeps: Vec<journal::Keep>,
    /// Writes down what users ask for; without it that is forgotten when the service ends.
    pub keeper: Option<Keeper>,
    /// Let the probes send the first signal where they can.
    pub kernel_reap: bool,
    /// Leave what is pinned at work when stopped.
    pub leave_armed: bool,
    /// The better sources that could not be used.
    pub passed_over: Vec<Passed>,
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

impl From<ebpf::SourceError> for EngineError {
    fn from(error: ebpf::SourceError) -> EngineError {
        EngineError::Source(error.into())
    }
}

/// See the module.
pub struct Engine {
    source: Source,
    procfs: Procfs,
    model: Model,
    /// What follows from the event that is being applied; empty between two events.
    outputs: Vec<Output>,
    follow: Follow,
    settings: Settings,
    /// Claimed processes, for telling of them when they are gone.
    claimed: HashMap<ProcessKey, Who>,
    sessions: HashMap<SessionId, Tally>,
    /// Closed sessions whose tallies are still in `sessions`, oldest first.
    tallied: VecDeque<SessionId>,
    lost: Lost,
    unfollowed: u64,
    /// How often the kernel has left a probe out.
    skipped: u64,
    /// Events are missing, and are being looked for.
    gap: Option<Gap>,
    /// More that were missing before those were found.
    next_gap: Option<(&'static str, Lost)>,
    fall: Fall,
    /// All that had happened by then has been told, in ns since boot.
    whole_until: u64,
    /// What is known of a process may be out of date.
    lossy: bool,
    /// All that ran already has been taken in.
    ready: bool,
    /// Nothing is waited for any more.
    stopping: bool,
    mirror: Mirror,
    cgroups: Cgroups,
    undecided: Undecided,
    handovers: Handovers,
    reloading: Option<Reloading>,
    /// To be written down before it is answered.
    note: Option<Note>,
    ladders_told: bool,
    count: Count,
    /// When it began to watch, in ns since boot.
    began: u64,
    /// Gaps that were opened.
    gaps: u64,
    /// In observe: processes that would have been reaped.
    would_have_reaped: u64,
    /// Records read since the engine has last asked how long it may rest.
    drained: u64,
    /// Sessions that are over, and where the ring stood when they were.
    over: VecDeque<(u64, ProcessKey)>,
}

impl Engine {
    /// Attaches nothing itself: takes a source whose probes are attached, and only now reads /proc, so
    /// that nothing falls between the two.
    ///
    /// # Errors
    /// The process table, or a map, cannot be read.
    pub fn start(source: Source, settings: Settings, out: Sink) -> Result<Engine, EngineError> {
        let rules = settings.config.rules.clone();
        let mut model = Model::new(rules, settings.scope.clone(), std::process::id());
        model.set_misses_moves(!source.tells_moves());
        let reaper =
            Reaper::new(settings.times, settings.mode == Mode::Observe).map_err(io::Error::from)?;
        let cgroups = Cgroups::new(settings.cgroups.clone(), &settings.scope);
        let undecided = Undecided::new(&model.rules)?;
        let mut engine = Engine {
            source,
            procfs: Procfs::default(),
            model,
            outputs: Vec::new(),
            follow: Follow::new(
                reaper,
                out,
                settings.events,
                !settings.scope.roots.is_empty(),
            ),
            settings,
            claimed: HashMap::new(),
            sessions: HashMap::new(),
            tallied: VecDeque::new(),
            lost: Lost::default(),
            unfollowed: 0,
            skipped: 0,
            gap: None,
            next_gap: None,
            fall: Fall::default(),
            whole_until: 0,
            lossy: false,
            ready: false,
            stopping: false,
            mirror: Mirror::default(),
            cgroups,
            undecided,
            handovers: Handovers::default(),
            reloading: None,
            note: None,
            ladders_told: false,
            count: Count::default(),
            began: sys::boot_time(),
            gaps: 0,
            would_have_reaped: 0,
            drained: 0,
            over: VecDeque::new(),
        };
        engine.take_up()?;
        engine.source.stay();
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
        mut asks: mpsc::Receiver<Ask>,
    ) -> Result<Count, EngineError> {
        let mut events = sys::readable(&self.source)?;
        let confirm = sys::readable(self.follow.reaper.confirm())?;
        let mut rest = Rest::default();
        tokio::pin!(stop);
        let reason = loop {
            if self.fall.is_new(sys::monotonic()) {
                match sys::readable(&self.source) {
                    Ok(new) => {
                        events = new;
                        self.fall.is_waited_for();
                    }
                    Err(error) => {
                        tracing::error!(
                            "the new source cannot be waited on: {error}; trying again"
                        );
                        self.fall.put_off(sys::monotonic());
                    }
                }
                rest.read(1);
            }
            // Both by the clock and not by a timer's word, which a busy ring could keep from being heard.
            if self
                .follow
                .reaper
                .next_deadline()
                .is_some_and(|at| at <= sys::monotonic())
            {
                let procfs = &self.procfs;
                self.follow.reaper.tick(|key| {
                    let state = procfs.state(key.pid).unwrap_or('?');
                    (state, procfs.rss_bytes(key.pid).unwrap_or(0))
                });
                rest.read(self.settle());
            }
            if rest.is_over() {
                self.look_for_skips();
                rest.looked(self.settle());
                self.find_adopters();
                if rest.says_asleep() {
                    if let Err(error) = self.source.set_idle(true) {
                        self.give_up(&error);
                        rest.read(1 + self.settle());
                        continue;
                    }
                    self.look_for_loss();
                }
            }
            // What was read on the way may be what a probe was to wake this thread for.
            rest.read(mem::take(&mut self.drained));
            let timers = [
                self.follow.reaper.next_deadline(),
                self.undecided.next(),
                self.handovers.next().filter(|_| self.gap.is_none()),
                self.fall.next(),
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
                    rest.read(if self.source.ring().is_some() { 1 } else { read });
                }
                () = self.undecided.facts.ready() => rest.read(self.settle()),
                loaded = Engine::reloaded(&mut self.reloading) => {
                    let read = self.take_over(loaded);
                    rest.read(1 + read);
                }
                survey = Engine::surveyed(&mut self.gap) => {
                    self.drain_all();
                    self.close_gap(survey);
                    rest.read(1 + self.settle());
                }
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.confirm();
                    rest.read(self.settle());
                }
                Some(ask) = asks.recv() => rest.read(self.answer(ask)),
                () = at(deadline) => rest.read(self.settle()),
                () = at(rest.until) => {}
                // Not before all others have had their turn.
                () = yield_now(), if self.has_work() || self.source.has_waiting() => {
                    rest.read(self.settle());
                }
            }
        };
        self.stopping = true;
        self.settle();
        let armed = self.leave();
        self.report();
        let count = Count {
            sessions: self.follow.opened,
            kept: self.kept(),
            signals: self.count.signals + self.follow.signals,
            ..self.count
        };
        self.tell(Body::Summary {
            count,
            reason,
            armed,
        });
        self.follow.out.flush();
        Ok(count)
    }

    /// Leaves the probes at work for the next service, or ends all that was begun. Gives where they are.
    fn leave(&mut self) -> Option<String> {
        let pinned = self.source.pinned_at();
        let pinned = pinned.map(|path| path.display().to_string());
        if let Some(pinned) = pinned.filter(|_| self.settings.leave_armed) {
            self.mirror();
            // Nobody is there to be woken.
            let said = self.source.set_idle(false);
            if let Err(error) = said.and_then(|()| self.source.set_ladders(false)) {
                tracing::error!("{error}");
            }
            return Some(pinned);
        }
        self.follow.reaper.stop();
        if let Err(error) = self.source.disarm() {
            tracing::error!("{error}");
        }
        None
    }

    /// Drains, decides and acts until nothing is left to do. Gives the number of records read.
    ///
    /// The signals come first: whatever else follows from what was read waits until they are sent.
    fn settle(&mut self) -> u64 {
        let mut read = self.drain();
        self.learn();
        self.conclude();
        // A tree that forks without end must not keep the timers waiting.
        for _ in 0..ROUNDS_MAX {
            self.find_successors();
            self.decide();
            // Before the signals: whoever forks from now on is not to outrun them.
            self.condemn_in_time();
            read += self.check_marks();
            if self.follow.reaper.has_queued() {
                read += self.signal();
            }
            self.report();
            self.tell_ladders();
            // What was born before the probes knew of the ladder has woken nobody.
            read += self.drain();
            self.follow.out.flush();
            if !self.has_work() {
                // All that is due by now is claimed, so a ladder without a claim is at its end; unless a
                // gap keeps some from being decided about.
                if self.follow.pending.is_empty() && !self.undecided.is_asking() {
                    self.follow.reaper.close_empty();
                }
                self.report();
                self.tell_ladders();
                break;
            }
        }
        self.conclude();
        self.look_ahead();
        self.mirror();
        read += self.check_marks();
        self.give_back();
        read
    }

    /// Handles the exits that came before a process had its mark in the kernel. Returns the number of records read.
    fn check_marks(&mut self) -> u64 {
        let gone = match self.gone_before_marked() {
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
            if !self.source.has_waiting() {
                break;
            }
        }
    }

    /// Handles the exits that pidfds report.
    fn confirm(&mut self) {
        loop {
            let (ready, unrecorded) = self.follow.reaper.confirm_ended();
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
                self.follow.reaper.ended_unrecorded(key);
            }
        }
    }

    /// Gives room in the ring back for what has been seen to and told: a service that comes after this one
    /// reads the rest again. Where the stream is not written as fast as that, room counts for more.
    fn give_back(&mut self) {
        let out = &mut self.follow.out;
        let Some(ring) = self.source.ring() else {
            self.over.clear();
            return out.flush();
        };
        let (position, release) = (ring.position(), ring.release());
        if ring.held() > ring.size() / 2 {
            release.up_to(ring.behind());
        }
        if out.is_idle() {
            release.up_to(position);
        } else if ring.held() > 0 {
            out.then(move || release.up_to(position));
        }
        out.flush();
        // Read again, the end of a session would tell nothing if nothing were known of it.
        let given_back = position - ring.held();
        while let Some((_, first_root)) = self.over.pop_front_if(|(at, _)| *at <= given_back) {
            self.forget_session(first_root);
        }
    }

    fn has_work(&self) -> bool {
        !self.follow.pending.is_empty() && self.gap.is_none() || self.follow.reaper.has_queued()
    }

    /// Reads the ring into the model, and what the model makes of it into what is to be told and done.
    fn drain(&mut self) -> u64 {
        let Engine {
            source,
            model,
            follow,
            cgroups,
            outputs,
            ready,
            ..
        } = self;
        model.set_infers_membership(source.looks());
        let began = sys::boot_time();
        follow.finds_news = *ready;
        follow.notes_turned_up = !source.filters();
        let drained = source.drain(|event| {
            cgroups.meet(model, &event);
            model.apply(&event, outputs);
            for output in outputs.drain(..) {
                follow.on_output(model, &event, &output);
            }
        });
        self.follow.finds_news = false;
        self.followed();
        self.count.events += drained.records;
        self.drained += drained.records;
        if let Some(flaw) = drained.flaw {
            self.tell(Body::Malformed {
                count: drained.malformed,
                reason: flaw.to_string(),
            });
            // What is found by looking is looked at again: nothing is missing for good.
            if !self.source.looks() {
                self.miss_one();
            }
        }
        if drained.lost > self.lost.total {
            self.look_for_loss();
        }
        if !self.fall_back() && !self.source.has_untold() && self.gap.is_none() {
            self.whole_until = began;
        }
        drained.records
    }

    /// Takes in one event that did not come through the ring.
    fn apply(&mut self, event: &Event) {
        self.model.apply(event, &mut self.outputs);
        for output in self.outputs.drain(..) {
            self.follow.on_output(&self.model, event, &output);
        }
        self.followed();
    }

    /// Handles what has happened to sessions without an event, at `time` in ns since boot.
    fn follow_sessions(&mut self, time: u64) {
        for output in self.outputs.drain(..) {
            if let Output::Session(session_event) = output {
                self.follow
                    .on_session_event(&self.model, time, &session_event);
            }
        }
    }

    /// Does what following the model's steps has left to do.
    fn followed(&mut self) {
        // Before it is said that their session is over.
        self.report_ends();
        if self.follow.closed.is_empty() {
            return;
        }
        // What has become of its members comes before its end.
        self.report();
        for (id, session, last_end) in std::mem::take(&mut self.follow.closed) {
            let tally = self.sessions.entry(id).or_default();
            (tally.closed, tally.last_end) = (Some(session), last_end);
            // Told once the ends are confirmed, which comes after the exit records.
            if !self.follow.reaper.has_members_of(id) {
                self.close_decided(id);
            }
        }
    }

    /// Tells the probes whether every record matters now.
    fn tell_ladders(&mut self) {
        let open = self.follow.reaper.open_ladders() > 0;
        if open != self.ladders_told {
            match self.source.set_ladders(open) {
                Ok(()) => self.ladders_told = open,
                Err(error) => tracing::error!("{error}"),
            }
        }
    }

    fn tell(&mut self, body: Body) {
        self.follow.out.push(Record {
            time: sys::boot_time(),
            body,
        });
    }
}
