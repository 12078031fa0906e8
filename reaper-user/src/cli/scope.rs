//! What `--scope` names.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::Failure;
use crate::api;
use reaper_host::source::procfs::Procfs;
use reaper_host::sys::paths::SOCKET_MAX;
use reaper_host::sys::{cgroup, thread_group};
use reaper_model::Scope;
use reaper_model::event::{ProcessKey, TICK_NS};

/// Longest name of a scope, in bytes: room is left for what a file's name has beside it.
const NAME_MAX: usize = 200;

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
            scope.roots.push(ProcessKey {
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

/// One name for one scope, in whatever order it was typed: of letters, digits, `-`, `+`, `_` and `%`, which
/// every file system takes (a bpffs takes no dots). `None` is the whole host.
pub(super) fn name(words: &[String], scope: &Scope) -> Option<String> {
    if words.is_empty() {
        return None;
    }
    let root = |root: &ProcessKey| format!("{}-{}", root.pid, root.start / TICK_NS);
    let cgroups = words.iter().filter(|word| word.starts_with('/'));
    let cgroups = cgroups.map(|word| escaped(Path::new(word)));
    let mut parts: Vec<_> = scope.roots.iter().map(root).chain(cgroups).collect();
    parts.sort_unstable();
    parts.dedup();
    Some(shortened(parts.join("+"), NAME_MAX))
}

/// A name of at most `max` bytes, if that is 17 or more.
fn shortened(mut name: String, max: usize) -> String {
    if name.len() > max {
        // FNV-1a of the whole keeps apart what begins alike.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        name.truncate(max.saturating_sub(17));
        let _ = write!(name, "-{hash:016x}");
    }
    name
}

/// The socket of the scope of this name; `None` is the whole host. Its path is as short as the kernel wants it.
pub(super) fn socket(directory: &Path, scope: Option<&str>) -> PathBuf {
    let Some(name) = scope else {
        return directory.join(api::SOCKET);
    };
    let around = directory.as_os_str().len() + "/reaper-.sock".len();
    let name = shortened(name.into(), SOCKET_MAX.saturating_sub(around));
    directory.join(format!("reaper-{name}.sock"))
}

/// A directory's real path in letters, digits, `-`, `_` and `%`.
fn escaped(path: &Path) -> String {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let bytes = path.as_os_str().as_bytes();
    let mut escaped = String::new();
    for &byte in bytes.strip_prefix(b"/").unwrap_or(bytes) {
        if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02x}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(pids: &[u32], words: &[&str]) -> Option<String> {
        let roots = pids.iter().map(|&pid| ProcessKey {
            pid,
            start: 7 * TICK_NS + 5,
        });
        let scope = Scope {
            roots: roots.collect(),
            ..Scope::default()
        };
        let pids = pids.iter().map(u32::to_string);
        let words: Vec<_> = pids.chain(words.iter().map(|w| w.to_string())).collect();
        name(&words, &scope)
    }

    #[test]
    fn a_scope_has_one_name_that_a_bpffs_takes() {
        assert_eq!(name_of(&[], &[]), None);
        assert_eq!(name_of(&[42], &[]).as_deref(), Some("42-7"));
        assert_eq!(
            name_of(&[42, 5, 42], &["/no/such.slice/"]).as_deref(),
            Some("42-7+5-7+no%2fsuch%2eslice%2f")
        );
        assert_eq!(name_of(&[5, 42], &[]), name_of(&[42, 5], &[]));
    }

    #[test]
    fn a_socket_has_a_path_that_the_kernel_takes() {
        let directory = Path::new("/run/reaper");
        assert_eq!(socket(directory, None), directory.join("reaper.sock"));
        let short = socket(directory, Some("42-7"));
        assert_eq!(short, directory.join("reaper-42-7.sock"));
        let long = socket(directory, Some(&"1234-5678+".repeat(20)));
        assert_eq!(long.as_os_str().len(), SOCKET_MAX);
        assert_ne!(long, socket(directory, Some(&"1234-5678+".repeat(19))));
    }

    #[test]
    fn long_names_stay_apart() {
        let pids: Vec<u32> = (1_000_000..1_000_040).collect();
        let (whole, less) = (
            name_of(&pids, &[]).unwrap(),
            name_of(&pids[..39], &[]).unwrap(),
        );
        assert!(whole.len() == NAME_MAX && less.len() == NAME_MAX && whole != less);
    }
}
