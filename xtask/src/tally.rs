//! Counting tests: what passed, what failed, and what was left out.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell::{in_ci, say};

/// What came of the steps so far.
#[derive(Default)]
pub struct Tally {
    passed: u64,
    failed: u64,
    left_out: Vec<String>,
}

impl Tally {
    /// A step that counts as one test.
    pub fn step(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => self.fail(name, &error),
        }
    }

    /// A step that counted its tests itself.
    pub fn suite(&mut self, name: &str, result: Result<Counts>) {
        match result {
            Ok(counts) => {
                self.passed += counts.passed;
                self.failed += counts.failed;
                if counts.ignored > 0 {
                    self.leave_out(&format!(
                        "{} of the {name}, which ignore themselves",
                        counts.ignored
                    ));
                }
            }
            Err(error) => self.fail(name, &error),
        }
    }

    /// A step that could not be made, or one test that failed.
    pub fn fail(&mut self, name: &str, error: &anyhow::Error) {
        say(format_args!("{name} failed: {error:#}"));
        self.failed += 1;
    }

    /// Says at once what is left out and why, and remembers it.
    pub fn leave_out(&mut self, what: &str) {
        say(format_args!("left out: {what}"));
        self.left_out.push(what.to_owned());
    }

    /// Sums up in one line.
    ///
    /// # Errors
    /// Something failed, nothing was run, or something was left out in CI.
    pub fn conclude(self) -> Result<()> {
        let left_out = self.left_out.len();
        println!(
            "{} passed, {} failed, {left_out} left out",
            self.passed, self.failed
        );
        ensure!(self.passed + self.failed > 0, "no test has such a name");
        ensure!(self.failed == 0, "{} failed", self.failed);
        ensure!(
            !in_ci() || left_out == 0,
            "left out in CI: {}",
            self.left_out.join("; ")
        );
        Ok(())
    }
}

/// What a test binary says of itself at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// Runs tests, passes on what they print and adds up their closing lines.
pub fn counted(command: &mut Command) -> Result<Counts> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the tests")?;
    let stdout = child.stdout.take().context("no output of the tests")?;
    let mut counts = Counts::default();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("output of the tests")?;
        let mut out = std::io::stdout().lock();
        out.write_all(&line)
            .and_then(|()| out.write_all(b"\n"))
            .context("standard output")?;
        if let Some(more) = closing_line(&String::from_utf8_lossy(&line)) {
            counts.passed += more.passed;
            counts.failed += more.failed;
            counts.ignored += more.ignored;
        }
    }
    let status = child.wait().context("waiting for the tests")?;
    // A build that fails or a test binary that dies leaves no closing line to count.
    ensure!(status.success() || counts.failed > 0, "{status}");
    Ok(counts)
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; …`
fn closing_line(line: &str) -> Option<Counts> {
    let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut counts = Counts::default();
    for part in numbers.split("; ") {
        let Some((number, what)) = part.split_once(' ') else {
            continue;
        };
        let number = number.parse().unwrap_or(0);
        match what {
            "passed" => counts.passed = number,
            "failed" => counts.failed = number,
            "ignored" => counts.ignored = number,
            _ => {}
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_libtest_are_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.02s";
        assert_eq!(
            closing_line(line),
            Some(Counts {
                passed: 12,
                failed: 3,
                ignored: 1
            })
        );
        assert_eq!(closing_line("test a::b ... ok"), None);
    }
}
