//! Reads a process from /proc.

mod open_files;
mod program;
mod stdio;
mod unit;

use std::path::{Path, PathBuf};

use super::CpuTime;
use crate::source::procfs::parse::{Stat, innermost_pid, is_nested, number};
use crate::source::procfs::{Dir, living_thread};
use crate::sys;
#[cfg(test)]
pub(in crate::facts) use program::{ARGUMENTS_MAX, ENVIRON_MAX};
use reaper_model::event::{ProcessKey, TICK_NS};
use reaper_model::facts::{Fact, KernelSession};
use unit::unit;

/// A process that is being read.
///
/// Files that are read through `dir` are those of one process, even if its pid is reused meanwhile. After reading files
/// by path, [`ProcDir::is_alive`] must be checked. If it does not hold, the contents may be those of another process.
pub(in crate::facts) struct ProcDir {
    /// Path of `dir`.
    path: PathBuf,
    /// Directory of the process, or of a thread that still runs after its leader has exited.
    dir: Dir,
    buffer: Vec<u8>,
}

impl ProcDir {
    /// Opens the living process with this key. `None` if it is gone or cannot be read. Start times are compared by the
    /// tick.
    pub(in crate::facts) fn open(root: &Path, key: ProcessKey) -> Option<ProcDir> {
        let mut path = root.join(key.pid.to_string());
        let mut dir = Dir::open(&path).ok()?;
        let mut buffer = Vec::with_capacity(4 << 10);
        dir.read("stat", &mut buffer).ok()?;
        let stat = Stat::parse(&buffer)?;
        let start = stat.start.saturating_mul(TICK_NS);
        if !key.has_same_tick(ProcessKey { start, ..key }) {
            return None;
        }
        if stat.is_leader_dead() {
            let (name, thread) = living_thread(&path, &dir, &stat)?;
            (path, dir) = (path.join(name), thread);
        }
        Some(ProcDir { path, dir, buffer })
    }

    /// Returns whether the process still runs. What was read before counts only in this case. An exiting process has no
    /// environment and no files any more, and would look like one that never had any.
    pub(in crate::facts) fn is_alive(&mut self) -> bool {
        self.stat(|stat| !stat.is_leader_dead()) == Some(true)
    }

    /// Passes the fields of the `stat` file to `take`. `None` if the file cannot be read or parsed.
    fn stat<T>(&mut self, take: impl FnOnce(Stat) -> T) -> Option<T> {
        self.dir.read("stat", &mut self.buffer).ok()?;
        Stat::parse(&self.buffer).map(take)
    }

    /// Returns whether the process is in an inner pid namespace and, if so, its pid in the innermost one. `None` if its
    /// status cannot be read.
    pub(in crate::facts) fn is_nested(&mut self) -> Option<(bool, Option<u32>)> {
        self.dir.read("status", &mut self.buffer).ok()?;
        let nested = is_nested(&self.buffer);
        let inner = innermost_pid(&self.buffer).filter(|_| nested);
        Some((nested, inner))
    }

    /// Returns the login uid of the kernel's audit system; `None` if it is unset or not shown.
    pub(in crate::facts) fn login_uid(&mut self) -> Option<u32> {
        self.dir.read("loginuid", &mut self.buffer).ok()?;
        number(&self.buffer).filter(|uid| *uid != u32::MAX)
    }

    /// Returns the innermost systemd unit of the process; empty if none exists.
    pub(in crate::facts) fn unit(&mut self) -> Fact<std::sync::Arc<str>> {
        match self.dir.read("cgroup", &mut self.buffer) {
            Ok(()) => Fact::Known(unit(&self.buffer).into()),
            Err(_) => Fact::Unreadable,
        }
    }

    /// Returns the current session id and controlling terminal.
    pub(super) fn session(&mut self) -> Fact<KernelSession> {
        let now = self.stat(|stat| KernelSession {
            sid: stat.sid,
            tty: stat.tty,
        });
        now.map_or(Fact::Unreadable, Fact::Known)
    }

    /// Returns the CPU time of all threads up to now; `None` if it cannot be read.
    pub(super) fn cpu_time(&mut self) -> Option<CpuTime> {
        let ticks = self.stat(|stat| stat.cpu)?;
        let at = sys::monotonic();
        Some(CpuTime { ticks, at })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damage::{arbitrary_bytes, proc_self_file};
    use reaper_model::ruleset::Pattern;

    proptest! {
        // Each case creates files.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_proc_files_can_be_read(
            stat in prop_oneof![Just(proc_self_file("stat")), arbitrary_bytes(proc_self_file("stat"))],
            environ in arbitrary_bytes("A=1\0REAPER_KEEP=1\0"),
            cgroup in arbitrary_bytes(proc_self_file("cgroup")),
            status in arbitrary_bytes(proc_self_file("status")),
            login in arbitrary_bytes("1000"),
        ) {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("7");
            std::fs::create_dir(&dir).unwrap();
            let start = Stat::parse(&stat).map_or(0, |stat| stat.start.saturating_mul(TICK_NS));
            for (name, content) in [
                ("stat", &stat),
                ("environ", &environ),
                ("cgroup", &cgroup),
                ("status", &status),
                ("loginuid", &login),
            ] {
                std::fs::write(dir.join(name), content).unwrap();
            }
            let subject = ProcDir::open(root.path(), ProcessKey { pid: 7, start });
            prop_assert!(subject.is_none() || Stat::parse(&stat).is_some());
            if let Some(mut subject) = subject {
                let keep = [Pattern::argv("REAPER_KEEP=1").unwrap()];
                let markers = subject.markers(&keep);
                let is_there = environ.split(|b| *b == 0).any(|v| v == b"REAPER_KEEP=1");
                prop_assert!(markers == Fact::Unreadable || markers == Fact::Known(u64::from(is_there)));
                subject.unit();
                subject.session();
                subject.cpu_time();
                prop_assert!(subject.is_nested().is_some());
                prop_assert!(subject.login_uid() != Some(u32::MAX));
            }
        }
    }
}
