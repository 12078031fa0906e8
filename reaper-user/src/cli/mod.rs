//! Command line of `reaper`: parses the arguments, runs the command and maps its result to an exit status.

mod agent_add;
mod agents;
mod arguments;
mod client;
mod color;
mod commands;
mod completions;
mod config_check;
mod config_init;
mod config_show;
mod daemon;
mod demo;
#[cfg_attr(target_os = "macos", path = "doctor/darwin.rs")]
mod doctor;
mod engine;
mod explain;
mod failure;
mod hint;
mod history;
mod keep;
mod keep_advice;
mod lock;
mod logging;
#[cfg(target_os = "linux")]
mod logs;
mod overview;
mod pager;
#[cfg(target_os = "linux")]
mod ps;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod runs;
mod scan;
mod scope;
mod service;
mod show;
mod sockets;
mod status;
#[cfg(target_os = "linux")]
mod stop;
mod suggest;
mod tree;
#[cfg_attr(target_os = "macos", path = "unpin/darwin.rs")]
mod unpin;
mod user;
mod version;
#[cfg(target_os = "linux")]
mod wait;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ContextValue;

use crate::export::{self, printable};
use arguments::{ServiceArgs, UnpinArgs, absolute, load, load_for};
use color::Color;
use commands::{AgentCommand, Cli, Command, ConfigCommand};
use failure::{Failure, OWN_FAILURE, is_broken_pipe};
use logging::log_to_stderr;
use reaper_host::source::SourceKind;
use reaper_host::sys;
use reaper_model::value::{parse_pid, parse_time};

/// Runs the command that the arguments name and returns its exit status.
pub fn main() -> ExitCode {
    sys::fix_mmap_threshold();
    let Cli {
        color,
        json,
        command,
    } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage_error(error),
    };
    color.apply();
    log_to_stderr(matches!(&command, Some(Command::Daemon(args)) if args.bpf_log));
    let result = match command {
        None => overview::run(json).map(|()| 0),
        Some(_) if json => Err(Failure::Usage(
            "--json belongs behind the command: `reaper COMMAND --json`".into(),
        )),
        Some(command) => run(command),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(Failure::Other(error)) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.status())
        }
    }
}

/// Runs a command and returns its exit status.
fn run(command: Command) -> Result<u8, Failure> {
    match command {
        Command::Daemon(args) => daemon::run(args).map(|()| 0),
        #[cfg(target_os = "linux")]
        Command::Run(args) => Ok(run::run(args)),
        #[cfg(target_os = "linux")]
        Command::Supervise(args) => Ok(run::supervise_detached(args)),
        #[cfg(target_os = "linux")]
        Command::Ps(args) => ps::run(&args).map(|()| 0),
        #[cfg(target_os = "linux")]
        Command::Stop { runs, json } => runs::own_status(stop::run(&runs, json)),
        #[cfg(target_os = "linux")]
        Command::Wait { run, json } => runs::own_status(wait::run(&run, json)),
        #[cfg(target_os = "linux")]
        Command::Logs { run, follow, json } => runs::own_status(logs::run(&run, follow, json)),
        Command::Demo { json } => demo::run(json),
        Command::Doctor { config, json } => doctor(config.as_deref(), json),
        Command::Unpin(args) => unpin::run(args).map(|()| 0),
        Command::Service(command) => service::run(&command),
        Command::Status(service) => status::run(&service).map(|()| 0),
        Command::Tree {
            agent,
            all,
            service,
        } => tree::run(agent, all, &service).map(|()| 0),
        Command::Explain { pids, service } => explain::run(&pids, &service),
        Command::Scan(args) => scan::run(&args),
        Command::Agents(args) => agents::run(&args).map(|()| 0),
        Command::Agent(AgentCommand::Add(args)) => agent_add::run(&args).map(|()| 0),
        Command::Keep(args) => keep::run(&args),
        Command::Unkeep { pids, service } => keep::undo(&pids, &service),
        Command::History(args) => history::run(args),
        Command::Config(ConfigCommand::Check { file, config, json }) => {
            config_check::run(file.or(config).as_deref(), json)
        }
        Command::Config(ConfigCommand::Init { file, json }) => {
            config_init::run(file.as_deref(), json).map(|()| 0)
        }
        Command::Config(ConfigCommand::Reload(service)) => client::reload(&service).map(|()| 0),
        Command::Config(ConfigCommand::Show(args)) => config_show::run(&args).map(|()| 0),
        Command::Completions { shell } => completions::run(shell).map(|()| 0),
        Command::DemoAgent => demo::agent().map(|()| 0),
    }
}

/// Prints a usage error, or the help or version if those were requested.
///
/// `run` and `wait` exit with 125 on errors, so that callers can tell these from statuses of the command.
fn usage_error(mut error: clap::Error) -> ExitCode {
    Color::find(std::env::args_os().skip(1)).apply();
    suggest::suggest(&mut error);
    let quoted = error.context().filter_map(|(kind, value)| match value {
        ContextValue::String(text) => Some((kind, printable(text, usize::MAX))),
        _ => None,
    });
    for (kind, text) in quoted.collect::<Vec<_>>() {
        error.insert(kind, ContextValue::String(text));
    }
    let text = error.render();
    let text = text.ansi().to_string();
    match error.use_stderr() {
        true => export::print_error(&text),
        // A failed write cannot be reported anywhere.
        false => drop(export::print(text)),
    }
    let mut words = std::env::args_os().skip(1);
    let command = words.find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    let is_run = command.is_some_and(|command| command == "run" || command == "wait");
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if is_run => ExitCode::from(OWN_FAILURE),
        _ => ExitCode::from(2),
    }
}

fn doctor(config: Option<&Path>, json: bool) -> Result<u8, Failure> {
    doctor::run(&user::load_readable(config)?, json, SourceKind::probe).map_err(Failure::stdout)
}

#[cfg(test)]
mod tests;

/// Returns the definition of all commands and options, from which man pages and completions are made.
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}
