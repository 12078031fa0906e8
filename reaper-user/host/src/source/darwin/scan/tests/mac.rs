//! A system of its own making.

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

/// Processes, and a kernel that tells of them as macOS's does.
#[derive(Default)]
pub struct Mac {
    pub now: u64,
    pub all: BTreeMap<u32, One>,
    pub last_unique: u64,
    /// Of whom it tells, by their unique numbers.
    pub watched: HashSet<u64>,
    pub told: Vec<KernelEvent>,
    /// Pids of whom it does not tell.
    pub refused: HashSet<u32>,
    /// Pids whose programs cannot be read.
    pub hidden: HashSet<u32>,
    /// The table cannot be read.
    pub fails: bool,
    pub wakes_in: Duration,
}

pub struct One {
    pub process: KinfoProc,
    pub identity: Identity,
}

impl Mac {
    pub fn fork(&mut self, pid: u32, parent: u32) {
        // The clock has moved on since the last one.
        self.now += 2 * MS;
        self.last_unique += 1;
        let maker = self.all.get(&parent);
        let identity = Identity {
            unique: self.last_unique,
            parent: maker.map_or(0, |maker| maker.identity.unique),
        };
        let comm = maker.map_or_else(|| b"launchd".to_vec(), |maker| maker.process.comm.clone());
        let process = KinfoProc {
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
        self.tell(
            parent,
            KernelEvent::Change {
                pid: parent,
                exec: false,
            },
        );
        self.all.insert(pid, One { process, identity });
    }

    pub fn exec(&mut self, pid: u32, program: &str) {
        self.now += MS;
        if let Some(one) = self.all.get_mut(&pid) {
            one.process.comm = program.into();
        }
        self.tell(pid, KernelEvent::Change { pid, exec: true });
    }

    /// `status` as wait(2) has it. Its children are pid 1's.
    pub fn exit(&mut self, pid: u32, status: u32) {
        self.end(pid, status);
        self.all.remove(&pid);
    }

    /// The same, and nobody has waited for it.
    pub fn end(&mut self, pid: u32, status: u32) {
        self.now += MS;
        let status = Some(status);
        self.tell(pid, KernelEvent::Exit { pid, status });
        for one in self.all.values_mut() {
            if one.process.parent == pid {
                one.process.parent = 1;
            }
            if one.process.pid == pid {
                one.process.state = ZOMBIE;
                self.watched.remove(&one.identity.unique);
            }
        }
    }

    pub fn tell(&mut self, pid: u32, what: KernelEvent) {
        let one = self.all.get(&pid);
        if one.is_some_and(|one| self.watched.contains(&one.identity.unique)) {
            self.told.push(what);
        }
    }
}

/// As the scan has it.
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
        Ok((mac.all.values().map(|one| one.process.clone()).collect(), 0))
    }

    fn key(&self, process: &KinfoProc) -> ProcessKey {
        ProcessKey {
            pid: process.pid,
            start: process.began * 1000,
        }
    }

    fn proc_entry(&self, process: &KinfoProc) -> Option<ProcEntry> {
        if self.0.borrow().hidden.contains(&process.pid) {
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
        let one = mac.all.get(&pid).filter(|one| !one.process.is_zombie());
        one.map(|one| one.identity)
    }

    fn identity_of_any(&self, pid: u32) -> Option<Identity> {
        Some(self.0.borrow().all.get(&pid)?.identity)
    }

    fn watch(&mut self, pid: u32) -> bool {
        let mut mac = self.0.borrow_mut();
        mac.told.retain(|told| match told {
            KernelEvent::Exit { pid: of, .. } | KernelEvent::Change { pid: of, .. } => *of != pid,
        });
        let unique = mac.all.get(&pid).map(|one| one.identity.unique);
        let Some(unique) = unique.filter(|_| !mac.refused.contains(&pid)) else {
            return false;
        };
        mac.watched.insert(unique)
    }

    fn read_events(&mut self) -> Vec<KernelEvent> {
        std::mem::take(&mut self.0.borrow_mut().told)
    }

    fn wake_in(&mut self, time: Duration) -> bool {
        self.0.borrow_mut().wakes_in = time;
        true
    }
}
