//! Building the tests of a mutant and running them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Outcome;
use crate::shell::cargo;

/// Upper limit for the address space of the tests, in bytes: a mutant may allocate without end.
const MEMORY_MAX: u64 = 4 << 30;

/// Where mutants are built.
pub struct Workshop {
    tree: PathBuf,
    target: PathBuf,
    /// Directory of the executables that are tested while cargo builds the next one.
    copies: PathBuf,
}

/// The unit tests of a package.
pub struct Tests {
    executable: PathBuf,
    /// Directory of the package, which tests run in.
    directory: PathBuf,
}

impl Workshop {
    pub fn new(dir: &Path, tree: &Path) -> Workshop {
        Workshop {
            tree: tree.to_owned(),
            target: dir.join("build"),
            copies: dir.to_owned(),
        }
    }

    /// Builds the unit tests of a package. Returns `None` if they do not compile. The result is valid until the next but
    /// one build.
    ///
    /// # Errors
    /// cargo cannot be started, or its result cannot be copied.
    pub fn build(&self, package: &str, number: usize) -> Result<Option<Tests>> {
        let built = cargo()
            .args(["test", "--no-run", "--quiet", "--locked", "--lib"])
            .args(["--package", package, "--message-format=json"])
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            // Tests inherit from this profile. Time goes into builds, so that nothing is optimised.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_INCREMENTAL", "1")
            .stderr(Stdio::null())
            .output()
            .context("cannot start cargo")?;
        if !built.status.success() {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&built.stdout);
        let mut tests = text
            .lines()
            .filter_map(|message| serde_json::from_str::<Value>(message).ok())
            .find_map(|message| {
                let manifest = Path::new(message["manifest_path"].as_str()?);
                Some(Tests {
                    executable: PathBuf::from(message["executable"].as_str()?),
                    directory: manifest.parent()?.to_owned(),
                })
            })
            .context("cargo built no tests")?;
        let copy = self.copies.join(format!("tests-{}", number % 2));
        fs::copy(&tests.executable, &copy)
            .with_context(|| format!("{} to {}", tests.executable.display(), copy.display()))?;
        tests.executable = copy;
        Ok(Some(tests))
    }

    /// Runs the tests whose name contains `filter` until one fails.
    ///
    /// # Errors
    /// The tests cannot be started, or the programs that confine them fail.
    pub fn test(&self, tests: &Tests, filter: &str, timeout: Duration) -> Result<Outcome> {
        let mut command = Command::new("prlimit");
        command.arg(format!("--as={MEMORY_MAX}"));
        // No process outside of the namespace has a pid in it. The end of its init, the shell, ends all others.
        command.args(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        if !nix::unistd::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["sh", "-c", "\"$@\"; exit $?", "sh"]);
        command.arg(&tests.executable).arg(filter);
        let mut child = command
            .current_dir(&tests.directory)
            .env("CARGO_MANIFEST_DIR", &tests.directory)
            // One mutant's failures are not tried with the next one.
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start prlimit and unshare of util-linux")?;
        let lines = BufReader::new(child.stdout.take().context("no output of the tests")?);
        let (send, failed) = channel();
        let reader = thread::spawn(move || {
            for line in lines.split(b'\n').map_while(Result::ok) {
                if line.starts_with(b"test ") && line.ends_with(b"FAILED") {
                    let _ = send.send(());
                }
            }
        });
        let outcome = match failed.recv_timeout(timeout) {
            Ok(()) => Some(Outcome::Caught),
            Err(RecvTimeoutError::Timeout) => Some(Outcome::Timeout),
            Err(RecvTimeoutError::Disconnected) => None,
        };
        if outcome.is_some() {
            child.kill().context("cannot end the tests")?;
        }
        let status = child.wait().context("cannot wait for the tests")?;
        let _ = reader.join();
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
        // Failed tests exit with 101, or with more than 128 after a signal.
        ensure!(
            !matches!(status.code(), Some(1 | 126 | 127)),
            "cannot run {} with prlimit and unshare: {status}",
            tests.executable.display()
        );
        Ok(if status.success() {
            Outcome::Missed
        } else {
            Outcome::Caught
        })
    }
}
