//! `cargo xtask targets`: type-checks the service and its commands for other systems.
//!
//! It links nothing and compiles no C code, so it needs no linker and no headers of those systems.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::ebpf::compiler_with_sources;
use crate::shell::{cargo, find_program, run, say, target_dir};
use crate::tally::Tally;

/// Targets to check.
const TARGETS: [&str; 3] = [
    "aarch64-apple-darwin",
    "x86_64-apple-darwin",
    "aarch64-unknown-linux-gnu",
];

/// Type-checks all targets and prints a summary.
///
/// # Errors
/// A target does not type-check, or the check is skipped in CI.
pub fn targets() -> Result<()> {
    let mut tally = Tally::default();
    check(&mut tally);
    tally.conclude()
}

/// Type-checks all targets, or reports why this machine cannot.
pub fn check(tally: &mut Tally) {
    match standard_library(&TARGETS) {
        Ok(rustc) => tally.step("type-checking other systems", type_check(rustc)),
        Err(error) => tally.leave_out(&format!("type-checking other systems: {error:#}")),
    }
}

/// Makes the standard library of targets available.
///
/// Returns `None` if rustup has installed it, otherwise a compiler that comes with the sources of the library: see
/// [`build_library`].
///
/// # Errors
/// Neither is available.
pub fn standard_library(targets: &[&str]) -> Result<Option<PathBuf>> {
    let Some(mut rustup) = rustup() else {
        return compiler_with_sources().map(Some);
    };
    // Downloads only what is missing.
    let added = run(rustup.args(["target", "add"]).args(targets));
    added.map(|()| None).or_else(|error| {
        say(format_args!("{error:#}: building the library from sources"));
        let rustc = compiler_with_sources().map(Some);
        rustc.map_err(|also| also.context(error))
    })
}

/// Makes a cargo command build the standard library with this compiler, from the sources that it comes with.
pub fn build_library<'a>(cargo: &'a mut Command, rustc: &Path) -> &'a mut Command {
    cargo
        .env("RUSTC", rustc)
        // Allows `-Zbuild-std` in a stable compiler.
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove("RUSTC_WRAPPER")
        // Two compilers cannot share build artifacts.
        .env("CARGO_TARGET_DIR", target_dir().join("targets"))
        .arg("-Zbuild-std")
}

/// Checks all targets in one call, so that build scripts and macros are built once.
fn type_check(rustc: Option<PathBuf>) -> Result<()> {
    let mut cargo = cargo();
    // Assumes a system SQLite: compiling it would need a C compiler for the target.
    cargo.env("LIBSQLITE3_SYS_USE_PKG_CONFIG", "1");
    // Incremental data for three targets would take 170 MB of disk.
    cargo.env("CARGO_INCREMENTAL", "0");
    let targets = TARGETS.map(|target| format!("--target={target}"));
    let mut what = vec!["--package=reaper-user", "--lib", "--bins"];
    what.extend(targets.iter().map(String::as_str));
    match rustc {
        None => cargo.arg("clippy").args(what).args(["--", "-Dwarnings"]),
        Some(rustc) => build_library(cargo.arg("check"), &rustc).args(what),
    };
    run(&mut cargo)
}

/// Returns a rustup command if rustup manages the cargo that runs xtask. Another compiler cannot use its libraries.
fn rustup() -> Option<Command> {
    let own = std::env::var_os("RUSTUP_TOOLCHAIN")?;
    let mut rustup = Command::new(find_program("rustup")?);
    rustup.env("RUSTUP_TOOLCHAIN", own).stdin(Stdio::null());
    Some(rustup)
}
