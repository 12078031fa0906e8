//! `cargo xtask targets`: whether the service and its commands type-check on systems that this machine does not run.
//!
//! Nothing is linked and no C is compiled, so that neither a linker nor headers of those systems are needed.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::ebpf::compiler_with_sources;
use crate::shell::{cargo, find_program, run, say, target_dir};
use crate::tally::Tally;

/// macOS on both of its processors, and Linux on the other one.
const TARGETS: [&str; 3] = [
    "aarch64-apple-darwin",
    "x86_64-apple-darwin",
    "aarch64-unknown-linux-gnu",
];

/// Checks all of them, and nothing else.
///
/// # Errors
/// One does not type-check, or in CI none can be checked.
pub fn targets() -> Result<()> {
    let mut tally = Tally::default();
    check(&mut tally);
    tally.conclude()
}

/// Checks all of them; where nothing here can, says why.
pub fn check(tally: &mut Tally) {
    match library() {
        Ok(rustc) => tally.step("type-checking other systems", type_check(rustc)),
        Err(error) => tally.leave_out(&format!("type-checking other systems: {error:#}")),
    }
}

/// Installs the standard library of these targets. Returns None where rustup has brought it, built, and otherwise
/// Debian's compiler, which comes with its sources.
///
/// # Errors
/// Neither is to be had: says why.
fn library() -> Result<Option<PathBuf>> {
    let Some(mut rustup) = rustup() else {
        return compiler_with_sources().map(Some);
    };
    // Fetches nothing that is here already.
    let added = run(rustup.args(["target", "add"]).args(TARGETS));
    added.map(|()| None).or_else(|error| {
        say(format_args!("{error:#}: building the library from sources"));
        let rustc = compiler_with_sources().map(Some);
        rustc.map_err(|also| also.context(error))
    })
}

/// Checks all targets in one call, so that build scripts and macros are built once.
fn type_check(rustc: Option<PathBuf>) -> Result<()> {
    let mut cargo = cargo();
    // Takes SQLite for one that the system has: compiling it would take a C compiler of the target's.
    cargo.env("LIBSQLITE3_SYS_USE_PKG_CONFIG", "1");
    // For three targets what a second build would reuse takes 170 MB of disk.
    cargo.env("CARGO_INCREMENTAL", "0");
    let targets = TARGETS.map(|target| format!("--target={target}"));
    let mut what = vec!["--package=reaper-user", "--lib", "--bins"];
    what.extend(targets.iter().map(String::as_str));
    match rustc {
        None => cargo.arg("clippy").args(what).args(["--", "-Dwarnings"]),
        Some(rustc) => cargo
            .env("RUSTC", rustc)
            // Lets a stable compiler build the library for a target that has none built.
            .env("RUSTC_BOOTSTRAP", "1")
            .env_remove("RUSTC_WRAPPER")
            // What another compiler has built is of no use to it, and the other way round.
            .env("CARGO_TARGET_DIR", target_dir().join("targets"))
            .args(["check", "-Zbuild-std"])
            .args(what),
    };
    run(&mut cargo)
}

/// rustup, where the cargo that runs this is one of its own: another's compiler has nothing of what it brings.
fn rustup() -> Option<Command> {
    let own = std::env::var_os("RUSTUP_TOOLCHAIN")?;
    let mut rustup = Command::new(find_program("rustup")?);
    rustup.env("RUSTUP_TOOLCHAIN", own).stdin(Stdio::null());
    Some(rustup)
}
