//! `reaper scan`: one look for what agents have left behind, the service's where one answers.

mod preflight;
mod show;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use hashbrown::HashSet;

use super::client::client;
use super::{Failure, ServiceArgs, load, scope};
use crate::api::ScanReport;
use crate::api::client::{ClientError, ServiceResponse};
use crate::export::{self, to_json};
use crate::leftovers::{MIN_AGE, ScanOptions, find_leftovers, reap_found};
use crate::reap::Times;
use reaper_host::source::procfs::ProcfsError;
use reaper_host::sys;
use reaper_host::sys::pidfd;
use reaper_model::Scope;
use show::text;

pub(super) const HELP: &str = "\
Where a service answers, it is asked: it knows the lineage of all that began while it watched, and
tells of its members, and of what is older than itself. Else, and with --config or --scope, there is
only the process table, and the keeps in the journal. What nobody watched is ended only on strong evidence: its environment names
an agent by pid (CLAUDE_PID, OPENCODE_PID, with another mark of that agent) that is gone, and it was
orphaned; or it is the orphaned shell of a Claude tool, old enough; or it was recorded as a member of
a session that is over; and no agent lives that may have started it. By itself a service asks for
more: it ends what names an agent only if it has recorded a session of that agent. This list, and
--reap, do not ask for that: look at the list before you order it. All that descends from such a process goes with it. A mark
alone proves nothing, since a tmux server that was started inside of an agent hands it to every
later pane: what is weaker is listed and left alone, and so is what may have come through sudo or su,
and what might belong to a process that cannot be read. What a rule gives time (a server that listens:
10 minutes) has it from when a service first found it; without one it is left alone.

Never touched: this program and its ancestors, what a rule keeps or declares a boundary, what has
REAPER_KEEP=1, what runs in a systemd unit of its own, and, unless you are root, other users'
processes.

Examples:
  reaper scan                    what would be ended, what not, and why
  reaper scan --reap             end it; of a service, only root may order that
  reaper scan --json | jq '.reapable[].pid'

Exit status:
  0  nothing is left behind    1  something was found, or the look failed    2  wrong usage or config
  4  --reap: a service is at work and was not asked";

#[derive(Args)]
pub(super) struct ScanArgs {
    /// End what is found: SIGTERM, and SIGKILL after the grace; tells what was confirmed.
    #[arg(long)]
    reap: bool,
    /// How old an orphaned tool shell has to be that does not name its agent [default: 10min].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    min_age: Option<Duration>,
    /// One JSON object instead of a list.
    #[arg(long)]
    json: bool,
    /// The service's socket; that of a service with --scope is named after it.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["config", "scope"])]
    socket: Option<PathBuf>,
    /// Ask no service, and go by these settings and rules.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Ask no service, and look only at what descends from this process; nothing above it counts.
    #[arg(long, value_name = "PID", hide_short_help = true)]
    scope: Option<u32>,
}

/// Gives the exit status.
pub(super) fn run(args: &ScanArgs) -> Result<u8, Failure> {
    if args.config.is_none() && args.scope.is_none() {
        match ask(args) {
            // Whoever named one wants that one asked.
            Err(ClientError::NoService { .. }) if args.socket.is_none() => {}
            Err(error) => return Err(error.into()),
            Ok(said) => return print(&said.read()?, args),
        }
    }
    print(&alone(args)?, args)
}

fn ask(args: &ScanArgs) -> Result<ServiceResponse, ClientError> {
    let asking = ServiceArgs {
        socket: args.socket.clone(),
        json: args.json,
    };
    let path = match args.min_age {
        Some(age) => format!("/v1/scan?min_age_s={}", age.as_secs()),
        None => "/v1/scan".into(),
    };
    let client = client(&asking);
    if args.reap {
        client.post(&path, &())
    } else {
        client.get(&path)
    }
}

/// Without a service.
fn alone(args: &ScanArgs) -> Result<ScanReport, Failure> {
    let config = load(args.config.as_deref())?;
    if args.reap {
        pidfd::probe().context("nothing can be ended")?;
        preflight::nobody_at_work(&config)?;
    }
    let kept = match preflight::kept(&config) {
        Ok(kept) => kept,
        Err(error) if args.reap => {
            let what =
                "cannot tell what users want kept, so nothing was ended; repair it or move it away";
            return Err(Failure::Refused(format!("{error:#}: {what}")));
        }
        Err(error) => {
            tracing::warn!("what users want kept is not told apart: {error:#}");
            Vec::new()
        }
    };
    let scope = args.scope.map(|pid| scope::parse(&[pid.to_string()]));
    // Pids that are told in an environment mean something in this namespace alone.
    sys::non_initial_pid_namespace().context("cannot use /proc")?;
    let terms = ScanOptions {
        rules: config.rules,
        scope: scope.transpose()?.unwrap_or_else(Scope::default),
        uid: Some(nix::unistd::geteuid().as_raw()).filter(|uid| *uid != 0),
        min_age: args.min_age.unwrap_or(MIN_AGE),
        kept,
        by_order: true,
        ..ScanOptions::default()
    };
    let found = find_leftovers(&terms, &HashSet::new()).map_err(failed)?;
    let mut report = ScanReport::by("command");
    report.add(&found.table, &found.leftovers);
    if args.reap && !report.reapable.is_empty() {
        let times = Times {
            grace: config.grace,
            kill_timeout: config.kill_timeout,
        };
        let done =
            reap_found(&found, times, |held| find_leftovers(&terms, held)).map_err(failed)?;
        report.done(&done);
    }
    Ok(report)
}

fn failed(error: ProcfsError) -> Failure {
    Failure::Other(error.into())
}

fn print(report: &ScanReport, args: &ScanArgs) -> Result<u8, Failure> {
    let everybody = nix::unistd::geteuid().is_root();
    let text = if args.json {
        to_json(report)
    } else {
        text(report, args.reap, everybody).into_bytes()
    };
    export::print(text).map_err(|error| Failure::Other(error.into()))?;
    Ok(u8::from(!report.reapable.is_empty()))
}
