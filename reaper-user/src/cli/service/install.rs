//! `reaper service install`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use nix::unistd::geteuid;

use super::files::{NewFile, Origin, is_newer, origin, read};
use super::place::{LABEL, Manager, Place, UNIT};
use super::plan::{Report, Step, carry_out};
use super::{Failure, InstallArgs, control};
use crate::cli::user::ConfigOwner;
use crate::cli::{load_for, lock};
use crate::config::{Config, Mode};

/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Directories whose programs stay where they are.
const PROGRAM_DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/bin"];

/// Installs the service, or with `--dry-run` shows what that would do. Returns the exit status.
pub(super) fn run(args: &InstallArgs) -> Result<u8, Failure> {
    let place = args.change.place()?;
    let before = place.installed_mode();
    let mode = match (args.enforce, args.observe) {
        (true, _) => Mode::Enforce,
        (_, true) => Mode::Observe,
        _ => before.unwrap_or(Mode::Observe),
    };
    let mut obstacles = args.change.obstacles(&place);
    obstacles.extend(obstacles_here(&place));
    if !args.change.dry_run && !obstacles.is_empty() {
        return Err(obstacles.remove(0));
    }
    let steps = match steps(&place, mode, args.change.force) {
        Err(failure) if args.change.dry_run => {
            obstacles.push(failure);
            Vec::new()
        }
        steps => steps?,
    };
    let mut report = carry_out(steps, args.change.dry_run)?;
    describe(&mut report, &place, before, mode);
    report.print(&args.change, &obstacles)
}

/// Returns why the service cannot run here: the config is wrong, the probes cannot be used, or a daemon that was started
/// by hand runs.
fn obstacles_here(place: &Place) -> Vec<Failure> {
    if !place.is_live() {
        return Vec::new();
    }
    let owner = match place.is_own {
        true => ConfigOwner::User,
        false => ConfigOwner::Host,
    };
    let (config, mut obstacles) = match load_for(None, owner) {
        Ok(config) => (config, Vec::new()),
        Err(failure) => (Config::default(), vec![failure]),
    };
    // Other users cannot load the probes, whatever the service can.
    if place.is_own || !geteuid().is_root() {
        return obstacles;
    }
    obstacles.extend(check_probes().err());
    let main = control::unit_state(place).pid;
    let is_unit = |daemon: &String| main.is_some_and(|pid| daemon.ends_with(&format!(" {pid}")));
    let daemon = lock::host_daemon(&config.runtime_dir).filter(|daemon| !is_unit(daemon));
    obstacles.extend(daemon.map(|daemon| {
        Failure::Locked(format!(
            "{daemon} runs already, and systemd has not started it: stop it, then install the service"
        ))
    }));
    obstacles
}

/// Checks that the probes can be used, which the unit requires.
#[cfg(target_os = "linux")]
fn check_probes() -> Result<(), Failure> {
    reaper_host::source::SourceKind::Ebpf.probe().map_err(|error| {
        Failure::Usage(format!(
            "nothing was installed, as the service needs the kernel probes: {error}; `reaper service install --user` needs none, \
             and follows your own processes less exactly"
        ))
    })
}

/// Returns success: the job of launchd uses the source that it finds.
#[cfg(target_os = "macos")]
fn check_probes() -> Result<(), Failure> {
    Ok(())
}

/// Returns the steps of the installation.
///
/// # Errors
/// A file was edited by hand or is newer, and `force` is not set. Or this program cannot be read.
fn steps(place: &Place, mode: Mode, force: bool) -> Result<Vec<Step>, Failure> {
    let mut steps = Vec::new();
    let unit = origin(&place.unit())?;
    match place.packaged_unit() {
        // A unit in /etc would hide that of the package.
        Some(packaged) if unit == Origin::Absent => {
            check_version(&packaged, None, force)?;
        }
        Some(packaged) if unit.seal().is_some() => {
            return Err(Failure::Usage(format!(
                "a package has installed {}, and {} hides it: remove the latter with `{}`, then install again",
                packaged.display(),
                place.unit().display(),
                place.command("uninstall")
            )));
        }
        Some(_) if unit.is_edited() => {
            check_unchanged(&place.unit(), &unit, force)?;
            steps.push(Step::Remove(place.unit()));
        }
        _ => {
            let own = unit.program().map(Path::to_owned);
            let program = program(place, own.as_deref(), force)?;
            check_unchanged(&place.unit(), &unit, force)?;
            let path = program.as_ref().map(|_| place.program());
            let current = path.clone().map_or_else(this_program, Ok)?;
            // Written by an earlier installation, which left it in place now.
            let installed = path.is_some() || own.as_ref() == Some(&current);
            steps.extend(program.map(Step::Write));
            steps.push(Step::Write(place.unit_file(&current, installed, mode)));
        }
    }
    if place.manager == Manager::Systemd {
        let file = place.mode_file();
        check_unchanged(&file, &origin(&file)?, force)?;
        match mode {
            Mode::Enforce => steps.push(Step::Write(place.mode_drop_in(mode))),
            Mode::Observe => steps.push(Step::Remove(file)),
        }
    }
    steps.extend(start(place));
    Ok(steps)
}

/// Returns the steps that start the installed service.
fn start(place: &Place) -> Vec<Step> {
    let call = |words: &[&str]| Step::Call(place.control(words));
    match (place.manager, place.is_live()) {
        (Manager::Systemd, true) => vec![
            call(&["daemon-reload"]),
            call(&["enable", UNIT]),
            call(&["restart", UNIT]),
        ],
        (Manager::Systemd, false) => {
            let target = match place.packaged_unit() {
                Some(packaged) => Path::new("/").join(inside(place, &packaged)),
                None => Path::new("/").join(inside(place, &place.unit())),
            };
            vec![Step::Link(place.link(), target)]
        }
        (Manager::Launchd, true) => {
            let domain = place.domain();
            let job = format!("{domain}/{LABEL}");
            let unit = place.unit().display().to_string();
            vec![
                Step::Try(place.control(&["bootout", &job])),
                Step::WaitGone(place.control(&["print", &job])),
                call(&["bootstrap", &domain, &unit]),
            ]
        }
        (Manager::Launchd, false) => Vec::new(),
    }
}

/// Returns a path below the root as the host sees it.
fn inside(place: &Place, path: &Path) -> PathBuf {
    let path = path.strip_prefix(&place.root).unwrap_or(path);
    Path::new("/").join(path)
}

/// Returns the path of this program.
fn this_program() -> Result<PathBuf, Failure> {
    Ok(std::env::current_exe().context("cannot find this program (/proc/self/exe)")?)
}

/// Returns the program to install, `None` if this one can stay where it is. `own` is the program of an earlier installation.
///
/// # Errors
/// Another program is in its place, or the installed one is newer, and `force` is not set. Or this program cannot be read.
fn program(place: &Place, own: Option<&Path>, force: bool) -> Result<Option<NewFile>, Failure> {
    let this = this_program()?;
    let path = place.program_file().to_owned();
    let stays = PROGRAM_DIRECTORIES
        .iter()
        .any(|dir| this.parent() == Some(Path::new(dir)));
    if place.is_live() && (this == path || stays) {
        return Ok(None);
    }
    let content = fs::read(&this).with_context(|| format!("cannot read {}", this.display()))?;
    let is_same = || read(&path).is_ok_and(|installed| installed == content);
    if fs::symlink_metadata(&path).is_ok() && !is_same() {
        if own != Some(&place.program()) && !force {
            return Err(Failure::Usage(format!(
                "{} is there, and `reaper service install` has not written it: remove it, or replace it with --force",
                path.display()
            )));
        }
        // Root runs no program of an image, or of another user.
        if place.is_live() && !(place.is_own && geteuid().is_root()) {
            check_version(&path, version_of(&path).as_deref(), force)?;
        }
    }
    Ok(Some(NewFile {
        path,
        content,
        mode: 0o755,
    }))
}

/// Returns the version of an installed program; `None` if it does not run.
fn version_of(program: &Path) -> Option<String> {
    let mut command = Command::new(program);
    let output = command
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().nth(1).map(str::to_owned)
}

/// Refuses to replace a newer version.
fn check_version(path: &Path, version: Option<&str>, force: bool) -> Result<(), Failure> {
    match version.filter(|version| is_newer(version, VERSION) && !force) {
        None => Ok(()),
        Some(version) => Err(Failure::Usage(format!(
            "{} is version {version}, which is newer than this {VERSION}: run the newer one, or replace it with --force",
            path.display()
        ))),
    }
}

/// Refuses to replace a file that was edited by hand, or that a newer version has written.
fn check_unchanged(path: &Path, origin: &Origin, force: bool) -> Result<(), Failure> {
    match origin {
        Origin::Edited(_) if !force && path.is_symlink() => Err(Failure::Usage(format!(
            "{} is a symbolic link that reaper has not made: remove it (`systemctl unmask {UNIT}` if it masks the unit), or \
             replace it with --force",
            path.display()
        ))),
        Origin::Edited(_) if !force => Err(Failure::Usage(format!(
            "{} was edited by hand: put the changes into a drop-in (`systemctl edit {UNIT}`), then replace the file with --force",
            path.display()
        ))),
        Origin::Own(seal) => check_version(path, Some(&seal.version), force),
        Origin::Absent | Origin::Edited(_) => Ok(()),
    }
}

/// Adds the mode and the next commands to a report.
fn describe(report: &mut Report, place: &Place, before: Option<Mode>, mode: Mode) {
    if report.dry_run {
        report.notes.push(match mode {
            Mode::Observe => {
                "mode observe: the service would send no signals (--enforce changes that)".into()
            }
            Mode::Enforce => "mode enforce: the service would reap what agents leave behind".into(),
        });
        return;
    }
    let user = if place.is_own { " --user" } else { "" };
    if !place.is_live() {
        report
            .notes
            .push("the service starts with that system".into());
        return;
    }
    report.notes.push(match mode {
        Mode::Observe => "the service runs and observes: it sends no signals".into(),
        Mode::Enforce if before == Some(Mode::Observe) => {
            "the service runs and reaps what agents leave behind, also what it has only listed until now".to_owned()
        }
        Mode::Enforce => "the service runs and reaps what agents leave behind".to_owned(),
    });
    report
        .notes
        .push(format!("state:      reaper service status{user}"));
    if mode == Mode::Observe {
        let command = place.command("install --enforce");
        report.notes.push(format!("to reap:    {command}"));
    }
    let command = place.command("uninstall");
    report.notes.push(format!("to undo it: {command}"));
}
