//! The sentences of `reaper explain`: the decision with its reason, and what happens next.

use super::{seconds_since, seconds_until};
use crate::api::RuleTest;
use crate::api::messages::{DecisionSnapshot, ExplainSnapshot, SessionSnapshot, UntrackedReason};
use crate::export::names::outcome_reason;
use crate::export::{RecentProcess, evidence_ref_text, exit_status_text, failure_text};
use crate::reap::ReapOutcome;
use reaper_model::event::ExitStatus;
use reaper_model::facts::FactSet;
use reaper_model::ruleset::Action;

/// Returns the decision and its reason.
pub(super) fn why(snapshot: &ExplainSnapshot, nearest: Option<&RuleTest>) -> String {
    if let Some(reason) = &snapshot.untracked_reason {
        let near = nearest.map(|rule| near(snapshot, rule));
        return format!(
            "Not tracked: {}{}.",
            untracked(reason),
            near.unwrap_or_default()
        );
    }
    let Some(decision) = &snapshot.row.decision else {
        return "Not decided yet.".into();
    };
    if let Some(signalled) = &snapshot.signalled
        && decision.decision == "reap"
    {
        return being_reaped(signalled, &reason(snapshot, decision));
    }
    let summary = match decision.decision {
        "reap" => "To be reaped",
        "wait" if decision.reason == "unread" => "Not decided yet",
        "wait" => "Kept for now",
        "report" => "Kept and reported",
        _ => "Kept",
    };
    let mut sentence = format!("{summary}: {}", reason(snapshot, decision));
    if let Some(due) = due(snapshot).filter(|_| decision.decision != "reap") {
        sentence += &format!(", though {due}");
    }
    sentence + "."
}

/// Returns what was done to a process that is alive, and why.
fn being_reaped(signalled: &RecentProcess, reason: &str) -> String {
    let ago = |at| format!("{} ago", span(seconds_since(at)));
    match (&signalled.outcome, &signalled.signal) {
        (Some((at, outcome)), _) if matches!(outcome.outcome, ReapOutcome::Failed(_)) => {
            let why = outcome_reason(&outcome.outcome).unwrap_or_default();
            format!(
                "Could not be ended {}: {}; {reason}.",
                ago(*at),
                failure_text(&why)
            )
        }
        (_, Some((at, signal))) => {
            format!("Being reaped: {signal} sent {}, {reason}.", ago(*at))
        }
        _ => format!("To be reaped: {reason}."),
    }
}

fn untracked(reason: &UntrackedReason) -> String {
    match reason {
        UntrackedReason::OutOfScope => "it is outside of the scope of this service".into(),
        UntrackedReason::KernelThread => "it is a kernel thread".into(),
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

/// Returns the rule that comes nearest and why it does not apply, as the end of a sentence.
fn near(snapshot: &ExplainSnapshot, rule: &RuleTest) -> String {
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

/// Returns the reason of a decision in words, as the end of a sentence.
fn reason(snapshot: &ExplainSnapshot, decision: &DecisionSnapshot) -> String {
    let rule = decision.rule.as_deref();
    let by = |what: &str| match rule {
        Some(rule) => format!("{what} (rule \"{rule}\")"),
        None => what.to_owned(),
    };
    let the_rule = || rule.map_or_else(|| "a rule".into(), |rule| format!("the rule \"{rule}\""));
    let due = || due(snapshot).unwrap_or_else(|| "its agent exited".into());
    match decision.reason {
        "root_exited" => by(&due()),
        "forked_after_root_exit" => by(&format!("{}, and it was forked after that", due())),
        "detached" => format!(
            "its parent has exited, but its {} {} lives",
            kind(snapshot),
            agent(snapshot)
        ),
        "root_alive" if snapshot.row.root => match kind(snapshot) {
            "server" => format!(
                "it is the agent's server {}, which outlives the process that started it",
                agent(snapshot)
            ),
            _ => format!("it is the agent {} itself", agent(snapshot)),
        },
        "root_alive" => format!("its {} {} lives", kind(snapshot), agent(snapshot)),
        "keep_rule" => format!("{} says so", the_rule()),
        "other_uid" => by("it runs as another user than its agent"),
        "ancestor_kept" => by("a process above it is kept"),
        "descendant_kept" => by("a process below it is kept"),
        "unreadable" => by("its facts cannot be read, and a process with unknown facts is kept"),
        "lineage_uncertain" => {
            "it may descend from a boundary: events about its ancestors were lost".into()
        }
        "inferred" => {
            let by = snapshot.row.evidence.as_ref().map(evidence_ref_text);
            let by = by.unwrap_or_else(|| "evidence".into());
            format!(
                "no event reported its fork, and only {by} links it to the agent; no rule accepts that as enough"
            )
        }
        "keep_marker" => "REAPER_KEEP=1 is in its environment".into(),
        "kept_by_user" => "a user keeps it with `reaper keep`".into(),
        "rule_delay" => format!("{} gives it time", the_rule()),
        "successor_awaited" => format!(
            "its agent {} exited with status 0, and another process may continue its conversation",
            agent(snapshot)
        ),
        "successor_unknown" => format!(
            "its agent {} exited, and whether another process continues its conversation cannot be read",
            agent(snapshot)
        ),
        "report_rule" => format!("{} says so", the_rule()),
        "reap_rule" if snapshot.row.root => format!("{} says so", the_rule()),
        "reap_rule" => format!(
            "{} says so, though its {} lives",
            the_rule(),
            kind(snapshot)
        ),
        "unread" => format!("{} is being read", fact_names(decision.needs)),
        "never_pid1" => "it is the init process, which is never signalled".into(),
        "never_kernel_thread" => "it is a kernel thread".into(),
        "never_self" => "it is this service or one of its ancestors".into(),
        other => by(other),
    }
}

/// Returns what will happen, and when.
pub(super) fn next(snapshot: &ExplainSnapshot, nearest: Option<&RuleTest>) -> String {
    let Some(decision) = snapshot
        .row
        .decision
        .as_ref()
        .filter(|_| snapshot.untracked_reason.is_none())
    else {
        return next_untracked(snapshot, nearest);
    };
    let time = decision.until.map(|until| span(seconds_until(until)));
    match (decision.decision, time) {
        ("reap", _) if snapshot.gap => {
            "Events are missing; it is decided again once the gap is closed.".into()
        }
        ("reap", _) => match &snapshot.signalled {
            Some(signalled) if signalled.outcome.is_some() => {
                "Nothing until it exits; `sudo reaper scan --reap` tries again.".into()
            }
            Some(signalled) if signalled.signal.is_some_and(|(_, name)| name == "SIGKILL") => {
                "It exits once the kernel lets it.".into()
            }
            Some(_) => {
                let grace = humantime::format_duration(snapshot.grace);
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
            format!("In {time} the keep expires, and it is decided again.")
        }
        (_, Some(time)) if snapshot.row.root && snapshot.exited_root.is_none() => {
            format!("In {time} reaper checks again whether anything uses it.")
        }
        (_, Some(time)) => format!("In {time} it is decided again."),
        _ if snapshot.exited_root.is_some() => "Nothing, as long as this holds.".into(),
        _ if snapshot.row.root => {
            match snapshot.session.as_ref().and_then(|own| own.outer.as_ref()) {
                None => {
                    "Nothing while it is alive; when it exits, what it leaves behind is due.".into()
                }
                Some(outer) => format!(
                    "Nothing while it and {}, in which it runs, are both alive; when one exits, what it leaves behind is due.",
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
    let next = match no_agent && snapshot.predates_service {
        true => {
            "Nothing, unless an agent left it behind before this service started: `reaper scan` checks that."
        }
        false => "Nothing: it is never signalled.",
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

/// Returns what happens to a member when its agent exits.
fn when_it_ends(snapshot: &ExplainSnapshot) -> String {
    let agent = agent(snapshot);
    let (Some(killed), Some(done)) = (&snapshot.if_killed, &snapshot.if_succeeded) else {
        return format!("When {agent} exits, this process is decided again.");
    };
    let (killed, done) = (outlook(snapshot, killed), outlook(snapshot, done));
    let first = format!("When {agent} exits, {killed}.");
    if killed == done {
        return first;
    }
    format!("{first} If {agent} exits with status 0, {done}.")
}

/// Returns what such a decision would mean for a member.
fn outlook(snapshot: &ExplainSnapshot, decision: &DecisionSnapshot) -> String {
    let rule = decision.rule.as_ref();
    let by = rule.map_or_else(String::new, |rule| format!(", by the rule \"{rule}\""));
    match (decision.decision, decision.until) {
        ("reap", _) => format!("this process is {}", reaped(snapshot)),
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
            let time = span(seconds_until(until));
            format!("this process is {} {time} later{by}", done(decision))
        }
        _ => format!("this process is kept: {}", reason(snapshot, decision)),
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

fn then(snapshot: &ExplainSnapshot, decision: &DecisionSnapshot) -> String {
    match done(decision) {
        "reaped" => reaped(snapshot),
        "reported" => "kept and reported".into(),
        other => format!("{other} by that rule"),
    }
}

fn reaped(snapshot: &ExplainSnapshot) -> String {
    format!("reaped: {}", signals(snapshot))
}

/// Returns the signals that a reaped process gets, or says that the service only observes.
fn signals(snapshot: &ExplainSnapshot) -> String {
    if !snapshot.enforce {
        let reason = snapshot.mode_reason.as_ref();
        let reason = reason.map(|reason| format!(": {reason}"));
        return "nothing is signalled, as this service only observes".to_owned()
            + &reason.unwrap_or_default();
    }
    let grace = humantime::format_duration(snapshot.grace);
    format!("SIGTERM, and SIGKILL {grace} later")
}

/// Returns the missing facts in words.
fn fact_names(needs: FactSet) -> String {
    let all = [
        (FactSet::LISTENING, "whether it listens on a port"),
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

/// Returns how and when its agent exited, `None` if the agent is alive.
fn due(snapshot: &ExplainSnapshot) -> Option<String> {
    let (group, at, how) = snapshot.exited_root.as_ref()?;
    let since = span(seconds_since(*at));
    let how = match how {
        ExitStatus::Exited(code) => format!("exited {since} ago with status {code}"),
        ExitStatus::Signalled { .. } => {
            format!("was killed by {} {since} ago", exit_status_text(*how))
        }
        ExitStatus::Unknown => format!("exited {since} ago with an unknown status"),
    };
    Some(format!("its {} {} {how}", group.kind.name(), root(group)))
}

/// Formats a duration with its two largest units, such as `2 h 5 min`.
pub(super) fn span(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let largest = UNITS.iter().position(|(unit, _)| seconds >= *unit);
    let Some(largest) = largest else {
        return "0 s".into();
    };
    let mut rest = seconds;
    let parts = UNITS[largest..].iter().take(2).filter_map(|(unit, name)| {
        let count = rest / unit;
        rest %= unit;
        (count > 0).then(|| format!("{count} {name}"))
    });
    parts.collect::<Vec<_>>().join(" ")
}
