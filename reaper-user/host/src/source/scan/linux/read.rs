//! Short looks at all processes: one file each, through one buffer, with nothing allocated for any of them.

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

/// More than a `stat` file can hold: 52 numbers of up to 20 digits, and a name of 64 bytes.
const STAT_MAX: usize = 2048;
/// Bytes of directory entries that are listed at a time, as the C library does: some thousand processes.
const LIST_ROOM: usize = 32 << 10;

/// What a short look found.
#[derive(Debug, PartialEq, Eq)]
pub enum ScanReading {
    Alive(StatRow),
    /// A thread of the kernel.
    Kernel,
    /// Nothing of it runs any more, or there is no such process.
    Gone,
    /// There is no telling.
    Unreadable(Errno),
    Malformed,
}

pub struct Reader {
    proc: OwnedFd,
    list: Box<[MaybeUninit<u8>; LIST_ROOM]>,
    buffer: Box<[u8; STAT_MAX]>,
}

impl Reader {
    pub fn open(root: &Path) -> nix::Result<Reader> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Reader {
            proc: open(root, flags, Mode::empty())?,
            list: Box::new([MaybeUninit::uninit(); LIST_ROOM]),
            buffer: Box::new([0; STAT_MAX]),
        })
    }

    /// Looks at all there are.
    ///
    /// # Errors
    /// They cannot be listed to the end: who was not among them may be there all the same.
    pub fn pass(&mut self, mut take: impl FnMut(u32, ScanReading)) -> nix::Result<()> {
        let Reader { proc, list, buffer } = self;
        lseek(&*proc, 0, Whence::SeekSet)?;
        let mut entries = RawDir::new(&*proc, &mut list[..]);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
            if let Some(pid) = number(entry.file_name().to_bytes()) {
                take(pid, look(proc, pid, buffer));
            }
        }
        Ok(())
    }

    /// Looks at one.
    pub fn look(&mut self, pid: u32) -> ScanReading {
        look(&self.proc, pid, &mut self.buffer)
    }

    /// How a process has ended that nobody has waited for yet, if that may be known.
    pub fn status(&mut self, key: ProcessKey) -> Option<ExitStatus> {
        let length = read(&self.proc, key.pid, &mut self.buffer).ok()?;
        let stat = whole(&self.buffer[..length])?;
        let is_it = stat.is_leader_dead() && stat.start.checked_mul(TICK_NS) == Some(key.start);
        // Without permission the kernel shows 0 for both.
        let shown = stat.exit_code != 0 || stat.wchan != 0;
        let status = u32::try_from(stat.exit_code).ok()?;
        (is_it && shown).then(|| ExitStatus::from_wait_status(status))
    }
}

fn look(proc: &OwnedFd, pid: u32, buffer: &mut [u8; STAT_MAX]) -> ScanReading {
    let length = match read(proc, pid, buffer) {
        Ok(length) => length,
        Err(Errno::ENOENT | Errno::ESRCH) => return ScanReading::Gone,
        Err(errno) => return ScanReading::Unreadable(errno),
    };
    let glimpse = |stat: &Stat<'_>| {
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
    match whole(&buffer[..length]) {
        None => ScanReading::Malformed,
        Some(stat) if stat.is_kernel_thread() => ScanReading::Kernel,
        Some(stat) if stat.is_over() => ScanReading::Gone,
        Some(stat) => glimpse(&stat).map_or(ScanReading::Malformed, ScanReading::Alive),
    }
}

/// The file of this process, if there is nothing missing at its end.
fn whole(bytes: &[u8]) -> Option<Stat<'_>> {
    bytes.ends_with(b"\n").then(|| Stat::parse(bytes))?
}

fn read(proc: &OwnedFd, pid: u32, buffer: &mut [u8; STAT_MAX]) -> nix::Result<usize> {
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
            read => return read.map_err(errno),
        }
    }
}
