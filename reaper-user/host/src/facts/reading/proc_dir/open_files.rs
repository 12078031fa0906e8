//! Reads the sockets among the open files, and the use of resources.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::unix::ffi::OsStrExt;

use super::ProcDir;
use crate::facts::reading::listeners::{in_own_namespace, is_in_own_namespace};
use crate::facts::reading::local;
use crate::facts::reading::sockets::{connections, listening_ports, listens};
use crate::source::procfs::parse::{field, number, words};
use crate::sys;
use reaper_model::activity::Activity;
use reaper_model::event::TICK_NS;
use reaper_model::facts::LocalSockets;

/// CPU time in ns for reading the open files of a process. Enough for about 15,000 files.
const FILES_BUDGET: u64 = 25_000_000;
/// Number of files read between two readings of the clock, which is a system call.
const FILES_CHUNK: usize = 64;

impl ProcDir {
    /// Returns the inode numbers of the process's sockets, and whether these are all. Stops once it has used `budget`
    /// (ns of this thread's CPU time).
    fn sockets(&self, budget: u64) -> io::Result<(HashSet<u64>, bool)> {
        let mut sockets = HashSet::new();
        let end = sys::thread_time().saturating_add(budget);
        for (n, file) in std::fs::read_dir(self.path.join("fd"))?.enumerate() {
            if n % FILES_CHUNK == FILES_CHUNK - 1 && sys::thread_time() >= end {
                return Ok((sockets, false));
            }
            // A file that has been closed since is skipped.
            if let Ok(link) = std::fs::read_link(file?.path())
                && let Some(inode) = link.as_os_str().as_bytes().strip_prefix(b"socket:[")
            {
                sockets.extend(number::<u64>(inode.strip_suffix(b"]").unwrap_or_default()));
            }
        }
        Ok((sockets, true))
    }

    /// Returns the process's use of resources and its connections. `None` if it has too many open files to read within
    /// [`FILES_BUDGET`].
    ///
    /// # Errors
    /// A file of the process or a socket table cannot be read.
    pub(in crate::facts::reading) fn activity(&mut self) -> io::Result<Option<Activity>> {
        let unknown = || io::Error::from(io::ErrorKind::InvalidData);
        self.dir.read("io", &mut self.buffer)?;
        let bytes = |name: &[u8]| -> Option<u64> {
            let rest = field(&self.buffer, name)?;
            words(rest).next().and_then(number)
        };
        let (read, written) = (bytes(b"rchar:"), bytes(b"wchar:"));
        let io_bytes = read.zip(written).ok_or_else(unknown)?;
        self.dir.read("status", &mut self.buffer)?;
        // A process without its own memory (an exiting one) has no such lines.
        let kib = |name: &[u8]| -> u64 {
            let rest = field(&self.buffer, name).unwrap_or_default();
            words(rest).next().and_then(number).unwrap_or(0)
        };
        let (rss_kib, swap_kib) = (kib(b"VmRSS:"), kib(b"VmSwap:"));
        let (own, all) = self.sockets(FILES_BUDGET)?;
        if !all {
            return Ok(None);
        }
        let ticks = self.stat(|stat| stat.cpu).ok_or_else(unknown)?;
        let mut activity = Activity {
            cpu_ns: ticks.saturating_mul(TICK_NS),
            io_bytes: io_bytes.0.saturating_add(io_bytes.1),
            rss: rss_kib.saturating_mul(1024),
            swap: swap_kib.saturating_mul(1024),
            ..Activity::default()
        };
        if !own.is_empty() {
            let (clients, others) = connections(&self.path.join("net"), &own)?;
            (activity.clients, activity.sockets) = (clients.into(), others.into());
        }
        Ok(Some(activity))
    }

    /// Returns whether the process had a listening TCP or Unix socket after `requested` (ns since boot). In another network
    /// namespace than the service's, only TCP counts. `None` if it has too many open files to read all within
    /// [`FILES_BUDGET`], and those that were read include no such socket.
    ///
    /// Read by path: the caller must check [`ProcDir::is_alive`] afterwards, because the pid can be reused.
    pub(in crate::facts::reading) fn listening(&self, requested: u64) -> io::Result<Option<bool>> {
        let listeners = in_own_namespace(&self.path, requested);
        let local = match &listeners {
            Some(_) => Some(local::table(requested)?),
            None => None,
        };
        let has_local = |sockets: &HashSet<u64>| {
            let local = local.as_ref();
            local.is_some_and(|local| !local.listening.is_disjoint(sockets))
        };
        let (sockets, all) = self.sockets(FILES_BUDGET)?;
        let listens = match listeners {
            Some(listeners) => !listeners.is_disjoint(&sockets) || has_local(&sockets),
            None if sockets.is_empty() => false,
            None => {
                let net = self.path.join("net");
                listens(&net.join("tcp"), &sockets)?
                    || match listens(&net.join("tcp6"), &sockets) {
                        // The kernel has no IPv6.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                        listens => listens?,
                    }
            }
        };
        Ok((listens || all).then_some(listens))
    }

    /// Returns the displays to which the process is connected, and whether it has a listening Unix socket. `None` if it
    /// has too many open files to read all within [`FILES_BUDGET`], or if the kernel does not show which processes have
    /// windows: in another network namespace that has one, it may be any process. Read by path, as in
    /// [`ProcDir::listening`].
    pub(in crate::facts::reading) fn local_sockets(
        &self,
        requested: u64,
    ) -> io::Result<Option<LocalSockets>> {
        let table = local::table(requested)?;
        let windows = match &table.windows {
            Some(windows) => windows,
            None if table.has_display => return Ok(None),
            None => &HashMap::new(),
        };
        if is_in_own_namespace(&self.path) != Some(true)
            && local::has_window(&self.path.join("net/unix"))?
        {
            return Ok(None);
        }
        if windows.is_empty() && table.listening.is_empty() {
            return Ok(Some(LocalSockets::default()));
        }
        let (sockets, all) = self.sockets(FILES_BUDGET)?;
        let windows = sockets.iter().filter_map(|inode| windows.get(inode));
        let mut displays: Vec<Box<[u8]>> = windows.cloned().collect();
        displays.sort_unstable();
        displays.dedup();
        let listens = !table.listening.is_disjoint(&sockets);
        Ok(all.then(|| LocalSockets {
            displays: displays.into(),
            listens,
        }))
    }

    /// Returns the TCP ports on which the process listens, in order. Leaves out those of files that cannot be read
    /// within [`FILES_BUDGET`]. Read by path, as in [`ProcDir::listening`].
    pub(in crate::facts) fn listening_ports(&self) -> io::Result<Vec<u16>> {
        let (sockets, _) = self.sockets(FILES_BUDGET)?;
        let tables = ["net/tcp", "net/tcp6"].map(|table| self.path.join(table));
        let ports = tables
            .iter()
            .filter_map(|table| listening_ports(table, &sockets).ok());
        let ports: io::Result<BTreeSet<u16>> = ports.flatten().collect();
        Ok(ports?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reaper_model::event::ProcessKey;

    #[test]
    fn files_beyond_the_budget_are_unknown() {
        let root = tempfile::tempdir().unwrap();
        let files = root.path().join("7/fd");
        std::fs::create_dir_all(&files).unwrap();
        let stat = "7 (x) S 1 9 8 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 0 0\n";
        std::fs::write(root.path().join("7/stat"), stat).unwrap();
        let subject = ProcDir::open(root.path(), ProcessKey { pid: 7, start: 0 }).unwrap();
        for n in 0..2 * FILES_CHUNK {
            std::os::unix::fs::symlink(format!("socket:[{n}]"), files.join(n.to_string())).unwrap();
        }
        let (sockets, all) = subject.sockets(u64::MAX).unwrap();
        assert_eq!((sockets.len(), all), (2 * FILES_CHUNK, true));
        let (sockets, all) = subject.sockets(0).unwrap();
        assert_eq!((sockets.len(), all), (FILES_CHUNK - 1, false));
    }
}
