//! Runs what follows a run: `--on-success`, `--on-failure` and `--clean-on-success`.

use std::io;
use std::process::Command;

use super::{CgroupError, CommandExit, Run, RunError, RunOutcome, RunReport, supervise};
use reaper_host::advice::Advised as _;
use reaper_host::sys::child::BlockedSignals;

/// Runs the hook of the outcome. After a success it then removes the paths of [`Run::clean_on_success`], unless the
/// hook failed. Does nothing for a cancelled run. Adds failures and survivors to the report.
pub(super) fn run_hooks(run: &Run, signals: &BlockedSignals, report: &mut RunReport) {
    let (option, hook) = match report.outcome {
        RunOutcome::Success => ("--on-success", &run.on_success),
        RunOutcome::Cancelled => return,
        _ => ("--on-failure", &run.on_failure),
    };
    if let Some(hook) = hook
        && let Err(error) = run_hook(run, hook, signals, report)
    {
        report.errors.push(format!("{option} {hook:?}: {error}"));
        // The paths stay, because the hook may not have used their contents yet.
        return;
    }
    if report.outcome != RunOutcome::Success {
        return;
    }
    for (path, held) in run.clean_on_success.iter().zip(&run.clean_paths) {
        let mut add_error = |error: String| {
            let error = format!("--clean-on-success {}: {error}", path.display());
            report.errors.push(error);
        };
        match held.remove() {
            Ok(mounts) => mounts.iter().for_each(|mount| {
                add_error(format!(
                    "something is mounted on {}, so it was not removed; unmount it, then remove it",
                    mount.display()
                ));
            }),
            Err(error) => add_error(format!("cannot remove it: {error}; remove it yourself")),
        }
    }
}

/// Runs a hook with the signal and the grace of the command, but without a time limit. Adds survivors to the report.
///
/// # Errors
/// The hook cannot start or be ended, is killed by a signal, or exits with another status than 0.
fn run_hook(
    run: &Run,
    hook: &str,
    signals: &BlockedSignals,
    report: &mut RunReport,
) -> Result<(), String> {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(hook)
        .env("REAPER_OUTCOME", report.outcome.as_str());
    if let Some(recording) = &run.recording {
        recording.record_start(&mut command).map_err(|error| {
            format!(
                "not started, as the record cannot be opened: {}",
                error.advised()
            )
        })?;
    }
    let mut hook = Run {
        times: run.times,
        signal: run.signal,
        ..Run::new(command)
    };
    let cgroup = match run.create_cgroup() {
        // Survivors of the command are still in the cgroup. The report names them.
        Err(RunError::Cgroup(CgroupError::Create { source, .. }))
            if source.kind() == io::ErrorKind::AlreadyExists =>
        {
            None
        }
        cgroup => cgroup.map_err(|error| error.to_string())?,
    };
    let hook_report = supervise::supervise_command(&mut hook, signals, cgroup)
        .map_err(|error| error.to_string())?;
    report.survivors.extend(hook_report.survivors);
    match hook_report.end {
        Some(CommandExit::Exited(0)) => Ok(()),
        Some(CommandExit::Exited(status)) => Err(format!("exited with status {status}")),
        Some(CommandExit::Killed(signal)) => Err(format!("was killed by signal {signal}")),
        None => Err("could not be ended; find it with `ps`, and kill it".to_owned()),
    }
}
