//! A copy of the workspace's sources.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell::{output, workspace};

/// Makes `tree` equal to the sources that git knows or would add. Leaves equal files alone, so that cargo does not build
/// them again.
///
/// # Errors
/// git fails, or a file cannot be read or written.
pub fn workspace_to(tree: &Path) -> Result<()> {
    let root = workspace();
    let mut git = Command::new("git");
    git.arg("-C").arg(&root);
    git.args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let list = output(&mut git)?;
    let mut kept = BTreeSet::new();
    for name in list.split_terminator('\0') {
        let text = match fs::read(root.join(name)) {
            Ok(text) => text,
            // Deleted, and not yet in git's index.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| name.to_owned()),
        };
        let file = tree.join(name);
        if fs::read(&file).ok().as_ref() != Some(&text) {
            let dir = file.parent().unwrap_or(tree);
            fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
            fs::write(&file, text).with_context(|| file.display().to_string())?;
        }
        kept.insert(file);
    }
    remove_others(tree, &kept)
}

fn remove_others(dir: &Path, kept: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_others(&path, kept)?;
        } else if !kept.contains(&path) {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}
