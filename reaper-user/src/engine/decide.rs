//! Makes decisions, reports them and their outcomes, and reports sessions as closed.

use nix::sys::signal::Signal;
use reaper_common::{MEMBER_SIGKILL_SENT, MEMBER_SIGTERM_SENT};

use super::Engine;
use super::queue::Queued;
use super::tally::{Counts, Tally};
use crate::config::Mode;
use crate::export::{Ancestor, DecisionNames, EventBody, NestedSummary, ProcessRef, SessionRef};
use crate::reap::{ReapEvent, ReapOutcome, ReleaseReason};
use reaper_host::source::procfs::ProcessMemory;
use reaper_model::event::ProcessKey;
use reaper_model::policy::{Decision, Reason, Verdict};
use reaper_model::session::{CLOSED_MAX, Session, SessionId};

impl Engine {
    /// Evaluates the queued members and executes the decisions. Then reports sessions as closed if nothing is left to
    /// do.
    ///
    /// A decision to reap only claims the process: this sends no signal. During a gap, only members with an open
    /// escalation are evaluated, because an event may be missing. The others stay queued.
    pub(super) fn decide(&mut self) {
        let (mut keys, mut to_check) = (Vec::new(), Vec::new());
        for queued in self.ingest.queued.take() {
            if self.gap.is_some() && !self.has_escalation(&queued) {
                self.ingest.queued.push(queued);
                continue;
            }
            match queued {
                Queued::Process(key) => keys.push(key),
                Queued::Session(id) => {
                    to_check.push(id);
                    let members = self
                        .model
                        .sessions
                        .with_nested(id)
                        .flat_map(|session| session.members());
                    let members = members.filter_map(|pid| self.model.tree.by_pid(pid));
                    let members: Vec<ProcessKey> = members.map(|node| node.key).collect();
                    let tally = self.sessions.entry(id).or_default();
                    if !std::mem::replace(&mut tally.is_evaluated, true) {
                        // Facts that were read while the agent was alive may be outdated.
                        members
                            .iter()
                            .for_each(|key| self.model.forget_volatile(*key));
                        let session = self.model.sessions.get(id);
                        if session
                            .is_some_and(|s| s.root_exit.is_some_and(|exit| exit.was_signalled))
                        {
                            self.ingest.reaper.restart_grace(id);
                        }
                    }
                    keys.extend(members);
                }
            }
        }
        // Oldest first: parents before the children that they may still fork.
        keys.sort_unstable_by_key(|key| (key.start, key.pid));
        keys.dedup();
        let round = self.model.evaluation();
        let decided = keys.into_iter().map(|key| (key, round.decide(key)));
        let decided: Vec<(ProcessKey, Decision)> = decided.collect();
        for (key, decision) in decided {
            self.execute(key, decision);
        }
        to_check
            .iter()
            .for_each(|id| self.deferred.check_close(*id));
        to_check.retain(|_| self.settings.mode == Mode::Enforce);
        to_check.extend(std::mem::take(&mut self.deferred.closing));
        // The report that a session is closed counts earlier outcomes.
        self.on_reap_events();
        for id in to_check {
            // Without claims, the session consists of kept members only.
            let reaper = &self.ingest.reaper;
            let claims = reaper.has_open_escalation(id) || reaper.has_members_of(id);
            let tally = self.sessions.get(&id);
            let closed = tally.is_some_and(|tally| tally.closing_session.is_some());
            let open = self.model.sessions.get(id).is_some();
            // A member was discovered meanwhile. In observe mode a session stays open as long as its members are alive.
            let goes_on = closed && open && self.settings.mode == Mode::Observe;
            if (closed || open) && !goes_on && !claims {
                self.close_if_decided(id);
            }
        }
    }

    /// Reports a session without claimed members as closed, unless that is too early. All members must be decided, none
    /// of them may wait, and escaped members must have been searched. Otherwise the session is checked again later.
    ///
    /// A session whose root is alive goes to [`Engine::close`] without these checks.
    pub(super) fn close_if_decided(&mut self, id: SessionId) {
        // While the root is alive, undiscovered members are always possible and do not matter: the session stays open.
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

    /// Returns whether a session or a member of it is queued for evaluation, or a decision about a member waits for
    /// facts.
    fn has_undecided_member(&self, id: SessionId) -> bool {
        self.is_queued(id) || self.deferred.is_reading_facts_of(id, &self.model)
    }

    /// Returns whether members of a session wait for a delay or for a retry of a failed read. A member that a user
    /// keeps for a limited time counts as kept, as does one whose keep by a rule is evaluated again.
    fn has_deferred_member(&self, id: SessionId) -> bool {
        let is_kept = |key| {
            matches!(
                self.ingest.decided.get(&key),
                Some((Verdict::Keep, Reason::KeptByUser | Reason::KeepRule))
            )
        };
        let mut waiting = self.deferred.deferred_members(id, &self.model);
        waiting.any(|key| !is_kept(key))
    }

    /// Returns whether a session nested in `id` has members that are claimed or have no current decision.
    fn has_undecided_nested(&self, id: SessionId) -> bool {
        let mut nested = self.nested_in(id).map(|session| session.id);
        nested.any(|id| self.ingest.reaper.has_members_of(id) || self.has_undecided_member(id))
    }

    /// Returns the sessions nested in `id` at any depth, without `id` itself.
    fn nested_in(&self, id: SessionId) -> impl Iterator<Item = &Session> {
        let inwards = self.model.sessions.with_nested(id);
        inwards.filter(move |session| session.id != id)
    }

    /// Returns whether a session or one of its members is queued.
    fn is_queued(&self, id: SessionId) -> bool {
        let queued = &self.ingest.queued;
        let mut members = self.members_of(id);
        // Usually the queue is empty. This is called in each round for each session that is closing.
        !queued.is_empty()
            && (queued.contains(Queued::Session(id))
                || members.any(|key| queued.contains(Queued::Process(key))))
    }

    /// Returns the living members of a session.
    pub(super) fn members_of(&self, id: SessionId) -> impl Iterator<Item = ProcessKey> {
        let members = self.model.sessions.get(id).into_iter();
        let nodes = members.flat_map(Session::members);
        let nodes = nodes.filter_map(|pid| self.model.tree.by_pid(pid));
        nodes.map(|node| node.key)
    }

    /// Returns whether the escalation that handles a queued process or session is open. False if it is not due.
    fn has_escalation(&self, queued: &Queued) -> bool {
        let escalation = match *queued {
            Queued::Process(key) => {
                let node = self.model.tree.get(key);
                node.and_then(|node| self.model.escalation_of(node))
            }
            Queued::Session(id) => {
                let due = self.model.sessions.due(id);
                due.map(|(escalation, _)| escalation.id)
            }
        };
        escalation.is_some_and(|id| self.ingest.reaper.has_open_escalation(id))
    }

    /// Executes a decision: claims the process to reap it, or reports that it is kept or waits. A decision that equals
    /// the last one is not reported again. The reaper reports a decision to reap, once it has verified the process.
    ///
    /// If the decision needs unread facts, only requests them. Otherwise also schedules the next evaluation, if any. In
    /// observe mode, a process is claimed only for a new decision.
    fn execute(&mut self, key: ProcessKey, decision: Decision) {
        let Some(node) = self.model.tree.get(key) else {
            return;
        };
        if let Some(session) = node.state.member.session {
            if !decision.needs.is_empty() {
                // No decision is reported before the facts are read, or known to be unreadable.
                return self.request_facts(key, session, &decision);
            }
            let retry = match decision.reason {
                Reason::Unreadable => self.retry_unreadable(key),
                _ => None,
            };
            // The search for a successor re-evaluates these members itself.
            let until = (decision.until).filter(|_| decision.reason != Reason::SuccessorAwaited);
            self.defer(key, session, until.or(retry));
        }
        let Some(node) = self.model.tree.get(key) else {
            return;
        };
        let current = (decision.verdict, decision.reason);
        let before = self.ingest.decided.insert(key, current);
        // A first decision to keep a member because its root is alive is not reported, since nothing has changed.
        let is_first_of_living = before.is_none() && decision.reason == Reason::RootAlive;
        let is_new = before != Some(current) && !is_first_of_living;
        match decision.verdict {
            // Reported after verification, which changes the decision if the process has changed its uid.
            Verdict::Reap if is_new || self.settings.mode == Mode::Enforce => {
                if !self.ingest.reaper.claim(&self.model, key, &decision) {
                    return;
                }
                // A keep that ends leads to the same decision again.
                let observed =
                    self.settings.mode == Mode::Observe && self.ingest.would_reap.insert(key);
                self.count.would_have_reaped += u64::from(observed);
                let process = ProcessRef::new(&self.model, node);
                self.claimed.insert(key, process);
                if let Some(id) = node.state.member.session {
                    let tally = self.sessions.entry(id).or_default();
                    tally.would_have_reaped += u32::from(observed);
                }
            }
            // All other verdicts keep the process, at least for now.
            Verdict::Keep | Verdict::Report | Verdict::Wait if is_new => {
                let process = ProcessRef::new(&self.model, node);
                self.emit_decision(process, &decision);
            }
            Verdict::Reap | Verdict::Keep | Verdict::Report | Verdict::Wait => {}
        }
    }

    /// Emits a decision. If a rule reaps or reports a root, the record has the memory of its tree.
    pub(super) fn emit_decision(&mut self, process: ProcessRef, decision: &Decision) {
        let verdict = decision.verdict.name();
        let (reason, rule) = (decision.reason.name(), decision.rule.clone());
        let by_rule = matches!(decision.reason, Reason::ReportRule | Reason::ReapRule);
        let root = by_rule
            .then(|| self.model.sessions.by_root(process.key))
            .flatten();
        let memory = root.and_then(|session| self.model.memory_within(session.id));
        let names = DecisionNames {
            verdict,
            mode: self.settings.mode.name(),
            reason,
            rule,
            wait: self.wait_info(process.key, decision),
            memory,
            ancestors: Ancestor::all(&self.model.tree, process.birth_parent),
        };
        self.emit(EventBody::Decision {
            process,
            decision: names,
        });
    }

    /// Reports the outcome of members that exited unclaimed after a signal from a probe or an earlier service.
    pub(super) fn report_unclaimed_exits(&mut self) {
        for (process, session, status, signal) in std::mem::take(&mut self.ingest.unclaimed_exits) {
            self.claimed.insert(process.key, process.clone());
            // The session may have no counters yet.
            self.sessions.entry(session).or_default();
            let outcome = ReapOutcome::Exited(status);
            self.on_outcome(
                process.key,
                session,
                outcome,
                Some(signal.as_str()),
                (None, None),
            );
        }
    }

    /// Emits and counts the decisions, signals and outcomes that the reaper has reported since the last call. Then
    /// reports sessions as closed that have no claims left, unless that is too early.
    pub(super) fn on_reap_events(&mut self) {
        let mut to_close = Vec::new();
        for report in self.ingest.reaper.take_reports() {
            match report {
                ReapEvent::Decided { key, decision } => {
                    let is_emitted = self.ingest.decision_emitted.contains(&key);
                    if let Some(process) = self.claimed.get(&key).filter(|_| !is_emitted).cloned() {
                        self.emit_decision(process, &decision);
                    }
                }
                ReapEvent::Signal(sent) => {
                    self.count.signals += 1;
                    self.model.on_signal_sent(sent.key, flag_of(sent.signal));
                    self.ingest.map_changes.push(sent.key);
                    if let Some(node) = self.model.tree.get(sent.key) {
                        // The current description: the process may run another program than when it was claimed.
                        let process = ProcessRef::new(&self.model, node);
                        self.claimed.insert(sent.key, process.clone());
                        self.emit(EventBody::Signal { process, sent });
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
                    // In observe mode a session stays open as long as its members are alive.
                    if result.outcome != ReapOutcome::NotSent(ReleaseReason::ObserveMode) {
                        to_close.push(session);
                    }
                }
                // All remaining members of it and of its nested sessions are kept.
                ReapEvent::Closed { session } => {
                    let is_due = |session: &&Session| session.root_exit.is_some();
                    to_close.extend(
                        self.model
                            .sessions
                            .with_nested(session)
                            .filter(is_due)
                            .map(|s| s.id),
                    );
                    to_close.push(session);
                }
            }
        }
        // An outer session that is due may have waited for these sessions.
        let sessions = &self.model.sessions;
        let outer = to_close
            .iter()
            .flat_map(|id| sessions.with_enclosing(*id).skip(1));
        let due = outer.filter(|session| sessions.due(session.id).is_some());
        let due: Vec<SessionId> = due.map(|session| session.id).collect();
        to_close.extend(due);
        to_close.sort_unstable();
        to_close.dedup();
        for id in to_close {
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

    /// Counts and emits the outcome of a claim, which ends it. If the process was released because its decision changed
    /// or its uids cannot be read, it is evaluated again. Outcomes without a final result are not emitted.
    ///
    /// `signal` is the strongest signal that the process was sent. Without one, an exit does not count as reaped.
    /// `duration` is in ns, see [`ReapResult`](crate::reap::ReapResult).
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
            // Re-evaluated from current facts. The old decision is dropped, as it has not been reported yet.
            ReapOutcome::NotSent(ReleaseReason::NotDue(_)) => {
                self.ingest.decided.remove(&key);
                self.ingest.queued.push(Queued::Process(key))
            }
            ReapOutcome::NotSent(ReleaseReason::UidUnreadable) => {
                self.ingest.decided.remove(&key);
                let retry = self.deferred.next_retry(key, self.kernel.clock.monotonic());
                self.defer(key, session, retry);
            }
            ReapOutcome::NotSent(_) => {}
        }
        // Not reported: the process is re-evaluated, or its signal was only simulated.
        let unreported = [
            ReleaseReason::ObserveMode,
            ReleaseReason::NotDue(Reason::Unread),
        ]
        .map(ReapOutcome::NotSent);
        if let Some(process) = self.claimed.remove(&key)
            && !unreported.contains(&outcome)
        {
            self.emit(EventBody::Outcome {
                process,
                outcome,
                signal,
                duration,
                memory,
            });
        }
    }

    /// Returns one reason for each living member of a session that is kept or reported, without nested sessions. Empty
    /// if the session is not due: its root and those of the enclosing sessions are alive.
    pub(super) fn kept_reasons(&self, id: SessionId) -> Vec<Reason> {
        let kept = |verdict| matches!(verdict, Verdict::Keep | Verdict::Report);
        let decided = self.decided_of(id);
        let kept = decided.filter(|(verdict, _)| kept(*verdict));
        kept.map(|(_, reason)| reason).collect()
    }

    /// Returns the last decisions about living members of a session, none if it is not due.
    fn decided_of(&self, id: SessionId) -> impl Iterator<Item = (Verdict, Reason)> {
        let due = self.model.sessions.due(id).into_iter();
        let members = due.flat_map(move |_| self.members_of(id));
        members.filter_map(|key| self.ingest.decided.get(&key).copied())
    }

    /// Returns a summary of each nested session that has living members.
    fn nested_summaries(&self, id: SessionId) -> Vec<NestedSummary> {
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

    /// Returns the number of due members without a decision. Due members are those of a session whose root, or that of
    /// an enclosing session, has exited.
    pub(super) fn undecided(&self) -> usize {
        let sessions = self.model.sessions.iter().map(|session| session.id);
        let due = sessions.filter(|id| self.model.sessions.due(*id).is_some());
        let members = due.flat_map(|id| self.members_of(id));
        let undecided = members.filter(|key| !self.ingest.decided.contains_key(key));
        undecided.count()
    }

    /// Returns the number of members that are kept although their session is due.
    pub(super) fn kept(&self) -> u64 {
        let sessions = self.model.sessions.iter();
        sessions
            .map(|session| self.kept_reasons(session.id).len() as u64)
            .sum()
    }

    /// Reports a session as closed: each of its members has exited, is kept, or belongs to a nested session. The caller
    /// has checked that. Does not report an open session that is not due.
    ///
    /// The stream has this report once. Later reports with other counts go to the journal only.
    pub(super) fn close(&mut self, id: SessionId) {
        // Members that a rule reaps while the agent is alive do not close the session.
        let is_open = self.model.sessions.get(id).is_some();
        if is_open && self.model.sessions.due(id).is_none() {
            self.map_sync.dirty.insert(id);
            return;
        }
        let kept = self.kept_reasons(id);
        let nested = self.nested_summaries(id);
        let tally = self.sessions.entry(id).or_default();
        let living = self.model.sessions.get(id).map(SessionRef::from);
        let is_closed = living.is_none();
        let first_root = tally.closing_session.as_ref().or(living.as_ref());
        let first_root = first_root.map(|session| session.first_root);
        let Tally {
            reaped,
            failed,
            would_have_reaped,
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
            let is_repeat = tally.reported.replace(counts).is_some();
            self.emit(EventBody::SessionClose {
                session,
                is_repeat,
                reaped,
                kept: counts.kept,
                kept_reasons: names(kept),
                nested,
                failed,
                would_have_reaped,
                memory,
                lost_before,
            });
        }
        match first_root {
            Some(first_root) if is_closed => {
                let probes = self.source.probes();
                let position = probes.map_or(0, |probes| probes.ring().position());
                self.closed_at_position.push_back((position, first_root));
                self.retain_tally(id);
            }
            _ => drop(self.map_sync.dirty.insert(id)),
        }
    }

    /// Keeps the counters of the last [`CLOSED_MAX`] closed sessions, as the model may discover more members of them.
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

/// Returns the names of the reasons, sorted and without duplicates.
fn names(reasons: Vec<Reason>) -> Vec<&'static str> {
    let mut names: Vec<_> = reasons.into_iter().map(Reason::name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns the flag in the kernel's map for a process that was sent a signal. Any signal but SIGKILL counts as SIGTERM.
fn flag_of(signal: Signal) -> u32 {
    match signal {
        Signal::SIGKILL => MEMBER_SIGKILL_SENT,
        _ => MEMBER_SIGTERM_SENT,
    }
}
