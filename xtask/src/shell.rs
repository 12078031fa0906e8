//! Runs other programs and prints their command lines.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Prints a line about the next step or its result.
pub fn say(line: impl std::fmt::Display) {
    println!("xtask: {line}");
}

/// Returns the root directory of the workspace.
pub fn workspace() -> PathBuf {
    // `cargo run` sets it, so it is right even if the checkout was moved after the build.
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR");
    let xtask = xtask.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask.parent().unwrap_or(Path::new("/")).to_path_buf()
}

/// Returns cargo's target directory. xtask keeps its own files there too.
pub fn target_dir() -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    workspace().join(chosen)
}

/// Returns whether this is CI, where a skipped check is a failure.
pub fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|v| !v.is_empty() && v != "false" && v != "0")
}

/// Returns a command with the cargo that runs xtask, in the workspace.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace());
    cargo
}

/// Returns a command that runs as root, through sudo if this process is not root.
///
/// # Errors
/// This process is not root and there is no sudo.
pub fn as_root(program: impl AsRef<OsStr>) -> Result<Command> {
    if nix::unistd::geteuid().is_root() {
        return Ok(Command::new(program));
    }
    let name = Path::new(program.as_ref()).display();
    let Some(sudo) = find_program("sudo") else {
        bail!("{name} needs root and there is no sudo: run this command as root");
    };
    let mut command = Command::new(sudo);
    // sudo drops the environment. These variables are safe to pass on.
    command.arg("env");
    let is_kept = |key: &str| {
        ["CI", "INSTA_UPDATE", "NO_COLOR", "RUST_BACKTRACE"].contains(&key)
            || key.starts_with("REAPER_TEST_")
    };
    // Not `vars`, which panics on a variable that is not UTF-8.
    for (key, value) in std::env::vars_os() {
        if let (Some(key), Some(value)) = (key.to_str(), value.to_str())
            && is_kept(key)
        {
            command.arg(format!("{key}={value}"));
        }
    }
    command.arg(program);
    Ok(command)
}

/// Child process that is killed and waited for on drop.
pub struct OwnedChild(pub Child);

impl Deref for OwnedChild {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for OwnedChild {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // Both fail only if it has been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Prints a command and runs it until it exits.
///
/// # Errors
/// The command cannot be started, or its exit status is not 0.
pub fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", line(command));
    let status = command
        .status()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    ensure!(status.success(), "`{}` failed: {status}", line(command));
    Ok(())
}

/// Runs a command and returns its stdout. It inherits stderr.
///
/// # Errors
/// The command cannot be started, its exit status is not 0, or its output is not UTF-8.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    let status = output.status;
    ensure!(status.success(), "`{}` failed: {status}", line(command));
    String::from_utf8(output.stdout).with_context(|| format!("output of `{}`", line(command)))
}

/// Runs a cargo build and returns each executable with cargo's message about it. `arguments` begin with the subcommand,
/// `build` or `test --no-run`.
///
/// # Errors
/// The build fails.
pub fn executables(arguments: &[&str]) -> Result<Vec<(PathBuf, Value)>> {
    built(cargo().args(arguments))
}

/// Runs a cargo command that builds, like [`executables`].
///
/// # Errors
/// The build fails.
pub fn built(cargo: &mut Command) -> Result<Vec<(PathBuf, Value)>> {
    println!("$ {}", line(cargo));
    cargo.arg("--message-format=json-render-diagnostics");
    Ok(read_executables(&output(cargo)?))
}

/// Returns the executables in cargo's JSON messages, each with its message.
pub fn read_executables(messages: &str) -> Vec<(PathBuf, Value)> {
    let messages = messages.lines().map(serde_json::from_str::<Value>);
    messages
        .filter_map(|message| {
            let message = message.ok()?;
            Some((PathBuf::from(message["executable"].as_str()?), message))
        })
        .collect()
}

/// Builds `reaper` with these options of cargo and returns its path.
///
/// # Errors
/// The build fails, or creates no such executable.
pub fn built_reaper(options: &[&str]) -> Result<PathBuf> {
    let build = ["build", "--package", "reaper-user", "--bin", "reaper"];
    let built = executables(&[&build, options].concat())?.pop();
    let (reaper, _) = built.context("cargo built no executable named reaper")?;
    Ok(reaper)
}

/// Returns the path of a program from crates.io in a pinned version, and installs it if necessary.
///
/// Uses the copy below the target directory or the one on PATH. `duration` tells the user how long the installation takes.
///
/// # Errors
/// The program cannot be installed or does not run.
pub fn cargo_tool(name: &str, version: &str, duration: &str) -> Result<PathBuf> {
    let tools = target_dir().join("tools");
    let own = tools.join("bin").join(name);
    let expected = format!("{name} {version}");
    let is_pinned = |path: &PathBuf| {
        let mut command = Command::new(path);
        // A subcommand of cargo expects its name first.
        command.args(name.strip_prefix("cargo-"));
        let printed = command.arg("--version").output();
        printed.is_ok_and(|printed| printed.stdout.trim_ascii() == expected.as_bytes())
    };
    if let Some(program) = [Some(own.clone()), find_program(name)]
        .into_iter()
        .flatten()
        .find(is_pinned)
    {
        return Ok(program);
    }
    say(format_args!(
        "installing {expected} from crates.io into {} (about {duration})",
        tools.display()
    ));
    run(cargo()
        .args(["install", "--quiet", "--locked", "--force", "--root"])
        .arg(&tools)
        .args([name, "--version", version]))?;
    ensure!(
        is_pinned(&own),
        "{} does not run or is not version {version}",
        own.display()
    );
    Ok(own)
}

/// Returns all files that git tracks or would track, relative to the workspace, in order.
///
/// # Errors
/// git fails.
pub fn files() -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    // Allows root to read another user's checkout.
    git.args(["-c", "safe.directory=*", "ls-files", "-z", "--cached"]);
    git.args(["--others", "--exclude-standard"]);
    let list = output(git.current_dir(workspace()))?;
    let files = list.split_terminator('\0').map(PathBuf::from);
    // git also lists files whose deletion is not committed yet.
    let files: BTreeSet<PathBuf> = files
        .filter(|file| workspace().join(file).exists())
        .collect();
    Ok(files.into_iter().collect())
}

/// Copies all [`files`]. Unchanged files keep their modification time, so cargo does not rebuild them.
///
/// # Errors
/// git fails, or a file cannot be read or written.
pub fn copy_sources(to: &Path) -> Result<()> {
    for name in files()? {
        let (from, copy) = (workspace().join(&name), to.join(&name));
        let parent = copy.parent().unwrap_or(to);
        fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        if fs::read(&from).ok() != fs::read(&copy).ok() {
            fs::copy(&from, &copy).with_context(|| copy.display().to_string())?;
        }
    }
    Ok(())
}

/// Returns the pids of all processes, with their directories in /proc.
pub fn processes() -> impl Iterator<Item = (i32, PathBuf)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
}

/// Returns the path of a program on PATH.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Installs Debian packages, after a message with the reason.
///
/// # Errors
/// There is no apt-get, no way to become root, or apt-get fails.
pub fn install(packages: &[&str], why: &str) -> Result<()> {
    let list = packages.join(" ");
    say(format_args!("installing {list}: {why}"));
    ensure!(
        find_program("apt-get").is_some(),
        "{list} missing and there is no apt-get: install the equivalent of {list}"
    );
    let apt = |arguments: &[&str]| {
        let mut env = as_root("env")?;
        run(env
            .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet=2"])
            .args(arguments))
    };
    let install = [&["install", "--yes", "--no-install-recommends"], packages].concat();
    // The package lists may be absent or old. They are updated only if the installation fails.
    apt(&install).or_else(|_| {
        apt(&["update"])?;
        apt(&install)
    })
}

/// Updates the lists of Debian packages.
///
/// # Errors
/// There is no way to become root, or apt-get fails.
pub fn fetch_lists() -> Result<()> {
    let mut env = as_root("env")?;
    run(env.args(["apt-get", "--quiet=2", "update"]))
}

/// Returns today's date in UTC, as in 2026-11-25.
///
/// # Errors
/// There is no `date`.
pub fn date() -> Result<String> {
    let date = output(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    Ok(date.trim().to_owned())
}

/// Returns bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a command line as a user would type it.
pub fn line(command: &Command) -> String {
    let program = command.get_program();
    let own_cargo = std::env::var_os("CARGO").is_some_and(|cargo| cargo == program);
    let program = if own_cargo {
        OsStr::new("cargo")
    } else {
        program
    };
    let words = std::iter::once(program).chain(command.get_args());
    let words = words.map(|word| match word.to_string_lossy() {
        word if word.contains(' ') => format!("'{word}'"),
        word => word.into_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}
