//! `reaper run`: a command of which nothing is left behind.

mod detach;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use nix::sys::signal::{Signal, raise};

use super::OWN_FAILURE;
use crate::export::{message, to_json};
use crate::run::{
    CommandExit, ConcurrencyLimit, DoneWhen, Progress, Role, Run, RunError, RunOutcome, RunReport,
    Runs, role,
};
pub(super) use detach::OWNER;
use detach::{Side, StartNotifier};
use reaper_host::sys::child;
use reaper_host::sys::held_path::{self, HeldFile, HeldPath, HeldPathError, has_parent_component};

pub(super) const HELP: &str = "\
The command has the terminal, stdin, signals and exit status as if it had been started without this; and
when it ends, all that descends from it is ended: SIGTERM, and SIGKILL after the grace. That holds whatever
it does with setsid, nohup, double forks or user ids, and needs neither root nor a service. Not followed is what another
program starts for it: docker, systemd-run, cron, a tmux server that is there already. If this program itself is
killed by SIGKILL, a service that runs ends the rest; without one, see below.

With --cgroup the command is born in a cgroup (v2) below the one that this is started in, and whoever is in there is ended
with it, at last all at once by cgroup.kill (Linux 5.14): also what runs under another user id, and, where this
program is killed, what has lost its parents. This user has to be able to make one there, as under
`systemd-run --user --scope -p Delegate=yes`; if not, nothing is started. It starts some 10 ms later.

Signals sent to this program reach the command; a second Ctrl-C while the rest is being ended cuts the grace short.
What somebody sends to the whole process group reaches the command twice, as it is in that group too: from a terminal
once. Where a time runs out the whole tree is ended. What --idle waits for is broken by whoever writes to the
terminal that the command's stdout or stderr is, though not through /dev/tty; to a file or a pipe it alone writes.

A run is written down where `reaper ps` finds it: in $XDG_STATE_HOME/reaper/runs, by default in
~/.local/state/reaper/runs, for root in /var/lib/reaper/runs. `reaper stop`, `wait` and `logs` take its
id or --name. If this program is killed by SIGKILL, the next `reaper run`, `ps`, `stop`, `wait` or `logs`
of the same user ends what of the run can still be told from strangers: the command, what descends
from it, and what is in its cgroup. A --done-when that was being asked goes with this program. Where that directory
cannot be used, a run goes on without; one with --name, --limit or --detach is refused.

Examples:
  reaper run -- npm test
  reaper run --timeout 45min --grace 30s -- claude -p 'fix the build'
  reaper run --idle 10min -- ./nightly.sh > nightly.log
  reaper run --done-when 'test -e done' --every 5s -- ./agent-that-never-exits.sh
  reaper run --clean-on-success ./worktree --on-failure 'echo \"kept: $REAPER_OUTCOME\"' -- make -C worktree
  reaper run --report run.json -- cargo test; jq .outcome run.json
  reaper run --detach --name web -- npm run dev; reaper logs -f web; reaper stop web
  systemd-run --user --scope -p Delegate=yes reaper run --cgroup -- ./ci.sh
  reaper run --limit gpu=2 --agent codex --session turn-17 -- codex exec 'train it'

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
    /// What it is found by: letters, digits, `.`, `_` and `-`. Refused while another run of that name lives.
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,
    /// Of what it is part: shown by `ps`, and in the report.
    #[arg(long, value_name = "ID", value_parser = label)]
    session: Option<String>,
    /// Of whom it is: the same.
    #[arg(long, value_name = "NAME", value_parser = label)]
    agent: Option<String>,
    /// Run at most N commands of this group of yours at a time, and wait for a turn. N is the same for all of the group: a run
    /// that waits holds up those behind it, whatever their N. So does one that is stopped (Ctrl-Z) while it waits.
    #[arg(long, value_name = "GROUP=N", value_parser = group)]
    limit: Option<ConcurrencyLimit>,
    /// In a cgroup of its own, where cgroup v2 is delegated to you: all that is in there at the end is ended with it.
    #[arg(long)]
    cgroup: bool,
    /// In the background, in a session of its own; prints its id. What it says is kept for `reaper logs`.
    #[arg(long)]
    detach: bool,
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

/// What `reaper run` becomes where a service could take it for one that is about to leave.
#[derive(Args)]
pub(super) struct OwnerArgs {
    /// Who waits to be told of the start: a file that is open.
    #[arg(long)]
    tell: Option<i32>,
    #[command(flatten)]
    run: RunArgs,
}

/// How its user is told what has become of it.
struct ReportOutput {
    report: Option<ReportFile>,
    json: bool,
}

/// Where a report goes, resolved before the command starts.
struct ReportFile {
    /// As it was typed.
    path: PathBuf,
    file: TargetFile,
}

enum TargetFile {
    /// Replaced as a whole.
    Regular(HeldPath),
    /// A device, a pipe, or what a link leads to: written to, and not replaced.
    Special(HeldFile),
}

impl ReportFile {
    fn resolve(path: PathBuf) -> Result<ReportFile, HeldPathError> {
        let file = match HeldFile::open(&path)? {
            Some(file) => TargetFile::Special(file),
            None => {
                TargetFile::Regular(HeldPath::resolve(&held_path::without_dangling_link(&path))?)
            }
        };
        Ok(ReportFile { path, file })
    }

    fn write(&self, line: &[u8]) -> anyhow::Result<()> {
        let written = match &self.file {
            TargetFile::Regular(path) => path.replace(line),
            TargetFile::Special(file) => file.write(line),
        };
        written.with_context(|| format!("cannot write the report {}", self.path.display()))
    }
}

/// Gives the exit status.
pub(super) fn run(args: RunArgs) -> u8 {
    let detach = args.detach;
    let (run, told) = match prepare(args) {
        Ok(prepared) => prepared,
        Err(status) => return status,
    };
    let tell = match detach.then(detach::part) {
        None => StartNotifier::default(),
        Some(Ok(Side::Caller(status))) => return status,
        // Just forked, so without children.
        Some(Ok(Side::Run(tell))) => return own(run, &told, &tell),
        Some(Err(error)) => {
            message!("reaper: --detach: {error}");
            return OWN_FAILURE;
        }
    };
    supervise(run, &told, &tell)
}

/// Gives the exit status of the one that owns the command, and has nobody else do it.
pub(super) fn owner(args: OwnerArgs) -> u8 {
    let tell = args.tell.and_then(child::take_inherited_pipe);
    let tell = tell.map_or_else(StartNotifier::default, StartNotifier::to);
    match prepare(args.run) {
        Ok((run, told)) => supervise(run, &told, &tell),
        Err(status) => status,
    }
}

/// Or the exit status, where it is not to be run: that has been said.
fn prepare(args: RunArgs) -> Result<(Run, ReportOutput), u8> {
    let report = args.report.clone().map(ReportFile::resolve).transpose();
    let report = report.map_err(|error| {
        let file = args.report.as_deref().unwrap_or(Path::new(""));
        message!(
            "reaper: cannot write the report {}: {error}",
            file.display()
        );
        OWN_FAILURE
    })?;
    let told = ReportOutput {
        report,
        json: args.json,
    };
    let mut run = owned(args);
    match Runs::of_user() {
        Ok(runs) => {
            super::runs::close_dead(&runs, false);
            run.records = Some(runs);
        }
        Err(error) if run.detached || run.name.is_some() || run.limit.is_some() => {
            message!("reaper: {error}");
            return Err(OWN_FAILURE);
        }
        Err(error) => tracing::debug!("{error}"),
    }
    Ok((run, told))
}

/// Has a process supervise the run that has no children from before. Returns the exit status.
fn supervise(mut run: Run, told: &ReportOutput, tell: &StartNotifier) -> u8 {
    match role() {
        Ok(Role::Supervisor(supervisor)) => {
            run.supervisor = Some(supervisor);
            own(run, told, tell)
        }
        Ok(Role::StandIn(status)) => status,
        Err(error) => {
            message!("reaper: {error}");
            error.status()
        }
    }
}

fn own(mut run: Run, how: &ReportOutput, tell: &StartNotifier) -> u8 {
    run.progress = Some(Box::new(show(&run, tell.clone())));
    let told = match run.supervise() {
        Ok(told) => told,
        Err(error) => {
            let said = tell.failed(error.status(), &error.to_string());
            match error {
                RunError::Stopped(Signal::SIGINT) => end_as_interrupted(),
                // Somebody has wanted that: nothing is said of it once the command is there either.
                RunError::Stopped(_) => {}
                _ if said => {}
                _ => message!("reaper: {error}"),
            }
            return error.status();
        }
    };
    for left in &told.survivors {
        let (pid, command, why) = (left.pid, &left.command, &left.reason);
        message!("reaper: left behind: pid {pid} ({command}): {why}");
    }
    for complaint in &told.errors {
        message!("reaper: {complaint}");
    }
    if let Err(error) = hand_over(&told, how.report.as_ref(), how.json) {
        message!("reaper: {error:#}");
        return OWN_FAILURE;
    }
    if told.outcome == RunOutcome::Cancelled
        && told.end == Some(CommandExit::Killed(Signal::SIGINT as i32))
    {
        end_as_interrupted();
    }
    told.status()
}

/// By that a shell that waits knows that the user wants it to stop too, as in a loop.
fn end_as_interrupted() {
    let _ = raise(Signal::SIGINT);
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

/// What a user is told while it goes on.
fn show(run: &Run, tell: StartNotifier) -> impl FnMut(Progress<'_>) + use<> {
    let group = run.limit.as_ref().map(|limit| limit.group.clone());
    let group = group.filter(|_| std::io::stderr().is_terminal() && !run.detached);
    let mut id = String::new();
    move |progress| match progress {
        Progress::Recorded(recording) => {
            recording.id().clone_into(&mut id);
            if let Some(log) = recording.log() {
                tell.write_to(log);
            }
        }
        Progress::Waiting => {
            if let Some(group) = &group {
                message!("reaper: waits for a place in {group}");
            }
            tell.begun(&id);
        }
        Progress::Started(_) => tell.begun(&id),
    }
}

fn hand_over(told: &RunReport, target: Option<&ReportFile>, json: bool) -> anyhow::Result<()> {
    let line = to_json(told);
    if json {
        std::io::stderr().write_all(&line)?;
    }
    target.map_or(Ok(()), |target| target.write(&line))
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

/// What can be typed, and be the name of a file.
fn name(typed: &str) -> Result<String, String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let begins = typed.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !begins || typed.len() > 64 || !typed.chars().all(fine) {
        return Err(
            "a name is of up to 64 letters, digits, `.`, `_` and `-`, and begins with one of the first two".to_owned(),
        );
    }
    Ok(typed.to_owned())
}

/// A line that is not too long.
fn label(typed: &str) -> Result<String, String> {
    if typed.is_empty() || typed.len() > 256 || typed.chars().any(char::is_control) {
        return Err("it is to be one line of up to 256 characters".to_owned());
    }
    Ok(typed.to_owned())
}

fn group(typed: &str) -> Result<ConcurrencyLimit, String> {
    let (group, runs) = typed.rsplit_once('=').ok_or("such as `gpu=2`")?;
    let group = name(group)?;
    match runs.parse() {
        Ok(runs @ 1..) => Ok(ConcurrencyLimit { group, runs }),
        _ => Err(format!("{runs:?} is no number of runs: it takes 1 or more")),
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
    if has_parent_component(Path::new(typed)) {
        return Err(HeldPathError::ParentComponent.to_string());
    }
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
