//! Parses the report of a machine: JSON lines of its init and of libtest.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

/// Outcome of a skipped test, as libtest names it.
pub const LEFT_OUT: &str = "ignored";

/// Results of the tests on one kernel.
#[derive(Default)]
pub struct Run {
    /// Name of the kernel that the user specified.
    pub name: String,
    /// Release of the kernel; `None` until init has started.
    pub release: Option<String>,
    /// Outcomes by test, as libtest names them: `ok`, `failed`, `ignored`.
    pub tests: BTreeMap<String, String>,
    /// Whether all tests were run.
    pub ended: bool,
    /// Exit status of the tests, as init reports it.
    pub status: Option<String>,
    /// Reason why the tests did not finish.
    pub trouble: Option<String>,
    pub took: Duration,
}

impl Run {
    /// Returns the tests with this outcome.
    pub fn named(&self, outcome: &str) -> impl Iterator<Item = &String> {
        let tests = self.tests.iter().filter(move |(_, o)| *o == outcome);
        tests.map(|(test, _)| test)
    }

    /// Returns what a complete report lacks.
    pub fn missing(&self) -> Option<String> {
        let run = self.tests.values().filter(|outcome| *outcome != LEFT_OUT);
        match &self.status {
            None => Some("the machine stopped before its tests finished".to_owned()),
            Some(status) if !self.ended => Some(format!("the tests did not finish: {status}")),
            Some(status) if run.count() == 0 => Some(format!("no test was run: {status}")),
            Some(_) => None,
        }
    }

    /// Reads a line and returns the text to print.
    pub fn read_line(&mut self, line: &str) -> Option<String> {
        let report: Value = serde_json::from_str(line).ok()?;
        let text = |key: &str| report[key].as_str();
        match (text("type")?, text("event")) {
            ("guest", _) => {
                if let Some(release) = text("kernel") {
                    self.release = Some(release.to_owned());
                }
                if let Some(status) = text("ended") {
                    self.status = Some(status.to_owned());
                }
                None
            }
            ("suite", Some("ok" | "failed")) => {
                self.ended = true;
                None
            }
            ("test", Some(outcome @ ("ok" | "failed" | "ignored"))) => {
                let test = text("name")?;
                self.tests.insert(test.to_owned(), outcome.to_owned());
                let why =
                    text("stdout").map(|why| format!("\n    {}", why.replace('\n', "\n    ")));
                Some(format!(
                    "{:10} {outcome:7} {test}{}",
                    self.name,
                    why.unwrap_or_default()
                ))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_lines_are_read_and_noise_is_ignored() {
        let mut run = Run::default();
        for line in [
            r#"{"type":"guest","kernel":"6.1.0"}"#,
            "[   12.3] some driver: hello",
            r#"{ "type": "suite", "event": "started", "test_count": 2 }"#,
            r#"{ "type": "test", "event": "started", "name": "a::b" }"#,
            r#"{ "type": "test", "name": "a::b", "event": "ok" }"#,
            r#"{ "type": "test", "name": "a::c", "event": "failed", "stdout": "Error: no" }"#,
            r#"{ "type": "suite", "event": "failed", "passed": 1, "failed": 1 }"#,
        ] {
            run.read_line(line);
        }
        assert_eq!(run.release.as_deref(), Some("6.1.0"));
        assert_eq!(
            (run.named("ok").count(), run.named("failed").count()),
            (1, 1)
        );
        assert_eq!(
            run.missing().as_deref(),
            Some("the machine stopped before its tests finished")
        );
        run.read_line(r#"{"type":"guest","ended":"Exited(Pid(2), 101)"}"#);
        assert_eq!(run.missing(), None);
        run.ended = false;
        assert_eq!(
            run.missing().as_deref(),
            Some("the tests did not finish: Exited(Pid(2), 101)")
        );
    }
}
