//! `reaper history`.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use anyhow::Context;
use bytesize::ByteSize;
use clap::Args;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::unistd::geteuid;

use super::client::client;
use super::{Failure, ServiceArgs};
use crate::api::History;
use crate::export::{
    self, ExitInfo, FreedMemory, duration, message, printable, reason_text, write_object,
};
use crate::journal::history::{
    HistoryError, HistoryOutcome, HistoryProcess, HistoryQuery, HistorySession, read,
};
use crate::journal::{DIRECTORY, path};

/// Characters of a command line that are shown.
const COMMAND_MAX: usize = 60;

const DIM: Style = Style::new().dimmed();
const BOLD: Style = Style::new().bold();
const GOOD: Style = AnsiColor::Green.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();
const PLAIN: Style = Style::new();

#[derive(Args)]
pub(super) struct HistoryArgs {
    /// Only sessions of which something was heard in this time, such as `2h` or `30min`.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    since: Option<Duration>,
    /// Only sessions of this agent, as its rule is named.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// Only the session of this name, or those whose name begins so.
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,
    /// One JSON object a session instead of readable lines.
    #[arg(long)]
    json: bool,
    /// This journal instead of that of the host's service.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Ask the service on this socket; one is asked too where you may not read its journal.
    #[arg(long, value_name = "PATH", conflicts_with = "file")]
    socket: Option<PathBuf>,
}

pub(super) fn run(args: HistoryArgs) -> Result<(), Failure> {
    let mut show = Show {
        out: export::stdout(),
        zone: TimeZone::system(),
        json: args.json,
        told: 0,
    };
    let asked = match &args.socket {
        Some(_) => ask(&args, &mut show),
        None => match look(&args, &mut show) {
            // It is the service's alone, which tells everybody of what is theirs.
            Err(HistoryError::Denied(path)) if args.file.is_none() => ask(&args, &mut show)
                .map_err(|failure| match failure {
                    Failure::NoService(why) => {
                        Failure::NoService(format!("{}, and {why}", HistoryError::Denied(path)))
                    }
                    other => other,
                }),
            done => done.map_err(|error| anyhow::Error::from(error).into()),
        },
    };
    asked?;
    show.out.flush().context("cannot write")?;
    if show.told == 0 && !args.json {
        message!("no such session in the journal");
    }
    Ok(())
}

/// Reads the journal itself.
fn look(args: &HistoryArgs, show: &mut Show<impl Write>) -> Result<(), HistoryError> {
    let file = args.file.clone();
    let file = file.unwrap_or_else(|| path(DIRECTORY.as_ref(), None));
    // What is longer than time is counted is all of it.
    let since = args.since.map(|since| Timestamp::now().checked_sub(since));
    let own = geteuid();
    let query = HistoryQuery {
        since: since.and_then(Result::ok),
        agent: args.agent.clone(),
        session: args.session.clone(),
        uid: (!own.is_root()).then_some(own.as_raw()),
    };
    read(&file, &query, |session| show.session(&session))
}

/// Has the service read it.
fn ask(args: &HistoryArgs, show: &mut Show<impl Write>) -> Result<(), Failure> {
    let mut query = form_urlencoded::Serializer::new(String::new());
    if let Some(since) = args.since {
        query.append_pair("since_s", &since.as_secs().to_string());
    }
    for (name, value) in [("agent", &args.agent), ("session", &args.session)] {
        if let Some(value) = value {
            query.append_pair(name, value);
        }
    }
    let asking = ServiceArgs {
        socket: args.socket.clone(),
        json: args.json,
    };
    let said = client(&asking).get(&format!("/v1/history?{}", query.finish()))?;
    let history: History = said.read()?;
    for session in &history.sessions {
        show.session(session).context("cannot write")?;
    }
    if history.omitted > 0 {
        let n = history.omitted;
        message!("{n} older sessions are left out: ask for less with --since, or use sudo");
    }
    Ok(())
}

/// What sessions are shown by.
struct Show<W> {
    out: W,
    zone: TimeZone,
    json: bool,
    told: usize,
}

impl<W: Write> Show<W> {
    fn session(&mut self, session: &HistorySession) -> io::Result<()> {
        self.told += 1;
        if self.json {
            return write_object(&mut self.out, session);
        }
        if self.told > 1 {
            writeln!(self.out)?;
        }
        tell(&mut self.out, session, &self.zone)
    }
}

/// Tells of one session, in lines.
fn tell(out: &mut impl Write, session: &HistorySession, zone: &TimeZone) -> io::Result<()> {
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
    let inside = session.outer_session_id.as_ref();
    let inside = inside.map(|outer| format!(", inside {}", printable(outer, COMMAND_MAX)));
    writeln!(
        out,
        "{DIM}{}{DIM:#}  {BOLD}{}{BOLD:#}  {}{}{}",
        clock(session.opened_at, "%Y-%m-%d %H:%M:%S"),
        printable(&session.agent, 32),
        printable(&session.name, COMMAND_MAX),
        user.unwrap_or_default(),
        inside.unwrap_or_default(),
    )?;
    if !session.args.is_empty() {
        writeln!(out, "    {}", command(&session.args, ""))?;
    }
    match session.root_exited_at {
        Some(gone) => {
            let lasted = gone.duration_since(session.opened_at);
            let lasted = lasted.try_into().map_or_else(|_| String::new(), span);
            let how = how(&session.exit);
            write!(out, "    gone at {} after {lasted}: {how}", at(gone))?;
        }
        None => write!(out, "    its agent lives, or nobody saw it end")?,
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
        writeln!(out, "    {style}{}{style:#}", sum(session))?;
    }
    session
        .processes
        .iter()
        .try_for_each(|process| member(out, process, &at))
}

/// What was done about a session, in numbers.
fn sum(session: &HistorySession) -> String {
    let HistorySession {
        reaped,
        kept,
        failed,
        memory:
            FreedMemory {
                rss,
                swap,
                unmeasured,
                ..
            },
        lost_before,
        ..
    } = session;
    let mut text = format!("{reaped} reaped, {kept} kept, {failed} failed");
    let memory = rss.saturating_add(*swap);
    if memory > 0 {
        let _ = write!(text, ", {} given back", ByteSize::b(memory));
    }
    if *unmeasured > 0 {
        let _ = write!(text, ", {unmeasured} too quick to weigh");
    }
    if *lost_before > 0 {
        let _ = write!(text, "; {lost_before} events were lost meanwhile");
    }
    text
}

/// The decisions about a member, and the outcomes, in the order of time.
fn member(
    out: &mut impl Write,
    process: &HistoryProcess,
    at: &impl Fn(Timestamp) -> String,
) -> io::Result<()> {
    let decisions = process.decisions.iter().map(|decision| {
        let style = match decision.decision.as_str() {
            "reap" => WARN,
            _ => PLAIN,
        };
        let rule = decision.rule.as_ref();
        let rule = rule.map(|rule| format!(" ({})", printable(rule, COMMAND_MAX)));
        let why = printable(reason_text(&decision.reason), COMMAND_MAX) + &rule.unwrap_or_default();
        (decision.time, style, decision.decision.clone(), why)
    });
    let outcomes = process.outcomes.iter().map(|outcome| {
        let style = match outcome.outcome.as_str() {
            "ended" => GOOD,
            "failed" => BAD,
            _ => PLAIN,
        };
        (outcome.time, style, outcome.outcome.clone(), came(outcome))
    });
    let mut lines: Vec<_> = decisions.chain(outcomes).collect();
    // What came of a decision was told after it.
    lines.sort_by_key(|(time, ..)| *time);
    for (n, (time, style, word, why)) in lines.iter().enumerate() {
        let who = match n {
            0 => command(&process.args, &process.comm),
            _ => String::new(),
        };
        let pid = if n == 0 {
            process.pid.to_string()
        } else {
            String::new()
        };
        let gap = if who.is_empty() { "" } else { "  " };
        writeln!(
            out,
            "    {DIM}{}{DIM:#}  {style}{:<8}{style:#} {pid:>7}  {who}{gap}{DIM}{why}{DIM:#}",
            at(*time),
            printable(word, 8),
        )?;
    }
    Ok(())
}

/// What came of a decision to reap.
fn came(outcome: &HistoryOutcome) -> String {
    let mut text = match (outcome.outcome.as_str(), &outcome.reason) {
        (_, Some(reason)) => printable(reason, COMMAND_MAX),
        _ => how(&outcome.exit),
    };
    if let Some(ns) = outcome.duration_ns {
        let _ = write!(text, ", {} after the first signal", duration(ns));
    }
    let memory = outcome
        .rss
        .unwrap_or(0)
        .saturating_add(outcome.swap.unwrap_or(0));
    if memory > 0 {
        let _ = write!(text, ", {} given back", ByteSize::b(memory));
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
        _ => "nobody saw how".into(),
    }
}

fn command(args: &[String], comm: &str) -> String {
    let line = args.join(" ");
    let line = if line.is_empty() && !comm.is_empty() {
        format!("[{comm}]")
    } else {
        line
    };
    printable(&line, COMMAND_MAX)
}

/// A span of time to the second, or to what is told of shorter ones.
fn span(time: Duration) -> String {
    match time.as_secs() {
        0..60 => duration(reaper_host::sys::nanoseconds(time)),
        secs => humantime::format_duration(Duration::from_secs(secs)).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::history::HistoryDecision;

    #[test]
    fn a_session_is_told_in_lines() {
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
        let mut plain = anstream::StripStream::new(&mut text);
        tell(&mut plain, &session, &TimeZone::UTC).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "\
2025-10-09 08:53:20  claude  claude-100-1, uid 1000
    claude a\\nb
    gone at 09:08:20 after 15m: SIGKILL; closed at 09:08:21
    1 reaped, 1 kept, 0 failed, 3.0 MiB given back
    09:08:20  reap         101  sh x  its agent is gone
    09:08:20  ended             exit 3, 1.2 ms after the first signal, 3.0 MiB given back
    09:08:20  keep         102  [sh\\u{1b}]  its agent is gone (r)
"
        );
    }
}
