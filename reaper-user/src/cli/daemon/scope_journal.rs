//! Journal of a service whose scope is a process. It is of no use after the exit of that process, so it is in the runtime
//! directory, and a later daemon removes it.

use std::path::Path;

use super::super::lock;
use crate::journal::history::HistoryError;
use crate::journal::{self, recorded};
use reaper_host::source::procfs::Procfs;
use reaper_host::sys::host::boot_id;
use reaper_model::event::{ProcessKey, TICK_NS};
use reaper_model::value::parse_pid;

/// Returns whether a scope on the command line has a process. Otherwise it is the host or consists of cgroups.
pub(super) fn has_process(scope: &[String]) -> bool {
    scope.iter().any(|arg| parse_pid(arg).is_ok())
}

/// Removes the journals in a runtime directory whose scopes consist of exited processes, and that no daemon uses. Errors are
/// logged.
pub(super) fn remove_past(directory: &Path) {
    // The directory may not exist.
    for path in journal::all(directory).unwrap_or_default() {
        let scope = journal::scope_of(&path);
        let Some(scope) = scope.filter(|scope| is_past(scope, &Procfs::default())) else {
            continue;
        };
        // A scan must still find what users keep.
        let is_needed = match recorded::kept(&path, &boot_id(Path::new("/"))) {
            Ok(keeps) => keeps.iter().any(is_alive),
            Err(HistoryError::NotAJournal(_)) => false,
            Err(_) => true,
        };
        if is_needed {
            continue;
        }
        // A daemon outlives its scope if members do.
        let Ok(_lock) = lock::take(directory, Some(&scope)) else {
            continue;
        };
        if let Err(error) = journal::remove(&path) {
            let path = path.display();
            tracing::warn!(
                "cannot remove the journal {path}, whose scope has exited: {error}; remove it by hand"
            );
        }
    }
}

/// Returns whether a recorded process is alive.
fn is_alive(key: &ProcessKey) -> bool {
    let ticks = Procfs::default().start_ticks(key.pid);
    ticks.is_some_and(|ticks| ticks == key.start / TICK_NS)
}

/// Returns whether a scope, given by its name, consists of processes, and all have exited.
fn is_past(scope: &str, procfs: &Procfs) -> bool {
    scope.split('+').all(|part| {
        let Some((pid, ticks)) = part.split_once('-') else {
            return false;
        };
        match (parse_pid(pid), ticks.parse::<u64>()) {
            (Ok(pid), Ok(ticks)) => procfs.start_ticks(pid) != Some(ticks),
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scopes_of_exited_processes_are_past() {
        let procfs = Procfs::default();
        let own = std::process::id();
        let ticks = procfs.start_ticks(own).unwrap();
        for (scope, past) in [
            (format!("{own}-{ticks}"), false),
            (format!("{own}-{}", ticks + 1), true),
            ("4194304-7".into(), true),
            (format!("4194304-7+{own}-{ticks}"), false),
            ("user%2eslice".into(), false),
            ("4194304-7+user%2eslice".into(), false),
        ] {
            assert_eq!(is_past(&scope, &procfs), past, "{scope}");
        }
    }

    #[test]
    fn journals_of_past_scopes_are_removed_unless_a_daemon_runs() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(dir.path().join(name), "").unwrap();
        let names = [
            "journal.db",
            "journal-4194304-7.db",
            "journal-4194304-7.db-wal",
            "journal-4194304-8.db",
            "journal-user%2eslice.db",
        ];
        names.iter().for_each(|name| write(name));
        let lock = lock::take(dir.path(), Some("4194304-8")).unwrap();
        remove_past(dir.path());
        drop(lock);
        let left = names.iter().filter(|name| dir.path().join(name).exists());
        let left: Vec<_> = left.copied().collect();
        assert_eq!(
            left,
            [
                "journal.db",
                "journal-4194304-8.db",
                "journal-user%2eslice.db"
            ]
        );
    }
}
