//! A thread that looks at processes, so that nobody waits for one that keeps its reader waiting: a command line is
//! read from a process's memory, which can take for ever.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::source::procfs::{ProcessReading, Procfs};
use crate::sys;

/// So many may be held up; then nothing is read until one comes loose.
const STUCK_MAX: usize = 16;

/// See the module.
pub struct Aside {
    procfs: Procfs,
    pub(super) patience: Duration,
    worker: Option<Worker>,
    /// Held by each thread too.
    threads: Arc<()>,
}

/// The thread that is free.
struct Worker {
    pids: Sender<u32>,
    looks: Receiver<Option<ProcessReading>>,
}

impl Aside {
    /// Waits no longer than so for a look.
    pub fn new(procfs: Procfs, patience: Duration) -> Aside {
        Aside {
            procfs,
            patience,
            worker: None,
            threads: Arc::default(),
        }
    }

    /// Looks at one process. `None` if it is there, and cannot be read, or not in time.
    pub fn look(&mut self, pid: u32) -> Option<ProcessReading> {
        let worker = self.worker.take().or_else(|| self.start())?;
        worker.pids.send(pid).ok()?;
        // One that is not heard of in time is left to what holds it, and ends when that lets go.
        let look = worker.looks.recv_timeout(self.patience).ok()?;
        self.worker = Some(worker);
        look
    }

    fn start(&self) -> Option<Worker> {
        if Arc::strong_count(&self.threads) > STUCK_MAX {
            return None;
        }
        let (pids, asked) = channel();
        let (answer, looks) = channel();
        let (procfs, counted) = (self.procfs.clone(), Arc::clone(&self.threads));
        let work = move || {
            let _counted = counted;
            sys::raise_priority();
            for pid in asked {
                let look = procfs.read(pid).inspect_err(|e| tracing::debug!("{e}"));
                if answer.send(look.ok()).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("programs".into());
        match thread.spawn(work) {
            Ok(_) => Some(Worker { pids, looks }),
            Err(error) => {
                tracing::error!("cannot start a thread to read /proc: {error}");
                None
            }
        }
    }
}
