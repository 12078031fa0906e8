//! A cgroup of a test's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::proc::ProcessKey;

/// Whether one can be made here. If not, that is said once: whatever is told in one is to be left out.
pub fn can_be_made() -> bool {
    static CAN_BE: LazyLock<bool> = LazyLock::new(|| {
        let made = Cgroup::make("");
        if let Err(why) = &made {
            eprintln!(
                "no cgroup v2 can be made here, so the tests that need one are left out: {why}"
            );
        }
        made.is_ok()
    });
    *CAN_BE
}

/// Gone when this is dropped and nobody is in it any more.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// One whose name ends so, where it [can be made](can_be_made).
    pub fn new(suffix: &str) -> Cgroup {
        Cgroup::make(suffix).unwrap_or_else(|why| panic!("make a cgroup v2: {why}"))
    }

    fn make(suffix: &str) -> Result<Cgroup, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        let mut roots = mounts.lines().filter_map(|line| {
            let mut words = line.split(' ');
            let (_, place, kind) = (words.next()?, words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(place))
        });
        let root = roots.next().ok_or("none is mounted")?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("reaper-real-{}-{number}{suffix}", std::process::id());
        let path = root.join(name);
        match fs::create_dir(&path) {
            Ok(()) => Ok(Cgroup(path)),
            Err(e) => Err(format!("{}: {e}", path.display())),
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn take(&self, who: ProcessKey) {
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
