//! Short looks at a process that cannot be kept waiting: none of them reads its memory.

use std::io;
use std::path::PathBuf;

use crate::source::procfs::{Dir, Procfs};
use crate::sys::proc_file::{Stat, is_gone, namespace_init, uids};
use reaper_model::event::{ProcessKey, Uids};

/// Tells the number that the kernel has given whoever has a pid: one that is never used again, or 0 where it gives none
/// (before 6.9), or nobody has the pid, or it cannot be read.
pub type Numbers = Box<dyn Fn(u32) -> u64 + Send>;

/// Takes them.
pub struct Glimpses {
    root: PathBuf,
    buffer: Vec<u8>,
    numbers: Numbers,
}

/// What a `stat` file tells of whoever has a pid.
#[derive(Clone, Copy)]
pub struct Glimpse {
    /// The start is a whole tick.
    pub key: ProcessKey,
    pub leader_dead: bool,
    /// No thread of it is left.
    pub over: bool,
}

/// What has become of a process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    Lives {
        leader_dead: bool,
    },
    /// Or another has its pid.
    Gone,
    /// It is there, and cannot be read: that is not gone.
    Unknown,
    /// Nor is one that this user is not to see.
    Hidden,
}

/// What /proc tells of a process that was just made.
pub struct Newborn {
    pub start: u64,
    /// As [`Numbers`] has it.
    pub number: u64,
    pub uids: Option<Uids>,
    pub namespace_init: bool,
}

impl Glimpses {
    pub fn new(procfs: &Procfs, numbers: Numbers) -> Glimpses {
        Glimpses {
            root: procfs.root().into(),
            buffer: Vec::with_capacity(4096),
            numbers,
        }
    }

    fn directory(&self, pid: u32) -> PathBuf {
        self.root.join(pid.to_string())
    }

    /// What has become of it. Where its number is known (not 0), that tells it from another that has its pid and tick.
    pub fn state(&mut self, key: ProcessKey, number: u64) -> State {
        let found = match self.glimpse(key.pid) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return State::Hidden,
            Err(_) => return State::Unknown,
            Ok(Some(found)) if found.key.has_same_tick(key) && !found.over => found,
            Ok(_) => return State::Gone,
        };
        let now = match number {
            0 => 0,
            _ => (self.numbers)(key.pid),
        };
        match now {
            now if now == number => State::Lives {
                leader_dead: found.leader_dead,
            },
            0 => State::Unknown,
            _ => State::Gone,
        }
    }

    /// `None` if nobody has the pid.
    ///
    /// # Errors
    /// Somebody has, and cannot be read.
    pub fn glimpse(&mut self, pid: u32) -> io::Result<Option<Glimpse>> {
        let dir = Dir::open(&self.directory(pid));
        match dir.and_then(|dir| dir.read("stat", &mut self.buffer)) {
            Err(error) if is_gone(&error) => return Ok(None),
            read => read?,
        }
        let stat = Stat::parse(&self.buffer).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Glimpse {
            key: stat.key(pid),
            leader_dead: stat.is_leader_dead(),
            over: stat.is_over(),
        }))
    }

    /// `None` if it is gone, whoever has its pid now.
    pub fn newborn(&mut self, pid: u32) -> Option<Newborn> {
        // First, so that it is nobody's who has come after the one that is read.
        let number = (self.numbers)(pid);
        let dir = Dir::open(&self.directory(pid)).ok()?;
        dir.read("stat", &mut self.buffer).ok()?;
        let start = Stat::parse(&self.buffer)?.key(pid).start;
        let read = dir.read("status", &mut self.buffer);
        let status = read.map_or(&[][..], |()| &self.buffer);
        Some(Newborn {
            start,
            number,
            uids: uids(status),
            namespace_init: namespace_init(status),
        })
    }
}
