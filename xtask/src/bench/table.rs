//! Table of results and goals.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Value, json};

/// Row of the table: a result and its goal.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub what: String,
    /// Result; `None` if the measurement failed. The note says why.
    pub measured: Option<f64>,
    pub unit: &'static str,
    pub goal_at_most: Option<f64>,
    pub goal_at_least: Option<f64>,
    pub note: String,
}

impl Row {
    pub fn new(what: impl Into<String>, measured: f64, unit: &'static str) -> Row {
        Row {
            what: what.into(),
            measured: Some(measured),
            unit,
            ..Row::default()
        }
    }

    pub fn missing(what: impl Into<String>, why: impl Into<String>) -> Row {
        Row {
            what: what.into(),
            note: why.into(),
            ..Row::default()
        }
    }

    pub fn at_most(self, goal: impl Into<Option<f64>>) -> Row {
        Row {
            goal_at_most: goal.into(),
            ..self
        }
    }

    pub fn at_least(self, goal: f64) -> Row {
        Row {
            goal_at_least: Some(goal),
            ..self
        }
    }

    pub fn note(self, note: impl Into<String>) -> Row {
        Row {
            note: note.into(),
            ..self
        }
    }

    /// Returns whether the goal is met; `None` without a result or a goal.
    pub fn met(&self) -> Option<bool> {
        let measured = self.measured?;
        let most = self.goal_at_most.map(|goal| measured <= goal);
        most.or(self.goal_at_least.map(|goal| measured >= goal))
    }

    fn cells(&self) -> [String; 5] {
        let figure = |sign: &str, n: Option<f64>| {
            let text = n.map(|n| format!("{sign}{} {}", number(n), self.unit));
            text.map(|text| text.trim_end().to_owned())
        };
        let goal = figure("≤ ", self.goal_at_most).or(figure("≥ ", self.goal_at_least));
        let met = match self.met() {
            Some(true) => "ok",
            Some(false) => "SHORT",
            None => "",
        };
        [
            self.what.clone(),
            figure("", self.measured).unwrap_or("-".to_owned()),
            goal.unwrap_or_default(),
            met.to_owned(),
            self.note.clone(),
        ]
    }
}

/// Formats a number with three significant digits and separators of thousands.
fn number(n: f64) -> String {
    if n == 0.0 || n.abs() >= 100.0 {
        let digits = format!("{:.0}", n.abs());
        let groups: Vec<_> = digits
            .as_bytes()
            .rchunks(3)
            .rev()
            .map(String::from_utf8_lossy)
            .collect();
        return format!("{}{}", if n < 0.0 { "-" } else { "" }, groups.join(","));
    }
    let places = if n.abs() >= 10.0 { 1 } else { 2 };
    format!("{n:.places$}")
}

/// Returns the table as text.
pub fn text(rows: &[Row]) -> String {
    let head = ["what", "measured", "goal", "", "note"].map(str::to_owned);
    let lines: Vec<_> = std::iter::once(head)
        .chain(rows.iter().map(Row::cells))
        .collect();
    let width = |column: usize| {
        let widths = lines.iter().map(|cells| cells[column].chars().count());
        widths.max().unwrap_or(0)
    };
    let widths: [usize; 4] = std::array::from_fn(width);
    let mut text = String::new();
    for [what, measured, goal, met, note] in &lines {
        let [w, m, g, k] = widths;
        let line = format!("{what:<w$}  {measured:>m$}  {goal:>g$}  {met:<k$}  {note}");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Returns the table as JSON.
pub fn json(rows: &[Row], host: &Value, quick: bool) -> Value {
    let rows = rows.iter().map(|row| {
        let mut object = json!(row);
        object["met"] = json!(row.met());
        object
    });
    json!({ "schema": 1, "host": host, "quick": quick, "rows": rows.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_upper_or_lower_limits() {
        let row = |n| Row::new("a", n, "µs");
        assert_eq!(row(2.0).at_most(2.0).met(), Some(true));
        assert_eq!(row(2.1).at_most(2.0).met(), Some(false));
        assert_eq!(row(2.1).at_least(2.0).met(), Some(true));
        assert_eq!(row(2.1).met(), None);
        assert_eq!(Row::missing("a", "why").at_most(1.0).met(), None);
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        let table = [
            (0.0, "0"),
            (0.123, "0.12"),
            (42.26, "42.3"),
            (-1.5, "-1.50"),
            (1234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
        ];
        for (n, expected) in table {
            assert_eq!(number(n), expected, "{n}");
        }
    }
}
