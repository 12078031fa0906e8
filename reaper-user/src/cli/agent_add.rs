//! `reaper agent add`: writes and checks a rule for an agent of the user's own.

mod check;
mod program;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use nix::unistd::geteuid;
use serde::Serialize;

use super::client::{BOLD, DIM};
use super::show::{count, fit, user as user_name, width, wrap};
use super::user::ConfigOwner;
use super::{Failure, parse_pid};
use crate::config::Config;
use crate::config::new_agent::NewAgent;
use crate::export::{self, command_line, printable, to_json};
use program::Target;
use reaper_host::advice::Advised as _;
use reaper_host::facts::scan_processes;
use reaper_host::source::procfs::Procfs;
use reaper_model::event::ProcEntry;

/// Longest command line in the list, in characters.
const COMMAND_MAX: usize = 256;

pub(super) const USAGE: &str =
    "reaper agent add [OPTIONS] <PROGRAM>\n       reaper agent add [OPTIONS] --pid <PID>";

pub(super) const HELP: &str = "\
The rule recognises the program by its path, links resolved, or a script by its path and its interpreter. Versions in \
    the path become `*`. The rule is checked before it is written: it must recognise the program, and must match neither \
    the init process nor an ancestor of this command. Shells, interpreters without a script, terminal multiplexers and \
    programs that run any other program are refused.

When an agent exits, what it has started is reaped. So look at the list of matching processes.

Examples:
  # Recognise the agent that runs as process 4250
  sudo reaper agent add --pid 4250

  # Show the rule for a program in PATH, without writing it
  reaper agent add --dry-run my-agent

  # Add the rule to the config of your own service (`reaper daemon --user`)
  reaper agent add --user ./bin/my-agent --name my-agent

Exit status:
  0  the rule was written or, with --dry-run, can be
  1  no rule can be written for this program
  2  wrong usage, or the config file has errors";

#[derive(Args)]
pub(super) struct AddArgs {
    /// Program of the agent: a path, or a name in PATH.
    #[arg(conflicts_with = "pid")]
    program: Option<PathBuf>,
    /// Take the program of this process.
    #[arg(long, value_name = "PID", value_parser = parse_pid)]
    pid: Option<u32>,
    /// Name of the agent [default: from its path].
    #[arg(long)]
    name: Option<String>,
    /// Config file to add the rule to [default: /etc/reaper/config.toml, or as with --user if you are not root].
    #[arg(long, value_name = "FILE", conflicts_with = "user")]
    config: Option<PathBuf>,
    /// Add the rule to $XDG_CONFIG_HOME/reaper/config.toml, for your own service.
    #[arg(long)]
    user: bool,
    /// Show the rule and what it would match, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Result of the command.
#[derive(Serialize)]
struct Added {
    /// Name of the rule.
    name: String,
    /// Text of the rule.
    rule: String,
    /// Config file.
    config: PathBuf,
    /// Whether the rule was written.
    written: bool,
    /// Running processes that the rule matches.
    matches: Vec<Match>,
    /// Reasons why the rule may not do what was meant.
    warnings: Vec<String>,
}

/// Process that the rule matches.
#[derive(Serialize)]
struct Match {
    pid: u32,
    uid: u32,
    command: String,
}

pub(super) fn run(args: &AddArgs) -> Result<(), Failure> {
    if args.program.is_none() && args.pid.is_none() {
        let what = "name the agent by its program, `reaper agent add PROGRAM`, or by a process that runs it, \
                    `reaper agent add --pid PID`";
        return Err(Failure::Usage(what.into()));
    }
    let file = config_file(args)?;
    let (old, known) = read(&file)?;
    let Target {
        what,
        image,
        is_chosen,
    } = program::target(args)?;
    let refused = |why: String| Failure::Refused(format!("cannot add {what}: {why}"));
    check::refuse_known(&known.rules, &image).map_err(refused)?;
    let mut agent = NewAgent::of(&image).map_err(refused)?;
    if is_chosen {
        agent = agent.in_any_version();
    }
    if let Some(name) = &args.name {
        agent.name.clone_from(name);
    }
    let table = scan_processes(&Procfs::default()).map_err(|error| Failure::Other(error.into()))?;
    let (block, config) = check::appended(&old, &known.rules, &agent, &file)?;
    let matching = check::matching(&config.rules, &agent.name, &table);
    check::check(&config.rules, &agent.name, &image, &matching, &table).map_err(refused)?;
    let added = Added {
        rule: agent.toml(),
        written: !args.dry_run,
        matches: matching.into_iter().map(Match::of).collect(),
        warnings: check::warnings(&config.warnings, &old),
        name: agent.name,
        config: file,
    };
    if !args.json {
        export::print(before(&added, width())).map_err(Failure::stdout)?;
    }
    if added.written {
        write(&added.config, &block)?;
        Config::load(&added.config)?;
    }
    let text = match args.json {
        true => to_json(&added),
        false => after(&added, width()).into_bytes(),
    };
    export::print(text).map_err(Failure::stdout)
}

fn config_file(args: &AddArgs) -> Result<PathBuf, Failure> {
    match (&args.config, args.user) {
        (Some(file), _) => Ok(file.clone()),
        (None, true) => own_config(),
        (None, false) => ConfigOwner::this_user().path(),
    }
}

/// Returns the config file of this user's own service.
///
/// # Errors
/// Root has the home directory of another user, as with `sudo -E`. Files of root there would be in the way of that user.
fn own_config() -> Result<PathBuf, Failure> {
    let file = ConfigOwner::User.path()?;
    let mut directories = file.ancestors().skip(1);
    let nearest = directories.find_map(|directory| directory.metadata().ok());
    match nearest.map(|nearest| nearest.uid()) {
        Some(uid) if uid != 0 && geteuid().is_root() => Err(Failure::Usage(format!(
            "{} belongs to user {}, and you are root: run this command as that user, or without --user for the service of \
             the host",
            file.display(),
            user_name(uid)
        ))),
        _ => Ok(file),
    }
}

/// Returns the text of the config file, empty if none exists, and what it means. Refuses a file that a service would
/// refuse.
fn read(file: &Path) -> Result<(String, Config), Failure> {
    let config = Config::load_if_exists(file)?;
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read.with_context(|| format!("cannot read {}", file.display())),
    };
    Ok((text?, config))
}

/// Appends a text to the config file, and creates the file and its directory if needed.
fn write(file: &Path, block: &str) -> Result<(), Failure> {
    let append = || {
        if let Some(directory) = file.parent() {
            // Root refuses a config that others can write to or replace.
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o755).create(directory)?;
        }
        let mut options = OpenOptions::new();
        let mut file = options.append(true).create(true).mode(0o644).open(file)?;
        file.write_all(block.as_bytes())?;
        file.sync_all()
    };
    append().map_err(|error| {
        let error = error.advised_or("run with sudo, or name another file with --config");
        Failure::Other(anyhow!("cannot write {}: {error}", file.display()))
    })
}

impl Match {
    fn of(entry: &ProcEntry) -> Match {
        Match {
            pid: entry.key.pid,
            uid: entry.uids.effective,
            command: command_line(&entry.image, COMMAND_MAX),
        }
    }
}

/// Formats the processes that the rule matches, and the rule.
fn before(added: &Added, width: Option<usize>) -> String {
    let mut out = String::new();
    let (name, n) = (&added.name, added.matches.len() as u64);
    let _ = match n {
        0 => writeln!(out, "No running process matches the rule \"{name}\"."),
        n => writeln!(
            out,
            "The rule \"{name}\" matches {}:",
            count(n, "running process", "running processes")
        ),
    };
    for found in &added.matches {
        let before = format!("  {:<8}{:<10}", found.pid, user_name(found.uid));
        let command = fit(&found.command, before.chars().count(), COMMAND_MAX, width);
        let _ = writeln!(out, "{before}{command}");
    }
    let _ = writeln!(out, "\n{DIM}{}{DIM:#}", added.rule.trim_end());
    for warning in &added.warnings {
        out += &wrap(
            &printable(&format!("warning: {warning}"), usize::MAX),
            0,
            width,
        );
    }
    out.push('\n');
    out
}

/// Formats what was written, and what follows.
fn after(added: &Added, width: Option<usize>) -> String {
    let file = printable(&added.config.display().to_string(), usize::MAX);
    if !added.written {
        return format!("{BOLD}Not written to {file} (--dry-run).{BOLD:#}\n");
    }
    let next = "Run `reaper config reload` if a service uses this file: it then recognises agents that start from now on. It \
                recognises those that run already once it is restarted.";
    format!("{BOLD}Added to {file}.{BOLD:#}\n{}", wrap(next, 0, width))
}
