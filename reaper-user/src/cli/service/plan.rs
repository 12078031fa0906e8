//! Steps of an installation or a removal: they are listed with `--dry-run`, or carried out.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::files::{self, NewFile};
use super::{ChangeArgs, Failure, control};
use crate::cli::show::{width, wrap};
use crate::cli::{lock, unpin};
use crate::export::{print, printable, to_json};

/// Time limit for the end of a job. launchd kills it after 20 s.
const JOB_END: Duration = Duration::from_secs(30);

/// One step.
pub(super) enum Step {
    /// Writes a file. All files are written before the other steps.
    Write(NewFile),
    /// Creates a symbolic link with this path, to this target.
    Link(PathBuf, PathBuf),
    /// Runs a command of the service manager.
    Call(Vec<String>),
    /// The same, and ignores a failure.
    Try(Vec<String>),
    /// Waits until launchd has ended a job, so that this command fails.
    WaitGone(Vec<String>),
    /// Checks that no daemon has its lock in this directory, other than the process with this pid.
    CheckStopped(PathBuf, Option<u32>),
    /// Removes everything that is pinned in this directory.
    Unpin(PathBuf),
    /// Removes a file or an empty directory, if it exists.
    Remove(PathBuf),
    /// Removes a directory with all its contents, if it exists.
    RemoveAll(PathBuf),
}

/// Result of the steps, or of `--dry-run`.
#[derive(Default, Serialize)]
pub(super) struct Report {
    /// Whether nothing was changed.
    pub dry_run: bool,
    /// Steps, such as `wrote /etc/systemd/system/reaper.service`.
    pub done: Vec<String>,
    /// Files and directories that stay, with the reasons.
    pub left: Vec<String>,
    /// Further lines: mode, state and next commands.
    pub notes: Vec<String>,
    /// Reasons why the steps would fail, with `--dry-run`.
    pub would_fail: Vec<String>,
}

impl Step {
    /// Returns the verb of the step in the past and in the infinitive, and its object.
    fn words(&self) -> (&'static str, &'static str, String) {
        let show = |path: &Path| path.display().to_string();
        match self {
            Step::Write(file) => ("wrote", "write", show(&file.path)),
            Step::Link(path, _) => ("linked", "link", show(path)),
            Step::Call(words) | Step::Try(words) => ("ran", "run", words.join(" ")),
            Step::WaitGone(_) => ("waited", "wait", "for the end of the job".into()),
            Step::CheckStopped(..) => ("checked", "check", "that no daemon runs".into()),
            Step::Unpin(dir) => ("removed", "remove", format!("the pins in {}", show(dir))),
            Step::Remove(path) => ("removed", "remove", show(path)),
            Step::RemoveAll(path) => (
                "removed",
                "remove",
                format!("{} with all its files", show(path)),
            ),
        }
    }

    /// Returns whether the step has anything to do, as far as that shows before the others.
    fn is_due(&self) -> bool {
        match self {
            Step::Remove(path) | Step::RemoveAll(path) | Step::Unpin(path) => {
                fs::symlink_metadata(path).is_ok()
            }
            Step::CheckStopped(..) | Step::WaitGone(_) => false,
            _ => true,
        }
    }

    /// Carries out a step other than [`Step::Write`]. Returns whether it changed anything worth a line.
    fn carry_out(&self) -> Result<bool, Failure> {
        match self {
            Step::Write(_) => {}
            Step::Link(path, target) => {
                let directory = path.parent().unwrap_or(path);
                let linked = fs::create_dir_all(directory)
                    .and_then(|()| files::remove(path).map_or(Ok(()), |_| Ok(())))
                    .and_then(|()| symlink(target, path));
                linked.map_err(|error| files::failed("cannot create the link", path, &error))?;
            }
            Step::Call(words) => control::call(words)?,
            Step::Try(words) => return Ok(control::call(words).is_ok()),
            Step::WaitGone(query) => {
                control::wait_gone(query, JOB_END)?;
                return Ok(false);
            }
            Step::CheckStopped(directory, except) => {
                // Its directory is removed later, with the lock of a daemon of any scope.
                if let Ok(Some((daemon, _))) = lock::running_daemon(directory, *except) {
                    return Err(Failure::Locked(format!(
                        "{daemon} still runs, and systemd has not started it: stop it, then run this command again"
                    )));
                }
                return Ok(false);
            }
            Step::Unpin(directory) => return unpin::remove(directory).map(|removed| removed > 0),
            Step::Remove(path) => return files::remove(path),
            Step::RemoveAll(path) => {
                if fs::symlink_metadata(path).is_err() {
                    return Ok(false);
                }
                let removed = fs::remove_dir_all(path);
                removed.map_err(|error| files::failed("cannot remove", path, &error))?;
            }
        }
        Ok(true)
    }
}

/// Carries out the steps, or with `dry_run` lists them.
///
/// # Errors
/// A step fails. The error says what was done before.
pub(super) fn carry_out(steps: Vec<Step>, dry_run: bool) -> Result<Report, Failure> {
    let mut report = Report {
        dry_run,
        ..Report::default()
    };
    let (writes, others): (Vec<_>, Vec<_>) = steps
        .into_iter()
        .partition(|step| matches!(step, Step::Write(_)));
    let line = |step: &Step| {
        let (past, infinitive, object) = step.words();
        match dry_run {
            true => format!("would {infinitive} {object}"),
            false => format!("{past} {object}"),
        }
    };
    let written: Vec<String> = writes.iter().map(line).collect();
    if !dry_run {
        let files: Vec<NewFile> = writes
            .into_iter()
            .filter_map(|step| match step {
                Step::Write(file) => Some(file),
                _ => None,
            })
            .collect();
        files::write_all(&files)?;
    }
    report.done = written;
    for step in others {
        let is_done = match dry_run {
            true => step.is_due(),
            false => step
                .carry_out()
                .map_err(|failure| after(failure, &report.done))?,
        };
        report.done.extend(is_done.then(|| line(&step)));
    }
    Ok(report)
}

/// Adds to an error what was done before.
fn after(failure: Failure, done: &[String]) -> Failure {
    let said = |text: String| match done {
        [] => text,
        done => format!("{text} (done before: {})", done.join(", ")),
    };
    match failure {
        Failure::Usage(text) => Failure::Refused(said(text)),
        Failure::Refused(text) => Failure::Refused(said(text)),
        Failure::Locked(text) => Failure::Locked(said(text)),
        other => other,
    }
}

impl Report {
    /// Prints the report with the reasons why the steps would fail. Returns the exit status: 0, or that of the first reason.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn print(mut self, args: &ChangeArgs, obstacles: &[Failure]) -> Result<u8, Failure> {
        self.would_fail = obstacles.iter().map(ToString::to_string).collect();
        let status = obstacles.first().map_or(0, Failure::status);
        if args.json {
            print(to_json(&self)).map_err(Failure::stdout)?;
            return Ok(status);
        }
        let left = self.left.iter().map(|left| format!("left {left}"));
        let failing = self
            .would_fail
            .iter()
            .map(|why| format!("would fail: {why}"));
        let lines = self
            .done
            .iter()
            .cloned()
            .chain(left)
            .chain(self.notes.iter().cloned())
            .chain(failing);
        let text: String = lines
            .map(|line| wrap(&printable(&line, usize::MAX), 0, width()))
            .collect();
        print(text).map_err(Failure::stdout)?;
        Ok(status)
    }
}
