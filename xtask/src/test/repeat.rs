//! Runs the tests many times, optionally on a busy machine, and prints a table.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{Binaries, tests};
use crate::shell::{OwnedChild, cargo, copy_sources, say, target_dir};
use crate::tally::{Tally, minutes};

/// Number of busy loops per processor.
const LOOPS_PER_CORE: usize = 2;

/// Runs the tests in `rounds` rounds. Their output goes to `target/repeat`.
///
/// # Errors
/// A test failed in a round, here or in the second copy.
pub fn repeat(names: &[String], rounds: u32, loaded: bool) -> Result<()> {
    let binaries = Binaries::build()?;
    let directory = target_dir().join("repeat");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let load = loaded
        .then(|| Load::start(names, rounds, &directory))
        .transpose()?;
    println!(
        "{:>5}  {:>6}  {:>6}  {:>6}  failed",
        "round", "passed", "failed", "time"
    );
    let mut broken = 0;
    for round in 1..=rounds {
        let path = directory.join(format!("round-{round}.log"));
        let mut log = File::create(&path).with_context(|| path.display().to_string())?;
        let mut tally = Tally::default();
        let began = Instant::now();
        tests(&binaries, names, &mut tally, &mut log);
        let counts = tally.into_counts();
        broken += u32::from(!counts.failed.is_empty() || counts.passed == 0);
        println!(
            "{round:>5}  {:>6}  {:>6}  {:>6}  {}",
            counts.passed,
            counts.failed.len(),
            minutes(began.elapsed()),
            counts.failed.join(" ")
        );
    }
    let second = load.map(Load::finish).transpose();
    ensure!(
        broken == 0,
        "{broken} of {rounds} rounds failed: see {}",
        directory.display()
    );
    second.map(|_| ())
}

/// Load that keeps the machine busy until it is dropped.
struct Load {
    over: Arc<AtomicBool>,
    /// The second copy. Killing it does not kill its current child.
    second: OwnedChild,
    log: PathBuf,
}

impl Load {
    /// Builds and starts the second copy, and starts the busy loops.
    fn start(names: &[String], rounds: u32, directory: &Path) -> Result<Load> {
        let checkout = directory.join("checkout");
        say(format_args!(
            "building a second copy in {}",
            checkout.display()
        ));
        copy_sources(&checkout)?;
        let mut build = cargo();
        build.current_dir(&checkout).env_remove("CARGO_TARGET_DIR");
        crate::shell::run(build.args(["test", "--workspace", "--no-run"]))?;

        let log = directory.join("second.log");
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        let mut second = cargo();
        second
            .current_dir(&checkout)
            .env_remove("CARGO_TARGET_DIR")
            .args(["xtask", "test", "--repeat", &rounds.to_string()])
            .args(names)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("log of the second copy")?)
            .stderr(file);
        let second = second.spawn().context("cannot start the second copy")?;

        let over = Arc::new(AtomicBool::new(false));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..LOOPS_PER_CORE * cores {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Ok(Load {
            over,
            second: OwnedChild(second),
            log,
        })
    }

    /// Stops the busy loops. Then waits for the second copy and prints its table.
    fn finish(mut self) -> Result<()> {
        self.over.store(true, Ordering::Relaxed);
        let status = self.second.wait().context("waiting for the second copy")?;
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        say("results of the second copy");
        let mut out = std::io::stdout().lock();
        let table = log
            .lines()
            .skip_while(|line| !line.starts_with("round") && !line.starts_with("  round"));
        for line in table.filter(|line| !line.trim().is_empty()) {
            let _ = writeln!(out, "{line}");
        }
        ensure!(
            status.success(),
            "the second copy exited with {status}: see {}",
            self.log.display()
        );
        Ok(())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
