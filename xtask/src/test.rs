//! `cargo xtask test`: all checks and all tests, and what was left out.

use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::shell::{as_root, built, cargo, find_program, in_ci, install, output, say, workspace};
use crate::tally::{Counts, Tally, counted};
use crate::{ebpf, targets, tidy, vm};

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

/// The test target of real process trees, which needs root and BPF.
const REAL: &str = "real";

/// The oldest kernel there is, whose probes have a walk of their own, and the newest that is no moving target.
const CI_KERNELS: &[&str] = &["5.10", "6.16"];
/// What is run on them: trees that are reaped. All of the rest runs on the machine itself.
const CI_TREES: &str = "enforce::";

/// Runs every step even when one fails, then sums up in one line.
///
/// # Errors
/// Something failed, or something was left out in CI.
pub fn test(filters: &[String]) -> Result<()> {
    ensure!(
        !in_ci() || filters.is_empty(),
        "in CI everything is run: call `cargo xtask test` without a filter"
    );
    let mut tally = Tally::default();
    let whole = filters.is_empty();

    if whole {
        say("1/7 tidy: import rules, names in the root, fmt, clippy");
        tally.step("tidy", tidy::tidy());
    }
    say("2/7 unit, table and property tests");
    tally.suite("unit tests", unit(filters));
    if whole {
        say("3/7 the service and its commands on other systems, type-checked");
        targets::check(&mut tally);
    }
    say("4/7 examples in the documentation");
    tally.suite("documentation tests", documentation(filters));
    say("5/7 real process trees through each source, as root");
    real(filters, &mut tally);
    if whole {
        say("6/7 the checked-in BPF object against its sources");
        if in_ci() {
            tally.step("build-ebpf --check", ebpf::check());
        } else {
            tally.leave_out(
                "build-ebpf --check (CI runs it; call `cargo xtask build-ebpf --check`)",
            );
        }
    }
    if whole {
        say("7/7 real process trees on other kernels, in virtual machines");
        if in_ci() {
            tally.step("vm", vm::vm(&vm::Args::of(CI_KERNELS, CI_TREES)));
        } else {
            tally.leave_out("other kernels (CI runs two; call `cargo xtask vm`)");
        }
    }
    tally.conclude()
}

fn unit(filters: &[String]) -> Result<Counts> {
    let mut cargo = cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast", "--lib", "--bins"]);
    for target in test_targets()?.iter().filter(|t| *t != REAL) {
        cargo.args(["--test", target]);
    }
    counted(cargo.arg("--").args(filters))
}

fn documentation(filters: &[String]) -> Result<Counts> {
    counted(
        cargo()
            .args(["test", "--workspace", "--no-fail-fast", "--doc", "--"])
            .args(filters),
    )
}

/// Names of all integration tests of the workspace.
fn test_targets() -> Result<Vec<String>> {
    let metadata = output(cargo().args(["metadata", "--no-deps", "--format-version=1"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("output of cargo metadata")?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    Ok(packages
        .flat_map(|package| package["targets"].as_array().into_iter().flatten())
        .filter(|target| target["kind"][0] == "test")
        .filter_map(|target| Some(target["name"].as_str()?.to_owned()))
        .collect())
}

/// What needs a source that is missing here leaves itself out, and nothing else.
fn real(filters: &[String], tally: &mut Tally) {
    if let Err(error) = as_root("true") {
        return tally.leave_out(&format!("real process trees: {error}"));
    }
    match unusable() {
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
    // libtest-mimic takes one filter, so each gets a run of its own.
    let filters = if filters.is_empty() {
        &[String::new()]
    } else {
        filters
    };
    for filter in filters {
        tally.suite("real trees", real_run(filter));
    }
}

fn real_run(filter: &str) -> Result<Counts> {
    let build = [
        "test",
        "--no-run",
        "--package",
        "reaper-user",
        "--test",
        REAL,
    ];
    let mut binary = as_root(built(&build, REAL)?)?;
    // Few at a time: each starts a daemon and hundreds of processes, and all share the machine.
    binary.arg("--test-threads=2");
    // Where cargo would start it.
    binary.current_dir(workspace().join("reaper-user"));
    if !filter.is_empty() {
        binary.arg(filter);
    }
    counted(&mut binary)
}

/// Why the kernel probes cannot be used here, if so, in the words of `reaper doctor`.
fn unusable() -> Result<Option<String>> {
    let reaper = built(
        &["build", "--package", "reaper-user", "--bin", "reaper"],
        "reaper",
    )?;
    let mut doctor = as_root(&reaper)?;
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
