//! Reads /proc: the pre-existing processes, and those that a source may have missed.
//!
//! A process is read through one directory handle, so all facts are about one process even if its pid is reused
//! meanwhile. The exit of a process is a result, not an error.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, readlinkat};
use nix::sys::stat::Mode;
use reaper_common::ARGV_MAX;

pub use super::snapshot::{Liveness, ProcessMemory, ProcessReading, ProcfsError, Snapshot, Zombie};
use crate::sys::host::Mounts;
pub(crate) use crate::sys::proc_file as parse;
use crate::sys::proc_file::{Stat, field, is_gone, namespace_init, set_argv, uids};
use crate::sys::{self, cgroup};
use reaper_model::event::{Image, ProcEntry};

pub mod descendants;
pub mod readers;
mod table;
#[cfg(test)]
mod tests;

/// Length in bytes of the kernel's process names. /proc shows longer names of kernel workers.
const COMM_MAX: usize = 15;
/// Bound on the size of the files read here, except `cmdline`.
const FILE_MAX: usize = 128 << 10;
/// Suffix that the kernel appends to the path of an executable that has been removed or replaced.
const DELETED: &[u8] = b" (deleted)";

/// Reader of a /proc. Has no mutable state, so threads can share it.
#[derive(Clone, Debug)]
pub struct Procfs {
    root: PathBuf,
    /// Mount points of cgroup v2; none if the host does not use it to group processes.
    cgroups: Mounts,
}

impl Default for Procfs {
    fn default() -> Procfs {
        Procfs::new("/proc")
    }
}

impl Procfs {
    /// Returns a reader of the /proc that is mounted at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Procfs {
        let root = root.into();
        let mounts = std::fs::read(root.join("self/mountinfo")).unwrap_or_default();
        let own = std::fs::read(root.join("self/cgroup"));
        let cgroups = match own.is_ok_and(|own| !cgroup::paths_agree(&own)) {
            true => Mounts::default(),
            false => Mounts::parse(&mounts).of_kind("cgroup2"),
        };
        Procfs { root, cgroups }
    }

    /// Returns the mount point.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Reads one process in full. Blocks while the process holds a lock that reading its command line needs.
    ///
    /// # Errors
    /// The process exists, but one of its files cannot be read or parsed. The error names the file.
    pub fn read(&self, pid: u32) -> Result<ProcessReading, ProcfsError> {
        Reader::new(self).read(pid)
    }

    /// Returns the start of a process, in ticks of [`TICK_NS`](reaper_model::event::TICK_NS) since boot; `None` if it
    /// is gone or unreadable.
    pub fn start_ticks(&self, pid: u32) -> Option<u64> {
        self.stat(pid, |stat| stat.start)
    }

    /// Returns the kernel's name of a process, at most 15 bytes; `None` if it is gone or unreadable.
    pub fn comm(&self, pid: u32) -> Option<String> {
        self.stat(pid, |stat| String::from_utf8_lossy(stat.comm).into_owned())
    }

    /// Returns what `take` takes from the `stat` file of a process; `None` if the file cannot be read or parsed.
    fn stat<T>(&self, pid: u32, take: impl FnOnce(Stat) -> T) -> Option<T> {
        let bytes = std::fs::read(self.root.join(pid.to_string()).join("stat")).ok()?;
        Stat::parse(&bytes).map(take)
    }
}

/// Reader of many processes, with buffers that it reuses.
struct Reader<'a> {
    root: &'a Path,
    stat: Vec<u8>,
    buffer: Vec<u8>,
    cgroups: CgroupCache<'a>,
}

impl<'a> Reader<'a> {
    fn new(proc: &'a Procfs) -> Reader<'a> {
        Reader {
            root: &proc.root,
            stat: Vec::with_capacity(1024),
            buffer: Vec::with_capacity(16 << 10),
            cgroups: CgroupCache {
                mounts: &proc.cgroups,
                known: HashMap::new(),
            },
        }
    }

    fn read(&mut self, pid: u32) -> Result<ProcessReading, ProcfsError> {
        let dir = self.root.join(pid.to_string());
        self.process(&dir, pid).or_else(|(name, source)| {
            let path = dir.join(name);
            match source.raw_os_error() {
                None => Err(ProcfsError::Malformed { path }),
                Some(_) if is_gone(&source) => Ok(ProcessReading::Vanished),
                Some(_) => Err(ProcfsError::Read { path, source }),
            }
        })
    }

    /// Reads one process. Errors carry the name of the file. An error without an errno means that the file is malformed.
    fn process(
        &mut self,
        path: &Path,
        pid: u32,
    ) -> Result<ProcessReading, (&'static str, io::Error)> {
        let malformed = |name| (name, io::Error::from(io::ErrorKind::InvalidData));
        let at = sys::boot_time();
        let dir = Dir::open(path).map_err(|e| ("", e))?;
        dir.read("stat", &mut self.stat).map_err(|e| ("stat", e))?;
        let stat = Stat::parse(&self.stat).ok_or_else(|| malformed("stat"))?;
        // A leader that exits before other threads has no memory any more. The others still show the program.
        let thread = if stat.is_leader_dead() {
            living_thread(path, &dir, &stat)
        } else {
            None
        };
        if stat.is_leader_dead() && thread.is_none() {
            return Ok(ProcessReading::Zombie);
        }
        let runner = thread.as_ref().map_or(&dir, |(_, thread)| thread);

        dir.read("status", &mut self.buffer)
            .map_err(|e| ("status", e))?;
        let uids = uids(&self.buffer).ok_or_else(|| malformed("status"))?;
        let namespace_init = namespace_init(&self.buffer);
        let kernel_thread = stat.is_kernel_thread();
        let mut image = Image {
            comm: stat.comm[..stat.comm.len().min(COMM_MAX)].to_vec(),
            pgid: stat.pgid,
            sid: stat.sid,
            tty: stat.tty,
            ..Image::default()
        };
        if !kernel_thread {
            image.exe = runner.executable().map_err(|e| ("exe", e))?;
            runner
                .read_some("cmdline", ARGV_MAX + 1, &mut self.buffer)
                .map_err(|e| ("cmdline", e))?;
            set_argv(&mut image, &self.buffer, stat.arg_len);
        }
        if runner.read("cgroup", &mut self.buffer).is_ok() {
            image.cgroup_id = self.cgroups.id(&self.buffer);
        }
        Ok(ProcessReading::Alive(ProcEntry {
            read_at: at,
            exact: false,
            pidfd_inode: 0,
            membership: None,
            key: stat.key(pid),
            parent: stat.parent,
            uids,
            image: Arc::new(image),
            kernel_thread,
            namespace_init,
        }))
    }
}

/// Ids of cgroups by path, for one pass only: a cgroup that is removed and created again has the same path and another id.
struct CgroupCache<'a> {
    mounts: &'a Mounts,
    known: HashMap<Vec<u8>, u64>,
}

impl CgroupCache<'_> {
    /// Returns the id of the cgroup that a `cgroup` file names; 0 if unknown.
    fn id(&mut self, file: &[u8]) -> u64 {
        let Some(path) = field(file, b"0::") else {
            return 0;
        };
        if let Some(id) = self.known.get(path) {
            return *id;
        }
        let directory = self.mounts.cgroup(path);
        let metadata = directory.and_then(|directory| std::fs::metadata(directory).ok());
        let id = metadata.map_or(0, |m| m.ino());
        self.known.insert(path.to_vec(), id);
        id
    }
}

/// Handle of the directory of a process or thread. Reading through it fails once that has exited.
pub struct Dir(OwnedFd);

impl Dir {
    /// Opens the directory of a process or thread, such as `/proc/1`.
    pub fn open(path: &Path) -> io::Result<Dir> {
        Dir::open_at(AT_FDCWD, path)
    }

    fn open_at(at: impl AsFd, path: &Path) -> io::Result<Dir> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Dir(openat(at, path, flags, Mode::empty())?))
    }

    /// Reads a file of the directory into the buffer, whose content it replaces. Stops after 128 KiB.
    pub fn read(&self, name: &str, into: &mut Vec<u8>) -> io::Result<()> {
        self.read_some(name, FILE_MAX, into)
    }

    /// Reads at most `most` bytes from the beginning of a file into the buffer, whose content it replaces.
    pub fn read_some(&self, name: &str, most: usize, into: &mut Vec<u8>) -> io::Result<()> {
        into.clear();
        let file = openat(
            &self.0,
            name,
            OFlag::O_RDONLY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        File::from(file)
            .take(most as u64)
            .read_to_end(into)
            .map(drop)
    }

    /// Returns the path of the executable, without the suffix [`DELETED`]. It is empty if it is missing or too long, or
    /// if this user may not read it.
    fn executable(&self) -> io::Result<Vec<u8>> {
        let mut path = match readlinkat(&self.0, "exe") {
            Ok(path) => path.into_vec(),
            Err(Errno::ENOENT | Errno::EACCES | Errno::EPERM | Errno::ENAMETOOLONG) => {
                return Ok(vec![]);
            }
            Err(e) => return Err(e.into()),
        };
        if path.ends_with(DELETED) {
            path.truncate(path.len() - DELETED.len());
        }
        Ok(path)
    }
}

/// Finds a thread of a process that has not exited. `path` and `dir` are the process's directory, and `leader` is its
/// `stat` file.
///
/// Returns the directory of the thread, relative to that of the process, and a handle of it. Returns `None` if there is
/// no such thread or it cannot be read.
pub fn living_thread(path: &Path, dir: &Dir, leader: &Stat) -> Option<(PathBuf, Dir)> {
    if leader.threads < 2 {
        return None;
    }
    let mut bytes = vec![];
    std::fs::read_dir(path.join("task"))
        .ok()?
        .flatten()
        .find_map(|entry| {
            let name = Path::new("task").join(entry.file_name());
            let thread = Dir::open_at(&dir.0, &name).ok()?;
            thread.read("stat", &mut bytes).ok()?;
            (!Stat::parse(&bytes)?.is_leader_dead()).then_some((name, thread))
        })
}
