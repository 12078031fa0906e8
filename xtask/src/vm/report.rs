//! What the machine tells, line by line, and what came of its tests.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

/// The outcome of a test that was not run on purpose, in libtest's words.
pub const LEFT_OUT: &str = "ignored";

/// A kernel's tests, as far as they came.
#[derive(Default)]
pub struct Run {
    /// What the user calls the kernel.
    pub name: String,
    /// What it calls itself, once it has run the tests' init.
    pub release: Option<String>,
    /// Test and outcome in libtest's words: `ok`, `failed`, `ignored`.
    pub tests: BTreeMap<String, String>,
    /// Whether the tests came to their end.
    pub ended: bool,
    /// How their process ended, in the init's words.
    pub status: Option<String>,
    /// Why the tests did not come to their end.
    pub trouble: Option<String>,
    pub took: Duration,
}

impl Run {
    /// The tests of this outcome.
    pub fn named(&self, outcome: &str) -> impl Iterator<Item = &String> {
        let tests = self.tests.iter().filter(move |(_, o)| *o == outcome);
        tests.map(|(test, _)| test)
    }

    /// What is wrong with a report that is over.
    pub fn missing(&self) -> Option<String> {
        let run = self.tests.values().filter(|outcome| *outcome != LEFT_OUT);
        match &self.status {
            None => Some("the machine ended before its tests did".to_owned()),
            Some(status) if !self.ended => Some(format!("the tests broke off: {status}")),
            Some(status) if run.count() == 0 => Some(format!("no test was run: {status}")),
            Some(_) => None,
        }
    }

    /// Takes in one line, and gives what of it is to be shown.
    pub fn take(&mut self, line: &str) -> Option<String> {
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
    fn reports_are_taken_in_and_noise_is_not() {
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
            run.take(line);
        }
        assert_eq!(run.release.as_deref(), Some("6.1.0"));
        assert_eq!(
            (run.named("ok").count(), run.named("failed").count()),
            (1, 1)
        );
        assert_eq!(
            run.missing().as_deref(),
            Some("the machine ended before its tests did")
        );
        run.take(r#"{"type":"guest","ended":"Exited(Pid(2), 101)"}"#);
        assert_eq!(run.missing(), None);
        run.ended = false;
        assert_eq!(
            run.missing().as_deref(),
            Some("the tests broke off: Exited(Pid(2), 101)")
        );
    }
}
