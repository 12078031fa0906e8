//! The formats of files in /proc, as bytes: none of them is trusted to be whole.

use std::io;

use nix::errno::Errno;
use reaper_common::ARGV_MAX;

use reaper_model::event::{Image, ProcessKey, TICK_NS, Uids};

/// Bit of a task's flags that says that it is a thread of the kernel.
const PF_KTHREAD: u64 = 0x0020_0000;
/// Bit that says that it is on its way out: it has no program any more, though it is no zombie yet.
const PF_EXITING: u64 = 0x4;

/// Whether a file of a process could not be read because that is gone.
pub fn is_gone(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::ESRCH))
}

/// The fields of a `stat` file that matter here.
pub struct Stat<'a> {
    pub comm: &'a [u8],
    pub state: u8,
    pub parent: u32,
    pub pgid: u32,
    pub sid: u32,
    pub tty: u32,
    pub flags: u64,
    /// Ticks of processor time that all of its threads have used.
    pub cpu: u64,
    pub threads: u64,
    /// Ticks since boot.
    pub start: u64,
    /// Where its first stack begins, 0 where that is not shown.
    pub stack: u64,
    /// Where the area of its arguments begins, 0 where that is not shown.
    pub arg_start: u64,
    /// Length of the area of the arguments, 0 where it is not shown.
    pub arg_len: u64,
    /// Whether, or where, it waits; 0 where that is not shown.
    pub wchan: u64,
    /// As `wait(2)` tells it of one that has exited; 0 where that is not shown.
    pub exit_code: u64,
}

impl Stat<'_> {
    /// A name may hold anything, parentheses and newlines too: it ends at the last `)`.
    pub fn parse(bytes: &[u8]) -> Option<Stat<'_>> {
        let open = bytes.iter().position(|&b| b == b'(')?;
        let close = bytes.iter().rposition(|&b| b == b')')?;
        let comm = bytes.get(open + 1..close)?;
        let mut rest = words(&bytes[close + 1..]);
        let state = *rest.next()?.first()?;
        // Numbered as in proc(5), where the state is field 3; what is negative there is nothing here.
        let mut fields = [0_u64; 53];
        let mut last = 3;
        for (place, word) in fields[4..].iter_mut().zip(rest) {
            *place = if word.starts_with(b"-") {
                0
            } else {
                number(word)?
            };
            last += 1;
        }
        if last < 22 {
            return None;
        }
        Some(Stat {
            comm,
            state,
            parent: fields[4].try_into().ok()?,
            pgid: fields[5].try_into().ok()?,
            sid: fields[6].try_into().ok()?,
            tty: fields[7].try_into().ok()?,
            flags: fields[9],
            cpu: fields[14].saturating_add(fields[15]),
            threads: fields[20],
            start: fields[22],
            stack: fields[28],
            arg_start: fields[48],
            arg_len: fields[49].saturating_sub(fields[48]),
            wchan: fields[35],
            exit_code: fields[52],
        })
    }

    pub fn is_kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Whether the first thread has exited. Others may run on.
    pub fn is_leader_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x') || self.flags & PF_EXITING != 0
    }

    /// Whether all threads have exited.
    pub fn is_over(&self) -> bool {
        self.is_leader_dead() && self.threads < 2
    }

    /// Returns the key of the process, which has this pid. The start is a whole tick.
    pub fn key(&self, pid: u32) -> ProcessKey {
        ProcessKey {
            pid,
            start: self.start.saturating_mul(TICK_NS),
        }
    }
}

/// Takes the arguments from a `cmdline` file that was read to one byte over the bound. `area` is the
/// length that `stat` tells, 0 if it does not.
pub fn set_argv(image: &mut Image, bytes: &[u8], area: u64) {
    image.truncated = bytes.len() > ARGV_MAX;
    let kept = &bytes[..bytes.len().min(ARGV_MAX)];
    let whole = if image.truncated {
        area.max(bytes.len() as u64)
    } else {
        kept.len() as u64
    };
    image.argv_full_len = whole.try_into().unwrap_or(u32::MAX);
    if kept.is_empty() {
        return;
    }
    image.argv = kept.to_vec();
    // A process that rewrote its title may have left the last NUL out.
    if !image.truncated && !kept.ends_with(&[0]) {
        image.argv.push(0);
        image.argv_full_len += 1;
    }
}

pub fn uids(status: &[u8]) -> Option<Uids> {
    let mut ids = words(field(status, b"Uid:")?).map(number);
    Some(Uids {
        real: ids.next()??,
        effective: ids.next()??,
    })
}

/// Whether a process has a number of its own in a pid namespace below, and it is 1.
pub fn namespace_init(status: &[u8]) -> bool {
    let mut ids = words(field(status, b"NSpid:").unwrap_or_default());
    ids.next().is_some() && ids.last() == Some(b"1")
}

/// Whether a process has a number in a pid namespace below.
pub fn is_nested(status: &[u8]) -> bool {
    words(field(status, b"NSpid:").unwrap_or_default())
        .nth(1)
        .is_some()
}

/// Returns the process id in the innermost pid namespace of the process, by its status file.
pub fn innermost_pid(status: &[u8]) -> Option<u32> {
    number(words(field(status, b"NSpid:")?).last()?)
}

/// What follows `name` on the line that begins with it.
pub fn field<'a>(file: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    file.split(|&b| b == b'\n')
        .find_map(|line| line.strip_prefix(name))
}

/// Returns the number behind `name` on the line that begins with it.
pub fn value<T: std::str::FromStr>(file: &[u8], name: &[u8]) -> Option<T> {
    number(words(field(file, name)?).next()?)
}

pub fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty())
}

/// A decimal number, and nothing else.
pub fn number<T: std::str::FromStr>(word: &[u8]) -> Option<T> {
    let digits = word.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(word)
        .ok()
        .filter(|_| digits)?
        .parse()
        .ok()
}
