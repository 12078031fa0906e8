//! `reaper` without a command: shows the status, and the commands to try next.

use std::fmt::Write;
use std::io::{self, ErrorKind};

use super::client::{BOLD, DIM};
use super::show::{width, wrap};
use super::{Failure, ServiceArgs, client, sockets, status};
use crate::api::Status;
use crate::api::client::ClientError;
use crate::export::{print, printable};

/// Commands to try next, each with its purpose.
type Next = [(&'static str, &'static str); 5];

const WITH_SERVICE: Next = [
    ("reaper tree", "the agents with all their processes"),
    ("reaper explain PID", "why a process is kept or reaped"),
    ("reaper history", "what was reaped and kept"),
    ("reaper keep PID", "keep a process although its agent exits"),
    ("reaper scan", "what agents left behind earlier"),
];

#[cfg(target_os = "linux")]
const WITHOUT_SERVICE: Next = [
    ("reaper doctor", "what this host supports"),
    (
        "sudo reaper demo",
        "watch a small process tree being reaped",
    ),
    ("reaper scan", "what agents have left behind"),
    (
        "sudo reaper daemon --observe",
        "watch the host, signal nothing",
    ),
    (
        "reaper run -- COMMAND",
        "run a command, leave nothing behind",
    ),
];
#[cfg(not(target_os = "linux"))]
const WITHOUT_SERVICE: Next = [
    ("reaper doctor", "what this host supports"),
    ("reaper demo", "watch a small process tree being reaped"),
    ("reaper scan", "what agents have left behind"),
    (
        "reaper daemon --user --observe",
        "watch your processes, signal nothing",
    ),
    ("reaper config show", "the rules in force"),
];

/// Shows the status in one line with the next commands or, with `json`, as `reaper status --json` does.
pub(super) fn run(json: bool) -> Result<(), Failure> {
    let service = ServiceArgs { socket: None, json };
    if json {
        return status::run(&service);
    }
    let (state, others, next) = match client::client(&service).get("/v1/status") {
        Ok(response) => {
            let status: Status = response.read()?;
            (status.summary() + ".", String::new(), WITH_SERVICE)
        }
        Err(ClientError::NoService { path, source }) if is_absent(&source) => {
            let others = client::other_services(&path);
            let state = match sockets::named(None).is_none() && others.is_empty() {
                true => "No service is running.".into(),
                false => format!("No service answers on {}.", path.display()),
            };
            (state, others, WITHOUT_SERVICE)
        }
        Err(error) => return Err(error.into()),
    };
    print(text(&state, &others, &next, width())).map_err(Failure::stdout)
}

/// Returns whether an error of a connection means that no service runs.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused
    )
}

/// Formats the state, the lines about other services (see [`client::other_services`]), and the next commands.
fn text(state: &str, others: &str, next: &Next, width: Option<usize>) -> String {
    let mut out = String::new();
    for line in wrap(&printable(state, 1000), 0, width).lines() {
        let _ = writeln!(out, "{BOLD}{line}{BOLD:#}");
    }
    let mut others = others.lines().skip(2).peekable();
    if others.peek().is_some() {
        out += "These services answer; name one with --socket or REAPER_SOCKET:\n";
    }
    others.for_each(|line| out += &wrap(line, 0, width));
    out += "\nNext:\n";
    let column = next.iter().map(|(command, _)| command.len()).max();
    let column = column.unwrap_or_default();
    for (command, purpose) in next {
        let _ = writeln!(out, "  {command:<column$}  {DIM}{purpose}{DIM:#}");
    }
    out + "\n`reaper --help` lists all commands.\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overview_shows_state_and_five_commands() {
        for next in [WITH_SERVICE, WITHOUT_SERVICE] {
            let text = text("Reaping: 1 open session.", "", &next, Some(80));
            let text = anstream::adapter::strip_str(&text).to_string();
            assert!(
                text.starts_with("Reaping: 1 open session.\n\nNext:\n  "),
                "{text}"
            );
            assert!(
                text.lines().all(|line| line.chars().count() <= 80),
                "{text}"
            );
            assert_eq!(
                text.lines().filter(|line| line.starts_with("  ")).count(),
                5
            );
        }
    }
}
