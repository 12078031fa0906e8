//! The sentences of `reaper explain`: the decision with its reason, and what happens next.

use super::{seconds_since, seconds_until};
use crate::api::messages::{DecisionSnapshot, ExplainSnapshot, SessionSnapshot, UntrackedReason};
use crate::api::{Finding, RuleTest};
use crate::export::names::outcome_reason;
use crate::export::{
    RecentProcess, capitalized, evidence_ref_text, exit_status_text, outcome_reason_text,
    reason_text, time,
};
use crate::reap::ReapOutcome;
use reaper_model::event::ExitStatus;
use reaper_model::facts::FactSet;
use reaper_model::ruleset::Action;
use reaper_model::value::show_duration;

/// Returns the judgement on a process in the words of every command, then details.
pub(super) fn why(snapshot: &ExplainSnapshot, nearest: Option<&RuleTest>) -> String {
    let is_reaped = snapshot
        .row
        .decision
        .as_ref()
        .filter(|d| d.decision == "reap");
    let judgement = match (&snapshot.signalled, is_reaped) {
        (Some(signalled), Some(decision)) => being_reaped(signalled, decision),
        _ => judgement(snapshot),
    };
    let near = nearest.filter(|_| snapshot.leftover.is_none());
    let near = near
        .map(|rule| near_rule(snapshot, rule))
        .unwrap_or_default();
    let sentence = capitalized(&judgement);
    let details = details(snapshot);
    // The details repeat this reason, with name and time.
    let agent_exited = sentence.strip_suffix(reason_text("root_exited"));
    match (agent_exited, details.strip_prefix(" Its ")) {
        (Some(judgement), Some(agent)) => format!("{judgement}its {agent}"),
        _ => format!("{sentence}{near}.{details}"),
    }
}

/// Returns the judgement on a process, such as `kept: its agent lives`.
pub(super) fn judgement(snapshot: &ExplainSnapshot) -> String {
    if let Some(found) = &snapshot.leftover {
        return found.why.clone();
    }
    match (&snapshot.untracked_reason, &snapshot.row.decision) {
        (Some(UntrackedReason::NoAgent(_)), _) if snapshot.gap => {
            "not decided yet: events are missing, and it may belong to a session".into()
        }
        (Some(UntrackedReason::Never(reason)), _) => {
            format!("never signalled: {}", reason_text(reason))
        }
        (Some(reason), _) => format!("not tracked: {}", untracked(reason)),
        (None, Some(decision)) => super::judgement(decision).text(),
        (None, None) => "not decided yet: it was not evaluated".into(),
    }
}

/// Returns what was done to a process that is alive, and why.
fn being_reaped(signalled: &RecentProcess, decision: &DecisionSnapshot) -> String {
    let ago = |at| format!("{} ago", time(seconds_since(at)));
    let reason = reason_text(decision.reason);
    match (&signalled.outcome, &signalled.signal) {
        (Some((at, outcome)), _) if matches!(outcome.outcome, ReapOutcome::Failed(_)) => {
            let why = outcome_reason(&outcome.outcome).unwrap_or_default();
            let why = outcome_reason_text(&why);
            format!("could not be ended {}: {why}; {reason}", ago(*at))
        }
        (_, Some((at, signal))) => format!("being reaped: {signal} sent {}, {reason}", ago(*at)),
        _ => format!("to be reaped: {reason}"),
    }
}

fn untracked(reason: &UntrackedReason) -> String {
    match reason {
        UntrackedReason::OutOfScope => "it is outside of the scope of this service".into(),
        UntrackedReason::Never(reason) => reason_text(reason).into(),
        UntrackedReason::Boundary(rule) => format!(
            "it is a boundary by the rule \"{rule}\", and its descendants belong to no agent above it"
        ),
        UntrackedReason::BelowBoundary(name, rule) => {
            let comm = String::from_utf8_lossy(&name.comm);
            let pid = name.pid;
            format!("it descends from {comm} ({pid}), a boundary by the rule \"{rule}\"")
        }
        UntrackedReason::NoAgent(None) => {
            "no agent rule matches this process or one above it".into()
        }
        UntrackedReason::NoAgent(Some(boundary)) => {
            // Tmux names itself `tmux: server`.
            let comm = boundary.comm.split(|byte| *byte == b':').next();
            let comm = String::from_utf8_lossy(comm.unwrap_or_default());
            let pid = boundary.pid;
            format!("no agent rule matches this process or one between it and {comm} ({pid})")
        }
    }
}

/// Returns the nearest rule and why it does not apply. The text ends a sentence.
fn near_rule(snapshot: &ExplainSnapshot, rule: &RuleTest) -> String {
    let RuleTest { pid, name, .. } = rule;
    let process = match *pid == snapshot.row.key.pid {
        true => "this process".into(),
        false => format!("process {pid}"),
    };
    match &rule.failed {
        Some(failed) => format!("; nearest to {process}: {name}, whose {failed}"),
        None => format!(
            "; the rule \"{name}\" matches {process} only since a later change: start it again"
        ),
    }
}

/// Returns what else is known about the decision on a member, as sentences with a space before each.
fn details(snapshot: &ExplainSnapshot) -> String {
    let Some(decision) = &snapshot.row.decision else {
        return String::new();
    };
    let mut text = String::new();
    match decision.reason {
        "unread" => text += &format!(" Missing: {}.", fact_names(decision.needs)),
        "lineage_uncertain" => text += " Events about its ancestors were lost.",
        "inferred" => {
            let by = snapshot.row.evidence.as_ref().map(evidence_ref_text);
            let by = by.unwrap_or_else(|| "evidence".into());
            text += &format!(" No event reported its fork, and only {by} links it to the agent.");
        }
        _ => {}
    }
    let (kind, agent) = (kind(snapshot), agent(snapshot));
    match due(snapshot) {
        Some(due) => text += &format!(" Its {due}."),
        None if !snapshot.row.root => text += &format!(" Its {kind} is {agent}."),
        None if kind == "server" => {
            text += &format!(
                " It is the agent's server {agent}, which outlives the process that started it."
            );
        }
        None => text += &format!(" It is the agent {agent} itself."),
    }
    text
}

/// Returns what will happen, and when.
pub(super) fn next(snapshot: &ExplainSnapshot, nearest: Option<&RuleTest>) -> String {
    if let Some(found) = &snapshot.leftover {
        return next_of_leftover(found, snapshot);
    }
    let Some(decision) = snapshot
        .row
        .decision
        .as_ref()
        .filter(|_| snapshot.untracked_reason.is_none())
    else {
        return next_untracked(snapshot, nearest);
    };
    let time = decision.until.map(|until| time(seconds_until(until)));
    match (decision.decision, time) {
        ("reap", _) if snapshot.gap => {
            "Events are missing; the service decides again once the gap is closed.".into()
        }
        ("reap", _) => match &snapshot.signalled {
            Some(signalled) if signalled.outcome.is_some() => {
                "This service does not try again; `sudo reaper scan --reap` does.".into()
            }
            Some(signalled) if signalled.signal.is_some_and(|(_, name)| name == "SIGKILL") => {
                "It exits once the kernel lets it.".into()
            }
            Some(_) => {
                let grace = show_duration(snapshot.grace);
                format!("SIGKILL follows {grace} after the first signal, unless it exits.")
            }
            None => format!("Now: {}.", signals(snapshot)),
        },
        ("wait", Some(time)) if snapshot.exited_root.is_some() => {
            format!(
                "In {time} that delay expires, and it is {}.",
                then(snapshot, decision)
            )
        }
        ("wait", Some(time)) if decision.reason == "successor_awaited" => format!(
            "In {time}, unless another process continues the conversation, it is treated like any process that an agent leaves behind."
        ),
        ("wait", Some(time)) => {
            let then = then(snapshot, decision);
            let end = when_it_ends(snapshot);
            format!("In {time}, if the conditions of that rule still hold, it is {then}. {end}")
        }
        ("wait", None) => "It is decided once that has been read; until then it is kept.".into(),
        (_, Some(time)) if decision.reason == "kept_by_user" => {
            format!("In {time} the keep expires, and the service decides again.")
        }
        (_, Some(time)) if snapshot.row.root && snapshot.exited_root.is_none() => {
            format!("In {time} reaper checks again whether anything uses it.")
        }
        (_, Some(time)) => format!("In {time} the service decides again."),
        _ if snapshot.exited_root.is_some() => {
            "It is left running as long as that reason holds.".into()
        }
        _ if snapshot.row.root => {
            match snapshot.session.as_ref().and_then(|own| own.outer.as_ref()) {
                None => {
                    "It is left running. When it exits, what it leaves behind is reaped, unless there is a reason to keep \
                     it."
                        .into()
                }
                Some(outer) => format!(
                    "It is left running while {} is alive, in which it runs. When either exits, what it leaves behind is \
                     reaped, unless there is a reason to keep it.",
                    outer.agent
                ),
            }
        }
        _ => when_it_ends(snapshot),
    }
}

/// Returns what will happen to an untracked process, and how its agent becomes known.
fn next_untracked(snapshot: &ExplainSnapshot, nearest: Option<&RuleTest>) -> String {
    let no_agent = matches!(snapshot.untracked_reason, Some(UntrackedReason::NoAgent(_)));
    if let Some(UntrackedReason::Never(_)) = snapshot.untracked_reason {
        return "No rule changes that.".into();
    }
    let next = match no_agent && snapshot.predates_service {
        true => {
            "This service never signals it, unless an agent left it behind before the service started: `reaper scan` \
             checks that."
        }
        false => "This service never signals it.",
    };
    match nearest.map(|rule| rule.pid) {
        _ if !no_agent => next.into(),
        Some(pid) => format!(
            "{next} `reaper agents --test {pid}` tests each rule, and `reaper agent add --pid {pid}` adds one."
        ),
        None => format!(
            "{next} If an agent started it, `reaper agents --test PID` with the agent's pid says why no rule matches, and \
             `reaper agent add` adds one."
        ),
    }
}

/// Returns what happens to a leftover from before the service started.
fn next_of_leftover(found: &Finding, snapshot: &ExplainSnapshot) -> String {
    match &*found.decision {
        "reap" if !snapshot.enforce => format!("Now: {}.", signals(snapshot)),
        "reap" => {
            "`reaper scan --reap` ends it. On its own, the service may need more evidence: see `reaper scan --help`."
                .into()
        }
        "wait" => "When the delay has expired, the service decides again.".into(),
        _ => "It is left running as long as that reason holds.".into(),
    }
}

/// Returns what happens to a member when its agent exits.
fn when_it_ends(snapshot: &ExplainSnapshot) -> String {
    let agent = agent(snapshot);
    let (Some(killed), Some(done)) = (&snapshot.if_killed, &snapshot.if_succeeded) else {
        return format!("When {agent} exits, the service decides about this process again.");
    };
    let (killed, done) = (outlook(snapshot, killed), outlook(snapshot, done));
    if killed == done {
        return format!("When {agent} exits, {killed}.");
    }
    format!("If {agent} exits with status 0, {done}. After any other exit, {killed}.")
}

/// Returns what happens to a member with this decision, as the end of a sentence. The decision is the one that the exit
/// of its agent would bring.
fn outlook(snapshot: &ExplainSnapshot, decision: &DecisionSnapshot) -> String {
    let rule = decision.rule.as_ref();
    let by = rule.map_or_else(String::new, |rule| format!(", by the rule \"{rule}\""));
    match (decision.decision, decision.until) {
        ("reap", _) if snapshot.enforce => {
            format!("this process is reaped at once: {}", signals(snapshot))
        }
        ("reap", _) => format!(
            "this process would be reaped at once, but {}",
            signals(snapshot)
        ),
        ("wait", None) => match rule {
            Some(rule) => format!(
                "what happens to this process depends on the rule \"{rule}\", which needs to know {}",
                fact_names(decision.needs)
            ),
            None => format!(
                "what happens to this process depends on {}",
                fact_names(decision.needs)
            ),
        },
        ("wait", Some(until)) => {
            let time = time(seconds_until(until));
            let then = match done(decision) {
                "reaped" if !snapshot.enforce => "would be reaped",
                "reaped" => "is reaped",
                "reported" => "is reported",
                _ => "is kept",
            };
            format!("this process {then} {time} later{by}")
        }
        _ => format!("this process is {}", super::judgement(decision).text()),
    }
}

/// Returns what the rule does after its delay.
fn done(decision: &DecisionSnapshot) -> &'static str {
    match decision.action {
        Some(Action::Report) => "reported",
        Some(Action::Keep) => "kept",
        _ => "reaped",
    }
}

/// Returns what happens to a process at the end of a rule's delay, such as `kept by that rule`.
fn then(snapshot: &ExplainSnapshot, decision: &DecisionSnapshot) -> String {
    match done(decision) {
        "reaped" => reaped(snapshot),
        "reported" => "kept and reported".into(),
        other => format!("{other} by that rule"),
    }
}

fn reaped(snapshot: &ExplainSnapshot) -> String {
    match snapshot.enforce {
        true => format!("reaped: {}", signals(snapshot)),
        false => format!("due, and {}", signals(snapshot)),
    }
}

/// Returns the signals that a reaped process gets, or says that the service only observes.
fn signals(snapshot: &ExplainSnapshot) -> String {
    if !snapshot.enforce {
        let reason = snapshot.mode_reason.as_ref();
        let reason = reason.map(|reason| format!(": {reason}"));
        return "nothing is signalled, as this service only observes".to_owned()
            + &reason.unwrap_or_default();
    }
    let grace = show_duration(snapshot.grace);
    format!("SIGTERM, and SIGKILL {grace} later")
}

/// Returns the missing facts in words.
fn fact_names(needs: FactSet) -> String {
    let all = [
        (FactSet::LISTENING, "whether it listens"),
        (FactSet::LOCAL_SOCKETS, "whether it has a window"),
        (FactSet::CPU, "how busy it is"),
        (FactSet::UNIT, "its systemd unit"),
        (FactSet::KERNEL_SESSION, "its terminal and session"),
        (FactSet::MARKERS, "its environment"),
        (FactSet::ACTIVITY, "the activity of its tree"),
        (FactSet::STDIO, "its standard input and output"),
        (FactSet::ARGUMENTS, "its whole command line"),
    ];
    let fact_names = all.into_iter().filter(|(need, _)| needs.contains(*need));
    let fact_names: Vec<&str> = fact_names.map(|(_, what)| what).collect();
    match fact_names.split_last() {
        None => "the facts that a rule needs".into(),
        Some((last, [])) => (*last).into(),
        Some((last, before)) => format!("{} and {last}", before.join(", ")),
    }
}

/// Returns the kind of the session's root: `agent` or `server`.
fn kind(snapshot: &ExplainSnapshot) -> &'static str {
    let session = snapshot.session.as_ref();
    session.map_or("agent", |session| session.kind.name())
}

/// Returns the name and pid of the session's root.
fn agent(snapshot: &ExplainSnapshot) -> String {
    snapshot
        .session
        .as_ref()
        .map_or_else(|| "the agent".into(), root)
}

fn root(group: &SessionSnapshot) -> String {
    format!("{} ({})", group.name.agent, group.root.pid)
}

/// Returns how and when the agent of a member exited, such as `agent claude (42) was killed by SIGKILL 3s ago`. `None` if it
/// is alive.
fn due(snapshot: &ExplainSnapshot) -> Option<String> {
    let (group, at, how) = snapshot.exited_root.as_ref()?;
    let since = time(seconds_since(*at));
    let how = match how {
        ExitStatus::Exited(code) => format!("exited {since} ago with status {code}"),
        ExitStatus::Signalled { .. } => {
            format!("was killed by {} {since} ago", exit_status_text(*how))
        }
        ExitStatus::Unknown => format!("exited {since} ago with an unknown status"),
    };
    Some(format!("{} {} {how}", group.kind.name(), root(group)))
}
