//! A cgroup that a command has for itself, below the one that this process is in.
//!
//! Whoever is in there is the run's, whatever has become of its parents: so that also those are found who have lost all
//! lineage when this process is killed, and that what may not be signalled, as it runs under another user id, is ended all the
//! same (`cgroup.kill`). No controller is switched on for it, so that there may be processes in the cgroup above.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys::cgroup::{self, Cgroup};
use reaper_host::sys::child;

/// What its name begins with. It is none that systemd would give to a unit.
const NAME: &str = "reaper-run-";
/// Who has ended may be in it for an instant more.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a command cannot have a cgroup for itself.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error(
        "a cgroup for the command cannot be made: none of version 2 is mounted here that this process is in; mount that (mount \
         -t cgroup2 none /sys/fs/cgroup), or leave --cgroup out"
    )]
    NotShown,
    #[error("a cgroup for the command cannot be made in {}: {source}{}", directory.display(), hint(source))]
    Make {
        directory: PathBuf,
        source: io::Error,
    },
    #[error(
        "a cgroup for the command cannot be made in {}: that is one of threads, which holds no whole processes; start this in \
         another, or leave --cgroup out", directory.display()
    )]
    Threaded { directory: PathBuf },
    #[error("the command cannot enter its cgroup {}: {source}{}", directory.display(), hint(source))]
    Enter {
        directory: PathBuf,
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EACCES | Errno::EPERM) => {
            ": it is not delegated to this user; start this in one that is (systemd-run --user --scope -p Delegate=yes reaper run \
             --cgroup ...), or leave --cgroup out"
        }
        Some(Errno::EROFS) => {
            ": cgroups are mounted for reading alone, as in most containers; mount them for writing, or leave --cgroup out"
        }
        Some(Errno::EAGAIN) => {
            ": there may be no more below it: raise cgroup.max.descendants and cgroup.max.depth, or leave --cgroup out"
        }
        _ => "",
    }
}

/// The directory of one, by that of the cgroup it is to lie in, and an id.
pub(super) fn directory(above: &Path, id: &str) -> PathBuf {
    above.join(format!("{NAME}{id}"))
}

/// One that this process has made, or another that was killed. Where nobody is in it, it goes with this.
#[derive(Debug)]
pub(super) struct RunCgroup {
    directory: PathBuf,
    cgroup: Arc<Cgroup>,
    id: u64,
    procfs: Procfs,
}

impl RunCgroup {
    /// Makes one.
    ///
    /// # Errors
    /// There is one, or it cannot be made here, or nobody could enter it.
    pub(super) fn make(directory: &Path) -> Result<RunCgroup, CgroupError> {
        let above = directory.parent().unwrap_or(directory);
        let failed = |source| CgroupError::Make {
            directory: above.to_owned(),
            source,
        };
        // Who goes from one cgroup to another needs that of the nearest that both lie in.
        let procs = access(&above.join("cgroup.procs"), AccessFlags::W_OK);
        procs.map_err(|errno| failed(errno.into()))?;
        let made = DirBuilder::new().mode(0o755).create(directory);
        made.map_err(failed)?;
        let opened = Cgroup::open(directory).and_then(|cgroup| Ok((cgroup.id()?, cgroup)));
        let (id, cgroup) = opened.map_err(|source| {
            let _ = cgroup::remove(directory);
            failed(source)
        })?;
        let leaf = RunCgroup {
            directory: directory.to_owned(),
            cgroup: Arc::new(cgroup),
            id,
            procfs: Procfs::default(),
        };
        let kind = fs::read_to_string(leaf.cgroup.file("cgroup.type"));
        match kind.map_err(failed)?.trim_end() {
            "domain" => Ok(leaf),
            _ => Err(CgroupError::Threaded {
                directory: above.to_owned(),
            }),
        }
    }

    /// The one that was made by this name, and had this id; `None` where it has been removed since.
    ///
    /// # Errors
    /// There is no telling: it cannot be opened, or no cgroup of version 2 is mounted above it for this process.
    pub(super) fn find(directory: &Path, id: u64) -> io::Result<Option<RunCgroup>> {
        let cgroup = match Cgroup::open(directory) {
            Ok(cgroup) => cgroup,
            // Those above it may have gone too, but for the one that is mounted.
            Err(error)
                if error.kind() == ErrorKind::NotFound
                    && directory.ancestors().any(cgroup::is_cgroup) =>
            {
                return Ok(None);
            }
            Err(error) => {
                let directory = directory.display();
                return Err(io::Error::other(format!(
                    "its cgroup {directory} is not to be seen from here: {error}"
                )));
            }
        };
        let found = cgroup.id()? == id && is_name(directory);
        Ok(found.then(|| RunCgroup {
            directory: directory.to_owned(),
            cgroup: Arc::new(cgroup),
            id,
            procfs: Procfs::default(),
        }))
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn cgroup(&self) -> Arc<Cgroup> {
        Arc::clone(&self.cgroup)
    }

    /// Has the command be in it before it becomes the program.
    ///
    /// # Errors
    /// This user may not have anybody enter it.
    pub(super) fn take_in(&self, command: &mut Command) -> Result<(), CgroupError> {
        let procs = File::options()
            .write(true)
            .open(self.cgroup.file("cgroup.procs"));
        child::enter_cgroup(command, procs.map_err(|source| self.not_entered(source))?);
        Ok(())
    }

    pub(super) fn not_entered(&self, source: io::Error) -> CgroupError {
        CgroupError::Enter {
            directory: self.directory.clone(),
            source,
        }
    }

    /// Whether this process, or one that it descends from, is in it.
    ///
    /// # Errors
    /// There is no telling.
    pub(super) fn contains_self(&self) -> Result<bool, ProcfsError> {
        for pid in self.procfs.pid_and_ancestors(std::process::id())? {
            let holds = self.cgroup.contains(pid);
            if holds.map_err(|source| self.unread(source))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Who is in it, but for this process and those it descends from: somebody has put them there.
    ///
    /// # Errors
    /// There is no telling.
    pub(super) fn pids(&self) -> Result<HashSet<u32>, ProcfsError> {
        let mut pids = self.all()?;
        if !pids.is_empty() {
            let line = self.procfs.pid_and_ancestors(std::process::id())?;
            pids.retain(|pid| *pid > 1 && !line.contains(pid));
        }
        Ok(pids)
    }

    fn all(&self) -> Result<HashSet<u32>, ProcfsError> {
        self.cgroup.pids().map_err(|source| self.unread(source))
    }

    fn unread(&self, source: io::Error) -> ProcfsError {
        ProcfsError::Read {
            path: self.directory.join("cgroup.procs"),
            source,
        }
    }

    /// Removes it, with those below it. That it cannot be is warned of.
    pub(super) fn remove(self) {
        let empty = self.cgroup.await_empty(PATIENCE);
        let removed = empty.and_then(|_| self.cgroup.clear());
        if let Err(error) = removed.and_then(|()| cgroup::remove(&self.directory)) {
            tracing::warn!("the cgroup {} is left: {error}", self.directory.display());
        }
    }
}

impl Drop for RunCgroup {
    fn drop(&mut self) {
        // It may have been removed, or somebody may be in it.
        let _ = cgroup::remove(&self.directory);
    }
}

/// Removes one of such a name of which nothing is known, if nobody is in it.
pub(super) fn remove_unused(directory: &Path) {
    if is_name(directory) && cgroup::is_cgroup(directory) {
        // Somebody is in there: it is another's.
        let _ = cgroup::remove(directory);
    }
}

fn is_name(directory: &Path) -> bool {
    let name = directory.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(NAME.as_bytes())
}
