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
    let how = match How::find() {
        Ok(how) => how,
        Err(error) => {
            return tally.leave_out(&format!("type-checking other systems: {error:#}"));
        }
    };
    tally.step("type-checking other systems", how.check());
}

/// What has the standard library of these targets.
enum How {
    /// rustup has brought it, built.
    Built,
    /// Debian has its sources, for a compiler of their version.
    FromSource(PathBuf),
}

impl How {
    /// Installs what is missing.
    ///
    /// # Errors
    /// Neither is to be had: says why.
    fn find() -> Result<How> {
        let Some(mut rustup) = rustup() else {
            return Ok(How::FromSource(compiler_with_sources()?));
        };
        // Fetches nothing that is here already.
        let added = run(rustup.args(["target", "add"]).args(TARGETS));
        added.map(|()| How::Built).or_else(|error| {
            say(format_args!("{error:#}: building the library from sources"));
            compiler_with_sources()
                .map(How::FromSource)
                .map_err(|also| also.context(error))
        })
    }

    /// Checks all targets in one call, so that build scripts and macros are built once.
    fn check(&self) -> Result<()> {
        let mut cargo = cargo();
        // Takes SQLite for one that the system has: compiling it would take a C compiler of the target's.
        cargo.env("LIBSQLITE3_SYS_USE_PKG_CONFIG", "1");
        // For three targets what a second build would reuse takes 170 MB of disk.
        cargo.env("CARGO_INCREMENTAL", "0");
        let targets = TARGETS.map(|target| format!("--target={target}"));
        let of = [
            "--package=reaper-user",
            "--lib",
            "--bins",
            &targets[0],
            &targets[1],
            &targets[2],
        ];
        match self {
            How::Built => cargo.arg("clippy").args(of).args(["--", "-Dwarnings"]),
            How::FromSource(rustc) => cargo
                .env("RUSTC", rustc)
                // Lets a stable compiler build the library for a target that has none built.
                .env("RUSTC_BOOTSTRAP", "1")
                .env_remove("RUSTC_WRAPPER")
                // What another compiler has built is of no use to it, and the other way round.
                .env("CARGO_TARGET_DIR", target_dir().join("targets"))
                .args(["check", "-Zbuild-std"])
                .args(of),
        };
        run(&mut cargo)
    }
}

/// rustup, where the cargo that runs this is one of its own: another's compiler has nothing of what it brings.
fn rustup() -> Option<Command> {
    let own = std::env::var_os("RUSTUP_TOOLCHAIN")?;
    let mut rustup = Command::new(find_program("rustup")?);
    rustup.env("RUSTUP_TOOLCHAIN", own).stdin(Stdio::null());
    Some(rustup)
}
