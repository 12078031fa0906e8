//! Checks before a scan without a service: running daemons, and processes that users keep.

use std::path::Path;

use anyhow::{Context, anyhow};
use nix::unistd::geteuid;

use crate::cli::{Failure, lock, user};
use crate::config::Config;
use crate::journal::history::HistoryError;
use crate::journal::{self, recorded};
use reaper_host::advice::Advised as _;
use reaper_model::event::ProcessKey;

/// Checks that no daemon is running, by the locks in the runtime directories of the config and of this user.
///
/// # Errors
/// A daemon is running. It knows more, and it may be reaping the same processes.
pub(super) fn check_no_daemon(config: &Config) -> Result<(), Failure> {
    let own = user::runtime_dir().filter(|_| !geteuid().is_root());
    for directory in own.iter().chain([&config.runtime_dir]) {
        let running = lock::running_daemon(directory, None).map_err(|error| {
            anyhow!(
                "nothing was reaped: cannot check by the lock files in {} whether a daemon is running: {}",
                directory.display(),
                error.advised_or("run as root")
            )
        })?;
        if let Some((daemon, lock)) = running {
            return Err(Failure::Locked(format!(
                "nothing was reaped: {daemon} is running (lock {}) and must do the scan; omit --config and --scope, name its \
                 socket with --socket, or stop it first",
                lock.display()
            )));
        }
    }
    Ok(())
}

/// Returns the processes that users keep, by the journals of this boot. For root: those of the host and of all scopes.
///
/// # Errors
/// A journal cannot be read, so that a kept process may be missing.
pub(super) fn kept(config: &Config) -> anyhow::Result<Vec<ProcessKey>> {
    let hosts = geteuid().is_root() || config.journal_dir != Config::default().journal_dir;
    // The journals of services that watch one process are in the runtime directory.
    let directories = match hosts {
        true => [
            Some(config.journal_dir.clone()),
            Some(config.runtime_dir.clone()),
        ],
        false => [user::state_dir(), user::runtime_dir()],
    };
    let mut directories: Vec<_> = directories.into_iter().flatten().collect();
    directories.dedup();
    let kept: anyhow::Result<Vec<_>> = directories.iter().map(|path| kept_in(path)).collect();
    Ok(kept?.concat())
}

fn kept_in(directory: &Path) -> anyhow::Result<Vec<ProcessKey>> {
    let boot_id = reaper_host::sys::host::Host::read().boot_id;
    let context = || format!("cannot list the journals in {}", directory.display());
    let mut kept = Vec::new();
    for journal in journal::all(directory).with_context(context)? {
        match recorded::kept(&journal, &boot_id) {
            // The journal was moved away in the meantime.
            Err(HistoryError::Missing(_)) => {}
            keys => kept.extend(keys?),
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal, JournalKeep, JournalOptions};

    fn keep(pid: u32) -> JournalKeep {
        JournalKeep {
            key: ProcessKey { pid, start: 7 },
            session: ProcessKey { pid: 1, start: 1 },
            is_explicit: true,
            tree: false,
            by_uid: 0,
            made_at: 1,
            until: None,
        }
    }

    #[test]
    fn keeps_of_all_journals_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("journal");
        assert_eq!(kept_in(&directory).unwrap(), []);
        let boot_id = reaper_host::sys::host::Host::read().boot_id;
        for (scope, pid, boot_id) in [
            (None, 101, boot_id.clone()),
            (Some("7-7"), 102, boot_id),
            (Some("8-8"), 103, "another".into()),
        ] {
            let options = JournalOptions {
                directory: directory.clone(),
                scope: scope.map(str::to_owned),
                ..JournalOptions::default()
            };
            let journal = Journal::open(options, boot_id).unwrap();
            journal.keep_writer().keep(&[keep(pid)]).unwrap();
            if scope.is_some() {
                journal.close();
            } else {
                // A killed or a running service leaves its journal like this.
                std::mem::forget(journal);
            }
        }
        let mut pids: Vec<_> = kept_in(&directory)
            .unwrap()
            .iter()
            .map(|key| key.pid)
            .collect();
        pids.sort_unstable();
        assert_eq!(pids, [101, 102]);
        std::fs::write(directory.join("journal-9-9.db"), "not a database").unwrap();
        let error = kept_in(&directory).unwrap_err().to_string();
        assert!(error.contains("journal-9-9.db"), "{error}");
    }
}
