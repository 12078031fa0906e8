//! Real process trees under the real probes: `reaper` must leave no survivor of an agent's tree and touch nobody
//! else. One binary, which is also every process of those trees (`actor`).
//!
//! The trees need root and a kernel that takes the probes. Where `reaper doctor` says that they cannot be used,
//! they are listed as ignored; with `CI` set that is a failure.
//!
//! `REAPER_TEST_SLOWDOWN=10` is for a machine that is so many times slower: tests wait so much longer before they
//! give up. What they ask for stays the same.

mod actor;
mod cgroup;
mod cli;
mod corpus;
mod daemon;
mod init;
mod proc;
mod run;
mod survival;
mod trees;
mod world;

use std::ffi::OsStr;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use trees::Source;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let first = args.next();
    if first.as_deref().and_then(OsStr::to_str) == Some("init") {
        init::main(args);
        return ExitCode::FAILURE;
    }
    // Before it stand the words of a command line that somebody is to recognise.
    let mut words = first.into_iter().chain(args);
    if words.any(|word| word == "actor") {
        actor::main(words);
    }
    let mut args = Arguments::from_args();
    // Each test has a daemon and a tree of its own; more at once only slow each other down.
    args.test_threads = Some(args.test_threads.unwrap_or(2).min(2));
    let doctor = doctor();
    let obstacle = usable(&doctor, Source::Ebpf).err();
    if let Some(why) = &obstacle {
        eprintln!("no tree can be reaped here, so these tests are left out: {why}");
        if std::env::var_os("CI").is_some() {
            return ExitCode::FAILURE;
        }
    }
    let gate = |trial: Trial| match obstacle {
        Some(_) => trial.with_ignored_flag(true),
        None => trial,
    };
    let mut trials = cli::trials();
    trials.extend(run::trials());
    trials.push(corpus::completeness());
    trials.extend(
        trees::trials()
            .into_iter()
            .chain(trees::observed())
            .chain(corpus::trials())
            .chain(cli::privileged())
            .chain(survival::trials())
            .map(gate),
    );
    for source in [Source::ProcConnector, Source::Procfs] {
        let all = trees::through(source)
            .into_iter()
            .chain(corpus::through(source));
        let missing = usable(&doctor, source).err();
        if let Some(why) = &missing {
            eprintln!(
                "{} cannot be used here, so its tests are left out: {why}",
                source.name()
            );
            if std::env::var_os("CI").is_some() {
                return ExitCode::FAILURE;
            }
        }
        trials.extend(all.map(|trial| trial.with_ignored_flag(missing.is_some())));
    }
    let conclusion = libtest_mimic::run(&args, trials);
    if let Some(matrix) = trees::promise::matrix() {
        println!("{matrix}");
    }
    if let Some(summary) = corpus::summary() {
        println!("{summary}");
    }
    conclusion.exit_code()
}

/// What `reaper doctor` says, or why it says nothing.
fn doctor() -> Result<serde_json::Value, String> {
    let output = Command::new(daemon::REAPER)
        .args(["doctor", "--json"])
        .output();
    let output = output.map_err(|e| format!("{}: {e}", daemon::REAPER))?;
    serde_json::from_slice(&output.stdout).map_err(|e| format!("reaper doctor --json: {e}"))
}

/// Whether a source can be used here by that; else why not.
fn usable(doctor: &Result<serde_json::Value, String>, source: Source) -> Result<(), String> {
    let report = doctor.as_ref().map_err(String::clone)?;
    let mut sources = report["sources"].as_array().into_iter().flatten();
    let its = sources.find(|its| its["name"] == source.name());
    match its.map(|its| (&its["usable"], &its["reason"])) {
        Some((serde_json::Value::Bool(true), _)) => Ok(()),
        Some((_, reason)) => Err(reason.to_string()),
        None => Err(report.to_string()),
    }
}
