//! `cargo xtask test`: all checks and all tests, the time they took, and what was left out.

mod binaries;
mod guarantees;
mod preflight;
mod repeat;

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::shell::{as_root, cargo, find_program, in_ci, install};
use crate::tally::{Tally, counted};
use crate::{ebpf, targets, tidy, vm};
pub use binaries::Binaries;

const EXAMPLES: &str = "\
Examples:
  cargo xtask test                            every check and every test
  cargo xtask test fork-bomb model::          only the tests with one of these in their name
  cargo xtask test --list                     which tests there are, what each shows, which need root
  cargo xtask test --full                     also the long soaks, and all kernels that Debian has
  cargo xtask test --repeat 10 --loaded       ten times on a busy machine, as a table
  CI=true cargo xtask test                    as CI does: whatever cannot be run is a failure

Process trees need root: they run through sudo where this user is not root, and are left out where there is neither.";

/// Programs that tests drive, and the Debian packages they are in.
const PROGRAMS: &[(&str, &str)] = &[
    ("tmux", "tmux"),
    ("ssh-agent", "openssh-client"),
    ("setpriv", "util-linux"),
    ("nohup", "coreutils"),
    ("git", "git"),
    ("less", "less"),
    ("perl", "perl-base"),
    ("tput", "ncurses-bin"),
    ("cmp", "diffutils"),
];

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Only tests whose name contains one of these, and no other check
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// List the tests with the guarantee that each shows, and run nothing
    #[arg(long)]
    list: bool,
    /// Also run the long soaks, and the trees on every kernel that Debian has
    #[arg(long)]
    full: bool,
    /// Run the tests N times, without the other checks, and print a table
    #[arg(long, value_name = "N", conflicts_with_all = ["list", "full"])]
    repeat: Option<u32>,
    /// Run them beside two busy loops per core and a second copy of itself in another checkout
    #[arg(long, requires = "repeat")]
    loaded: bool,
}

/// Runs every stage even when one fails, then sums up.
///
/// # Errors
/// Something failed, or something was left out in CI.
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
            "in CI everything is run: call `cargo xtask test` without a name"
        );
        return some(&args.names);
    }
    all(args.full)
}

/// Runs the tests with these words in their names, and nothing else.
fn some(names: &[String]) -> Result<()> {
    let mut tally = Tally::default();
    let binaries = tally.stage("build", |_| Binaries::build())?;
    tally.stage("tests", |tally| {
        tests(&binaries, names, tally, &mut std::io::stdout());
    });
    tally.conclude()
}

fn all(full: bool) -> Result<()> {
    let mut tally = Tally::default();
    tally.stage("tidy: import rules, names in the root, fmt, clippy", |t| {
        t.step("tidy", tidy::tidy());
    });
    let binaries = tally.stage("build: library, programs and tests", |_| Binaries::build())?;
    tally.stage("what each test shows", |t| {
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
    tally.stage(
        "type check for macOS and for Linux on aarch64",
        targets::check,
    );
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
    tally.conclude()
}

/// Runs unit tests and real trees with one of these words in their names; all of them if there is none.
fn tests(binaries: &Binaries, names: &[String], tally: &mut Tally, out: &mut dyn Write) {
    unit(binaries, names, tally, out);
    real(binaries, names, false, tally, out);
}

fn unit(binaries: &Binaries, names: &[String], tally: &mut Tally, out: &mut dyn Write) {
    // Some of them wait, so that more fit at a time than there are processors.
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    for binary in &binaries.unit {
        let mut command = binary.command();
        // libtest measures tests only for those who may use what is unstable.
        command
            .env("RUSTC_BOOTSTRAP", "1")
            .args(["-Zunstable-options", "--report-time"])
            .arg(format!("--test-threads={threads}"))
            .args(names);
        let name = format!("unit tests of {}", binary.package);
        tally.suite(&name, counted(&mut command, out));
    }
}

/// Runs the real trees. A test that lacks its source here leaves itself out.
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
            "real process trees as the probes see them: {reason}"
        )),
        Err(error) => return tally.fail("looking for what the kernel allows", &error),
    }
    for (program, package) in PROGRAMS {
        if find_program(program).is_none()
            && let Err(error) = install(&[package], &format!("tests drive {program}"))
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

/// Why the kernel probes cannot be used here, if so, in the words of `reaper doctor`.
fn unusable(binaries: &Binaries) -> Result<Option<String>> {
    let mut doctor = as_root(&binaries.reaper)?;
    let answer = doctor
        .args(["doctor", "--json"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start `reaper doctor`")?;
    verdict(answer.status.code(), &answer.stdout)
}

/// Reads the answer of `reaper doctor --json`: whether the probes are among the sources that can be used.
fn verdict(code: Option<i32>, answer: &[u8]) -> Result<Option<String>> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let mut sources = answer["sources"].as_array().into_iter().flatten();
    let probes = sources.rfind(|source| source["name"] == "ebpf");
    match (code, probes.and_then(|probes| probes["usable"].as_bool())) {
        (_, Some(true)) => Ok(None),
        (_, Some(false)) | (Some(3), None) => {
            let reasons = answer["reasons"].as_array().into_iter().flatten();
            let reasons: Vec<_> = reasons.filter_map(Value::as_str).collect();
            Ok(Some(match reasons.as_slice() {
                [] => "reaper doctor says that the kernel probes cannot be used".to_owned(),
                some => some.join("; "),
            }))
        }
        (code, None) => {
            bail!("`reaper doctor --json` ended with {code:?} and no word on the probes")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doctor_decides_what_can_be_run() {
        assert_eq!(
            verdict(Some(0), br#"{"sources":[{"name":"ebpf","usable":true}]}"#).unwrap(),
            None
        );
        let no = br#"{"sources":[{"name":"ebpf","usable":false},{"name":"procfs","usable":true}],"reasons":["no BTF","lockdown"]}"#;
        assert_eq!(
            verdict(Some(0), no).unwrap().as_deref(),
            Some("no BTF; lockdown")
        );
        assert!(verdict(Some(3), b"").unwrap().is_some());
        assert!(verdict(Some(1), b"").is_err());
    }
}
