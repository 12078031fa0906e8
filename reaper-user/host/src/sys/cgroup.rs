//! Cgroups of version 2: what the kernel calls a cgroup's id is the inode of its directory.

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

/// A handle on a cgroup, for ever the same one: whatever is at its path by then, all that is asked and written is of it.
#[derive(Debug)]
pub struct Cgroup(File);

impl Cgroup {
    /// Opens the one whose directory this is.
    ///
    /// # Errors
    /// It cannot be opened, or is no cgroup of version 2.
    pub fn open(directory: &Path) -> io::Result<Cgroup> {
        let mut options = File::options();
        let options = options.read(true).custom_flags(O_DIRECTORY | O_NOFOLLOW);
        let file = options.open(directory)?;
        match fstatfs(&file)?.filesystem_type() {
            CGROUP2_SUPER_MAGIC => Ok(Cgroup(file)),
            _ => Err(io::Error::other("it is no cgroup of version 2")),
        }
    }

    /// Its id, which the kernel gives to no other one until it is started anew.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn id(&self) -> io::Result<u64> {
        self.0.metadata().map(|meta| meta.st_ino())
    }

    /// Where one of its files is to be had, as long as this is there.
    pub fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()))
    }

    /// Who is in it, or in one below it: those that have a pid here. No zombie is in any.
    ///
    /// # Errors
    /// It cannot be asked; one that has gone has nobody.
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

    /// Whether a process is in it, or in one below it, be it that this user may not look into that: by what /proc says of the process,
    /// and by the name of the directory, which no other cgroup may have.
    ///
    /// # Errors
    /// There is no telling; one that is gone is nowhere, and one of no cgroup of version 2 in none.
    pub fn contains(&self, pid: u32) -> io::Result<bool> {
        let own = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let directory = fs::read_link(own)?;
        let name = directory.file_name().unwrap_or_default().as_encoded_bytes();
        let file = match fs::read(format!("/proc/{pid}/cgroup")) {
            Err(error) if is_gone(&error) => return Ok(false),
            // Of another user's the process table does not say it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(self.pids()?.contains(&pid));
            }
            file => file?,
        };
        let path = field(&file, b"0::").unwrap_or_default();
        let mut names = path.split(|byte| *byte == b'/');
        Ok(names.any(|one| one == name))
    }

    /// Waits at most so long until nobody is; whether it came to that.
    ///
    /// # Errors
    /// It cannot be asked.
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
            // Whatever has changed since it was read.
            let left = left.saturating_add(Duration::from_nanos(999_999));
            wait_for(&events, PollFlags::POLLPRI, left);
        }
    }

    /// Ends all that is in it, and in those below it, at once and whoever may come meanwhile: the kernel sends each
    /// SIGKILL (`cgroup.kill`, 5.14). Nothing but `crate::reap` may call this.
    ///
    /// # Errors
    /// `ENOENT` on an older kernel, or where the cgroup is gone.
    pub fn kill(&self) -> io::Result<()> {
        let mut options = File::options();
        let file = options.write(true).open(self.file("cgroup.kill"))?;
        file.write_at(b"1", 0).map(drop)
    }

    /// Removes those below it, where nobody is in them.
    ///
    /// # Errors
    /// One cannot be removed.
    pub fn clear(&self) -> io::Result<()> {
        let below = self.directories()?.into_iter().skip(1);
        let mut below: Vec<_> = below.collect();
        // What lies in another one goes before it.
        below.reverse();
        below.iter().try_for_each(|directory| remove(directory))
    }

    /// Its own directory, and those below it, each after the one that it lies in.
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

/// What is read of a cgroup; `None` where that has gone, or is one of threads alone, who count where their process does, or is
/// closed to this user by whoever has made it within one of theirs: `cgroup.kill` reaches who is in there too.
fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT | Errno::ENODEV | Errno::EOPNOTSUPP | Errno::EACCES) => Ok(None),
            _ => Err(error),
        },
        read => read.map(Some),
    }
}

/// Removes the directory of a cgroup, if it is there.
///
/// # Errors
/// `EBUSY`: somebody is in it, or another one is.
pub fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Directory of the cgroup of version 2 that this process is in, if any mount shows it.
pub fn own() -> Option<PathBuf> {
    let file = fs::read("/proc/self/cgroup").ok()?;
    Mounts::parse(&fs::read("/proc/self/mountinfo").ok()?).cgroup(field(&file, b"0::")?)
}

/// Whether this is the directory of a cgroup of version 2.
pub fn is_cgroup(directory: &Path) -> bool {
    let on_v2 = statfs(directory).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC);
    on_v2 && directory.is_dir()
}

/// Whether a process's cgroup of version 2 tells its unit of systemd: not where systemd keeps units in a hierarchy of
/// version 1 alone, and all processes are in the first cgroup of version 2. Told by where this program is.
pub fn has_systemd_units() -> bool {
    static TELL: LazyLock<bool> = LazyLock::new(|| {
        let own = std::fs::read("/proc/self/cgroup");
        own.is_ok_and(|own| agree(&own))
    });
    *TELL
}

/// Whether by a `cgroup` file of /proc both hierarchies have the same path.
pub fn agree(file: &[u8]) -> bool {
    let path = |start: &[u8]| {
        let mut lines = file.split(|b| *b == b'\n');
        lines.find_map(|line| line.splitn(2, |b| *b == b':').nth(1)?.strip_prefix(start))
    };
    match (path(b":"), path(b"name=systemd:")) {
        (Some(v2), Some(systemd)) => v2 == systemd,
        (v2, _) => v2.is_some(),
    }
}

/// The ids of a cgroup and of those below it.
///
/// # Errors
/// The directory cannot be read; one below it that has just gone is no error.
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

    use super::agree;
    use crate::damage::{arbitrary_bytes, proc_self_file};

    proptest! {
        #[test]
        fn any_file_says_something(bytes in arbitrary_bytes(proc_self_file("cgroup"))) {
            let twice = [&*bytes, b"\n", &bytes].concat();
            prop_assert_eq!(agree(&twice), agree(&bytes), "what comes first counts");
        }
    }

    #[test]
    fn units_are_told_where_systemd_has_them() {
        for (file, tell) in [
            ("0::/system.slice/a.service\n", true),
            ("0::/\n", true),
            // Both, as systemd has it in its hybrid mode, and where there is no systemd.
            ("5:pids:/x\n1:name=systemd:/a.slice\n0::/a.slice\n", true),
            ("1:name=systemd:/\n0::/\n", true),
            // The old way, with version 2 mounted by somebody else, and without.
            ("1:name=systemd:/user.slice\n0::/\n", false),
            ("1:name=systemd:/user.slice\n", false),
            ("5:pids:/\n", false),
            ("", false),
        ] {
            assert_eq!(agree(file.as_bytes()), tell, "{file:?}");
        }
    }
}
