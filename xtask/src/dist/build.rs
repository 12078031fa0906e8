//! Builds programs and documents.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cross::{Arch, build_for};
use crate::shell::{built, cargo, executables, output, run, workspace};

/// Shells with completions, and the names of the files there.
pub const SHELLS: [(&str, &str); 3] = [
    ("bash", "reaper"),
    ("fish", "reaper.fish"),
    ("zsh", "_reaper"),
];

/// Man pages and completions.
#[derive(Clone)]
pub struct Documents {
    /// Development build of the program, for this host.
    pub reaper: PathBuf,
    /// Names and texts of the man pages.
    pub man: Vec<(String, Vec<u8>)>,
    /// Completions, in the order of [`SHELLS`].
    pub completions: Vec<Vec<u8>>,
}

impl Documents {
    /// Writes the documents with a development build, which needs neither optimisation nor another processor.
    ///
    /// # Errors
    /// The build fails, or a file cannot be written or read.
    pub fn write(directory: &Path, day: &str) -> Result<Documents> {
        // With the whole workspace, features and so artifacts are those of the tests.
        let built = executables(&["build", "--workspace", "--bin=reaper", "--example=man"])?;
        let find = |name: &str| {
            let found = built
                .iter()
                .find(|(_, message)| message["target"]["name"] == name);
            found
                .map(|(path, _)| path)
                .with_context(|| format!("cargo built no executable named {name}"))
        };
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        run(Command::new(find("man")?).arg(directory).arg(day))?;
        let mut man = Vec::new();
        for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            man.push((name, fs::read(entry.path())?));
        }
        man.sort();
        let reaper = find("reaper")?;
        let completions = SHELLS.iter().map(|(shell, _)| {
            let script = output(Command::new(reaper).args(["completions", shell]))?;
            Ok(script.into_bytes())
        });
        Ok(Documents {
            reaper: reaper.clone(),
            man,
            completions: completions.collect::<Result<_>>()?,
        })
    }
}

/// Builds `reaper` for a processor and a C library. `commit` replaces the commit that the build script finds.
///
/// # Errors
/// The standard library or the C compiler of the target is not available, or the build fails.
pub fn program(arch: Arch, libc: &str, profile: &str, commit: Option<&str>) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.args(["build", "--locked", "--package=reaper-user", "--bin=reaper"]);
    cargo.args(["--profile", profile]);
    build_for(&mut cargo, arch, libc)?;
    if let Some(commit) = commit {
        cargo.env("REAPER_COMMIT", commit);
    }
    let built = built(&mut cargo)?.pop();
    let (program, _) = built.with_context(|| format!("cargo built no {}", arch.target(libc)))?;
    Ok(program)
}

/// Returns the commit with a remark if the checkout differs from it. The build script finds a clean one itself.
pub fn modified_commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.args(["-c", "safe.directory=*"]).args(arguments);
        output(git.current_dir(workspace())).ok()
    };
    let changes = git(&["status", "--porcelain"])?;
    let commit = git(&["rev-parse", "HEAD"])?;
    (!changes.is_empty()).then(|| format!("{} (modified)", commit.trim()))
}
