//! Temporary cgroups for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::proc::ProcessKey;

/// Returns whether a cgroup v2 can be created here. Prints the reason once if not; the tests that need one are left out.
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

/// Cgroup that is removed on drop, once it is empty.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup whose name ends with `suffix`. Panics if none [can be made](can_be_made).
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

    /// Moves a process to this cgroup.
    pub fn take(&self, key: ProcessKey) {
        fs::write(self.0.join("cgroup.procs"), key.pid.to_string())
            .expect("move a process to the cgroup");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_secs(5);
        let gone = || {
            // A process that created a cgroup below may have been killed before it removed it.
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
