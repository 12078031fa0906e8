//! Parsers of files in /proc. They take any bytes, since a process can influence the content of its files.

use std::io;

use nix::errno::Errno;
use reaper_common::ARGV_MAX;

use reaper_model::event::{Image, ProcessKey, TICK_NS, Uids};

/// Task flag of kernel threads (include/linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;
/// Task flag of an exiting thread. It has no program any more, but is not a zombie yet.
const PF_EXITING: u64 = 0x4;

/// Returns whether reading a file of a process failed because the process is gone.
pub fn is_gone(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::ESRCH))
}

/// Fields of a `stat` file (proc_pid_stat(5)).
pub struct Stat<'a> {
    /// The kernel's name of the first thread, at most 15 bytes for programs.
    pub comm: &'a [u8],
    /// State of the first thread, such as `b'S'`.
    pub state: u8,
    /// Pid of the parent, 0 for none.
    pub parent: u32,
    /// Process group id.
    pub pgid: u32,
    /// Session id (`setsid(2)`).
    pub sid: u32,
    /// Controlling terminal (`tty_nr`), 0 for none.
    pub tty: u32,
    /// Flags `PF_*` of the first thread.
    pub flags: u64,
    /// CPU time of all threads in ticks.
    pub cpu: u64,
    /// Number of threads.
    pub threads: u64,
    /// Start time in ticks since boot.
    pub start: u64,
    /// Address of the stack of the first thread; 0 if not shown.
    pub stack: u64,
    /// Address of the arguments; 0 if not shown.
    pub arg_start: u64,
    /// Length of the arguments in bytes; 0 if not shown.
    pub arg_len: u64,
    /// Where the process waits in the kernel, or just whether it does; 0 if not shown.
    pub wchan: u64,
    /// Exit status as `wait(2)` reports it; 0 if not shown.
    pub exit_code: u64,
}

impl Stat<'_> {
    /// Parses a `stat` file. The name can contain any byte, also parentheses and newlines, and ends at the last `)`.
    ///
    /// `None` if a field up to the start time is missing, or a field is not a number. Later missing fields are 0.
    pub fn parse(bytes: &[u8]) -> Option<Stat<'_>> {
        let open = bytes.iter().position(|&b| b == b'(')?;
        let close = bytes.iter().rposition(|&b| b == b')')?;
        let comm = bytes.get(open + 1..close)?;
        let mut rest = words(&bytes[close + 1..]);
        let state = *rest.next()?.first()?;
        // Indexed by the field numbers of proc(5); the state is field 3. Negative numbers become 0.
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

    /// Returns whether the process is a kernel thread, which has no program.
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Returns whether the first thread has exited or is exiting. Other threads may still run.
    pub fn is_leader_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x') || self.flags & PF_EXITING != 0
    }

    /// Returns whether all threads have exited.
    pub fn has_exited(&self) -> bool {
        self.is_leader_dead() && self.threads < 2
    }

    /// Returns the key of the process. Its start time is precise to the tick only.
    pub fn key(&self, pid: u32) -> ProcessKey {
        ProcessKey {
            pid,
            start: self.start.saturating_mul(TICK_NS),
        }
    }
}

/// Sets the arguments of an image, their full length, and whether they are truncated. `bytes` is the beginning of a
/// `cmdline` file, at most `ARGV_MAX` + 1 bytes. `area` is the length by `stat`, 0 if not shown.
///
/// Empty `bytes` leave the arguments as they are. Adds the last NUL if it is missing.
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
    // A process that has changed its title can have left out the last NUL.
    if !image.truncated && !kept.ends_with(&[0]) {
        image.argv.push(0);
        image.argv_full_len += 1;
    }
}

/// Returns the real and the effective uid in a `status` file; `None` if it has no valid `Uid` line.
pub fn uids(status: &[u8]) -> Option<Uids> {
    let mut ids = words(field(status, b"Uid:")?).map(number);
    Some(Uids {
        real: ids.next()??,
        effective: ids.next()??,
    })
}

/// Returns whether the process is pid 1 of an inner pid namespace, by its `status` file. False before Linux 4.1.
pub fn namespace_init(status: &[u8]) -> bool {
    let mut ids = words(field(status, b"NSpid:").unwrap_or_default());
    ids.next().is_some() && ids.last() == Some(b"1")
}

/// Returns whether the process is in an inner pid namespace, by its `status` file. False before Linux 4.1.
pub fn is_nested(status: &[u8]) -> bool {
    words(field(status, b"NSpid:").unwrap_or_default())
        .nth(1)
        .is_some()
}

/// Returns the pid in the innermost pid namespace, from a `status` file. `None` before Linux 4.1.
pub fn innermost_pid(status: &[u8]) -> Option<u32> {
    number(words(field(status, b"NSpid:")?).last()?)
}

/// Returns the rest of the first line that starts with `name`.
pub fn field<'a>(file: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    file.split(|&b| b == b'\n')
        .find_map(|line| line.strip_prefix(name))
}

/// Returns the number after `name` on the first line that starts with it. `None` without such a line or number.
pub fn value<T: std::str::FromStr>(file: &[u8], name: &[u8]) -> Option<T> {
    number(words(field(file, name)?).next()?)
}

/// Returns the words of a line, without the white space in between.
pub fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty())
}

/// Parses a decimal number without a sign. `None` if there is anything else, or if the number is too large.
pub fn number<T: std::str::FromStr>(word: &[u8]) -> Option<T> {
    let digits = word.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(word)
        .ok()
        .filter(|_| digits)?
        .parse()
        .ok()
}
