//! Shows what keeps a process from being reaped, for `reaper explain` and `reaper history`.

use std::fmt::Write as _;

use super::client::DIM;
use crate::export::{KeepAdvice, printable};

/// Longest line of a suggested rule, in characters.
const LINE_MAX: usize = 400;

/// Returns the advice as lines. All but those of the rule fit into 80 columns.
pub(super) fn keep_advice(advice: &KeepAdvice) -> String {
    let command = printable(&advice.command, LINE_MAX);
    let column = command.chars().count().max("REAPER_KEEP=1".len());
    let mut out = match advice.too_late {
        true => "Each of these would have kept it, and keeps the next one:\n",
        false => "Each of these keeps it from being reaped:\n",
    }
    .to_owned();
    let mut row = |name: &str, text: &str| {
        let _ = writeln!(out, "  {name:<column$}  {DIM}{text}{DIM:#}");
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
