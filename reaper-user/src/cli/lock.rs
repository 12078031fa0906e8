//! Lock file of the daemon, and the directory that holds it and the socket. One daemon can run per host and scope.

use std::fs::{File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::{O_DIRECTORY, O_NOFOLLOW};

use super::Failure;
use reaper_host::sys::{lock_holder, owner};

/// Lock of a scope, held until drop.
pub(super) struct Lock {
    _file: Flock<File>,
}

/// Creates the runtime directory if it does not exist.
///
/// # Errors
/// The directory is a symbolic link, or other users can write to it or replace it. They could then put their own
/// socket there.
fn create(directory: &Path) -> Result<(), Failure> {
    let refused = |what: &str| {
        let name = directory.display();
        Failure::Usage(format!(
            "the runtime directory {name} {what}, or set another one with --runtime-dir"
        ))
    };
    let context = || format!("cannot use the runtime directory {}", directory.display());
    std::fs::create_dir_all(directory).with_context(context)?;
    let mut options = File::options();
    options.read(true).custom_flags(O_NOFOLLOW | O_DIRECTORY);
    let meta = match options.open(directory).and_then(|file| file.metadata()) {
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            return Err(refused("is a symbolic link: make it a directory"));
        }
        meta => meta.with_context(context)?,
    };
    let parent = directory.join("..").metadata().with_context(context)?;
    if owner::is_writable_by_others(&meta) || owner::allows_replacement(&parent) {
        let (uid, mode) = (meta.uid(), meta.mode() & 0o7777);
        return Err(refused(&format!(
            "can be changed by other users (owner {uid}, mode {mode:04o}): \
             take away their write access to it and to its parent directory (chmod go-w, chown)"
        )));
    }
    Ok(())
}

/// Takes the lock of a scope; `None` is the whole host.
///
/// # Errors
/// Another process holds the lock; the error names it. Or the directory or the lock file cannot be used.
pub(super) fn take(directory: &Path, scope: Option<&str>) -> Result<Lock, Failure> {
    let path = directory.join(match scope {
        Some(name) => format!("daemon-{name}.lock"),
        None => "daemon.lock".into(),
    });
    let context = || format!("cannot take the lock file {}", path.display());
    create(directory)?;
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(O_NOFOLLOW)
        .open(&path)
        .with_context(context)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(mut file) => {
            // A process that can open the file could lock it.
            file.set_permissions(Permissions::from_mode(0o600))
                .with_context(context)?;
            file.set_len(0).with_context(context)?;
            writeln!(file, "{}", std::process::id()).with_context(context)?;
            Ok(Lock { _file: file })
        }
        Err((file, Errno::EWOULDBLOCK)) => Err(Failure::Locked(format!(
            "{} already watches these processes (lock {}); stop it first, or use another --scope",
            holder(file),
            path.display()
        ))),
        Err((_, errno)) => Err(Failure::Other(anyhow::Error::new(errno).context(context()))),
    }
}

/// Describes the process that holds the lock. The file contains its pid.
fn holder(mut file: File) -> String {
    let mut holder = String::new();
    let _ = file.read_to_string(&mut holder);
    match holder.trim() {
        "" => "a reaper daemon".to_owned(),
        pid => format!("the reaper daemon with pid {pid}"),
    }
}

/// Returns the daemon that watches the whole host, in words, if one has its lock in this directory. `None` also if this
/// user cannot determine it.
pub(super) fn host_daemon(directory: &Path) -> Option<String> {
    let daemon = held(&directory.join("daemon.lock"));
    daemon.unwrap_or_default()
}

/// Returns a running daemon of any scope with its lock, if there is one in this directory other than the process `except`.
///
/// # Errors
/// The directory cannot be listed, or a lock file cannot be read.
pub(super) fn running_daemon(
    directory: &Path,
    except: Option<u32>,
) -> std::io::Result<Option<(String, PathBuf)>> {
    let is_other = |daemon: &String| except.is_none_or(|pid| !daemon.ends_with(&format!(" {pid}")));
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if !name.starts_with(b"daemon") || !name.ends_with(b".lock") {
            continue;
        }
        if let Some(daemon) = held(&path)?.filter(is_other) {
            return Ok(Some((daemon, path)));
        }
    }
    Ok(None)
}

/// Returns the daemon that holds a lock file, in words. `None` if no process holds it.
///
/// # Errors
/// The file cannot be read, or does not exist.
fn held(path: &Path) -> std::io::Result<Option<String>> {
    let mut options = File::options();
    let file = match options.read(true).custom_flags(O_NOFOLLOW).open(path) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let pid = lock_holder(&path.metadata()?)?;
            return Ok(pid.map(|pid| format!("the reaper daemon with pid {pid}")));
        }
        file => file?,
    };
    // A shared lock, so that two checks at the same time do not find each other.
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_) => Ok(None),
        Err((file, Errno::EWOULDBLOCK)) => Ok(Some(holder(file))),
        Err((_, errno)) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Returns the message with which the directory is refused.
    fn refused(directory: &Path) -> Option<String> {
        match create(directory) {
            Ok(()) => None,
            Err(Failure::Usage(what)) => Some(what),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn directory_that_others_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a/run");
        assert_eq!(refused(&run), None, "the directory is created");
        let chmod = |path: &Path, mode| {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        for mode in [0o777, 0o1777, 0o775] {
            chmod(&run, mode);
            let what = refused(&run).expect("others can write to it");
            assert!(what.contains(&format!("mode {mode:04o}")), "{what}");
        }
        chmod(&run, 0o755);
        let parent = run.parent().unwrap();
        chmod(parent, 0o777);
        assert!(refused(&run).is_some(), "others can replace it");
        chmod(parent, 0o1777);
        assert_eq!(refused(&run), None);
        let link = dir.path().join("link");
        symlink(&run, &link).unwrap();
        assert!(refused(&link).is_some_and(|what| what.contains("symbolic link")));
        std::fs::write(run.join("file"), "").unwrap();
        assert!(create(&run.join("file")).is_err());
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&run, Some(4242), None).unwrap();
            assert!(refused(&run).is_some_and(|what| what.contains("owner 4242")));
        }
    }

    #[test]
    fn running_daemon_is_found_by_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(
            running_daemon(&dir.path().join("none"), None).unwrap(),
            None
        );
        let lock = take(dir.path(), Some("7-7")).unwrap();
        let (daemon, path) = running_daemon(dir.path(), None).unwrap().expect("a daemon");
        assert!(
            daemon.ends_with(&std::process::id().to_string()),
            "{daemon}"
        );
        assert_eq!(path, dir.path().join("daemon-7-7.lock"));
        let own = Some(std::process::id());
        assert_eq!(running_daemon(dir.path(), own).unwrap(), None);
        drop(lock);
        assert_eq!(running_daemon(dir.path(), None).unwrap(), None);
    }
}
