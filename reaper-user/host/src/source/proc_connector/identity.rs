//! Identifies the current process of a pid by reads that cannot block: none of them reads the process's memory.

use std::io;
use std::path::PathBuf;

use crate::source::procfs::{Dir, Procfs};
use crate::sys::proc_file::{Stat, is_gone, namespace_init, uids};
use reaper_model::event::{ProcessKey, Uids};

/// Returns the inode number of the pidfds of the process that has a pid. The kernel never reuses these numbers.
///
/// Returns 0 if the kernel gives none (before 6.9), no process has the pid, or the number cannot be read.
pub type InodeReader = Box<dyn Fn(u32) -> u64 + Send>;

/// Reads identities from /proc and from pidfds.
pub struct IdentityReader {
    root: PathBuf,
    buffer: Vec<u8>,
    read_inode: InodeReader,
}

/// Contents of the `stat` file of a pid.
#[derive(Clone, Copy)]
pub struct Identity {
    /// Key whose start is a whole tick.
    pub key: ProcessKey,
    pub leader_exited: bool,
    /// Whether all threads have exited.
    pub exited: bool,
}

/// State of a known process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    Lives {
        leader_exited: bool,
    },
    /// The process has exited. Another may have its pid.
    Gone,
    /// The pid is in use, but could not be read: this does not prove an exit.
    Unknown,
    /// The process may not be read by this user: this does not prove an exit either.
    Hidden,
}

/// Facts of a process that has just been forked.
pub struct NewProcess {
    /// Start in ns since boot, a whole tick.
    pub start: u64,
    /// Inode number of its pidfds; 0 if unknown.
    pub pidfd_inode: u64,
    pub uids: Option<Uids>,
    /// Whether it is pid 1 of an inner pid namespace. False if unknown.
    pub namespace_init: bool,
}

impl IdentityReader {
    pub fn new(procfs: &Procfs, read_inode: InodeReader) -> IdentityReader {
        IdentityReader {
            root: procfs.root().into(),
            buffer: Vec::with_capacity(4096),
            read_inode,
        }
    }

    fn directory(&self, pid: u32) -> PathBuf {
        self.root.join(pid.to_string())
    }

    /// Returns the state of a process. `pidfd_inode`, unless it is 0, distinguishes it from a process with the same pid
    /// and start tick.
    pub fn state(&mut self, key: ProcessKey, pidfd_inode: u64) -> State {
        let found = match self.read(key.pid) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return State::Hidden,
            Err(_) => return State::Unknown,
            Ok(Some(found)) if found.key.has_same_tick(key) && !found.exited => found,
            Ok(_) => return State::Gone,
        };
        let now = match pidfd_inode {
            0 => 0,
            _ => (self.read_inode)(key.pid),
        };
        match now {
            now if now == pidfd_inode => State::Lives {
                leader_exited: found.leader_exited,
            },
            0 => State::Unknown,
            _ => State::Gone,
        }
    }

    /// Reads the `stat` file of a pid; `None` if no process has the pid.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn read(&mut self, pid: u32) -> io::Result<Option<Identity>> {
        let dir = Dir::open(&self.directory(pid));
        match dir.and_then(|dir| dir.read("stat", &mut self.buffer)) {
            Err(error) if is_gone(&error) => return Ok(None),
            read => read?,
        }
        let stat = Stat::parse(&self.buffer).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Identity {
            key: stat.key(pid),
            leader_exited: stat.is_leader_dead(),
            exited: stat.has_exited(),
        }))
    }

    /// Reads the facts of a new process; `None` if its `stat` file cannot be read. If only `status` cannot be read, the
    /// uids are `None`.
    pub fn read_new(&mut self, pid: u32) -> Option<NewProcess> {
        // First, so that it cannot be the inode of a later process than the one whose files are read.
        let pidfd_inode = (self.read_inode)(pid);
        let dir = Dir::open(&self.directory(pid)).ok()?;
        dir.read("stat", &mut self.buffer).ok()?;
        let start = Stat::parse(&self.buffer)?.key(pid).start;
        let read = dir.read("status", &mut self.buffer);
        let status = read.map_or(&[][..], |()| &self.buffer);
        Some(NewProcess {
            start,
            pidfd_inode,
            uids: uids(status),
            namespace_init: namespace_init(status),
        })
    }
}
