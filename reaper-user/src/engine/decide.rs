//! Deciding, and telling what came of it: by process, by session, in all.

use nix::sys::signal::Signal;

use super::Engine;
use super::follow::{Pending, Tally};
use crate::config::Mode;
use crate::export::{Body, Names, SessionRef, Who};
use crate::model::event::Key;
use crate::model::policy::{Decision, Verdict};
use crate::model::session::{Session, SessionId};
use crate::reap::{Outcome, Released, Report};

impl Engine {
    pub(super) fn decide(&mut self) {
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
            let reaper = &self.follow.reaper;
            let claims = reaper.is_open(id) || reaper.has_members_of(id);
            if self.settings.mode == Mode::Enforce && !claims {
                self.close(id);
            }
        }
    }

    pub(super) fn decide_one(&mut self, key: Key) {
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
                    if let Some(id) = node.session {
                        self.sessions.entry(id).or_default();
                    }
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

    pub(super) fn tell_decision(&mut self, who: Who, decision: &Decision) {
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
    pub(super) fn report(&mut self) {
        let mut over = Vec::new();
        for report in self.follow.reaper.take_reports() {
            match report {
                Report::Decided { key, decision } => {
                    if let Some(who) = self.claimed.get(&key).cloned() {
                        self.tell_decision(who, &decision);
                    }
                }
                Report::Signal(sent) => {
                    self.count.signals += 1;
                    if let Some(node) = self.model.tree.get(sent.key) {
                        // As it is now: it may run another program than when it was claimed.
                        let who = Who::new(&self.model, node);
                        self.claimed.insert(sent.key, who.clone());
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
                    // In observe a session goes on for as long as its members live.
                    if outcome != Outcome::Released(Released::Observed) {
                        over.push(session);
                    }
                }
                // What is left of it and of those in it, if anything, is kept.
                Report::Done { session } => {
                    let gone = |session: &&Session| session.root_gone.is_some();
                    over.extend(
                        self.model
                            .sessions
                            .inwards(session)
                            .filter(gone)
                            .map(|s| s.id),
                    );
                    over.push(session);
                }
            }
        }
        over.sort_unstable();
        over.dedup();
        for id in over {
            let closed = self
                .sessions
                .get(&id)
                .is_some_and(|tally| tally.closed.is_some());
            let reaper = &self.follow.reaper;
            if (closed || !reaper.is_open(id)) && !reaper.has_members_of(id) {
                self.close(id);
            }
        }
    }

    pub(super) fn outcome(
        &mut self,
        key: Key,
        session: SessionId,
        outcome: Outcome,
        signal: Option<&'static str>,
        duration: Option<u64>,
    ) {
        let mut none = Tally::default();
        let tally = self.sessions.get_mut(&session).unwrap_or(&mut none);
        match outcome {
            Outcome::Ended(_) if signal.is_some() => {
                self.count.reaped += 1;
                tally.reaped += 1;
            }
            Outcome::Ended(_) => {}
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
    }

    /// Tells that a session is over, once: of what was due nothing is left but what is kept.
    pub(super) fn close(&mut self, id: SessionId) {
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
                lost: lost_before,
                ..
            } = *tally;
            self.tell(Body::SessionClose {
                session,
                reaped,
                kept,
                failed,
                lost_before,
            });
        }
        if over {
            self.sessions.remove(&id);
        }
    }
}
