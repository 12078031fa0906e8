//! Commands of `reaper`: their arguments and help texts.
//!
//! Help texts have one line per paragraph, because clap wraps them to the width of the terminal.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use super::arguments::{ServiceArgs, UnpinArgs};
use super::color::Color;
use super::{
    agent_add, agents, completions, config_init, config_show, daemon, history, keep, scan, service,
    version,
};
#[cfg(target_os = "linux")]
use super::{logs, ps, run, stop, wait};
use reaper_model::value::parse_pid;

/// Cleans up the processes that AI coding agents leave behind.
///
/// When an agent exits or crashes, the shells, servers, test runs and browsers that it started keep running. The kernel reports each
/// fork, exec and exit to reaper. So reaper knows the process tree of each agent, and ends its orphans as soon as the agent exits.
#[derive(Parser)]
#[command(
    name = "reaper",
    version,
    long_version = version::long(),
    after_long_help = EXAMPLES,
    max_term_width = MAX_WIDTH
)]
pub(super) struct Cli {
    /// When to use colours: auto, always or never [default: auto].
    #[arg(
        long,
        value_name = "WHEN",
        global = true,
        display_order = 900,
        default_value = "auto",
        hide_default_value = true,
        hide_possible_values = true
    )]
    pub(super) color: Color,
    /// Print the status as JSON; only without a command.
    #[arg(long)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) command: Option<Command>,
}

/// Longest line of a help text, in columns.
const MAX_WIDTH: usize = 100;

const EXAMPLES: &str = "\
Without a command, reaper shows the status and the commands to try next.

Examples:
  # Check what this host supports
  reaper doctor

  # Watch reaper clean up a small process tree
  sudo reaper demo

  # Watch the whole host, but send no signals
  sudo reaper daemon --observe

  # Watch the whole host and reap
  sudo reaper daemon

  # Install the service; it observes first
  sudo reaper service install

  # Run a command and leave nothing behind; needs neither root nor a service
  reaper run -- npm test

  # Show the running agents with all their processes
  reaper tree

  # Explain why a process is kept or reaped, and what happens next
  reaper explain 4250

  # Keep a process although its agent exits
  reaper keep 4250 --for 2h

  # Show what was reaped and kept in the last day, and why
  sudo reaper history --since 1d

  # Find what agents have left behind; needs no service
  sudo reaper scan

Exit status:
  0    success
  1    failed, or the service refused the request
  2    wrong usage or config; nothing was started
  3    the requested event source is not available here; see `reaper doctor`
  4    another daemon watches the same scope, or uses the pins to be removed
  5    no service answers on the socket
  6    `scan` found something to reap
  124  `run`, `wait`: a time limit ended the run
  125  `run`, `stop`, `wait`, `logs`: reaper failed, or no such run
  126  `run`, `wait`: the command cannot be executed
  127  `run`, `wait`: the command was not found

`run` and `wait` pass on any other status of the command.";

#[derive(Subcommand)]
pub(super) enum Command {
    /// Check what this host supports, and which event source will be used.
    #[command(after_long_help = "\
Examples:
  reaper doctor

  # Check for a daemon with this config
  reaper doctor --config my.toml

  # Print the event source that a daemon would use
  reaper doctor --json | jq .source

Exit status:
  0  a daemon can run here
  3  it cannot; the output says why")]
    Doctor {
        /// Check whether a daemon with this config file can run here.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Demonstrate reaper on a small process tree.
    ///
    /// Starts a stand-in for an agent with four commands, kills it, and shows how they and what they have started are
    /// reaped. Only processes that the demo has started are signalled.
    #[command(after_long_help = "\
Example:
  sudo reaper demo")]
    Demo {
        /// Print the event stream as JSON lines instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Run the service: track agents and reap what they leave behind.
    ///
    /// Runs until Ctrl-C or SIGTERM.
    #[command(after_long_help = daemon::HELP)]
    Daemon(daemon::DaemonArgs),
    /// Run a command and end everything that it leaves behind.
    #[cfg(target_os = "linux")]
    #[command(after_long_help = run::HELP)]
    Run(run::RunArgs),
    /// Started by `reaper run --detach` (internal).
    #[cfg(target_os = "linux")]
    #[command(name = run::SUPERVISE, hide = true)]
    Supervise(run::SuperviseArgs),
    /// List your runs (`reaper run`) that have not ended, and their state.
    #[cfg(target_os = "linux")]
    #[command(after_long_help = ps::HELP)]
    Ps(ps::PsArgs),
    /// Stop runs with all their processes.
    #[cfg(target_os = "linux")]
    #[command(after_long_help = stop::HELP)]
    Stop {
        /// Name or id of a run, or the first characters of its id.
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<String>,
        /// Print one JSON object per run.
        #[arg(long)]
        json: bool,
    },
    /// Wait for a run and exit with its status.
    #[cfg(target_os = "linux")]
    #[command(after_long_help = wait::HELP)]
    Wait {
        /// Name or id of a run, or the first characters of its id.
        run: String,
        /// Print the finished run as one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Show the output of a detached run.
    #[cfg(target_os = "linux")]
    #[command(after_long_help = logs::HELP)]
    Logs {
        /// Name or id of a run, or the first characters of its id.
        run: String,
        /// Follow the output until the run ends.
        #[arg(short, long)]
        follow: bool,
        /// Print one JSON object per line of output.
        #[arg(long)]
        json: bool,
    },
    /// Install the service, show its state and log, or remove it.
    #[command(subcommand)]
    Service(service::ServiceCommand),
    /// Show what the service watches, has done and has missed.
    #[command(after_long_help = "\
Examples:
  reaper status

  # Print the number of open sessions
  reaper status --json | jq .sessions_open")]
    Status(ServiceArgs),
    /// Show the process trees of the running agents.
    #[command(after_long_help = "\
Tags behind a process:
  [claude-code]        it is this agent
  [detached]           its parent has exited, but its agent is alive
  [to be reaped: WHY]  its agent has exited; `would be` if the service observes
  [waits 9m 59s: WHY]  a rule delays the decision
  [kept: WHY]          kept by a rule, by REAPER_KEEP or by a user
  [boundary: RULE]     it and its descendants belong to no agent above it
  [zombie]             it has exited, but its parent has not waited for it

Examples:
  reaper tree

  # Show only one agent
  reaper tree --agent claude-code

  # Include processes that belong to no agent
  reaper tree --all

  # List the pids of all processes whose agent has exited
  reaper tree --json | jq '.groups[].processes[] | select(.due).pid'")]
    Tree {
        /// Show only sessions of this agent, as in `reaper agents`.
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// Include processes that belong to no agent.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        service: ServiceArgs,
    },
    /// Explain why a process is kept or was reaped, what happens next, and how to keep it.
    ///
    /// Also answers for a process that has exited, from the memory of the service or from its journal.
    #[command(after_long_help = "\
Examples:
  reaper explain 4250

  # Print only the two sentences, for several processes
  reaper explain 4250 4251 --json | jq -r '.why, .next'")]
    Explain {
        /// Processes to explain.
        #[arg(required = true, value_name = "PID", value_parser = parse_pid)]
        pids: Vec<u32>,
        #[command(flatten)]
        service: ServiceArgs,
    },
    /// Keep one of your processes from being reaped, or list what is kept.
    #[command(after_long_help = keep::HELP)]
    Keep(keep::KeepArgs),
    /// Undo `reaper keep`.
    ///
    /// Processes that --tree has kept along with this one are released too. Each is then evaluated again, and reaped if
    /// it is due; the answer says what happens to the named process. A process that is kept only along with a living ancestor cannot be released alone: release that one.
    #[command(after_long_help = "\
Example:
  reaper unkeep 4250")]
    Unkeep {
        /// Processes to release.
        #[arg(required = true, value_name = "PID", value_parser = parse_pid)]
        pids: Vec<u32>,
        #[command(flatten)]
        service: ServiceArgs,
    },
    /// List the known agents and which run now, or test why a process is not one.
    #[command(after_long_help = agents::HELP)]
    Agents(agents::AgentsArgs),
    /// Add an agent of your own.
    #[command(subcommand)]
    Agent(AgentCommand),
    /// Show past sessions with their decisions and outcomes, the newest last.
    ///
    /// Users other than root see their own sessions. On a terminal, a long history is shown in a pager: $PAGER or `less`; for root
    /// always `less`, in its secure mode.
    #[command(after_long_help = "\
Examples:
  sudo reaper history --since 2h

  # What was done to this process, and what keeps the next one
  sudo reaper history 4250

  # What was done to each of these
  sudo reaper history 4250 4251

  # The last session
  sudo reaper history -n 1

  sudo reaper history --session claude-code-4242-19e1de9c03e4
  sudo reaper history --agent claude-code --json | jq '.[\"memory.rss\"]'")]
    History(history::HistoryArgs),
    /// Find what agents have left behind; works without a service too.
    #[command(after_long_help = scan::HELP)]
    Scan(scan::ScanArgs),
    /// Create, check, show or reload the config.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Remove everything that a daemon has pinned in the kernel.
    ///
    /// The kernel then stops tracking, and the next daemon does not get earlier events. Also removes pins of other
    /// versions. Fails with exit status 4 while a daemon uses them.
    #[command(after_long_help = "\
Examples:
  sudo reaper unpin
  sudo reaper unpin --pin-dir /sys/fs/bpf/reaper")]
    Unpin(UnpinArgs),
    /// Print completions for a shell.
    #[command(after_long_help = completions::HELP)]
    Completions {
        /// Shell to complete in.
        shell: clap_complete::Shell,
    },
    /// Root of the demo's process tree (internal).
    #[command(hide = true)]
    DemoAgent,
}

#[derive(Subcommand)]
pub(super) enum AgentCommand {
    /// Write a rule for an agent of your own to the config, after listing what it would match.
    #[command(override_usage = agent_add::USAGE, after_long_help = agent_add::HELP)]
    Add(agent_add::AddArgs),
}

#[derive(Subcommand)]
pub(super) enum ConfigCommand {
    /// Check a config file and list its problems by line.
    ///
    /// Also warns of rules that can never match, and of rules that an earlier rule makes unreachable.
    #[command(after_long_help = "\
Examples:
  # Check the file that the service reads
  sudo reaper config check

  # Check another file
  reaper config check my.toml

Exit status:
  0  the file can be used, perhaps with warnings
  2  it cannot be used")]
    Check {
        /// Config file (TOML) [default: that of this user's service].
        ///
        /// For root /etc/reaper/config.toml, for other users $XDG_CONFIG_HOME/reaper/config.toml.
        file: Option<PathBuf>,
        /// Config file, as other commands name it.
        #[arg(long, value_name = "FILE", hide = true, conflicts_with = "file")]
        config: Option<PathBuf>,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Write a config file with all settings as comments.
    #[command(after_long_help = config_init::HELP)]
    Init {
        /// File to create [default: /etc/reaper/config.toml for root].
        ///
        /// For other users, the default is $XDG_CONFIG_HOME/reaper/config.toml. Missing directories are created.
        file: Option<PathBuf>,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Show the settings and rules that the service uses, in the order of evaluation.
    #[command(after_long_help = config_show::HELP)]
    Show(config_show::ShowArgs),
    /// Make the service reread its config file.
    ///
    /// If the file has errors, they are printed and the old config stays in force. Only root and the user of the service may
    /// do this.
    #[command(after_long_help = "\
Example:
  sudo reaper config reload")]
    Reload(ServiceArgs),
}
