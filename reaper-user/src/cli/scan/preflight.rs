//! What a look without a service heeds all the same: who is at work, and what users want kept.

use std::path::Path;

use anyhow::Context;
use nix::unistd::geteuid;

use crate::cli::{Failure, lock, user};
use crate::config::Config;
use crate::journal::history::HistoryError;
use crate::journal::{self, recorded};
use reaper_model::event::ProcessKey;

/// # Errors
/// A daemon is at work and was not asked: it knows more, and may be ending the same processes.
pub(super) fn nobody_at_work(config: &Config) -> Result<(), Failure> {
    let own = user::runtime_dir().filter(|_| !geteuid().is_root());
    for directory in own.iter().chain([&config.runtime_dir]) {
        let context = || format!("cannot tell who is at work: {}", directory.display());
        if let Some((who, lock)) = lock::running_daemon(directory).with_context(context)? {
            return Err(Failure::Locked(format!(
                "{who} is at work and was not asked (lock {}): ask it, with --socket if need be, or stop it first; \
                 nothing was ended",
                lock.display()
            )));
        }
    }
    Ok(())
}

/// Who is kept, by the journals of this boot: root's are those of the host, of all scopes.
///
/// # Errors
/// There is one that cannot be read, so that somebody may be kept of whom it cannot be told.
pub(super) fn kept(config: &Config) -> anyhow::Result<Vec<ProcessKey>> {
    let hosts = geteuid().is_root() || config.journal_dir != Config::default().journal_dir;
    let directory = if hosts {
        Some(config.journal_dir.clone())
    } else {
        user::state_dir()
    };
    directory.map_or(Ok(Vec::new()), |directory| kept_in(&directory))
}

fn kept_in(directory: &Path) -> anyhow::Result<Vec<ProcessKey>> {
    let boot_id = reaper_host::sys::host::Host::read().boot_id;
    let context = || format!("cannot list the journals in {}", directory.display());
    let mut kept = Vec::new();
    for journal in journal::all(directory).with_context(context)? {
        match recorded::kept(&journal, &boot_id) {
            // Set aside meanwhile.
            Err(HistoryError::Missing(_)) => {}
            of_it => kept.extend(of_it?),
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
    fn who_is_kept_in_any_journal_is_kept() {
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
            journal.keeper().keep(&[keep(pid)]).unwrap();
            if scope.is_some() {
                journal.close();
            } else {
                // As a service leaves it that is killed, or still has it.
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
        std::fs::write(directory.join("journal-9-9.db"), "no database at all").unwrap();
        let error = kept_in(&directory).unwrap_err().to_string();
        assert!(error.contains("journal-9-9.db"), "{error}");
    }
}
