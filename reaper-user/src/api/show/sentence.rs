//! Why, and what comes next, each in plain sentences.

use std::time::Duration;

use super::{seconds_since, seconds_until};
use crate::api::messages::{DecisionSnapshot, ExplainSnapshot, SessionSnapshot, UntrackedReason};
use crate::export::{evidence_ref_text, exit_status_text};
use reaper_model::event::ExitStatus;
use reaper_model::facts::FactSet;
use reaper_model::ruleset::Action;

/// The decision about a process, and its reason.
pub(super) fn why(story: &ExplainSnapshot) -> String {
    if let Some(stranger) = &story.untracked_reason {
        return format!("None of reaper's business: {}.", foreign(stranger));
    }
    let Some(judged) = &story.row.judged else {
        return "Nothing is decided about it.".into();
    };
    let verdict = match judged.verdict {
        "reap" => "To be reaped",
        "wait" if judged.reason == "unread" => "Not decided yet",
        "wait" => "Kept for now",
        "report" => "Kept and reported",
        _ => "Kept",
    };
    let mut sentence = format!("{verdict}: {}", reason(story, judged));
    if let Some(due) = due(story).filter(|_| judged.verdict != "reap") {
        sentence += &format!(", though {due}");
    }
    sentence + "."
}

fn foreign(stranger: &UntrackedReason) -> String {
    match stranger {
        UntrackedReason::OutOfScope => {
            "it is outside of what this service was told to watch".into()
        }
        UntrackedReason::KernelThread => "it is a thread of the kernel".into(),
        UntrackedReason::Boundary(rule) => format!(
            "it is a boundary by the rule \"{rule}\", and what it runs belongs to no agent above it"
        ),
        UntrackedReason::BelowBoundary(name, rule) => {
            let comm = String::from_utf8_lossy(&name.comm);
            let pid = name.pid;
            format!("it descends from {comm} ({pid}), a boundary by the rule \"{rule}\"")
        }
        UntrackedReason::NoAgent => "it descends from no agent that a rule recognises".into(),
    }
}

fn reason(story: &ExplainSnapshot, judged: &DecisionSnapshot) -> String {
    let rule = judged.rule.as_deref();
    let by = |what: &str| match rule {
        Some(rule) => format!("{what} (rule \"{rule}\")"),
        None => what.to_owned(),
    };
    let the_rule = || rule.map_or_else(|| "a rule".into(), |rule| format!("the rule \"{rule}\""));
    let due = || due(story).unwrap_or_else(|| "its agent is gone".into());
    match judged.reason {
        "root_exited" => by(&due()),
        "forked_after_root_exit" => by(&format!("{}, and it was born after that", due())),
        "detached" => format!(
            "its parent has exited, but its {} {} lives",
            kind(story),
            agent(story)
        ),
        "root_alive" if story.row.root => match kind(story) {
            "server" => format!(
                "it is the agent's server {}, which outlives the process that started it",
                agent(story)
            ),
            _ => format!("it is the agent {} itself", agent(story)),
        },
        "root_alive" => format!("its {} {} lives", kind(story), agent(story)),
        "keep_rule" => format!("{} says so", the_rule()),
        "other_uid" => by("it runs as another user than its agent"),
        "ancestor_kept" => by("a process above it is kept"),
        "descendant_kept" => by("a process below it is kept"),
        "unreadable" => by("what it is cannot be read, and what is not known speaks for it"),
        "lineage_uncertain" => {
            "it may come from a boundary: what was told of its makers was lost".into()
        }
        "inferred" => {
            let by = story.row.evidence.as_ref().map(evidence_ref_text);
            let by = by.unwrap_or_else(|| "evidence".into());
            format!(
                "nobody saw its birth, and only {by} says that it comes from the agent; no rule says that this is enough"
            )
        }
        "keep_marker" => "REAPER_KEEP=1 is in its environment".into(),
        "kept_by_user" => "a user has asked for that with `reaper keep`".into(),
        "rule_delay" => format!("{} gives it time", the_rule()),
        "successor_awaited" => format!(
            "its agent {} exited with status 0, and another process may continue its conversation",
            agent(story)
        ),
        "successor_unknown" => format!(
            "its agent {} exited, and whether another process continues its conversation cannot be read",
            agent(story)
        ),
        "report_rule" => format!("{} wants somebody to have a look at it", the_rule()),
        "reap_rule" if story.row.root => format!("{} says so", the_rule()),
        "reap_rule" => format!("{} says so, though its {} lives", the_rule(), kind(story)),
        "unread" => format!("{} is being read", wanted(judged.needs)),
        "never_pid1" => "it is the init of all, which is never signalled".into(),
        "never_kernel_thread" => "it is a thread of the kernel".into(),
        "never_self" => "it is this service, or one of those above it".into(),
        other => by(other),
    }
}

/// What will happen, and when.
pub(super) fn next(story: &ExplainSnapshot) -> String {
    let Some(judged) = story
        .row
        .judged
        .as_ref()
        .filter(|_| story.untracked_reason.is_none())
    else {
        let may_be_left =
            story.unwatched && story.untracked_reason == Some(UntrackedReason::NoAgent);
        return if may_be_left {
            "Nothing, unless an agent left it behind before this service began: `reaper scan` tells.".into()
        } else {
            "Nothing: it is never signalled.".into()
        };
    };
    let time = judged.until.map(|until| span(seconds_until(until)));
    match (judged.verdict, time) {
        ("reap", _) if story.gap => {
            "Events are missing; once they have been made up for, it is decided anew.".into()
        }
        ("reap", _) => format!("Now: {}.", signals(story)),
        ("wait", Some(time)) if story.due.is_some() => {
            format!(
                "In {time} that time is over, and it is {}.",
                then(story, judged)
            )
        }
        ("wait", Some(time)) if judged.reason == "successor_awaited" => format!(
            "In {time}, unless another process continues the conversation, it is decided like what any agent leaves behind."
        ),
        ("wait", Some(time)) => {
            let then = then(story, judged);
            let end = when_it_ends(story);
            format!("In {time}, if what that rule asks for is so then, it is {then}. {end}")
        }
        ("wait", None) => "It is decided as soon as that is read; until then it is kept.".into(),
        (_, Some(time)) if judged.reason == "kept_by_user" => {
            format!("In {time} that is over, and it is decided anew.")
        }
        (_, Some(time)) if story.row.root && story.due.is_none() => {
            format!("In {time} it is checked again whether anything uses it.")
        }
        (_, Some(time)) => format!("In {time} it is decided anew."),
        _ if story.due.is_some() => "Nothing, for as long as this holds.".into(),
        _ if story.row.root => match story.session.as_ref().and_then(|own| own.outer.as_ref()) {
            None => "Nothing while it lives; when it ends, what it leaves behind is due.".into(),
            Some(outer) => format!(
                "Nothing while it and {}, in which it runs, both live; when one of them ends, what that leaves behind is due.",
                outer.agent
            ),
        },
        _ => when_it_ends(story),
    }
}

/// What becomes of a member once its agent ends, as far as that can be told.
fn when_it_ends(story: &ExplainSnapshot) -> String {
    let agent = agent(story);
    let (Some(killed), Some(done)) = (&story.if_killed, &story.if_succeeded) else {
        return format!("When {agent} ends, it is decided anew.");
    };
    let (killed, done) = (outlook(story, killed), outlook(story, done));
    let first = format!("When {agent} ends, {killed}.");
    if killed == done {
        return first;
    }
    format!("{first} If that ends with status 0, {done}.")
}

/// What would become of a member by such a decision.
fn outlook(story: &ExplainSnapshot, judged: &DecisionSnapshot) -> String {
    let rule = judged.rule.as_ref();
    let by = rule.map_or_else(String::new, |rule| format!(", by the rule \"{rule}\""));
    match (judged.verdict, judged.until) {
        ("reap", _) => format!("it is {}", reaped(story)),
        ("wait", None) => match rule {
            Some(rule) => format!(
                "it depends on the rule \"{rule}\", which asks for this: {}",
                wanted(judged.needs)
            ),
            None => format!("it depends on this: {}", wanted(judged.needs)),
        },
        ("wait", Some(until)) => {
            let time = span(seconds_until(until));
            format!("it is {} {time} after that{by}", done(judged))
        }
        _ => format!("it is kept: {}", reason(story, judged)),
    }
}

/// What a rule does, when its time has come.
fn done(judged: &DecisionSnapshot) -> &'static str {
    match judged.action {
        Some(Action::Report) => "reported",
        Some(Action::Keep) => "kept",
        _ => "reaped",
    }
}

fn then(story: &ExplainSnapshot, judged: &DecisionSnapshot) -> String {
    match done(judged) {
        "reaped" => reaped(story),
        "reported" => "kept and reported".into(),
        other => format!("{other} by that rule"),
    }
}

fn reaped(story: &ExplainSnapshot) -> String {
    format!("reaped: {}", signals(story))
}

fn signals(story: &ExplainSnapshot) -> String {
    if !story.enforce {
        let reason = story.mode_reason.as_ref();
        let reason = reason.map(|reason| format!(": {reason}"));
        return "nothing is signalled, as this service only observes".to_owned()
            + &reason.unwrap_or_default();
    }
    let grace = humantime::format_duration(story.grace);
    format!("SIGTERM, and SIGKILL {grace} later")
}

/// What has to be read.
fn wanted(needs: FactSet) -> String {
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
    let wanted = all.into_iter().filter(|(need, _)| needs.contains(*need));
    let wanted: Vec<&str> = wanted.map(|(_, what)| what).collect();
    match wanted.split_last() {
        None => "what a rule asks for".into(),
        Some((last, [])) => (*last).into(),
        Some((last, before)) => format!("{} and {last}", before.join(", ")),
    }
}

/// What the root of its session is: `agent` or `server`.
fn kind(story: &ExplainSnapshot) -> &'static str {
    let session = story.session.as_ref();
    session.map_or("agent", |session| session.kind.name())
}

/// The root of its session.
fn agent(story: &ExplainSnapshot) -> String {
    story
        .session
        .as_ref()
        .map_or_else(|| "the agent".into(), root)
}

fn root(group: &SessionSnapshot) -> String {
    format!("{} ({})", group.name.agent, group.root.pid)
}

/// That its agent is gone, how and since when.
fn due(story: &ExplainSnapshot) -> Option<String> {
    let (group, at, how) = story.due.as_ref()?;
    let since = span(seconds_since(*at));
    let how = match how {
        ExitStatus::Exited(code) => format!("ended {since} ago with status {code}"),
        ExitStatus::Signalled { .. } => {
            format!("was ended by {} {since} ago", exit_status_text(*how))
        }
        ExitStatus::Unknown => format!("has been gone for {since}, and nobody saw how it ended"),
    };
    Some(format!("its {} {} {how}", group.kind.name(), root(group)))
}

/// A time in its two largest units.
fn span(seconds: u64) -> String {
    let coarse = match seconds {
        s if s >= 86_400 => s - s % 3600,
        s if s >= 3600 => s - s % 60,
        s => s,
    };
    humantime::format_duration(Duration::from_secs(coarse)).to_string()
}
