//! `reaper doctor` on macOS: checks what the kernel reports about processes, and whether a daemon can run.

use std::fmt::Display;
use std::io;

use anstyle::Style;
use nix::sys::event::Kqueue;
use serde::Serialize;

use super::show::{self, Mark, width, wrap};
use crate::config::Config;
use crate::export::{print, printable, to_json};
use reaper_host::source::SourceKind;
use reaper_host::source::darwin::args::Arguments;
use reaper_host::source::darwin::table;
use reaper_host::sys::darwin;
use reaper_host::sys::host::Host;
use reaper_host::sys::pidfd::exit_watch;

/// One check and its result.
#[derive(Serialize)]
struct Check {
    name: &'static str,
    ok: bool,
    /// Value found.
    value: String,
    /// Why the check failed, or what is missing because of that.
    reason: Option<String>,
    /// Step to take.
    advice: Option<&'static str>,
    /// Whether a daemon needs it.
    #[serde(skip)]
    needed: bool,
}

/// Results of all checks.
#[derive(Serialize)]
struct Report {
    usable: bool,
    source: Option<&'static str>,
    reasons: Vec<String>,
    checks: Vec<Check>,
}

/// Checks this host and prints the results.
///
/// `probe` opens the source and closes it again. Returns the exit status: 0 if a daemon can run, 3 if not.
///
/// # Errors
/// Standard output cannot be written.
pub fn run<E: Display>(
    config: &Config,
    json: bool,
    probe: impl Fn(SourceKind) -> Result<(), E>,
) -> io::Result<u8> {
    let report = examine(config, &Host::read(), probe(SourceKind::Scan));
    match json {
        true => print(to_json(&report))?,
        false => print(render(&report, width()))?,
    }
    Ok(if report.usable { 0 } else { 3 })
}

fn examine<E: Display>(config: &Config, host: &Host, probed: Result<(), E>) -> Report {
    let checks =
        vec![
        result_of("system", Ok::<_, io::Error>(format!("Darwin {}", host.release))),
        result_of("config", Ok::<_, io::Error>(config.file.to_string())),
        needed(result_of("source opens", probed.map(|()| "opened".into()))),
        needed(result_of("process table", process_table())),
        needed(result_of("names of processes", identity())),
        needed(result_of("word of forks and exits", event_queue())),
        privilege(host),
        Check {
            name: "signals",
            ok: true,
            value: "sent by pid, right after checking its identity: within these microseconds the pid could be reused".into(),
            reason: None,
            advice: None,
            needed: false,
        },
        Check {
            name: "environments",
            ok: false,
            value: environments().unwrap_or_else(|| "not shown".into()),
            reason: Some(
                "the kernel shows no environment of programs that belong to the system (/bin/sh): \
                 it could contain REAPER_KEEP=1, so they are kept if a rule honors that"
                    .into(),
            ),
            advice: Some("to reap them all the same, set honor_keep = false in the config"),
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

fn process_table() -> Result<String, table::ProcfsError> {
    let all = table::all()?;
    Ok(format!(
        "{} processes, with start times in microseconds",
        all.len()
    ))
}

fn identity() -> nix::Result<String> {
    let first = darwin::identity(1)?;
    Ok(format!(
        "pid 1 has the unique id {} of this boot",
        first.unique
    ))
}

fn event_queue() -> nix::Result<String> {
    let queue = Kqueue::new()?;
    queue.kevent(&[exit_watch(std::process::id(), 0)], &mut [], None)?;
    Ok(
        "kqueue reports forks, execs and exits as they happen, also of other users' processes"
            .into(),
    )
}

/// Returns whose environments the kernel shows, by reading that of this process.
fn environments() -> Option<String> {
    let bytes = darwin::arguments(std::process::id()).ok()?;
    let environments = Arguments::parse(&bytes).environment.is_some();
    environments.then(|| {
        "those of this user's own programs; for root all but those of system programs".into()
    })
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
            "processes of other users are visible without arguments, and cannot be signalled".into()
        }),
        advice: (!root).then_some("run as root, or with --user for your own processes"),
        needed: false,
    }
}

fn result_of<E: Display>(name: &'static str, answer: Result<String, E>) -> Check {
    let reason = answer
        .as_ref()
        .err()
        .map(|error| format!("{name}: {error}"));
    Check {
        name,
        ok: reason.is_none(),
        value: answer.unwrap_or_else(|_| "not available".into()),
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

/// Formats the report as text: the result first, then the checks.
fn render(report: &Report, width: Option<usize>) -> String {
    let bold = Style::new().bold();
    let result = match (report.source, report.reasons.first()) {
        (Some(source), _) => format!("A daemon can run here, with the event source {source}."),
        (None, Some(reason)) => format!("A daemon cannot run here: {reason}."),
        (None, None) => "A daemon cannot run here.".to_owned(),
    };
    let mut out = String::new();
    for line in wrap(&printable(&result, usize::MAX), 0, width).lines() {
        out += &format!("{bold}{line}{bold:#}\n");
    }
    out += "\nChecks:\n";
    let names = report.checks.iter().map(|check| check.name.len());
    let names = names.max().unwrap_or(0);
    for check in &report.checks {
        let notes = [check.reason.as_deref(), check.advice];
        let state = Mark::of(check.ok, check.needed, &check.value);
        out += &show::check(state, check.name, &check.value, notes, names, width);
    }
    out
}
