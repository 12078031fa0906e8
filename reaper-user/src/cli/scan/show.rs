//! Formats the report of a scan as text.

use std::fmt::Write;

use crate::api::{Finding, ScanReport};
use crate::cli::client::{BOLD, DIM};
use crate::cli::hint::hints;
use crate::cli::show::{count, fit, memory, memory_text, time, wrap};
use crate::export::{duration, printable};

/// Number of kept subtrees that are listed. The others are only counted.
const KEPT_MAX: usize = 20;
/// Characters before the command of a process.
const BEFORE: usize = 30;
/// Longest command, in characters.
const COMMAND_MAX: usize = 256;

/// Formats a report. `reap` is whether reaping was requested, `all_users` whether the scan covers all users.
pub(super) fn text(
    report: &ScanReport,
    reap: bool,
    all_users: bool,
    width: Option<usize>,
) -> String {
    let mut out = String::new();
    for line in wrap(&summary(report, reap, all_users), 0, width).lines() {
        let _ = writeln!(out, "{BOLD}{line}{BOLD:#}");
    }
    let scope = match &*report.scanned_by {
        "service" => "Scanned by the service: its members, and processes older than the service.",
        _ => "Scanned without a service, from a single reading of the process table.",
    };
    let _ = writeln!(out, "{DIM}{scope}{DIM:#}");
    trees(&mut out, &report.reapable, usize::MAX, width);
    if !report.kept.is_empty() {
        let _ = writeln!(out, "\n{BOLD}Left alone:{BOLD:#}");
        trees(&mut out, &report.kept, KEPT_MAX, width);
    }
    if report.unreadable > 0 {
        let unreadable = count(report.unreadable, "process", "processes");
        let _ = writeln!(out, "\n{unreadable} could not be read and are not listed.");
    }
    out
}

/// Returns what is left behind, and what has been done or can be done about it.
fn summary(report: &ScanReport, reap: bool, all_users: bool) -> String {
    let yours = if all_users { "" } else { " of yours" };
    if report.reapable.is_empty() {
        return match report.kept.len() as u64 {
            0 => format!("No process{yours} is left behind by an agent."),
            1 => format!("Nothing to reap: 1 process{yours} is left alone."),
            n => format!("Nothing to reap: {n} processes{yours} are left alone."),
        };
    }
    let number = report.reapable.len() as u64;
    if let (Some(ended), Some(freed)) = (report.ended, report.freed_bytes) {
        let processes = count(number, "process", "processes");
        return format!(
            "Reaped {ended} of {processes}, each exit confirmed: {} freed.",
            memory_text(freed, 0)
        );
    }
    let held = report.reapable.iter().filter_map(|found| found.rss).sum();
    let left = match number {
        1 => format!("1 process{yours} is left behind"),
        n => format!("{n} processes{yours} are left behind"),
    };
    let leftover = |found: &Finding| found.session_id.is_none();
    let action = if reap && report.reapable.iter().any(leftover) {
        "; reaping continues, and the event stream reports the outcomes"
    } else if report.observes {
        "; the service only observes and reaps nothing"
    } else if reap {
        ""
    } else {
        "; `reaper scan --reap` ends them"
    };
    format!("{left}, {}{}.", memory_text(held, 0), hints(action))
}

/// Writes the first `max` subtrees of these processes. Consecutive processes with the same reason share one line for
/// it.
fn trees(out: &mut String, findings: &[Finding], max: usize, width: Option<usize>) {
    let mut roots: Vec<u32> = findings
        .iter()
        .map(|finding| finding.subtree_root_pid)
        .collect();
    roots.dedup();
    for root in roots.iter().take(max) {
        let tree: Vec<_> = findings
            .iter()
            .filter(|f| f.subtree_root_pid == *root)
            .collect();
        let mut last_why = "";
        for finding in tree {
            if last_why != finding.why {
                let agent = printable(&finding.agent, 32);
                let why = format!("{agent}: {}", printable(&finding.why, 200));
                let _ = write!(out, "\n{}", wrap(&why, 2, width));
                last_why = &finding.why;
            }
            let Finding {
                pid, age_s, rss, ..
            } = finding;
            let (age, memory, outcome) = (time(*age_s), memory(*rss), outcome(finding));
            let taken = BEFORE + outcome.chars().count();
            let command = fit(&finding.command, taken, COMMAND_MAX, width);
            let _ = writeln!(
                out,
                "{pid:>10} {DIM}{age:>7} {memory:>9}{DIM:#}  {command}{DIM}{outcome}{DIM:#}"
            );
        }
    }
    if roots.len() > max {
        let _ = writeln!(out, "\n  and {} more; --json lists all", roots.len() - max);
    }
}

/// Returns the outcome of reaping a process, empty if it was not reaped.
fn outcome(finding: &Finding) -> String {
    let Some(outcome) = &finding.outcome else {
        return String::new();
    };
    let outcome = match &**outcome {
        "not_sent" => "not signalled".into(),
        other => printable(other, 200),
    };
    let signal = finding.signal.as_deref();
    let signal = signal.map(|signal| printable(signal, 16));
    let after = finding
        .duration_ns
        .map(|ns| format!("after {}", duration(ns)));
    let details: Vec<String> = signal.into_iter().chain(after).collect();
    match details.is_empty() {
        true => format!("  {outcome}"),
        false => format!("  {outcome} ({})", details.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_line(report: &ScanReport, reap: bool) -> String {
        let text = text(report, reap, true, None);
        let text = anstream::adapter::strip_str(&text).to_string();
        text.lines().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn first_line_says_what_is_left_behind() {
        let mut report = ScanReport::new("command");
        assert_eq!(
            first_line(&report, false),
            "No process is left behind by an agent."
        );
        report.kept = vec![Finding::default(); 2];
        assert_eq!(
            first_line(&report, false),
            "Nothing to reap: 2 processes are left alone."
        );
        report.reapable = vec![Finding {
            rss: Some(3_000_000),
            ..Finding::default()
        }];
        assert_eq!(
            first_line(&report, false),
            "1 process is left behind, 3.0 MB RSS; `reaper scan --reap` ends them."
        );
        (report.ended, report.freed_bytes) = (Some(1), Some(3_000_000));
        assert_eq!(
            first_line(&report, true),
            "Reaped 1 of 1 process, each exit confirmed: 3.0 MB RSS freed."
        );
    }
}
