//! What was measured, beside what it should be.

use std::fmt::Write;

use serde_json::{Value, json};

/// A figure to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    pub what: String,
    /// `None` if it could not be measured; the note says why.
    pub measured: Option<f64>,
    pub unit: &'static str,
    pub goal: Option<Goal>,
    pub note: String,
}

impl Row {
    pub fn new(what: impl Into<String>, measured: f64, unit: &'static str) -> Row {
        Row {
            what: what.into(),
            measured: Some(measured),
            unit,
            goal: None,
            note: String::new(),
        }
    }

    pub fn missing(what: impl Into<String>, why: impl Into<String>) -> Row {
        Row {
            measured: None,
            ..Row::new(what, 0.0, "")
        }
        .note(why)
    }

    pub fn at_most(self, goal: f64) -> Row {
        Row {
            goal: Some(Goal::AtMost(goal)),
            ..self
        }
    }

    pub fn at_least(self, goal: f64) -> Row {
        Row {
            goal: Some(Goal::AtLeast(goal)),
            ..self
        }
    }

    pub fn note(self, note: impl Into<String>) -> Row {
        Row {
            note: note.into(),
            ..self
        }
    }

    /// Whether the goal is reached, if there is one and a figure.
    pub fn met(&self) -> Option<bool> {
        Some(match (self.goal?, self.measured?) {
            (Goal::AtMost(goal), measured) => measured <= goal,
            (Goal::AtLeast(goal), measured) => measured >= goal,
        })
    }

    fn cells(&self) -> [String; 5] {
        let figure = |sign, n: f64| {
            format!("{sign}{} {}", number(n), self.unit)
                .trim_end()
                .to_owned()
        };
        let goal = match self.goal {
            Some(Goal::AtMost(n)) => figure("≤ ", n),
            Some(Goal::AtLeast(n)) => figure("≥ ", n),
            None => String::new(),
        };
        let met = match self.met() {
            Some(true) => "ok",
            Some(false) => "SHORT",
            None => "",
        };
        let measured = self.measured.map_or("-".to_owned(), |n| figure("", n));
        [
            self.what.clone(),
            measured,
            goal,
            met.to_owned(),
            self.note.clone(),
        ]
    }
}

/// Three digits that count, thousands apart.
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

/// For people.
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

/// For programs.
pub fn json(rows: &[Row], host: &Value, quick: bool) -> Value {
    let rows = rows.iter().map(|row| {
        let (at_most, at_least) = match row.goal {
            Some(Goal::AtMost(n)) => (Some(n), None),
            Some(Goal::AtLeast(n)) => (None, Some(n)),
            None => (None, None),
        };
        json!({
            "what": row.what,
            "measured": row.measured,
            "unit": row.unit,
            "goal_at_most": at_most,
            "goal_at_least": at_least,
            "met": row.met(),
            "note": row.note,
        })
    });
    json!({ "schema": 1, "host": host, "quick": quick, "rows": rows.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_met_from_its_own_side() {
        let row = |n| Row::new("a", n, "µs");
        assert_eq!(row(2.0).at_most(2.0).met(), Some(true));
        assert_eq!(row(2.1).at_most(2.0).met(), Some(false));
        assert_eq!(row(2.1).at_least(2.0).met(), Some(true));
        assert_eq!(row(2.1).met(), None);
        assert_eq!(Row::missing("a", "why").at_most(1.0).met(), None);
    }

    #[test]
    fn numbers_have_three_digits_that_count() {
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
