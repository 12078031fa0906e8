//! `reaper keep` and `reaper unkeep`: keep processes from being reaped, and release them.

use std::fmt::Write;
use std::time::Duration;

use clap::Args;

use super::client::{BOLD, DIM, client, for_each, print};
use super::hint::hints;
use super::show::{count, fit, time, user, width, wrap};
use super::{Failure, ServiceArgs, parse_pid, parse_time};
use crate::api::{KEEP_MAX_S, KeepParams, KeepResult, KeepsResponse};
use crate::export::printable;

/// Characters before the command in the list.
const BEFORE: usize = 39;
/// Longest command, in characters.
const COMMAND_MAX: usize = 256;
/// Longest sentence about a process, in characters.
const TEXT_MAX: usize = 1600;

pub(super) const HELP: &str = "\
Only members of an agent's session can be kept. A leftover from before the service started cannot: to keep it, set \
    `reap_leftovers = false` and restart the service.

Keeping a process again replaces the time, also for the descendants that are kept along with it. If a process is \
    kept both itself and along with an ancestor, the longer time counts. A keep lasts until its time has passed or \
    the process exits. When its time has passed, the process is evaluated again, and reaped if it is due.

Examples:
  # Keep a process until it exits
  reaper keep 4250

  # Keep a process and all its descendants for two hours
  reaper keep 4250 --for 2h --tree

  # List what is kept, by which user and for how long
  reaper keep --list

  # Keep a process and everything that it starts, without a request
  REAPER_KEEP=1 npm run dev";

#[derive(Args)]
pub(super) struct KeepArgs {
    /// Processes to keep; required without --list.
    #[arg(value_name = "PID", value_parser = parse_pid)]
    pids: Vec<u32>,
    /// Time to keep it, such as `2h`; until it exits if omitted.
    #[arg(long = "for", value_name = "TIME", value_parser = keep_time)]
    keep_time: Option<Duration>,
    /// Keep all its descendants too.
    #[arg(long)]
    tree: bool,
    /// List what is kept.
    #[arg(long, conflicts_with_all = ["pids", "keep_time", "tree"])]
    list: bool,
    #[command(flatten)]
    service: ServiceArgs,
}

pub(super) fn run(args: &KeepArgs) -> Result<u8, Failure> {
    let service = &args.service;
    if args.list {
        let response = client(service).get("/v1/keeps")?;
        print(service, &response, |keeps: KeepsResponse| {
            table(&keeps, width())
        })?;
        return Ok(0);
    }
    if args.pids.is_empty() {
        let what = "name processes by their pids, or list what is kept with --list";
        return Err(Failure::Usage(what.into()));
    }
    for_each(&args.pids, |pid| keep(pid, args))
}

fn keep(pid: u32, args: &KeepArgs) -> Result<(), Failure> {
    // Rounded up to whole seconds.
    let for_s = args
        .keep_time
        .map(|keep_time| keep_time.as_secs() + u64::from(keep_time.subsec_nanos() > 0));
    let params = KeepParams {
        pid,
        for_s,
        tree: args.tree,
    };
    let response = client(&args.service).post("/v1/keeps", &params)?;
    print(&args.service, &response, |done: KeepResult| {
        let until = for_s.map_or_else(|| "until it exits".into(), |s| format!("for {}", time(s)));
        let note = if done.durable {
            ""
        } else {
            "; it is not in the journal, so a restart of the service loses it"
        };
        format!("Kept {until}: {}{note}\n", processes(&done))
    })
}

/// Runs `reaper unkeep`.
pub(super) fn undo(pids: &[u32], service: &ServiceArgs) -> Result<u8, Failure> {
    for_each(pids, |pid| {
        let response = client(service).delete(&format!("/v1/keeps/{pid}"))?;
        print(service, &response, |done: KeepResult| {
            let then = [&done.why, &done.next].into_iter().flatten();
            let then = then.map(|text| wrap(&printable(&hints(text), TEXT_MAX), 0, width()));
            format!("No longer kept: {}\n", processes(&done)) + &then.collect::<String>()
        })
    })
}

/// Parses the time of a keep, which the service limits to ten years.
pub(super) fn keep_time(text: &str) -> Result<Duration, String> {
    let keep_time = parse_time(text)?;
    if keep_time.is_zero() || keep_time > Duration::from_secs(KEEP_MAX_S) {
        let what = "expected more than 0 and at most ten years; omit --for to keep the process until it exits";
        return Err(what.into());
    }
    Ok(keep_time)
}

fn processes(done: &KeepResult) -> String {
    match done.processes {
        0 | 1 => format!("process {}", done.pid),
        n => format!(
            "process {} and {} below it",
            done.pid,
            count(n - 1, "process", "processes")
        ),
    }
}

fn table(keeps: &KeepsResponse, width: Option<usize>) -> String {
    if keeps.keeps.is_empty() {
        let text = hints("No process is kept by a user; `reaper keep PID` keeps one.");
        return wrap(&text, 0, width);
    }
    let mut out = format!(
        "{DIM}{:>8}  {:<16}  {:<9}  COMMAND{DIM:#}\n",
        "PID", "TIME LEFT", "BY"
    );
    for keep in &keeps.keeps {
        let left = keep
            .remaining_s
            .map_or_else(|| "until it exits".into(), time);
        let tree = if keep.tree { " [with descendants]" } else { "" };
        let taken = BEFORE + tree.len();
        let command = fit(&keep.process.command, taken, COMMAND_MAX, width);
        let (pid, by) = (keep.process.pid, user(keep.by_uid));
        let _ = writeln!(
            out,
            "{BOLD}{pid:>8}{BOLD:#}  {left:<16}  {by:<9}  {command}{DIM}{tree}{DIM:#}"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_time_is_limited() {
        for good in ["1s", "2h", "30min", "500ms", "10years"] {
            assert!(keep_time(good).is_ok(), "{good}");
        }
        for bad in ["", "0s", "5", "-1h", "11years", "x"] {
            assert!(keep_time(bad).is_err(), "{bad}");
        }
    }
}
