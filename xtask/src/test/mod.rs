//! `cargo xtask test`: runs all checks and tests, and reports durations and what was skipped.

mod api;
mod binaries;
mod guarantees;
mod preflight;
mod promises;
mod repeat;

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cross::Arch;
use crate::shell::{as_root, cargo, find_program, in_ci, install};
use crate::tally::{Tally, counted};
use crate::{dist, ebpf, targets, tidy, units, vm};
pub use binaries::Binaries;

const EXAMPLES: &str = "\
Examples:
  # All checks and all tests
  cargo xtask test
  # Only tests with one of these words in their name
  cargo xtask test fork-bomb model::
  # List the tests, the guarantees that each shows, and which need root
  cargo xtask test --list
  # Also the long soak tests, all kernels of Debian, and an emulated arm64
  cargo xtask test --full
  # Ten times on a busy machine, with a table of the results
  cargo xtask test --repeat 10 --loaded
  # As in CI: a check that cannot run is a failure
  CI=true cargo xtask test

Tests with real process trees need root. They run through sudo if this user is not root, and are skipped without sudo.";

/// Programs that tests use, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("tmux", "tmux"),
    ("ssh-agent", "openssh-client"),
    ("setpriv", "util-linux"),
    ("nohup", "coreutils"),
    ("git", "git"),
    ("curl", "curl"),
    ("redis-server", "redis-server"),
    ("postgres", "postgresql"),
    ("Xvfb", "xvfb"),
    ("xvfb-run", "xvfb"),
    ("xauth", "xauth"),
    ("xterm", "xterm"),
    ("xev", "x11-utils"),
    ("less", "less"),
    ("perl", "perl-base"),
    ("tput", "ncurses-bin"),
    ("cmp", "diffutils"),
    ("podman", "podman"),
    ("crun", "crun"),
];

/// Stage with the requests of schemathesis.
const API: &str = "the API against its document, with requests of schemathesis";

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Run only tests whose name contains one of these words, and no other check
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// List the tests with the guarantees that each shows, and run nothing
    #[arg(long)]
    list: bool,
    /// Also run the long soak tests, and the process trees on every kernel of Debian and on aarch64
    #[arg(long)]
    full: bool,
    /// Run the tests N times, without the other checks, and print a table
    #[arg(long, value_name = "N", conflicts_with_all = ["list", "full"])]
    repeat: Option<u32>,
    /// With --repeat: keep the machine busy with two loops per core and a second copy of the tests in another checkout
    #[arg(long, requires = "repeat")]
    loaded: bool,
}

/// Runs every stage even if one fails, and prints a summary.
///
/// # Errors
/// A check or test failed, or one was skipped in CI.
pub fn test(args: &Args) -> Result<()> {
    preflight::check()?;
    if args.list {
        return guarantees::list(&Binaries::build()?, &args.names);
    }
    if let Some(rounds) = args.repeat {
        return repeat::repeat(&args.names, rounds, args.loaded);
    }
    if !args.names.is_empty() {
        ensure!(
            !in_ci(),
            "CI runs all tests: call `cargo xtask test` without a name"
        );
        return some(&args.names);
    }
    all(args.full)
}

/// Runs the tests whose names contain one of these words, and no other check.
fn some(names: &[String]) -> Result<()> {
    let mut tally = Tally::default();
    let binaries = tally.stage("build", |_| Binaries::build())?;
    tally.stage("tests", |tally| {
        tests(&binaries, names, tally, &mut std::io::stdout());
    });
    if names.iter().any(|name| api::NAME.contains(name)) {
        tally.stage(API, |tally| api::check(&binaries.reaper, tally));
    }
    tally.conclude()
}

fn all(full: bool) -> Result<()> {
    let mut tally = Tally::default();
    tally.stage("tidy: import rules, names in the root, fmt, clippy", |t| {
        t.step("tidy", tidy::tidy());
    });
    let binaries = tally.stage("build: library, programs and tests", |_| Binaries::build())?;
    tally.stage("guarantees that each test shows", |t| {
        t.step("guarantees", guarantees::check(&binaries));
    });
    let out = &mut std::io::stdout();
    tally.stage("unit, table and property tests", |t| {
        unit(&binaries, &[], t, out);
    });
    tally.stage("examples in the documentation", |t| {
        let mut cargo = cargo();
        cargo.args(["test", "--workspace", "--no-fail-fast", "--doc"]);
        t.suite("documentation tests", counted(&mut cargo, out));
    });
    tally.stage("real process trees through each source, as root", |t| {
        real(&binaries, &[], full, t, out);
    });
    tally.stage(API, |t| api::check(&binaries.reaper, t));
    tally.stage(
        "type check for macOS and for Linux on aarch64",
        targets::check,
    );
    tally.stage(
        "packages, installed in a directory with a small Debian",
        |t| {
            if in_ci() || full {
                t.step("dist --check", dist::dist(&dist::Args::of_tests()));
            } else {
                t.leave_out(
                    "packages (CI checks them; call `cargo xtask dist --check --profile dev`)",
                );
            }
        },
    );
    tally.stage("unit files of systemd", |t| {
        t.step("units", units::check());
    });
    tally.stage("the checked-in BPF object against its sources", |t| {
        if in_ci() || full {
            t.step("build-ebpf --check", ebpf::check());
        } else {
            t.leave_out("build-ebpf --check (CI runs it; call `cargo xtask build-ebpf --check`)");
        }
    });
    tally.stage(
        "real process trees on other kernels, in virtual machines",
        |t| {
            if in_ci() || full {
                t.step("vm", vm::vm(&vm::Args::of_tests(full), Some(&binaries)));
            } else {
                t.leave_out("other kernels (CI runs two; call `cargo xtask vm`)");
            }
        },
    );
    if full {
        tally.stage("real process trees on an emulated aarch64", |t| {
            let args = vm::Args::of_processor(Arch::Aarch64);
            t.step("vm --arch aarch64", vm::vm(&args, Some(&binaries)));
        });
        tally.stage("the installed service on a Debian with systemd", |t| {
            let args = vm::Args::of_systemd(false);
            t.step("vm --systemd", vm::vm(&args, Some(&binaries)));
        });
        tally.stage("real process trees with the privileges of the unit", |t| {
            let args = vm::Args::of_systemd(true);
            t.step("vm --systemd", vm::vm(&args, Some(&binaries)));
        });
    }
    tally.conclude()
}

/// Runs unit tests and real trees whose names contain one of these words; all of them if there is no word.
fn tests(binaries: &Binaries, names: &[String], tally: &mut Tally, out: &mut dyn Write) {
    unit(binaries, names, tally, out);
    real(binaries, names, false, tally, out);
}

fn unit(binaries: &Binaries, names: &[String], tally: &mut Tally, out: &mut dyn Write) {
    // Some tests wait, so more threads than processors are useful.
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    for binary in &binaries.unit {
        let mut command = binary.command();
        // Allows `--report-time` in a stable libtest.
        command
            .env("RUSTC_BOOTSTRAP", "1")
            .args(["-Zunstable-options", "--report-time"])
            .arg(format!("--test-threads={threads}"))
            .args(names);
        let name = format!("unit tests of {}", binary.package);
        tally.suite(&name, counted(&mut command, out));
    }
}

/// Runs the real trees. A test whose source cannot be used here is ignored by the executable.
fn real(binaries: &Binaries, names: &[String], soak: bool, tally: &mut Tally, out: &mut dyn Write) {
    let all = binaries.real.tests().unwrap_or_default();
    let is_meant =
        |test: &&String| names.is_empty() || names.iter().any(|name| test.contains(name));
    let count = all.iter().filter(is_meant).count();
    if count == 0 && !names.is_empty() {
        return;
    }
    match as_root("true") {
        Ok(_) => drop(writeln!(out, "{count} tests run as root")),
        Err(error) => {
            return tally.leave_out(&format!("{count} tests with real process trees: {error}"));
        }
    }
    match unusable(binaries) {
        Ok(None) => {}
        Ok(Some(reason)) => tally.leave_out(&format!(
            "real process trees through the eBPF source: {reason}"
        )),
        Err(error) => return tally.fail("checking the kernel with `reaper doctor`", &error),
    }
    for (program, package) in PROGRAMS {
        if !is_installed(program)
            && let Err(error) = install(&[package], &format!("tests use {program}"))
        {
            return tally.fail(program, &error);
        }
    }
    let result = binaries.real.command_as_root().and_then(|mut command| {
        if soak {
            command.arg("--soak");
        }
        counted(command.args(names), out)
    });
    tally.suite("real trees", result);
}

/// Returns whether a program is on PATH, or where Debian installs PostgreSQL.
fn is_installed(program: &str) -> bool {
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten();
    let mut paths = versions
        .flatten()
        .map(|dir| dir.path().join("bin").join(program));
    find_program(program).is_some() || paths.any(|path| path.is_file())
}

/// Returns why `reaper doctor` finds the eBPF source unusable here. `None` if it is usable.
fn unusable(binaries: &Binaries) -> Result<Option<String>> {
    let mut doctor = as_root(&binaries.reaper)?;
    let answer = doctor
        .args(["doctor", "--json"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start `reaper doctor`")?;
    reason_against_ebpf(answer.status.code(), &answer.stdout)
}

/// Reads from the output of `reaper doctor --json` why the eBPF source cannot be used; `None` if it can.
fn reason_against_ebpf(code: Option<i32>, answer: &[u8]) -> Result<Option<String>> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let mut sources = answer["sources"].as_array().into_iter().flatten();
    let probes = sources.rfind(|source| source["name"] == "ebpf");
    match (code, probes.and_then(|probes| probes["usable"].as_bool())) {
        (_, Some(true)) => Ok(None),
        (_, Some(false)) | (Some(3), None) => {
            let reasons = answer["reasons"].as_array().into_iter().flatten();
            let reasons: Vec<_> = reasons.filter_map(Value::as_str).collect();
            Ok(Some(match reasons.as_slice() {
                [] => "reaper doctor reports that the eBPF source cannot be used".to_owned(),
                some => some.join("; "),
            }))
        }
        (code, None) => {
            bail!("`reaper doctor --json` exited with {code:?} and does not list the eBPF source")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_output_decides_whether_ebpf_tests_run() {
        assert_eq!(
            reason_against_ebpf(Some(0), br#"{"sources":[{"name":"ebpf","usable":true}]}"#)
                .unwrap(),
            None
        );
        let no = br#"{"sources":[{"name":"ebpf","usable":false},{"name":"procfs","usable":true}],"reasons":["no BTF","lockdown"]}"#;
        assert_eq!(
            reason_against_ebpf(Some(0), no).unwrap().as_deref(),
            Some("no BTF; lockdown")
        );
        assert!(reason_against_ebpf(Some(3), b"").unwrap().is_some());
        assert!(reason_against_ebpf(Some(1), b"").is_err());
    }
}
