//! Lines about one process: its life, the decisions about it, signals and outcomes.

use super::layout::{BAD, DIM, GOOD, Line, NOTE, PLAIN, WARN};
use super::memory::Memory;
use super::{Detail, subject};
use crate::export::leftover::leftover_text;
use crate::export::record::{
    DecisionNames, EventBody, EventRecord, FreedMemory, KeepDuration, Lifecycle, ProcessRef,
};
use crate::export::text::{
    duration, exit_status_text, forked_by, freed, printable, process_count, process_label,
    tree_memory,
};
use crate::export::words::{LEFT_RUNNING, evidence_ref_text, reason_text, remaining, wait_text};
use crate::reap::{ReapOutcome, ReleaseReason, SentBy, SentSignal};
use reaper_model::event::ExitStatus;
use reaper_model::leftover::{Leftover, LeftoverVerdict};

/// Maximum number of characters of the program that a process ran before.
const EARLIER_MAX: usize = 24;
/// Duration from which on it is shown without [`Detail::Steps`], in nanoseconds.
const LONG_NS: u64 = 1_000_000_000;

/// Style, word of the event, and detail.
type Columns = (anstyle::Style, &'static str, String);

/// Returns the line of a record about a process. Returns `None` for any other record, or if it is not shown.
pub(super) fn line(record: &EventRecord, detail: Detail, memory: &mut Memory) -> Option<Line> {
    let body = &record.body;
    let (process, columns, is_claimed) = match body {
        EventBody::Lifecycle { event, process, .. } => {
            return lifecycle(event, process, detail, memory);
        }
        EventBody::Reparent { process, .. } if detail >= Detail::Steps => {
            (process, orphan(body, memory)?, None)
        }
        EventBody::Decision { process, decision } => {
            if decision.would_reap() {
                memory.observe(process);
            }
            let claimed = decision.verdict == "reap" && !decision.would_reap();
            if claimed {
                memory.claim(process.key);
            }
            if !is_decision_shown(decision, detail) {
                return None;
            }
            let columns = decided(record.boot_ns, process, decision);
            (process, columns, Some(claimed))
        }
        EventBody::Leftover {
            process,
            leftover,
            mode,
        } => {
            let observes = *mode == "observe";
            if observes && leftover.verdict == LeftoverVerdict::Reap {
                memory.observed.add(process, &leftover.agent, None);
            }
            memory.mention_leftover(process, &leftover.agent);
            if !observes && leftover.verdict == LeftoverVerdict::Reap && detail < Detail::Steps {
                return None;
            }
            (process, left_behind(leftover, observes), None)
        }
        EventBody::Keep {
            process,
            by,
            kept,
            processes,
        } => (
            process,
            keep(record.boot_ns, *by, kept.as_ref(), *processes),
            None,
        ),
        EventBody::Signal { process, .. } if detail < Detail::Steps => {
            memory.claim(process.key);
            return None;
        }
        EventBody::Signal { process, sent } => (process, signal(sent), Some(true)),
        EventBody::Outcome { process, .. } => {
            let columns = outcome(body, detail);
            let line = columns.map(|columns| named(process, columns, memory, Some(true)));
            memory.forget(process.key);
            return line;
        }
        _ => return None,
    };
    Some(named(process, columns, memory, is_claimed))
}

/// Returns a line about a process, which says so if the process runs another program than in the line before.
/// `is_claimed`: whether an outcome follows after its exit; `None` if that is not known from this line.
fn named(
    process: &ProcessRef,
    (style, event, mut detail): Columns,
    memory: &mut Memory,
    is_claimed: Option<bool>,
) -> Line {
    if let Some(before) = memory.mention(process, is_claimed) {
        let gap = if detail.is_empty() { "" } else { ", " };
        detail += &format!("{gap}was {}", printable(&before, EARLIER_MAX));
    }
    Line {
        style,
        event,
        subject: Some(subject(process, memory)),
        detail,
        more: Vec::new(),
    }
}

/// Returns the line of a lifecycle event. Without [`Detail::Lifecycle`], only the exit of a process is shown that earlier
/// lines have announced, and that ended by itself.
fn lifecycle(
    event: &Lifecycle,
    process: &ProcessRef,
    detail: Detail,
    memory: &mut Memory,
) -> Option<Line> {
    let shows = detail >= Detail::Lifecycle;
    let columns = match event {
        // Its program is still that of its parent.
        Lifecycle::Fork if shows => {
            let evidence = process.evidence.as_ref().map(evidence_ref_text);
            let by = evidence.map(|evidence| format!("inferred by {evidence}"));
            return Some(Line {
                style: DIM,
                event: "fork",
                subject: Some(subject(process, memory)),
                detail: by.unwrap_or_else(|| forked_by(process.parent)),
                more: Vec::new(),
            });
        }
        Lifecycle::Exec if shows => (DIM, "exec", String::new()),
        Lifecycle::Move if shows => (DIM, "migrate", "in another cgroup".to_owned()),
        Lifecycle::Exit { exit_status, .. } => {
            let columns = match memory.is_announced(process.key) {
                true => (NOTE, "exited", by_itself(*exit_status)),
                false => (DIM, "exit", exit_status_text(*exit_status)),
            };
            let is_shown = shows || columns.1 == "exited";
            let line = is_shown.then(|| named(process, columns, memory, None));
            memory.forget_exited(process.key);
            return line;
        }
        _ => return None,
    };
    Some(named(process, columns, memory, None))
}

/// Describes the end of a process that the service has not signalled.
fn by_itself(status: ExitStatus) -> String {
    match status {
        ExitStatus::Unknown => "by itself".into(),
        ExitStatus::Exited(_) => format!("by itself: {}", exit_status_text(status)),
        ExitStatus::Signalled { .. } => {
            format!(
                "by {}, which this service did not send",
                exit_status_text(status)
            )
        }
    }
}

fn orphan(body: &EventBody, memory: &Memory) -> Option<Columns> {
    let EventBody::Reparent {
        process,
        old_parent,
        old_parent_comm,
        adopter,
        namespace_ending,
        ..
    } = body
    else {
        return None;
    };
    let label = |key: Option<_>, comm: &[u8]| {
        // An agent's name in the kernel can be as general as `node` or `2.1.197`.
        let agent = key.and_then(|key| memory.agent_of(key));
        let starter = key.and_then(|key| memory.parent_comm(process, key));
        let known = if comm.is_empty() { starter } else { None };
        process_label(key, agent.map_or(known.unwrap_or(comm), str::as_bytes))
    };
    let parent = label(*old_parent, old_parent_comm);
    let next = match (namespace_ending, adopter) {
        (true, _) => "its namespace is ending".to_owned(),
        (false, Some(adopter)) => format!("{} adopted it", label(Some(adopter.key), &adopter.comm)),
        (false, None) => format!("{} adopted it", label(None, &[])),
    };
    Some((NOTE, "orphan", format!("{parent} exited, {next}")))
}

/// Returns whether a decision is shown. Hidden are decisions to keep a process for now. A decision to reap is hidden if
/// the service carries it out, because the end of the process is shown.
fn is_decision_shown(decision: &DecisionNames, detail: Detail) -> bool {
    detail >= Detail::Steps
        || match decision.verdict {
            "reap" => decision.would_reap(),
            "wait" => decision.reason == "rule_delay",
            // The line of the session's close has it.
            "report" => decision.reason != LEFT_RUNNING,
            _ => false,
        }
}

fn decided(now: u64, process: &ProcessRef, decision: &DecisionNames) -> Columns {
    let (style, event) = match decision.verdict {
        "reap" if decision.would_reap() => (WARN, "would reap"),
        "reap" => (WARN, "reap"),
        other => (PLAIN, other),
    };
    let rule = decision.rule.as_ref().map(|rule| format!(" ({rule})"));
    let rule = rule.unwrap_or_default();
    let evidence = process.evidence.as_ref().map(evidence_ref_text);
    let evidence = evidence.map(|evidence| format!(", by {evidence}"));
    let evidence = evidence.unwrap_or_default();
    let memory = decision.memory.map(tree_memory).unwrap_or_default();
    let reason = match &decision.wait {
        Some(wait) => wait_text(wait, decision.reason, now),
        None => reason_text(decision.reason).to_owned(),
    };
    (style, event, format!("{reason}{rule}{evidence}{memory}"))
}

fn left_behind(leftover: &Leftover, observes: bool) -> Columns {
    let (style, event) = match leftover.verdict {
        LeftoverVerdict::Reap if observes => (WARN, "would reap"),
        LeftoverVerdict::Reap => (WARN, "reap"),
        _ => (PLAIN, leftover.verdict.name()),
    };
    let agent = printable(&leftover.agent, 32);
    let reason = printable(&leftover_text(leftover), 200);
    (style, event, format!("left behind by {agent}: {reason}"))
}

fn keep(now: u64, by: u32, kept: Option<&KeepDuration>, processes: usize) -> Columns {
    let (event, change) = match kept {
        None => ("unkeep", "no longer kept".into()),
        Some(KeepDuration { until, tree }) => {
            let tree = if *tree { " with its descendants" } else { "" };
            let end = match until {
                Some(until) => format!("for {}", remaining(*until, now)),
                None => "until it exits".into(),
            };
            ("keep", format!("kept{tree} {end}"))
        }
    };
    let count = process_count(processes);
    (NOTE, event, format!("{change}, by uid {by}{count}"))
}

fn signal(sent: &SentSignal) -> Columns {
    let from = (sent.by == SentBy::Kernel).then(|| "from the kernel".to_owned());
    let after = sent.latency.map(|ns| format!("after {}", duration(ns)));
    let detail: Vec<_> = from.into_iter().chain(after).collect();
    (WARN, sent.signal.as_str(), detail.join(", "))
}

/// Returns an outcome's columns. `None` if the outcome is not shown.
fn outcome(body: &EventBody, detail: Detail) -> Option<Columns> {
    let EventBody::Outcome {
        outcome,
        signal,
        duration: took,
        memory,
        ..
    } = body
    else {
        return None;
    };
    let shown = took.filter(|ns| detail >= Detail::Steps || *ns >= LONG_NS);
    let after = shown.map(|ns| format!("{} after the first signal", duration(ns)));
    Some(match outcome {
        ReapOutcome::Exited(status) => {
            let Some(signal) = signal else {
                return Some((NOTE, "exited", by_itself(*status)));
            };
            let memory = memory.map(|memory| freed(&FreedMemory::from(memory)));
            let after = after.map(|after| format!(", {after}"));
            let ended = ended_by(*status, signal) + &after.unwrap_or_default();
            (GOOD, "ended", ended + &memory.unwrap_or_default())
        }
        ReapOutcome::Failed(failure) => {
            let after = after.map(|after| format!("{after}: ")).unwrap_or_default();
            (BAD, "FAILED", format!("{after}{failure}"))
        }
        ReapOutcome::NotSent(ReleaseReason::AlreadyExited) => {
            (NOTE, "exited", "by itself, before a signal was sent".into())
        }
        ReapOutcome::NotSent(reason) if detail >= Detail::Steps => match reason {
            ReleaseReason::UidUnreadable => (NOTE, "not sent", "its user cannot be read".into()),
            ReleaseReason::NotDue(reason) => {
                (NOTE, "not sent", reason_text(reason.name()).to_owned())
            }
            ReleaseReason::PidReused => {
                let why = "its pid belongs to another process now";
                (NOTE, "not sent", why.into())
            }
            // The decision has been shown.
            ReleaseReason::ObserveMode | ReleaseReason::AlreadyExited => return None,
        },
        ReapOutcome::NotSent(_) => return None,
    })
}

/// Describes the end of a process that was sent a signal: `SIGTERM`, or `exit 0 after SIGTERM` if it handled that.
fn ended_by(status: ExitStatus, signal: &str) -> String {
    let text = exit_status_text(status);
    match status {
        ExitStatus::Exited(_) if !text.ends_with(signal) => format!("{text} after {signal}"),
        _ => text,
    }
}
