//! The records of a user's runs: which runs are open, and what became of the closed ones.
//!
//! Each run has a file in a directory that only its user may write to: `ID.run` while the run is open, `ID.over` once
//! it is closed. `ID.log` has the output of a detached run. [`super::record`] describes the contents.
//!
//! # Locks and claims
//! The supervisor of a run holds a lock on its file (flock(2)), which the kernel releases however that process exits.
//! So an unlocked `ID.run` is a run without a supervisor. Only the holder of the lock may write, with two exceptions:
//! - The starting command itself appends its `command` line.
//! - Any process that wants the run to end appends a `claim` line.
//!
//! The kernel orders appended lines, so all readers see the same first claim. That claim alone decides the outcome. A
//! stop that races with the timeout, or with the exit of the command, therefore gives one outcome for all.
//!
//! # What is left if a step is interrupted
//! - *Before the file has its final name*: an `ID.new`, which is removed later. Nothing has been started.
//! - *Before the command starts*: the run is closed as never started. An empty cgroup of its name is removed.
//! - *During the start*: the command appends its own pid and start time before exec, and shares the lock until then. So
//!   no command is started without a record, except if the disk is full.
//! - *While the command runs*: the next process that calls [`Runs::close_dead`] ends the recorded commands (also
//!   `--on-success` and `--on-failure`) and their descendants. It first stops (SIGSTOP) the whole tree, so that nothing
//!   is forked unseen. If the run has its own cgroup, all processes in it are ended too, provided that the directory
//!   still has the recorded id. Then the cgroup is removed.
//!
//!   Without a cgroup and without a running service, some processes survive. Orphans that the supervisor had adopted
//!   look like processes outside of the run. A child is missed if its parent exits at SIGTERM right after the fork. So are
//!   children of a running `--done-when` check. The kernel kills the check itself with the supervisor. It is not
//!   recorded, because checks run often.
//! - *After a claim*: the run is closed with the claimed outcome. If a stop was claimed but its SIGTERM not sent, the
//!   next stop sends it.
//! - *While the tree is being ended*: the same as while the command runs. Processes that have had SIGTERM get it again.
//!   Processes that a killed closer has stopped stay stopped until then.
//! - *Before the last rename*: the run has its result, and the next process renames the file.
//! - *A full disk*: each record reserves space for its later lines, if the file system supports that. If a claim cannot
//!   be written nevertheless, the processes are ended all the same, with a warning.
//! - *A power failure*: a record is on disk before its command starts. The result of a detached or named run is on disk
//!   before its supervisor exits. For other runs, whose caller gets the result, that sync would double the run time. So
//!   after a power failure such a run may be open or lack its result. For runs of another boot no process is searched
//!   or signalled: the claim alone gives the outcome.
//! - *A shared file system*: locks of other machines may be invisible here, and boot ids and pids differ. So a network
//!   file system is refused ([`RecordError::Remote`]).

use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};

use super::RunOutcome;
use super::record::{OTHER_BOOT, RecordParseError, RunRecord, RunResult, UNWRITTEN};
use crate::export::write_object;
use reaper_host::advice::Advised as _;
use reaper_host::sys::host::boot_id;
use reaper_host::sys::{self, owner, paths, remote, xdg};

/// Maximum number of records of closed runs that [`Runs::prune`] keeps.
pub const CLOSED_MAX: usize = 100;
/// Maximum age of the records of closed runs that [`Runs::prune`] keeps.
pub const CLOSED_AGE: Duration = Duration::from_secs(30 * 86_400);
/// Number of records above [`CLOSED_MAX`] at which they are pruned.
const CLOSED_SLACK: usize = 20;
/// Extension of the record of an open run.
pub(super) const OPEN: &str = "run";
/// Extension of the record of a closed run.
pub(super) const CLOSED: &str = "over";
/// Extension of a record that is being written.
pub(super) const NEW: &str = "new";
/// Extension of a record that cannot be parsed.
const DAMAGED: &str = "damaged";
/// Extension of the output of a detached run.
pub(super) const LOG: &str = "log";
/// Maximum size of a record in bytes. Real ones are much smaller.
const FILE_MAX: u64 = 1 << 20;
/// Time after which an unfinished record, or a log without a record, is removed.
const WRITING_MAX: Duration = Duration::from_secs(60);

/// Directory with the records of runs.
#[derive(Clone, Debug)]
pub struct Runs {
    dir: PathBuf,
}

/// Reasons why a run cannot be recorded or found. Commands that only read records return them too.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Neither XDG_STATE_HOME nor HOME is set.
    #[error(
        "cannot use the records of runs: neither XDG_STATE_HOME nor HOME is set to an absolute path; set one of them"
    )]
    NoDirectory,
    /// A file or directory cannot be used.
    #[error(
        "cannot use the records of runs: {}: {}",
        path.display(), file_advised(source)
    )]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// Other users may write to the directory.
    #[error(
        "cannot use the records of runs: other users may write to {} (owner {uid}, mode {mode:04o}), and the records decide which \
         processes are ended; remove that permission (chmod go-w, chown), or set XDG_STATE_HOME to another directory",
        dir.display()
    )]
    Exposed {
        /// Directory that they may write to.
        dir: PathBuf,
        /// Owner of the directory.
        uid: u32,
        /// Permission bits of the directory.
        mode: u32,
    },
    /// The directory is on a network file system.
    #[error(
        "cannot use the records of runs: {} is on a network file system ({kind}), which other machines may use too; set \
         XDG_STATE_HOME to a local directory", dir.display()
    )]
    Remote {
        /// Directory of the records.
        dir: PathBuf,
        /// Type of the file system, such as `nfs`.
        kind: &'static str,
    },
    /// Another open run has this name.
    #[error(
        "the name {name} is in use by run {id}; end that run with `reaper stop {name}`, or choose another name"
    )]
    NameTaken {
        /// Name of both runs.
        name: String,
        /// Id of the other run.
        id: String,
    },
    /// The limit on concurrent runs is not valid.
    #[error(
        "cannot limit concurrent runs to {runs} of the group {group:?}: expected at least 1, and as a name up to 64 letters, digits, \
         `.`, `_` and `-`, with a letter or digit first"
    )]
    Limit {
        /// Name of the group.
        group: String,
        /// Maximum number of concurrent runs.
        runs: usize,
    },
    /// No run has this id or name.
    #[error(
        "there is no run {0}: no id begins with that, and no run has that name; `reaper ps --all` lists your runs"
    )]
    Unknown(String),
    /// Several runs match.
    #[error("{word} is ambiguous: it is the start of the ids of the runs {}; use more of the id", ids.join(", "))]
    Ambiguous {
        /// Start of an id, or a name.
        word: String,
        /// Ids of the runs that match.
        ids: Vec<String>,
    },
}

/// Returns the error of a file or directory of records, and what the user can do.
fn file_advised(error: &io::Error) -> String {
    let advice = match error.kind() {
        ErrorKind::PermissionDenied => "let this user read and write it (chown, chmod u+rwX)",
        ErrorKind::NotADirectory => "make it a directory, not a file or a link",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free disk space",
        ErrorKind::ReadOnlyFilesystem => "mount its file system read-write",
        // Its text has a remedy.
        ErrorKind::Other => return error.to_string(),
        _ => return error.advised_or("set XDG_STATE_HOME to another directory"),
    };
    format!("{error}; {advice}, or set XDG_STATE_HOME to another directory")
}

impl RecordError {
    pub(super) fn file(path: &Path) -> impl Fn(io::Error) -> RecordError {
        move |source| RecordError::File {
            path: path.to_owned(),
            source,
        }
    }
}

/// A run with a record.
#[derive(Clone, Debug)]
pub struct RecordedRun {
    /// Contents of the record when it was read.
    pub record: RunRecord,
    pub(super) path: PathBuf,
}

impl RecordedRun {
    /// Returns the id of the run.
    pub fn id(&self) -> &str {
        &self.record.header.id
    }

    /// Returns whether the supervisor of the run, or a process that closes the run, holds the lock of the record.
    /// Returns false if the record was renamed or removed since it was read.
    ///
    /// # Errors
    /// The record cannot be opened.
    pub fn has_supervisor(&self) -> io::Result<bool> {
        is_locked(&self.path)
    }

    /// Returns the path of the output of a detached run. For other runs there is no such file.
    pub fn log(&self) -> PathBuf {
        self.path.with_extension(LOG)
    }
}

impl Runs {
    /// Opens the directory of this user's runs: `$XDG_STATE_HOME/reaper/runs`, by default `~/.local/state/reaper/runs`.
    /// For root without that variable it is `/var/lib/reaper/runs`.
    ///
    /// # Errors
    /// As [`Runs::open`].
    pub fn of_user() -> Result<Runs, RecordError> {
        let roots = nix::unistd::geteuid().is_root() && xdg::absolute("XDG_STATE_HOME").is_none();
        let state = match roots {
            true => Some(PathBuf::from(paths::STATE)),
            false => xdg::state_home().map(|home| home.join("reaper")),
        };
        Runs::open(&state.ok_or(RecordError::NoDirectory)?.join("runs"))
    }

    /// Opens a directory of runs, and creates it if it does not exist.
    ///
    /// # Errors
    /// It cannot be created or read, other users may write to it, or it is on a network file system.
    pub fn open(dir: &Path) -> Result<Runs, RecordError> {
        let mut builder = DirBuilder::new();
        let created = builder.recursive(true).mode(0o700).create(dir);
        created.map_err(RecordError::file(dir))?;
        // A symbolic link is refused: its target was not created for runs.
        let meta = fs::symlink_metadata(dir).map_err(RecordError::file(dir))?;
        if !meta.is_dir() {
            return Err(RecordError::file(dir)(ErrorKind::NotADirectory.into()));
        }
        let exposed = |dir: &Path, meta: &Metadata| {
            let (uid, mode) = (meta.uid(), meta.mode() & 0o7777);
            let dir = dir.to_owned();
            Err(RecordError::Exposed { dir, uid, mode })
        };
        if owner::is_writable_by_others(&meta) {
            return exposed(dir, &meta);
        }
        // Any user able to replace the directory could make root end any process.
        let ancestors = dir
            .ancestors()
            .skip(1)
            .filter(|_| nix::unistd::geteuid().is_root());
        for ancestor in ancestors.filter(|ancestor| !ancestor.as_os_str().is_empty()) {
            let meta = fs::metadata(ancestor).map_err(RecordError::file(ancestor))?;
            if owner::allows_replacement(&meta) {
                return exposed(ancestor, &meta);
            }
        }
        let remote = remote::kind(dir).map_err(|errno| RecordError::file(dir)(errno.into()))?;
        if let Some(kind) = remote {
            let dir = dir.to_owned();
            return Err(RecordError::Remote { dir, kind });
        }
        if meta.mode() & 0o077 != 0 {
            // Fails if an existing directory belongs to root.
            let _ = fs::set_permissions(dir, Permissions::from_mode(0o700));
        }
        Ok(Runs {
            dir: dir.to_owned(),
        })
    }

    /// Returns the directory with the records.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the open runs, and with `closed` also the closed ones, by the time of their start. Skips records that
    /// cannot be read, with a warning, and renames damaged ones.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn list(&self, closed: bool) -> Result<Vec<RecordedRun>, RecordError> {
        let mut all = Vec::new();
        for path in self.files()? {
            let kind = path.extension().unwrap_or_default();
            if kind == OPEN || closed && kind == CLOSED {
                // The run may have been closed, and its file renamed, since the directory was read.
                let renamed = || read(&path.with_extension(CLOSED)).filter(|_| closed);
                all.extend(read(&path).or_else(renamed));
            }
        }
        // A run that was closed during the listing may be listed by both names.
        let open = |known: &RecordedRun| known.record.result.is_none();
        all.sort_by(|a, b| (a.id(), open(a)).cmp(&(b.id(), open(b))));
        all.dedup_by(|a, b| a.id() == b.id());
        all.sort_by_key(|known| known.record.header.started);
        Ok(all)
    }

    /// Finds a run by its id, else by its name, else by the start of its id. Of runs with the same name it returns the
    /// open one, or else the one that started last. Treats unreadable records as [`Runs::list`] does.
    ///
    /// # Errors
    /// The directory cannot be listed, no run matches, or several ids start with `word`.
    pub fn find(&self, word: &str) -> Result<RecordedRun, RecordError> {
        let all = self.list(true)?;
        let is_named = |known: &&RecordedRun| known.record.header.name.as_deref() == Some(word);
        let named = || {
            let mut named: Vec<&RecordedRun> = all.iter().filter(is_named).collect();
            named.sort_by_key(|known| known.record.result.is_none());
            named.pop()
        };
        if let Some(known) = all.iter().find(|known| known.id() == word).or_else(named) {
            return Ok(known.clone());
        }
        let mut matches = all
            .iter()
            .filter(|known| !word.is_empty() && known.id().starts_with(word));
        match (matches.next(), matches.next()) {
            (Some(known), None) => Ok(known.clone()),
            (None, _) => Err(RecordError::Unknown(word.to_owned())),
            (Some(one), Some(other)) => Err(RecordError::Ambiguous {
                word: word.to_owned(),
                ids: {
                    let matches = [one, other].into_iter().chain(matches);
                    let mut ids: Vec<_> = matches.map(|known| known.id().to_owned()).collect();
                    ids.sort_unstable();
                    ids
                },
            }),
        }
    }

    /// Reads a run again, whether it is still open or closed now.
    ///
    /// # Errors
    /// Its record no longer exists.
    pub fn reload(&self, known: &RecordedRun) -> Result<RecordedRun, RecordError> {
        for kind in [OPEN, CLOSED, OPEN] {
            if let Some(known) = read(&known.path.with_extension(kind)) {
                return Ok(known);
            }
        }
        Err(RecordError::Unknown(known.id().to_owned()))
    }

    /// Removes records of closed runs that exceed [`CLOSED_MAX`] or [`CLOSED_AGE`], oldest first, with their logs.
    ///
    /// Also removes damaged records after [`CLOSED_AGE`], and unfinished records and logs without a record after a
    /// minute. Ignores errors.
    pub fn prune(&self) {
        let (now, mut closed) = (SystemTime::now(), Vec::new());
        for path in self.files().unwrap_or_default() {
            let meta = fs::symlink_metadata(&path);
            let Ok(time) = meta.and_then(|meta| meta.modified()) else {
                continue;
            };
            let age = now.duration_since(time).unwrap_or_default();
            let kind = path.extension().unwrap_or_default();
            if kind == CLOSED {
                closed.push((time, age, path));
            } else if kind == NEW && age > WRITING_MAX
                || kind == DAMAGED && age > CLOSED_AGE
                || kind == LOG && age > WRITING_MAX && !has_record(&path)
            {
                let _ = fs::remove_file(path);
            }
        }
        closed.sort_unstable_by(|one, other| other.cmp(one));
        let old = closed.into_iter().enumerate();
        let old = old.filter(|(n, (_, age, _))| *n >= CLOSED_MAX || *age > CLOSED_AGE);
        for (_, (_, _, path)) in old {
            let _ = fs::remove_file(&path);
            let _ = fs::remove_file(path.with_extension(LOG));
        }
    }

    /// Calls [`Runs::prune`] if there are more than [`CLOSED_MAX`] + [`CLOSED_SLACK`] closed runs.
    pub(super) fn prune_if_many(&self) {
        let files = self.files().unwrap_or_default();
        let closed = files
            .iter()
            .filter(|path| path.extension().unwrap_or_default() == CLOSED);
        if closed.count() > CLOSED_MAX + CLOSED_SLACK {
            self.prune();
        }
    }

    pub(super) fn path(&self, id: &str, kind: &str) -> PathBuf {
        self.dir.join(format!("{id}.{kind}"))
    }

    /// Returns the paths of all files in the directory.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>, RecordError> {
        let entries = fs::read_dir(&self.dir).map_err(RecordError::file(&self.dir))?;
        Ok(entries.flatten().map(|entry| entry.path()).collect())
    }

    /// Waits for the lock of the directory, so that only one process at a time checks a name and creates its record.
    pub(super) fn lock(&self) -> Result<Flock<File>, RecordError> {
        let dir = File::open(&self.dir).map_err(RecordError::file(&self.dir))?;
        let locked = Flock::lock(dir, FlockArg::LockExclusive);
        locked.map_err(|(_, errno)| RecordError::file(&self.dir)(errno.into()))
    }
}

/// Returns the inode of this process's pid namespace; 0 for the initial one.
///
/// # Errors
/// /proc cannot be used. The error has a remedy.
pub(super) fn pid_namespace() -> io::Result<u32> {
    sys::non_initial_pid_namespace().map_err(|error| {
        let advice = "mount the /proc of this pid namespace (mount -t proc proc /proc)";
        io::Error::other(format!("cannot use /proc: {error}; {advice}"))
    })
}

fn has_record(log: &Path) -> bool {
    [OPEN, CLOSED, NEW]
        .iter()
        .any(|kind| log.with_extension(kind).exists())
}

/// Opens a record for reading and appending. On a read-only file system it is opened for reading, and can still be
/// locked.
///
/// # Errors
/// The file cannot be opened, or is not a regular file. The text for that has a remedy.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let options = options.read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK);
    let file = match options.append(true).open(path) {
        Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => {
            options.append(false).open(path)?
        }
        file => file?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file; remove it"));
    }
    Ok(file)
}

/// Reads the contents of a record, at most [`FILE_MAX`] bytes.
pub(super) fn content(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Appends a line. It begins with a line break, which separates it from an incomplete line before it.
pub(super) fn append(mut file: &File, line: &super::record::Line) -> io::Result<()> {
    let mut bytes = vec![b'\n'];
    write_object(&mut bytes, line)?;
    match file.write(&bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(ErrorKind::StorageFull.into()),
    }
}

/// Reads the run in a file. Returns `None` if the file is gone or cannot be used. A closed run without a result gets
/// one from its claim.
fn read(path: &Path) -> Option<RecordedRun> {
    let bytes = match open(path).and_then(|file| content(&file)) {
        Ok(bytes) => bytes,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!(
                    "cannot read the run record {}: {}; its run is left out",
                    path.display(),
                    file_advised(&error)
                );
            }
            return None;
        }
    };
    let mut record = parse_or_rename(path, &bytes)?;
    if record.result.is_none() && path.extension().unwrap_or_default() == CLOSED {
        let outcome = record.outcome().unwrap_or(RunOutcome::Death);
        let note = match record.header.boot_id == boot_id(Path::new("/")) {
            true => UNWRITTEN,
            false => OTHER_BOOT,
        };
        record.result = Some(RunResult::unobserved(outcome, note));
    }
    Some(RecordedRun {
        record,
        path: path.to_owned(),
    })
}

/// Parses a record. Returns `None` if it cannot be used, with a warning. Renames a damaged record, but not one of a
/// later version.
pub(super) fn parse_or_rename(path: &Path, bytes: &[u8]) -> Option<RunRecord> {
    let name = path.display();
    let problem = match RunRecord::parse(bytes) {
        // The record decides which processes are ended, so it must also be that of its file name.
        Ok(record) if path.file_stem() == Some(record.header.id.as_ref()) => return Some(record),
        Ok(_) => RecordParseError::Damaged,
        Err(problem @ RecordParseError::Later(_)) => {
            tracing::warn!(
                "the run record {name} is left out: {problem}; use that version to list or stop the run"
            );
            return None;
        }
        Err(problem) => problem,
    };
    let new_name = path.with_extension(DAMAGED);
    match fs::rename(path, &new_name) {
        Ok(()) if path.extension().unwrap_or_default() == OPEN => tracing::warn!(
            "cannot use run record {name}: {problem}; it was renamed to {}, and the processes of its run were not ended; \
             find them with `ps`, and kill them",
            new_name.display()
        ),
        Ok(()) => tracing::warn!(
            "cannot use the record of a finished run, {name}: {problem}; its result is lost, and it was renamed to {}",
            new_name.display()
        ),
        // Another process has renamed it.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(
                "cannot use run record {name}: {problem}; it cannot be renamed either: {error}; find the processes of its \
                 run with `ps`, then remove it"
            )
        }
    }
    None
}

/// Locks a record, which succeeds when its supervisor is gone.
///
/// Returns `None` if the record is closed. Without `wait`, also if another process holds the lock.
pub(super) fn lock_record(path: &Path, wait: bool) -> io::Result<Option<Flock<File>>> {
    let mut file = match open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mode = match wait {
        true => FlockArg::LockExclusive,
        false => FlockArg::LockExclusiveNonblock,
    };
    loop {
        file = match Flock::lock(file, mode) {
            Ok(file) => return Ok(is_at(&file, path).then_some(file)),
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((file, Errno::EINTR)) => file,
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

/// Returns whether a process holds the lock of a record. Returns false if there is no such file.
fn is_locked(path: &Path) -> io::Result<bool> {
    // Not for writing: its close would wake a process that watches for `IN_CLOSE_WRITE`.
    let mut options = File::options();
    let options = options.read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK);
    let file = match options.open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_) => Ok(false),
        Err((_, Errno::EWOULDBLOCK)) => Ok(true),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Returns whether the path still names this file.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let device_and_inode = |meta: fs::Metadata| (meta.dev(), meta.ino());
    let opened = file.metadata().map(device_and_inode).ok();
    opened.is_some() && opened == fs::symlink_metadata(path).map(device_and_inode).ok()
}

#[cfg(test)]
mod tests;
