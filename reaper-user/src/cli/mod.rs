//! The command line: what was typed, and one place for exit statuses.

mod config_check;
mod daemon;
mod demo;
pub mod doctor;
mod lock;
mod scope;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::ConfigError;
use crate::engine::EngineError;
use crate::source::ebpf;
use crate::sys;

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

Exit status:
  0  fine    1  failed while running    2  wrong usage or config; nothing was started
  3  the kernel probes cannot be used here; `reaper doctor` says why
  4  another daemon watches the same scope already";

#[derive(Subcommand)]
enum Command {
    /// Watch, decide and reap until it is stopped with Ctrl-C or SIGTERM.
    #[command(after_help = "\
Never signalled: pid 1, kernel threads, this program and its ancestors, whatever does not descend from a
recognised agent, and whatever a rule keeps or declares a boundary. With --observe the same decisions
are made and printed, and no signal is sent.

Examples:
  sudo reaper daemon --observe
  sudo reaper daemon --config /etc/reaper.toml --events /var/log/reaper.jsonl
  sudo reaper daemon --scope $$            only this shell's descendants
  sudo reaper daemon --scope /sys/fs/cgroup/user.slice --json | jq .event")]
    Daemon(DaemonArgs),
    /// Show it at work on a small agent-shaped tree of its own; touches nothing else.
    Demo,
    /// Tell what this host can do, with the reason for each no, and what would be used.
    Doctor {
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Look at config files.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// A process of the demo's tree.
    #[command(hide = true)]
    DemoAgent,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a config file and say what is wrong with it, line by line.
    Check { file: PathBuf },
}

#[derive(Args)]
struct DaemonArgs {
    /// Settings and rules, in TOML; without it the built-in ones.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Decide and print, but send no signal.
    #[arg(long, conflicts_with = "enforce")]
    observe: bool,
    /// Reap, whatever the config file says.
    #[arg(long)]
    enforce: bool,
    /// Consider only this process and what descends from it, or what runs in this cgroup (a directory
    /// of cgroup v2) and what descends from that. May be given several times.
    #[arg(long, value_name = "PID|CGROUP")]
    scope: Vec<String>,
    /// Append the event stream to this file as JSON lines; `-` is standard output.
    #[arg(long, value_name = "FILE|-")]
    events: Option<PathBuf>,
    /// JSON lines on standard output instead of readable ones.
    #[arg(long)]
    json: bool,
    /// Print the probes' own diagnostics to standard error.
    #[arg(long)]
    bpf_log: bool,
    /// Load the probes from this object file instead of the built-in one.
    #[arg(long, value_name = "FILE")]
    bpf_object: Option<PathBuf>,
    /// Directory of the lock file, instead of the config's.
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

/// What ends a command before its time.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Probes(ebpf::SourceError),
    #[error("{0}")]
    Locked(String),
    #[error(transparent)]
    Engine(EngineError),
    #[error(transparent)]
    Other(#[from] anyhow::Error),
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        match error {
            EngineError::Source(source) => Failure::Probes(source),
            other => Failure::Engine(other),
        }
    }
}

impl Failure {
    fn status(&self) -> u8 {
        match self {
            Failure::Engine(_) | Failure::Other(_) => 1,
            Failure::Config(_) | Failure::Usage(_) => 2,
            Failure::Probes(_) => 3,
            Failure::Locked(_) => 4,
        }
    }
}

/// Runs the command that the arguments name; gives its exit status.
pub fn main() -> ExitCode {
    sys::keep_little();
    let cli = Cli::parse();
    log_to_stderr(matches!(&cli.command, Command::Daemon(args) if args.bpf_log));
    let result = match cli.command {
        Command::Daemon(args) => daemon::run(args).map(|()| 0),
        Command::Demo => demo::run(),
        Command::Doctor { json } => {
            doctor::run(json, ebpf::probe).map_err(|e| Failure::Other(e.into()))
        }
        Command::Config(ConfigCommand::Check { file }) => config_check::run(&file).map(|()| 0),
        Command::DemoAgent => demo::agent().map(|()| 0),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(Failure::Other(error)) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(failure) => {
            anstream::eprintln!("reaper: {failure:#}");
            ExitCode::from(failure.status())
        }
    }
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
        .with_writer(io::stderr)
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
