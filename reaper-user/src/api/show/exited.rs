//! Explains a process that has exited, from the memory of the engine or from the journal.

mod sentence;

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::{LONG, seconds_since};
use crate::api::messages::ExitedSnapshot;
use crate::api::peer::SignalTarget;
use crate::api::{AncestorInfo, DecisionInfo, Explanation, ProcessInfo, SessionInfo};
use crate::config::Mode;
use crate::export::names::{outcome_name, outcome_reason};
use crate::export::{
    EntityId, ExitInfo, Judgement, KeepAdvice, RecentProcess, RecentSession, RootExit,
    SessionIdText, command_args, keep_rule, leftover_text, wall_time,
};
use crate::journal::history::{
    HistoryAncestor, HistoryDecision, HistoryOutcome, HistoryProcess, HistorySession,
};
use reaper_host::kernel::ProcessTable;
use reaper_host::source::procfs::{Liveness, Procfs, Zombie};
use reaper_model::event::ProcessKey;

/// Process that has exited.
pub(in crate::api) struct Exited {
    process: HistoryProcess,
    /// Start time in ns since boot.
    start_ns: u64,
    session: Option<ExitedSession>,
    /// Evidence that it was a leftover from before the service started.
    leftover: Option<String>,
    /// Time of the last signal, and its name.
    signal: Option<(Timestamp, String)>,
    /// Time of the exit, and the status. From the journal only if no signal was sent.
    exit: Option<(Timestamp, ExitInfo)>,
    enforce: bool,
    honors_keep: bool,
}

/// Session of an exited process.
struct ExitedSession {
    id: String,
    agent: String,
    /// Pid of the last known root.
    root_pid: u32,
    /// Start time of the first root in ns since boot; `None` if it is unknown.
    opened: Option<u64>,
    outer_id: Option<String>,
    /// Exit time and status of the root, if it has exited.
    root_exit: Option<(Timestamp, ExitInfo)>,
}

/// Returns how and when a process of the history ended, as `reaper explain` does: what was done to it and why, or that it
/// exited by itself. `None` if no end is recorded.
pub(crate) fn end_in_history(
    session: &HistorySession,
    process: &HistoryProcess,
    now: Timestamp,
) -> Option<String> {
    let has_ended = process.exited_at.is_some() || !process.outcomes.is_empty();
    has_ended.then(|| Exited::journaled(session.clone(), process.clone(), 0).why(now))
}

impl Exited {
    /// Takes a process from the engine's memory.
    pub(in crate::api) fn recent(snapshot: ExitedSnapshot) -> Exited {
        let ExitedSnapshot {
            recent,
            session: RecentSession { outer, root_exit },
            enforce,
            honors_keep,
        } = snapshot;
        let session = recent
            .process
            .session
            .as_ref()
            .map(|session| ExitedSession {
                id: SessionIdText(session).to_string(),
                agent: session.agent.to_string(),
                root_pid: root_exit.map_or(session.first_root.pid, |exit| exit.root.pid),
                opened: Some(session.first_root.start),
                outer_id: outer.map(|outer| SessionIdText(&outer).to_string()),
                root_exit: root_exit.map(
                    |RootExit {
                         at, exit_status, ..
                     }| { (wall_time(at), ExitInfo::from(exit_status)) },
                ),
            });
        Exited {
            start_ns: recent.process.key.start,
            session,
            leftover: recent.leftover.as_ref().map(leftover_text),
            signal: recent
                .signal
                .map(|(at, name)| (wall_time(at), name.to_owned())),
            exit: recent
                .exit
                .map(|(at, status)| (wall_time(at), ExitInfo::from(status))),
            process: history_process(&recent),
            enforce,
            honors_keep,
        }
    }

    /// Takes a process from the journal. `start_ns` is its start time in ns since boot.
    pub(in crate::api) fn journaled(
        session: HistorySession,
        process: HistoryProcess,
        start_ns: u64,
    ) -> Exited {
        let exit = process.own_exit().map(|(at, status)| (at, status.clone()));
        let last = process.decisions.last();
        let enforce = !last.is_some_and(HistoryDecision::would_reap);
        Exited {
            process,
            start_ns,
            session: Some(ExitedSession {
                root_pid: session.root_pid.unwrap_or(session.pid),
                id: session.name,
                agent: session.agent,
                opened: None,
                outer_id: session.outer_session_id,
                root_exit: session.root_exited_at.map(|at| (at, session.exit)),
            }),
            leftover: None,
            signal: None,
            exit,
            enforce,
            honors_keep: true,
        }
    }

    pub(in crate::api) fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Returns the explanation. `zombie` is the process, if its parent has not waited for it.
    pub(in crate::api) fn explanation(self, zombie: Option<&Zombie>) -> Explanation {
        let (now, process) = (Timestamp::now(), &self.process);
        let was_due = process.is_reaped() || self.leftover.is_some();
        let rule = process.keep_rule.clone().filter(|_| was_due);
        Explanation {
            why: self.why(now),
            next: self.next() + &zombie.map(zombie_text).unwrap_or_default(),
            process: self.process_info(zombie.is_some()),
            lineage: self.lineage(),
            adopter: None,
            session: self.session.as_ref().map(|session| session.info(now)),
            facts: BTreeMap::new(),
            nearest: None,
            exited: true,
            outcome: process.outcomes.last().cloned(),
            keep_with: was_due.then(|| KeepAdvice::new(None, self.honors_keep, rule)),
        }
    }

    /// Returns the ancestors up to the agent, nearest first, with their current state.
    fn lineage(&self) -> Vec<AncestorInfo> {
        let (procfs, session) = (Procfs::default(), self.session.as_ref());
        let agent_of = |ancestor: &HistoryAncestor| {
            let session = session.filter(|session| session.root_pid == ancestor.pid)?;
            Some(session.agent.clone())
        };
        let info = |ancestor: &HistoryAncestor| {
            let key = ProcessKey {
                pid: ancestor.pid,
                start: ancestor.start_ns,
            };
            AncestorInfo {
                pid: key.pid,
                start_ns: key.start,
                command: match &*ancestor.comm {
                    "" => String::new(),
                    comm => format!("[{comm}]"),
                },
                alive: !ancestor.exited && matches!(procfs.probe(key), Ok(Liveness::Alive { .. })),
                ended: None,
                agent: agent_of(ancestor),
                boundary: None,
                adopter: None,
            }
        };
        self.process.lineage.iter().map(info).collect()
    }

    fn process_info(&self, zombie: bool) -> ProcessInfo {
        let process = &self.process;
        let line = process.args.join(" ");
        let decision = process.decisions.last().map(|decision| DecisionInfo {
            decision: decision.decision.clone(),
            reason: decision.reason.clone(),
            mode: decision.mode.clone().unwrap_or_default(),
            rule: decision.rule.clone(),
            remaining_s: None,
            text: Judgement {
                decision: &decision.decision,
                reason: &decision.reason,
                rule: decision.rule.as_deref(),
                remaining_s: None,
                observes: decision.mode.as_deref() == Some(Mode::Observe.name()),
            }
            .text(),
        });
        let session = self.session.as_ref();
        ProcessInfo {
            pid: process.pid,
            start_ns: self.start_ns,
            command: match line.is_empty() {
                true => format!("[{}]", process.comm),
                false => line.chars().take(LONG).collect(),
            },
            uid: process.uid,
            age_s: seconds_since(self.start_ns),
            session_id: session.map(|session| session.id.clone()),
            agent: session.map(|session| session.agent.clone()),
            zombie,
            decision,
            ..ProcessInfo::default()
        }
    }
}

impl ExitedSession {
    fn info(&self, now: Timestamp) -> SessionInfo {
        let exit = self.root_exit.as_ref();
        SessionInfo {
            id: self.id.clone(),
            agent: self.agent.clone(),
            kind: "agent".into(),
            root_pid: self.root_pid,
            age_s: self.opened.map_or(0, seconds_since),
            members: 0,
            kept: 0,
            outer_session_id: self.outer_id.clone(),
            root_exit: exit.map(|(_, how)| exit_text(how)),
            since_root_exit_s: exit.map(|(at, _)| seconds_between(*at, now)),
            waits: Vec::new(),
        }
    }
}

/// Returns the process as the journal has it, with the last decision and the outcome.
fn history_process(recent: &RecentProcess) -> HistoryProcess {
    let RecentProcess {
        process,
        decision,
        outcome,
        ..
    } = recent;
    let decisions = decision.iter().map(|(at, names)| HistoryDecision {
        time: wall_time(*at),
        decision: names.verdict.into(),
        reason: names.reason.into(),
        rule: names.rule.as_deref().map(str::to_owned),
        mode: Some(names.mode.into()),
    });
    let ancestors = decision.iter().flat_map(|(_, names)| &*names.ancestors);
    let outcomes = outcome.iter().map(|(at, end)| HistoryOutcome {
        time: wall_time(*at),
        outcome: outcome_name(&end.outcome).into(),
        reason: outcome_reason(&end.outcome).map(Into::into),
        signal: end.signal.map(str::to_owned),
        exit: match end.outcome {
            crate::reap::ReapOutcome::Exited(status) => status.into(),
            _ => ExitInfo::default(),
        },
        duration_ns: end.duration,
        rss: end.memory.map(|memory| memory.rss),
        swap: end.memory.map(|memory| memory.swap),
    });
    HistoryProcess {
        entity_id: EntityId(process.key).to_string(),
        pid: process.key.pid,
        uid: process.uids.real,
        comm: String::from_utf8_lossy(&process.image.comm).into(),
        exe: String::from_utf8_lossy(&process.image.exe).into(),
        args: command_args(&process.image),
        exited_at: None,
        exit: ExitInfo::default(),
        lineage: ancestors.map(HistoryAncestor::from).collect(),
        decisions: decisions.collect(),
        requests: Vec::new(),
        outcomes: outcomes.collect(),
        keep_rule: keep_rule(&process.image),
    }
}

/// Returns the end of the explanation of a zombie.
fn zombie_text(zombie: &Zombie) -> String {
    let parent = zombie.parent;
    let name = match SignalTarget::read(parent) {
        Ok(Some(target)) => format!("{} ({parent})", target.comm),
        _ => parent.to_string(),
    };
    format!(
        " It is a zombie, because its parent {name} has not waited for it; a zombie holds no memory."
    )
}

fn exit_text(exit: &ExitInfo) -> String {
    match exit {
        ExitInfo {
            signal: Some(signal),
            ..
        } => signal.clone(),
        ExitInfo {
            code: Some(code), ..
        } => format!("exit {code}"),
        _ => "exit status unknown".into(),
    }
}

/// Returns the whole seconds between two times, 0 if `then` is later.
fn seconds_between(then: Timestamp, now: Timestamp) -> u64 {
    u64::try_from(now.duration_since(then).as_secs()).unwrap_or(0)
}
