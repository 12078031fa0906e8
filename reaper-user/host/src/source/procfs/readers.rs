//! Passes over many processes on worker threads.
//!
//! A process that holds its reader is left unread, and so it is in later passes until that reader is free.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::{Procfs, ProcfsError, Reader};
use crate::source::snapshot::ProcessReading;
use crate::sys;
use crate::workers::{Job, Size, Slot, Workers};

/// How long a pass over all processes waits for the next one.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
/// How often in the time that a pass waits in vain stuck readers are replaced.
const ROUNDS: u32 = 10;
/// How many times longer it waits while a reader is not stuck, which may take its time.
const MOVING: u32 = 8;
/// Number of passes so far.
static PASSES: AtomicU32 = AtomicU32::new(0);
/// Readers of all snapshots.
pub(super) static READERS: Readers = readers();

/// Threads for one kind of pass.
pub type Readers = LazyLock<Workers>;

/// Returns threads for one kind of pass, which end with it.
pub const fn readers() -> Readers {
    LazyLock::new(|| Workers::new("procfs", Size::fixed(16)))
}

impl Procfs {
    /// Reads processes, has `more` add to each reading, and hands what comes of it to `take`. Waits no longer than
    /// `patience` for the next one while all readers sleep, times the number of runnable threads per processor: one of these may
    /// hold a lock that a reader needs. Returns how many were not read: those that hold a reader, of this pass or of an
    /// earlier one, and the rest if there is no reader left.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn pass<T: Send + 'static>(
        &self,
        readers: &Workers,
        patience: Duration,
        mut pids: Vec<u32>,
        more: fn(&Procfs, u32, Result<ProcessReading, ProcfsError>) -> T,
        mut take: impl FnMut(u32, T),
    ) -> Result<usize, ProcfsError> {
        // Several passes may share the readers. One of them must not take another's for its own.
        let owner = PASSES.fetch_add(1, Ordering::Relaxed);
        let all = pids.len();
        let stuck = readers.stuck();
        // One that started later only has the pid of the one that holds its reader.
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
        // What is still queued when the pass ends is dropped.
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
        let step = patience / ROUNDS;
        let (mut in_vain, mut waited) = (0, 0);
        let mut has_room = readers.has_room();
        while left > 0 && in_vain < ROUNDS * MOVING && has_room {
            if let Ok((pid, it)) = found.recv_timeout(step) {
                take(pid, it);
                left -= 1;
                (in_vain, waited) = (0, 0);
                continue;
            }
            waited += 1;
            let crowd = sys::runnable_per_processor();
            if waited < crowd {
                continue;
            }
            waited = 0;
            // Half of it: timers are not exact.
            let stuck = readers.replace_stuck(sys::nanoseconds(step / 2 * crowd), Some(owner));
            start(stuck.len().min(work.unclaimed()))?;
            let is_moving = readers.is_moving(owner) || !stuck.is_empty();
            in_vain += if is_moving { 1 } else { MOVING };
            has_room = readers.has_room();
        }
        Ok(skipped + left)
    }
}

/// What the readers of one pass share.
struct Work<T> {
    procfs: Procfs,
    pids: Vec<u32>,
    /// Index of the next pid.
    next: AtomicUsize,
    more: fn(&Procfs, u32, Result<ProcessReading, ProcfsError>) -> T,
    send: Sender<(u32, T)>,
}

impl<T> Work<T> {
    fn run(&self, slot: &Slot) {
        let mut reader = Reader::new(&self.procfs);
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(pid) = self.pids.get(index) else {
                return;
            };
            slot.begin(u64::from(*pid));
            let found = (self.more)(&self.procfs, *pid, reader.look(*pid));
            if self.send.send((*pid, found)).is_err() || slot.is_replaced() {
                return;
            }
        }
    }

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
    /// So long that a test which waited for it would never end.
    const FOR_EVER: Duration = Duration::from_secs(3600);

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

    /// One whose command line nobody gets to the end of: a pipe without a writer.
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

    /// Who was read, and how many were not.
    fn pass(readers: &Workers, root: &Path, patience: Duration) -> (Vec<u32>, usize) {
        let procfs = Procfs::new(root);
        let (mut read, mut pids) = (Vec::new(), procfs.pids().unwrap());
        // Those who hold their readers are first in line.
        pids.sort_unstable();
        let take = |pid, look: Result<ProcessReading, ProcfsError>| {
            assert!(matches!(look, Ok(ProcessReading::Alive(_))), "{look:?}");
            read.push(pid);
        };
        let unread = procfs.pass(readers, patience, pids, |_, _, look| look, take);
        read.sort_unstable();
        (read, unread.unwrap())
    }

    /// Waits until just so many are at work: whoever is done leaves a moment after it has told of the last one.
    fn await_at_work(readers: &Workers, count: usize) {
        let end = Instant::now() + Duration::from_secs(10);
        while readers.threads() != count {
            assert!(
                Instant::now() < end,
                "{} are at work, not {count}",
                readers.threads()
            );
            std::thread::yield_now();
        }
    }

    /// Those who read these pipes come to the end, and leave.
    fn loosen(readers: &Workers, pipes: &[PathBuf]) {
        for pipe in pipes {
            drop(File::options().write(true).open(pipe).unwrap());
        }
        await_at_work(readers, 0);
    }

    #[test]
    fn who_holds_its_reader_is_left_to_it_and_costs_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let pipes: Vec<_> = (10..16).map(|pid| stuck(root, pid)).collect();
        (20..40).for_each(|pid| process(root, pid, pid));
        let others: Vec<u32> = (20..40).collect();
        let readers = readers(9);
        assert_eq!(pass(&readers, root, SHORT), (others.clone(), 6));
        await_at_work(&readers, 6);
        for _ in 0..5 {
            assert_eq!(pass(&readers, root, FOR_EVER), (others.clone(), 6));
            // Those who have not left yet would take the room of the next pass.
            await_at_work(&readers, 6);
        }
        // Another who has got such a pid is read.
        let aside = root.join("aside");
        fs::rename(&pipes[0], &aside).unwrap();
        process(root, 10, u32::MAX);
        assert_eq!(pass(&readers, root, FOR_EVER).0, [&[10], &*others].concat());
        loosen(&readers, &[&[aside], &pipes[1..]].concat());
    }

    #[test]
    fn where_all_are_stuck_the_rest_is_unread_and_nobody_waits() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let pipes: Vec<_> = (10..20).map(|pid| stuck(root, pid)).collect();
        (20..30).for_each(|pid| process(root, pid, pid));
        let readers = readers(3);
        for n in 0..5 {
            let patience = if n == 0 { SHORT } else { FOR_EVER };
            assert_eq!(pass(&readers, root, patience), (Vec::new(), 20), "{n}");
            assert_eq!(readers.threads(), 3);
        }
        loosen(&readers, &pipes[..3]);
        (10..20).for_each(|pid| fs::remove_dir_all(root.join(pid.to_string())).unwrap());
        assert_eq!(pass(&readers, root, FOR_EVER), ((20..30).collect(), 0));
    }
}
