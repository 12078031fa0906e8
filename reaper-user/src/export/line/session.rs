//! Lines about sessions: their start, their root, and their end with the sum of what was done.

use std::collections::BTreeSet;

use super::layout::{BAD, GOOD, Line, NOTE, Subject, WARN};
use super::memory::Memory;
use super::{Detail, subject};
use crate::export::record::{EventBody, FreedMemory, ProcessRef, ResumedRoot, SessionRef};
use crate::export::text::{
    ProcessCounts, counted, exit_status_text, freed, printable, remaining_sessions,
};
use crate::export::words::reason_text;
use reaper_model::event::{ExitStatus, ProcessKey};
use reaper_model::ruleset::SessionKind;

/// Maximum number of characters of a command that left something running.
const LEFT_CHARACTERS: usize = 48;

/// Returns the line of a record about a session. Returns `None` for any other record, or if it is not shown.
pub(super) fn line(body: &EventBody, detail: Detail, memory: &mut Memory) -> Option<Line> {
    let shows_steps = detail >= Detail::Steps;
    Some(match body {
        EventBody::SessionOpen {
            process,
            kind,
            outer,
            starter,
            ..
        } => {
            memory.mention(process, None);
            Line {
                style: GOOD,
                event: kind.name(),
                subject: Some(subject(process, memory)),
                detail: origin(*kind, outer.as_ref(), starter.as_ref()),
                more: Vec::new(),
            }
        }
        EventBody::SessionResume {
            session,
            root,
            members,
            root_exited,
        } => resumed(session, root, *members, *root_exited, memory),
        EventBody::SessionRootExit {
            session,
            kind,
            root,
            exit_status,
            members,
        } if shows_steps => Line {
            style: WARN,
            event: match kind {
                SessionKind::Agent => "agent exit",
                SessionKind::Server => "server exit",
            },
            subject: Some(root_subject(session, *root, String::new())),
            detail: format!("{}, {members} left behind", exit_status_text(*exit_status)),
            more: Vec::new(),
        },
        EventBody::SessionRelaunch {
            process, old_root, ..
        } if shows_steps => Line {
            style: NOTE,
            event: "relaunched",
            subject: Some(subject(process, memory)),
            detail: format!("replaces the root {}", old_root.pid),
            more: Vec::new(),
        },
        EventBody::SessionClose {
            session,
            failed,
            lost_before,
            ..
        } => {
            let open = memory.close(session.first_root);
            let is_good = *failed == 0 && *lost_before == 0;
            Line {
                style: if is_good { GOOD } else { BAD },
                event: "closed",
                detail: sum(body, open.exit_status, detail) + &left_running(&open.left_running),
                more: Vec::new(),
                subject: Some(root_subject(session, session.first_root, open.command)),
            }
        }
        _ => return None,
    })
}

/// Returns the line of a boundary.
pub(super) fn boundary(body: &EventBody, process: &ProcessRef) -> Line {
    let rule = match body {
        EventBody::Boundary { rule, .. } => rule,
        _ => "",
    };
    Line {
        style: NOTE,
        event: "boundary",
        subject: Some(subject(process, &Memory::default())),
        detail: format!("rule {rule}: membership ends here"),
        more: Vec::new(),
    }
}

fn root_subject(session: &SessionRef, root: ProcessKey, command: String) -> Subject {
    Subject {
        agent: session.agent.to_string(),
        pid: root.pid,
        command,
    }
}

/// Describes where a session was started, if that was in another one.
fn origin(kind: SessionKind, outer: Option<&SessionRef>, starter: Option<&SessionRef>) -> String {
    let name = |session: &SessionRef| format!("{} ({})", session.agent, session.first_root.pid);
    match (outer, starter, kind) {
        (Some(outer), _, _) => format!("inside {}", name(outer)),
        (None, Some(starter), SessionKind::Server) => {
            format!("started by {}, outlives it", name(starter))
        }
        (None, Some(server), SessionKind::Agent) => {
            format!("below the server {}, outlives it", name(server))
        }
        (None, None, _) => String::new(),
    }
}

fn resumed(
    session: &SessionRef,
    root: &ResumedRoot,
    members: usize,
    root_exited: bool,
    memory: &Memory,
) -> Line {
    let subject = match root {
        ResumedRoot::Alive(process) => subject(process, memory),
        ResumedRoot::Exited { key, .. } => root_subject(session, *key, String::new()),
    };
    let members = counted(members as u64, "member", "members");
    let exited = if root_exited {
        ", the agent exited"
    } else {
        ""
    };
    Line {
        style: GOOD,
        event: "resumed",
        subject: Some(subject),
        detail: format!("{members}{exited}"),
        more: Vec::new(),
    }
}

/// Sums up a closed session: how its root exited, and what became of its members.
fn sum(body: &EventBody, exit_status: Option<ExitStatus>, detail: Detail) -> String {
    let EventBody::SessionClose {
        reaped,
        kept,
        kept_reasons,
        nested,
        failed,
        would_have_reaped,
        memory,
        lost_before,
        ..
    } = body
    else {
        return String::new();
    };
    let reasons: Vec<&str> = kept_reasons.iter().map(|it| reason_text(it)).collect();
    let processes = ProcessCounts {
        reaped: u64::from(*reaped),
        would_have_reaped: u64::from(*would_have_reaped),
        kept: u64::from(*kept),
        failed: u64::from(*failed),
    };
    let how = exit_status.map(|status| match status {
        ExitStatus::Signalled { .. } => format!("killed by {}: ", exit_status_text(status)),
        _ => format!("{}: ", exit_status_text(status)),
    });
    let mut text = how.unwrap_or_default();
    text += &processes.text(&reasons.join(", "));
    text += &freed(&shown_memory(memory, detail));
    text += &remaining_sessions(nested);
    if *lost_before > 0 {
        text += &format!("; {lost_before} events were lost, so processes may be left");
    }
    text
}

/// Returns text such as `; may still run: docker run -d nginx`; empty for no commands.
fn left_running(commands: &BTreeSet<String>) -> String {
    let commands = commands.iter().map(|it| printable(it, LEFT_CHARACTERS));
    let commands: Vec<String> = commands.collect();
    match commands[..] {
        [] => String::new(),
        _ => format!("; may still run: {}", commands.join(", ")),
    }
}

/// Returns the memory to show: the number of unmeasured processes is a detail.
pub(super) fn shown_memory(memory: &FreedMemory, detail: Detail) -> FreedMemory {
    let unmeasured = match detail {
        Detail::Summary => 0,
        Detail::Steps | Detail::Lifecycle => memory.unmeasured,
    };
    FreedMemory {
        unmeasured,
        ..*memory
    }
}
