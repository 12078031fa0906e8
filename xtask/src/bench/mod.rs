//! `cargo xtask bench`: measures latency, CPU, memory and losses, and prints the results beside the goals.
//!
//! A missed goal is no failure, because the results also depend on the machine and its other load.

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
    /// Shorter runs, less precise results
    #[arg(long)]
    quick: bool,
    /// Also write JSON to this file; without a name, or with `-`, print it as the last line
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Measure only these
    #[arg(long, value_name = "NAME", num_args = 1.., value_enum)]
    only: Vec<Part>,
    /// Measure this `reaper` executable instead of building one
    #[arg(long, value_name = "FILE")]
    reaper: Option<PathBuf>,
    /// Use this executable for replays instead of building one
    #[arg(long, value_name = "FILE", hide = true)]
    replay: Option<PathBuf>,
}

/// Group of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Time from an agent's exit to the signals for its orphans, sent by the service and by the kernel
    Latency,
    /// The same with each event source, compared with a scan every 5 s
    Sources,
    /// The same for one user while another user has many sessions and open files
    Neighbour,
    /// Time of the probes in the kernel, for untracked processes and for members
    Kernel,
    /// CPU time of the service per event
    Cpu,
    /// Slowdown of other processes
    Slowdown,
    /// Events lost in a minute of forks at the highest possible rate
    Loss,
    /// Recovery and clean-up if the ring buffer is too small
    Overflow,
    /// Time from a restart until the service has caught up with the backlog
    Restart,
    /// CPU time of the model per event of a backlog with thousands of sessions
    Replay,
    /// Memory, idle and with 30,000 tracked processes
    Memory,
    /// Time from the start to the first event
    Start,
    /// Wake-ups of an idle service
    Idle,
    /// Cost of `reaper run`, compared with `timeout`
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

/// Executables, directory and options of all measurements.
pub struct Bench {
    reaper: PathBuf,
    /// Executable that replays events through the model.
    replay: PathBuf,
    /// Directory for files, with a link for each name of a load.
    dir: PathBuf,
    quick: bool,
}

impl Bench {
    /// Returns `whole`, or `quick` with `--quick`.
    fn pick<T>(&self, whole: T, quick: T) -> T {
        if self.quick { quick } else { whole }
    }
}

/// Builds as the user and measures as root.
///
/// # Errors
/// The build fails, or a measurement fails. The others are printed all the same.
pub fn bench(args: &Args) -> Result<()> {
    let reaper = match &args.reaper {
        Some(reaper) => reaper
            .canonicalize()
            .with_context(|| reaper.display().to_string())?,
        None => {
            say("building reaper (release)");
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
        // The same arguments, with the executables that are built.
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
        .with_context(|| format!("cannot create {}", dir.display()))?;
    let _removed = Undo::removes(&dir);
    std::fs::copy(&own, dir.join("bench")).context("cannot copy this program")?;
    for image in [
        process::LOAD,
        process::AGENT,
        process::ORPHAN,
        process::HOLDER,
        process::OTHER_AGENT,
    ] {
        symlink("bench", dir.join(image)).context("cannot link the loads")?;
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

/// Enters a private mount namespace. Later mounts are invisible to other processes and vanish with this one.
fn own_mounts() -> Result<()> {
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, private, none))
        .context("cannot create a mount namespace")
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
        "failed measurements: {}",
        failed.join(", ")
    );
    Ok(())
}
