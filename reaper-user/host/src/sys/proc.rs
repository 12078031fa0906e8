//! Queries about processes that files in /proc answer.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::host::INITIAL_PID_NAMESPACE;
use super::proc_file::{field, number, value, words};

/// Returns the inode of this process's pid namespace, or 0 for the initial one. Also 0 if the kernel has no pid
/// namespaces.
///
/// # Errors
/// /proc is not mounted, or shows another pid namespace, so that its pids have another meaning.
pub fn non_initial_pid_namespace() -> io::Result<u32> {
    let status = std::fs::read("/proc/self/status")?;
    if !is_own(&status, std::process::id()) {
        return Err(io::Error::other(
            "it shows the processes of another pid namespace",
        ));
    }
    match std::fs::metadata("/proc/self/ns/pid") {
        Ok(of) if of.ino() == INITIAL_PID_NAMESPACE => Ok(0),
        Ok(of) => Ok(of.ino() as u32),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Returns whether a /proc belongs to the pid namespace of its reader. `status` and `pid` are those of the reader. In a
/// /proc of an outer namespace, `NSpid` has one number per namespace. The first and last can be equal by chance.
fn is_own(status: &[u8], pid: u32) -> bool {
    let numbers = field(status, b"NSpid:").or_else(|| field(status, b"Pid:"));
    numbers.is_some_and(|numbers| words(numbers).map(number).eq([Some(pid)]))
}

/// Returns the pid of the process that a thread belongs to, given the thread's id. `None` if /proc shows no such
/// thread.
pub fn thread_group(pid: u32) -> Option<u32> {
    value(
        &std::fs::read(format!("/proc/{pid}/status")).ok()?,
        b"Tgid:",
    )
}

/// Returns whether /proc has a directory for this pid. With the mount option `hidepid`, it can lack those of living
/// processes of other users.
pub fn is_visible(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Returns the pid that holds a flock(2) lock on a file, without opening the file (proc_locks(5)). `None` if there is
/// no such lock.
///
/// # Errors
/// The list of locks cannot be read.
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
    fn proc_of_another_pid_namespace_is_recognised() {
        assert!(is_own(b"Name:\tx\nPid:\t7\nNSpid:\t7\n", 7));
        // Before 4.1.
        assert!(is_own(b"Name:\tx\nPid:\t7\n", 7));
        assert!(!is_own(b"Pid:\t7\nNSpid:\t7\t7\n", 7), "equal by chance");
        assert!(!is_own(b"Pid:\t700\nNSpid:\t700\t7\n", 7));
        assert!(!is_own(b"Pid:\t700\n", 7));
        assert!(!is_own(b"", 7));
    }
}
