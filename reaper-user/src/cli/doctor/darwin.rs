//! `reaper doctor` on macOS: what this host tells of its processes, the reason for each no, and what would be used.

use std::fmt::{Display, Write as _};
use std::io;

use anstyle::{AnsiColor, Style};
use nix::sys::event::Kqueue;
use serde::Serialize;

use crate::config::Config;
use crate::export::{print, printable, to_json};
use reaper_host::source::SourceKind;
use reaper_host::source::darwin::args::Arguments;
use reaper_host::source::darwin::table;
use reaper_host::sys::darwin;
use reaper_host::sys::host::Host;
use reaper_host::sys::pidfd::exit_of;

/// One question and its answer.
#[derive(Serialize)]
struct Check {
    name: &'static str,
    ok: bool,
    /// What was found.
    value: String,
    /// Why not, or what is missed without it.
    reason: Option<String>,
    /// What to do about it.
    advice: Option<&'static str>,
    /// Whether nothing can be watched without it.
    #[serde(skip)]
    needed: bool,
}

/// All answers.
#[derive(Serialize)]
struct Report {
    usable: bool,
    source: Option<&'static str>,
    reasons: Vec<String>,
    checks: Vec<Check>,
}

/// Looks at this host, calls `probe` to open its source and let it go again, and prints the answers. Returns the exit status: 0 if its processes can be watched, 3 if not.
///
/// # Errors
/// If standard output cannot be written.
pub fn run<E: Display>(
    _: &Config,
    json: bool,
    probe: impl Fn(SourceKind) -> Result<(), E>,
) -> io::Result<u8> {
    let report = examine(&Host::read(), probe(SourceKind::Scan));
    match json {
        true => print(to_json(&report))?,
        false => print(render(&report))?,
    }
    Ok(if report.usable { 0 } else { 3 })
}

fn examine<E: Display>(host: &Host, probed: Result<(), E>) -> Report {
    let checks =
        vec![
        says("system", Ok::<_, io::Error>(format!("Darwin {}", host.release))),
        needed(says("source opens", probed.map(|()| "opened and let go".into()))),
        needed(says("process table", listed())),
        needed(says("names of processes", named())),
        needed(says("word of forks and exits", told())),
        privilege(host),
        Check {
            name: "signals",
            ok: true,
            value: "sent by pid, right after asking who has it: in the microseconds between, it could become another's".into(),
            reason: None,
            advice: None,
            needed: false,
        },
        Check {
            name: "environments",
            ok: false,
            value: shown().unwrap_or_else(|| "not told".into()),
            reason: Some(
                "of programs that come with the system (/bin/sh) the kernel shows no environment: \
                 REAPER_KEEP=1 could stand in it, so they are kept where a rule honors that mark"
                    .into(),
            ),
            advice: Some("set honor_keep = false in the config to have them ended all the same"),
            needed: false,
        },
    ];
    let failed = checks.iter().filter(|check| check.needed && !check.ok);
    let reasons: Vec<String> = failed.filter_map(|check| check.reason.clone()).collect();
    let usable = reasons.is_empty();
    Report {
        usable,
        source: usable.then_some(SourceKind::Scan.name()),
        reasons,
        checks,
    }
}

fn listed() -> Result<String, table::ProcfsError> {
    let all = table::all()?;
    Ok(format!(
        "{} processes, with starts to the microsecond",
        all.len()
    ))
}

fn named() -> nix::Result<String> {
    let first = darwin::identity(1)?;
    Ok(format!(
        "pid 1 is number {} of this boot, never used again",
        first.unique
    ))
}

fn told() -> nix::Result<String> {
    let queue = Kqueue::new()?;
    queue.kevent(&[exit_of(std::process::id(), 0)], &mut [], None)?;
    Ok(
        "kqueue tells of forks, execs and exits as they happen, also of other users' processes"
            .into(),
    )
}

/// What is shown of this program's own.
fn shown() -> Option<String> {
    let bytes = darwin::arguments(std::process::id()).ok()?;
    let shown = Arguments::parse(&bytes).environment.is_some();
    shown.then(|| "of this user's own programs, and all but the system's for root".into())
}

fn privilege(host: &Host) -> Check {
    let root = host.euid == Some(0);
    Check {
        name: "other users",
        ok: root,
        value: host
            .euid
            .map_or("unknown".into(), |id| format!("user id {id}")),
        reason: (!root).then(|| {
            "what others run is seen without its arguments, and cannot be signalled".into()
        }),
        advice: (!root).then_some("run it as root, or with --user for what is your own"),
        needed: false,
    }
}

fn says<E: Display>(name: &'static str, answer: Result<String, E>) -> Check {
    let reason = answer
        .as_ref()
        .err()
        .map(|error| format!("{name}: {error}"));
    Check {
        name,
        ok: reason.is_none(),
        value: answer.unwrap_or_else(|_| "not told".into()),
        advice: reason.as_ref().map(|_| "run it outside of a sandbox"),
        reason,
        needed: false,
    }
}

fn needed(check: Check) -> Check {
    Check {
        needed: true,
        ..check
    }
}

/// The answers as a table, with colours.
fn render(report: &Report) -> String {
    let names = report.checks.iter().map(|check| check.name.len());
    let width = names.max().unwrap_or(0);
    let mut out = String::new();
    for check in &report.checks {
        let (word, colour) = match (check.ok, check.needed) {
            (true, _) => ("yes", AnsiColor::Green),
            (false, true) => ("no ", AnsiColor::Red),
            (false, false) => ("no ", AnsiColor::Yellow),
        };
        let style = colour.on_default().bold();
        let (name, value) = (check.name, printable(&check.value, usize::MAX));
        let _ = writeln!(out, "{style}{word}{style:#}  {name:width$}  {value}");
        let said = [("why", check.reason.as_deref()), ("do", check.advice)];
        for (label, text) in said {
            if let Some(text) = text {
                let text = printable(text, usize::MAX);
                let dim = Style::new().dimmed();
                let _ = writeln!(out, "     {:width$}  {dim}{label}: {text}{dim:#}", "");
            }
        }
    }
    let bold = Style::new().bold();
    let why = || report.reasons.first().map_or("unknown", |reason| reason);
    let verdict = report
        .source
        .map_or_else(|| format!("nothing here: {}", why()), str::to_owned);
    let verdict = printable(&verdict, usize::MAX);
    let _ = writeln!(out, "{bold}would use: {verdict}{bold:#}");
    out
}
