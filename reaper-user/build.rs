//! Build script: passes the git commit to the program, for `reaper --version`.

use std::path::Path;
use std::process::Command;

/// Environment variable that replaces the commit of the checkout.
const OVERRIDE: &str = "REAPER_COMMIT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={OVERRIDE}");
    // A development build names no commit, so that a commit does not compile the crate again.
    let is_release = std::env::var_os("PROFILE").is_some_and(|profile| profile == "release");
    let commit = match std::env::var(OVERRIDE) {
        Ok(commit) if !commit.is_empty() => Some(commit),
        _ if is_release => checked_out(),
        _ => Some("unknown (development build)".to_owned()),
    };
    let commit = commit.unwrap_or_else(|| "unknown (built without git)".to_owned());
    println!("cargo::rustc-env={OVERRIDE}={commit}");
}

/// Returns the commit of the checkout, and has cargo run this script again when it changes.
///
/// Returns `None` without git, or if git does not track this file, as in an unpacked tarball inside another repository.
fn checked_out() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "HEAD"])?;
    // `HEAD` changes with the branch, the log of HEAD with each commit. Cargo always reruns for a file that is missing.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    Some(commit)
}

fn git(arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    // Allows root to build another user's checkout.
    let output = git.args(["-c", "safe.directory=*"]).args(arguments);
    let output = output.output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
