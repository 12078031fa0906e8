//! `cargo xtask bench`: the figures that were promised, measured.
//!
//! Nothing here is asserted: a figure tells of the machine and of what else it was doing as well.

mod cpu;
mod daemon;
mod host;
mod idle;
mod kernel;
mod latency;
mod load;
mod loss;
mod memory;
mod neighbour;
mod overflow;
mod pins;
pub mod process;
mod raw;
mod replay;
mod restart;
mod run;
mod slowdown;
mod sources;
mod start;
mod stats;
mod table;
mod trace;
pub mod undo;
mod wait;

use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::shell::{as_root, built_reaper, run as run_command, say};
use table::Row;
use undo::Undo;

#[derive(clap::Args)]
pub struct Args {
    /// Shorter runs and rougher figures
    #[arg(long)]
    quick: bool,
    /// JSON to this file, besides the table; without a name, or with `-`, as the last line of the output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Only these
    #[arg(long, value_name = "NAME", num_args = 1.., value_enum)]
    only: Vec<Part>,
    /// Measure this executable instead of building one
    #[arg(long, value_name = "FILE")]
    reaper: Option<PathBuf>,
    /// Measure replays by this executable instead of building one
    #[arg(long, value_name = "FILE", hide = true)]
    replay: Option<PathBuf>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// From an agent's exit to the signals for its orphans, sent by the service and by the kernel
    Latency,
    /// The same through each source, beside a scanner that looks every 5 s
    Sources,
    /// The same for one user beside another's many sessions and open files
    Neighbour,
    /// Time in the kernel for each kind of event, of strangers and of members
    Kernel,
    /// CPU time of the service for each event
    Cpu,
    /// What others lose
    Slowdown,
    /// Events lost in a minute of forks at the highest rate
    Loss,
    /// What is found and ended where the ring is too small
    Overflow,
    /// From a start to where it has caught up with what the service before it left
    Restart,
    /// Time in the model for each event of a backlog with thousands of sessions
    Replay,
    /// Memory, idle and with 30,000 processes
    Memory,
    /// From the start to the first event
    Start,
    /// Wake-ups with nothing happening
    Idle,
    /// A command with `reaper run` around it, beside timeout
    Run,
}

impl Part {
    fn measure(self, bench: &Bench) -> Result<Vec<Row>> {
        match self {
            Part::Latency => latency::measure(bench),
            Part::Sources => sources::measure(bench),
            Part::Neighbour => neighbour::measure(bench),
            Part::Kernel => kernel::measure(bench),
            Part::Cpu => cpu::measure(bench),
            Part::Slowdown => slowdown::measure(bench),
            Part::Loss => loss::measure(bench),
            Part::Overflow => overflow::measure(bench),
            Part::Restart => restart::measure(bench),
            Part::Replay => replay::measure(bench),
            Part::Memory => memory::measure(bench),
            Part::Start => start::measure(bench),
            Part::Idle => idle::measure(bench),
            Part::Run => run::measure(bench),
        }
    }

    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// What every part needs.
pub struct Bench {
    reaper: PathBuf,
    /// Tests of the model, optimised.
    replay: PathBuf,
    /// For files; the loads' names are links in it.
    dir: PathBuf,
    quick: bool,
}

impl Bench {
    /// The whole number of times, or the one for a quick look.
    fn pick<T>(&self, whole: T, quick: T) -> T {
        if self.quick { quick } else { whole }
    }
}

/// Builds as the user, measures as root.
///
/// # Errors
/// The build fails, or something could not be measured; the rest has been, and is shown.
pub fn bench(args: &Args) -> Result<()> {
    let reaper = match &args.reaper {
        Some(reaper) => reaper
            .canonicalize()
            .with_context(|| reaper.display().to_string())?,
        None => {
            say("building reaper, optimised");
            built_reaper(&["--release"])?
        }
    };
    let replay = match &args.replay {
        Some(replay) => replay.clone(),
        None => replay::build()?,
    };
    let own = std::env::current_exe().context("cannot find this program")?;
    if !nix::unistd::geteuid().is_root() {
        let mut again = as_root(own)?;
        // Everything but the name, with what has been built.
        again
            .args(std::env::args_os().skip(1))
            .arg("--reaper")
            .arg(reaper)
            .arg("--replay")
            .arg(replay);
        return run_command(&mut again);
    }
    own_mounts()?;
    undo::at_signals()?;
    let dir = std::env::temp_dir().join(format!("reaper-bench-{}", std::process::id()));
    std::fs::DirBuilder::new()
        // Loads of other users run from here.
        .mode(0o711)
        .create(&dir)
        .with_context(|| format!("cannot make {}", dir.display()))?;
    let _removed = Undo::removes(&dir);
    std::fs::copy(&own, dir.join("bench")).context("cannot copy this program")?;
    for image in [
        process::LOAD,
        process::AGENT,
        process::ORPHAN,
        process::HOLDER,
        process::OTHER_AGENT,
    ] {
        symlink("bench", dir.join(image)).context("cannot name the loads")?;
    }
    trace::mount_tracefs()?;
    let bench = Bench {
        reaper,
        replay,
        dir,
        quick: args.quick,
    };
    measure(&bench, args)
}

/// What is mounted from now on is nobody else's, and gone with this process however it ends.
fn own_mounts() -> Result<()> {
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, private, none))
        .context("cannot have mounts of its own")
}

fn measure(bench: &Bench, args: &Args) -> Result<()> {
    let host = host::describe();
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for part in Part::value_variants() {
        if !args.only.is_empty() && !args.only.contains(part) {
            continue;
        }
        say(format_args!("measuring {}", part.name()));
        match part.measure(bench) {
            Ok(measured) => rows.extend(measured),
            Err(error) => {
                rows.push(Row::missing(part.name(), format!("{error:#}")));
                failed.push(part.name());
            }
        }
    }
    println!("\n{}", table::text(&rows));
    let json = table::json(&rows, &host, args.quick);
    match &args.json {
        Some(file) if file.as_os_str() != "-" => std::fs::write(file, format!("{json}\n"))
            .with_context(|| format!("cannot write {}", file.display()))?,
        Some(_) => println!("{json}"),
        None => {}
    }
    ensure!(
        failed.is_empty(),
        "could not be measured: {}",
        failed.join(", ")
    );
    Ok(())
}
