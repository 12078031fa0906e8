//! Reads the `stat` files of all processes through one buffer, without allocating memory.

use std::fs::File;
use std::io;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use nix::unistd::{Whence, lseek};
use rustix::fs::RawDir;

use crate::source::scan::table::{ImageFingerprint, StatRow};
use crate::sys::proc_file::{Stat, number};
use reaper_model::event::{ExitStatus, ProcessKey, TICK_NS};

/// Bound on the size of a `stat` file: 52 numbers of up to 20 digits, and a name of 64 bytes.
const STAT_MAX: usize = 2048;
/// Size in bytes of the buffer for directory entries, as in the C library. It holds about a thousand processes.
const LIST_BUFFER_SIZE: usize = 32 << 10;

/// Result of reading one pid.
#[derive(Debug, PartialEq, Eq)]
pub enum ScanReading {
    Alive(StatRow),
    /// A thread of the kernel.
    Kernel,
    /// All of its threads have exited, or no process has the pid.
    Gone,
    /// The file could not be read, so the process may be alive.
    Unreadable(Errno),
    /// The file could not be parsed, so the process may be alive.
    Malformed,
}

/// Reader of the `stat` files in a /proc.
pub struct Reader {
    proc: OwnedFd,
    list: Box<[MaybeUninit<u8>; LIST_BUFFER_SIZE]>,
    buffer: Box<[u8; STAT_MAX]>,
}

impl Reader {
    pub fn open(root: &Path) -> nix::Result<Reader> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Reader {
            proc: open(root, flags, Mode::empty())?,
            list: Box::new([MaybeUninit::uninit(); LIST_BUFFER_SIZE]),
            buffer: Box::new([0; STAT_MAX]),
        })
    }

    /// Reads all processes and passes each pid with its reading to `take`.
    ///
    /// # Errors
    /// The listing of /proc failed. Processes that were not passed may exist.
    pub fn pass(&mut self, mut take: impl FnMut(u32, ScanReading)) -> nix::Result<()> {
        let Reader { proc, list, buffer } = self;
        lseek(&*proc, 0, Whence::SeekSet)?;
        let mut entries = RawDir::new(&*proc, &mut list[..]);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
            if let Some(pid) = number(entry.file_name().to_bytes()) {
                take(pid, read_row(proc, pid, buffer));
            }
        }
        Ok(())
    }

    /// Reads one process.
    pub fn read_row(&mut self, pid: u32) -> ScanReading {
        read_row(&self.proc, pid, &mut self.buffer)
    }

    /// Returns the exit status of the zombie with this key; `None` if none exists or this user may not read it.
    pub fn status(&mut self, key: ProcessKey) -> Option<ExitStatus> {
        let length = read_stat(&self.proc, key.pid, &mut self.buffer).ok()?;
        let stat = parse_complete(&self.buffer[..length])?;
        let is_it = stat.is_leader_dead() && stat.start.checked_mul(TICK_NS) == Some(key.start);
        // Without permission the kernel shows 0 in both fields.
        let shown = stat.exit_code != 0 || stat.wchan != 0;
        let status = u32::try_from(stat.exit_code).ok()?;
        (is_it && shown).then(|| ExitStatus::from_wait_status(status))
    }
}

fn read_row(proc: &OwnedFd, pid: u32, buffer: &mut [u8; STAT_MAX]) -> ScanReading {
    let length = match read_stat(proc, pid, buffer) {
        Ok(length) => length,
        Err(Errno::ENOENT | Errno::ESRCH) => return ScanReading::Gone,
        Err(errno) => return ScanReading::Unreadable(errno),
    };
    let row = |stat: &Stat<'_>| {
        let mut comm = [0; 16];
        let shown = stat.comm.len().min(comm.len());
        comm[..shown].copy_from_slice(&stat.comm[..shown]);
        Some(StatRow {
            key: ProcessKey {
                pid,
                start: stat.start.checked_mul(TICK_NS)?,
            },
            parent: stat.parent,
            fingerprint: ImageFingerprint {
                sid: stat.sid,
                pgid: stat.pgid,
                tty: stat.tty,
                comm,
                exec: [stat.stack, stat.arg_start],
            },
        })
    };
    match parse_complete(&buffer[..length]) {
        None => ScanReading::Malformed,
        Some(stat) if stat.is_kernel_thread() => ScanReading::Kernel,
        Some(stat) if stat.has_exited() => ScanReading::Gone,
        Some(stat) => row(&stat).map_or(ScanReading::Malformed, ScanReading::Alive),
    }
}

/// Parses a `stat` file; `None` if it is cut off.
fn parse_complete(bytes: &[u8]) -> Option<Stat<'_>> {
    bytes.ends_with(b"\n").then(|| Stat::parse(bytes))?
}

/// Reads a `stat` file into the buffer. Returns its length in bytes.
fn read_stat(proc: &OwnedFd, pid: u32, buffer: &mut [u8; STAT_MAX]) -> nix::Result<usize> {
    let mut path = [0; 24];
    let length = path.len();
    let mut rest = &mut path[..];
    // A pid has ten digits at most.
    write!(rest, "{pid}/stat").map_err(|_| Errno::ENAMETOOLONG)?;
    let length = length - rest.len();
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let file = openat(proc, &path[..length], flags, Mode::empty())?;
    let file = File::from(file);
    let errno = |error: io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    loop {
        match io::Read::read(&mut &file, &mut buffer[..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map_err(errno),
        }
    }
}
