//! Table of the driven agents, and its Markdown.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::spec::modes;
use crate::shell;

/// Content of `tests/agents/driven.json`.
pub struct Driven(pub Value);

fn file() -> PathBuf {
    shell::workspace().join("tests/agents/driven.json")
}

impl Driven {
    /// Reads the file; returns an empty table if it does not exist.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn read() -> Result<Driven> {
        let Ok(text) = std::fs::read_to_string(file()) else {
            return Ok(Driven(json!({"agents": {}})));
        };
        Ok(Driven(serde_json::from_str(&text).with_context(|| {
            format!("cannot read {}", file().display())
        })?))
    }

    /// Writes the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.0)? + "\n";
        std::fs::write(file(), text).with_context(|| format!("cannot write {}", file().display()))
    }
}

/// Heading and key of the tables.
const HEAD: &str = "
## What they leave behind

The agents were driven against mock models in separate namespaces. Each had two MCP servers, of which one does not exit when
its input closes. A tool call left four processes behind: a plain child, one after `setsid`, one after `nohup` and a server
that listens. Then the agent was ended. A cell gives the number of processes that are left 10 s later, without reaper → with
it.

- *kept*: left on purpose, by a rule or with an agent that is alive. After exit status 0 it is the server that listens, for
  10 minutes; some agents also exit with 0 after a signal. For codex and cline it is also the server that the agent starts
  to outlive it, with that server's tree.
- *ignored*: the agent itself still ran 10 s after the signal, so nothing was due.
- *touched*: processes of the user that ended with it: a shell, tmux, a job, another server.
- *–*: the agent has no such ending: no command to quit, or no server.

`cargo xtask agents --drive` makes these tables. `tests/agents/driven.json` has each process and the hash of each log.
";

/// Renders a table of agents and endings for each mode, and the reasons why runs are missing.
pub fn markdown(driven: &Driven) -> String {
    let mut text = HEAD.to_owned();
    let date = driven.0["date"].as_str().unwrap_or_default();
    let reaper = driven.0["reaper"].as_str().unwrap_or_default();
    let _ = writeln!(text, "\nDriven on {date}, with {reaper}.");
    let agents = || driven.0["agents"].as_object().into_iter().flatten();
    for (mode, endings) in modes() {
        let _ = write!(text, "\n| {mode} |");
        for ending in &endings {
            let _ = write!(text, " {ending} |");
        }
        let _ = writeln!(text, "\n|---|{}", "---|".repeat(endings.len()));
        for (name, agent) in agents() {
            let cells = &agent["modes"][mode];
            if !cells.is_object() {
                continue;
            }
            let version = agent["version"].as_str().unwrap_or_default();
            let _ = write!(text, "| {name} {version} |");
            for ending in &endings {
                let _ = write!(text, " {} |", cell(&cells[*ending]));
            }
            text.push('\n');
        }
    }
    text.push_str("\nNot run:\n\n");
    for (name, agent) in agents() {
        for (mode, why) in agent["not run"].as_object().into_iter().flatten() {
            let why = why.as_str().unwrap_or_default();
            let _ = writeln!(text, "- {name}, {mode}: {why}");
        }
        for (mode, endings) in agent["modes"].as_object().into_iter().flatten() {
            for (ending, sides) in endings.as_object().into_iter().flatten() {
                let mut problems = ["without", "with"].into_iter();
                let problem = problems.find_map(|side| sides[side]["problem"].as_str());
                if let Some(problem) = problem {
                    let _ = writeln!(text, "- {name}, {mode}, {ending}: {problem}");
                }
            }
        }
    }
    text
}

/// Renders a cell, the number of processes left without and with reaper, such as `5 → 0`.
fn cell(cell: &Value) -> String {
    if cell.is_null() {
        return "–".to_owned();
    }
    let side = |side: &Value| {
        if side["problem"].is_string() {
            return "not run".to_owned();
        }
        let left = side["left"].as_array().map_or(&[][..], Vec::as_slice);
        let kept = left
            .iter()
            .filter(|process| process["why"].is_string())
            .count();
        let mut text = match (left.len() - kept, kept) {
            _ if side["ignored"] == true => "ignored".to_owned(),
            (count, 0) => count.to_string(),
            (0, kept) => format!("{kept} kept"),
            (count, kept) => format!("{count} and {kept} kept"),
        };
        let touched = side["touched"].as_array().map_or(0, Vec::len);
        if touched > 0 {
            let _ = write!(text, ", **touched {touched}**");
        }
        text
    };
    format!("{} → {}", side(&cell["without"]), side(&cell["with"]))
}
