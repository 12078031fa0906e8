//! Prints the outcome of each test on each kernel, and a summary by group of tests.

use std::collections::BTreeSet;

use super::report::Run;

/// Prints a row for each test, and a summary with a row for each kernel.
pub fn print(runs: &[Run]) {
    let tests: BTreeSet<&String> = runs.iter().flat_map(|run| run.tests.keys()).collect();
    let width = tests.iter().map(|test| test.len()).max().unwrap_or(0);
    let row = |first: &str, cells: Vec<&str>| {
        let cells: String = cells.iter().map(|cell| format!("  {cell:10}")).collect();
        println!("{}", format!("{first:width$}{cells}").trim_end());
    };
    println!();
    row("", runs.iter().map(|run| run.name.as_str()).collect());
    for test in tests {
        let cell = |run: &Run| run.tests.get(test).cloned();
        let cells: Vec<String> = runs
            .iter()
            .map(|run| cell(run).unwrap_or("not run".to_owned()))
            .collect();
        row(test, cells.iter().map(String::as_str).collect());
    }
    println!();
    summary(runs).iter().for_each(|line| println!("{line}"));
    println!();
}

/// Returns a Markdown table of kernels and groups of tests.
fn summary(runs: &[Run]) -> Vec<String> {
    let groups: BTreeSet<&str> = runs
        .iter()
        .flat_map(|run| run.tests.keys())
        .map(|test| group(test))
        .collect();
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let head = ["kernel".to_owned()]
        .into_iter()
        .chain(groups.iter().map(|g| g.to_string()));
    let mut lines = vec![line(head.chain(["took".to_owned()]).collect())];
    lines.push(format!("|{}", "---|".repeat(groups.len() + 2)));
    for run in runs {
        let mut cells = vec![run.release.clone().unwrap_or(run.name.clone())];
        cells.extend(groups.iter().map(|group| counts(run, group)));
        cells.push(format!("{} s", run.took.as_secs()));
        lines.push(line(cells));
        if let Some(trouble) = &run.trouble {
            lines.push(format!("{}: {trouble}", run.name));
        }
    }
    lines
}

/// Returns the group of a test: the part before `::`.
fn group(test: &str) -> &str {
    test.split("::").next().unwrap_or(test)
}

/// Returns counts such as `3 passed, 1 failed`, without zeros.
fn counts(run: &Run, wanted: &str) -> String {
    let count = |outcome: &str| {
        run.tests
            .iter()
            .filter(|(test, o)| group(test) == wanted && *o == outcome)
            .count()
    };
    let parts = [
        ("ok", "passed"),
        ("failed", "failed"),
        ("ignored", "left out"),
    ];
    let parts: Vec<String> = parts
        .iter()
        .map(|(outcome, word)| (count(outcome), word))
        .filter(|(n, _)| *n > 0)
        .map(|(n, word)| format!("{n} {word}"))
        .collect();
    if parts.is_empty() {
        "not run".to_owned()
    } else {
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_groups_for_each_kernel() {
        let mut run = Run {
            name: "6.1".into(),
            ..Run::default()
        };
        for (test, outcome) in [("a::x", "ok"), ("a::y", "failed"), ("b::z", "ok")] {
            run.tests.insert(test.into(), outcome.into());
        }
        let lines = summary(&[run]);
        assert_eq!(lines[0], "| kernel | a | b | took |");
        assert_eq!(lines[2], "| 6.1 | 1 passed, 1 failed | 1 passed | 0 s |");
    }
}
