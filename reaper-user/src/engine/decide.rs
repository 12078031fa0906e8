//! Deciding, and telling what came of it: by process, by session, in all.

use nix::sys::signal::Signal;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};

use super::Engine;
use super::ingest::{Counts, Queued, Tally};
use crate::config::Mode;
use crate::export::{DecisionNames, EventBody, NestedSummary, ProcessRef, SessionRef};
use crate::reap::{ReapEvent, ReapOutcome, ReleaseReason};
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::ProcessKey;
use reaper_model::policy::{Decision, Reason, Verdict};
use reaper_model::session::{CLOSED_MAX, Session, SessionId};

impl Engine {
    /// Decides about what is pending: while events are missing that might say otherwise, only about those
    /// whose ladder is open.
    pub(super) fn decide(&mut self) {
        let (mut keys, mut ended) = (Vec::new(), Vec::new());
        for pending in self.ingest.queued.take() {
            if self.gap.is_some() && !self.has_escalation(&pending) {
                self.ingest.queued.push(pending);
                continue;
            }
            match pending {
                Queued::Process(key) => keys.push(key),
                Queued::Session(id) => {
                    ended.push(id);
                    let members = self
                        .model
                        .sessions
                        .with_nested(id)
                        .flat_map(|session| session.members());
                    let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
                    let members: Vec<ProcessKey> = members.map(|node| node.key).collect();
                    let tally = self.sessions.entry(id).or_default();
                    if !std::mem::replace(&mut tally.is_evaluated, true) {
                        // What was read of them while their agent lived may not be so any more.
                        members
                            .iter()
                            .for_each(|key| self.model.forget_volatile(*key));
                        let session = self.model.sessions.get(id);
                        if session
                            .is_some_and(|s| s.root_exit.is_some_and(|gone| gone.was_signalled))
                        {
                            self.ingest.reaper.restart_grace(id);
                        }
                    }
                    keys.extend(members);
                }
            }
        }
        // The oldest first: parents before the children they may still beget.
        keys.sort_unstable_by_key(|key| (key.start, key.pid));
        keys.dedup();
        let round = self.model.evaluation();
        let decided = keys.into_iter().map(|key| (key, round.decide(key)));
        let decided: Vec<(ProcessKey, Decision)> = decided.collect();
        for (key, decision) in decided {
            self.execute(key, decision);
        }
        ended.iter().for_each(|id| self.deferred.check_close(*id));
        ended.retain(|_| self.settings.mode == Mode::Enforce);
        ended.extend(std::mem::take(&mut self.deferred.closing));
        // A close counts the outcomes before it.
        self.on_reap_events();
        for id in ended {
            // Nothing to be reaped: it is over but for what is kept.
            let reaper = &self.ingest.reaper;
            let claims = reaper.has_open_escalation(id) || reaper.has_members_of(id);
            let tally = self.sessions.get(&id);
            let closed = tally.is_some_and(|tally| tally.closing_session.is_some());
            let open = self.model.sessions.get(id).is_some();
            // A member was found meanwhile, and in observe a session goes on for as long as its members live.
            let goes_on = closed && open && self.settings.mode == Mode::Observe;
            if (closed || open) && !goes_on && !claims {
                self.close_if_decided(id);
            }
        }
    }

    /// Reports a session without claimed members as closed, once all of its members are decided about, also those that
    /// were claimed and released, none of them waits, and escaped ones have been looked for.
    pub(super) fn close_if_decided(&mut self, id: SessionId) {
        // One whose root lives may always have a look before it, and is not over.
        let session = self.model.sessions.get(id);
        if session.is_some_and(|session| session.root_exit.is_none()) {
            self.close(id);
            return;
        }
        let escaped = self.may_have_undiscovered(id);
        if escaped {
            self.source.scan_soon();
        }
        self.deferred.closing_later.remove(&id);
        if escaped || self.has_undecided_member(id) || self.has_undecided_nested(id) {
            self.deferred.closing.insert(id);
        } else if self.has_deferred_member(id) {
            self.deferred.closing_later.insert(id);
        } else {
            self.close(id);
        }
    }

    /// Whether members of a session have no decision yet, or no current one.
    fn has_undecided_member(&self, id: SessionId) -> bool {
        self.is_queued(id) || self.deferred.is_reading_facts_of(id, &self.model)
    }

    /// Whether members of a session wait for a delay, or until what could not be read is tried again. One that a user
    /// keeps for a time is kept.
    fn has_deferred_member(&self, id: SessionId) -> bool {
        let kept = Some(&(Verdict::Keep, Reason::KeptByUser));
        let mut waiting = self.deferred.deferred_members(id, &self.model);
        waiting.any(|key| self.ingest.decided.get(&key) != kept)
    }

    /// Whether it is not known yet what is left of the sessions nested in one.
    fn has_undecided_nested(&self, id: SessionId) -> bool {
        let mut nested = self.nested_in(id).map(|session| session.id);
        nested.any(|id| self.ingest.reaper.has_members_of(id) || self.has_undecided_member(id))
    }

    /// Returns the sessions nested in one.
    fn nested_in(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        let inwards = self.model.sessions.with_nested(id);
        inwards.filter(move |session| session.id != id)
    }

    /// Whether something is to be decided about a session.
    fn is_queued(&self, id: SessionId) -> bool {
        let queued = &self.ingest.queued;
        let mut members = self.members_of(id);
        // Mostly nothing is: this is asked again in each round about each session that is not over yet.
        !queued.is_empty()
            && (queued.contains(Queued::Session(id))
                || members.any(|key| queued.contains(Queued::Process(key))))
    }

    /// Returns the living members of a session.
    fn members_of(&self, id: SessionId) -> impl Iterator<Item = ProcessKey> {
        let members = self.model.sessions.get(id).into_iter();
        let nodes = members.flat_map(Session::members);
        let nodes = nodes.filter_map(|pid| self.model.tree.by_pid(pid));
        nodes.map(|node| node.key)
    }

    fn has_escalation(&self, pending: &Queued) -> bool {
        let ladder = match *pending {
            Queued::Process(key) => {
                let node = self.model.tree.get(key);
                node.and_then(|node| self.model.escalation_of(node))
            }
            Queued::Session(id) => {
                let due = self.model.sessions.due(id);
                due.map(|(ladder, _)| ladder.id)
            }
        };
        ladder.is_some_and(|id| self.ingest.reaper.has_open_escalation(id))
    }

    fn execute(&mut self, key: ProcessKey, decision: Decision) {
        let Some(node) = self.model.tree.get(key) else {
            return;
        };
        if let Some(session) = node.state.member.session {
            if !decision.needs.is_empty() {
                // Nothing is said of it before that is known, or known to be beyond knowing.
                return self.request_facts(key, session, &decision);
            }
            let again = match decision.reason {
                Reason::Unreadable => self.retry_unreadable(key),
                _ => None,
            };
            // The search for a successor re-evaluates its members itself.
            let until = (decision.until).filter(|_| decision.reason != Reason::SuccessorAwaited);
            self.defer(key, session, until.or(again));
        }
        let Some(node) = self.model.tree.get(key) else {
            return;
        };
        let known = (decision.verdict, decision.reason);
        let before = self.ingest.decided.insert(key, known);
        // A first decision that a process lives with its agent is not reported: nothing has changed.
        let is_first_of_living = before.is_none() && decision.reason == Reason::RootAlive;
        let news = before != Some(known) && !is_first_of_living;
        match decision.verdict {
            // Told once it is verified, which changes it where the process has changed its uid.
            Verdict::Reap if news || self.settings.mode == Mode::Enforce => {
                if !self.ingest.reaper.claim(&self.model, key, &decision) {
                    return;
                }
                self.would_have_reaped += u64::from(self.settings.mode == Mode::Observe);
                let who = ProcessRef::new(&self.model, node);
                self.claimed.insert(key, who);
                if let Some(id) = node.state.member.session {
                    self.sessions.entry(id).or_default();
                }
            }
            // The others are kept, for now or for a person to look at.
            Verdict::Keep | Verdict::Report | Verdict::Wait if news => {
                let who = ProcessRef::new(&self.model, node);
                self.emit_decision(who, &decision);
            }
            Verdict::Reap | Verdict::Keep | Verdict::Report | Verdict::Wait => {}
        }
    }

    pub(super) fn emit_decision(&mut self, who: ProcessRef, decision: &Decision) {
        let verdict = decision.verdict.name();
        let (reason, rule) = (decision.reason.name(), decision.rule.clone());
        let by_rule = matches!(decision.reason, Reason::ReportRule | Reason::ReapRule);
        let root = by_rule
            .then(|| self.model.sessions.by_root(who.key))
            .flatten();
        let memory = root.and_then(|session| self.model.memory_within(session.id));
        let names = DecisionNames {
            verdict,
            reason,
            rule,
            memory,
        };
        self.emit(EventBody::Decision {
            process: who,
            decision: names,
        });
    }

    /// Counts and tells of those whom only others have signalled, and whose end was told of.
    pub(super) fn report_unclaimed_exits(&mut self) {
        for (who, session, ended, signal) in std::mem::take(&mut self.ingest.unclaimed_exits) {
            self.claimed.insert(who.key, who.clone());
            // It may be the first of which anything is counted.
            self.sessions.entry(session).or_default();
            let outcome = ReapOutcome::Exited(ended);
            self.on_outcome(
                who.key,
                session,
                outcome,
                Some(signal.as_str()),
                (None, None),
            );
        }
    }

    /// Tells what the reaper has done.
    pub(super) fn on_reap_events(&mut self) {
        let mut over = Vec::new();
        for report in self.ingest.reaper.take_reports() {
            match report {
                ReapEvent::Decided { key, decision } => {
                    let foretold = self.ingest.decision_emitted.contains(&key);
                    if let Some(who) = self.claimed.get(&key).filter(|_| !foretold).cloned() {
                        self.emit_decision(who, &decision);
                    }
                }
                ReapEvent::Signal(sent) => {
                    self.count.signals += 1;
                    self.model.on_signal_sent(sent.key, mark_of(sent.signal));
                    self.ingest.map_changes.push(sent.key);
                    if let Some(node) = self.model.tree.get(sent.key) {
                        // As it is now: it may run another program than when it was claimed.
                        let who = ProcessRef::new(&self.model, node);
                        self.claimed.insert(sent.key, who.clone());
                        self.emit(EventBody::Signal { process: who, sent });
                    }
                }
                ReapEvent::Outcome { session, result } => {
                    self.on_outcome(
                        result.key,
                        session,
                        result.outcome,
                        result.signal.map(Signal::as_str),
                        (result.duration, result.memory),
                    );
                    // In observe a session goes on for as long as its members live.
                    if result.outcome != ReapOutcome::NotSent(ReleaseReason::ObserveMode) {
                        over.push(session);
                    }
                }
                // What is left of it and of those in it, if anything, is kept.
                ReapEvent::Closed { session } => {
                    let gone = |session: &&Session| session.root_exit.is_some();
                    over.extend(
                        self.model
                            .sessions
                            .with_nested(session)
                            .filter(gone)
                            .map(|s| s.id),
                    );
                    over.push(session);
                }
            }
        }
        // An outer session that is due may have waited for what is left of these.
        let sessions = &self.model.sessions;
        let outer = over
            .iter()
            .flat_map(|id| sessions.with_enclosing(*id).skip(1));
        let due = outer.filter(|session| sessions.due(session.id).is_some());
        let due: Vec<SessionId> = due.map(|session| session.id).collect();
        over.extend(due);
        over.sort_unstable();
        over.dedup();
        for id in over {
            let closed = self
                .sessions
                .get(&id)
                .is_some_and(|tally| tally.closing_session.is_some());
            let reaper = &self.ingest.reaper;
            if (closed || !reaper.has_open_escalation(id)) && !reaper.has_members_of(id) {
                self.close_if_decided(id);
            }
        }
    }

    pub(super) fn on_outcome(
        &mut self,
        key: ProcessKey,
        session: SessionId,
        outcome: ReapOutcome,
        signal: Option<&'static str>,
        (duration, memory): (Option<u64>, Option<ProcessMemory>),
    ) {
        self.map_sync.dirty.insert(session);
        let mut none = Tally::default();
        let tally = self.sessions.get_mut(&session).unwrap_or(&mut none);
        match outcome {
            ReapOutcome::Exited(_) if signal.is_some() => {
                self.count.reaped += 1;
                tally.reaped += 1;
                self.count.memory.add(memory);
                tally.memory.add(memory);
            }
            ReapOutcome::Exited(_) => {}
            ReapOutcome::Failed(_) => {
                self.count.failed += 1;
                tally.failed += 1;
            }
            // Decided about anew, from what is known now: also what comes out as before was not told yet.
            ReapOutcome::NotSent(ReleaseReason::NotDue(_)) => {
                self.ingest.decided.remove(&key);
                self.ingest.queued.push(Queued::Process(key))
            }
            ReapOutcome::NotSent(ReleaseReason::UidUnreadable) => {
                self.ingest.decided.remove(&key);
                let again = self.deferred.next_retry(key, self.kernel.clock.monotonic());
                self.defer(key, session, again);
            }
            ReapOutcome::NotSent(_) => {}
        }
        // Of one that has to be looked at again nothing is said yet.
        let silent = [
            ReleaseReason::ObserveMode,
            ReleaseReason::NotDue(Reason::Unread),
        ]
        .map(ReapOutcome::NotSent);
        if let Some(who) = self.claimed.remove(&key)
            && !silent.contains(&outcome)
        {
            self.emit(EventBody::Outcome {
                process: who,
                outcome,
                signal,
                duration,
                memory,
            });
        }
    }

    /// Why those members of a session are kept whose agent is gone.
    pub(super) fn kept_reasons(&self, id: SessionId) -> Vec<Reason> {
        let kept = |verdict| matches!(verdict, Verdict::Keep | Verdict::Report);
        let decided = self.decided_of(id);
        let kept = decided.filter(|(verdict, _)| kept(*verdict));
        kept.map(|(_, reason)| reason).collect()
    }

    /// Returns the last decisions about the living members of a session whose agent is gone.
    fn decided_of(&self, id: SessionId) -> impl Iterator<Item = (Verdict, Reason)> {
        let due = self.model.sessions.due(id).into_iter();
        let members = due.flat_map(move |_| self.members_of(id));
        members.filter_map(|key| self.ingest.decided.get(&key).copied())
    }

    /// Returns what is left of the sessions nested in one.
    fn nested_rest(&self, id: SessionId) -> Vec<NestedSummary> {
        let living = self.nested_in(id).filter(|session| !session.is_empty());
        let rest = living.map(|session| NestedSummary {
            session: SessionRef::from(session),
            root_pid: session.first_root.pid,
            kept: self.kept_reasons(session.id).len() as u32,
            waiting: {
                let decided = self.decided_of(session.id);
                decided
                    .filter(|(verdict, _)| *verdict == Verdict::Wait)
                    .count() as u32
            },
        });
        rest.collect()
    }

    /// Returns the number of due members about which nothing has been decided yet.
    pub(super) fn undecided(&self) -> usize {
        let sessions = self.model.sessions.iter().map(|session| session.id);
        let due = sessions.filter(|id| self.model.sessions.due(*id).is_some());
        let members = due.flat_map(|id| self.members_of(id));
        let undecided = members.filter(|key| !self.ingest.decided.contains_key(key));
        undecided.count()
    }

    /// Processes that are kept though their agent is gone.
    pub(super) fn kept(&self) -> u64 {
        let sessions = self.model.sessions.iter();
        sessions
            .map(|session| self.kept_reasons(session.id).len() as u64)
            .sum()
    }

    /// Reports a session as closed: each of its members has exited, is kept, or belongs to a session nested in it. The
    /// stream has this once. What becomes of the kept ones later is reported to the journal only.
    pub(super) fn close(&mut self, id: SessionId) {
        // What a rule has reaped under a living agent was not the end of anything.
        let lives = self.model.sessions.get(id).is_some();
        if lives && self.model.sessions.due(id).is_none() {
            self.map_sync.dirty.insert(id);
            return;
        }
        let kept = self.kept_reasons(id);
        let nested = self.nested_rest(id);
        let tally = self.sessions.entry(id).or_default();
        let living = self.model.sessions.get(id).map(SessionRef::from);
        let over = living.is_none();
        let first_root = tally.closing_session.as_ref().or(living.as_ref());
        let first_root = first_root.map(|session| session.first_root);
        let Tally {
            reaped,
            failed,
            memory,
            lost: lost_before,
            ..
        } = *tally;
        let counts = Counts {
            reaped,
            kept: kept.len() as u32,
            failed,
        };
        if let Some(session) = tally.closing_session.take().or(living)
            && tally.reported != Some(counts)
        {
            let again = tally.reported.replace(counts).is_some();
            self.emit(EventBody::SessionClose {
                session,
                is_repeat: again,
                reaped,
                kept: counts.kept,
                kept_reasons: names(kept),
                nested,
                failed,
                memory,
                lost_before,
            });
        }
        match first_root {
            Some(first_root) if over => {
                let probes = self.source.probes();
                let position = probes.map_or(0, |probes| probes.ring().position());
                self.closed_at_position.push_back((position, first_root));
                self.retain_tally(id);
            }
            _ => drop(self.map_sync.dirty.insert(id)),
        }
    }

    /// Keeps the tally of a closed session as long as the model may find more members of it.
    fn retain_tally(&mut self, id: SessionId) {
        self.closed_tallies.push_back(id);
        if self.closed_tallies.len() > CLOSED_MAX
            && let Some(oldest) = self.closed_tallies.pop_front()
            && self.model.sessions.get(oldest).is_none()
        {
            self.sessions.remove(&oldest);
        }
    }
}

/// Each once.
fn names(reasons: Vec<Reason>) -> Vec<&'static str> {
    let mut names: Vec<_> = reasons.into_iter().map(Reason::name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// What the kernel's map has for a process that was sent a signal.
fn mark_of(signal: Signal) -> u32 {
    match signal {
        Signal::SIGKILL => MEMBER_SIGKILL_SENT,
        _ => MEMBER_SIGTERM_SENT,
    }
}
