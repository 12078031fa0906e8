//! `reaper service`: installs the service, shows its state and logs, and removes it.

mod control;
mod files;
mod install;
mod place;
mod plan;
mod root;
mod status;
mod uninstall;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::Failure;
use super::arguments::parse_count;
use control::show_logs;
use place::{Manager, Place};

pub(super) const INSTALL_HELP: &str = "\
Copies this program to /usr/local/bin, unless it is installed there or by a package, writes a unit for systemd (for launchd \
    on macOS), and starts it. Only --enforce makes the service send signals. A later call without --enforce or --observe keeps \
    the mode, for example for an upgrade: tracking continues.

With --user, the service watches only your own processes and needs no root. Its program is ~/.local/bin/reaper.

Refuses to replace a unit that was edited by hand, or a newer version, unless --force is given.

Examples:
  # Install and start the service; it observes first
  sudo reaper service install

  # Make it send signals
  sudo reaper service install --enforce

  # Install your own service
  reaper service install --user

  # Show what it would do, and each reason why it would fail
  reaper service install --dry-run

Exit status:
  0  the service was installed or, with --dry-run, can be
  1  a step failed
  2  it cannot be installed
  4  a daemon runs that the service manager has not started";

pub(super) const UNINSTALL_HELP: &str = "\
Stops the service, and removes its unit, its program and everything pinned in the kernel. Leaves config and journal, unless \
    --purge is given.

Examples:
  sudo reaper service uninstall

  # Show what it would remove of your own service
  reaper service uninstall --user --dry-run

Exit status:
  0  the service was removed or, with --dry-run, can be
  1  a step failed
  2  it cannot be removed, for example because nothing is installed";

#[derive(Subcommand)]
pub(super) enum ServiceCommand {
    /// Install and start the service, or change its mode.
    #[command(after_long_help = INSTALL_HELP)]
    Install(InstallArgs),
    /// Stop the service and remove all that `install` made.
    #[command(after_long_help = UNINSTALL_HELP)]
    Uninstall(UninstallArgs),
    /// Show whether the service runs, and what it has reaped or would have reaped since its start.
    #[command(after_long_help = "\
Example:
  reaper service status

Exit status:
  0  the service runs
  5  it does not")]
    Status(StatusArgs),
    /// Show the log of the service.
    #[command(after_long_help = "\
Examples:
  # Print the last 100 lines
  sudo reaper service logs

  # Print them, then new lines as they come
  sudo reaper service logs --follow")]
    Logs(LogsArgs),
}

/// Options of all commands that write or remove files.
#[derive(Args)]
pub(super) struct ChangeArgs {
    /// Act on your own service, which watches only your own processes.
    #[arg(long)]
    user: bool,
    /// Print what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace or remove also files that were edited by hand, or that a newer version has written.
    #[arg(long)]
    force: bool,
    /// Change the files below this root directory, as for an image. Starts and stops nothing.
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/",
        hide_default_value = true
    )]
    root: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct InstallArgs {
    /// Send signals: reap what agents leave behind.
    #[arg(long, conflicts_with = "observe")]
    enforce: bool,
    /// Only print what would be reaped; the default of the first installation.
    #[arg(long)]
    observe: bool,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(super) struct UninstallArgs {
    /// Remove config and journal as well: history, and what users keep.
    #[arg(long)]
    purge: bool,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
pub(super) struct StatusArgs {
    /// Show your own service.
    #[arg(long)]
    user: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct LogsArgs {
    /// Show the log of your own service.
    #[arg(long)]
    user: bool,
    /// Print new lines as they come.
    #[arg(long, short)]
    follow: bool,
    /// Show only the last N lines.
    #[arg(long, short = 'n', value_name = "N", value_parser = parse_count, default_value = "100")]
    lines: u32,
    /// Print one JSON object per line, with the keys of journalctl.
    #[arg(long)]
    json: bool,
}

/// Runs a command and returns its exit status.
pub(super) fn run(command: &ServiceCommand) -> Result<u8, Failure> {
    match command {
        ServiceCommand::Install(args) => install::run(args),
        ServiceCommand::Uninstall(args) => uninstall::run(args),
        ServiceCommand::Status(args) => status::run(args),
        ServiceCommand::Logs(args) => show_logs(&own_place(args.user)?, args).map(|()| 0),
    }
}

/// Returns the place of the service on this host.
fn own_place(is_own: bool) -> Result<Place, Failure> {
    Place::new(Manager::native(), Path::new("/"), is_own)
}

impl ChangeArgs {
    /// Returns the place of the service.
    ///
    /// # Errors
    /// This user may not change it, or the host has no service manager. Not with `--dry-run`.
    fn place(&self) -> Result<Place, Failure> {
        let root = super::absolute("--root", &self.root)?;
        let place = Place::new(Manager::native(), &root, self.user)?;
        let obstacle = self.obstacles(&place).into_iter().next();
        obstacle.filter(|_| !self.dry_run).map_or(Ok(place), Err)
    }

    /// Returns why this user cannot change the service, or why it cannot run: no root, no service manager.
    fn obstacles(&self, place: &Place) -> Vec<Failure> {
        if !place.is_live() {
            return Vec::new();
        }
        let is_denied = !self.user && !nix::unistd::geteuid().is_root();
        let denied = is_denied.then(|| {
            let what = "the service of the host needs root: run with sudo, or with --user for your own processes";
            Failure::Usage(what.into())
        });
        let manager = control::check_manager(place).err();
        denied.into_iter().chain(manager).collect()
    }
}
