//! One daemon per host and scope.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::Context;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::Failure;

/// Held for as long as it lives, and by no other process meanwhile.
pub(super) struct Lock {
    _file: Flock<File>,
}

/// Takes the lock of a scope; `[]` is the whole host.
///
/// # Errors
/// Another process has it: says which.
pub(super) fn take(directory: &Path, scope: &[String]) -> Result<Lock, Failure> {
    let path = directory.join(name(scope));
    let context = || format!("cannot take the lock {}", path.display());
    std::fs::create_dir_all(directory).with_context(context)?;
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(&path)
        .with_context(context)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(mut file) => {
            // Others may read who has it.
            file.set_permissions(Permissions::from_mode(0o644))
                .with_context(context)?;
            file.set_len(0).with_context(context)?;
            writeln!(file, "{}", std::process::id()).with_context(context)?;
            Ok(Lock { _file: file })
        }
        Err((file, Errno::EWOULDBLOCK)) => Err(Failure::Locked(held(file, &path))),
        Err((_, errno)) => Err(Failure::Other(anyhow::Error::new(errno).context(context()))),
    }
}

fn held(mut file: File, path: &Path) -> String {
    let mut holder = String::new();
    let _ = file.read_to_string(&mut holder);
    let holder = match holder.trim() {
        "" => "another reaper daemon".to_owned(),
        pid => format!("the reaper daemon with pid {pid}"),
    };
    format!(
        "{holder} watches this already (lock {}): stop it first, or give another --scope",
        path.display()
    )
}

/// One name for one scope, in whatever order it is given.
fn name(scope: &[String]) -> String {
    if scope.is_empty() {
        return "daemon.lock".into();
    }
    let mut words: Vec<_> = scope
        .iter()
        .map(|word| match word.parse::<u32>() {
            Ok(pid) => pid.to_string(),
            Err(_) => {
                let path = std::fs::canonicalize(word).unwrap_or_else(|_| word.into());
                let path = path.to_string_lossy();
                path.trim_matches('/')
                    .replace('%', "%25")
                    .replace('/', "%2f")
            }
        })
        .collect();
    words.sort_unstable();
    words.dedup();
    let mut name = words.join("+");
    // The longest name that every file system takes is 255 bytes.
    name.truncate(name.floor_char_boundary(200));
    format!("daemon-{name}.lock")
}
