//! Writes the record of a run. Also writes claims on its outcome, which any process may make.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};

use super::cgroup;
use super::record::{
    CgroupCreated, Claim, Line, RecordedProcess, RunHeader, RunRecord, RunResult, SCHEMA, millis,
    truncate_command,
};
use super::runs::{self, CLOSED, LOG, NEW, OPEN, RecordError, RecordedRun, Runs, pid_namespace};
use super::{Run, RunOutcome};
use crate::export::write_object;
use reaper_host::sys::child;
use reaper_host::sys::host::boot_id;

/// Characters of an id, without those that look alike.
const ID_CHARS: &[u8; 32] = b"abcdefghijkmnopqrstuvwxyz2345679";
const ID_LENGTH: usize = 6;
/// Number of bytes that are reserved on the disk for later lines. So a run can be stopped and its result recorded even
/// if the disk has become full.
const RESERVED: usize = 4096;

/// Record of a run of this process. Holds the lock, which shows other processes that the run has a supervisor.
#[derive(Debug)]
pub struct RecordWriter {
    runs: Runs,
    file: Flock<File>,
    path: PathBuf,
    id: String,
    /// File for the output of a detached run.
    log: Option<File>,
    /// Whether the result must be on the disk when the record is closed, because others may ask for it.
    durable: bool,
}

impl Runs {
    /// Creates and locks the record of a new run, and syncs it to the disk. Creates the log file of a detached run.
    ///
    /// # Errors
    /// The name is in use by an open run, or the files cannot be written.
    pub(super) fn create_record(&self, run: &Run) -> Result<RecordWriter, RecordError> {
        let failed = RecordError::file(self.dir());
        let _name_lock = match &run.name {
            Some(name) => {
                let lock = self.lock()?;
                self.check_name_free(name)?;
                Some(lock)
            }
            None => None,
        };
        let (id, mut file) = self.create_file().map_err(&failed)?;
        let path = self.path(&id, OPEN);
        let new = self.path(&id, NEW);
        let mut log = None;
        let line = Line::Run(Box::new(header(run, &id).map_err(&failed)?));
        let written = || -> io::Result<()> {
            let mut bytes = Vec::new();
            write_object(&mut bytes, &line)?;
            reserve_space(&file, bytes.len() + RESERVED)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            if run.detached {
                let mut options = File::options();
                let options = options.append(true).create_new(true).mode(0o600);
                log = Some(options.open(self.path(&id, LOG))?);
            }
            fs::rename(&new, &path)?;
            File::open(self.dir())?.sync_all()
        }();
        if let Err(error) = written {
            for path in [&new, &path, &self.path(&id, LOG)] {
                // Fails for those that do not exist.
                let _ = fs::remove_file(path);
            }
            return Err(failed(error));
        }
        Ok(RecordWriter {
            runs: self.clone(),
            file,
            path,
            id,
            log,
            durable: run.detached || run.name.is_some(),
        })
    }

    /// Checks that no open run has this name. Ignores open runs whose supervisor is gone.
    ///
    /// # Errors
    /// The name is in use, or the runs cannot be listed.
    fn check_name_free(&self, name: &str) -> Result<(), RecordError> {
        let taken = |known: &RecordedRun| {
            known.record.result.is_none()
                && known.record.header.name.as_deref() == Some(name)
                // A run that was killed with its container stays open, because it cannot be closed from here.
                && known.has_supervisor().unwrap_or(true)
        };
        match self.list(false)?.into_iter().find(taken) {
            Some(known) => Err(RecordError::NameTaken {
                name: name.to_owned(),
                id: known.record.header.id,
            }),
            None => Ok(()),
        }
    }

    /// Creates and locks the file of an unused id. Its extension does not mark it as a run yet.
    fn create_file(&self) -> io::Result<(String, Flock<File>)> {
        loop {
            let id = random_id();
            let mut options = File::options();
            let options = options.read(true).append(true).create_new(true).mode(0o600);
            let file = match options.open(self.path(&id, NEW)) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            let used = |kind| fs::symlink_metadata(self.path(&id, kind)).is_ok();
            if used(OPEN) || used(CLOSED) || used(LOG) {
                let _ = fs::remove_file(self.path(&id, NEW));
                continue;
            }
            return match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => Ok((id, file)),
                Err((_, errno)) => {
                    let _ = fs::remove_file(self.path(&id, NEW));
                    Err(errno.into())
                }
            };
        }
    }
}

impl RecordWriter {
    /// Returns the id of the run.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the file for the output of a detached run; `None` for other runs.
    pub fn log(&self) -> Option<&File> {
        self.log.as_ref()
    }

    /// Makes the command append its pid and start time to the record before its exec.
    pub(super) fn record_start(&self, command: &mut Command) -> io::Result<()> {
        child::record_start(command, self.file.try_clone()?);
        Ok(())
    }

    /// Records that a cgroup was created for a command.
    pub(super) fn record_cgroup(&self, id: u64) -> io::Result<()> {
        runs::append(&self.file, &Line::Cgroup(CgroupCreated { id }))
    }

    /// Returns whether another process has claimed the outcome of the run. Returns false if the record cannot be read.
    pub(super) fn is_stop_requested(&self) -> bool {
        let record = self.record();
        let claim = record.and_then(|record| record.claim);
        claim.is_some_and(|claim| claim.by != Some(std::process::id()))
    }

    /// Claims an outcome for the run. Returns the outcome of the first claim, which may be another. If the claim cannot
    /// be written, returns `outcome`.
    pub(super) fn claim(&self, outcome: RunOutcome) -> RunOutcome {
        match claim(&self.file, outcome) {
            Ok(record) => record.outcome().unwrap_or(outcome),
            Err(error) => {
                tracing::debug!("run {}: cannot write a claim: {error}", self.id);
                outcome
            }
        }
    }

    fn record(&self) -> Option<RunRecord> {
        RunRecord::parse(&runs::content(&self.file).ok()?).ok()
    }

    /// Writes the result, renames the record to that of a closed run, and releases its lock. Prunes old records if
    /// there are too many.
    pub(super) fn close(self, result: RunResult) -> io::Result<()> {
        close(&self.file, &self.path, result, self.durable)?;
        self.runs.prune_if_many();
        Ok(())
    }
}

/// Reserves disk space for a file. Does nothing on file systems that do not support that.
fn reserve_space(file: &File, bytes: usize) -> io::Result<()> {
    let bytes = bytes as i64; // < 1 MiB
    match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, bytes) {
        Err(errno @ (Errno::ENOSPC | Errno::EDQUOT)) => Err(errno.into()),
        _ => Ok(()),
    }
}

/// Adds a claim of this process to a record without a claim and a result. Returns the resulting record, in which the
/// claim of another process may be the first.
pub(super) fn claim(file: &File, outcome: RunOutcome) -> io::Result<RunRecord> {
    let parse = || {
        let record = RunRecord::parse(&runs::content(file)?);
        record.map_err(io::Error::other)
    };
    let record = parse()?;
    if record.outcome().is_some() {
        return Ok(record);
    }
    let by = Some(std::process::id());
    runs::append(file, &Line::Claim(Claim { outcome, by }))?;
    parse()
}

/// Writes the result to a locked record, and renames it to that of a closed run. With `durable` it syncs the result.
///
/// Renames the record even if the result cannot be written, because nothing is left to do for the run.
pub(super) fn close(file: &File, path: &Path, result: RunResult, durable: bool) -> io::Result<()> {
    let mut written = runs::append(file, &Line::Over(Box::new(result)));
    if durable {
        written = written.and_then(|()| file.sync_data());
    }
    fs::rename(path, path.with_extension(CLOSED)).and(written)
}

fn header(run: &Run, id: &str) -> io::Result<RunHeader> {
    let program = std::iter::once(run.command.get_program());
    let (command, truncated) = truncate_command(program.chain(run.command.get_args()));
    let own = std::process::id();
    let start_ns = child::own_start(&mut [0; 1024]);
    let start_ns = start_ns.ok_or_else(|| {
        io::Error::other("cannot read /proc/self/stat; mount the /proc of this pid namespace")
    })?;
    let cwd = match run.command.get_current_dir() {
        Some(cwd) => cwd.to_owned(),
        None => std::env::current_dir().unwrap_or_default(),
    };
    Ok(RunHeader {
        schema: SCHEMA,
        id: id.to_owned(),
        name: run.name.clone(),
        session: run.session.clone(),
        agent: run.agent.clone(),
        boot_id: boot_id(Path::new("/")),
        pid_namespace: pid_namespace()?,
        supervisor: RecordedProcess {
            pid: Some(own),
            start_ns,
        },
        uid: nix::unistd::geteuid().as_raw(),
        command,
        truncated,
        cwd: cwd.to_string_lossy().into_owned(),
        started: Timestamp::now(),
        timeout_ms: run.timeout.map(millis),
        idle_ms: run.idle.map(millis),
        grace_ms: millis(run.times.grace),
        signal: run.signal as i32,
        leader_first: run.leader_first,
        limit: run.limit.as_ref().map(|limit| limit.group.clone()),
        cgroup: run.parent_cgroup.as_ref().map(|parent| {
            let directory = cgroup::directory(parent, id);
            directory.to_string_lossy().into_owned()
        }),
        detached: run.detached,
    })
}

/// Returns a random id of [`ID_LENGTH`] characters, which may be in use. It begins with a letter, so that it cannot be
/// taken for a pid.
pub(super) fn random_id() -> String {
    let mut random = RandomState::new().hash_one(std::process::id());
    let mut id = String::new();
    while id.len() < ID_LENGTH {
        let letter = char::from(ID_CHARS[(random % 32) as usize]);
        random /= 32;
        if !id.is_empty() || letter.is_ascii_alphabetic() {
            id.push(letter);
        } else if random == 0 {
            random = RandomState::new().hash_one(0);
        }
    }
    id
}
