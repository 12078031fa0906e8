//! Reads from `tests/agents/drive.toml` how each agent is driven, and fills in placeholders.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::mock;
use super::process;
use crate::shell;

/// Entry of an agent in the file.
#[derive(Clone)]
pub struct Spec(Value);

/// Modes in which an agent runs, and the ways to end each.
const MODES: [(&str, &str); 4] = [
    ("print", "exit, INT, TERM, HUP, KILL, closed pane"),
    (
        "interactive",
        "exit, quit, INT, TERM, HUP, KILL, closed pane, killed server",
    ),
    (
        "acp",
        "exit, TERM, killed client, killed server, closed pane",
    ),
    (
        "server",
        "INT, TERM, HUP, killed client, killed server, closed pane",
    ),
];

/// Returns the modes in which an agent runs, and the ways to end each.
pub fn modes() -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    MODES
        .into_iter()
        .map(|(mode, endings)| (mode, endings.split(", ").collect()))
}

/// Reads the file.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn read() -> Result<Vec<Spec>> {
    let file = shell::workspace().join("tests/agents/drive.toml");
    let text = std::fs::read_to_string(&file)
        .with_context(|| format!("cannot read {}", file.display()))?;
    let value: Value =
        toml::from_str(&text).with_context(|| format!("cannot read {}", file.display()))?;
    let agents = value["agent"].as_array().context("no agents")?;
    Ok(agents.iter().cloned().map(Spec).collect())
}

impl Spec {
    pub fn name(&self) -> &str {
        self.0["name"].as_str().unwrap_or_default()
    }

    /// Returns why a mode, or with `""` the whole agent, is not driven; `None` if it is.
    pub fn not_run(&self, mode: &str) -> Option<&str> {
        match mode {
            "" => self.0["not_run"].as_str(),
            _ => self.0["not_run"][mode].as_str(),
        }
    }

    /// Returns the ways to end a mode; `None` if the agent is not driven in it.
    pub fn endings(&self, mode: &str) -> Option<Vec<&'static str>> {
        let (_, mut endings) = modes().find(|(name, _)| *name == mode)?;
        let settings = self.0[mode].as_object()?;
        let has = |ending: &&str| match *ending {
            "quit" => settings.contains_key("quit"),
            "killed server" => mode != "interactive" || settings.contains_key("server"),
            _ => true,
        };
        endings.retain(has);
        Some(endings)
    }

    /// Returns a text of a mode, with placeholders filled in.
    pub fn text(&self, mode: &str, key: &str, world: &Path) -> Option<String> {
        Some(fill(self.0[mode][key].as_str()?, world))
    }

    /// Returns a list of a mode.
    pub fn list(&self, mode: &str, key: &str) -> Vec<String> {
        let list = self.0[mode][key].as_array().into_iter().flatten();
        list.filter_map(|item| Some(item.as_str()?.to_owned()))
            .collect()
    }

    /// Returns pairs, such as `env` or `files`, with placeholders filled in.
    pub fn pairs(&self, key: &str, world: &Path) -> Vec<(String, String)> {
        let pairs = self.0[key].as_object().into_iter().flatten();
        pairs
            .filter_map(|(name, value)| Some((name.clone(), fill(value.as_str()?, world))))
            .collect()
    }
}

fn fill(text: &str, world: &Path) -> String {
    let world = world.display();
    let mcp = format!("{world}/bin/mcp");
    text.replace("{url}", &format!("http://127.0.0.1:{}", mock::PORT))
        .replace("{prompt}", &format!("{} now", mock::PROMPT))
        .replace("{project}", &format!("{world}/project"))
        .replace("{mcp}", &mcp)
        .replace("{actor}", process::COMMAND)
        .replace(
            "{servers}",
            &["mcp-polite", "mcp-deaf"]
                .map(|role| {
                    format!(
                        r#""{role}": {{"command": "{mcp}", "args": ["{}", "{role}"]}}"#,
                        process::COMMAND
                    )
                })
                .join(", "),
        )
}
