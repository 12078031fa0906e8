//! One daemon per host and scope, and the directory in which it has its lock and its socket.

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

/// Held for as long as it lives, and by no other process meanwhile.
pub(super) struct Lock {
    _file: Flock<File>,
}

/// Makes the runtime directory if it is not there.
///
/// # Errors
/// It is a symbolic link, or others may put something in it or in its place: what asks on the socket there is to
/// reach this program.
fn make(directory: &Path) -> Result<(), Failure> {
    let refused = |what: &str| {
        let name = directory.display();
        Failure::Usage(format!(
            "the runtime directory {name} {what}, or name another with --runtime-dir"
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
    let around = directory.join("..").metadata().with_context(context)?;
    if owner::is_writable_by_others(&meta) || owner::allows_replacement(&around) {
        let (uid, mode) = (meta.uid(), meta.mode() & 0o7777);
        return Err(refused(&format!(
            "is not safe from others, who may write to it or put another in its place (owner {uid}, mode {mode:04o}): \
             take that right away (chmod go-w, chown), also of the directory around it"
        )));
    }
    Ok(())
}

/// Takes the lock of the scope of this name; `None` is the whole host.
///
/// # Errors
/// Another process has it: says which.
pub(super) fn take(directory: &Path, scope: Option<&str>) -> Result<Lock, Failure> {
    let path = directory.join(match scope {
        Some(name) => format!("daemon-{name}.lock"),
        None => "daemon.lock".into(),
    });
    let context = || format!("cannot take the lock {}", path.display());
    make(directory)?;
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
            // Whoever may read it could hold the lock as well.
            file.set_permissions(Permissions::from_mode(0o600))
                .with_context(context)?;
            file.set_len(0).with_context(context)?;
            writeln!(file, "{}", std::process::id()).with_context(context)?;
            Ok(Lock { _file: file })
        }
        Err((file, Errno::EWOULDBLOCK)) => Err(Failure::Locked(format!(
            "{} watches this already (lock {}): stop it first, or give another --scope",
            holder(file),
            path.display()
        ))),
        Err((_, errno)) => Err(Failure::Other(anyhow::Error::new(errno).context(context()))),
    }
}

/// Who has this lock, as far as it says.
fn holder(mut file: File) -> String {
    let mut holder = String::new();
    let _ = file.read_to_string(&mut holder);
    match holder.trim() {
        "" => "a reaper daemon".to_owned(),
        pid => format!("the reaper daemon with pid {pid}"),
    }
}

/// Whoever is at work, of any scope, with a lock in this directory: who that is, and the lock.
///
/// # Errors
/// The directory cannot be listed, or a lock in it not be asked for.
pub(super) fn running_daemon(directory: &Path) -> std::io::Result<Option<(String, PathBuf)>> {
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
        let mut options = File::options();
        let file = match options.read(true).custom_flags(O_NOFOLLOW).open(&path) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                match lock_holder(&path.metadata()?)? {
                    Some(pid) => {
                        return Ok(Some((format!("the reaper daemon with pid {pid}"), path)));
                    }
                    None => continue,
                }
            }
            file => file?,
        };
        // Shared, so that two who only look are not in each other's way.
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(_) => {}
            Err((file, Errno::EWOULDBLOCK)) => return Ok(Some((holder(file), path))),
            Err((_, errno)) => return Err(errno.into()),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// What is said of this directory, or nothing.
    fn refused(directory: &Path) -> Option<String> {
        match make(directory) {
            Ok(()) => None,
            Err(Failure::Usage(what)) => Some(what),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a/run");
        assert_eq!(refused(&run), None, "it is made");
        let chmod = |path: &Path, mode| {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        for mode in [0o777, 0o1777, 0o775] {
            chmod(&run, mode);
            let what = refused(&run).expect("others may write to it");
            assert!(what.contains(&format!("mode {mode:04o}")), "{what}");
        }
        chmod(&run, 0o755);
        let around = run.parent().unwrap();
        chmod(around, 0o777);
        assert!(refused(&run).is_some(), "another may be put in its place");
        chmod(around, 0o1777);
        assert_eq!(refused(&run), None);
        let link = dir.path().join("link");
        symlink(&run, &link).unwrap();
        assert!(refused(&link).is_some_and(|what| what.contains("symbolic link")));
        std::fs::write(run.join("file"), "").unwrap();
        assert!(make(&run.join("file")).is_err());
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&run, Some(4242), None).unwrap();
            assert!(refused(&run).is_some_and(|what| what.contains("owner 4242")));
        }
    }

    #[test]
    fn who_is_at_work_is_told_by_their_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(running_daemon(&dir.path().join("none")).unwrap(), None);
        let lock = take(dir.path(), Some("7-7")).unwrap();
        let (who, path) = running_daemon(dir.path()).unwrap().expect("somebody");
        assert!(who.ends_with(&std::process::id().to_string()), "{who}");
        assert_eq!(path, dir.path().join("daemon-7-7.lock"));
        drop(lock);
        assert_eq!(running_daemon(dir.path()).unwrap(), None);
    }
}
