//! The stream for people: time, agent, what happened, pid, command, and what there is to say of it.

use std::fmt::Write as _;
use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use bytesize::ByteSize;

use super::clock::time_of_day;
use super::leftover::leftover_text;
use super::names::FailureName;
use super::record::{
    EventBody, EventRecord, KeepDuration, Lifecycle, ProcessRef, Resumed, ResumedRoot, SessionRef,
};
use super::text::{
    by, command, duration, exit_status_text, freed, held, more, printable, process_label, rest,
};
use super::words::{evidence_ref_text, reason_text};
use crate::reap::{ReapOutcome, ReleaseReason, SentBy};
use reaper_model::event::ProcessKey;
use reaper_model::leftover::LeftoverVerdict;
use reaper_model::ruleset::SessionKind;

/// Characters of a directory that are shown.
const PATH_MAX: usize = 128;
/// Characters of the reason for a mode that are shown.
const REASON_MAX: usize = 512;

const PLAIN: Style = Style::new();
const DIM: Style = Style::new().dimmed();
const GOOD: Style = AnsiColor::Green.on_default();
const NOTE: Style = AnsiColor::Cyan.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();

/// Whether a record is a line for people: an orphan is told of once its adopter is known, and what
/// every process does only where all of it was asked for.
pub fn is_shown(record: &EventRecord, lifecycle: bool) -> bool {
    match record.body {
        EventBody::Lifecycle { .. } => lifecycle,
        EventBody::Orphan { .. } => false,
        _ => true,
    }
}

/// Writes one record as one line; colours are the writer's to take out.
pub fn write(out: &mut impl Write, record: &EventRecord) -> io::Result<()> {
    let time = time_of_day(record.time);
    let (style, event, subject, detail) = words(&record.body);
    // Names of rules and agents, scopes and reasons: a line break in one would forge a line.
    let detail = printable(&detail, usize::MAX);
    let (agent, pid, command) = match subject {
        LineSubject::None => {
            return writeln!(out, "{DIM}{time}{DIM:#}  {style}{event}{style:#}  {detail}");
        }
        LineSubject::Root(agent, root) => (agent, root.pid, String::new()),
        LineSubject::Process(process) => (
            process.session.as_ref().map_or("-", |s| &s.agent),
            process.key.pid,
            command(process),
        ),
    };
    let agent = printable(agent, 16);
    write!(
        out,
        "{DIM}{time}{DIM:#}  {agent:<14} {style}{event:<10}{style:#} {pid:>7}"
    )?;
    match (command.is_empty(), detail.is_empty()) {
        (true, _) => writeln!(out, "  {detail}"),
        (false, true) => writeln!(out, "  {command}"),
        (false, false) => writeln!(out, "  {command}  {DIM}{detail}{DIM:#}"),
    }
}

/// Whom a line is about.
enum LineSubject<'a> {
    None,
    Root(&'a str, ProcessKey),
    Process(&'a ProcessRef),
}

fn words(body: &EventBody) -> (Style, &'static str, LineSubject<'_>, String) {
    use LineSubject::{None as Nobody, Process, Root};
    match body {
        EventBody::Ready {
            mode,
            mode_reason,
            source,
            processes,
            scope,
            resumed,
            pin_dir: pinned,
            ..
        } => {
            let scope = if scope.is_empty() {
                "the whole host".to_owned()
            } else {
                scope.join(", ")
            };
            let reason = mode_reason.as_ref();
            let reason = reason.map(|reason| format!(" ({})", printable(reason, REASON_MAX)));
            let mut detail = format!(
                "watching {scope} through {source}, {processes} processes found, mode {mode}{}; ",
                reason.unwrap_or_default()
            );
            detail += &match pinned {
                Some(directory) => format!("pinned in {}", printable(directory, PATH_MAX)),
                None => "tracking ends with this program".into(),
            };
            if let Some(Resumed {
                sessions,
                backlog,
                lost,
            }) = *resumed
            {
                let backlog = ByteSize::b(backlog);
                let _ = write!(
                    detail,
                    "; taken up: {sessions} sessions, {backlog} of events, {lost} lost"
                );
            }
            (GOOD, "ready", Nobody, detail)
        }
        EventBody::Lifecycle { what, process, .. } => match what {
            Lifecycle::Fork => match &process.evidence {
                Some(grounds) => {
                    let by = format!("inferred by {}", evidence_ref_text(grounds));
                    (DIM, "fork", Process(process), by)
                }
                None => (DIM, "fork", Process(process), by(process.parent)),
            },
            Lifecycle::Exec => (DIM, "exec", Process(process), String::new()),
            Lifecycle::Move => {
                let unit = "in another cgroup".to_owned();
                (DIM, "migrate", Process(process), unit)
            }
            Lifecycle::Exit {
                exit_status: how, ..
            } => (DIM, "exit", Process(process), exit_status_text(*how)),
        },
        EventBody::Orphan { process, .. } => (NOTE, "orphan", Process(process), String::new()),
        EventBody::Reparent {
            process,
            old_parent,
            old_parent_comm,
            adopter,
            namespace_ending,
            ..
        } => {
            let parent = process_label(*old_parent, old_parent_comm);
            let next = match namespace_ending {
                true => "its namespace is ending".to_owned(),
                false => {
                    let (key, comm) = match adopter {
                        Some(adopter) => (Some(adopter.key), &*adopter.comm),
                        None => (None, &[][..]),
                    };
                    format!("{} adopted it", process_label(key, comm))
                }
            };
            let detail = format!("{parent} exited, {next}");
            (NOTE, "orphan", Process(process), detail)
        }
        EventBody::SessionOpen {
            process,
            kind,
            outer,
            starter,
            ..
        } => {
            let name =
                |session: &SessionRef| format!("{} ({})", session.agent, session.first_root.pid);
            let detail = match (outer, starter, kind) {
                (Some(outer), _, _) => format!("inside {}", name(outer)),
                (None, Some(starter), SessionKind::Server) => {
                    format!("started by {}, lives on after it", name(starter))
                }
                (None, Some(server), SessionKind::Agent) => {
                    format!("below the server {}, lives on after it", name(server))
                }
                (None, None, _) => String::new(),
            };
            (GOOD, kind.name(), Process(process), detail)
        }
        EventBody::SessionResume {
            session,
            root,
            members,
            root_exited: root_gone,
        } => {
            let subject = match root {
                ResumedRoot::Alive(process) => Process(process),
                ResumedRoot::Exited { key, .. } => Root(&session.agent, *key),
            };
            let gone = if *root_gone {
                ", the agent is gone"
            } else {
                ""
            };
            (GOOD, "resumed", subject, format!("{members} members{gone}"))
        }
        EventBody::SessionRootExit {
            session,
            kind,
            root,
            exit_status: how,
            members,
        } => {
            let event = match kind {
                SessionKind::Agent => "agent exit",
                SessionKind::Server => "server exit",
            };
            let detail = format!("{}, {members} left behind", exit_status_text(*how));
            (WARN, event, Root(&session.agent, *root), detail)
        }
        EventBody::SessionRelaunch {
            process, old_root, ..
        } => (
            NOTE,
            "relaunched",
            Process(process),
            format!("{} handed over to it", old_root.pid),
        ),
        EventBody::SessionClose {
            session,
            reaped,
            kept,
            kept_reasons,
            nested,
            failed,
            memory,
            lost_before,
            ..
        } => {
            let good = *failed == 0 && *lost_before == 0;
            let style = if good { GOOD } else { BAD };
            let why = match kept_reasons.as_slice() {
                [] => String::new(),
                reasons => {
                    let words: Vec<&str> =
                        reasons.iter().map(|reason| reason_text(reason)).collect();
                    format!(" ({})", words.join(", "))
                }
            };
            let mut detail = format!("{reaped} reaped, {kept} kept{why}, {failed} failed");
            detail += &freed(memory);
            detail += &rest(nested);
            if *lost_before > 0 {
                detail +=
                    &format!("; {lost_before} events were lost meanwhile, something may be left");
            }
            (
                style,
                "closed",
                Root(&session.agent, session.first_root),
                detail,
            )
        }
        EventBody::Boundary { process, rule, .. } => (
            NOTE,
            "boundary",
            Process(process),
            format!("{rule}: not ours from here on"),
        ),
        EventBody::Decision {
            process,
            decision: names,
        } => {
            let style = if names.verdict == "reap" { WARN } else { PLAIN };
            let rule = names
                .rule
                .as_ref()
                .map(|rule| format!(" ({rule})"))
                .unwrap_or_default();
            let by = process.evidence.as_ref().map(evidence_ref_text);
            let by = by.map(|by| format!(", by {by}")).unwrap_or_default();
            let held = names.memory.map(held).unwrap_or_default();
            (
                style,
                names.verdict,
                Process(process),
                format!("{}{rule}{by}{held}", reason_text(names.reason)),
            )
        }
        EventBody::Leftover {
            process,
            leftover: stray,
        } => {
            let is_due = stray.verdict == LeftoverVerdict::Reap;
            let style = if is_due { WARN } else { PLAIN };
            let agent = printable(&stray.agent, 32);
            let why = printable(&leftover_text(stray), 200);
            (
                style,
                stray.verdict.name(),
                Process(process),
                format!("left behind by {agent}: {why}"),
            )
        }
        EventBody::Keep {
            process,
            by,
            kept,
            processes,
        } => {
            let (event, what) = match kept {
                None => ("unkeep", "no longer kept".into()),
                Some(KeepDuration { until, tree }) => {
                    let tree = if *tree { " with all below it" } else { "" };
                    let end = if until.is_some() { " for a time" } else { "" };
                    ("keep", format!("kept{tree}{end}"))
                }
            };
            let detail = format!("{what}, by user {by}{}", more(*processes));
            (NOTE, event, Process(process), detail)
        }
        EventBody::Signal { process, sent } => {
            let from = (sent.by == SentBy::Kernel).then(|| "from the kernel".to_owned());
            let after = sent.latency.map(|ns| format!("after {}", duration(ns)));
            let detail: Vec<_> = from.into_iter().chain(after).collect();
            (
                WARN,
                sent.signal.as_str(),
                Process(process),
                detail.join(", "),
            )
        }
        EventBody::Outcome {
            process,
            outcome,
            duration: took,
            memory,
            ..
        } => {
            let after = took
                .map(|ns| format!(", {} after the first signal", duration(ns)))
                .unwrap_or_default();
            match outcome {
                ReapOutcome::Exited(how) => {
                    let memory = memory.map(|memory| freed(&memory.into()));
                    let detail = exit_status_text(*how) + &after + &memory.unwrap_or_default();
                    (GOOD, "ended", Process(process), detail)
                }
                ReapOutcome::Failed(why) => (
                    BAD,
                    "FAILED",
                    Process(process),
                    format!("{}{after}", FailureName(why)),
                ),
                ReapOutcome::NotSent(why) => {
                    let (style, event, detail) = match why {
                        ReleaseReason::UidUnreadable => {
                            (NOTE, "not sent", "what it is cannot be read")
                        }
                        ReleaseReason::ObserveMode => (DIM, "observed", ""),
                        ReleaseReason::AlreadyExited => (DIM, "gone", "before a signal was sent"),
                        ReleaseReason::NotDue(why) => (NOTE, "not sent", why.name()),
                        ReleaseReason::PidReused => {
                            (NOTE, "not sent", "its pid belongs to another process now")
                        }
                    };
                    (style, event, Process(process), detail.into())
                }
            }
        }
        EventBody::GapOpen {
            reason,
            source,
            total,
            ..
        } => {
            let what = match *reason {
                "restart" => format!("nobody read meanwhile, {total} events lost"),
                "member_map_full" => format!("{total} processes without room in the kernel's map"),
                "record_malformed" => format!("{total} events unreadable"),
                "source_failed" => format!("events come through {source} from now on"),
                _ => format!("{total} events lost"),
            };
            let style = match *reason {
                "source_failed" => BAD,
                _ if *total > 0 => BAD,
                _ => NOTE,
            };
            let detail = format!("{what}: nothing new is decided until it is made up for");
            (style, "gap", Nobody, detail)
        }
        EventBody::GapClose {
            processes_recovered: found,
            exits_recovered: gone,
            duration: took,
            ..
        } => (
            GOOD,
            "gap closed",
            Nobody,
            format!(
                "after {}: {found} processes and {gone} ends found that nobody had told of",
                duration(*took)
            ),
        ),
        EventBody::MemberMapFull {
            count,
            capacity: room,
        } => (
            BAD,
            "map full",
            Nobody,
            format!(
                "{count} processes beyond the {room} of max_members: followed only while this service runs"
            ),
        ),
        EventBody::CaughtUp {
            records,
            duration: took,
        } => (
            GOOD,
            "caught up",
            Nobody,
            format!("{records} events in {}", duration(*took)),
        ),
        EventBody::Dropped { by, count } => {
            let what = match *by {
                "journal" => "records of the journal: it is not written fast enough",
                _ => "lines of this stream: its reader is too slow",
            };
            (BAD, "dropped", Nobody, format!("{count} {what}"))
        }
        EventBody::ConfigReload { done, message } => {
            let (style, what) = if *done {
                (GOOD, "config")
            } else {
                (BAD, "config rejected")
            };
            (style, what, Nobody, message.replace('\n', "; "))
        }
        EventBody::Malformed { count, reason } => (
            BAD,
            "malformed",
            Nobody,
            format!("{count} skipped: {reason}"),
        ),
        EventBody::Summary {
            count,
            reason,
            pin_dir: armed,
        } => {
            let mut detail = format!(
                "{reason}: {} sessions, {} reaped, {} kept, {} failed; {} signals sent, {} events read, {} lost",
                count.sessions,
                count.reaped,
                count.kept,
                count.failed,
                count.signals,
                count.events,
                count.lost
            );
            detail += &freed(&count.memory);
            if let Some(directory) = armed {
                let directory = printable(directory, PATH_MAX);
                let _ = write!(detail, "; left armed in {directory}");
            }
            (GOOD, "stopped", Nobody, detail)
        }
    }
}
