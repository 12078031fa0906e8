//! `reaper keep` and `reaper unkeep`.

use std::fmt::Write;
use std::time::Duration;

use clap::Args;

use super::client::{BOLD, DIM, client, print, span};
use super::show::{count, fit, user, width};
use super::{Failure, ServiceArgs, pid};
use crate::api::{KEEP_MAX_S, KeepDone, KeepParams, KeepsResponse};

/// Characters before the command in the list, and of that where there is room.
const BEFORE: usize = 39;
const COMMAND_MAX: usize = 256;

pub(super) const HELP: &str = "\
Only members of an agent's session can be kept, because nothing else is ever reaped. Keeping a process again replaces \
    the time, also for the descendants that are kept along with it. If a process is kept both itself and along with an \
    ancestor, the longer time counts. A keep ends when its time has passed, when the process exits or, with --tree, when \
    the session closes. The process is then decided again, and reaped if it is due.

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
    /// The process.
    #[arg(required_unless_present = "list", value_parser = pid())]
    pid: Option<u32>,
    /// For how long, such as `2h` or `30min`; without it until it ends.
    #[arg(long = "for", value_name = "TIME", value_parser = lasts)]
    lasts: Option<Duration>,
    /// With all that descends from it.
    #[arg(long)]
    tree: bool,
    /// List what is kept so.
    #[arg(long, conflicts_with_all = ["pid", "lasts", "tree"])]
    list: bool,
    #[command(flatten)]
    asking: ServiceArgs,
}

pub(super) fn run(args: &KeepArgs) -> Result<(), Failure> {
    let (asking, client) = (&args.asking, client(&args.asking));
    let Some(pid) = args.pid.filter(|_| !args.list) else {
        let said = client.get("/v1/keeps")?;
        return print(asking, &said, |keeps: KeepsResponse| table(&keeps, width()));
    };
    // Rather a little longer than asked for.
    let for_s = args
        .lasts
        .map(|lasts| lasts.as_secs() + u64::from(lasts.subsec_nanos() > 0));
    let order = KeepParams {
        pid,
        for_s,
        tree: args.tree,
    };
    let said = client.post("/v1/keeps", &order)?;
    print(asking, &said, |done: KeepDone| {
        let time = for_s.map_or_else(|| "until it ends".into(), |s| format!("for {}", span(s)));
        let lasts = if done.durable {
            ""
        } else {
            "; the service has no journal, and forgets it when it is started anew"
        };
        format!("kept {time}: {}{lasts}\n", processes(&done))
    })
}

/// `reaper unkeep`
pub(super) fn undo(pid: u32, asking: &ServiceArgs) -> Result<(), Failure> {
    let said = client(asking).delete(&format!("/v1/keeps/{pid}"))?;
    print(asking, &said, |done: KeepDone| {
        format!("no longer kept: {}\n", processes(&done))
    })
}

/// How long a keep lasts: at least a second, and no longer than the service takes for a time.
pub(super) fn lasts(text: &str) -> Result<Duration, String> {
    let lasts = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if lasts.is_zero() || lasts > Duration::from_secs(KEEP_MAX_S) {
        let what = "not from a second to ten years; without --for it is kept until it ends";
        return Err(what.into());
    }
    Ok(lasts)
}

fn processes(done: &KeepDone) -> String {
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
        return "nobody has asked to keep anything; `reaper keep PID` does\n".into();
    }
    let mut out = format!(
        "{DIM}{:>8}  {:<16}  {:<9}  COMMAND{DIM:#}\n",
        "PID", "REMAINING", "BY"
    );
    for keep in &keeps.keeps {
        let time = keep
            .remaining_s
            .map_or_else(|| "until it ends".into(), span);
        let tree = if keep.tree {
            " [with all below it]"
        } else {
            ""
        };
        let taken = BEFORE + tree.len();
        let command = fit(&keep.process.command, taken, COMMAND_MAX, width);
        let (pid, by) = (keep.process.pid, user(keep.by_uid));
        let _ = writeln!(
            out,
            "{BOLD}{pid:>8}{BOLD:#}  {time:<16}  {by:<9}  {command}{DIM}{tree}{DIM:#}"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_a_service_takes() {
        for good in ["1s", "2h", "30min", "500ms", "10years"] {
            assert!(lasts(good).is_ok(), "{good}");
        }
        for bad in ["", "0s", "5", "-1h", "11years", "x"] {
            assert!(lasts(bad).is_err(), "{bad}");
        }
    }
}
