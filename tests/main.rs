//! Real process trees under the real probes, and through each other source: `reaper` must leave no survivor of an
//! agent's tree and touch nobody else. One binary, which is also every process of those trees (`process`).
//!
//! The trees need root. Where `reaper doctor` says that a source cannot be used, what needs that one is listed as
//! ignored, and the reason is printed; with `CI` set that is a failure. So is listed, with its reason, what needs a cgroup of
//! its own, a tree in tmux, or a kernel that signals by itself, where there is none.
//!
//! `REAPER_TEST_SLOWDOWN=10` is for a machine that is so many times slower: tests wait so much longer before they
//! give up. What they ask for stays the same. `REAPER_TEST_KEEP=1` leaves the directories of the tests behind, and
//! `REAPER_TEST_SEED=N` repeats the chance of a test that has printed its seed.

mod cgroup;
mod cli;
mod corpus;
mod daemon;
mod init;
mod proc;
mod process;
mod report;
mod run;
mod schedule;
mod survival;
mod trees;
mod world;

use std::ffi::{OsStr, OsString};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use nix::sys::signal::{SigHandler, SigSet, Signal};
use nix::sys::stat::{Mode, umask};
use trees::SourceKind;

/// Trees at a time. They wait more than they work.
const THREADS: usize = 6;
/// Number of tests that are named as the slowest.
const SLOWEST: usize = 10;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let first = args.next();
    if first.as_deref().and_then(OsStr::to_str) == Some("init") {
        init::main(args);
        return ExitCode::FAILURE;
    }
    // Before it stand the words of a command line that somebody is to recognise.
    let mut words = first.into_iter().chain(args);
    if words.any(|word| word == "test-process") {
        process::main(words);
    }
    usual_surroundings();
    report::collect_panics();
    let (mut args, wanted) = arguments();
    let doctor = doctor();
    let mut trials = cli::trials();
    trials.extend(run::trials());
    trials.push(corpus::completeness());
    for source in SourceKind::ALL {
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
    trials.retain(|trial| wanted.includes(trial));
    let threads = args.test_threads.unwrap_or(THREADS);
    let (alone, others): (Vec<_>, Vec<_>) = trials.into_iter().partition(schedule::runs_alone);
    let mut exit = ExitCode::SUCCESS;
    for (trials, threads) in [(schedule::spread(others), threads), (alone, 1)] {
        if trials.is_empty() {
            continue;
        }
        args.test_threads = Some(threads);
        let conclusion = libtest_mimic::run(&args, trials);
        if conclusion.has_failed() {
            exit = conclusion.exit_code();
        }
    }
    if let Some(matrix) = trees::source_support::matrix() {
        println!("{matrix}");
    }
    if let Some(summary) = corpus::summary() {
        println!("{summary}");
    }
    if !args.list && args.format.is_none() {
        schedule::slowest(SLOWEST)
            .iter()
            .for_each(|line| println!("{line}"));
    }
    exit
}

/// Which tests are wanted.
#[derive(Default)]
struct Wanted {
    /// Words of which one must be in the name; none for all tests.
    names: Vec<String>,
    /// Whether the soaks are wanted too.
    soak: bool,
}

impl Wanted {
    fn includes(&self, trial: &Trial) -> bool {
        let name = trial.name();
        let named = |word: &String| name.contains(word.as_str());
        (self.soak || !name.starts_with("soak::"))
            && (self.names.is_empty() || self.names.iter().any(named))
    }
}

/// Splits the command line into what libtest-mimic knows, which takes one name only, and the rest.
fn arguments() -> (Arguments, Wanted) {
    let mut wanted = Wanted::default();
    let mut known = vec![OsString::from("real")];
    let mut all = std::env::args_os().skip(1);
    while let Some(word) = all.next() {
        match word.to_str() {
            Some("--soak") => wanted.soak = true,
            Some("--skip" | "--test-threads" | "--color" | "--format" | "--logfile") => {
                known.push(word);
                known.extend(all.next());
            }
            Some(name) if !name.starts_with('-') => wanted.names.push(name.to_owned()),
            _ => known.push(word),
        }
    }
    (Arguments::from_iter(known), wanted)
}

/// Undoes what a test inherits from whoever starts it: signals that `nohup` and a shell's `&` ignore, a strict umask,
/// a language.
fn usual_surroundings() {
    for signal in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
    ] {
        // SAFETY: no handler is set.
        unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) }
            .expect("a signal's default");
    }
    SigSet::empty().thread_set_mask().expect("block no signal");
    umask(Mode::from_bits_truncate(0o022));
    let languages = std::env::vars_os().map(|(name, _)| name);
    for name in languages.filter(|name| {
        name == "LANG" || name == "LANGUAGE" || name.as_encoded_bytes().starts_with(b"LC_")
    }) {
        // SAFETY: there is only this thread.
        unsafe { std::env::remove_var(name) };
    }
}

/// All that nobody can try without this source.
fn of_source(source: SourceKind) -> Vec<Trial> {
    let all: Vec<Vec<Trial>> = match source {
        SourceKind::Ebpf => vec![
            trees::trials(),
            trees::observed(),
            corpus::trials(),
            cli::privileged(),
            run::beside_a_service(),
            survival::trials(),
            trees::soaks(),
            survival::soaks(),
        ],
        SourceKind::ProcConnector => vec![trees::through(source), survival::through_connector()],
        SourceKind::Procfs => vec![trees::through(source), cli::without_probes()],
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
fn usable(doctor: &Result<serde_json::Value, String>, source: SourceKind) -> Result<(), String> {
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
