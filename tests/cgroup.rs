//! A cgroup of a test's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::proc::Identity;

/// Gone when this is dropped and nobody is in it any more.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// One whose name ends so, if any can be made here.
    pub fn new(suffix: &str) -> Option<Cgroup> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/mounts").ok()?;
        let root = mounts.lines().find_map(|line| {
            let mut words = line.split(' ');
            let (_, place, kind) = (words.next()?, words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(place))
        })?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("reaper-real-{}-{number}{suffix}", std::process::id());
        let path = root.join(name);
        fs::create_dir(&path).ok().map(|()| Cgroup(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn take(&self, who: Identity) {
        fs::write(self.0.join("cgroup.procs"), who.pid.to_string())
            .expect("move a process to the cgroup");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_secs(5);
        let gone = || {
            // Whoever had one in there may have been killed.
            for below in fs::read_dir(&self.0).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(below.path());
            }
            fs::remove_dir(&self.0).is_ok()
        };
        while !gone() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
