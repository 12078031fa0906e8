//! Prints how a run has ended, and writes its report.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

use crate::cli::runs::survivor;
use crate::cli::show::count;
use crate::export::{message, to_json};
use crate::run::{RunOutcome, RunReport};
use reaper_host::advice::Advised as _;
use reaper_host::sys::held_path::{self, HeldFile, HeldPath, HeldPathError};
use reaper_model::value::show_duration;

/// Options for what is printed about a run.
#[derive(Args, Clone)]
pub(super) struct OutputArgs {
    /// Do not print that a time limit has ended the run, or that it waits for a slot.
    ///
    /// Errors, and processes that could not be ended, are printed all the same.
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// Print each process that was ended.
    #[arg(short, long)]
    verbose: bool,
    /// Write the outcome to this file as one JSON object; replaces the file.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write the outcome to stderr as one JSON object, instead of text.
    #[arg(long)]
    json: bool,
}

/// What to do if a report cannot be written.
const ELSEWHERE: &str = "name a file that this user can write";

/// Destinations of the report.
pub(super) struct ReportOutput {
    args: OutputArgs,
    file: Option<ReportFile>,
}

/// File for the report, resolved before the command starts.
struct ReportFile {
    /// Path from the command line.
    path: PathBuf,
    file: TargetFile,
}

enum TargetFile {
    /// Replaced by a new file.
    Regular(HeldPath),
    /// A device, a pipe or the target of a link: written to, not replaced.
    Special(HeldFile),
}

impl ReportOutput {
    /// Resolves the file of the report.
    pub(super) fn resolve(args: OutputArgs) -> anyhow::Result<ReportOutput> {
        let file = args
            .report
            .as_deref()
            .map(ReportFile::resolve)
            .transpose()?;
        Ok(ReportOutput { args, file })
    }

    /// Returns whether only errors and processes that could not be ended are printed.
    pub(super) fn is_quiet(&self) -> bool {
        self.args.quiet
    }

    /// Prints what is to be said about the run, and writes the report. With `--json` the report is all that is printed,
    /// besides errors and processes that could not be ended.
    pub(super) fn write(&self, report: &RunReport) -> anyhow::Result<()> {
        for left in &report.survivors {
            message!("reaper: left behind: {}", survivor(left));
        }
        for error in &report.errors {
            message!("reaper: {error}");
        }
        if !self.args.json && !self.args.quiet {
            for line in summary(report, self.args.verbose) {
                message!("reaper run: {line}");
            }
        }
        let line = to_json(report);
        if self.args.json {
            let written = std::io::stderr().write_all(&line);
            written
                .context("the run has ended, but its --json report cannot be written to stderr")?;
        }
        self.file.as_ref().map_or(Ok(()), |file| file.write(&line))
    }
}

impl ReportFile {
    fn resolve(path: &Path) -> anyhow::Result<ReportFile> {
        let target = || -> Result<TargetFile, HeldPathError> {
            Ok(match HeldFile::open(path)? {
                Some(file) => TargetFile::Special(file),
                None => {
                    let path = held_path::without_dangling_link(path);
                    TargetFile::Regular(HeldPath::resolve(&path)?)
                }
            })
        };
        let cannot = |error: HeldPathError| {
            let path = path.display();
            // The other errors say what to do.
            let advice = match error {
                HeldPathError::Io { .. } => format!("; {ELSEWHERE}"),
                _ => String::new(),
            };
            anyhow::anyhow!(
                "the command was not started, because --report {path} cannot be written: {error}{advice}"
            )
        };
        Ok(ReportFile {
            path: path.into(),
            file: target().map_err(cannot)?,
        })
    }

    fn write(&self, line: &[u8]) -> anyhow::Result<()> {
        let written = match &self.file {
            TargetFile::Regular(path) => path.replace(line),
            TargetFile::Special(file) => file.write(line),
        };
        written.map_err(|error| {
            let (path, error) = (self.path.display(), error.advised_or(ELSEWHERE));
            anyhow::anyhow!("the run has ended, but --report {path} cannot be written: {error}")
        })
    }
}

/// Returns the lines about the end of a run: one if a time limit has ended it, otherwise none. With `verbose` also one
/// for each process that was ended, and one with their number.
fn summary(report: &RunReport, verbose: bool) -> Vec<String> {
    let option = match report.outcome {
        RunOutcome::Timeout => "--timeout",
        RunOutcome::Idle => "--idle",
        _ => "",
    };
    let limit = report.limit.filter(|_| !option.is_empty());
    let reaped = count(report.reaped() as u64, "process", "processes");
    let mut lines = Vec::new();
    if verbose {
        let listed = report.processes.iter();
        lines.extend(listed.map(|process| {
            let (pid, command, signal) = (process.pid, &process.command, process.signal);
            format!("reaped pid {pid} ({command}): {signal}")
        }));
        let unlisted = report.reaped().saturating_sub(report.processes.len());
        lines.extend((unlisted > 0).then(|| format!("reaped {unlisted} more")));
    }
    match limit {
        Some(limit) => lines.push(format!(
            "ended after {option} {}, {reaped} reaped",
            show_duration(limit)
        )),
        None if verbose => lines.push(format!("{reaped} reaped")),
        None => {}
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::run::{CommandExit, EndedProcess};

    fn report(outcome: RunOutcome, limit: Option<u64>, pids: &[u32]) -> RunReport {
        let one = |pid: &u32| EndedProcess {
            pid: *pid,
            command: "sleep".into(),
            signal: "SIGTERM",
        };
        RunReport {
            schema: 1,
            run_id: None,
            name: None,
            session: None,
            agent: None,
            command: vec!["sleep".into()],
            pid: 7,
            outcome,
            end: Some(CommandExit::Killed(15)),
            duration: Duration::from_secs(2),
            limit: limit.map(Duration::from_secs),
            ended: pids.iter().filter(|pid| **pid != 7).count(),
            killed: 0,
            processes: pids.iter().map(one).collect(),
            memory_rss: 0,
            survivors: Vec::new(),
            errors: Vec::new(),
        }
    }

    #[test]
    fn expired_limit_is_one_line_with_all_processes() {
        for (outcome, limit, pids, line) in [
            (
                RunOutcome::Timeout,
                1,
                &[7, 8, 9][..],
                "ended after --timeout 1s, 3 processes reaped",
            ),
            (
                RunOutcome::Timeout,
                2700,
                &[7],
                "ended after --timeout 45m, 1 process reaped",
            ),
            (
                RunOutcome::Idle,
                90,
                &[7, 8],
                "ended after --idle 1m 30s, 2 processes reaped",
            ),
        ] {
            let report = report(outcome, Some(limit), pids);
            assert_eq!(summary(&report, false), [line]);
            let verbose = summary(&report, true);
            assert_eq!(verbose.len(), pids.len() + 1, "{verbose:?}");
            assert_eq!(verbose[0], "reaped pid 7 (sleep): SIGTERM");
            assert_eq!(verbose.last().unwrap(), line);
        }
    }

    #[test]
    fn other_ends_are_shown_only_when_verbose() {
        for outcome in [
            RunOutcome::Success,
            RunOutcome::Failed,
            RunOutcome::Death,
            RunOutcome::Cancelled,
        ] {
            let mut report = report(outcome, None, &[8, 9]);
            assert_eq!(summary(&report, false), [""; 0]);
            assert_eq!(summary(&report, true)[2], "2 processes reaped");
            report.ended = 1500;
            assert_eq!(
                summary(&report, true)[2..],
                ["reaped 1498 more", "1500 processes reaped"]
            );
        }
    }
}
