//! Tests on real process trees, with the BPF probes and with each other source: `reaper` must leave no survivor of an
//! agent's tree and must not signal any other process. This binary is also every process of those trees (`process`).
//!
//! The tests with trees need root. Tests whose source is not usable according to `reaper doctor` are listed as ignored,
//! with the reason. With `CI` set, that is a failure. Tests that need a new cgroup, tmux, podman, windows or a kernel
//! that sends signals from BPF are ignored in the same way.
//!
//! Environment variables: `REAPER_TEST_SLOWDOWN=10` multiplies all deadlines by 10, for a slow machine.
//! `REAPER_TEST_KEEP=1` keeps the directory of a failed test. `REAPER_TEST_SEED=N` repeats a randomised test that
//! printed this seed. `REAPER_TEST_PRIVILEGES_OF=PID` gives daemons the privileges of that process.

mod cgroup;
mod cli;
mod corpus;
mod daemon;
mod init;
mod privileges;
mod proc;
mod process;
mod report;
mod run;
mod schedule;
#[allow(dead_code, reason = "the rest is for unit tests")]
mod snippets;
mod survival;
mod trees;
mod world;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigHandler, SigSet, Signal};
use nix::sys::stat::{Mode, umask};
use trees::SourceKind;

/// Number of tests that run at the same time. More than the CPUs, because tests mostly wait.
const THREADS: usize = 6;
/// Number of slowest tests that are printed at the end.
const SLOWEST: usize = 10;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let first = args.next();
    if first.as_deref().and_then(OsStr::to_str) == Some("init") {
        init::main(args);
        return ExitCode::FAILURE;
    }
    // A test can put words before it, so that the process looks like another program's command line.
    let mut words = first.into_iter().chain(args);
    if words.any(|word| word == "test-process") {
        process::main(words);
    }
    reset_inherited_state();
    hide_config();
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

/// Selection of tests.
#[derive(Default)]
struct Wanted {
    /// Substrings, one of which the name of a test must contain. Empty for all tests.
    names: Vec<String>,
    /// Whether soak tests run too.
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

/// Splits the command line into libtest-mimic's options and the filters. libtest-mimic takes only one filter.
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

/// Resets inherited state: signals that `nohup` or a shell's `&` ignore, the signal mask, the umask and the locale. Also sets the
/// defaults of insta.
fn reset_inherited_state() {
    for signal in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
    ] {
        // SAFETY: no handler is set.
        unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) }
            .expect("reset a signal to its default");
    }
    SigSet::empty()
        .thread_set_mask()
        .expect("unblock all signals");
    umask(Mode::from_bits_truncate(0o022));
    let languages = std::env::vars_os().map(|(name, _)| name);
    for name in languages.filter(|name| {
        name == "LANG" || name == "LANGUAGE" || name.as_encoded_bytes().starts_with(b"LC_")
    }) {
        // SAFETY: there is only this thread.
        unsafe { std::env::remove_var(name) };
    }
    // A failed test must not write new snapshots into the checkout, and cargo, which knows the workspace, may be absent.
    let defaults = [
        ("INSTA_UPDATE", "no"),
        ("INSTA_WORKSPACE_ROOT", env!("CARGO_MANIFEST_DIR")),
    ];
    for (name, value) in defaults {
        if std::env::var_os(name).is_none() {
            // SAFETY: there is only this thread.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// Hides the configs of this machine and this user from the programs under test, and the socket of their service.
///
/// A config of the host is hidden in a new mount namespace.
fn hide_config() {
    // SAFETY: there is only this thread.
    unsafe {
        std::env::remove_var("REAPER_SOCKET");
        std::env::set_var("XDG_CONFIG_HOME", "/nonexistent");
    }
    let none = None::<&str>;
    if nix::unistd::geteuid().is_root() && Path::new("/etc/reaper").exists() {
        unshare(CloneFlags::CLONE_NEWNS).expect("create a mount namespace");
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .expect("make / private");
        mount(
            Some("tmpfs"),
            "/etc/reaper",
            Some("tmpfs"),
            MsFlags::empty(),
            Some("mode=755"),
        )
        .expect("hide /etc/reaper");
    }
}

/// Returns the tests that need this source.
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

/// Returns the report of `reaper doctor --json`, or the reason why it failed.
fn doctor() -> Result<serde_json::Value, String> {
    let output = Command::new(daemon::REAPER)
        .args(["doctor", "--json"])
        .output();
    let output = output.map_err(|e| format!("{}: {e}", daemon::REAPER))?;
    serde_json::from_slice(&output.stdout).map_err(|e| format!("reaper doctor --json: {e}"))
}

/// Checks whether a source is usable according to `reaper doctor`; otherwise returns the reason.
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
