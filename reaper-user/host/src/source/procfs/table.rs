//! Implements the process table by /proc.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use super::readers::{READ_TIMEOUT, READERS};
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
                let alive = key.has_same_tick(stat.key(key.pid)) && !stat.has_exited();
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
        self.snapshot_within(READ_TIMEOUT, pids)
    }

    fn snapshot_within(&self, timeout: Duration, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        let mut snapshot = Snapshot::default();
        let take = |_, reading| snapshot.add(reading);
        let unread = self.pass(&READERS, timeout, pids, |_, _, reading| reading, take)?;
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
    /// Returns the resident memory of the process with this key, in bytes; `None` if it is gone.
    pub fn rss_of(&self, key: ProcessKey) -> Option<u64> {
        let rss = self.rss_bytes(key.pid)?;
        // The pid still belongs to the process, so the memory read before does too.
        let now = self.stat(key.pid, |stat| stat.key(key.pid))?;
        key.has_same_tick(now).then_some(rss)
    }

    /// Returns all zombies. Unreadable ones are left out.
    ///
    /// # Errors
    /// /proc cannot be listed.
    pub fn zombies(&self) -> Result<Vec<Zombie>, ProcfsError> {
        let zombie = |pid: u32| {
            let (key, parent, comm) = self.stat(pid, |stat| {
                let zombie = (stat.key(pid), stat.parent, stat.comm.to_vec());
                stat.has_exited().then_some(zombie)
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

/// Returns a field of a `status` file in KiB, converted to bytes.
fn kib(status: &[u8], name: &[u8]) -> Option<u64> {
    value(status, name).map(|kib: u64| kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn memory_is_about_the_same_in_statm_and_status() {
        let proc = Procfs::default();
        let own = std::process::id();
        let (statm, status) = (proc.memory(own, false), proc.memory(own, true));
        let (statm, status) = (statm.unwrap().rss, status.unwrap().rss);
        assert!(statm > 1 << 20, "{statm}");
        // The kernel counts per processor, and other tests run meanwhile.
        assert!(statm.abs_diff(status) < 64 << 20, "{statm} {status}");
    }

    #[test]
    fn zombie_and_missing_process_have_no_memory() {
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
