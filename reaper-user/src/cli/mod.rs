//! The command line: what was typed, and one place for exit statuses.

mod agents;
mod client;
mod config_check;
mod config_show;
mod daemon;
mod demo;
#[cfg_attr(target_os = "macos", path = "doctor/darwin.rs")]
pub mod doctor;
mod engine;
mod explain;
mod failure;
mod history;
mod keep;
mod lock;
#[cfg(target_os = "linux")]
mod logs;
#[cfg(target_os = "linux")]
mod ps;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod runs;
mod scan;
mod scope;
mod show;
mod status;
#[cfg(target_os = "linux")]
mod stop;
mod tree;
#[cfg_attr(target_os = "macos", path = "unpin/darwin.rs")]
mod unpin;
mod user;
#[cfg(target_os = "linux")]
mod wait;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ContextValue;
use clap::{Args, Parser, Subcommand};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Config, ConfigError};
use crate::export::{self, message, printable};
use failure::Failure;
use reaper_host::source::SourceKind;
use reaper_host::sys;

/// Reaps what AI coding agents leave behind.
///
/// When an agent ends or crashes, the shells, servers, test runs and browsers that it started live on,
/// adopted by init. reaper is told by the kernel of every fork, exec and exit, keeps each agent's tree,
/// and ends its orphans the moment they are orphaned.
#[derive(Parser)]
#[command(name = "reaper", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  reaper doctor                     what this host can do, and what would be used
  sudo reaper demo                  a small tree of its own, orphaned and reaped before your eyes
  sudo reaper daemon --observe      the whole host, decisions only: nothing is signalled
  sudo reaper daemon                the whole host, for real
  sudo reaper daemon --scope 4242 --json
                                    only what descends from process 4242, as JSON lines
  reaper run -- npm test            a command of which nothing is left behind, without root or a service
  reaper ps                         your runs; `reaper stop`, `wait` and `logs` take their id or name
  reaper tree                       the agents that run now, with all that descends from them
  reaper explain 4250               why a process is kept or reaped, and what comes next
  reaper keep 4250 --for 2h         do not reap it when its agent ends
  sudo reaper history --since 1d    what was reaped and kept, why, and what that gave back
  sudo reaper scan                  without a service: what agents have left behind
  sudo reaper unpin                remove what a daemon has left pinned in the kernel

Exit status:
  0  fine    1  failed while running    2  wrong usage or config; nothing was started
  3  the source that was asked for cannot be used here; `reaper doctor` says why
  4  another daemon watches the same scope already, or holds what is to be removed
  5  no service answers on the socket";

#[derive(Subcommand)]
enum Command {
    /// Tell what this host can do, with the reason for each no, and what would be used.
    #[command(after_help = "\
Examples:
  reaper doctor
  reaper doctor --config /etc/reaper.toml
  reaper doctor --json | jq .source

Exit status:
  0  a daemon can work here    3  it cannot, and it is said why")]
    Doctor {
        /// Tell what a daemon with these settings would use.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Show it at work on a small agent-shaped tree of its own; touches nothing else.
    #[command(after_help = "\
Example:
  sudo reaper demo")]
    Demo,
    /// Watch, decide and reap until it is stopped with Ctrl-C or SIGTERM.
    #[command(after_help = daemon::HELP)]
    Daemon(daemon::DaemonArgs),
    /// Run a command, and when it ends, end all that it has left behind.
    #[cfg(target_os = "linux")]
    #[command(after_help = run::HELP)]
    Run(run::RunArgs),
    /// What that becomes.
    #[cfg(target_os = "linux")]
    #[command(name = run::OWNER, hide = true)]
    Owner(run::OwnerArgs),
    /// List your runs: how far they are, what they may still take, and what has become of them.
    #[cfg(target_os = "linux")]
    #[command(after_help = ps::HELP)]
    Ps(ps::PsArgs),
    /// End a run of yours, with all that belongs to it.
    #[cfg(target_os = "linux")]
    #[command(after_help = stop::HELP)]
    Stop {
        /// Its id, the beginning of that, or its name.
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<String>,
    },
    /// Wait until a run of yours is over, and leave with its status.
    #[cfg(target_os = "linux")]
    #[command(after_help = wait::HELP)]
    Wait {
        /// Its id, the beginning of that, or its name.
        run: String,
    },
    /// Show what a run that was detached has said.
    #[cfg(target_os = "linux")]
    #[command(after_help = logs::HELP)]
    Logs {
        /// Its id, the beginning of that, or its name.
        run: String,
        /// And what it says from now on, until it is over.
        #[arg(short, long)]
        follow: bool,
    },
    /// Ask the service what it watches, what it has done, and what it has missed.
    #[command(after_help = "\
Examples:
  reaper status
  reaper status --json | jq .sessions_open")]
    Status(ServiceArgs),
    /// Show the trees of the agents that run now: who is detached, due, kept, and why.
    #[command(after_help = "\
Behind a process stands in brackets what there is to know of it:
  claude-code            it is this agent itself
  detached               its parent has exited, its agent has not; it waits for the end of that
  due                    its agent is gone: it is reaped, unless one of these stands there too
  waits 9m: RULE         this rule gives it time, and decides when that is over
  kept: RULE             this rule keeps it; also REAPER_KEEP, by a user, or a reason of the stream
  boundary: RULE         it and what it runs belong to no agent above it
  zombie                 it has exited, and its parent does not wait for it

Examples:
  reaper tree
  reaper tree --agent claude-code
  reaper tree --all                    also what belongs to no agent
  reaper tree --json | jq '.groups[].processes[] | select(.due).pid'")]
    Tree {
        /// Only sessions of this agent, as `reaper agents` names it.
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// Also all processes that belong to no agent.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        asking: ServiceArgs,
    },
    /// Tell why a process is kept or reaped, where it comes from, and what will happen to it.
    #[command(after_help = "\
Examples:
  reaper explain 4250
  reaper explain 4250 --json | jq -r '.why, .next'")]
    Explain {
        /// The process.
        #[arg(value_parser = pid())]
        pid: u32,
        #[command(flatten)]
        asking: ServiceArgs,
    },
    /// Keep a process of yours from being reaped, or list what is kept so.
    #[command(after_help = keep::HELP)]
    Keep(keep::KeepArgs),
    /// Take back `reaper keep`.
    #[command(after_help = "\
What was asked for the process itself is taken back, with --tree for all that was kept with it. What
is kept with another that lives is not let go on its own. If nothing else keeps a process and its
agent is gone, it is reaped at once.

Example:
  reaper unkeep 4250")]
    Unkeep {
        /// The process that was kept; what was kept with it by --tree goes with it.
        #[arg(value_parser = pid())]
        pid: u32,
        #[command(flatten)]
        asking: ServiceArgs,
    },
    /// List the agents that are recognised, by what, and which run now.
    #[command(after_help = "\
Examples:
  reaper agents
  reaper agents --json | jq -r '.agents[].name'")]
    Agents(ServiceArgs),
    /// Tell what the service has kept of sessions, decisions and outcomes, the newest last.
    #[command(after_help = "\
Whoever is not root is told of their own sessions.

Examples:
  sudo reaper history --since 2h
  sudo reaper history --session claude-code-4242-19e1de9c03e4
  sudo reaper history --agent claude-code --json | jq '.[\"memory.rss\"]'")]
    History(history::HistoryArgs),
    /// Find what agents have left behind, in one look: the service's, or one that needs none.
    #[command(after_help = scan::HELP)]
    Scan(scan::ScanArgs),
    /// Check config files, show what is in force, and have the service read its own anew.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Remove all that a daemon has left pinned, also one of another version.
    ///
    /// Refuses (exit status 4) while a daemon is at work with it.
    #[command(after_help = "\
Examples:
  sudo reaper unpin
  sudo reaper unpin --pin-dir /sys/fs/bpf/reaper")]
    Unpin(UnpinArgs),
    /// A process of the demo's tree.
    #[command(hide = true)]
    DemoAgent,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a config file and say what is wrong with it, line by line.
    #[command(after_help = "\
Warns of rules that can never hold, and of those that another keeps from being asked.

Example:
  reaper config check /etc/reaper.toml

Exit status:
  0  it can be used, perhaps with warnings    2  it cannot")]
    Check {
        /// The config, in TOML.
        file: PathBuf,
    },
    /// Show the settings and rules in force, in the order in which rules are asked.
    #[command(after_help = "\
Examples:
  reaper config show --defaults                    all built-in rules, to copy from
  reaper config show --config /etc/reaper.toml     what a daemon with this file goes by
  reaper config show --json | jq '.rules[].name'")]
    Show {
        /// Those of this file; without it the built-in ones.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The built-in ones as they are written, those that are off included.
        #[arg(long, conflicts_with = "config")]
        defaults: bool,
        /// One JSON object instead of TOML.
        #[arg(long)]
        json: bool,
    },
    /// Have the service read its config anew.
    #[command(after_help = "\
What is wrong in the file is said, and then all stays as it was. Only root may ask.

Example:
  sudo reaper config reload")]
    Reload(ServiceArgs),
}

/// Where a command is run: what went wrong was none of its doing, as `env`, `timeout` and `nohup` have it.
const OWN_FAILURE: u8 = 125;

/// What is typed for a process.
fn pid() -> impl clap::builder::TypedValueParser<Value = u32> {
    // The kernel's PID_MAX_LIMIT.
    clap::value_parser!(u32).range(1..=4_194_304)
}

/// How a service is asked.
#[derive(Args)]
struct ServiceArgs {
    /// The service's socket, instead of /run/reaper/reaper.sock or, where there is none, that of your own service
    /// (--user); with --scope it is named after that.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// What the service says, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct UnpinArgs {
    /// Settings, for the directory of the pins; without it the built-in ones.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the pins, instead of the config's.
    #[arg(long, value_name = "DIR")]
    pin_dir: Option<PathBuf>,
    /// One JSON object instead of a sentence.
    #[arg(long)]
    json: bool,
}

/// Runs the command that the arguments name; gives its exit status.
pub fn main() -> ExitCode {
    sys::fix_mmap_threshold();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misused(error),
    };
    log_to_stderr(matches!(&cli.command, Command::Daemon(args) if args.bpf_log));
    let result = match cli.command {
        Command::Daemon(args) => daemon::run(args).map(|()| 0),
        #[cfg(target_os = "linux")]
        Command::Run(args) => Ok(run::run(args)),
        #[cfg(target_os = "linux")]
        Command::Owner(args) => Ok(run::owner(args)),
        #[cfg(target_os = "linux")]
        Command::Ps(args) => ps::run(&args).map(|()| 0),
        #[cfg(target_os = "linux")]
        Command::Stop { runs } => stop::run(&runs),
        #[cfg(target_os = "linux")]
        Command::Wait { run } => Ok(wait::run(&run)),
        #[cfg(target_os = "linux")]
        Command::Logs { run, follow } => logs::run(&run, follow).map(|()| 0),
        Command::Demo => demo::run(),
        Command::Doctor { config, json } => doctor(config.as_deref(), json),
        Command::Unpin(args) => unpin::run(args).map(|()| 0),
        Command::Status(asking) => status::run(&asking).map(|()| 0),
        Command::Tree { agent, all, asking } => tree::run(agent, all, &asking).map(|()| 0),
        Command::Explain { pid, asking } => explain::run(pid, &asking).map(|()| 0),
        Command::Scan(args) => scan::run(&args),
        Command::Agents(asking) => agents::run(&asking).map(|()| 0),
        Command::Keep(args) => keep::run(&args).map(|()| 0),
        Command::Unkeep { pid, asking } => keep::undo(pid, &asking).map(|()| 0),
        Command::History(args) => history::run(args).map(|()| 0),
        Command::Config(ConfigCommand::Check { file }) => config_check::run(&file).map(|()| 0),
        Command::Config(ConfigCommand::Reload(asking)) => client::reload(&asking).map(|()| 0),
        Command::Config(ConfigCommand::Show {
            config,
            defaults,
            json,
        }) => config_show::run(config.as_deref(), defaults, json).map(|()| 0),
        Command::DemoAgent => demo::agent().map(|()| 0),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(Failure::Other(error)) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(failure) => {
            let said = format!("reaper: {failure:#}");
            match failure {
                // A line for each problem; names in it are escaped already.
                Failure::Config(_) => said.lines().for_each(|line| message!("{line}")),
                _ => message!("{said}"),
            }
            ExitCode::from(failure.status())
        }
    }
}

/// Says what is wrong with what was typed, or what was asked for. Whoever has a command run tells its statuses from
/// those of this program.
fn misused(mut error: clap::Error) -> ExitCode {
    let quoted = error.context().filter_map(|(kind, value)| match value {
        ContextValue::String(text) => Some((kind, printable(text, usize::MAX))),
        _ => None,
    });
    for (kind, text) in quoted.collect::<Vec<_>>() {
        error.insert(kind, ContextValue::String(text));
    }
    let text = error.render();
    // If the stream is closed, there is no other one to report that to.
    let _ = match error.use_stderr() {
        true => write!(export::stderr(), "{}", text.ansi()),
        false => export::print(text.ansi().to_string()),
    };
    let word = std::env::args_os().nth(1);
    let runs = word.is_some_and(|word| word == "run" || word == "wait");
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if runs => ExitCode::from(OWN_FAILURE),
        _ => ExitCode::from(2),
    }
}

fn doctor(config: Option<&Path>, json: bool) -> Result<u8, Failure> {
    doctor::run(&load(config)?, json, SourceKind::probe).map_err(|e| Failure::Other(e.into()))
}

/// The settings of a file, or the built-in ones.
fn load(config: Option<&Path>) -> Result<Config, ConfigError> {
    config.map_or_else(|| Ok(Config::default()), Config::load)
}

/// A directory as it was typed behind a flag, from the root.
fn absolute(flag: &str, directory: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(directory)
        .map_err(|error| Failure::Usage(format!("{flag} {}: {error}", directory.display())))
}

/// Warnings and errors, and what the probes say where that is wanted.
fn log_to_stderr(probes: bool) {
    let level = if probes {
        LevelFilter::TRACE
    } else {
        LevelFilter::OFF
    };
    let wanted = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("reaper_ebpf", level);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| export::Log)
        .with_target(false);
    let lines = lines.with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(wanted)
        .with(lines)
        .init();
}

/// Whether somebody has stopped reading, as `head` does.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
