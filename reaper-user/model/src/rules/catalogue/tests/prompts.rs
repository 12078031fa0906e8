//! 100 command lines with prompts. Half of the prompts contain a subcommand or an option with which the agent is a server.

use super::{class, image};
use crate::rules;

/// Rule, comm, exe and first arguments of each agent. The arguments of the table follow.
const AGENTS: [(&str, &str, &str, &str); 10] = [
    (
        "claude-code",
        "claude",
        "/home/u/.local/share/claude/versions/2.1.50",
        "claude",
    ),
    (
        "codex",
        "codex",
        "/usr/lib/node_modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex",
        "codex",
    ),
    (
        "opencode",
        "opencode",
        "/home/u/.opencode/bin/opencode",
        "opencode",
    ),
    ("crush", "crush", "/usr/bin/crush", "crush"),
    ("amp", "amp", "/home/u/.amp/bin/amp", "amp"),
    (
        "cursor-agent",
        "node",
        "/home/u/.local/share/cursor-agent/versions/1/node",
        "agent|--use-system-ca|/home/u/.local/share/cursor-agent/versions/1/index.js",
    ),
    (
        "gemini-cli",
        "node",
        "/usr/bin/node",
        "node|/usr/bin/gemini",
    ),
    ("qwen-code", "node", "/usr/bin/node", "node|/usr/bin/qwen"),
    (
        "copilot-cli",
        "node",
        "/usr/bin/node",
        "node|/usr/bin/copilot",
    ),
    ("goose", "goose", "/home/u/.local/bin/goose", "goose"),
];

#[test]
fn prompt_is_never_taken_for_a_subcommand() {
    let rules = rules::built_in();
    let table = include_str!("prompts.txt").lines();
    let lines: Vec<_> = table
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let wrong = lines.iter().filter_map(|line| {
        let (agent, args) = line.split_once("; ").unwrap();
        let (_, comm, exe, before) = AGENTS.iter().find(|known| known.0 == agent).unwrap();
        let class = class(&rules, &image(comm, exe, &format!("{before}|{args}")));
        (class != format!("agent {agent}")).then(|| format!("{class}: {line}"))
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(
        wrong.is_empty(),
        "{} classified wrongly:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(lines.len(), 100);
}
