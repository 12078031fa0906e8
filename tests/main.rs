//! Real process trees under the real probes: `reaper` must leave no survivor of an agent's tree and touch nobody
//! else. One binary, which is also every process of those trees (`actor`).
//!
//! The trees need root and a kernel that takes the probes. Where `reaper doctor` says that they cannot be used,
//! they are listed as ignored; with `CI` set that is a failure.

mod actor;
mod cli;
mod daemon;
mod proc;
mod trees;
mod world;

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|a| a == "actor") {
        actor::main(args);
    }
    let mut args = Arguments::from_args();
    // Each test has a daemon and a tree of its own; more at once only slow each other down.
    args.test_threads = Some(args.test_threads.unwrap_or(2).min(2));
    let obstacle = obstacle();
    if let Some(why) = &obstacle {
        eprintln!("no tree can be reaped here, so these tests are left out: {why}");
        if std::env::var_os("CI").is_some() {
            return ExitCode::FAILURE;
        }
    }
    let gate = |trial: Trial| trial.with_ignored_flag(obstacle.is_some());
    let mut trials = cli::trials();
    trials.extend(
        trees::trials()
            .into_iter()
            .chain(trees::observed())
            .chain(cli::privileged())
            .map(gate),
    );
    libtest_mimic::run(&args, trials).exit_code()
}

/// Why the probes cannot be used here, if so.
fn obstacle() -> Option<String> {
    let output = Command::new(daemon::REAPER)
        .args(["doctor", "--json"])
        .output();
    let output = match output {
        Ok(output) => output,
        Err(e) => return Some(format!("{}: {e}", daemon::REAPER)),
    };
    let report: serde_json::Value = match serde_json::from_slice(&output.stdout) {
        Ok(report) => report,
        Err(e) => return Some(format!("reaper doctor --json: {e}")),
    };
    let usable = report.get("usable").and_then(serde_json::Value::as_bool) == Some(true);
    (!usable).then(|| report.to_string())
}
