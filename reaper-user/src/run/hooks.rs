//! What follows on a run of which nothing is left.

use std::io;
use std::process::Command;

use super::{CgroupError, CommandExit, Run, RunError, RunOutcome, RunReport, supervise};
use reaper_host::sys::child::BlockedSignals;

/// Runs what was asked for, and cleans up. What fails is added to the report.
pub(super) fn run_hooks(run: &Run, held: &BlockedSignals, report: &mut RunReport) {
    let (option, hook) = match report.outcome {
        RunOutcome::Success => ("--on-success", &run.on_success),
        RunOutcome::Cancelled => return,
        _ => ("--on-failure", &run.on_failure),
    };
    if let Some(hook) = hook
        && let Err(why) = follow_up(run, hook, held, report)
    {
        report.errors.push(format!("{option} {hook}: {why}"));
        // What has not been seen to is not to be lost.
        return;
    }
    if report.outcome != RunOutcome::Success {
        return;
    }
    for (path, held) in run.clean_on_success.iter().zip(&run.clean_paths) {
        let mut complain = |what: String| {
            let complaint = format!("--clean-on-success {}: {what}", path.display());
            report.errors.push(complaint);
        };
        match held.remove() {
            Ok(mounts) => mounts.iter().for_each(|mount| {
                complain(format!(
                    "something is mounted on {}, so it was left",
                    mount.display()
                ));
            }),
            Err(error) => complain(error.to_string()),
        }
    }
}

/// Runs a command to its end, and leaves nothing of it behind either.
fn follow_up(
    run: &Run,
    hook: &str,
    held: &BlockedSignals,
    report: &mut RunReport,
) -> Result<(), String> {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(hook)
        .env("REAPER_OUTCOME", report.outcome.as_str());
    if let Some(recording) = &run.recording {
        recording
            .note(&mut command)
            .map_err(|error| error.to_string())?;
    }
    let mut hook = Run {
        times: run.times,
        signal: run.signal,
        ..Run::new(command)
    };
    let leaf = match run.make_leaf() {
        // Somebody of the command's is in there still, and is told of.
        Err(RunError::Cgroup(CgroupError::Make { source, .. }))
            if source.kind() == io::ErrorKind::AlreadyExists =>
        {
            None
        }
        leaf => leaf.map_err(|error| error.to_string())?,
    };
    let told = supervise::attend(&mut hook, held, leaf).map_err(|error| error.to_string())?;
    report.survivors.extend(told.survivors);
    match told.end {
        Some(CommandExit::Exited(0)) => Ok(()),
        Some(CommandExit::Exited(status)) => Err(format!("status {status}")),
        Some(CommandExit::Killed(signal)) => Err(format!("ended by signal {signal}")),
        None => Err("could not be ended".to_owned()),
    }
}
