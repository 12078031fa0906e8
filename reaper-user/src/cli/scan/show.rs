//! What a scan has found, for people.

use std::fmt::Write;

use bytesize::ByteSize;

use crate::api::{Finding, ScanReport};
use crate::cli::client::{BOLD, COMMAND_MAX, DIM, age, memory};
use crate::export::{duration, printable};

/// Trees that are listed among what is left alone; the rest is counted.
const SPARED_MAX: usize = 20;

/// `reap`: it was to be ended; `everybody`: whosever it is.
pub(super) fn text(report: &ScanReport, reap: bool, everybody: bool) -> String {
    let mut out = String::new();
    let who = if report.scanned_by == "service" {
        "Asked the service: its members, and what is older than it."
    } else {
        "No service asked: one look at the process table."
    };
    let _ = writeln!(out, "{DIM}{who}{DIM:#}");
    let whose = if everybody { "" } else { " of yours" };
    if report.reapable.is_empty() {
        let _ = writeln!(
            out,
            "No process{whose} is left behind by an agent that is gone."
        );
    } else {
        let held = report.reapable.iter().filter_map(|found| found.rss).sum();
        let what = if report.reapable.len() == 1 {
            "process"
        } else {
            "processes"
        };
        let _ = writeln!(
            out,
            "{BOLD}Left behind by agents that are gone: {} {what}{whose}, {}{BOLD:#}",
            report.reapable.len(),
            ByteSize::b(held)
        );
        trees(&mut out, &report.reapable, usize::MAX);
    }
    if let (Some(ended), Some(given_back)) = (report.ended, report.freed_bytes) {
        let _ = writeln!(
            out,
            "\n{BOLD}{ended} of {} ended, each confirmed; {} given back.{BOLD:#}",
            report.reapable.len(),
            ByteSize::b(given_back)
        );
    } else if reap
        && report
            .reapable
            .iter()
            .any(|found| found.session_id.is_none())
    {
        let what = "They are being ended; the service's event stream tells.";
        let _ = writeln!(out, "\n{what}");
    } else if report.observes && !report.reapable.is_empty() {
        let _ = writeln!(out, "\nThe service only observes: it ends nothing.");
    } else if !report.reapable.is_empty() && !reap {
        let _ = writeln!(out, "\n`reaper scan --reap` ends them.");
    }
    if !report.kept.is_empty() {
        let _ = writeln!(out, "\n{BOLD}Left alone:{BOLD:#}");
        trees(&mut out, &report.kept, SPARED_MAX);
    }
    if report.unreadable > 0 {
        let _ = writeln!(
            out,
            "\n{} processes could not be read; nothing is said of them.",
            report.unreadable
        );
    }
    out
}

/// The trees among these, each with its reason; what is below the first of a tree for the same reason stands
/// under it.
fn trees(out: &mut String, findings: &[Finding], most: usize) {
    let mut heads: Vec<u32> = findings
        .iter()
        .map(|finding| finding.subtree_root_pid)
        .collect();
    heads.dedup();
    for head in heads.iter().take(most) {
        let tree: Vec<_> = findings
            .iter()
            .filter(|f| f.subtree_root_pid == *head)
            .collect();
        let mut said = "";
        for finding in tree {
            if said != finding.why {
                let agent = printable(&finding.agent, 32);
                let _ = writeln!(out, "\n  {agent}: {}", printable(&finding.why, 200));
                said = &finding.why;
            }
            let Finding {
                pid, age_s, rss, ..
            } = finding;
            let (age, memory) = (age(*age_s), memory(*rss));
            let command = printable(&finding.command, COMMAND_MAX);
            let _ = write!(
                out,
                "{pid:>10} {DIM}{age:>5} {memory:>11}{DIM:#}  {command}"
            );
            if let Some(outcome) = &finding.outcome {
                let signal = printable(finding.signal.as_deref().unwrap_or_default(), 16);
                let outcome = printable(outcome, 200);
                let after = finding.duration_ns.map(|ns| format!(", {}", duration(ns)));
                let _ = write!(
                    out,
                    "  {DIM}{outcome} {signal}{}{DIM:#}",
                    after.unwrap_or_default()
                );
            }
            out.push('\n');
        }
    }
    if heads.len() > most {
        let _ = writeln!(out, "\n  and {} more; --json lists all", heads.len() - most);
    }
}
