//! Sums up what would have been reaped, for the end of a service that only observes.

use std::cmp::Reverse;

use super::layout::{Line, NOTE, Subject, cut};
use crate::export::command::short_command;
use crate::export::record::ProcessRef;
use crate::export::text::counted;

/// Limit of agents that are remembered.
const AGENTS_MAX: usize = 50;
/// Limit of different commands of an agent that are shown.
const COMMANDS_MAX: usize = 5;
/// Maximum number of characters of a command.
const COMMAND_LENGTH: usize = 32;
/// Limit of different commands of an agent that are remembered.
const REMEMBERED_MAX: usize = 100;

/// Processes that would have been reaped, by agent.
#[derive(Default)]
pub(super) struct Observed {
    agents: Vec<Agent>,
    /// Number of processes of further agents.
    others: u64,
}

struct Agent {
    name: String,
    /// Pid of the first root; 0 for leftovers from before the service.
    pid: u32,
    /// Command of the root, empty if it is unknown.
    command: String,
    /// Different commands with their numbers.
    processes: Vec<(String, u64)>,
    /// Number of processes with further commands.
    others: u64,
}

impl Observed {
    /// Adds a process that would have been reaped. `root` is the command of its agent.
    pub(super) fn add(&mut self, process: &ProcessRef, agent: &str, root: Option<&str>) {
        let session = process.session.as_ref();
        let pid = session.map_or(0, |session| session.first_root.pid);
        let is_it = |it: &Agent| it.name == agent && it.pid == pid;
        let at = match self.agents.iter().position(is_it) {
            Some(at) => at,
            None if self.agents.len() >= AGENTS_MAX => {
                self.others += 1;
                return;
            }
            None => {
                self.agents.push(Agent {
                    name: agent.to_owned(),
                    pid,
                    command: root.unwrap_or_default().to_owned(),
                    processes: Vec::new(),
                    others: 0,
                });
                self.agents.len() - 1
            }
        };
        let agent = &mut self.agents[at];
        let command = cut(&short_command(&process.image), COMMAND_LENGTH);
        let seen = agent.processes.iter().position(|(it, _)| *it == command);
        match seen {
            Some(at) => agent.processes[at].1 += 1,
            None if agent.processes.len() < REMEMBERED_MAX => {
                agent.processes.push((command, 1));
            }
            None => agent.others += 1,
        }
    }

    /// Returns one line for each agent.
    pub(super) fn lines(&self) -> Vec<Line> {
        let line = |agent: &Agent| Line {
            style: NOTE,
            event: "observed",
            subject: Some(Subject {
                agent: agent.name.clone(),
                pid: agent.pid,
                command: agent.command.clone(),
            }),
            detail: agent.text(),
            more: Vec::new(),
        };
        let mut lines: Vec<Line> = self.agents.iter().map(line).collect();
        if self.others > 0 {
            lines.push(Line {
                style: NOTE,
                event: "observed",
                subject: None,
                detail: format!("{} of further agents would have been reaped", self.others),
                more: Vec::new(),
            });
        }
        lines
    }
}

impl Agent {
    /// Returns text such as `5 processes would have been reaped: 3 of sleep 60, 2 of node vite.js`.
    fn text(&self) -> String {
        let mut processes: Vec<_> = self.processes.iter().collect();
        processes.sort_by_key(|(_, count)| Reverse(*count));
        let shown = processes.iter().take(COMMANDS_MAX);
        let mut names: Vec<String> = shown
            .map(|(command, count)| match count {
                1 => command.clone(),
                n => format!("{n} of {command}"),
            })
            .collect();
        let rest = processes.iter().skip(COMMANDS_MAX).map(|(_, n)| n);
        let rest = rest.sum::<u64>() + self.others;
        names.extend((rest > 0).then(|| counted(rest, "other", "others")));
        let total: u64 = self.processes.iter().map(|(_, n)| n).sum::<u64>() + self.others;
        let total = counted(total, "process", "processes");
        let names = names.join(", ");
        format!("{total} would have been reaped: {names}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_commands_are_counted_together() {
        let agent = Agent {
            name: "claude-code".into(),
            pid: 42,
            command: String::new(),
            processes: vec![("vite".into(), 1), ("sleep 60".into(), 2)],
            others: 1,
        };
        assert_eq!(
            agent.text(),
            "4 processes would have been reaped: 2 of sleep 60, vite, 1 other"
        );
    }
}
