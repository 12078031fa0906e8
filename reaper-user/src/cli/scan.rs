//! `reaper scan`: finds what agents have left behind, through the service if one answers.

mod preflight;
mod show;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use hashbrown::HashSet;

use super::client::client;
use super::show::width;
use super::{Failure, ServiceArgs, load, parse_pid, parse_time, scope, sockets};
use crate::api::ScanReport;
use crate::api::client::{ClientError, ServiceResponse};
use crate::export::{self, to_json};
use crate::leftovers::{MIN_AGE, ScanOptions, find_leftovers, reap_found};
use crate::reap::Times;
use reaper_host::source::procfs::ProcfsError;
use reaper_host::sys;
use reaper_host::sys::pidfd;
use show::text;

pub(super) const HELP: &str = "\
If a service is running, it does the scan: it knows the ancestry of each process that started while it watched, and \
    lists detached members, members whose agent has exited, and older processes. Without a service, or with --config or --scope, reaper reads the process table \
    once, and the keeps in the journal.

A process that no service has watched is reaped only on strong evidence, and only if no living agent may have started it:
  - it is an orphan whose environment names an exited agent by its pid
    (CLAUDE_PID or OPENCODE_PID), and has another marker of that agent
  - it is an orphaned shell of a Claude tool, and older than --min-age
  - the journal has it as a member of a closed session
Its descendants are reaped with it.

Weaker evidence is listed, but not acted on. A marker alone proves nothing: a tmux server that was started inside an \
    agent passes it to every later pane. Processes that may have come through sudo or su, and processes that may belong to \
    one that cannot be read, are left alone too.

On its own, a service requires more: it reaps by environment only if it has recorded a session of that agent. This \
    list and --reap do not require that, so check the list before you use --reap.

Rules with a delay (10 minutes for a listening server) count it from when a service first found the process. Without a \
    service, such processes are left alone.

Never signalled: this program and its ancestors, processes that a rule keeps or declares a boundary, and processes \
    with REAPER_KEEP=1 or in their own systemd unit. Only root can reap processes of other users.

Examples:
  # List what would be reaped, what would be kept, and why
  reaper scan

  # Reap it; a service does that only for root and for its own user
  sudo reaper scan --reap

  # List the pids of what would be reaped
  reaper scan --json | jq '.reapable[].pid'

Exit status:
  0  there is nothing to reap
  1  the scan failed, or the service refused it
  2  wrong usage or config
  4  --reap: a service is running but did not do the scan; nothing was reaped
  6  there is something to reap, even if --reap has ended it";

#[derive(Args)]
pub(super) struct ScanArgs {
    /// Reap what is found, and print the confirmed outcomes; without it nothing is signalled.
    #[arg(long)]
    reap: bool,
    /// Minimum age of an orphaned shell of a Claude tool [default: 10min].
    ///
    /// Only for shells whose environment names no agent.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    min_age: Option<Duration>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Socket of the service, as in `reaper status --help`.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["config", "scope"])]
    socket: Option<PathBuf>,
    /// Scan without a service, with the rules of this config file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Scan without a service, and only the descendants of this process; can be repeated.
    #[arg(long, value_name = "PID", value_parser = parse_pid)]
    scope: Vec<u32>,
}

/// Exit status if something was found.
const FOUND: u8 = 6;

/// Scans, prints the report and returns the exit status.
pub(super) fn run(args: &ScanArgs) -> Result<u8, Failure> {
    if args.config.is_none() && args.scope.is_empty() {
        match query_service(args) {
            // Without a service, this process scans, unless the user has named a socket.
            Err(ClientError::NoService { .. })
                if sockets::named(args.socket.as_deref()).is_none() => {}
            Err(error) => return Err(error.into()),
            Ok(response) => return print(&response.read()?, args),
        }
    }
    print(&scan_here(args)?, args)
}

fn query_service(args: &ScanArgs) -> Result<ServiceResponse, ClientError> {
    let service = ServiceArgs {
        socket: args.socket.clone(),
        json: args.json,
    };
    let path = match args.min_age {
        Some(age) => format!("/v1/scan?min_age_s={}", age.as_secs()),
        None => "/v1/scan".into(),
    };
    let client = client(&service);
    if args.reap {
        client.post(&path, &())
    } else {
        client.get(&path)
    }
}

/// Scans without a service. With `--reap` it reaps the leftovers, but only if no daemon is running.
fn scan_here(args: &ScanArgs) -> Result<ScanReport, Failure> {
    let config = load(args.config.as_deref())?;
    if args.reap {
        pidfd::probe().context("cannot reap")?;
        preflight::check_no_daemon(&config)?;
    }
    let kept = match preflight::kept(&config) {
        Ok(kept) => kept,
        Err(error) if args.reap => {
            return Err(Failure::Refused(format!(
                "nothing was reaped, as it is unknown which processes users keep: {}; fix that, then scan again",
                Failure::Other(error)
            )));
        }
        Err(error) => {
            tracing::warn!(
                "it is unknown which processes users keep, so they are listed like others: {}",
                Failure::Other(error)
            );
            Vec::new()
        }
    };
    let pids: Vec<String> = args.scope.iter().map(u32::to_string).collect();
    let scope = scope::parse(&pids)?;
    // Fails if /proc shows another pid namespace, where pids from environment variables mean other processes.
    sys::non_initial_pid_namespace().map_err(|error| {
        anyhow!("cannot scan: cannot use /proc: {error}; mount this pid namespace's own, as `unshare --mount-proc` does")
    })?;
    let options = ScanOptions {
        rules: config.rules,
        scope,
        uid: Some(nix::unistd::geteuid().as_raw()).filter(|uid| *uid != 0),
        min_age: args.min_age.unwrap_or(MIN_AGE),
        kept,
        requested_by_user: true,
        ..ScanOptions::default()
    };
    let found = find_leftovers(&options, &HashSet::new()).map_err(failed)?;
    let mut report = ScanReport::new("command");
    report.add_leftovers(&found.table, &found.leftovers);
    if args.reap && !report.reapable.is_empty() {
        let times = Times {
            grace: config.grace,
            kill_timeout: config.kill_timeout,
        };
        let outcome = reap_found(&found, &options.rules, times, |held| {
            find_leftovers(&options, held)
        })
        .map_err(failed)?;
        report.add_outcomes(&outcome);
    }
    Ok(report)
}

fn failed(error: ProcfsError) -> Failure {
    Failure::Other(anyhow::Error::new(error).context("cannot scan the running processes"))
}

fn print(report: &ScanReport, args: &ScanArgs) -> Result<u8, Failure> {
    let all_users = nix::unistd::geteuid().is_root();
    let text = if args.json {
        to_json(report)
    } else {
        text(report, args.reap, all_users, width()).into_bytes()
    };
    export::print(text).map_err(Failure::stdout)?;
    Ok(match report.reapable.is_empty() {
        true => 0,
        false => FOUND,
    })
}
