//! Questions about processes that are answered by files in /proc.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::host::FIRST_PID_NAMESPACE;
use super::proc_file::{field, number, value, words};

/// Inode of this process's pid namespace, or 0 if it is the first one, or the only one there can be.
///
/// # Errors
/// /proc is not there, or shows the processes of another namespace: its pids would be others'.
pub fn non_initial_pid_namespace() -> io::Result<u32> {
    let status = std::fs::read("/proc/self/status")?;
    if !is_own(&status, std::process::id()) {
        return Err(io::Error::other(
            "it shows the processes of another pid namespace",
        ));
    }
    match std::fs::metadata("/proc/self/ns/pid") {
        Ok(of) if of.ino() == FIRST_PID_NAMESPACE => Ok(0),
        Ok(of) => Ok(of.ino() as u32),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Whether a /proc that says this of a process of this pid is that of its own pid namespace. From one above, it has a number
/// in each namespace down to its own, and the first can happen to be the last.
fn is_own(status: &[u8], pid: u32) -> bool {
    let numbers = field(status, b"NSpid:").or_else(|| field(status, b"Pid:"));
    numbers.is_some_and(|numbers| words(numbers).map(number).eq([Some(pid)]))
}

/// The process that a task belongs to.
pub fn thread_group(pid: u32) -> Option<u32> {
    value(
        &std::fs::read(format!("/proc/{pid}/status")).ok()?,
        b"Tgid:",
    )
}

/// Whether the process table shows a process that there is.
pub fn is_visible(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Pid of whoever has a lock on a file that may not be read, as proc_locks(5) tells everybody.
///
/// # Errors
/// The list cannot be read.
pub fn lock_holder(meta: &Metadata) -> io::Result<Option<u32>> {
    let (major, minor) = (
        nix::sys::stat::major(meta.dev()),
        nix::sys::stat::minor(meta.dev()),
    );
    let place = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    let locks = std::fs::read_to_string("/proc/locks")?;
    let words = locks
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut held =
        words.filter(|words| words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&&*place));
    Ok(held.find_map(|words| words[4].parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proc_is_known_by_the_numbers_that_it_gives() {
        assert!(is_own(b"Name:\tx\nPid:\t7\nNSpid:\t7\n", 7));
        // Before 4.1.
        assert!(is_own(b"Name:\tx\nPid:\t7\n", 7));
        assert!(!is_own(b"Pid:\t7\nNSpid:\t7\t7\n", 7), "by chance the same");
        assert!(!is_own(b"Pid:\t700\nNSpid:\t700\t7\n", 7));
        assert!(!is_own(b"Pid:\t700\n", 7));
        assert!(!is_own(b"", 7));
    }
}
