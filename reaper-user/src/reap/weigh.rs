//! How much memory is a process's own: what it shares divided among all who share it (PSS).
//!
//! The kernel walks the page tables for that, with the process's memory locked against changes: 0.2 ms for a small one,
//! 2 ms for 64 MiB, 230 ms for 2 GiB. So a thread does it that nobody waits for, after the signals are sent; of large
//! processes it is not asked, since what is read is given back only after that; and nor of those for whom it comes too late.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use reaper_host::kernel::{ProcessHandle, ProcessTable, Signals};

/// The largest that is read, in bytes that are resident: of that it takes some 20 ms.
const LARGEST: u64 = 256 << 20;
/// How late one may be read.
const PATIENCE: Duration = Duration::from_millis(100);
/// How many wait to be read at most.
const QUEUED: usize = 256;
/// Bytes of the thread's stack.
const STACK: usize = 128 << 10;

/// What is read of one process, in bytes, once it is.
pub(super) type Share = Arc<OnceLock<u64>>;

/// See the module.
pub(super) struct Scales {
    processes: Arc<dyn ProcessTable>,
    /// `None`: nobody was weighed yet, or no thread can be started.
    thread: Option<SyncSender<Load>>,
}

struct Load {
    pid: u32,
    /// Of whoever is meant.
    pidfd: Box<dyn ProcessHandle>,
    asked: Instant,
    share: Share,
}

impl Scales {
    pub(super) fn new(processes: Arc<dyn ProcessTable>) -> Scales {
        Scales {
            processes,
            thread: None,
        }
    }

    /// Has a process read that has so much resident memory. `own` is its pidfd.
    pub(super) fn ask(
        &mut self,
        signals: &dyn Signals,
        pid: u32,
        own: &dyn ProcessHandle,
        rss: u64,
    ) -> Option<Share> {
        if rss > LARGEST {
            return None;
        }
        // One of its own for the thread, as a copy would be waited on for as long as it is open. It is of the
        // same process if that has not exited by now.
        let pidfd = signals.open(pid).ok().filter(|_| !own.has_exited())?;
        let share = Share::default();
        let load = Load {
            pid,
            pidfd,
            asked: Instant::now(),
            share: Arc::clone(&share),
        };
        let thread = match &self.thread {
            Some(thread) => thread,
            None => self.thread.insert(start(Arc::clone(&self.processes))?),
        };
        // What finds no room is not worth a descriptor: one that is stuck may keep the thread for good.
        thread.try_send(load).ok().map(|()| share)
    }
}

fn start(processes: Arc<dyn ProcessTable>) -> Option<SyncSender<Load>> {
    let (thread, loads) = sync_channel(QUEUED);
    let builder = std::thread::Builder::new().name("weigh".into());
    let started = builder
        .stack_size(STACK)
        .spawn(move || weigh(&*processes, loads));
    if let Err(error) = &started {
        tracing::warn!("no thread for reading memory can be started: {error}");
    }
    started.is_ok().then_some(thread)
}

fn weigh(processes: &dyn ProcessTable, loads: Receiver<Load>) {
    for load in loads {
        if load.asked.elapsed() > PATIENCE {
            continue;
        }
        let pss = processes.pss(load.pid);
        // Not somebody else who has its pid by now.
        if let Some(pss) = pss.filter(|_| !load.pidfd.has_exited()) {
            let _ = load.share.set(pss);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use reaper_host::kernel::Pidfds;
    use reaper_host::source::procfs::Procfs;

    #[test]
    fn one_that_lives_is_read_and_large_or_dead_ones_are_not() {
        let mut child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let signals = Pidfds::new().unwrap();
        let own = signals.open(pid).unwrap();
        let mut scales = Scales::new(Arc::new(Procfs::default()));
        assert!(scales.ask(&signals, pid, &*own, LARGEST + 1).is_none());
        let end = Instant::now() + Duration::from_secs(10);
        let pss = loop {
            let share = scales.ask(&signals, pid, &*own, 1 << 20).unwrap();
            // The thread lets go of it when it has read, or has come too late, as on a busy machine: it is asked again.
            while Arc::strong_count(&share) > 1 {
                assert!(Instant::now() < end, "the thread does not come to it");
                std::thread::yield_now();
            }
            if let Some(pss) = share.get() {
                break *pss;
            }
            assert!(Instant::now() < end, "it is not read");
        };
        // It shares its libraries with many.
        let rss = Procfs::default().rss_bytes(pid).unwrap();
        assert!(0 < pss && pss < rss, "{pss} of {rss}");
        child.kill().unwrap();
        assert!(own.wait(Duration::from_secs(10)));
        assert!(scales.ask(&signals, pid, &*own, 1 << 20).is_none());
        child.wait().unwrap();
        assert!(scales.ask(&signals, pid, &*own, 1 << 20).is_none());
    }
}
