//! Parses `--scope`, and names the files of a scope.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::{Failure, parse_pid};
use crate::api;
use reaper_host::source::procfs::Procfs;
use reaper_host::sys::paths::SOCKET_MAX;
use reaper_host::sys::{cgroup, thread_group};
use reaper_model::Scope;
use reaper_model::event::{ProcessKey, TICK_NS};

/// Longest name of a scope in bytes. Leaves room for the prefix and suffix of a file name.
const NAME_MAX: usize = 200;

/// Parses scopes from the command line: pids, or absolute paths of cgroups, each with the cgroups that are below it
/// now.
pub(super) fn parse(args: &[String]) -> Result<Scope, Failure> {
    let mut scope = Scope::default();
    for arg in args {
        if let Ok(pid) = parse_pid(arg) {
            let ticks = Procfs::default().start_ticks(pid).ok_or_else(|| {
                Failure::Usage(format!(
                    "--scope {arg}: there is no process {pid}; name a running one"
                ))
            })?;
            if thread_group(pid) != Some(pid) {
                let what = "this is a thread; use the pid of its process";
                return Err(Failure::Usage(format!("--scope {arg}: {what}")));
            }
            scope.roots.push(ProcessKey {
                pid,
                start: ticks * TICK_NS,
            });
        } else if arg.starts_with('/') {
            let directory = Path::new(arg);
            let error =
                |what: &dyn std::fmt::Display| Failure::Usage(format!("--scope {arg}: {what}"));
            if !directory.exists() {
                return Err(error(&"no such directory; name an existing cgroup"));
            }
            if !cgroup::is_cgroup(directory) {
                return Err(error(
                    &"this is not a directory of cgroup v2; name one below /sys/fs/cgroup",
                ));
            }
            let ids = cgroup::ids_below(directory)
                .map_err(|e| error(&format!("cannot read this cgroup: {e}")))?;
            scope.cgroups.extend(ids);
        } else {
            let what = parse_pid(arg).err().unwrap_or_default();
            return Err(Failure::Usage(format!(
                "--scope {arg}: {what}, or the absolute path of a cgroup"
            )));
        }
    }
    Ok(scope)
}

/// Returns the name of a scope, whatever the order of its parts; `None` is the whole host.
///
/// It consists of letters, digits, `-`, `+`, `_` and `%`, because a bpffs accepts no dots.
pub(super) fn name(args: &[String], scope: &Scope) -> Option<String> {
    if args.is_empty() {
        return None;
    }
    let root = |root: &ProcessKey| format!("{}-{}", root.pid, root.start / TICK_NS);
    let cgroups = args.iter().filter(|arg| arg.starts_with('/'));
    let cgroups = cgroups.map(|arg| escaped(Path::new(arg)));
    let mut parts: Vec<_> = scope.roots.iter().map(root).chain(cgroups).collect();
    parts.sort_unstable();
    parts.dedup();
    Some(shortened(parts.join("+"), NAME_MAX))
}

/// Shortens a name to at most `max` bytes, if `max` is at least 17. A hash then replaces its end.
fn shortened(mut name: String, max: usize) -> String {
    if name.len() > max {
        // FNV-1a of the whole name keeps names with the same beginning apart.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        name.truncate(max.saturating_sub(17));
        let _ = write!(name, "-{hash:016x}");
    }
    name
}

/// Returns the path of a scope's socket; `None` is the whole host. Shortens the scope's name to fit the kernel's limit,
/// which a long `directory` can still exceed.
pub(super) fn socket(directory: &Path, scope: Option<&str>) -> PathBuf {
    let Some(name) = scope else {
        return directory.join(api::SOCKET);
    };
    let rest = directory.as_os_str().len() + "/reaper-.sock".len();
    let name = shortened(name.into(), SOCKET_MAX.saturating_sub(rest));
    directory.join(format!("reaper-{name}.sock"))
}

/// Returns the real path of a directory, encoded with letters, digits, `-`, `_` and `%`.
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

    fn name_of(pids: &[u32], args: &[&str]) -> Option<String> {
        let roots = pids.iter().map(|&pid| ProcessKey {
            pid,
            start: 7 * TICK_NS + 5,
        });
        let scope = Scope {
            roots: roots.collect(),
            ..Scope::default()
        };
        let pids = pids.iter().map(u32::to_string);
        let args: Vec<_> = pids.chain(args.iter().map(|w| w.to_string())).collect();
        name(&args, &scope)
    }

    #[test]
    fn scope_name_is_unique_and_valid_on_bpffs() {
        assert_eq!(name_of(&[], &[]), None);
        assert_eq!(name_of(&[42], &[]).as_deref(), Some("42-7"));
        assert_eq!(
            name_of(&[42, 5, 42], &["/no/such.slice/"]).as_deref(),
            Some("42-7+5-7+no%2fsuch%2eslice%2f")
        );
        assert_eq!(name_of(&[5, 42], &[]), name_of(&[42, 5], &[]));
    }

    #[test]
    fn socket_path_fits_the_kernel_limit() {
        let directory = Path::new("/run/reaper");
        assert_eq!(socket(directory, None), directory.join("reaper.sock"));
        let short = socket(directory, Some("42-7"));
        assert_eq!(short, directory.join("reaper-42-7.sock"));
        let long = socket(directory, Some(&"1234-5678+".repeat(20)));
        assert_eq!(long.as_os_str().len(), SOCKET_MAX);
        assert_ne!(long, socket(directory, Some(&"1234-5678+".repeat(19))));
    }

    #[test]
    fn shortened_names_stay_distinct() {
        let pids: Vec<u32> = (1_000_000..1_000_040).collect();
        let (long, shorter) = (
            name_of(&pids, &[]).unwrap(),
            name_of(&pids[..39], &[]).unwrap(),
        );
        assert!(long.len() == NAME_MAX && shorter.len() == NAME_MAX && long != shorter);
    }
}
