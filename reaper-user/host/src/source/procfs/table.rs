//! The process table as /proc has it, and what is found by reading all of it.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use super::readers::{PATIENCE, READERS};
use super::{Liveness, ProcessMemory, Procfs, ProcfsError, Snapshot, Zombie};
use crate::source::ProcessTable;
use crate::sys;
use crate::sys::proc_file::{Stat, is_gone, number, value, words};
use reaper_model::event::ProcessKey;

impl ProcessTable for Procfs {
    fn pids(&self) -> Result<Vec<u32>, ProcfsError> {
        let listing = |source| ProcfsError::Read {
            path: self.root.clone(),
            source,
        };
        let mut pids: Vec<u32> = Vec::new();
        for entry in std::fs::read_dir(&self.root).map_err(listing)? {
            pids.extend(number::<u32>(
                entry.map_err(listing)?.file_name().as_bytes(),
            ));
        }
        Ok(pids)
    }

    fn probe(&self, key: ProcessKey) -> Result<Liveness, ProcfsError> {
        let path = self.root.join(key.pid.to_string()).join("stat");
        match std::fs::read(&path) {
            Ok(bytes) => {
                let stat = Stat::parse(&bytes).ok_or(ProcfsError::Malformed { path })?;
                let parent = stat.parent;
                let alive = key.has_same_tick(stat.key(key.pid)) && !stat.is_over();
                Ok(if alive {
                    Liveness::Alive { parent }
                } else {
                    Liveness::Gone
                })
            }
            Err(error) if is_gone(&error) => Ok(Liveness::Gone),
            Err(source) => Err(ProcfsError::Read { path, source }),
        }
    }

    fn snapshot_of(&self, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        self.snapshot_within(PATIENCE, pids)
    }

    fn snapshot_within(&self, patience: Duration, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        let mut snapshot = Snapshot::default();
        let take = |_, look| snapshot.add(look);
        let unread = self.pass(&READERS, patience, pids, |_, _, look| look, take)?;
        snapshot.unreadable += unread as u32;
        Ok(snapshot)
    }

    fn state(&self, pid: u32) -> Option<char> {
        self.stat(pid, |stat| char::from(stat.state))
    }

    fn rss_bytes(&self, pid: u32) -> Option<u64> {
        let status = std::fs::read(self.root.join(pid.to_string()).join("status")).ok()?;
        Some(kib(&status, b"VmRSS:").unwrap_or(0))
    }

    fn memory(&self, pid: u32, swaps: bool) -> Option<ProcessMemory> {
        let directory = self.root.join(pid.to_string());
        if swaps {
            let status = std::fs::read(directory.join("status")).ok()?;
            return Some(ProcessMemory {
                rss: kib(&status, b"VmRSS:")?,
                swap: kib(&status, b"VmSwap:").unwrap_or(0),
            });
        }
        let statm = std::fs::read(directory.join("statm")).ok()?;
        let mut pages = words(&statm).map_while(number::<u64>);
        let (size, resident) = (pages.next()?, pages.next()?);
        (size > 0).then(|| ProcessMemory {
            rss: resident.saturating_mul(sys::page_size()),
            swap: 0,
        })
    }
}

impl Procfs {
    /// Memory that this very process has resident, in bytes; `None` if it is gone.
    pub fn rss_of(&self, key: ProcessKey) -> Option<u64> {
        let rss = self.rss_bytes(key.pid)?;
        // Still it, so that was its too.
        let now = self.stat(key.pid, |stat| stat.key(key.pid))?;
        key.has_same_tick(now).then_some(rss)
    }

    /// Who has exited and is not waited for by its parent.
    ///
    /// # Errors
    /// The directory cannot be read; one process that cannot is left out.
    pub fn zombies(&self) -> Result<Vec<Zombie>, ProcfsError> {
        let zombie = |pid: u32| {
            let (key, parent, comm) = self.stat(pid, |stat| {
                let zombie = (stat.key(pid), stat.parent, stat.comm.to_vec());
                stat.is_over().then_some(zombie)
            })??;
            let uid = std::fs::metadata(self.root.join(pid.to_string()))
                .ok()?
                .uid();
            Some(Zombie {
                key,
                parent,
                comm,
                uid,
            })
        };
        Ok(self.pids()?.into_iter().filter_map(zombie).collect())
    }
}

/// Returns what a `status` file has in KiB under a name, in bytes.
fn kib(status: &[u8], name: &[u8]) -> Option<u64> {
    value(status, name).map(|kib: u64| kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn this_process_has_some_and_both_files_say_so() {
        let proc = Procfs::default();
        let own = std::process::id();
        let (statm, status) = (proc.memory(own, false), proc.memory(own, true));
        let (statm, status) = (statm.unwrap().rss, status.unwrap().rss);
        assert!(statm > 1 << 20, "{statm}");
        // The kernel counts by processor, and other tests run meanwhile.
        assert!(statm.abs_diff(status) < 64 << 20, "{statm} {status}");
    }

    #[test]
    fn a_zombie_and_one_that_is_gone_have_none() {
        let proc = Procfs::default();
        let mut child = Command::new("/bin/sleep")
            .arg("600")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        assert!(proc.memory(pid, false).is_some());
        child.kill().unwrap();
        while proc.state(pid) != Some('Z') {
            std::thread::yield_now();
        }
        assert_eq!(
            (proc.memory(pid, false), proc.memory(pid, true)),
            (None, None)
        );
        child.wait().unwrap();
        assert_eq!(
            (proc.memory(pid, false), proc.memory(pid, true)),
            (None, None)
        );
    }
}
