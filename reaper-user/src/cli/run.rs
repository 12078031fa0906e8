//! `reaper run`: a command of which nothing is left behind.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use nix::sys::signal::{Signal, raise};

use super::OWN_FAILURE;
use crate::export::to_json;
use crate::run::{DoneWhen, End, Outcome, Report, Run};

pub(super) const HELP: &str = "\
The command has the terminal, stdin, signals and exit status as if it had been started without this; and
when it ends, all that descends from it is ended: SIGTERM, and SIGKILL after the grace. That holds whatever
it does with setsid, nohup, double forks or user ids, and needs neither root nor a service. Not followed is what another
program starts for it: docker, systemd-run, cron, a tmux server that is there already. If this program itself is
killed by SIGKILL, a service that runs ends the rest; without one it stays.

Signals sent to this program reach the command; a second Ctrl-C while the rest is being ended cuts the grace short.
Where a time runs out the whole tree is ended. Silence on a terminal is known to 8 seconds.

Examples:
  reaper run -- npm test
  reaper run --timeout 45min --grace 30s -- claude -p 'fix the build'
  reaper run --idle 10min -- ./nightly.sh > nightly.log
  reaper run --done-when 'test -e done' --every 5s -- ./agent-that-never-exits.sh
  reaper run --clean-on-success ./worktree --on-failure 'echo \"kept: $REAPER_OUTCOME\"' -- make -C worktree
  reaper run --report run.json -- cargo test; jq .outcome run.json

Exit status:
  the command's own; 128 + N if signal N has ended it
  0    --done-when says that it is done    1    it left with 0, and --done-when says that it is not done
  124  a time ran out    125  reaper itself has failed, or what was to follow has
  126  the command cannot be run    127  it cannot be found";

#[derive(Args)]
pub(super) struct RunArgs {
    /// End it when it has taken so long, such as `45min`; a number alone means seconds.
    #[arg(long, value_name = "TIME", value_parser = limit)]
    timeout: Option<Duration>,
    /// End it when it has written nothing to stdout and stderr for so long.
    #[arg(long, value_name = "TIME", value_parser = limit)]
    idle: Option<Duration>,
    /// Silence counts only where the tree has used less than 1 % of a processor meanwhile.
    #[arg(long, requires = "idle")]
    idle_cpu: bool,
    /// From the first signal to SIGKILL.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "5s")]
    grace: Duration,
    /// What is sent first to who is to end: a name or a number.
    #[arg(long, value_name = "SIGNAL", value_parser = signal, default_value = "TERM")]
    signal: Signal,
    /// Where a time runs out, ask the command alone to end first: a server that stops its own workers.
    #[arg(long)]
    leader_first: bool,
    /// A shell command that leaves with 0 once the run is done: then it is a success, and is ended if it still runs.
    #[arg(long, value_name = "COMMAND")]
    done_when: Option<String>,
    /// How often that is asked.
    #[arg(long, value_name = "TIME", value_parser = limit, default_value = "10s", requires = "done_when")]
    every: Duration,
    /// A shell command that follows on a success, with REAPER_OUTCOME set.
    #[arg(long, value_name = "COMMAND")]
    on_success: Option<String>,
    /// A shell command that follows on a failure, a death, or where a time ran out.
    #[arg(long, value_name = "COMMAND")]
    on_failure: Option<String>,
    /// Remove this file or directory after a success. May be given several times.
    #[arg(long, value_name = "PATH", value_parser = removable)]
    clean_on_success: Vec<PathBuf>,
    /// Write what has become of it to this file, as one JSON object.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// The same on standard error.
    #[arg(long)]
    json: bool,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Gives the exit status.
pub(super) fn run(args: RunArgs) -> u8 {
    let (report, json) = (args.report.clone(), args.json);
    let told = match owned(args).attend() {
        Ok(told) => told,
        Err(error) => {
            anstream::eprintln!("reaper: {error}");
            return error.status();
        }
    };
    for left in &told.left {
        let (pid, command, why) = (left.pid, &left.command, &left.why);
        anstream::eprintln!("reaper: left behind: pid {pid} ({command}): {why}");
    }
    for complaint in &told.complaints {
        anstream::eprintln!("reaper: {complaint}");
    }
    if let Err(error) = hand_over(&told, report.as_deref(), json) {
        anstream::eprintln!("reaper: {error:#}");
        return OWN_FAILURE;
    }
    if told.outcome == Outcome::Cancelled && told.end == Some(End::Killed(Signal::SIGINT as i32)) {
        // By that a shell that waits knows that the user wants it to stop too, as in a loop.
        let _ = raise(Signal::SIGINT);
    }
    told.status()
}

fn owned(args: RunArgs) -> Run {
    let mut words = args.command.into_iter();
    // Clap asks for one.
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    let mut run = Run::new(command);
    run.times.grace = args.grace;
    run.signal = args.signal;
    run.leader_first = args.leader_first;
    run.timeout = args.timeout;
    run.idle = args.idle;
    run.idle_cpu = args.idle_cpu;
    let every = args.every;
    run.done_when = args.done_when.map(|command| DoneWhen { command, every });
    run.on_success = args.on_success;
    run.on_failure = args.on_failure;
    run.clean_on_success = args.clean_on_success;
    run
}

fn hand_over(told: &Report, file: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let line = to_json(told);
    if json {
        std::io::stderr().write_all(&line)?;
    }
    if let Some(file) = file {
        // A device, a pipe or a link is written to, and not replaced.
        if std::fs::symlink_metadata(file).is_ok_and(|meta| !meta.is_file()) {
            let written = std::fs::write(file, &line);
            return written.with_context(|| format!("--report {}", file.display()));
        }
        // Whoever reads it finds all of it, or what was there before.
        let mut aside = file.as_os_str().to_owned();
        aside.push(format!(".{}", std::process::id()));
        let aside = PathBuf::from(aside);
        let written = std::fs::write(&aside, &line).and_then(|()| std::fs::rename(&aside, file));
        if written.is_err() {
            // It may never have been there.
            let _ = std::fs::remove_file(&aside);
        }
        written.with_context(|| format!("--report {}", file.display()))?;
    }
    Ok(())
}

fn time(typed: &str) -> Result<Duration, String> {
    match typed.parse::<u64>() {
        Ok(seconds) => Ok(Duration::from_secs(seconds)),
        Err(_) => humantime::parse_duration(typed).map_err(|error| error.to_string()),
    }
}

/// One that is not over before it begins.
fn limit(typed: &str) -> Result<Duration, String> {
    match time(typed)? {
        Duration::ZERO => Err("0 is no time: leave the option out".to_owned()),
        time => Ok(time),
    }
}

fn signal(typed: &str) -> Result<Signal, String> {
    if let Ok(number) = typed.parse::<i32>() {
        return Signal::try_from(number).map_err(|_| format!("there is no signal {number}"));
    }
    let name = typed.to_ascii_uppercase();
    let name = match name.starts_with("SIG") {
        true => name,
        false => format!("SIG{name}"),
    };
    name.parse()
        .map_err(|_| format!("there is no signal {name}: `kill -l` lists them"))
}

/// A path from the root, that is none by which too much would go.
fn removable(typed: &str) -> Result<PathBuf, String> {
    let path = std::path::absolute(typed).map_err(|error| error.to_string())?;
    // It may only come to be while the command runs.
    let there = path.canonicalize().unwrap_or_else(|_| path.clone());
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let above_home = home.is_some_and(|home| home.starts_with(&there));
    if there.parent().is_none() || above_home {
        return Err("that would remove a home directory, or all there is".to_owned());
    }
    Ok(path)
}

#[cfg(test)]
mod tests;
