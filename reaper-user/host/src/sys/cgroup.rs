//! Cgroups of version 2. The kernel's id of a cgroup is the inode number of its directory.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use nix::errno::Errno;
use nix::libc::{O_DIRECTORY, O_NOFOLLOW};
use nix::poll::PollFlags;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs, statfs};

use super::host::Mounts;
use super::proc_file::{field, is_gone};
use super::wait_for;

/// A handle on a cgroup. It keeps referring to this cgroup, even if its path later leads to another one.
#[derive(Debug)]
pub struct Cgroup(File);

impl Cgroup {
    /// Opens the cgroup with this directory.
    ///
    /// # Errors
    /// It cannot be opened, or is not a cgroup of version 2.
    pub fn open(directory: &Path) -> io::Result<Cgroup> {
        let mut options = File::options();
        let options = options.read(true).custom_flags(O_DIRECTORY | O_NOFOLLOW);
        let file = options.open(directory)?;
        match fstatfs(&file)?.filesystem_type() {
            CGROUP2_SUPER_MAGIC => Ok(Cgroup(file)),
            _ => Err(io::Error::other("not a cgroup of version 2")),
        }
    }

    /// Returns the id of the cgroup, which is unique until the next boot.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn id(&self) -> io::Result<u64> {
        self.0.metadata().map(|meta| meta.st_ino())
    }

    /// Returns a path to a file of the cgroup, valid while this handle is open.
    pub fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()))
    }

    /// Returns the pids of the processes in the cgroup and below it. Zombies are in no cgroup. Processes without a pid
    /// in this pid namespace are left out, and so are cgroups that this user may not read.
    ///
    /// # Errors
    /// A cgroup cannot be read for another reason. A removed cgroup is empty.
    pub fn pids(&self) -> io::Result<HashSet<u32>> {
        let mut pids = HashSet::new();
        for directory in self.directories()? {
            let list = unless_gone(fs::read_to_string(directory.join("cgroup.procs")))?;
            let list = list.unwrap_or_default();
            let known = list.lines().filter_map(|line| line.parse::<u32>().ok());
            pids.extend(known.filter(|pid| *pid != 0));
        }
        Ok(pids)
    }

    /// Returns whether a process is in the cgroup or below it, even in a cgroup that this user cannot read. Looks in
    /// /proc/PID/cgroup for the directory name, which must be unique among all cgroups.
    ///
    /// # Errors
    /// It cannot be determined. An exited process is in no cgroup, nor is one without a cgroup of version 2.
    pub fn contains(&self, pid: u32) -> io::Result<bool> {
        let own = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let directory = fs::read_link(own)?;
        let name = directory.file_name().unwrap_or_default().as_encoded_bytes();
        let file = match fs::read(format!("/proc/{pid}/cgroup")) {
            Err(error) if is_gone(&error) => return Ok(false),
            // For example, the process belongs to another user and /proc is mounted with `hidepid`.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(self.pids()?.contains(&pid));
            }
            file => file?,
        };
        let path = field(&file, b"0::").unwrap_or_default();
        let mut names = path.split(|byte| *byte == b'/');
        Ok(names.any(|one| one == name))
    }

    /// Waits until no process is in the cgroup or below it, at most for `timeout`. Returns whether none is.
    ///
    /// # Errors
    /// Its state cannot be read.
    pub fn await_empty(&self, timeout: Duration) -> io::Result<bool> {
        let until = Instant::now() + timeout;
        let events = File::open(self.file("cgroup.events"))?;
        loop {
            let mut text = [0; 256];
            let length = events.read_at(&mut text, 0)?;
            let mut lines = text[..length].split(|byte| *byte == b'\n');
            if !lines.any(|line| line == b"populated 1") {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            // Rounded up, so that the last wait is no busy loop. A change since the read ends the wait at once.
            let left = left.saturating_add(Duration::from_nanos(999_999));
            wait_for(&events, PollFlags::POLLPRI, left);
        }
    }

    /// Sends SIGKILL to all processes in the cgroup and below it, also to those forked meanwhile (`cgroup.kill`). Only
    /// `crate::reap` may call this.
    ///
    /// # Errors
    /// `ENOENT` before Linux 5.14, or if the cgroup has been removed.
    pub fn kill(&self) -> io::Result<()> {
        let mut options = File::options();
        let file = options.write(true).open(self.file("cgroup.kill"))?;
        file.write_at(b"1", 0).map(drop)
    }

    /// Removes all cgroups below this one, but not this one. They must contain no processes.
    ///
    /// # Errors
    /// One cannot be removed. Those removed before stay removed.
    pub fn clear(&self) -> io::Result<()> {
        let below = self.directories()?.into_iter().skip(1);
        let mut below: Vec<_> = below.collect();
        // Descendants before ancestors.
        below.reverse();
        below.iter().try_for_each(|directory| remove(directory))
    }

    /// Returns the directory of the cgroup and those below it, each after its parent.
    fn directories(&self) -> io::Result<Vec<PathBuf>> {
        let mut all = vec![self.file("")];
        let mut next = 0;
        while let Some(directory) = all.get(next) {
            let mut below = Vec::new();
            for entry in unless_gone(fs::read_dir(directory))?.into_iter().flatten() {
                let Some(entry) = unless_gone(entry)? else {
                    break;
                };
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    below.push(entry.path());
                }
            }
            all.append(&mut below);
            next += 1;
        }
        Ok(all)
    }
}

/// Returns what was read, or `None` for a cgroup that must be skipped:
///
/// - It has been removed.
/// - It is a threaded cgroup. Its processes are listed in the nearest domain cgroup above.
/// - Its creator has closed it to this user. [`Cgroup::kill`] of the cgroup above reaches its processes anyway.
fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT | Errno::ENODEV | Errno::EOPNOTSUPP | Errno::EACCES) => Ok(None),
            _ => Err(error),
        },
        read => read.map(Some),
    }
}

/// Removes the directory of a cgroup, if it exists.
///
/// # Errors
/// `EBUSY` if it contains processes or other cgroups.
pub fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns the directory of this process's cgroup of version 2. `None` if no mount shows it.
pub fn own() -> Option<PathBuf> {
    let file = fs::read("/proc/self/cgroup").ok()?;
    Mounts::parse(&fs::read("/proc/self/mountinfo").ok()?).cgroup(field(&file, b"0::")?)
}

/// Returns whether a path is the directory of a cgroup of version 2.
pub fn is_cgroup(directory: &Path) -> bool {
    let on_v2 = statfs(directory).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC);
    on_v2 && directory.is_dir()
}

/// Returns whether the cgroup of version 2 identifies a process's systemd unit.
///
/// It does not on hosts where systemd keeps units only in a hierarchy of version 1: there all processes are in the
/// root cgroup of version 2. Determined once, from this process's own cgroups.
pub fn has_systemd_units() -> bool {
    static HAS_UNITS: LazyLock<bool> = LazyLock::new(|| {
        let own = std::fs::read("/proc/self/cgroup");
        own.is_ok_and(|own| paths_agree(&own))
    });
    *HAS_UNITS
}

/// Returns whether version 2 and systemd's hierarchy of version 1 have the same path in a `cgroup` file of /proc.
/// Without the latter, returns whether there is version 2.
pub fn paths_agree(file: &[u8]) -> bool {
    let path = |start: &[u8]| {
        let mut lines = file.split(|b| *b == b'\n');
        lines.find_map(|line| line.splitn(2, |b| *b == b':').nth(1)?.strip_prefix(start))
    };
    match (path(b":"), path(b"name=systemd:")) {
        (Some(v2), Some(systemd)) => v2 == systemd,
        (v2, _) => v2.is_some(),
    }
}

/// Returns the ids of a cgroup and of all cgroups below it, at any depth.
///
/// # Errors
/// The directory cannot be read. Unreadable or removed cgroups below it are skipped.
pub fn ids_below(directory: &Path) -> io::Result<Vec<u64>> {
    let mut ids = vec![std::fs::metadata(directory)?.st_ino()];
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            ids.extend(ids_below(&entry.path()).unwrap_or_default());
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::paths_agree;
    use crate::damage::{arbitrary_bytes, proc_self_file};

    proptest! {
        #[test]
        fn any_cgroup_file_can_be_compared(bytes in arbitrary_bytes(proc_self_file("cgroup"))) {
            let twice = [&*bytes, b"\n", &bytes].concat();
            prop_assert_eq!(paths_agree(&twice), paths_agree(&bytes), "the first line of each hierarchy counts");
        }
    }

    #[test]
    fn v2_has_units_where_systemd_uses_it() {
        for (file, expected) in [
            ("0::/system.slice/a.service\n", true),
            ("0::/\n", true),
            // Hybrid mode of systemd, and a host without systemd.
            ("5:pids:/x\n1:name=systemd:/a.slice\n0::/a.slice\n", true),
            ("1:name=systemd:/\n0::/\n", true),
            // Legacy mode of systemd, with and without a mounted version 2.
            ("1:name=systemd:/user.slice\n0::/\n", false),
            ("1:name=systemd:/user.slice\n", false),
            ("5:pids:/\n", false),
            ("", false),
        ] {
            assert_eq!(paths_agree(file.as_bytes()), expected, "{file:?}");
        }
    }
}
