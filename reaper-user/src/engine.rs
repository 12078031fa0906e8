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

mod follow;

use std::io;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep_until};

use crate::config::{EventScope, Mode};
use crate::export::{Body, Count, Names, Record, SessionRef, Sink, Who};
use crate::model::event::{Ended, Event, EventKind, Key, Provenance};
use crate::model::policy::{Decision, Verdict};
use crate::model::session::SessionId;
use crate::model::{Model, Scope};
use crate::reap::{Outcome, Reaper, Released, Report, Times};
use crate::source::ebpf::{Lost, Source, SourceError};
use crate::source::procfs::{Look, Procfs, ProcfsError};
use crate::sys;
use follow::{Follow, Pending, Tally};

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
    ladders_told: usize,
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
        let mut engine = Engine {
            source,
            procfs: Procfs::default(),
            model,
            follow: Follow::new(reaper, out, settings.events),
            settings,
            claimed: HashMap::new(),
            sessions: HashMap::new(),
            lost: Lost::default(),
            ladders_told: 0,
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

    /// Takes in the process table. What happened since the probes were attached waits in the ring and
    /// is merged afterwards.
    fn seed(&mut self) -> Result<HashSet<u32>, ProcfsError> {
        // Parents before their children, so that membership finds its way down.
        let rows = self.procfs.snapshot()?.parents_first();
        let pids = rows.iter().map(|row| row.key.pid).collect();
        for row in rows {
            self.apply(&Event {
                time: sys::boot_time(),
                provenance: Provenance::Procfs,
                kind: EventKind::Seen(row),
            });
        }
        Ok(pids)
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
        let mut drain_at = Some(Instant::now() + DRAIN_EVERY);
        let mut asleep = false;
        tokio::pin!(stop);
        let reason = loop {
            let deadline = self.follow.reaper.next_deadline().map(|at| {
                Instant::now() + Duration::from_nanos(at.saturating_sub(sys::monotonic()))
            });
            tokio::select! {
                biased;
                ready = ring.readable() => {
                    ready?.clear_ready();
                    self.settle();
                    let wait = if self.has_work() { Duration::ZERO } else { DRAIN_EVERY };
                    (drain_at, asleep) = (Some(Instant::now() + wait), false);
                }
                ready = confirm.readable() => {
                    ready?.clear_ready();
                    self.confirm();
                    self.settle();
                }
                () = at(deadline) => {
                    let procfs = &self.procfs;
                    self.follow.reaper.tick(|key| {
                        (procfs.state(key.pid).unwrap_or('?'), procfs.rss_bytes(key.pid).unwrap_or(0))
                    });
                    self.settle();
                }
                () = at(drain_at) => {
                    let read = self.settle();
                    self.find_adopters();
                    drain_at = if read > 0 {
                        asleep = false;
                        Some(Instant::now() + DRAIN_EVERY)
                    } else if !asleep {
                        // One more look: a probe may have committed on what was said before.
                        asleep = true;
                        self.source.set_idle(true)?;
                        self.look_for_loss();
                        Some(Instant::now() + DRAIN_EVERY)
                    } else {
                        None
                    };
                }
                reason = &mut stop => break reason,
            }
        };
        self.settle();
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
                self.follow.reaper.open_queued();
                let lost = self.lost.total;
                read += self.drain();
                let lossless = self.lost.total == lost;
                self.follow.reaper.signal_queued(&mut self.model, lossless);
            }
            self.report();
            self.tell_ladders();
            // What was born before the probes knew of the ladder has woken nobody.
            read += self.drain();
            if !self.has_work() {
                break;
            }
        }
        self.tell_watches();
        self.follow.out.flush();
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
            ..
        } = self;
        let drained = source.drain(|event| {
            model.apply(&event, |model, step| follow.step(model, &event, step));
        });
        self.followed();
        self.count.events += drained.records;
        if let Some(defect) = drained.defect {
            self.tell(Body::Malformed {
                count: drained.malformed,
                reason: defect.to_string(),
            });
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
        for (id, session) in std::mem::take(&mut self.follow.closed) {
            self.sessions.entry(id).or_default().closed = Some(session);
            // Told once the ends are confirmed, which comes after the exit records.
            if !self.follow.reaper.has_members_of(id) {
                self.close(id);
            }
        }
    }

    /// If records were lost, says so and finds in /proc what they would have told.
    fn look_for_loss(&mut self) {
        let lost = self.source.lost();
        if lost.total == self.lost.total {
            return;
        }
        let since = lost.since(&self.lost);
        self.count.lost += since.total;
        self.lost = lost;
        self.tell(Body::Lost {
            total: since.total,
            by_kind: since.named(),
        });
        let before = sys::boot_time();
        match self.seed() {
            Ok(living) => self.forget_vanished(&living, before),
            Err(error) => {
                tracing::error!("{error}: what was lost stays unknown until the next look")
            }
        }
    }

    /// Processes that were known before a look at /proc and were not found by it have exited.
    fn forget_vanished(&mut self, living: &HashSet<u32>, before: u64) {
        self.source_catches_up();
        let gone: Vec<Key> = self
            .model
            .tree
            .iter()
            .filter(|node| node.key.start < before && !living.contains(&node.key.pid))
            .map(|node| node.key)
            .collect();
        for key in gone {
            // A row that could not be read is not one that is not there: unknown is never dead.
            let dead = match self.procfs.read(key.pid) {
                Ok(Look::Alive(seen)) => !seen.key.same_tick(key),
                Ok(Look::Zombie | Look::Vanished) => true,
                Err(_) => false,
            };
            if dead {
                self.exited_unseen(key);
            }
        }
    }

    /// Reads what is in the ring without looking for losses again.
    fn source_catches_up(&mut self) {
        let told = std::mem::replace(&mut self.lost.total, u64::MAX);
        self.drain();
        self.lost.total = told;
    }

    fn exited_unseen(&mut self, key: Key) {
        let kind = EventKind::Exit {
            key,
            parent: None,
            ended: Ended::Unknown,
            peak_rss: 0,
        };
        self.apply(&Event {
            time: sys::boot_time(),
            provenance: Provenance::Inferred,
            kind,
        });
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

    /// Takes note of the ends that pidfds tell of.
    fn confirm(&mut self) {
        loop {
            let (ready, unrecorded) = self.follow.reaper.confirm_ended();
            if ready == 0 {
                return;
            }
            for key in unrecorded {
                // The exit's record is written before the pidfd can tell of it: it is there, or it is lost.
                self.drain();
                if self.model.tree.get(key).is_some() {
                    self.exited_unseen(key);
                }
                self.follow.reaper.ended_unrecorded(key);
            }
        }
    }

    fn decide(&mut self) {
        let (mut keys, mut ended) = (Vec::new(), Vec::new());
        for pending in std::mem::take(&mut self.follow.pending) {
            match pending {
                Pending::Process(key) => keys.push(key),
                Pending::Session(id) => {
                    ended.push(id);
                    let members = self
                        .model
                        .sessions
                        .inwards(id)
                        .flat_map(|session| session.members());
                    keys.extend(
                        members
                            .filter_map(|pid| self.model.tree.by_pid(pid))
                            .map(|node| node.key),
                    );
                }
            }
        }
        // The oldest first: parents before the children they may still beget.
        keys.sort_unstable_by_key(|key| (key.start, key.pid));
        keys.dedup();
        keys.into_iter().for_each(|key| self.decide_one(key));
        for id in ended {
            // Nothing to be reaped: it is over but for what is kept.
            if self.settings.mode == Mode::Enforce && !self.follow.reaper.is_open(id) {
                self.close(id);
            }
        }
    }

    fn decide_one(&mut self, key: Key) {
        let Some(node) = self.model.tree.get(key) else {
            return;
        };
        let decision = self.model.decide(key);
        let known = (decision.verdict, decision.reason);
        let news = self.follow.decided.insert(key, known) != Some(known);
        match decision.verdict {
            // Told once it is verified, which changes it where the process has changed its uid.
            Verdict::Reap if news || self.settings.mode == Mode::Enforce => {
                if self.follow.reaper.claim(&self.model, key, &decision) {
                    let who = Who::new(&self.model, node);
                    self.claimed.insert(key, who);
                }
            }
            Verdict::Keep if news => {
                if let Some(id) = node.session.filter(|_| decision.due.is_some()) {
                    self.count.kept += 1;
                    self.sessions.entry(id).or_default().kept += 1;
                }
                let who = Who::new(&self.model, node);
                self.tell_decision(who, &decision);
            }
            Verdict::Reap | Verdict::Keep => {}
        }
    }

    fn tell_decision(&mut self, who: Who, decision: &Decision) {
        let verdict = match decision.verdict {
            Verdict::Reap => "reap",
            Verdict::Keep => "keep",
        };
        let (reason, rule) = (decision.reason.name(), decision.rule.clone());
        let names = Names {
            verdict,
            reason,
            rule,
        };
        self.tell(Body::Decision { who, names });
    }

    /// Tells what the reaper has done.
    fn report(&mut self) {
        for report in self.follow.reaper.take_reports() {
            match report {
                Report::Decided { key, decision } => {
                    if let Some(who) = self.claimed.get(&key).cloned() {
                        self.tell_decision(who, &decision);
                    }
                }
                Report::Signal(sent) => {
                    self.count.signals += 1;
                    if let Some(who) = self.claimed.get(&sent.key).cloned() {
                        self.tell(Body::Signal { who, sent });
                    }
                }
                Report::Outcome {
                    key,
                    session,
                    outcome,
                    signal,
                    duration,
                } => {
                    self.outcome(key, session, outcome, signal.map(Signal::as_str), duration);
                }
                // What is left of it, if anything, is kept.
                Report::Done { session } => self.close(session),
            }
        }
    }

    fn outcome(
        &mut self,
        key: Key,
        session: SessionId,
        outcome: Outcome,
        signal: Option<&'static str>,
        duration: Option<u64>,
    ) {
        let tally = self.sessions.entry(session).or_default();
        match outcome {
            Outcome::Ended(_) => {
                self.count.reaped += 1;
                tally.reaped += 1;
            }
            Outcome::Failed(_) => {
                self.count.failed += 1;
                tally.failed += 1;
            }
            // Decided about anew, from what is known now.
            Outcome::Released(Released::NotDue(_)) => {
                self.follow.pending.push(Pending::Process(key))
            }
            Outcome::Released(_) => {}
        }
        let closed = tally.closed.is_some();
        if let Some(who) = self.claimed.remove(&key)
            && outcome != Outcome::Released(Released::Observed)
        {
            self.tell(Body::Outcome {
                who,
                outcome,
                signal,
                duration,
            });
        }
        if closed && !self.follow.reaper.has_members_of(session) {
            self.close(session);
        }
    }

    /// Tells that a session is over, once: of what was due nothing is left but what is kept.
    fn close(&mut self, id: SessionId) {
        let tally = self.sessions.entry(id).or_default();
        let living = self.model.sessions.get(id).map(SessionRef::from);
        let over = living.is_none();
        if let Some(session) = tally.closed.take().or(living)
            && !std::mem::replace(&mut tally.told, true)
        {
            let Tally {
                reaped,
                kept,
                failed,
                ..
            } = *tally;
            self.tell(Body::SessionClose {
                session,
                reaped,
                kept,
                failed,
            });
        }
        if over {
            self.sessions.remove(&id);
        }
    }

    /// Tells the probes whether every record matters now.
    fn tell_ladders(&mut self) {
        let open = self.follow.reaper.open_ladders();
        if (open > 0) != (self.ladders_told > 0)
            && let Err(error) = self.source.set_ladders(open as u64)
        {
            tracing::error!("{error}");
        }
        self.ladders_told = open;
    }

    /// Looks up in /proc who has the orphans of which the kernel's record did not come.
    fn find_adopters(&mut self) {
        for child in std::mem::take(&mut self.follow.parentless) {
            let Some(node) = self
                .model
                .tree
                .get(child)
                .filter(|node| node.parent.is_none())
            else {
                continue;
            };
            let old_parent = node.orphaned.map(|orphaned| orphaned.old_parent);
            let Ok(Look::Alive(seen)) = self.procfs.read(child.pid) else {
                continue;
            };
            let adopter = self.model.tree.by_pid(seen.parent).map(|node| node.key);
            if seen.key.same_tick(child) && adopter.is_some() {
                let kind = EventKind::Reparent {
                    child,
                    old_parent,
                    adopter,
                };
                self.apply(&Event {
                    time: sys::boot_time(),
                    provenance: Provenance::Procfs,
                    kind,
                });
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

/// Waits until then, or for ever.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
