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

mod cgroups;
mod decide;
mod follow;
mod gaps;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::time::{Instant, sleep_until};

use crate::config::{EventScope, Mode};
use crate::export::{Body, Count, Record, Sink, Who};
use crate::model::event::{Event, Key};
use crate::model::session::SessionId;
use crate::model::{Model, Scope};
use crate::reap::{Reaper, Times};
use crate::source::ebpf::{Lost, Source, SourceError};
use crate::source::procfs::{Procfs, ProcfsError};
use crate::sys;
use cgroups::Cgroups;
use follow::{Follow, Tally};

/// How long records that wake nobody may wait.
const DRAIN_EVERY: Duration = Duration::from_millis(50);

/// Rounds of deciding and signalling before timers have their turn.
const ROUNDS_MAX: usize = 64;

/// What the engine is to do.
pub struct Settings {
    pub mode: Mode,
    pub events: EventScope,
    pub scope: Scope,
    /// The scope as it was given, for the stream.
    pub scope_names: Vec<String>,
    /// Directories of the cgroups in it.
    pub cgroups: Vec<PathBuf>,
    pub times: Times,
    pub rules: crate::model::agent::Ruleset,
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
    source: Source,
    procfs: Procfs,
    model: Model,
    follow: Follow,
    settings: Settings,
    /// Claimed processes, for telling of them when they are gone.
    claimed: HashMap<Key, Who>,
    sessions: HashMap<SessionId, Tally>,
    lost: Lost,
    cgroups: Cgroups,
    ladders_told: bool,
    count: Count,
}

impl Engine {
    /// Attaches nothing itself: takes a source whose probes are attached, and only now reads /proc, so
    /// that nothing falls between the two.
    ///
    /// # Errors
    /// The process table cannot be read.
    pub fn start(source: Source, settings: Settings, out: Sink) -> Result<Engine, EngineError> {
        let rules = settings.rules.clone();
        let model = Model::new(rules, settings.scope.clone(), std::process::id());
        let reaper =
            Reaper::new(settings.times, settings.mode == Mode::Observe).map_err(io::Error::from)?;
        let cgroups = Cgroups::new(settings.cgroups.clone(), &settings.scope);
        let mut engine = Engine {
            source,
            procfs: Procfs::default(),
            model,
            follow: Follow::new(reaper, out, settings.events),
            settings,
            claimed: HashMap::new(),
            sessions: HashMap::new(),
            lost: Lost::default(),
            cgroups,
            ladders_told: false,
            count: Count::default(),
        };
        engine.seed()?;
        engine.tell(Body::Ready {
            mode: engine.settings.mode.name(),
            source: "ebpf",
            processes: engine.model.tree.len(),
            scope: engine.settings.scope_names.clone(),
        });
        engine.settle();
        sys::trim();
        Ok(engine)
    }

    /// Works until `stop` is done; gives what it answers and what was done.
    ///
    /// # Errors
    /// The source or a file descriptor cannot be waited on.
    pub async fn run(
        mut self,
        stop: impl Future<Output = &'static str>,
    ) -> Result<Count, EngineError> {
        let ring = sys::readable(self.source.ring())?;
        let confirm = sys::readable(self.follow.reaper.confirm())?;
        let mut rest = Rest::default();
        tokio::pin!(stop);
        let reason = loop {
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
                rest.looked(self.settle());
                self.find_adopters();
                if rest.says_asleep() {
                    self.source.set_idle(true)?;
                    self.look_for_loss();
                }
            }
            let deadline = self.follow.reaper.next_deadline().map(|at| {
                Instant::now() + Duration::from_nanos(at.saturating_sub(sys::monotonic()))
            });
            tokio::select! {
                biased;
                reason = &mut stop => break reason,
                ready = ring.readable() => {
                    ready?.clear_ready();
                    self.settle();
                    rest.read(1);
                }
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.confirm();
                    rest.read(self.settle());
                }
                () = at(deadline) => {}
                () = at(rest.until) => {}
                () = std::future::ready(()), if self.has_work() => rest.read(self.settle()),
            }
        };
        self.settle();
        self.follow.reaper.stop();
        self.report();
        let count = Count {
            sessions: self.follow.opened,
            ..self.count
        };
        self.tell(Body::Summary { count, reason });
        self.follow.out.flush();
        Ok(count)
    }

    /// Drains, decides and acts until nothing is left to do. Gives the number of records read.
    ///
    /// The signals come first: whatever else follows from what was read waits until they are sent.
    fn settle(&mut self) -> u64 {
        let mut read = self.drain();
        // A tree that forks without end must not keep the timers waiting.
        for _ in 0..ROUNDS_MAX {
            self.decide();
            if self.follow.reaper.has_queued() {
                read += self.signal();
            }
            self.report();
            self.tell_ladders();
            // What was born before the probes knew of the ladder has woken nobody.
            read += self.drain();
            self.follow.out.flush();
            if !self.has_work() {
                // All that is due by now is claimed, so a ladder without a claim is at its end.
                self.follow.reaper.close_empty();
                self.report();
                self.tell_ladders();
                break;
            }
        }
        self.tell_watches();
        self.follow.out.flush();
        read
    }

    /// Opens what is queued, reads what has happened by then, and signals what is still due.
    fn signal(&mut self) -> u64 {
        self.follow.reaper.open_queued();
        let vouching = self.follow.reaper.needs_vouching(&self.model);
        let lost = self.lost.total;
        let read = self.drain();
        // A record that was dropped says so only in the next one: what rests on there being none asks.
        let now = if vouching {
            self.source.lost().total
        } else {
            lost
        };
        self.follow
            .reaper
            .signal_queued(&mut self.model, now == lost && self.lost.total == lost);
        read
    }

    fn has_work(&self) -> bool {
        !self.follow.pending.is_empty() || self.follow.reaper.has_queued()
    }

    /// Reads the ring into the model, and what the model makes of it into what is to be told and done.
    fn drain(&mut self) -> u64 {
        let Engine {
            source,
            model,
            follow,
            cgroups,
            ..
        } = self;
        let drained = source.drain(|event| {
            cgroups.meet(model, &event);
            model.apply(&event, |model, step| follow.step(model, &event, step));
        });
        self.followed();
        self.count.events += drained.records;
        if let Some(defect) = drained.defect {
            self.tell(Body::Malformed {
                count: drained.malformed,
                reason: defect.to_string(),
            });
            // What it would have told is as good as lost.
            self.reconcile();
        }
        if drained.lost > self.lost.total {
            self.look_for_loss();
        }
        drained.records
    }

    /// Takes in one event that did not come through the ring.
    fn apply(&mut self, event: &Event) {
        let Engine { model, follow, .. } = self;
        model.apply(event, |model, step| follow.step(model, event, step));
        self.followed();
    }

    /// Does what following the model's steps has left to do.
    fn followed(&mut self) {
        if self.follow.closed.is_empty() {
            return;
        }
        // What has become of its members comes before its end.
        self.report();
        for (id, session) in std::mem::take(&mut self.follow.closed) {
            self.sessions.entry(id).or_default().closed = Some(session);
            // Told once the ends are confirmed, which comes after the exit records.
            if !self.follow.reaper.has_members_of(id) {
                self.close(id);
            }
        }
    }

    /// Tells the probes whose exit is to wake this thread at once.
    fn tell_watches(&mut self) {
        for (pid, on) in self.follow.watch.drain(..) {
            if on {
                self.source.watch(pid)
            } else {
                self.source.unwatch(pid)
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

/// When the ring is looked into without having been woken for it.
struct Rest {
    until: Option<Instant>,
    /// The probes have been told that this thread sleeps until it is woken.
    asleep: bool,
}

impl Default for Rest {
    fn default() -> Rest {
        Rest {
            until: Some(Instant::now() + DRAIN_EVERY),
            asleep: false,
        }
    }
}

impl Rest {
    /// Records have been read out of turn: more may come that wake nobody.
    fn read(&mut self, records: u64) {
        if records > 0 {
            self.asleep = false;
            self.until
                .get_or_insert_with(|| Instant::now() + DRAIN_EVERY);
        }
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// It was time to look, and so many records were there.
    fn looked(&mut self, records: u64) {
        self.until = (records > 0 || !self.asleep).then(|| Instant::now() + DRAIN_EVERY);
        if records > 0 {
            self.asleep = false;
        } else if self.until.is_some() {
            self.asleep = true;
        }
    }

    /// Whether it is time to tell the probes so. One more look follows: a probe may have committed a
    /// record on what had been said before.
    fn says_asleep(&self) -> bool {
        self.asleep && self.until.is_some()
    }
}

/// Waits until then, or for ever.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
