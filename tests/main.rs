//! Real process trees under the real probes, and through each other source: `reaper` must leave no survivor of an
//! agent's tree and touch nobody else. One binary, which is also every process of those trees (`actor`).
//!
//! The trees need root. Where `reaper doctor` says that a source cannot be used, what needs that one is listed as
//! ignored, and the reason is printed; with `CI` set that is a failure. So is listed, with its reason, what needs a cgroup of
//! its own, a tree in tmux, or a kernel that signals by itself, where there is none.
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
    let mut trials = cli::trials();
    trials.extend(run::trials());
    trials.extend([corpus::completeness(), corpus::excuses()]);
    for source in Source::ALL {
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
        let its = of_source(source).into_iter();
        trials.extend(its.map(|trial| {
            // It may lack something else that it needs.
            let left_out = missing.is_some() || trial.has_ignored_flag();
            trial.with_ignored_flag(left_out)
        }));
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

/// All that nobody can try without this source.
fn of_source(source: Source) -> Vec<Trial> {
    let all: Vec<Vec<Trial>> = match source {
        Source::Ebpf => vec![
            trees::trials(),
            trees::observed(),
            corpus::trials(),
            cli::privileged(),
            run::beside_a_service(),
            survival::trials(),
        ],
        Source::ProcConnector => vec![
            trees::through(source),
            corpus::through(source),
            survival::through_connector(),
        ],
        Source::Procfs => vec![
            trees::through(source),
            corpus::through(source),
            cli::without_probes(),
        ],
    };
    all.into_iter().flatten().collect()
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
    if !nix::unistd::geteuid().is_root() {
        return Err("the trees need root".to_owned());
    }
    let mut sources = report["sources"].as_array().into_iter().flatten();
    let its = sources.find(|its| its["name"] == source.name());
    match its.map(|its| (&its["usable"], &its["reason"])) {
        Some((serde_json::Value::Bool(true), _)) => Ok(()),
        Some((_, reason)) => Err(reason.to_string()),
        None => Err(report.to_string()),
    }
}
