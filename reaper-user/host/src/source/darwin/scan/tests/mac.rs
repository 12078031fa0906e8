//! Simulated macOS kernel.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::super::{Kernel, KernelEvent};
use crate::sys::kinfo::{Identity, KinfoProc, ZOMBIE};
use reaper_model::event::{Image, ProcEntry, ProcessKey, Uids};

pub const MS: u64 = 1_000_000;

/// Simulated processes, and a kernel that reports their events as macOS does.
#[derive(Default)]
pub struct Mac {
    pub now: u64,
    pub all: BTreeMap<u32, FakeProcess>,
    pub last_unique: u64,
    /// Unique ids of the watched processes.
    pub watched: HashSet<u64>,
    pub events: Vec<KernelEvent>,
    /// Pids of processes that it refuses to watch.
    pub unwatchable: HashSet<u32>,
    /// Pids whose programs cannot be read.
    pub unreadable: HashSet<u32>,
    /// Whether the table cannot be read.
    pub fails: bool,
    pub wakes_in: Duration,
}

pub struct FakeProcess {
    pub info: KinfoProc,
    pub identity: Identity,
}

impl Mac {
    pub fn fork(&mut self, pid: u32, parent: u32) {
        // Each process starts at a different time.
        self.now += 2 * MS;
        self.last_unique += 1;
        let creator = self.all.get(&parent);
        let identity = Identity {
            unique: self.last_unique,
            parent: creator.map_or(0, |creator| creator.identity.unique),
        };
        let comm = creator.map_or_else(|| b"launchd".to_vec(), |creator| creator.info.comm.clone());
        let info = KinfoProc {
            pid,
            parent,
            began: self.now / 1000,
            uids: Uids::default(),
            saved_uid: 0,
            group: pid,
            terminal: 0,
            comm,
            state: 2,
            is_kernel: false,
        };
        self.report(
            parent,
            KernelEvent::Change {
                pid: parent,
                exec: false,
            },
        );
        self.all.insert(pid, FakeProcess { info, identity });
    }

    pub fn exec(&mut self, pid: u32, program: &str) {
        self.now += MS;
        if let Some(process) = self.all.get_mut(&pid) {
            process.info.comm = program.into();
        }
        self.report(pid, KernelEvent::Change { pid, exec: true });
    }

    /// Ends and reaps a process, with a wait status. Pid 1 adopts its children.
    pub fn exit(&mut self, pid: u32, status: u32) {
        self.end(pid, status);
        self.all.remove(&pid);
    }

    /// Ends a process, which becomes a zombie.
    pub fn end(&mut self, pid: u32, status: u32) {
        self.now += MS;
        let status = Some(status);
        self.report(pid, KernelEvent::Exit { pid, status });
        for process in self.all.values_mut() {
            if process.info.parent == pid {
                process.info.parent = 1;
            }
            if process.info.pid == pid {
                process.info.state = ZOMBIE;
                self.watched.remove(&process.identity.unique);
            }
        }
    }

    pub fn report(&mut self, pid: u32, what: KernelEvent) {
        let process = self.all.get(&pid);
        if process.is_some_and(|process| self.watched.contains(&process.identity.unique)) {
            self.events.push(what);
        }
    }
}

/// Handle of the simulated kernel for the scan.
pub struct Shared(pub Rc<RefCell<Mac>>);

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        unreachable!("the tests drain without waiting")
    }
}

impl Kernel for Shared {
    type Error = &'static str;

    fn now(&self) -> u64 {
        self.0.borrow().now
    }

    fn boot_time(&self) -> u64 {
        self.0.borrow().now
    }

    fn rows(&mut self) -> Result<(Vec<KinfoProc>, usize), &'static str> {
        let mac = self.0.borrow();
        if mac.fails {
            return Err("no memory");
        }
        Ok((mac.all.values().map(|p| p.info.clone()).collect(), 0))
    }

    fn key(&self, process: &KinfoProc) -> ProcessKey {
        ProcessKey {
            pid: process.pid,
            start: process.began * 1000,
        }
    }

    fn proc_entry(&self, process: &KinfoProc) -> Option<ProcEntry> {
        if self.0.borrow().unreadable.contains(&process.pid) {
            return None;
        }
        let identity = self.identity(process.pid)?;
        let image = Image {
            comm: process.comm.clone(),
            exe: process.comm.clone(),
            ..Image::default()
        };
        Some(ProcEntry {
            read_at: self.now(),
            exact: true,
            pidfd_inode: identity.unique,
            membership: None,
            key: self.key(process),
            parent: process.parent,
            uids: process.uids,
            image: Arc::new(image),
            kernel_thread: false,
            namespace_init: false,
        })
    }

    fn identity(&self, pid: u32) -> Option<Identity> {
        let mac = self.0.borrow();
        let process = mac
            .all
            .get(&pid)
            .filter(|process| !process.info.is_zombie());
        process.map(|process| process.identity)
    }

    fn identity_of_any(&self, pid: u32) -> Option<Identity> {
        Some(self.0.borrow().all.get(&pid)?.identity)
    }

    fn watch(&mut self, pid: u32) -> bool {
        let mut mac = self.0.borrow_mut();
        mac.events.retain(|events| match events {
            KernelEvent::Exit { pid: of, .. } | KernelEvent::Change { pid: of, .. } => *of != pid,
        });
        let unique = mac.all.get(&pid).map(|process| process.identity.unique);
        let Some(unique) = unique.filter(|_| !mac.unwatchable.contains(&pid)) else {
            return false;
        };
        mac.watched.insert(unique)
    }

    fn read_events(&mut self) -> Vec<KernelEvent> {
        std::mem::take(&mut self.0.borrow_mut().events)
    }

    fn wake_in(&mut self, time: Duration) -> bool {
        self.0.borrow_mut().wakes_in = time;
        true
    }
}
