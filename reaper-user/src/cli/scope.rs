//! What `--scope` names.

use std::os::linux::fs::MetadataExt;
use std::path::Path;

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::Failure;
use crate::model::Scope;
use crate::model::event::{Key, TICK_NS};
use crate::source::procfs::Procfs;

/// Reads scopes as they are typed: a pid, or the directory of a cgroup.
pub(super) fn parse(words: &[String]) -> Result<Scope, Failure> {
    let mut scope = Scope::default();
    for word in words {
        if let Ok(pid) = word.parse::<u32>() {
            let ticks = Procfs::default().start_ticks(pid).ok_or_else(|| {
                Failure::Usage(format!("--scope {word}: there is no process {pid}"))
            })?;
            if thread_group(pid) != Some(pid) {
                let what = "this is a thread; name the process that it belongs to";
                return Err(Failure::Usage(format!("--scope {word}: {what}")));
            }
            scope.roots.push(Key {
                pid,
                start: ticks * TICK_NS,
            });
        } else if word.starts_with('/') {
            let on_v2 =
                statfs(Path::new(word)).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC);
            if Path::new(word).exists() && !on_v2 {
                let what = "not a cgroup of version 2, which has ids that the kernel tells";
                return Err(Failure::Usage(format!("--scope {word}: {what}")));
            }
            let before = scope.cgroups.len();
            cgroups(Path::new(word), &mut scope.cgroups).map_err(|e| {
                Failure::Usage(format!("--scope {word}: {}", e.to_string().to_lowercase()))
            })?;
            if scope.cgroups.len() == before {
                return Err(Failure::Usage(format!(
                    "--scope {word}: not a cgroup: it has no cgroup.procs"
                )));
            }
        } else {
            let what = "name a pid, or a cgroup by its absolute path";
            return Err(Failure::Usage(format!(
                "--scope {word}: neither a pid nor a path: {what}"
            )));
        }
    }
    Ok(scope)
}

/// The process that a task belongs to.
fn thread_group(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:"))?
        .trim()
        .parse()
        .ok()
}

/// The ids of a cgroup and those below it: the inodes of their directories.
fn cgroups(directory: &Path, ids: &mut Vec<u64>) -> std::io::Result<()> {
    if directory.join("cgroup.procs").exists() {
        ids.push(std::fs::metadata(directory)?.st_ino());
    }
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            cgroups(&entry.path(), ids)?;
        }
    }
    Ok(())
}
