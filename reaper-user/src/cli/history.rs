//! `reaper history`: prints past sessions from the journal.

mod answer;
mod printer;
mod process;
mod session;
mod source;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use jiff::tz::TimeZone;
use nix::unistd::geteuid;

use super::arguments::parse_limit;
use super::pager::FirstPage;
use super::show::width;
use super::{Failure, load, pager, parse_pid, parse_time, sockets};
use crate::api::recognition::unknown_agent;
use crate::export::{self, message, printable};
use crate::journal::history::HistoryError;
use printer::Printer;
use reaper_model::rules::built_in;
use source::{query_service, read_journal};

#[derive(Args)]
pub(super) struct HistoryArgs {
    /// Show only what became of the processes with these pids, and their ancestors. For an agent: its session.
    #[arg(value_name = "PID", value_parser = parse_pid)]
    pids: Vec<u32>,
    /// Show only the newest N sessions.
    #[arg(short = 'n', long = "limit", value_name = "N", value_parser = parse_limit)]
    limit: Option<u32>,
    /// Show only sessions that were active in this time, such as `2h` or `30min`.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<Duration>,
    /// Show only sessions of this agent, as in `reaper agents`.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Show only the session with this id, or sessions whose id starts with it.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Print one JSON object per session.
    #[arg(long)]
    json: bool,
    /// Do not use a pager.
    #[arg(long)]
    no_pager: bool,
    /// Read this journal, also of an older version, instead of that of the host's service. It is not changed.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Ask the service on this socket.
    ///
    /// Without it, and without `REAPER_SOCKET`, the journal is read directly. The service is queried if you may not read
    /// the journal.
    #[arg(long, value_name = "PATH", conflicts_with = "file")]
    socket: Option<PathBuf>,
}

/// Prints the sessions. Returns the exit status: 1 if the journal lacks a process or session that was named.
pub(super) fn run(args: HistoryArgs) -> Result<u8, Failure> {
    let zone = TimeZone::system();
    let mut printer = Printer::new(export::stdout(), zone, args.json, width(), &args.pids);
    printer.journal = journal_option(&args);
    // The journal belongs to the host's service; another one is named by its socket.
    let socket = sockets::named(args.socket.as_deref()).filter(|_| args.file.is_none());
    let result = match socket {
        Some(_) => query_service(&args, &mut printer),
        None => match read_journal(&args, &mut printer) {
            // Only root can read the host's journal; the service shows each user their own sessions.
            Err(HistoryError::Denied(path)) if args.file.is_none() => {
                query_service(&args, &mut printer).map_err(|failure| match failure {
                    Failure::NoService(why) => {
                        let path = path.display();
                        Failure::NoService(format!(
                            "cannot read the journal {path}: permission denied, and {why}; or run as root"
                        ))
                    }
                    other => other,
                })
            }
            Err(HistoryError::Callback(error)) => Err(Failure::stdout(error)),
            result => result.map_err(|error| anyhow::Error::from(error).into()),
        },
    };
    result?;
    let found = printer.total.sessions;
    let absent = args.pids.iter().filter(|pid| !printer.seen.contains(pid));
    let absent: Vec<u32> = absent.copied().collect();
    let text = printer.finish(args.since);
    let text = text.map_err(Failure::stdout)?;
    if !text.is_empty() {
        // The history of single processes begins with what became of them.
        let first = match args.pids.is_empty() {
            true => FirstPage::End,
            false => FirstPage::Start,
        };
        pager::print(&text, args.no_pager, first).map_err(Failure::stdout)?;
    }
    let misses_named = !absent.is_empty() || (found == 0 && args.session.is_some());
    if misses_named || (found == 0 && !args.json) {
        message!("{}", nothing_found(&args, &absent));
    }
    Ok(misses_named.into())
}

/// Returns the option that makes a further `reaper history` read the same file, with a space before it. The hints name
/// the socket themselves.
fn journal_option(args: &HistoryArgs) -> String {
    let file = args.file.as_ref().map(|file| file.display().to_string());
    file.map_or_else(String::new, |file| {
        format!(" --file {}", printable(&file, usize::MAX))
    })
}

/// Returns the message for a history without sessions, or without these of the requested processes.
fn nothing_found(args: &HistoryArgs, absent: &[u32]) -> String {
    let named = |option, name: Option<&str>| {
        name.map(|name| format!("{option} {}", printable(name, usize::MAX)))
    };
    let filters = [
        args.since.map(|_| "--since".into()),
        named("--agent", args.agent.as_deref()),
        named("--session", args.session.as_deref()),
        match absent {
            [] => None,
            [pid] => Some(format!("process {pid}")),
            pids => {
                let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
                Some(format!("any of the processes {}", pids.join(", ")))
            }
        },
    ];
    let given: Vec<String> = filters.into_iter().flatten().collect();
    let own = if geteuid().is_root() { "" } else { " of yours" };
    match given.is_empty() {
        true => format!("the journal has no sessions{own} yet"),
        false => format!(
            "no session{own} in the journal matches {}{}",
            given.join(" and "),
            args.agent.as_deref().map(agent_hint).unwrap_or_default()
        ),
    }
}

/// Returns the hint for a name that no agent has; empty for other names.
fn agent_hint(agent: &str) -> String {
    // The hint is only lost if the config cannot be read.
    let rules = load(None).map_or_else(|_| built_in(), |config| config.rules);
    let known = rules.agent_names();
    match known.contains(&agent) {
        true => String::new(),
        false => format!("; {}", unknown_agent(agent, &known)),
    }
}
