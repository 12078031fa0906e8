//! `reaper agents`: lists the agents that the rules recognise.

use std::fmt::Write;

use super::client::{BOLD, DIM, client, print};
use super::show::{NAME_MAX, count, fit, time, width, wrap};
use super::{Failure, ServiceArgs};
use crate::api::{AgentsResponse, SessionInfo};
use crate::export::printable;

/// Longest description of a rule's match, in characters.
const MATCH_MAX: usize = 1000;

pub(super) fn run(service: &ServiceArgs) -> Result<(), Failure> {
    let response = client(service).get("/v1/agents")?;
    print(service, &response, |agents: AgentsResponse| {
        table(&agents, width())
    })
}

fn table(agents: &AgentsResponse, width: Option<usize>) -> String {
    let mut out = String::new();
    for agent in &agents.agents {
        let open = match agent.sessions.len() {
            0 => String::new(),
            n => format!(": {}", count(n as u64, "session", "sessions")),
        };
        let name = printable(&agent.name, NAME_MAX);
        let kind = match &*agent.kind {
            "server" => " (agent's server)",
            _ => "",
        };
        let _ = writeln!(out, "{BOLD}{name}{BOLD:#}{kind}{open}");
        for session in &agent.sessions {
            out += &wrap(&printable(&line(session), 4 * NAME_MAX), 4, width);
        }
        for alternative in &agent.matches {
            let alternative = fit(alternative, 4, MATCH_MAX, width);
            let _ = writeln!(out, "    {DIM}{alternative}{DIM:#}");
        }
    }
    out
}

fn line(session: &SessionInfo) -> String {
    let members = count(session.members, "process", "processes");
    let (pid, id) = (session.root_pid, &session.id);
    let state = match &session.root_exit {
        None => format!("running for {}", time(session.age_s)),
        Some(how) => {
            let since = time(session.since_root_exit_s.unwrap_or_default());
            format!("exited {since} ago ({how})")
        }
    };
    format!("{pid}, {state}: {members}; session {id}")
}
