//! Gives a command its own cgroup, below the cgroup of this process.
//!
//! Every process in it belongs to the run, whatever has become of its ancestors. So processes are found even if the
//! supervisor was killed and all their ancestors have exited. `cgroup.kill` also ends processes of other users, which
//! this user may not signal. No controller is enabled, so that the parent cgroup may have processes.

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

/// Prefix of the directory name. systemd gives such a name to no unit.
const NAME_PREFIX: &str = "reaper-run-";
/// Time limit until the cgroup is empty: an exited process may be in it for a moment.
const EMPTY_MAX: Duration = Duration::from_secs(1);

/// Reasons why a command cannot have its own cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup of version 2 that contains this process is mounted.
    #[error(
        "cannot create a cgroup for the command, which was not started: no cgroup of version 2 that contains this process \
         is mounted; mount it (mount -t cgroup2 none /sys/fs/cgroup), or omit --cgroup"
    )]
    NotVisible,
    /// The cgroup cannot be created.
    #[error(
        "cannot create a cgroup for the command, which was not started, in {}: {}",
        directory.display(), advised(source)
    )]
    Create {
        /// Directory of the parent cgroup.
        directory: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The parent cgroup is threaded, so a new one cannot hold whole processes.
    #[error(
        "cannot create a cgroup for the command, which was not started, in {}: that is a threaded cgroup, which holds no \
         whole processes; start reaper in another cgroup, or omit --cgroup", directory.display()
    )]
    Threaded {
        /// Directory of the parent cgroup.
        directory: PathBuf,
    },
    /// The command cannot move to its cgroup.
    #[error(
        "the command was not started, because it cannot enter its cgroup {}: {}",
        directory.display(), advised(source)
    )]
    Enter {
        /// Directory of the command's cgroup.
        directory: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Returns the error for a cgroup that cannot be created or entered, and what the user can do.
fn advised(error: &io::Error) -> String {
    let advice = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EACCES | Errno::EPERM) => {
            "the cgroup is not delegated to this user: start reaper in one that is (systemd-run --user --scope \
             -p Delegate=yes reaper run --cgroup ...), or omit --cgroup"
        }
        Some(Errno::EROFS) => {
            "cgroups are mounted read-only, as in most containers: mount them read-write, or omit --cgroup"
        }
        Some(Errno::EAGAIN) => {
            "its limit on descendants is reached: raise cgroup.max.descendants and cgroup.max.depth, or omit --cgroup"
        }
        _ => "start reaper in another cgroup, or omit --cgroup",
    };
    format!("{error}; {advice}")
}

/// Returns a run's cgroup directory below `parent`.
pub(super) fn directory(parent: &Path, id: &str) -> PathBuf {
    parent.join(format!("{NAME_PREFIX}{id}"))
}

/// Cgroup of a run, created by this process or by a killed supervisor. Removed on drop if it is empty.
#[derive(Debug)]
pub(super) struct RunCgroup {
    directory: PathBuf,
    cgroup: Arc<Cgroup>,
    id: u64,
    procfs: Procfs,
}

impl RunCgroup {
    /// Creates the cgroup.
    ///
    /// # Errors
    /// It exists, cannot be created or is threaded, or this user could move no process into it.
    pub(super) fn create(directory: &Path) -> Result<RunCgroup, CgroupError> {
        let parent = directory.parent().unwrap_or(directory);
        let failed = |source| CgroupError::Create {
            directory: parent.to_owned(),
            source,
        };
        // To move a process, write access to `cgroup.procs` of the common ancestor is needed (cgroups(7)).
        let procs = access(&parent.join("cgroup.procs"), AccessFlags::W_OK);
        procs.map_err(|errno| failed(errno.into()))?;
        let created = DirBuilder::new().mode(0o755).create(directory);
        created.map_err(failed)?;
        let opened = Cgroup::open(directory).and_then(|cgroup| Ok((cgroup.id()?, cgroup)));
        let (id, cgroup) = opened.map_err(|source| {
            let _ = cgroup::remove(directory);
            failed(source)
        })?;
        let cgroup = RunCgroup {
            directory: directory.to_owned(),
            cgroup: Arc::new(cgroup),
            id,
            procfs: Procfs::default(),
        };
        let kind = fs::read_to_string(cgroup.cgroup.file("cgroup.type"));
        match kind.map_err(failed)?.trim_end() {
            "domain" => Ok(cgroup),
            _ => Err(CgroupError::Threaded {
                directory: parent.to_owned(),
            }),
        }
    }

    /// Opens the cgroup that was created with this name and id. Returns `None` if it was removed since, even if another
    /// cgroup has the name now.
    ///
    /// # Errors
    /// It cannot be opened, or this process sees no cgroup of version 2 mounted above it.
    pub(super) fn find(directory: &Path, id: u64) -> io::Result<Option<RunCgroup>> {
        let cgroup = match Cgroup::open(directory) {
            Ok(cgroup) => cgroup,
            // Its ancestors may be removed too, except for the mounted one.
            Err(error)
                if error.kind() == ErrorKind::NotFound
                    && directory.ancestors().any(cgroup::is_cgroup) =>
            {
                return Ok(None);
            }
            Err(error) => {
                let directory = directory.display();
                return Err(io::Error::other(format!(
                    "its cgroup {directory} is not visible here: {error}; repeat this where it is mounted"
                )));
            }
        };
        let found = cgroup.id()? == id && has_run_name(directory);
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

    /// Makes the command enter the cgroup between fork and exec.
    ///
    /// # Errors
    /// This user may not move processes into it.
    pub(super) fn enter_on_start(&self, command: &mut Command) -> Result<(), CgroupError> {
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

    /// Returns whether this process or one of its ancestors is in the cgroup.
    ///
    /// # Errors
    /// The cgroup of a process cannot be read.
    pub(super) fn contains_self(&self) -> Result<bool, ProcfsError> {
        for pid in self.procfs.pid_and_ancestors(std::process::id())? {
            let contains = self.cgroup.contains(pid);
            if contains.map_err(|source| self.read_error(source))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the pids in the cgroup, without pid 1, this process and its ancestors, which a user may have moved
    /// there.
    ///
    /// # Errors
    /// `cgroup.procs` or /proc cannot be read.
    pub(super) fn pids(&self) -> Result<HashSet<u32>, ProcfsError> {
        let mut pids = self.all()?;
        if !pids.is_empty() {
            let own = self.procfs.pid_and_ancestors(std::process::id())?;
            pids.retain(|pid| *pid > 1 && !own.contains(pid));
        }
        Ok(pids)
    }

    fn all(&self) -> Result<HashSet<u32>, ProcfsError> {
        self.cgroup.pids().map_err(|source| self.read_error(source))
    }

    fn read_error(&self, source: io::Error) -> ProcfsError {
        ProcfsError::Read {
            path: self.directory.join("cgroup.procs"),
            source,
        }
    }

    /// Waits at most [`EMPTY_MAX`] until the cgroup is empty, then removes it and those below it. Logs a warning if
    /// that fails.
    pub(super) fn remove(self) {
        let empty = self.cgroup.await_empty(EMPTY_MAX);
        let removed = empty.and_then(|_| self.cgroup.clear());
        if let Err(error) = removed.and_then(|()| cgroup::remove(&self.directory)) {
            tracing::warn!(
                "cannot remove the cgroup {}: {error}; remove it with rmdir when its processes have exited",
                self.directory.display()
            );
        }
    }
}

impl Drop for RunCgroup {
    fn drop(&mut self) {
        // Fails if it is removed already, or has processes.
        let _ = cgroup::remove(&self.directory);
    }
}

/// Removes a cgroup with the name of a run, though its id was not recorded. Does nothing if it has processes or another
/// name.
pub(super) fn remove_unused(directory: &Path) {
    if has_run_name(directory) && cgroup::is_cgroup(directory) {
        // Fails if it has processes. Then they belong to something else.
        let _ = cgroup::remove(directory);
    }
}

fn has_run_name(directory: &Path) -> bool {
    let name = directory.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(NAME_PREFIX.as_bytes())
}
