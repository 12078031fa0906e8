//! Reads many processes on worker threads.
//!
//! A process that blocks its reader is left unread, also by later passes, until that reader is free again.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::{Procfs, ProcfsError, Reader};
use crate::source::snapshot::ProcessReading;
use crate::sys;
use crate::workers::{Job, Size, Slot, Workers};

/// Time limit for the next result of a pass.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of checks for stuck readers within that time.
const CHECKS: u32 = 10;
/// Factor by which the time limit is longer while a reader that is not stuck works.
const PROGRESS_FACTOR: u32 = 8;
/// Number of passes so far.
static PASSES: AtomicU32 = AtomicU32::new(0);
/// Readers of all snapshots.
pub(super) static READERS: Readers = readers();

/// Threads for one kind of pass.
pub type Readers = LazyLock<Workers>;

/// Returns a pool of up to 16 threads for one kind of pass. The threads end with the pass.
pub const fn readers() -> Readers {
    LazyLock::new(|| Workers::new("procfs", Size::fixed(16)))
}

impl Procfs {
    /// Reads processes on the threads of `readers`, where `more` turns each reading into a result. The calling thread
    /// passes the results to `take`, in the order of their arrival.
    ///
    /// The pass ends early if no result comes for `timeout`. If all readers sleep, this limit is multiplied by the
    /// number of runnable threads per processor. One of these threads may hold a lock that a reader needs. While a
    /// reader works that is not stuck, the limit is eight times longer.
    ///
    /// Returns the number of unread processes: those that block a reader of this or an earlier pass, and all others if
    /// no reader is left.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn pass<T: Send + 'static>(
        &self,
        readers: &Workers,
        timeout: Duration,
        mut pids: Vec<u32>,
        more: fn(&Procfs, u32, Result<ProcessReading, ProcfsError>) -> T,
        mut take: impl FnMut(u32, T),
    ) -> Result<usize, ProcfsError> {
        // Several passes may share the readers. The number of the pass identifies its own.
        let owner = PASSES.fetch_add(1, Ordering::Relaxed);
        let all = pids.len();
        let stuck = readers.stuck();
        // A process that started after the read began is not the one that blocks the reader.
        let is_held = |pid: u32| {
            let mut began = stuck.iter().filter(|(id, _)| *id == u64::from(pid));
            began.any(|(_, began)| {
                let start = self.stat(pid, |stat| stat.key(pid).start);
                start.unwrap_or_default() <= *began
            })
        };
        pids.retain(|pid| !is_held(*pid));
        let mut left = pids.len();
        let skipped = all - left;
        let (send, found) = channel();
        let work = Arc::new(Work {
            procfs: self.clone(),
            pids,
            next: AtomicUsize::new(0),
            more,
            send,
        });
        // Jobs that are still queued when the pass ends are dropped.
        let wanted = Arc::new(());
        let start = |count: usize| -> Result<(), ProcfsError> {
            for _ in 0..count {
                let work = Arc::clone(&work);
                let job = Job {
                    owner,
                    id: u64::MAX,
                    is_urgent: false,
                    wanted: Arc::downgrade(&wanted),
                    work: Box::new(move |slot| work.run(slot)),
                };
                readers.submit(job).map_err(ProcfsError::Thread)?;
            }
            Ok(())
        };
        let count = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 4));
        start(count.min(left))?;
        let step = timeout / CHECKS;
        let (mut waits, mut steps) = (0, 0);
        let mut has_room = readers.has_room();
        while left > 0 && waits < CHECKS * PROGRESS_FACTOR && has_room {
            if let Ok((pid, result)) = found.recv_timeout(step) {
                take(pid, result);
                left -= 1;
                (waits, steps) = (0, 0);
                continue;
            }
            steps += 1;
            let runnable = sys::runnable_per_processor();
            if steps < runnable {
                continue;
            }
            steps = 0;
            // Half of the step, because timers are not exact.
            let stuck = readers.replace_stuck(sys::nanoseconds(step / 2 * runnable), Some(owner));
            start(stuck.len().min(work.unclaimed()))?;
            let has_progress = readers.has_progress(owner) || !stuck.is_empty();
            waits += if has_progress { 1 } else { PROGRESS_FACTOR };
            has_room = readers.has_room();
        }
        Ok(skipped + left)
    }
}

/// State that the readers of one pass share.
struct Work<T> {
    procfs: Procfs,
    pids: Vec<u32>,
    /// Index of the next pid.
    next: AtomicUsize,
    /// Function that turns the reading of a pid into a result.
    more: fn(&Procfs, u32, Result<ProcessReading, ProcfsError>) -> T,
    send: Sender<(u32, T)>,
}

impl<T> Work<T> {
    /// Reads one process after the other and sends the results. Returns when none is left, the pass has ended, or
    /// another thread has replaced this one.
    fn run(&self, slot: &Slot) {
        let mut reader = Reader::new(&self.procfs);
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(pid) = self.pids.get(index) else {
                return;
            };
            slot.begin(u64::from(*pid));
            let found = (self.more)(&self.procfs, *pid, reader.read(*pid));
            if self.send.send((*pid, found)).is_err() || slot.is_replaced() {
                return;
            }
        }
    }

    /// Returns the number of processes that no thread has begun to read.
    fn unclaimed(&self) -> usize {
        let next = self.next.load(Ordering::Relaxed);
        self.pids.len().saturating_sub(next)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::{Path, PathBuf};
    use std::time::Instant;

    use super::*;
    use crate::source::ProcessTable;

    const SHORT: Duration = Duration::from_secs(1);
    /// Time limit that no test may reach.
    const FOREVER: Duration = Duration::from_secs(3600);

    fn process(root: &Path, pid: u32, start: u32) {
        let dir = root.join(pid.to_string());
        fs::create_dir_all(&dir).unwrap();
        let stat = format!("{pid} (x) S 1 9 8 34816 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 {start} 0\n");
        fs::write(dir.join("stat"), stat).unwrap();
        fs::write(
            dir.join("status"),
            "Name:\tx\nUid:\t1\t1\t1\t1\nNSpid:\t7\n",
        )
        .unwrap();
        fs::write(dir.join("cmdline"), "x\0").unwrap();
    }

    /// Adds a process whose command line cannot be read to its end: a pipe without a writer.
    fn stuck(root: &Path, pid: u32) -> PathBuf {
        process(root, pid, pid);
        let pipe = root.join(format!("{pid}/cmdline"));
        fs::remove_file(&pipe).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        pipe
    }

    fn readers(most: usize) -> Workers {
        Workers::new("test", Size::fixed(most))
    }

    /// Returns the pids of the processes that a pass reads, and the number of unread ones.
    fn pass(readers: &Workers, root: &Path, timeout: Duration) -> (Vec<u32>, usize) {
        let procfs = Procfs::new(root);
        let (mut read, mut pids) = (Vec::new(), procfs.pids().unwrap());
        // Processes that block their readers come first.
        pids.sort_unstable();
        let take = |pid, found: Result<ProcessReading, ProcfsError>| {
            assert!(matches!(found, Ok(ProcessReading::Alive(_))), "{found:?}");
            read.push(pid);
        };
        let unread = procfs.pass(readers, timeout, pids, |_, _, reading| reading, take);
        read.sort_unstable();
        (read, unread.unwrap())
    }

    /// Waits until `count` threads are left: a thread ends a moment after it has sent its last result.
    fn await_threads(readers: &Workers, count: usize) {
        let end = Instant::now() + Duration::from_secs(10);
        while readers.threads() != count {
            assert!(
                Instant::now() < end,
                "{} threads, not {count}",
                readers.threads()
            );
            std::thread::yield_now();
        }
    }

    /// Lets the threads that read these pipes end.
    fn unblock(readers: &Workers, pipes: &[PathBuf]) {
        for pipe in pipes {
            drop(File::options().write(true).open(pipe).unwrap());
        }
        await_threads(readers, 0);
    }

    #[test]
    fn process_that_blocks_its_reader_is_left_unread() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let pipes: Vec<_> = (10..16).map(|pid| stuck(root, pid)).collect();
        (20..40).for_each(|pid| process(root, pid, pid));
        let others: Vec<u32> = (20..40).collect();
        let readers = readers(9);
        assert_eq!(pass(&readers, root, SHORT), (others.clone(), 6));
        await_threads(&readers, 6);
        for _ in 0..5 {
            assert_eq!(pass(&readers, root, FOREVER), (others.clone(), 6));
            // Threads that have not ended yet would count against the limit of the next pass.
            await_threads(&readers, 6);
        }
        // A later process with the pid is read.
        let aside = root.join("aside");
        fs::rename(&pipes[0], &aside).unwrap();
        process(root, 10, u32::MAX);
        assert_eq!(pass(&readers, root, FOREVER).0, [&[10], &*others].concat());
        unblock(&readers, &[&[aside], &pipes[1..]].concat());
    }

    #[test]
    fn pass_without_free_readers_does_not_wait() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let pipes: Vec<_> = (10..20).map(|pid| stuck(root, pid)).collect();
        (20..30).for_each(|pid| process(root, pid, pid));
        let readers = readers(3);
        for n in 0..5 {
            let timeout = if n == 0 { SHORT } else { FOREVER };
            assert_eq!(pass(&readers, root, timeout), (Vec::new(), 20), "{n}");
            assert_eq!(readers.threads(), 3);
        }
        unblock(&readers, &pipes[..3]);
        (10..20).for_each(|pid| fs::remove_dir_all(root.join(pid.to_string())).unwrap());
        assert_eq!(pass(&readers, root, FOREVER), ((20..30).collect(), 0));
    }
}
