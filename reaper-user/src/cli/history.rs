//! `reaper history`: prints past sessions from the journal.

use std::collections::HashSet;
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
use super::hint::hints;
use super::keep_advice::keep_advice;
use super::show::{count, fit, time, width, wrap};
use super::{Failure, ServiceArgs, load, pager, parse_pid, parse_time, sockets};
use crate::api::History;
use crate::api::recognition::unknown_agent;
use crate::export::{
    self, ExitInfo, FreedMemory, KeepAdvice, ProcessCounts, duration, exit_code_text, freed,
    message, outcome_reason_text, printable, reason_text, write_object,
};
use crate::journal::history::{
    HistoryError, HistoryOutcome, HistoryProcess, HistoryQuery, HistorySession, read,
};
use crate::journal::{DIRECTORY, path};
use reaper_model::rules::built_in;

/// Longest command line or name, in characters.
const COMMAND_MAX: usize = 256;
/// Indentation of the lines about a session, in characters.
const INDENT: usize = 2;
/// Column behind the pid, which begins each line.
const COLUMN: usize = INDENT + 7 + 2;

const GOOD: Style = AnsiColor::Green.on_default();
const WARN: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();
const PLAIN: Style = Style::new();

#[derive(Args)]
pub(super) struct HistoryArgs {
    /// Show only what was decided about and done to the processes with these pids. For an agent: its session.
    #[arg(value_name = "PID", value_parser = parse_pid)]
    pids: Vec<u32>,
    /// Show only the newest N sessions.
    #[arg(short = 'n', long = "limit", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Show only sessions that were active in this time, such as `2h` or `30min`.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
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
    /// Do not use a pager.
    #[arg(long)]
    no_pager: bool,
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
    let zone = TimeZone::system();
    let mut printer = Printer::new(export::stdout(), zone, args.json, width(), &args.pids);
    // The journal belongs to the host's service; another one is named by its socket.
    let socket = sockets::named(args.socket.as_deref()).filter(|_| args.file.is_none());
    let result = match socket {
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
    let found = printer.total.sessions;
    let absent = args.pids.iter().filter(|pid| !printer.seen.contains(pid));
    let absent: Vec<u32> = absent.copied().collect();
    let text = printer.finish(args.since);
    let text = text.map_err(Failure::stdout)?;
    if !text.is_empty() {
        pager::print(&text, args.no_pager).map_err(Failure::stdout)?;
    }
    if (found == 0 || !absent.is_empty()) && !args.json {
        message!("{}", nothing_found(&args, &absent));
    }
    Ok(())
}

/// Returns the message for a history without sessions, or without these of the requested processes.
fn nothing_found(args: &HistoryArgs, absent: &[u32]) -> String {
    let filters = [
        args.since.map(|_| "--since".into()),
        args.agent.as_ref().map(|_| "--agent".into()),
        args.session.as_ref().map(|_| "--session".into()),
        match absent {
            [] => None,
            [pid] => Some(format!("process {pid}")),
            pids => {
                let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
                Some(format!("any of the processes {}", pids.join(", ")))
            }
        },
    ];
    let given: Vec<String> = filters.into_iter().flatten().collect();
    let own = if geteuid().is_root() { "" } else { " of yours" };
    match given.is_empty() {
        true => format!("the journal has no sessions{own} yet"),
        false => format!(
            "no session{own} in the journal matches {}{}",
            given.join(" and "),
            args.agent.as_deref().map(agent_hint).unwrap_or_default()
        ),
    }
}

/// Returns the hint for a name that no agent has; empty for other names.
fn agent_hint(agent: &str) -> String {
    // The hint is only lost if the config cannot be read.
    let rules = load(None).map_or_else(|_| built_in(), |config| config.rules);
    let known = rules.agent_names();
    match known.contains(&agent) {
        true => String::new(),
        false => format!("; {}", unknown_agent(agent, &known)),
    }
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
        pids: args.pids.clone(),
        limit: args.limit.map(|limit| limit as usize),
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
    let pids: Vec<String> = args.pids.iter().map(u32::to_string).collect();
    let limit = args.limit.map(|limit| limit.to_string());
    for (name, value) in [
        ("pid", pids.join(",")),
        ("limit", limit.unwrap_or_default()),
    ] {
        if !value.is_empty() {
            query.append_pair(name, &value);
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
    memory: FreedMemory,
    would_have_reaped: u64,
}

/// Prints sessions as JSON at once, or collects them as text.
struct Printer<W> {
    out: W,
    zone: TimeZone,
    json: bool,
    width: Option<usize>,
    /// Process, if one alone was requested. Its text has the advice that keeps the next such process.
    pid: Option<u32>,
    /// Pids of the processes and agents in the printed sessions.
    seen: HashSet<u32>,
    /// Text of the sessions so far.
    text: Vec<u8>,
    total: Total,
    /// Pid of a reaped process of the newest session with one, unless its advice is in the text.
    example: Option<u32>,
}

impl<W: Write> Printer<W> {
    fn new(out: W, zone: TimeZone, json: bool, width: Option<usize>, pids: &[u32]) -> Printer<W> {
        Printer {
            out,
            zone,
            json,
            width,
            pid: match pids {
                [pid] => Some(*pid),
                _ => None,
            },
            seen: HashSet::new(),
            text: Vec::new(),
            total: Total::default(),
            example: None,
        }
    }

    /// Adds a session to the total. Writes it at once as JSON, or adds it to the text.
    fn session(&mut self, session: &HistorySession) -> io::Result<()> {
        let total = &mut self.total;
        total.sessions += 1;
        total.reaped += u64::from(session.reaped);
        total.kept += u64::from(session.kept);
        total.failed += u64::from(session.failed);
        total.memory.rss = total.memory.rss.saturating_add(session.memory.rss);
        total.memory.swap = total.memory.swap.saturating_add(session.memory.swap);
        total.would_have_reaped += would_have_reaped(session);
        self.seen.insert(session.pid);
        self.seen.extend(session.root_pid);
        self.seen
            .extend(session.processes.iter().map(|process| process.pid));
        if self.json {
            return write_object(&mut self.out, session);
        }
        write_session(&mut self.text, session, &self.zone, self.width)?;
        let reaped = session.processes.iter();
        let mut reaped = reaped.filter(|process| process.is_reaped());
        if let Some(process) = reaped.clone().find(|process| self.pid == Some(process.pid)) {
            let advice = KeepAdvice::new(None, true, process.keep_rule.clone());
            write!(self.text, "\n{}", keep_advice(&advice, self.width))?;
        } else {
            let was_sent = |end: &HistoryOutcome| end.outcome != "not_sent";
            let example = reaped.find(|process| process.outcomes.iter().all(was_sent));
            self.example = example.map(|process| process.pid).or(self.example);
        }
        writeln!(self.text)
    }

    /// Returns the text with a summary at its end; empty for JSON and without sessions. `since` is the time span in the
    /// summary. Flushes JSON.
    fn finish(mut self, since: Option<Duration>) -> io::Result<Vec<u8>> {
        self.out.flush()?;
        if self.text.is_empty() {
            return Ok(self.text);
        }
        let Total {
            sessions,
            reaped,
            kept,
            failed,
            memory,
            would_have_reaped,
        } = self.total;
        let sessions = count(sessions, "session", "sessions");
        let since = since.map(|since| format!(" in the last {}", time(since.as_secs())));
        let since = since.unwrap_or_default();
        let processes = ProcessCounts {
            reaped,
            would_have_reaped,
            kept,
            failed,
        };
        let sum = format!(
            "{sessions}{since}: {}{}",
            processes.text(""),
            freed(&memory)
        );
        for line in wrap(&sum, 0, self.width).lines() {
            writeln!(self.text, "{BOLD}{line}{BOLD:#}")?;
        }
        if let Some(pid) = self.example {
            let hint = format!(
                "To keep such a process: REAPER_KEEP=1, `reaper keep PID`, or the rule from `reaper history {pid}`"
            );
            write!(self.text, "{}", wrap(&hints(&hint), 0, self.width))?;
        }
        Ok(self.text)
    }
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
    let root = |out: &mut _| write_pid(out, session.pid);
    if !session.args.is_empty() {
        let command = command(&session.args, "");
        let command = fit(&command, COLUMN, COMMAND_MAX, width);
        root(out)?;
        writeln!(out, "{command}")?;
    }
    root(out)?;
    match session.root_exited_at {
        Some(exited) => {
            let lasted = exited.duration_since(session.opened_at);
            let lasted = lasted.try_into().map_or(0, reaper_host::sys::nanoseconds);
            let lasted = duration(lasted);
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
    if session.closed_at.is_some() || would_have_reaped(session) > 0 {
        for line in wrap(&sum(session), 0, room(width)).lines() {
            root(out)?;
            writeln!(out, "{style}{line}{style:#}")?;
        }
    }
    session
        .processes
        .iter()
        .try_for_each(|process| write_process(out, process, &at, width))
}

/// Returns how many processes would have been reaped. The service only observed them.
fn would_have_reaped(session: &HistorySession) -> u64 {
    let processes = session.processes.iter();
    let would = |process: &&HistoryProcess| process.decisions.iter().any(|d| d.would_reap());
    processes.filter(would).count() as u64
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
    let processes = ProcessCounts {
        reaped: u64::from(*reaped),
        would_have_reaped: would_have_reaped(session),
        kept: u64::from(*kept),
        failed: u64::from(*failed),
    };
    let mut text = processes.text("") + &freed(memory);
    if *lost_before > 0 {
        let _ = write!(text, "; {lost_before} events were lost in this time");
    }
    text
}

/// Writes a process with its decisions and outcomes, ordered by time.
fn write_process(
    out: &mut impl Write,
    process: &HistoryProcess,
    at: &impl Fn(Timestamp) -> String,
    width: Option<usize>,
) -> io::Result<()> {
    let command = command(&process.args, &process.comm);
    let command = fit(&command, COLUMN, COMMAND_MAX, width);
    write_pid(out, process.pid)?;
    writeln!(out, "{command}")?;
    let decisions = process.decisions.iter().map(|decision| {
        let style = match decision.decision.as_str() {
            "reap" => WARN,
            _ => PLAIN,
        };
        let rule = decision.rule.as_ref().map(|rule| format!(" ({rule})"));
        let why = reason_text(&decision.reason).to_owned() + &rule.unwrap_or_default();
        let word = match decision.would_reap() {
            true => "would reap".to_owned(),
            false => decision.decision.clone(),
        };
        (decision.time, style, word, why)
    });
    let outcomes = process.outcomes.iter().map(|outcome| {
        let style = match outcome.outcome.as_str() {
            "ended" => GOOD,
            "failed" => BAD,
            _ => PLAIN,
        };
        let details = outcome_details(outcome);
        (
            outcome.time,
            style,
            outcome.outcome.replace('_', " "),
            details,
        )
    });
    let exit = process.own_exit().map(|(time, exit)| {
        let how = match &exit.signal {
            Some(_) => format!("{}, which the service did not send", how(exit)),
            None => format!("by itself: {}", how(exit)),
        };
        (time, PLAIN, "exited".to_owned(), how)
    });
    let mut lines: Vec<_> = decisions.chain(outcomes).chain(exit).collect();
    // The sort is stable: an outcome stays behind a decision of the same time.
    lines.sort_by_key(|(time, ..)| *time);
    for (time, style, word, why) in &lines {
        let time = at(*time);
        let word = printable(word, 10);
        // The columns of time and word, with two spaces behind each.
        let before = time.len() + 2 + 10 + 2;
        let why = wrap(
            &printable(why, COMMAND_MAX),
            0,
            room(width).map(|room| room - before),
        );
        for (n, why) in why.lines().enumerate() {
            write_pid(out, process.pid)?;
            match n {
                0 => writeln!(out, "{DIM}{time}{DIM:#}  {style}{word:<10}{style:#}  {why}")?,
                _ => writeln!(out, "{:before$}{why}", "")?,
            }
        }
    }
    Ok(())
}

/// Writes the pid at the beginning of a line, in [`COLUMN`] characters.
fn write_pid(out: &mut impl Write, pid: u32) -> io::Result<()> {
    write!(out, "{:INDENT$}{pid:>7}  ", "")
}

/// Returns the width behind the pid, at least 60 characters.
fn room(width: Option<usize>) -> Option<usize> {
    width.map(|width| width.saturating_sub(COLUMN).max(60))
}

/// Returns how a process exited, or why it was not ended or not signalled. If known, the time since the first signal
/// and the freed memory follow.
fn outcome_details(outcome: &HistoryOutcome) -> String {
    let mut text = match (outcome.outcome.as_str(), &outcome.reason) {
        (_, Some(reason)) => outcome_reason_text(reason),
        _ => how(&outcome.exit),
    };
    if let Some(ns) = outcome.duration_ns {
        let _ = write!(text, ", {} after the first signal", duration(ns));
    }
    text + &freed(&FreedMemory {
        rss: outcome.rss.unwrap_or(0),
        swap: outcome.swap.unwrap_or(0),
        ..FreedMemory::default()
    })
}

fn how(exit: &ExitInfo) -> String {
    match exit {
        ExitInfo {
            signal: Some(signal),
            ..
        } => printable(signal, 16),
        ExitInfo {
            code: Some(code), ..
        } => exit_code_text(*code),
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
            exited_at: None,
            exit: ExitInfo::default(),
            decisions,
            outcomes,
            keep_rule: None,
        };
        let decided = |ms, decision: &str, rule: Option<&str>| HistoryDecision {
            time: at(ms),
            decision: decision.into(),
            reason: "root_exited".into(),
            rule: rule.map(Into::into),
            mode: rule.map(|_| "observe".into()),
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
            root_pid: Some(100),
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
                process(
                    103,
                    &["y"],
                    vec![decided(900_001, "reap", Some("r"))],
                    vec![],
                ),
            ],
        };
        let text = |width, pids| {
            let mut printer = Printer::new(Vec::new(), TimeZone::UTC, false, width, pids);
            printer.session(&session).unwrap();
            let text = printer.finish(Some(Duration::from_secs(7200))).unwrap();
            let mut plain = anstream::StripStream::new(Vec::new());
            plain.write_all(&text).unwrap();
            String::from_utf8(plain.into_inner()).unwrap()
        };
        assert_eq!(
            text(None, &[]),
            "\
2025-10-09 08:53:20  claude  claude-100-1, uid 1000
      100  claude a\\nb
      100  exited at 09:08:20 after 15m: SIGKILL; closed at 09:08:21
      100  1 reaped, 1 would have been, 1 kept, 3.1 MB RSS freed
      101  sh x
      101  09:08:20  reap        its agent exited
      101  09:08:20  ended       exit 3, 1.2ms after the first signal, 3.1 MB RSS freed
      102  [sh\\u{1b}]
      102  09:08:20  keep        its agent exited (r)
      103  y
      103  09:08:20  would reap  its agent exited (r)

1 session in the last 2h: 1 reaped, 1 would have been, 1 kept, 3.1 MB RSS freed
To keep such a process: REAPER_KEEP=1, `reaper keep PID`, or the rule from `reaper history 101`
"
        );
        for line in text(Some(80), &[]).lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        let of_process = text(None, &[101]);
        assert!(
            of_process.contains("would have kept it") && !of_process.contains("To keep such"),
            "{of_process}"
        );
    }

    #[test]
    fn each_line_of_a_session_has_its_pid() {
        let outcome = |reason: &str| HistoryOutcome {
            time: Timestamp::UNIX_EPOCH,
            outcome: "failed".into(),
            reason: Some(reason.into()),
            signal: None,
            exit: ExitInfo::default(),
            duration_ns: Some(7_000_000_000),
            rss: None,
            swap: None,
        };
        let process = HistoryProcess {
            entity_id: "boot-1-4194304".into(),
            pid: 4_194_304,
            uid: 0,
            comm: "x".repeat(15),
            exe: String::new(),
            args: vec!["y".repeat(300)],
            exited_at: None,
            exit: ExitInfo::default(),
            decisions: Vec::new(),
            outcomes: vec![outcome("uninterruptible_sleep")],
            keep_rule: None,
        };
        let mut text = Vec::new();
        write_process(
            &mut text,
            &process,
            &|_| "2025-10-09 09:08:20".into(),
            Some(80),
        )
        .unwrap();
        let mut plain = anstream::StripStream::new(Vec::new());
        plain.write_all(&text).unwrap();
        let text = String::from_utf8(plain.into_inner()).unwrap();
        assert!(text.lines().count() > 2, "wrapped:\n{text}");
        for line in text.lines() {
            assert!(
                line.starts_with("  4194304  ") && line.chars().count() <= 80,
                "{line}"
            );
        }
    }
}
