//! What `--scope` names.

use std::path::Path;

use super::Failure;
use crate::model::Scope;
use crate::model::event::{Key, TICK_NS};
use crate::source::procfs::Procfs;
use crate::sys::cgroup;

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
            let directory = Path::new(word);
            let error =
                |what: &dyn std::fmt::Display| Failure::Usage(format!("--scope {word}: {what}"));
            if !directory.exists() {
                return Err(error(&"there is no such directory"));
            }
            if !cgroup::is_cgroup(directory) {
                return Err(error(
                    &"not a cgroup of version 2, whose ids the kernel tells",
                ));
            }
            let ids = cgroup::ids_below(directory).map_err(|e| error(&e))?;
            scope.cgroups.extend(ids);
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
