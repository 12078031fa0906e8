//! The runs of a user, as they are written down: who runs now, and what has become of those before.
//!
//! Each has a file in a directory that is its owner's alone: `ID.run` while it is open, `ID.over` when it has been closed, and
//! `ID.log` beside it where the output of a detached one goes. What is in it tells [`super::record`].
//!
//! # Who may write
//! Whoever owns a run holds a lock on its file (flock(2)), which the kernel gives back however that process ends. Who
//! gets the lock has the word: a file `ID.run` that is not locked is one whose owner is gone. Two kinds of lines may be
//! added without: `command`, by the command that is about to begin, and `claim`, by whoever would have the run end. The
//! kernel puts lines that are appended one after the other, so that all see the same claim first, and by that alone it is decided
//! how the run is recorded: a stop that comes as the time runs out, or as the command ends, gives one outcome.
//!
//! # What may be cut short
//! - *Before the file has its name*: it is `ID.new`, and nothing has been started. Somebody removes it later.
//! - *Between that and the start of the command*: the run is closed as one that never began.
//! - *Between the making of its cgroup and the start of the command*: that of its name is removed, if nobody is in it.
//! - *At the start*: the command itself writes down who it is before it becomes the program, and has the lock with its
//!   owner until then. So none is started of which that is not known, but where the disk has become full.
//! - *While it runs*: the next to come ends the command, and what descends from it; they are made to stand still first, so that
//!   nothing is born unseen. What follows on the end, `--on-success` and `--on-failure`, is written down as the command is, and
//!   ended as it is. Where the run has a cgroup for itself, whoever is in there is ended too, and the cgroup removed, if that of
//!   the name is still the one that was made. Else some live on, unless a service runs, which knows them: who had lost their
//!   own parent by then, and were adopted by the owner alone, so that nobody can tell them from a stranger's; who are started by
//!   one of them as it is asked to end, and leaves at once; and what a `--done-when` that was being asked has started: itself it
//!   is killed by the kernel with its owner, and is not written down, as it comes again and again.
//! - *Between a claim and what follows on it*: the run is closed by what was claimed. Who has claimed a stop and was killed before the
//!   owner was told has decided how the run is recorded, and whoever stops it next tells the owner.
//! - *While it is being ended*: the same as while it runs; who was asked to end before is asked again, and who was made to
//!   stand still by one that was killed in turn does so until then.
//! - *Between the last line and the new name*: the run is over, and somebody else gives the name.
//! - *The disk*: there is room in each record for what follows its first line, where the file system can keep some. Where a claim
//!   cannot be written all the same, what is to be ended is ended without, and that is said.
//! - *The machine*: a run is on the disk before its command begins, and what has come of it before its owner leaves, where it is
//!   detached or has a name. The last line of others, whose caller is told, is not waited for, which would take as long as all the
//!   rest: if the power fails within seconds of the end, such a run may be found open, or without that line. Of another boot nobody
//!   is looked for, and nothing is signalled: all that is known then is what was claimed.
//! - *Two machines*: where others may write to the file system, their locks may not be known here, and their boots and pids
//!   are others. Nothing is written down there ([`RecordError::Remote`]).

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
use reaper_host::sys::host::boot_id;
use reaper_host::sys::{owner, paths, remote, xdg};

/// How many of those that are closed are kept, and for how long.
pub const CLOSED_MAX: usize = 100;
pub const CLOSED_AGE: Duration = Duration::from_secs(30 * 86_400);
/// How many there may be more before they are looked through.
const CLOSED_SLACK: usize = 20;
/// What a run's file is called while it is open, when it is closed, before it has been written, and where it cannot be read.
pub(super) const OPEN: &str = "run";
pub(super) const CLOSED: &str = "over";
pub(super) const NEW: &str = "new";
const DAMAGED: &str = "damaged";
/// Where its output goes.
pub(super) const LOG: &str = "log";
/// More than any record has.
const FILE_MAX: u64 = 1 << 20;
/// How long the writing of a new one may take.
const WRITING_MAX: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Clone, Debug)]
pub struct Runs {
    dir: PathBuf,
}

/// Why a run cannot be recorded, or none be found.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("runs cannot be recorded: no directory is known: set HOME or XDG_STATE_HOME")]
    NoPlace,
    #[error("runs cannot be recorded: {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(
        "runs cannot be recorded: others than you may write to {} (owner {uid}, mode {mode:04o}), and what is there says who \
         is ended: take that right away (chmod go-w, chown), or set XDG_STATE_HOME to another directory", dir.display()
    )]
    Exposed { dir: PathBuf, uid: u32, mode: u32 },
    #[error(
        "runs cannot be recorded: {} is on a network file system ({kind}), where the runs of other machines may be: set \
         XDG_STATE_HOME to a local directory", dir.display()
    )]
    Remote { dir: PathBuf, kind: &'static str },
    #[error(
        "the name {name} is taken by run {id}, which lives: `reaper stop {name}` ends it, or choose another"
    )]
    NameTaken { name: String, id: String },
    #[error(
        "there is no run {0}, by id, beginning of an id, or name; only what `reaper run` has started is one: `reaper ps --all` lists them"
    )]
    Unknown(String),
    #[error("{word} may be any of the runs {}: write more of its id", ids.join(", "))]
    Ambiguous { word: String, ids: Vec<String> },
}

impl RecordError {
    pub(super) fn file(path: &Path) -> impl Fn(io::Error) -> RecordError {
        move |source| RecordError::File {
            path: path.to_owned(),
            source,
        }
    }
}

/// A run that is written down.
#[derive(Clone, Debug)]
pub struct RecordedRun {
    pub record: RunRecord,
    pub(super) path: PathBuf,
}

impl RecordedRun {
    pub fn id(&self) -> &str {
        &self.record.header.id
    }

    /// Whether it has an owner that lives.
    ///
    /// # Errors
    /// That cannot be told.
    pub fn has_supervisor(&self) -> io::Result<bool> {
        is_locked(&self.path)
    }

    /// Where the output of a detached one is.
    pub fn log(&self) -> PathBuf {
        self.path.with_extension(LOG)
    }
}

impl Runs {
    /// Where those of this user are: `$XDG_STATE_HOME/reaper/runs`, by default `~/.local/state/reaper/runs`; root's are in
    /// `/var/lib/reaper/runs` unless that variable is set.
    ///
    /// # Errors
    /// As [`Runs::open`].
    pub fn of_user() -> Result<Runs, RecordError> {
        let roots = nix::unistd::geteuid().is_root() && xdg::absolute("XDG_STATE_HOME").is_none();
        let state = match roots {
            true => Some(PathBuf::from(paths::STATE)),
            false => xdg::state_home().map(|home| home.join("reaper")),
        };
        Runs::open(&state.ok_or(RecordError::NoPlace)?.join("runs"))
    }

    /// Those in a directory, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made or entered, or others may write to it, or other machines.
    pub fn open(dir: &Path) -> Result<Runs, RecordError> {
        let mut builder = DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(dir);
        made.map_err(RecordError::file(dir))?;
        // What a link leads to is not what was made for this.
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
        // Whoever could put another directory in its place would say whom root ends.
        let above = dir
            .ancestors()
            .skip(1)
            .filter(|_| nix::unistd::geteuid().is_root());
        for above in above.filter(|above| !above.as_os_str().is_empty()) {
            let meta = fs::metadata(above).map_err(RecordError::file(above))?;
            if owner::allows_replacement(&meta) {
                return exposed(above, &meta);
            }
        }
        let remote = remote::kind(dir).map_err(|errno| RecordError::file(dir)(errno.into()))?;
        if let Some(kind) = remote {
            let dir = dir.to_owned();
            return Err(RecordError::Remote { dir, kind });
        }
        if meta.mode() & 0o077 != 0 {
            // What was there may be root's.
            let _ = fs::set_permissions(dir, Permissions::from_mode(0o700));
        }
        Ok(Runs {
            dir: dir.to_owned(),
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// All that are open, and with `closed` those that are not, by the time of their start. One that cannot be read is set
    /// aside, and that is warned of.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn list(&self, closed: bool) -> Result<Vec<RecordedRun>, RecordError> {
        let mut all = Vec::new();
        for path in self.files()? {
            let kind = path.extension().unwrap_or_default();
            if kind == OPEN || closed && kind == CLOSED {
                // It may have been closed since the directory was read.
                let ended = || read(&path.with_extension(CLOSED)).filter(|_| closed);
                all.extend(read(&path).or_else(ended));
            }
        }
        // Or while it was read, and be there by both names.
        let open = |known: &RecordedRun| known.record.result.is_none();
        all.sort_by(|a, b| (a.id(), open(a)).cmp(&(b.id(), open(b))));
        all.dedup_by(|a, b| a.id() == b.id());
        all.sort_by_key(|known| known.record.header.started);
        Ok(all)
    }

    /// The run that is meant: by its id, its name, or the beginning of its id. Of those of a name it is the one that is
    /// open, or else the last.
    ///
    /// # Errors
    /// It is none, or may be several.
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
        let mut like = all
            .iter()
            .filter(|known| !word.is_empty() && known.id().starts_with(word));
        match (like.next(), like.next()) {
            (Some(known), None) => Ok(known.clone()),
            (None, _) => Err(RecordError::Unknown(word.to_owned())),
            (Some(one), Some(other)) => Err(RecordError::Ambiguous {
                word: word.to_owned(),
                ids: {
                    let like = [one, other].into_iter().chain(like);
                    let mut ids: Vec<_> = like.map(|known| known.id().to_owned()).collect();
                    ids.sort_unstable();
                    ids
                },
            }),
        }
    }

    /// Reads a run anew, wherever it is by now.
    ///
    /// # Errors
    /// It is not there any more.
    pub fn reload(&self, known: &RecordedRun) -> Result<RecordedRun, RecordError> {
        for kind in [OPEN, CLOSED, OPEN] {
            if let Some(known) = read(&known.path.with_extension(kind)) {
                return Ok(known);
            }
        }
        Err(RecordError::Unknown(known.id().to_owned()))
    }

    /// Removes those that were closed long ago, or before many others, and what was begun and never came to be.
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

    /// The same where it is time to.
    pub(super) fn prune_some(&self) {
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

    /// All that is there.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>, RecordError> {
        let entries = fs::read_dir(&self.dir).map_err(RecordError::file(&self.dir))?;
        Ok(entries.flatten().map(|entry| entry.path()).collect())
    }

    /// Held while it is made sure that something is there once.
    pub(super) fn lock(&self) -> Result<Flock<File>, RecordError> {
        let dir = File::open(&self.dir).map_err(RecordError::file(&self.dir))?;
        let locked = Flock::lock(dir, FlockArg::LockExclusive);
        locked.map_err(|(_, errno)| RecordError::file(&self.dir)(errno.into()))
    }
}

fn has_record(log: &Path) -> bool {
    [OPEN, CLOSED, NEW]
        .iter()
        .any(|kind| log.with_extension(kind).exists())
}

/// Opens a record: what is read is whole lines, and what is written is appended. Where nothing can be written it is for reading
/// alone, and can be locked all the same.
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
        return Err(io::Error::other("it is no ordinary file"));
    }
    Ok(file)
}

/// All that a record says by now.
pub(super) fn content(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Adds a line, apart from one before it that could not be written to its end.
pub(super) fn append(mut file: &File, line: &super::record::Line) -> io::Result<()> {
    let mut bytes = vec![b'\n'];
    write_object(&mut bytes, line)?;
    match file.write(&bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(ErrorKind::StorageFull.into()),
    }
}

/// The run in a file; `None` where it is gone, or cannot be used.
fn read(path: &Path) -> Option<RecordedRun> {
    let bytes = match open(path).and_then(|file| content(&file)) {
        Ok(bytes) => bytes,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!("the record {} cannot be read: {error}", path.display());
            }
            return None;
        }
    };
    let mut record = usable(path, &bytes)?;
    if record.result.is_none() && path.extension().unwrap_or_default() == CLOSED {
        let outcome = record.outcome().unwrap_or(RunOutcome::Death);
        let why = match record.header.boot_id == boot_id(Path::new("/")) {
            true => UNWRITTEN,
            false => OTHER_BOOT,
        };
        record.result = Some(RunResult::unobserved(outcome, why));
    }
    Some(RecordedRun {
        record,
        path: path.to_owned(),
    })
}

/// What is in it, if that can be used; what is damaged is set aside.
pub(super) fn usable(path: &Path, bytes: &[u8]) -> Option<RunRecord> {
    let name = path.display();
    let why = match RunRecord::parse(bytes) {
        // It tells of who is ended: what is in a file is to be what it is called.
        Ok(record) if path.file_stem() == Some(record.header.id.as_ref()) => return Some(record),
        Ok(_) => RecordParseError::Damaged,
        Err(why @ RecordParseError::Later(_)) => {
            tracing::warn!("the record {name} is left alone: {why}");
            return None;
        }
        Err(why) => why,
    };
    let aside = path.with_extension(DAMAGED);
    match fs::rename(path, &aside) {
        Ok(()) => tracing::warn!(
            "the record {name} cannot be used: {why}; it is set aside as {}, and what it was of is not ended",
            aside.display()
        ),
        // Somebody else has.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!("the record {name} cannot be used: {why}; nor set aside: {error}")
        }
    }
    None
}

/// Locks a record: then its owner is gone. `None` where somebody has it and that is not to be waited for, or where it is
/// closed meanwhile.
pub(super) fn lock_record(path: &Path, wait: bool) -> io::Result<Option<Flock<File>>> {
    let mut file = match open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let how = match wait {
        true => FlockArg::LockExclusive,
        false => FlockArg::LockExclusiveNonblock,
    };
    loop {
        file = match Flock::lock(file, how) {
            Ok(file) => return Ok(is_at(&file, path).then_some(file)),
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((file, Errno::EINTR)) => file,
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

/// Whether somebody has it locked.
fn is_locked(path: &Path) -> io::Result<bool> {
    // Not for writing: whoever waits for it to be closed by its writer would be woken by this.
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

/// Whether a file is still what is called so.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let of = |meta: fs::Metadata| (meta.dev(), meta.ino());
    let its = file.metadata().map(of).ok();
    its.is_some() && its == fs::symlink_metadata(path).map(of).ok()
}

#[cfg(test)]
mod tests;
