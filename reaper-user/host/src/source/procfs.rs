//! The process table as /proc has it: what ran before the probes, and what they may have missed.
//!
//! A process is read through one directory handle, so that all of a row is about one process even
//! where its pid is given away meanwhile. That a process is gone is a result, not an error.

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
pub use crate::sys::proc_file as parse;
use crate::sys::proc_file::{Stat, field, is_gone, namespace_init, set_argv, uids};
use crate::sys::{self, cgroup};
use reaper_model::event::{Image, ProcEntry};

pub mod descendants;
pub mod readers;
mod table;
#[cfg(test)]
mod tests;

/// The kernel's names have 15 bytes; /proc appends to those of its own workers.
const COMM_MAX: usize = 15;
/// More than any file of /proc read here holds, argv aside.
const FILE_MAX: usize = 128 << 10;
/// What the kernel appends to the path of an executable that has been removed or replaced.
const DELETED: &[u8] = b" (deleted)";

/// Reads one /proc. Has no state that changes, so threads can share it.
#[derive(Clone, Debug)]
pub struct Procfs {
    root: PathBuf,
    /// Where cgroup v2 is mounted, if processes are told apart by it.
    cgroups: Mounts,
}

impl Default for Procfs {
    fn default() -> Procfs {
        Procfs::new("/proc")
    }
}

impl Procfs {
    pub fn new(root: impl Into<PathBuf>) -> Procfs {
        let root = root.into();
        let mounts = std::fs::read(root.join("self/mountinfo")).unwrap_or_default();
        let own = std::fs::read(root.join("self/cgroup"));
        let cgroups = match own.is_ok_and(|own| !cgroup::agree(&own)) {
            true => Mounts::default(),
            false => Mounts::parse(&mounts).of_kind("cgroup2"),
        };
        Procfs { root, cgroups }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// One process.
    ///
    /// # Errors
    /// If it is there and cannot be read; names the file.
    pub fn read(&self, pid: u32) -> Result<ProcessReading, ProcfsError> {
        Reader::new(self).look(pid)
    }

    /// When a process began, in ticks of [`TICK_NS`](reaper_model::event::TICK_NS) since boot; `None` if it is gone.
    pub fn start_ticks(&self, pid: u32) -> Option<u64> {
        self.stat(pid, |stat| stat.start)
    }

    /// The kernel's name of a process, at most 15 bytes; `None` if it is gone.
    pub fn comm(&self, pid: u32) -> Option<String> {
        self.stat(pid, |stat| String::from_utf8_lossy(stat.comm).into_owned())
    }

    fn stat<T>(&self, pid: u32, take: impl FnOnce(Stat) -> T) -> Option<T> {
        let bytes = std::fs::read(self.root.join(pid.to_string()).join("stat")).ok()?;
        Stat::parse(&bytes).map(take)
    }
}

/// A pass over processes, with the buffers it reuses.
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

    fn look(&mut self, pid: u32) -> Result<ProcessReading, ProcfsError> {
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

    /// Errors carry the file's name; one without an errno is about its content.
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
        // A leader that exited before other threads has no memory left: they know what the process runs.
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

/// Ids of the cgroups met in a pass, and no longer: one that is made anew has the old path and another id.
struct CgroupCache<'a> {
    mounts: &'a Mounts,
    known: HashMap<Vec<u8>, u64>,
}

impl CgroupCache<'_> {
    /// Id of the cgroup that a `cgroup` file names; 0 if there is no telling.
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

/// A handle on the directory of one process or thread; reading through it fails once that is gone.
pub struct Dir(OwnedFd);

impl Dir {
    pub fn open(path: &Path) -> io::Result<Dir> {
        Dir::open_at(AT_FDCWD, path)
    }

    fn open_at(at: impl AsFd, path: &Path) -> io::Result<Dir> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Dir(openat(at, path, flags, Mode::empty())?))
    }

    /// The whole file.
    pub fn read(&self, name: &str, into: &mut Vec<u8>) -> io::Result<()> {
        self.read_some(name, FILE_MAX, into)
    }

    /// The beginning of a file.
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

    /// Path of the executable; empty where it is another user's secret or there is none.
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

/// A thread of the process that still runs: its directory below that of the process, and a handle on it.
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
