//! `cargo xtask agents --drive`: runs real agents against mock models, ends them in different ways, and records which
//! processes are left with and without reaper.

mod cell;
mod mock;
pub mod process;
mod spec;
pub mod table;
mod world;

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use nix::unistd::Uid;
use serde_json::{Value, json};

use super::install::{self, Installed};
use super::packages;
use crate::bench::undo::{self, Undo};
use crate::shell::{self, say};
use cell::Cell;
use spec::{Spec, modes};
use table::Driven;

/// Number of worlds at the same time.
const WORKERS: usize = 4;

/// Installed agent.
struct Ready {
    spec: Spec,
    version: String,
    installed: Installed,
}

/// Drives the agents with these names, or all, and writes the table.
///
/// # Errors
/// This process is not root, a program is missing, or the table cannot be written.
pub fn drive(names: &[String], cells: &[String]) -> Result<()> {
    ensure!(
        Uid::effective().is_root(),
        "driving agents needs namespaces and reaper: run it as root"
    );
    for tool in ["tmux", "setpriv", "unshare", "ip", "npm"] {
        ensure!(shell::find_program(tool).is_some(), "{tool} is missing");
    }
    let reaper = shell::built_reaper(&[])?;
    // Not below /tmp, because each world has a private /tmp.
    let place = PathBuf::from(format!("/var/tmp/reaper-drive-{}", std::process::id()));
    fs::create_dir(&place).with_context(|| place.display().to_string())?;
    // The program in the target directory may be rebuilt while this runs.
    fs::copy("/proc/self/exe", place.join(process::COMMAND)).context("cannot copy this program")?;
    undo::at_signals()?;
    let _removed = Undo::removes(&place);
    let logs = shell::target_dir().join("agents-drive");
    let mut driven = Driven::read()?;
    let specs = spec::read()?.into_iter();
    let specs: Vec<Spec> = specs
        .filter(|spec| names.is_empty() || names.iter().any(|name| name == spec.name()))
        .collect();
    ensure!(
        !specs.is_empty(),
        "no such agent in tests/agents/drive.toml: {}",
        names.join(" ")
    );
    let known = packages::read()?;
    let mut ready = Vec::new();
    for spec in specs {
        let entry = &mut driven.0["agents"][spec.name()];
        if cells.is_empty() || !entry.is_object() {
            *entry = json!({"modes": {}, "not run": {}});
        }
        let agent = known.iter().find(|agent| agent.name == spec.name());
        let package = agent.and_then(|agent| agent.package.as_ref());
        match (spec.not_run(""), package) {
            (Some(why), _) => entry["not run"]["all modes"] = json!(why),
            (None, None) => {
                let why = agent.and_then(|agent| agent.unavailable.as_deref());
                entry["not run"]["all modes"] = json!(why.unwrap_or("no package"));
            }
            (None, Some(package)) => {
                say(format_args!(
                    "installing {} {}",
                    package.name, package.version
                ));
                let folder = place.join(spec.name());
                fs::create_dir_all(&folder)?;
                chown(&folder, Some(process::USER), Some(process::USER))?;
                match install::install(package, &folder, Uid::from_raw(process::USER)) {
                    Ok(installed) => {
                        ready.push(Ready {
                            spec,
                            version: package.version.clone(),
                            installed,
                        });
                    }
                    Err(error) => {
                        entry["not run"]["all modes"] =
                            json!(format!("cannot be installed: {error:#}"))
                    }
                }
            }
        }
    }
    let outcomes = Mutex::new(&mut driven);
    let queue = queue(&ready, cells, &place, &logs, &reaper, &outcomes);
    let queue = Mutex::new(queue.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                let next = || queue.lock().ok()?.next();
                while let Some((version, cell)) = next() {
                    let outcome = cell.run();
                    note(&outcomes, version, &cell, outcome);
                }
            });
        }
    });
    driven.0["date"] = json!(shell::date()?);
    driven.0["reaper"] =
        json!(shell::output(std::process::Command::new(&reaper).arg("--version"))?.trim());
    driven.write()?;
    println!("{}", table::markdown(&driven));
    say(format_args!("logs are in {}", logs.display()));
    Ok(())
}

/// Returns the runs of all agents, limited to `cells` (such as `print` or `print:TERM`) unless that is empty.
fn queue<'a>(
    ready: &'a [Ready],
    cells: &[String],
    place: &Path,
    logs: &Path,
    reaper: &'a Path,
    outcomes: &Mutex<&mut Driven>,
) -> Vec<(&'a str, Cell<'a>)> {
    let mut queue = Vec::new();
    for Ready {
        spec,
        version,
        installed,
    } in ready
    {
        for (mode, _) in modes() {
            let Some(endings) = spec.endings(mode) else {
                let why = spec.not_run(mode).unwrap_or("it has no such mode");
                if let Ok(mut driven) = outcomes.lock() {
                    driven.0["agents"][spec.name()]["not run"][mode] = json!(why);
                }
                continue;
            };
            for ending in endings {
                let name = format!("{mode}:{ending}");
                if !cells.is_empty() && !cells.iter().any(|cell| *cell == name || cell == mode) {
                    continue;
                }
                for (side, reaper) in [("without", None), ("with", Some(reaper))] {
                    let name = format!("{mode}-{}-{side}", ending.replace(' ', "-"));
                    queue.push((
                        version.as_str(),
                        Cell {
                            spec,
                            mode,
                            ending,
                            reaper,
                            installed,
                            world: place.join(format!("{}-{name}", spec.name())),
                            log: logs.join(spec.name()).join(name),
                        },
                    ));
                }
            }
        }
    }
    queue
}

/// Prints the outcome of a run and adds it to the table.
fn note(driven: &Mutex<&mut Driven>, version: &str, cell: &Cell<'_>, outcome: Value) {
    let side = if cell.reaper.is_some() {
        "with"
    } else {
        "without"
    };
    let mut short = outcome.clone();
    short["log"].take();
    say(format_args!(
        "{} {} {} {side}: {short}",
        cell.spec.name(),
        cell.mode,
        cell.ending
    ));
    if let Ok(mut driven) = driven.lock() {
        let agent = &mut driven.0["agents"][cell.spec.name()];
        agent["version"] = json!(version);
        agent["modes"][cell.mode][cell.ending][side] = outcome;
        // Written after each run, so that an interrupt loses nothing.
        if let Err(error) = driven.write() {
            say(format_args!("{error:#}"));
        }
    }
}
