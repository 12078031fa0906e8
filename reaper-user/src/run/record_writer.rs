//! Writing a run down, by its owner, and claiming how it ends, by whomever.

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
    preview,
};
use super::runs::{self, CLOSED, LOG, NEW, OPEN, RecordError, RecordedRun, Runs};
use super::{Run, RunOutcome};
use crate::export::write_object;
use reaper_host::sys::host::boot_id;
use reaper_host::sys::{self, child};

/// Letters that are not taken for another, in an id.
const LETTERS: &[u8; 32] = b"abcdefghijkmnopqrstuvwxyz2345679";
const ID_LENGTH: usize = 6;
/// Bytes on the disk that are a run's from the start, for what is to be added: so it can be stopped, and what has come of it be
/// told, where the disk has become full meanwhile.
const ROOM: usize = 4096;

/// A run of this process that is written down. As long as this is there, all others know that the run has its owner.
#[derive(Debug)]
pub struct RecordWriter {
    runs: Runs,
    file: Flock<File>,
    path: PathBuf,
    id: String,
    log: Option<File>,
    /// Somebody may ask for what has come of it who is not told by this process.
    lasting: bool,
}

impl Runs {
    /// Writes down a run that is to begin. What this gives is on the disk.
    pub(super) fn begin(&self, run: &Run) -> Result<RecordWriter, RecordError> {
        let failed = RecordError::file(self.dir());
        let _once = match &run.name {
            Some(name) => {
                let lock = self.lock()?;
                self.check_name_free(name)?;
                Some(lock)
            }
            None => None,
        };
        let (id, mut file) = self.reserve().map_err(&failed)?;
        let path = self.path(&id, OPEN);
        let new = self.path(&id, NEW);
        let mut log = None;
        let line = Line::Run(Box::new(start(run, &id).map_err(&failed)?));
        let written = || -> io::Result<()> {
            let mut bytes = Vec::new();
            write_object(&mut bytes, &line)?;
            reserve_room(&file, bytes.len() + ROOM)?;
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
                // Each may not be there.
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
            lasting: run.detached || run.name.is_some(),
        })
    }

    fn check_name_free(&self, name: &str) -> Result<(), RecordError> {
        let taken = |known: &RecordedRun| {
            known.record.result.is_none()
                && known.record.header.name.as_deref() == Some(name)
                // One that was killed with its container cannot be closed from here.
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

    /// An id that no run has, and the file of it, which nobody else takes for a run yet.
    fn reserve(&self) -> io::Result<(String, Flock<File>)> {
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
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where the output of a detached one is to go.
    pub fn log(&self) -> Option<&File> {
        self.log.as_ref()
    }

    /// Has the command write down who it is as it starts.
    pub(super) fn note(&self, command: &mut Command) -> io::Result<()> {
        child::note_start(command, self.file.try_clone()?);
        Ok(())
    }

    /// Writes down that a cgroup has been made for a command of it.
    pub(super) fn note_cgroup(&self, id: u64) -> io::Result<()> {
        runs::append(&self.file, &Line::Cgroup(CgroupCreated { id }))
    }

    /// Whether somebody has claimed it who is not its owner.
    pub(super) fn is_stop_requested(&self) -> bool {
        let record = self.record();
        let claim = record.and_then(|record| record.claim);
        claim.is_some_and(|claim| claim.by != std::process::id())
    }

    /// Decides how it is recorded, unless somebody has before: gives what holds.
    pub(super) fn claim(&self, outcome: RunOutcome) -> RunOutcome {
        match claim(&self.file, outcome) {
            Ok(record) => record.outcome().unwrap_or(outcome),
            Err(error) => {
                tracing::debug!("run {}: cannot be claimed: {error}", self.id);
                outcome
            }
        }
    }

    fn record(&self) -> Option<RunRecord> {
        RunRecord::parse(&runs::content(&self.file).ok()?).ok()
    }

    /// Writes down what has come of it, and lets it go.
    pub(super) fn close(self, over: RunResult) -> io::Result<()> {
        close(&self.file, &self.path, over, self.lasting)?;
        self.runs.prune_some();
        Ok(())
    }
}

/// Has the disk keep so many bytes for a file. Some file systems cannot.
fn reserve_room(file: &File, bytes: usize) -> io::Result<()> {
    let bytes = bytes as i64; // < 1 MiB
    match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, bytes) {
        Err(errno @ (Errno::ENOSPC | Errno::EDQUOT)) => Err(errno.into()),
        _ => Ok(()),
    }
}

/// Adds a claim to a record, unless there is one: all that is in it then.
pub(super) fn claim(file: &File, outcome: RunOutcome) -> io::Result<RunRecord> {
    let parse = || {
        let record = RunRecord::parse(&runs::content(file)?);
        record.map_err(io::Error::other)
    };
    let record = parse()?;
    if record.outcome().is_some() {
        return Ok(record);
    }
    let by = std::process::id();
    runs::append(file, &Line::Claim(Claim { outcome, by }))?;
    parse()
}

/// Writes the last line of a record that is locked, and gives it the name of one that is closed: also where the line cannot be
/// written, as nothing is left to be done for it. With `lasting` the line is on the disk then.
pub(super) fn close(file: &File, path: &Path, over: RunResult, lasting: bool) -> io::Result<()> {
    let mut written = runs::append(file, &Line::Over(Box::new(over)));
    if lasting {
        written = written.and_then(|()| file.sync_data());
    }
    fs::rename(path, path.with_extension(CLOSED)).and(written)
}

fn start(run: &Run, id: &str) -> io::Result<RunHeader> {
    let program = std::iter::once(run.command.get_program());
    let (command, truncated) = preview(program.chain(run.command.get_args()));
    let own = std::process::id();
    let start_ns = child::own_start(&mut [0; 1024]);
    let start_ns =
        start_ns.ok_or_else(|| io::Error::other("/proc does not tell of this process"))?;
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
        pid_namespace: sys::non_initial_pid_namespace()?,
        wrapper: RecordedProcess { pid: own, start_ns },
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
        cgroup: run.parent_cgroup.as_ref().map(|above| {
            let directory = cgroup::directory(above, id);
            directory.to_string_lossy().into_owned()
        }),
        detached: run.detached,
    })
}

/// It begins with a letter, so that it is no pid.
pub(super) fn random_id() -> String {
    let mut random = RandomState::new().hash_one(std::process::id());
    let mut id = String::new();
    while id.len() < ID_LENGTH {
        let letter = char::from(LETTERS[(random % 32) as usize]);
        random /= 32;
        if !id.is_empty() || letter.is_ascii_alphabetic() {
            id.push(letter);
        } else if random == 0 {
            random = RandomState::new().hash_one(0);
        }
    }
    id
}
