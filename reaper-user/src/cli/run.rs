//! `reaper run`: runs a command and leaves nothing of it behind.

mod detach;
mod report;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::{Signal, raise};

use super::{Failure, OWN_FAILURE, parse_time};
use crate::export::message;
use crate::run::{
    CommandExit, ConcurrencyLimit, DoneWhen, Progress, Role, Run, RunError, RunOutcome, Runs,
    is_name, role,
};
pub(super) use detach::SUPERVISE;
use detach::{Side, StartNotifier};
use reaper_host::advice::Advised as _;
use reaper_host::sys::child;
use reaper_host::sys::held_path::{HeldPathError, has_parent_component};
use report::{OutputArgs, ReportOutput};

pub(super) const HELP: &str = "\
The command keeps the terminal, stdin, signals and exit status as if it had been started directly. When it exits, all \
    its descendants are ended: SIGTERM, then SIGKILL after the grace. They do not escape by setsid, nohup or double forks. \
    Those of another user are found too, but can be ended only by root. No root privileges and no service are needed. Processes that another program starts for the \
    command are not followed: docker, systemd-run, cron or an existing tmux server.

Signals: signals sent to `reaper run` are passed on to the command. While the descendants are being ended, a second \
    Ctrl-C skips the grace. A signal that another process sends to the whole process group reaches the command twice, \
    because it is a member of the group; one from the terminal reaches it once.

Time limits: when --timeout or --idle ends the run, the whole tree is ended, and one line on stderr says so. If stdout or stderr is a terminal, output \
    of any process to that terminal resets --idle, except through /dev/tty. If it is a file or a pipe, only output of the \
    run does.

Cgroup: with --cgroup the command starts in a new cgroup (v2) below the current one. Everything in it is ended at the \
    end, finally with cgroup.kill (Linux 5.14): also processes of other user ids and, if `reaper run` is killed, processes \
    that have lost their parents. You must be allowed to create a cgroup there, as under `systemd-run --user --scope -p \
    Delegate=yes`; otherwise nothing is started.

Records: each run is recorded in $XDG_STATE_HOME/reaper/runs (default: ~/.local/state/reaper/runs; for root: \
    /var/lib/reaper/runs). `reaper ps`, `stop`, `wait` and `logs` find it there by its id or --name. If the directory \
    cannot be used, the run starts without a record, or is refused if it has --name, --limit or --detach.

Crashes: if `reaper run` is killed by SIGKILL, a running service ends the rest. Without one, your next `reaper run`, \
    `ps`, `stop`, `wait` or `logs` ends what still can be attributed to the run: the command, its descendants and the \
    processes in its cgroup. A running --done-when check ends with `reaper run`.

Examples:
  # End everything that the tests leave behind
  reaper run -- npm test

  # End the run after 45 minutes, with 30 s from SIGTERM to SIGKILL
  reaper run --timeout 45min --grace 30s -- claude -p 'fix the build'

  # End the run after 10 minutes without output
  reaper run --idle 10min -- ./nightly.sh > nightly.log

  # End the run as a success once the file `done` exists
  reaper run --done-when 'test -e done' --every 5s -- ./agent.sh

  # List each process that was ended
  reaper run -v --timeout 10min -- npm test

  # Read the outcome from the report
  reaper run --report run.json -- cargo test; jq .outcome run.json

  # Remove a worktree after a success, keep it after a failure
  reaper run --clean-on-success ./tree --on-failure 'echo kept' -- make -C tree

  # Run in the background
  reaper run --detach --name web -- npm run dev
  reaper logs -f web
  reaper stop web

  # Run in a cgroup of its own
  systemd-run --user --scope -p Delegate=yes reaper run --cgroup -- ./ci.sh

  # Run at most two commands of the group \"gpu\" at a time
  reaper run --limit gpu=2 --agent codex --session turn-17 -- ./train.sh

Exit status:
  the status of the command, or 128 + N if signal N killed it
  0    --done-when reported success
  1    the command exited with 0, but --done-when reported that it is not done
  124  a time limit ended the run
  125  reaper itself failed, or a hook or --clean-on-success did
  126  the command cannot be executed
  127  the command was not found

Processes that could not be ended are listed on standard error, and do not change the status.";

#[derive(Args)]
pub(super) struct RunArgs {
    /// End the run after this time, such as `45min`; a number without a unit is seconds.
    ///
    /// As with timeout(1), the number can be a fraction such as `0.5`, and 0 is no limit. The times of the other options
    /// need a unit, and --idle and --every must be more than 0.
    #[arg(long, value_name = "TIME", value_parser = timeout)]
    timeout: Option<Duration>,
    /// End the run after this time without output on stdout and stderr, such as `10min`.
    #[arg(long, value_name = "TIME", value_parser = limit)]
    idle: Option<Duration>,
    /// Time between the first signal and SIGKILL, such as `30s`; `0s` is SIGKILL at once.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "5s")]
    grace: Duration,
    /// First signal, by name or number.
    #[arg(long, value_name = "SIGNAL", value_parser = signal, default_value = "TERM")]
    signal: Signal,
    /// At a time limit, a `reaper stop` or the end by --done-when, signal only the command at first.
    ///
    /// For servers that stop their own workers. The other processes are signalled when the command has exited, or when
    /// the grace has passed.
    #[arg(long)]
    leader_first: bool,
    /// Shell command that checks whether the run is done: it exits with 0 once that is so.
    ///
    /// The run then counts as a success, and is ended if it is still running. The last check starts after the command of
    /// the run has exited. A check that takes longer than 30 s is killed and counts as not done.
    #[arg(long, value_name = "COMMAND")]
    done_when: Option<String>,
    /// Time from the end of a --done-when check to the next one.
    #[arg(long, value_name = "TIME", value_parser = limit, default_value = "10s", requires = "done_when")]
    every: Duration,
    /// Shell command to run after a success, with REAPER_OUTCOME set.
    #[arg(long, value_name = "COMMAND")]
    on_success: Option<String>,
    /// Shell command to run after a failure, a fatal signal or a time limit, with REAPER_OUTCOME set.
    #[arg(long, value_name = "COMMAND")]
    on_failure: Option<String>,
    /// Remove this file or directory after a success, unless --on-success fails; can be repeated.
    #[arg(long, value_name = "PATH", value_parser = removable)]
    clean_on_success: Vec<PathBuf>,
    /// Name of the run, for `stop`, `wait` and `logs`.
    ///
    /// Up to 64 letters, digits, `.`, `_` and `-`. Must differ from the names of your other open runs.
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,
    /// Session that the run belongs to; shown by `ps` and in the report.
    #[arg(long, value_name = "ID", value_parser = label)]
    session: Option<String>,
    /// Agent that the run belongs to; shown by `ps` and in the report.
    #[arg(long, value_name = "NAME", value_parser = label)]
    agent: Option<String>,
    /// Run at most N of your commands of this group at a time, and wait for a free slot.
    ///
    /// Use the same N for all runs of a group. A run that waits blocks those behind it, whatever their N. So does a run
    /// that is stopped with Ctrl-Z while it waits.
    #[arg(long, value_name = "GROUP=N", value_parser = group)]
    limit: Option<ConcurrencyLimit>,
    /// Run the command in a new cgroup, and end everything in it.
    ///
    /// Needs a cgroup (v2) that is delegated to you.
    #[arg(long)]
    cgroup: bool,
    /// Run in the background, detached from the terminal, and print the id of the run.
    ///
    /// Output is kept for `reaper logs`.
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    output: OutputArgs,
    /// Command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Arguments of the detached process. Its own subcommand tells it apart from a `reaper run` that is about to exit.
#[derive(Args)]
pub(super) struct SuperviseArgs {
    /// File descriptor to which the result of the start is written.
    #[arg(long)]
    tell: Option<i32>,
    #[command(flatten)]
    run: RunArgs,
}

/// Runs the command, with `--detach` in a child process, and returns the exit status.
pub(super) fn run(args: RunArgs) -> u8 {
    let detach = args.detach;
    let (run, report) = match prepare(args) {
        Ok(prepared) => prepared,
        Err(status) => return status,
    };
    let notifier = match detach.then(detach::split) {
        None => StartNotifier::default(),
        Some(Ok(Side::Caller(status))) => return status,
        // A process that was just forked has no children.
        Some(Ok(Side::Run(notifier))) => return run_and_report(run, &report, &notifier),
        Some(Err(error)) => {
            message!(
                "reaper: cannot start the run in the background: {}",
                error.advised()
            );
            return OWN_FAILURE;
        }
    };
    supervise(run, &report, &notifier)
}

/// Supervises a detached run in this process and returns the exit status.
pub(super) fn supervise_detached(args: SuperviseArgs) -> u8 {
    let notifier = args.tell.and_then(child::take_inherited_pipe);
    let notifier = notifier.map_or_else(StartNotifier::default, StartNotifier::to);
    match prepare(args.run) {
        Ok((run, report)) => supervise(run, &report, &notifier),
        Err(status) => status,
    }
}

/// Prepares a run, and closes runs whose `reaper run` was killed. On an error, prints it and returns the exit status.
fn prepare(args: RunArgs) -> Result<(Run, ReportOutput), u8> {
    let report = ReportOutput::resolve(args.output.clone()).map_err(|error| {
        message!("reaper: {error}");
        OWN_FAILURE
    })?;
    let mut run = build_run(args);
    match Runs::of_user() {
        Ok(runs) => {
            super::runs::close_dead(&runs, false);
            run.records = Some(runs);
        }
        Err(error) if run.detached || run.name.is_some() || run.limit.is_some() => {
            message!(
                "reaper: the command was not started, as --name, --limit and --detach need a record: {error}"
            );
            return Err(OWN_FAILURE);
        }
        Err(error) => tracing::debug!("{error}"),
    }
    Ok((run, report))
}

/// Supervises the run, in a child process if this one already has children. Returns the exit status.
fn supervise(mut run: Run, report: &ReportOutput, notifier: &StartNotifier) -> u8 {
    match role() {
        Ok(Role::Supervisor(supervisor)) => {
            run.supervisor = Some(supervisor);
            run_and_report(run, report, notifier)
        }
        Ok(Role::StandIn(status)) => status,
        Err(error) => {
            message!("reaper: {error}");
            error.status()
        }
    }
}

/// Supervises the run in this process, and writes its report. Returns the exit status.
fn run_and_report(mut run: Run, output: &ReportOutput, notifier: &StartNotifier) -> u8 {
    run.progress = Some(Box::new(progress_handler(&run, output, notifier.clone())));
    let report = match run.supervise() {
        Ok(report) => report,
        Err(error) => {
            let reported = notifier.failed(error.status(), &error.to_string());
            match error {
                RunError::Stopped(Signal::SIGINT) => die_of_sigint(),
                // The user has stopped the run, which needs no message.
                RunError::Stopped(_) => {}
                _ if reported => {}
                _ => message!("reaper: {error}"),
            }
            return error.status();
        }
    };
    if let Err(error) = output.write(&report) {
        message!("reaper: {}", Failure::Other(error));
        return OWN_FAILURE;
    }
    if report.outcome == RunOutcome::Cancelled
        && report.end == Some(CommandExit::Killed(Signal::SIGINT as i32))
    {
        die_of_sigint();
    }
    report.status()
}

/// Dies of SIGINT, so that a waiting shell stops its script or loop too.
fn die_of_sigint() {
    let _ = raise(Signal::SIGINT);
}

fn build_run(args: RunArgs) -> Run {
    let mut words = args.command.into_iter();
    // Clap requires at least one word.
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    let mut run = Run::new(command);
    run.times.grace = args.grace;
    run.signal = args.signal;
    run.leader_first = args.leader_first;
    run.timeout = args.timeout.filter(|timeout| !timeout.is_zero());
    run.idle = args.idle;
    let every = args.every;
    run.done_when = args.done_when.map(|command| DoneWhen { command, every });
    run.on_success = args.on_success;
    run.on_failure = args.on_failure;
    run.clean_on_success = args.clean_on_success;
    run.name = args.name;
    run.session = args.session;
    run.agent = args.agent;
    run.limit = args.limit;
    run.cgroup = args.cgroup;
    run.detached = args.detach;
    run
}

/// Returns the handler of progress. It redirects the output of a detached run to its log, and reports to `notifier`
/// that the run has started or waits for a slot. It also prints that the run waits, if standard error is a terminal,
/// and the run is neither detached nor quiet.
fn progress_handler(
    run: &Run,
    output: &ReportOutput,
    notifier: StartNotifier,
) -> impl FnMut(Progress<'_>) + use<> {
    let is_told = std::io::stderr().is_terminal() && !run.detached && !output.is_quiet();
    let group = run.limit.as_ref().filter(|_| is_told);
    let group = group.map(|limit| limit.group.clone());
    let mut id = String::new();
    move |progress| match progress {
        Progress::Recorded(recording) => {
            recording.id().clone_into(&mut id);
            if let Some(log) = recording.log() {
                notifier.write_to(log);
            }
        }
        Progress::Waiting => {
            if let Some(group) = &group {
                message!("reaper: waiting until a run of the group {group} ends (--limit)");
            }
            notifier.started(&id);
        }
        Progress::Started(_) => notifier.started(&id),
    }
}

/// Parses the time of `--timeout`. A number is seconds, possibly with a fraction, as for timeout(1). Zero is no limit.
fn timeout(text: &str) -> Result<Duration, String> {
    let is_number = text.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    let Some(seconds) = text.parse::<f64>().ok().filter(|_| is_number) else {
        return parse_time(text).map_err(str::to_owned);
    };
    let rounded = Duration::try_from_secs_f64(seconds);
    let rounded = rounded.map_err(|_| "this time is too long; write a shorter one")?;
    // Less than a nanosecond is not zero, which has another meaning.
    let least = Duration::from_nanos((seconds > 0.0).into());
    Ok(rounded.max(least))
}

/// Parses a time limit, which must not be zero.
fn limit(text: &str) -> Result<Duration, String> {
    match parse_time(text)? {
        Duration::ZERO => {
            Err("must be more than 0; without this option its default applies".to_owned())
        }
        time => Ok(time),
    }
}

/// Parses the name of a run. It must also be valid as a file name.
fn name(text: &str) -> Result<String, String> {
    if !is_name(text) {
        return Err(
            "expected up to 64 letters, digits, `.`, `_` and `-`, with a letter or digit first"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

/// Parses a label: one line of limited length.
fn label(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > 256 || text.chars().any(char::is_control) {
        return Err("expected one line of up to 256 characters".to_owned());
    }
    Ok(text.to_owned())
}

fn group(text: &str) -> Result<ConcurrencyLimit, String> {
    let (group, runs) = text
        .rsplit_once('=')
        .ok_or("expected a group and a number, such as `gpu=2`")?;
    let group = name(group)?;
    match runs.parse() {
        Ok(runs @ 1..) => Ok(ConcurrencyLimit { group, runs }),
        _ => Err(format!(
            "{runs:?} is not a number of runs: expected 1 or more"
        )),
    }
}

fn signal(text: &str) -> Result<Signal, String> {
    if let Ok(number) = text.parse::<i32>() {
        return Signal::try_from(number)
            .map_err(|_| format!("unknown signal {number}; `kill -l` lists all signals"));
    }
    let name = text.to_ascii_uppercase();
    let name = match name.starts_with("SIG") {
        true => name,
        false => format!("SIG{name}"),
    };
    name.parse()
        .map_err(|_| format!("unknown signal {name}; `kill -l` lists all signals"))
}

/// Parses a path to remove. Makes it absolute. Refuses a path with `..`, the root directory, `$HOME`, and the
/// directories above that.
fn removable(text: &str) -> Result<PathBuf, String> {
    if has_parent_component(Path::new(text)) {
        return Err(HeldPathError::ParentComponent.to_string());
    }
    let path =
        std::path::absolute(text).map_err(|error| format!("{error}; name an absolute path"))?;
    // The path may not exist before the command runs.
    let target = path.canonicalize().unwrap_or_else(|_| path.clone());
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let above_home = home.is_some_and(|home| home.starts_with(&target));
    if target.parent().is_none() || above_home {
        return Err(
            "this would remove a home directory or the whole file system; name a path below it"
                .to_owned(),
        );
    }
    Ok(path)
}

#[cfg(test)]
mod tests;
