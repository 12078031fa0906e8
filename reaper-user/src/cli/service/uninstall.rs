//! `reaper service uninstall`.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::{Origin, origin};
use super::place::{LABEL, Manager, Place, UNIT};
use super::plan::{Step, carry_out};
use super::{Failure, UninstallArgs, control};
use crate::cli::load_for;
use crate::cli::user::{ConfigOwner, place_journal_dir, place_runtime_dir};
use crate::config::Config;

pub(super) fn run(args: &UninstallArgs) -> Result<u8, Failure> {
    let place = args.change.place()?;
    let unit = origin(&place.unit())?;
    let packaged = place.packaged_unit();
    if unit == Origin::Absent && packaged.is_none() && !place.mode_file().exists() {
        return Err(Failure::Usage(format!(
            "nothing is installed: there is no {}",
            place.unit().display()
        )));
    }
    for path in [place.unit(), place.mode_file()] {
        if origin(&path)?.is_edited() && !args.change.force {
            return Err(Failure::Usage(format!(
                "{} was edited by hand: save what you need of it, then remove it with --force",
                path.display()
            )));
        }
    }
    let config = config(&place);
    // Anyone may write a seal into an image.
    let program = unit.program() == Some(&place.program());
    let steps = steps(&place, &config, program, args.purge)?;
    let mut report = carry_out(steps, args.change.dry_run)?;
    if let Some(packaged) = packaged {
        let text =
            "a package has installed it; `apt remove reaper` or `dnf remove reaper` removes it";
        report.left.push(format!("{}: {text}", packaged.display()));
    }
    for (path, why) in kept(&place, &config)? {
        let stays = match why {
            DROP_INS => !args.change.dry_run,
            _ => !args.purge || !is_own_directory(&path),
        };
        if stays && fs::symlink_metadata(&path).is_ok() {
            report.left.push(format!("{}: {why}", path.display()));
        }
    }
    // Without --dry-run, the first one has ended the command.
    report.print(&args.change, &args.change.obstacles(&place))
}

/// Why other drop-ins stay.
const DROP_INS: &str = "drop-ins that reaper did not write";

/// Returns the config of the service. A wrong one is of no use, so the built-in config then names the directories.
fn config(place: &Place) -> Config {
    let owner = match place.is_own {
        true => ConfigOwner::User,
        false => ConfigOwner::Host,
    };
    let mut config = match place.is_live() {
        true => load_for(None, owner).unwrap_or_default(),
        false => Config::default(),
    };
    if place.is_own {
        // Without them, there is nothing of this user to remove.
        let _ = place_runtime_dir(&mut config);
        let _ = place_journal_dir(&mut config);
    }
    config
}

/// Returns what a removal leaves, with the reasons.
///
/// # Errors
/// A directory cannot be resolved.
fn kept(place: &Place, config: &Config) -> Result<Vec<(PathBuf, &'static str)>, Failure> {
    let drop_ins = place.mode_file();
    let drop_ins = drop_ins.parent().unwrap_or(&drop_ins).to_owned();
    Ok(vec![
        (drop_ins, DROP_INS),
        (
            place.at(&config.journal_dir)?,
            "history, and what users keep; --purge removes it, unless the config names a directory that is not called reaper",
        ),
        (config_directory(place)?, "the config; --purge removes it"),
    ])
}

/// Returns the directory of the config.
fn config_directory(place: &Place) -> Result<PathBuf, Failure> {
    let owner = match place.is_own {
        true => ConfigOwner::User,
        false => ConfigOwner::Host,
    };
    let path = owner.path().unwrap_or_default();
    place.at(path.parent().unwrap_or(&path))
}

/// Returns the steps of the removal. `program` is whether one was installed along with the unit.
///
/// # Errors
/// A directory cannot be resolved.
fn steps(place: &Place, config: &Config, program: bool, purge: bool) -> Result<Vec<Step>, Failure> {
    let mut steps = Vec::new();
    let job = format!("{}/{LABEL}", place.domain());
    match (place.manager, place.is_live()) {
        (Manager::Systemd, true) => {
            let directory = || config.runtime_dir.clone();
            // Before anything is changed.
            let own = control::unit_state(place).pid;
            steps.push(Step::CheckStopped(directory(), own));
            steps.push(Step::Try(place.control(&["disable", "--now", UNIT])));
            steps.push(Step::CheckStopped(directory(), None));
        }
        (Manager::Launchd, true) => {
            steps.push(Step::Try(place.control(&["bootout", &job])));
            steps.push(Step::WaitGone(place.control(&["print", &job])));
        }
        (_, false) => {}
    }
    if place.is_live() && !place.is_own {
        steps.push(Step::Unpin(config.pin_dir.clone()));
    }
    let mode_file = place.mode_file();
    let drop_ins = mode_file.parent().map(Path::to_owned);
    steps.extend([place.link(), place.unit(), mode_file].map(Step::Remove));
    steps.extend(drop_ins.map(Step::Remove));
    steps.extend(program.then(|| Step::Remove(place.program_file().to_owned())));
    if place.manager == Manager::Systemd && place.is_live() {
        steps.push(Step::Call(place.control(&["daemon-reload"])));
        steps.push(Step::Try(place.control(&["reset-failed", UNIT])));
    }
    let mut directories = Vec::new();
    if place.is_live() {
        directories.push(place.at(&config.runtime_dir)?);
    }
    if purge {
        directories.extend([place.at(&config.journal_dir)?, config_directory(place)?]);
    }
    let own = directories
        .into_iter()
        .filter(|path| is_own_directory(path));
    steps.extend(own.map(Step::RemoveAll));
    Ok(steps)
}

/// Returns whether a directory is called `reaper`, so that it has no files of other programs. The config may name any
/// directory, such as `/run`.
fn is_own_directory(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "reaper")
}
