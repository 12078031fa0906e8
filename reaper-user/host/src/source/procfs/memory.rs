//! How much memory a process has.

use super::parse::{field, number, words};
use super::{ProcessMemory, Procfs};
use crate::sys;

impl Procfs {
    /// What whoever has the pid has now; `None` for one that is gone or has given all back already, as a
    /// zombie has. `swaps` says whether anything is swapped out on this host, which takes longer to read.
    ///
    /// It waits for no lock that the process may hold for long.
    pub fn memory(&self, pid: u32, swaps: bool) -> Option<ProcessMemory> {
        let directory = self.root.join(pid.to_string());
        if swaps {
            let status = std::fs::read(directory.join("status")).ok()?;
            let bytes = |name: &[u8]| {
                let kib: u64 = words(field(&status, name)?).next().and_then(number)?;
                Some(kib.saturating_mul(1024))
            };
            return Some(ProcessMemory {
                rss: bytes(b"VmRSS:")?,
                swap: bytes(b"VmSwap:").unwrap_or(0),
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
