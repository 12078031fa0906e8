//! `cargo xtask units`: checks the unit files of systemd, and the job of launchd.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::shell::{find_program, install, line, target_dir, workspace};

/// Directory of the unit files in the workspace.
const UNITS: &str = "reaper-user/packaging";
/// Highest permitted exposure by `systemd-analyze security`, in tenths: 0 is safe, 100 is not confined.
const EXPOSURE_MAX: &str = "27";
/// Program of the units, and one that takes its place in the check, which needs an existing program.
const PROGRAM: [&str; 2] = ["/usr/bin/reaper", "/bin/true"];

/// Checks that systemd accepts both unit files without a warning, that the unit of the host is confined, and that the
/// job of launchd is a valid property list.
///
/// # Errors
/// A check fails, or a program is missing and cannot be installed.
pub fn check() -> Result<()> {
    if find_program("systemd-analyze").is_none() {
        install(&["systemd"], "systemd-analyze checks the unit files")?;
    }
    check_job()?;
    let dir = target_dir().join("units");
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let host = copy("reaper.service", &dir)?;
    let own = copy("reaper-user.service", &dir)?;
    for (scope, unit) in [("--system", &host), ("--user", &own)] {
        let mut verify = Command::new("systemd-analyze");
        // The manual page is installed by a package.
        verify.args(["verify", "--man=no", scope, unit]);
        verify.env("XDG_RUNTIME_DIR", &dir);
        quiet(&mut verify)?;
    }
    let mut security = Command::new("systemd-analyze");
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    security.args([
        "security",
        "--no-pager",
        "--offline=true",
        &threshold,
        &host,
    ]);
    println!("$ {}", line(&security));
    let output = security.output().context("cannot start systemd-analyze")?;
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{}", text.lines().last().unwrap_or_default());
    ensure!(
        output.status.success(),
        "the exposure of {UNITS}/reaper.service is above {EXPOSURE_MAX} tenths:\n{text}"
    );
    Ok(())
}

/// Checks the syntax of launchd's job.
fn check_job() -> Result<()> {
    if find_program("python3").is_none() {
        install(&["python3"], "its plistlib checks the job of launchd")?;
    }
    let path = workspace().join(UNITS).join("reaper.plist");
    let read = "import plistlib, sys; plistlib.load(open(sys.argv[1], 'rb'))";
    quiet(Command::new("python3").args(["-c", read]).arg(path))
}

/// Copies a unit file, with a program that exists, and returns the path.
fn copy(name: &str, to: &Path) -> Result<String> {
    let path = workspace().join(UNITS).join(name);
    let unit = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let [own, existing] = PROGRAM;
    ensure!(
        unit.contains(own),
        "{} does not start {own}",
        path.display()
    );
    let copy = to.join(name);
    fs::write(&copy, unit.replace(own, existing))?;
    Ok(copy.display().to_string())
}

/// Runs a command that must succeed and print nothing.
fn quiet(command: &mut Command) -> Result<()> {
    println!("$ {}", line(command));
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && text.trim().is_empty(),
        "`{}`: {}\n{text}",
        line(command),
        output.status
    );
    Ok(())
}
