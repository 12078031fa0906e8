//! Shows what keeps a process from being reaped, for `reaper explain` and `reaper history`.

use std::fmt::Write as _;

use super::client::DIM;
use super::hint::{command, hints};
use super::show::wrap;
use crate::export::{KeepAdvice, printable};

/// Longest line of a suggested rule, in characters.
const LINE_MAX: usize = 400;
/// Widest name of a way to keep a process that has its description beside it, in characters.
const NAME_MAX: usize = 20;

/// Returns the advice as lines. Those of the rule are not wrapped.
pub(super) fn keep_advice(advice: &KeepAdvice, width: Option<usize>) -> String {
    let mut out = match advice.too_late {
        true => "Each of these would have kept it, and keeps the next one:\n",
        false => "Each of these keeps it from being reaped:\n",
    }
    .to_owned();
    let command = printable(&command(&advice.command), LINE_MAX);
    let names = [command.chars().count(), "REAPER_KEEP=1".len()].into_iter();
    let longest = names.filter(|name| *name <= NAME_MAX).max();
    // With an indentation of two spaces, and two spaces behind the names.
    let column = longest.unwrap_or_default() + 4;
    let mut row = |name: &str, text: &str| {
        let text = wrap(&hints(text), column, width);
        let text = match column - 4 < name.chars().count() {
            true => format!("\n{text}"),
            false => text[column..].into(),
        };
        let text = text.trim_end();
        let _ = writeln!(out, "  {name:<0$}{DIM}{text}{DIM:#}", column - 2);
    };
    if let Some(variable) = &advice.environment {
        let variable = printable(variable, LINE_MAX);
        row(
            &variable,
            "in its environment when it starts; children inherit it",
        );
    }
    row(&command, "while it runs; --tree keeps its descendants too");
    if let Some(rule) = &advice.rule {
        row("[[keep]]", "in the config, then `reaper config reload`:");
        for line in rule.lines() {
            let _ = writeln!(out, "    {}", printable(line, LINE_MAX));
        }
    }
    out
}
