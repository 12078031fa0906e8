//! `reaper agents`: lists the agents that the rules recognise, and tests the rules against a process.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::client::{BOLD, DIM, client, other_services};
use super::show::{NAME_MAX, count, fit, row, time, width, wrap};
use super::user::load_readable;
use super::{Failure, ServiceArgs, parse_pid, sockets};
use crate::api::client::ClientError;
use crate::api::{AgentInfo, AgentsResponse, RuleTestResponse, SessionInfo, recognition};
use crate::config::Config;
use crate::export::{self, message, printable, to_json};
use reaper_host::facts::scan_processes;
use reaper_host::source::procfs::Procfs;
use reaper_model::ruleset::{Class, Ruleset, SessionKind};

/// Longest text about one rule, in characters.
const TEXT_MAX: usize = 1000;
/// Width of the column with the names of a process's properties.
const NAMES: usize = 9;

pub(super) const HELP: &str = "\
Without a service, the rules are those of the default config file or, without that file, the built-in ones. Which agents \
    run is then found by one look at the process table.

Examples:
  # List the known agents, and the pids of those that run
  reaper agents

  # Show how an agent is recognised, and its sessions
  reaper agents claude-code

  # Say for each rule why it does not recognise a process
  reaper agents --test 4250

  # List the names alone
  reaper agents --json | jq -r '.agents[].name'";

#[derive(Args)]
pub(super) struct AgentsArgs {
    /// Show these agents in detail.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Show each agent with the conditions of its rule and its sessions.
    #[arg(short, long)]
    verbose: bool,
    /// Say for each rule which of its conditions this process does not fulfil.
    #[arg(long, value_name = "PID", value_parser = parse_pid, conflicts_with_all = ["names", "verbose"])]
    test: Option<u32>,
    /// Use the rules of this config file instead of a service.
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    #[command(flatten)]
    service: ServiceArgs,
}

pub(super) fn run(args: &AgentsArgs) -> Result<(), Failure> {
    if let Some(pid) = args.test {
        let test = match from_service(args, &format!("/v1/agents?test={pid}"))? {
            Some(test) => test,
            None => test_here(args, pid)?,
        };
        return print(args, &test, |test| test_text(test, width()));
    }
    let mut all: AgentsResponse = match from_service(args, "/v1/agents")? {
        Some(agents) => agents,
        None => list_here(args)?,
    };
    if let Some(name) = args
        .names
        .iter()
        .find(|name| !all.agents.iter().any(|a| a.name == **name))
    {
        let known: Vec<&str> = all.agents.iter().map(|agent| &*agent.name).collect();
        return Err(Failure::Refused(recognition::unknown_agent(name, &known)));
    }
    let is_wanted = |agent: &AgentInfo| args.names.is_empty() || args.names.contains(&agent.name);
    all.agents.retain(is_wanted);
    // The service lists the rules as they are evaluated, servers first.
    all.agents.sort_by_key(|agent| agent.kind == "server");
    let in_detail = args.verbose || !args.names.is_empty();
    print(args, &all, |all| match in_detail {
        true => details(all, width()),
        false => table(all, width()),
    })
}

/// Asks the service. Returns `None` if a config file was given, or if no service answers and no socket was given.
fn from_service<T: DeserializeOwned>(args: &AgentsArgs, path: &str) -> Result<Option<T>, Failure> {
    if args.config.is_some() {
        return Ok(None);
    }
    match client(&args.service).get(path) {
        Err(ClientError::NoService { .. }) if args.service.socket.is_none() => Ok(None),
        answer => Ok(Some(answer?.read()?)),
    }
}

fn print<T: Serialize>(
    args: &AgentsArgs,
    answer: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    let text = match args.service.json {
        true => to_json(answer),
        false => text(answer).into_bytes(),
    };
    export::print(text).map_err(Failure::stdout)
}

/// Returns the rules of the given or default config file, and says which these are.
fn rules_here(args: &AgentsArgs) -> Result<Ruleset, Failure> {
    let Config { rules, file, .. } = load_readable(args.config.as_deref())?;
    if args.config.is_none() {
        let list = other_services(&sockets::selected(&args.service));
        let text = format!("no service answers; rules: {file}{list}");
        text.lines().for_each(|line| message!("{line}"));
    }
    Ok(rules)
}

fn test_here(args: &AgentsArgs, pid: u32) -> Result<RuleTestResponse, Failure> {
    let rules = rules_here(args)?;
    let test = recognition::test(pid, rules.rules(), None);
    test.map_err(|error| Failure::Refused(error.detail))
}

/// Lists the agents without a service. The running ones are the processes that a rule recognises now.
fn list_here(args: &AgentsArgs) -> Result<AgentsResponse, Failure> {
    let rules = rules_here(args)?;
    let table = scan_processes(&Procfs::default()).map_err(|error| Failure::Other(error.into()))?;
    let roots = table
        .rows
        .iter()
        .filter_map(|(pid, row)| match rules.classify(&row.entry.image) {
            Class::Agent(id) | Class::Server(id) => Some((rules.name(id).clone(), *pid)),
            Class::Boundary(_) | Class::Plain => None,
        });
    let mut roots: Vec<_> = roots.collect();
    roots.sort_unstable();
    let of_sessions = rules
        .rules()
        .iter()
        .filter(|rule| rule.action.opens_session());
    let agents = of_sessions.map(|rule| AgentInfo {
        name: rule.name.to_string(),
        kind: SessionKind::of(rule.action).name().into(),
        matches: rule.matchers.iter().map(ToString::to_string).collect(),
        running: roots
            .iter()
            .filter(|(name, _)| *name == rule.name)
            .map(|(_, pid)| *pid)
            .collect(),
        sessions: Vec::new(),
    });
    Ok(AgentsResponse {
        agents: agents.collect(),
    })
}

/// Formats one line per agent.
fn table(all: &AgentsResponse, width: Option<usize>) -> String {
    let names = all.agents.iter().map(|agent| agent.name.chars().count());
    let names = names.max().unwrap_or_default().clamp(5, NAME_MAX) + 2;
    let mut out = format!("{DIM}{:<names$}{:<8}RUNNING{DIM:#}\n", "AGENT", "KIND");
    for agent in &all.agents {
        let pids: Vec<String> = agent.running.iter().map(u32::to_string).collect();
        let pids = match pids.len() {
            0 => "-".into(),
            n => format!("{n}: {}", pids.join(" ")),
        };
        let (name, kind) = (
            printable(&agent.name, NAME_MAX),
            printable(&agent.kind, NAME_MAX),
        );
        let pids = fit(&pids, names + 8, TEXT_MAX, width);
        let _ = writeln!(out, "{name:<names$}{kind:<8}{pids}");
    }
    out
}

/// Formats each agent with its sessions and the conditions of its rule.
fn details(all: &AgentsResponse, width: Option<usize>) -> String {
    let mut out = String::new();
    for agent in &all.agents {
        let open = match (agent.sessions.len(), agent.running.as_slice()) {
            (0, []) => String::new(),
            (0, pids) => format!(": {}", count(pids.len() as u64, "process", "processes")),
            (n, _) => format!(": {}", count(n as u64, "session", "sessions")),
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
            let alternative = wrap(&printable(alternative, 4 * TEXT_MAX), 6, width);
            let alternative = alternative.trim_start();
            let _ = write!(out, "    {DIM}- {alternative}{DIM:#}");
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

/// Formats what the rules say of a process: one line per rule, the nearest first, then the result. The result is last, as
/// the rules fill more than a screen.
fn test_text(test: &RuleTestResponse, width: Option<usize>) -> String {
    let mut out = String::new();
    let process = format!("{} {}", test.pid, test.command);
    let program = match test.exe.is_empty() {
        true => "unknown, as its path cannot be read".to_owned(),
        false => test.exe.clone(),
    };
    let known = [
        ("process", Some(process)),
        ("program", Some(program)),
        ("script", test.script.clone()),
    ];
    for (name, value) in known {
        let value = value.map(|value| fit(&value, NAMES, TEXT_MAX, width));
        out.extend(value.map(|value| row(name, &value, NAMES, None)));
    }
    out.push('\n');
    let names = test.rules.iter().map(|rule| rule.name.chars().count());
    let names = names.max().unwrap_or_default().min(NAME_MAX) + 2;
    for rule in &test.rules {
        let text = rule.failed.as_deref().unwrap_or("matches");
        let text = fit(text, names, TEXT_MAX, width);
        out += &row(&printable(&rule.name, NAME_MAX), &text, names, None);
    }
    out.push('\n');
    out += &wrap(&printable(&summary(test), TEXT_MAX), 0, width);
    if test.rule.is_none() {
        let pid = test.pid;
        let add =
            format!("If it is an agent, `reaper agent add --pid {pid}` writes a rule for it.");
        out += &wrap(&add, 0, width);
    }
    out
}

fn summary(test: &RuleTestResponse) -> String {
    let pid = test.pid;
    let found = test
        .rule
        .as_ref()
        .and_then(|name| test.rules.iter().find(|rule| rule.name == *name));
    match (found, &test.nearest) {
        (Some(rule), _) if rule.kind == "boundary" => format!(
            "The boundary rule \"{}\" matches process {pid}, and boundaries come before agents.",
            rule.name
        ),
        (Some(rule), _) => format!(
            "The {} rule \"{}\" matches process {pid}.",
            rule.kind, rule.name
        ),
        (None, Some(near)) => {
            let failed = near.failed.as_deref().unwrap_or_default();
            format!(
                "No agent rule matches process {pid}; nearest: {}, whose {failed}.",
                near.name
            )
        }
        (None, None) => format!("No agent rule matches process {pid}."),
    }
}

#[cfg(test)]
mod tests;
