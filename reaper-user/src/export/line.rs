//! The stream for people. The columns of a line are time, agent, event, pid, command and detail.

use std::fmt::Write as _;
use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use super::clock::time_of_day;
use super::leftover::leftover_text;
use super::names::FailureName;
use super::record::{
    EventBody, EventRecord, KeepDuration, Lifecycle, ProcessRef, Resumed, ResumedRoot, SessionRef,
};
use super::text::{
    command, duration, exit_status_text, forked_by, freed, printable, process_count, process_label,
    remaining_sessions, size, tree_memory,
};
use super::words::{evidence_ref_text, outcome_reason_text, reason_text};
use crate::reap::{ReapOutcome, ReleaseReason, SentBy};
use reaper_model::event::ProcessKey;
use reaper_model::leftover::LeftoverVerdict;
use reaper_model::ruleset::SessionKind;

/// Maximum number of characters of a directory.
const PATH_MAX: usize = 128;
/// Maximum number of characters of the reason for a mode.
const REASON_MAX: usize = 512;

/// Separator of rows: the next one stands below the event.
const NEXT_ROW: &str = "\n              ";

const PLAIN: Style = Style::new();
const DIM: Style = Style::new().dimmed();
const GOOD: Style = AnsiColor::Green.on_default();
const NOTE: Style = AnsiColor::Cyan.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();

/// Returns whether a record is shown to people.
///
/// Lifecycle records are shown only on request. An orphan is shown with its `reparent` record, which names the adopter.
pub fn is_shown(record: &EventRecord, lifecycle: bool) -> bool {
    match record.body {
        EventBody::Lifecycle { .. } => lifecycle,
        EventBody::Orphan { .. } => false,
        _ => true,
    }
}

/// Writes a record as one line with colours, which the writer may remove. `ready` has several rows.
pub fn write(out: &mut impl Write, record: &EventRecord) -> io::Result<()> {
    let time = time_of_day(record.boot_ns);
    let (style, event, subject, detail) = columns(&record.body);
    // A line break in the name of a rule or agent, a scope or a reason would forge a line.
    let detail = printable(&detail, usize::MAX);
    let (agent, pid, command) = match subject {
        LineSubject::None => {
            return writeln!(out, "{DIM}{time}{DIM:#}  {style}{event}{style:#}  {detail}");
        }
        LineSubject::Rows(rows) => {
            write!(out, "{DIM}{time}{DIM:#}  {style}{event}{style:#}  ")?;
            let rows = rows.iter().map(|row| printable(row, usize::MAX));
            let rows: Vec<String> = rows.collect();
            return writeln!(out, "{}", rows.join(NEXT_ROW));
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

/// Subject of a line.
enum LineSubject<'a> {
    None,
    /// None, and the detail has several rows.
    Rows(Vec<String>),
    /// Root of a session, which may have exited, after the name of its agent.
    Root(&'a str, ProcessKey),
    Process(&'a ProcessRef),
}

/// Returns the columns of a record: style and word of the event, its subject, and the detail, which is not escaped.
fn columns(body: &EventBody) -> (Style, &'static str, LineSubject<'_>, String) {
    use LineSubject::{None as NoSubject, Process, Root, Rows};
    match body {
        EventBody::Ready {
            mode,
            mode_reason,
            source,
            processes,
            config,
            socket,
            next_command,
            scope,
            resumed,
            pin_dir,
            ..
        } => {
            let mut rows = vec![format!("mode {mode}, config {config}")];
            let scope = match scope.as_slice() {
                [] => "the whole host".to_owned(),
                names => names.join(", "),
            };
            rows.push(format!(
                "watching {scope} through {source}, {processes} processes found"
            ));
            let reason = mode_reason.as_ref();
            let reason = reason.map(|reason| printable(reason, REASON_MAX));
            rows.extend(reason.map(|reason| format!("only observes: {reason}")));
            rows.push(match pin_dir {
                Some(directory) => format!("pinned in {}", printable(directory, PATH_MAX)),
                None => "tracking ends with this program".into(),
            });
            if let Some(Resumed {
                sessions,
                backlog,
                lost,
            }) = *resumed
            {
                let backlog = size(backlog);
                rows.push(format!(
                    "resumed {sessions} sessions and {backlog} of queued events, {lost} events lost"
                ));
            }
            rows.extend(socket.iter().map(|socket| format!("socket {socket}")));
            rows.extend(next_command.iter().map(|next| format!("next: {next}")));
            (GOOD, "ready", Rows(rows), String::new())
        }
        EventBody::Lifecycle { event, process, .. } => match event {
            Lifecycle::Fork => match &process.evidence {
                Some(evidence) => {
                    let detail = format!("inferred by {}", evidence_ref_text(evidence));
                    (DIM, "fork", Process(process), detail)
                }
                None => (DIM, "fork", Process(process), forked_by(process.parent)),
            },
            Lifecycle::Exec => (DIM, "exec", Process(process), String::new()),
            Lifecycle::Move => {
                let detail = "in another cgroup".to_owned();
                (DIM, "migrate", Process(process), detail)
            }
            Lifecycle::Exit { exit_status, .. } => (
                DIM,
                "exit",
                Process(process),
                exit_status_text(*exit_status),
            ),
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
                    format!("started by {}, outlives it", name(starter))
                }
                (None, Some(server), SessionKind::Agent) => {
                    format!("below the server {}, outlives it", name(server))
                }
                (None, None, _) => String::new(),
            };
            (GOOD, kind.name(), Process(process), detail)
        }
        EventBody::SessionResume {
            session,
            root,
            members,
            root_exited,
        } => {
            let subject = match root {
                ResumedRoot::Alive(process) => Process(process),
                ResumedRoot::Exited { key, .. } => Root(&session.agent, *key),
            };
            let root_state = if *root_exited {
                ", the agent exited"
            } else {
                ""
            };
            (
                GOOD,
                "resumed",
                subject,
                format!("{members} members{root_state}"),
            )
        }
        EventBody::SessionRootExit {
            session,
            kind,
            root,
            exit_status,
            members,
        } => {
            let event = match kind {
                SessionKind::Agent => "agent exit",
                SessionKind::Server => "server exit",
            };
            let detail = format!("{}, {members} left behind", exit_status_text(*exit_status));
            (WARN, event, Root(&session.agent, *root), detail)
        }
        EventBody::SessionRelaunch {
            process, old_root, ..
        } => (
            NOTE,
            "relaunched",
            Process(process),
            format!("replaces the root {}", old_root.pid),
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
            let reasons = match kept_reasons.as_slice() {
                [] => String::new(),
                reasons => {
                    let words: Vec<&str> =
                        reasons.iter().map(|reason| reason_text(reason)).collect();
                    format!(" ({})", words.join(", "))
                }
            };
            let mut detail = format!("{reaped} reaped, {kept} kept{reasons}, {failed} failed");
            detail += &freed(memory);
            detail += &remaining_sessions(nested);
            if *lost_before > 0 {
                detail += &format!("; {lost_before} events were lost, so processes may be left");
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
            format!("rule {rule}: membership ends here"),
        ),
        EventBody::Decision { process, decision } => {
            let is_due = decision.verdict == "reap";
            let style = if is_due { WARN } else { PLAIN };
            let rule = decision
                .rule
                .as_ref()
                .map(|rule| format!(" ({rule})"))
                .unwrap_or_default();
            let evidence = process.evidence.as_ref().map(evidence_ref_text);
            let evidence = evidence.map(|evidence| format!(", by {evidence}"));
            let evidence = evidence.unwrap_or_default();
            let memory = decision.memory.map(tree_memory).unwrap_or_default();
            let reason = reason_text(decision.reason);
            (
                style,
                decision.verdict,
                Process(process),
                format!("{reason}{rule}{evidence}{memory}"),
            )
        }
        EventBody::Leftover { process, leftover } => {
            let is_due = leftover.verdict == LeftoverVerdict::Reap;
            let style = if is_due { WARN } else { PLAIN };
            let agent = printable(&leftover.agent, 32);
            let reason = printable(&leftover_text(leftover), 200);
            (
                style,
                leftover.verdict.name(),
                Process(process),
                format!("left behind by {agent}: {reason}"),
            )
        }
        EventBody::Keep {
            process,
            by,
            kept,
            processes,
        } => {
            let (event, change) = match kept {
                None => ("unkeep", "no longer kept".into()),
                Some(KeepDuration { until, tree }) => {
                    let tree = if *tree { " with its descendants" } else { "" };
                    let end = if until.is_some() {
                        " for a limited time"
                    } else {
                        ""
                    };
                    ("keep", format!("kept{tree}{end}"))
                }
            };
            let detail = format!("{change}, by user {by}{}", process_count(*processes));
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
                ReapOutcome::Exited(status) => {
                    let memory = memory.map(|memory| freed(&memory.into()));
                    let detail = exit_status_text(*status) + &after + &memory.unwrap_or_default();
                    (GOOD, "ended", Process(process), detail)
                }
                ReapOutcome::Failed(failure) => (
                    BAD,
                    "FAILED",
                    Process(process),
                    outcome_reason_text(&FailureName(failure).to_string()) + &after,
                ),
                ReapOutcome::NotSent(reason) => {
                    let (style, event, detail) = match reason {
                        ReleaseReason::UidUnreadable => {
                            (NOTE, "not sent", "its user cannot be read")
                        }
                        ReleaseReason::ObserveMode => (DIM, "observed", ""),
                        ReleaseReason::AlreadyExited => (DIM, "gone", "before a signal was sent"),
                        ReleaseReason::NotDue(reason) => {
                            (NOTE, "not sent", reason_text(reason.name()))
                        }
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
            let cause = match *reason {
                "restart" => format!("no service was running, {total} events lost"),
                "member_map_full" => format!("{total} processes exceed the kernel map of members"),
                "record_malformed" => format!("{total} events unreadable"),
                "source_failed" => format!("the event source failed, {source} replaces it"),
                _ => format!("{total} events lost"),
            };
            let style = match *reason {
                "source_failed" => BAD,
                _ if *total > 0 => BAD,
                _ => NOTE,
            };
            let detail =
                format!("{cause}; new decisions wait until a scan has recovered what is missing");
            (style, "gap", NoSubject, detail)
        }
        EventBody::GapClose {
            processes_recovered: processes,
            exits_recovered: exits,
            duration: took,
            ..
        } => (
            GOOD,
            "gap closed",
            NoSubject,
            format!(
                "after {}: {processes} processes and {exits} exits recovered",
                duration(*took)
            ),
        ),
        EventBody::MemberMapFull { count, capacity } => (
            BAD,
            "map full",
            NoSubject,
            format!(
                "{count} processes exceed max_members ({capacity}); they are tracked only while this service runs"
            ),
        ),
        EventBody::CaughtUp {
            records,
            duration: took,
        } => (
            GOOD,
            "caught up",
            NoSubject,
            format!("{records} events in {}", duration(*took)),
        ),
        EventBody::Dropped { by, count } => {
            let cause = match *by {
                "journal" => "journal records: writing the journal is too slow",
                "file" => "lines of the JSON stream: its file could not be written",
                _ => "lines of this stream: its reader is too slow",
            };
            (BAD, "dropped", NoSubject, format!("{count} {cause}"))
        }
        EventBody::ConfigReload { applied, message } => {
            let (style, event) = if *applied {
                (GOOD, "config")
            } else {
                (BAD, "config rejected")
            };
            (style, event, NoSubject, message.replace('\n', "; "))
        }
        EventBody::Malformed { count, reason } => (
            BAD,
            "malformed",
            NoSubject,
            format!("{count} skipped: {reason}"),
        ),
        EventBody::Summary {
            count,
            reason,
            pin_dir,
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
            if let Some(directory) = pin_dir {
                let directory = printable(directory, PATH_MAX);
                let _ = write!(detail, "; the probes stay pinned in {directory}");
            }
            (GOOD, "stopped", NoSubject, detail)
        }
    }
}
