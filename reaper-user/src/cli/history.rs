//! `reaper history`: prints past sessions from the journal.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use clap::Args;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::unistd::geteuid;

use super::client::{BOLD, DIM, client};
use super::show::{count, fit, size, time as time_text, width};
use super::{Failure, ServiceArgs, time_with_unit};
use crate::api::History;
use crate::export::{
    self, ExitInfo, FreedMemory, duration, message, printable, reason_text, write_object,
};
use crate::journal::history::{
    HistoryError, HistoryOutcome, HistoryProcess, HistoryQuery, HistorySession, read,
};
use crate::journal::{DIRECTORY, path};

/// Longest command line or name, in characters.
const COMMAND_MAX: usize = 256;
/// Indentation of the lines about a session, in characters.
const INDENT: usize = 4;

const GOOD: Style = AnsiColor::Green.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();
const PLAIN: Style = Style::new();

#[derive(Args)]
pub(super) struct HistoryArgs {
    /// Show only sessions that were active in this time, such as `2h` or `30min`.
    #[arg(long, value_name = "TIME", value_parser = time_with_unit)]
    since: Option<Duration>,
    /// Show only sessions of this agent, as in `reaper agents`.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Show only the session with this id, or sessions whose id starts with it.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Print one JSON object per session.
    #[arg(long)]
    json: bool,
    /// Read this journal instead of that of the host's service.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Ask the service on this socket.
    ///
    /// Without it, the journal is read directly. The service is queried if you may not read the journal.
    #[arg(long, value_name = "PATH", conflicts_with = "file")]
    socket: Option<PathBuf>,
}

pub(super) fn run(args: HistoryArgs) -> Result<(), Failure> {
    let mut printer = Printer::new(export::stdout(), TimeZone::system(), args.json, width());
    let result = match &args.socket {
        Some(_) => query_service(&args, &mut printer),
        None => match read_journal(&args, &mut printer) {
            // Only root can read the host's journal; the service shows each user their own sessions.
            Err(HistoryError::Denied(path)) if args.file.is_none() => {
                query_service(&args, &mut printer).map_err(|failure| match failure {
                    Failure::NoService(why) => {
                        let path = path.display();
                        Failure::NoService(format!(
                            "cannot read the journal {path}: permission denied, and {why}; or run as root"
                        ))
                    }
                    other => other,
                })
            }
            Err(HistoryError::Callback(error)) => Err(Failure::stdout(error)),
            result => result.map_err(|error| anyhow::Error::from(error).into()),
        },
    };
    result?;
    let since = args.since;
    printer.finish(since).map_err(Failure::stdout)?;
    if printer.total.sessions == 0 && !args.json {
        let filters = [
            ("--since", since.is_some()),
            ("--agent", args.agent.is_some()),
            ("--session", args.session.is_some()),
        ];
        let given = filters.iter().filter(|(_, is_given)| *is_given);
        let given: Vec<_> = given.map(|(flag, _)| *flag).collect();
        let own = if geteuid().is_root() { "" } else { " of yours" };
        match given.is_empty() {
            true => message!("the journal has no sessions{own} yet"),
            false => message!(
                "no session{own} in the journal matches {}",
                given.join(" and ")
            ),
        }
    }
    Ok(())
}

/// Prints the sessions from the journal file.
fn read_journal(args: &HistoryArgs, printer: &mut Printer<impl Write>) -> Result<(), HistoryError> {
    let file = args.file.clone();
    let file = file.unwrap_or_else(|| path(DIRECTORY.as_ref(), None));
    // A time before the range of timestamps means no limit.
    let since = args.since.map(|since| Timestamp::now().checked_sub(since));
    let uid = geteuid();
    let query = HistoryQuery {
        since: since.and_then(Result::ok),
        agent: args.agent.clone(),
        session: args.session.clone(),
        uid: (!uid.is_root()).then_some(uid.as_raw()),
    };
    read(&file, &query, |session| printer.session(&session))
}

/// Prints the sessions that the service reads from its journal.
fn query_service(args: &HistoryArgs, printer: &mut Printer<impl Write>) -> Result<(), Failure> {
    let mut query = form_urlencoded::Serializer::new(String::new());
    if let Some(since) = args.since {
        query.append_pair("since_s", &since.as_secs().to_string());
    }
    for (name, value) in [("agent", &args.agent), ("session", &args.session)] {
        if let Some(value) = value {
            query.append_pair(name, value);
        }
    }
    let service = ServiceArgs {
        socket: args.socket.clone(),
        json: args.json,
    };
    let response = client(&service).get(&format!("/v1/history?{}", query.finish()))?;
    let history: History = response.read()?;
    for session in &history.sessions {
        printer.session(session).map_err(Failure::stdout)?;
    }
    if history.omitted > 0 {
        let n = history.omitted;
        message!(
            "reaper: {n} older sessions are left out, as the answer of the service is limited; narrow it with --since, or \
             read the journal with sudo"
        );
    }
    Ok(())
}

/// Sums over all printed sessions.
#[derive(Default)]
struct Total {
    sessions: u64,
    reaped: u64,
    kept: u64,
    failed: u64,
    bytes: u64,
}

/// Prints sessions as JSON at once, or as text with a summary before it.
struct Printer<W> {
    out: W,
    zone: TimeZone,
    json: bool,
    width: Option<usize>,
    /// Text of the sessions so far.
    text: Vec<u8>,
    total: Total,
}

impl<W: Write> Printer<W> {
    fn new(out: W, zone: TimeZone, json: bool, width: Option<usize>) -> Printer<W> {
        Printer {
            out,
            zone,
            json,
            width,
            text: Vec::new(),
            total: Total::default(),
        }
    }

    /// Adds a session to the total. Writes it at once as JSON, or adds it to the text.
    fn session(&mut self, session: &HistorySession) -> io::Result<()> {
        let total = &mut self.total;
        total.sessions += 1;
        total.reaped += u64::from(session.reaped);
        total.kept += u64::from(session.kept);
        total.failed += u64::from(session.failed);
        total.bytes = total.bytes.saturating_add(freed_bytes(&session.memory));
        if self.json {
            return write_object(&mut self.out, session);
        }
        writeln!(self.text)?;
        write_session(&mut self.text, session, &self.zone, self.width)
    }

    /// Writes the summary and the text, if there is any, and flushes. `since` is the time span in the summary.
    fn finish(&mut self, since: Option<Duration>) -> io::Result<()> {
        if !self.text.is_empty() {
            let Total {
                sessions,
                reaped,
                kept,
                failed,
                bytes,
            } = self.total;
            let sessions = count(sessions, "session", "sessions");
            let since = since.map(|since| format!(" in the last {}", time_text(since.as_secs())));
            let since = since.unwrap_or_default();
            let reaped = count(reaped, "process", "processes");
            writeln!(
                self.out,
                "{BOLD}{sessions}{since}: {reaped} reaped, {kept} kept, {failed} failed, {} freed{BOLD:#}",
                size(bytes)
            )?;
            self.out.write_all(&self.text)?;
        }
        self.out.flush()
    }
}

fn freed_bytes(memory: &FreedMemory) -> u64 {
    memory.rss.saturating_add(memory.swap)
}

/// Writes one session as text, with times in `zone`. Fits command lines into `width` columns, if it is given.
fn write_session(
    out: &mut impl Write,
    session: &HistorySession,
    zone: &TimeZone,
    width: Option<usize>,
) -> io::Result<()> {
    let clock =
        |time: Timestamp, format: &str| time.to_zoned(zone.clone()).strftime(format).to_string();
    let at = |time: Timestamp| {
        let day = |time| clock(time, "%Y-%m-%d");
        let same = day(time) == day(session.opened_at);
        clock(
            time,
            if same {
                "%H:%M:%S"
            } else {
                "%Y-%m-%d %H:%M:%S"
            },
        )
    };
    let user = session.uid.map(|uid| format!(", uid {uid}"));
    let outer = session.outer_session_id.as_ref();
    let outer = outer.map(|outer| format!(", inside {}", printable(outer, COMMAND_MAX)));
    writeln!(
        out,
        "{DIM}{}{DIM:#}  {BOLD}{}{BOLD:#}  {}{}{}",
        clock(session.opened_at, "%Y-%m-%d %H:%M:%S"),
        printable(&session.agent, 32),
        printable(&session.name, COMMAND_MAX),
        user.unwrap_or_default(),
        outer.unwrap_or_default(),
    )?;
    if !session.args.is_empty() {
        let command = command(&session.args, "");
        let command = fit(&command, INDENT, COMMAND_MAX, width);
        writeln!(out, "{:INDENT$}{command}", "")?;
    }
    write!(out, "{:INDENT$}", "")?;
    match session.root_exited_at {
        Some(exited) => {
            let lasted = exited.duration_since(session.opened_at);
            let lasted = lasted.try_into().map_or_else(|_| String::new(), span);
            let how = how(&session.exit);
            write!(out, "exited at {} after {lasted}: {how}", at(exited))?;
        }
        None => write!(out, "still running, or its exit was not observed")?,
    }
    match session.closed_at {
        Some(closed) => writeln!(out, "; closed at {}", at(closed))?,
        None if session.root_exited_at.is_some() => writeln!(out, "; not closed")?,
        None => writeln!(out)?,
    }
    let style = match (session.failed, session.lost_before) {
        (0, 0) if session.closed_at.is_some() => GOOD,
        (0, 0) => PLAIN,
        _ => BAD,
    };
    if session.closed_at.is_some() {
        writeln!(out, "{:INDENT$}{style}{}{style:#}", "", sum(session))?;
    }
    session
        .processes
        .iter()
        .try_for_each(|process| write_process(out, process, &at, width))
}

/// Returns the counters of a session.
fn sum(session: &HistorySession) -> String {
    let HistorySession {
        reaped,
        kept,
        failed,
        memory,
        lost_before,
        ..
    } = session;
    let mut text = format!("{reaped} reaped, {kept} kept, {failed} failed");
    let bytes = freed_bytes(memory);
    if bytes > 0 {
        let _ = write!(text, ", {} freed", size(bytes));
    }
    if memory.unmeasured > 0 {
        let n = memory.unmeasured;
        let _ = write!(text, ", {n} exited before their memory could be read");
    }
    if *lost_before > 0 {
        let _ = write!(text, "; {lost_before} events were lost in this time");
    }
    text
}

/// Writes a process with its decisions and outcomes, in the order of time.
fn write_process(
    out: &mut impl Write,
    process: &HistoryProcess,
    at: &impl Fn(Timestamp) -> String,
    width: Option<usize>,
) -> io::Result<()> {
    let pid = process.pid;
    let command = command(&process.args, &process.comm);
    let command = fit(&command, INDENT + 9, COMMAND_MAX, width);
    writeln!(out, "{:INDENT$}{pid:>7}  {command}", "")?;
    let decisions = process.decisions.iter().map(|decision| {
        let style = match decision.decision.as_str() {
            "reap" => WARN,
            _ => PLAIN,
        };
        let rule = decision.rule.as_ref().map(|rule| format!(" ({rule})"));
        let why = reason_text(&decision.reason).to_owned() + &rule.unwrap_or_default();
        (decision.time, style, decision.decision.clone(), why)
    });
    let outcomes = process.outcomes.iter().map(|outcome| {
        let style = match outcome.outcome.as_str() {
            "ended" => GOOD,
            "failed" => BAD,
            _ => PLAIN,
        };
        let details = outcome_details(outcome);
        (outcome.time, style, outcome.outcome.clone(), details)
    });
    let mut lines: Vec<_> = decisions.chain(outcomes).collect();
    // The sort is stable: an outcome stays behind a decision of the same time.
    lines.sort_by_key(|(time, ..)| *time);
    for (time, style, word, why) in &lines {
        let time = at(*time);
        let word = printable(word, 8);
        let why = fit(why, INDENT + 21 + time.len(), COMMAND_MAX, width);
        writeln!(
            out,
            "{:INDENT$}{:>7}  {DIM}{time}{DIM:#}  {style}{word:<8}{style:#}  {why}",
            "", ""
        )?;
    }
    Ok(())
}

/// Returns how a reaped process exited, or why it did not.
fn outcome_details(outcome: &HistoryOutcome) -> String {
    let mut text = match (outcome.outcome.as_str(), &outcome.reason) {
        (_, Some(reason)) => printable(reason, COMMAND_MAX),
        _ => how(&outcome.exit),
    };
    if let Some(ns) = outcome.duration_ns {
        let _ = write!(text, ", {} after the first signal", duration(ns));
    }
    let rss = outcome.rss.unwrap_or(0);
    let memory = rss.saturating_add(outcome.swap.unwrap_or(0));
    if memory > 0 {
        let _ = write!(text, ", {} freed", size(memory));
    }
    text
}

fn how(exit: &ExitInfo) -> String {
    match exit {
        ExitInfo {
            signal: Some(signal),
            ..
        } => printable(signal, 16),
        ExitInfo {
            code: Some(code), ..
        } => format!("exit {code}"),
        _ => "unknown exit status".into(),
    }
}

fn command(args: &[String], comm: &str) -> String {
    let line = args.join(" ");
    if line.is_empty() && !comm.is_empty() {
        format!("[{comm}]")
    } else {
        line
    }
}

/// Formats a time span: with its largest unit from a minute on, more precisely below.
fn span(span: Duration) -> String {
    match span.as_secs() {
        0..60 => duration(reaper_host::sys::nanoseconds(span)),
        seconds => time_text(seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::history::HistoryDecision;

    #[test]
    fn session_is_written_as_text() {
        let at = |ms: i64| Timestamp::from_millisecond(1_760_000_000_000 + ms).unwrap();
        let process = |pid, args: &[&str], decisions, outcomes| HistoryProcess {
            entity_id: "boot-1-1".into(),
            pid,
            uid: 1000,
            comm: "sh\u{1b}".into(),
            exe: String::new(),
            args: args.iter().map(|arg| arg.to_string()).collect(),
            decisions,
            outcomes,
        };
        let decided = |ms, decision: &str, rule: Option<&str>| HistoryDecision {
            time: at(ms),
            decision: decision.into(),
            reason: "root_exited".into(),
            rule: rule.map(Into::into),
        };
        let ended = HistoryOutcome {
            time: at(900_002),
            outcome: "ended".into(),
            reason: None,
            signal: Some("SIGTERM".into()),
            exit: ExitInfo {
                code: Some(3),
                ..ExitInfo::default()
            },
            duration_ns: Some(1_200_000),
            rss: Some(3 << 20),
            swap: Some(0),
        };
        let session = HistorySession {
            name: "claude-100-1".into(),
            agent: "claude".into(),
            pid: 100,
            uid: Some(1000),
            args: vec!["claude".into(), "a\nb".into()],
            outer_session_id: None,
            opened_at: at(0),
            root_exited_at: Some(at(900_000)),
            exit: ExitInfo {
                signal: Some("SIGKILL".into()),
                ..ExitInfo::default()
            },
            closed_at: Some(at(901_000)),
            reaped: 1,
            kept: 1,
            failed: 0,
            lost_before: 0,
            memory: FreedMemory {
                rss: 3 << 20,
                ..FreedMemory::default()
            },
            processes: vec![
                process(
                    101,
                    &["sh", "x"],
                    vec![decided(900_001, "reap", None)],
                    vec![ended],
                ),
                process(102, &[], vec![decided(900_001, "keep", Some("r"))], vec![]),
            ],
        };
        let mut text = Vec::new();
        let plain = anstream::StripStream::new(&mut text);
        let mut printer = Printer::new(plain, TimeZone::UTC, false, None);
        printer.session(&session).unwrap();
        printer.finish(Some(Duration::from_secs(7200))).unwrap();
        drop(printer);
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "\
1 session in the last 2 h: 1 process reaped, 1 kept, 0 failed, 3.1 MB freed

2025-10-09 08:53:20  claude  claude-100-1, uid 1000
    claude a\\nb
    exited at 09:08:20 after 15 min: SIGKILL; closed at 09:08:21
    1 reaped, 1 kept, 0 failed, 3.1 MB freed
        101  sh x
             09:08:20  reap      its agent exited
             09:08:20  ended     exit 3, 1.2 ms after the first signal, 3.1 MB freed
        102  [sh\\u{1b}]
             09:08:20  keep      its agent exited (r)
"
        );
    }
}
