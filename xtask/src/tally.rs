//! Counts passed, failed and skipped tests, and measures their duration.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::shell::{in_ci, say};

/// Number of slowest tests in the summary.
const SLOWEST: usize = 10;
/// Number of failed tests whose reports the summary repeats.
const REPORTS: usize = 3;
/// Number of lines of a report that the summary repeats.
const REPORT_LINES: usize = 40;

/// Results of the stages so far.
#[derive(Default)]
pub struct Tally {
    counts: Counts,
    left_out: Vec<String>,
    stages: Vec<(&'static str, Duration)>,
}

/// Results of one or more test executables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    pub passed: u64,
    pub ignored: u64,
    /// Names of the tests and stages that failed.
    pub failed: Vec<String>,
    /// Duration in seconds and name.
    slow: Vec<(f64, String)>,
    /// First lines of the reports of failed tests, which stand far above the end of the output.
    reports: Vec<String>,
    /// Whether the line that is parsed next belongs to the last report.
    in_report: bool,
}

impl Tally {
    /// Announces a stage, runs it and records its duration.
    pub fn stage<T>(&mut self, name: &'static str, work: impl FnOnce(&mut Tally) -> T) -> T {
        say(name);
        let began = Instant::now();
        let result = work(self);
        self.stages.push((name, began.elapsed()));
        result
    }

    /// Adds a check that counts as one test.
    pub fn step(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => self.counts.passed += 1,
            Err(error) => self.fail(name, &error),
        }
    }

    /// Adds the results of test executables.
    pub fn suite(&mut self, name: &str, result: Result<Counts>) {
        match result {
            Ok(counts) => {
                if counts.ignored > 0 {
                    self.leave_out(&format!("{} ignored tests of the {name}", counts.ignored));
                }
                self.counts.add(counts);
            }
            Err(error) => self.fail(name, &error),
        }
    }

    /// Adds a failed check or test.
    pub fn fail(&mut self, name: &str, error: &anyhow::Error) {
        say(format_args!("{name} failed: {error:#}"));
        self.counts.failed.push(name.to_owned());
    }

    /// Prints what is skipped and why, and records it.
    pub fn leave_out(&mut self, what: &str) {
        say(format_args!("left out: {what}"));
        self.left_out.push(what.to_owned());
    }

    /// Returns the results without printing them.
    pub fn into_counts(self) -> Counts {
        self.counts
    }

    /// Prints the stages, the slowest tests and a summary.
    ///
    /// # Errors
    /// A test failed, none was run, or one was skipped in CI.
    pub fn conclude(mut self) -> Result<()> {
        for (name, took) in &self.stages {
            println!("{:>7}  {name}", minutes(*took));
        }
        self.counts.slow.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (seconds, name) in self.counts.slow.iter().take(SLOWEST) {
            println!("{seconds:>6.1}s  {name}");
        }
        for report in self.counts.reports.iter().take(REPORTS) {
            println!("{report}");
        }
        for name in &self.counts.failed {
            println!("failed: {name}");
        }
        let (passed, failed) = (self.counts.passed, self.counts.failed.len());
        let left_out = self.left_out.len();
        let took = self.stages.iter().map(|(_, took)| *took).sum();
        println!(
            "{passed} passed, {failed} failed, {left_out} left out in {}",
            minutes(took)
        );
        ensure!(passed > 0 || failed > 0, "no test matches these names");
        ensure!(failed == 0, "{failed} failed");
        ensure!(
            !in_ci() || left_out == 0,
            "left out in CI: {}",
            self.left_out.join("; ")
        );
        Ok(())
    }
}

impl Counts {
    /// Adds the results of other executables.
    pub fn add(&mut self, more: Counts) {
        self.passed += more.passed;
        self.ignored += more.ignored;
        self.failed.extend(more.failed);
        self.slow.extend(more.slow);
        self.reports.extend(more.reports);
    }

    /// Collects the reports of failed tests, each below a line `---- NAME ----`.
    fn read_report(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.in_report = true;
            self.reports.push(line.to_owned());
        } else if line == "failures:" {
            self.in_report = false;
        } else if self.in_report
            && let Some(report) = self.reports.last_mut()
            && report.lines().count() <= REPORT_LINES
        {
            *report += &format!("\n{line}");
        }
    }

    /// Parses a line of a test executable. Returns whether the line is for xtask only and must not be printed.
    fn read(&mut self, line: &str) -> bool {
        if let Some(slow) = line.strip_prefix("slow ") {
            self.slow.extend(slow_test(slow));
            return true;
        }
        self.read_report(line);
        if let Some(test) = line.strip_prefix("test ")
            && let Some((name, result)) = test.split_once(" ... ")
        {
            let name = name.trim_end();
            if result.starts_with("FAILED") {
                self.failed.push(name.to_owned());
            }
            if let Some((_, time)) = result.split_once('<') {
                let seconds = time.strip_suffix("s>").and_then(|s| s.parse().ok());
                self.slow.extend(seconds.map(|s| (s, name.to_owned())));
            }
        }
        if let Some((passed, ignored)) = closing_line(line) {
            self.passed += passed;
            self.ignored += ignored;
        }
        false
    }
}

/// Formats a duration as minutes and seconds.
pub fn minutes(duration: Duration) -> String {
    let seconds = duration.as_secs();
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

/// Runs a test executable, copies its output to `out` and returns its results.
///
/// # Errors
/// The executable cannot be started, or fails without a failed test.
pub fn counted(command: &mut Command, out: &mut dyn Write) -> Result<Counts> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the tests")?;
    let stdout = child.stdout.take().context("no output of the tests")?;
    let mut counts = Counts::default();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("output of the tests")?;
        if !counts.read(&String::from_utf8_lossy(&line)) {
            out.write_all(&line)
                .and_then(|()| out.write_all(b"\n"))
                .context("output of the tests")?;
        }
    }
    let status = child.wait().context("waiting for the tests")?;
    // A test executable that is killed prints no summary.
    ensure!(
        status.success() || !counts.failed.is_empty(),
        "the tests exited with {status}"
    );
    Ok(counts)
}

/// Parses `3.21 NAME`.
fn slow_test(line: &str) -> Option<(f64, String)> {
    let (seconds, name) = line.split_once(' ')?;
    Some((seconds.parse().ok()?, name.to_owned()))
}

/// Returns the numbers of passed and ignored tests in `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
fn closing_line(line: &str) -> Option<(u64, u64)> {
    let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |what: &str| {
        let mut parts = numbers.split("; ").filter_map(|part| part.split_once(' '));
        let found = parts.find(|(_, its)| *its == what);
        found.and_then(|(number, _)| number.parse().ok())
    };
    Some((number("passed")?, number("ignored")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_test_executables_is_counted() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests",
            "test a::b ... ok <0.250s>",
            "test a::c   ... FAILED",
            "slow 3.50 real::d",
            "failures:",
            "---- a::c ----",
            "the message",
            "failures:",
            "    a::c",
            "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.02s",
        ] {
            assert_eq!(counts.read(line), line.starts_with("slow"), "{line}");
        }
        let expected = Counts {
            passed: 12,
            ignored: 1,
            failed: vec!["a::c".to_owned()],
            slow: vec![(0.25, "a::b".to_owned()), (3.5, "real::d".to_owned())],
            reports: vec!["---- a::c ----\nthe message".to_owned()],
            in_report: false,
        };
        assert_eq!(counts, expected);
    }

    #[test]
    fn durations_are_minutes_and_seconds() {
        assert_eq!(minutes(Duration::from_secs(432)), "7:12");
        assert_eq!(minutes(Duration::from_millis(9_900)), "0:09");
    }
}
