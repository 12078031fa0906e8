//! Threads that read processes, with a bound on all of them together.
//!
//! A command line and an environment are read from a process's memory, which can take for ever. Who reads such a
//! process is left to it, and is counted for as long as that takes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Procfs, ProcfsError, Reader};
use crate::source::snapshot::{ProcessReading, Snapshot};
use crate::sys;

/// How long a pass over all processes waits for the next one.
const PATIENCE: Duration = Duration::from_secs(1);
/// Those of all snapshots.
static READERS: Readers = Readers::new(16);
/// How often in the time that a pass waits in vain others take the place of those who are stuck.
const ROUNDS: u32 = 4;
/// Bound on how many times longer a pass waits on a busy machine.
const CROWD_MAX: u32 = 30;

impl Procfs {
    /// The processes with these pids.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn snapshot_of(&self, pids: Vec<u32>) -> Result<Snapshot, ProcfsError> {
        self.snapshot_within(PATIENCE, pids)
    }

    /// The same, waiting no longer than so for any one of them.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn snapshot_within(
        &self,
        patience: Duration,
        pids: Vec<u32>,
    ) -> Result<Snapshot, ProcfsError> {
        let mut snapshot = Snapshot::default();
        let take = |_, look| snapshot.add(look);
        let unread = READERS.pass(self, patience, pids, |_, _, look| look, take)?;
        snapshot.unreadable += unread as u32;
        Ok(snapshot)
    }
}

/// The readers of one kind of pass.
pub struct Readers {
    most: usize,
    threads: Mutex<Vec<Thread>>,
}

/// One that is at work.
struct Thread {
    id: u64,
    /// The process that it has been waited for in vain at, and the start of that in ticks.
    stuck: Option<(u32, Option<u64>)>,
}

/// A place among the readers, given back when this is dropped.
struct ReaderSlot {
    readers: &'static Readers,
    id: u64,
}

impl Drop for ReaderSlot {
    fn drop(&mut self) {
        self.readers.threads().retain(|thread| thread.id != self.id);
    }
}

impl ReaderSlot {
    /// Whether another has taken over.
    fn is_stuck(&self) -> bool {
        let threads = self.readers.threads();
        let own = threads.iter().find(|thread| thread.id == self.id);
        own.is_some_and(|thread| thread.stuck.is_some())
    }
}

impl Readers {
    /// Never more than `most` threads.
    pub const fn new(most: usize) -> Readers {
        Readers {
            most,
            threads: Mutex::new(Vec::new()),
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Thread>> {
        // Nobody panics in the midst of a change.
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&'static self) -> Option<ReaderSlot> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut threads = self.threads();
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        (threads.len() < self.most).then(|| {
            threads.push(Thread { id, stuck: None });
            ReaderSlot { readers: self, id }
        })
    }

    /// Notes who is stuck at which process.
    fn note(&self, procfs: &Procfs, stuck: &HashMap<u64, u32>) {
        for thread in self.threads().iter_mut() {
            if let Some(pid) = stuck.get(&thread.id) {
                thread.stuck = Some((*pid, procfs.start_ticks(*pid)));
            }
        }
    }

    /// Whether somebody is stuck at this very process.
    fn is_held_by(&self, procfs: &Procfs, pid: u32) -> bool {
        let threads = self.threads();
        let mut stuck = threads.iter().filter_map(|thread| thread.stuck);
        stuck.any(|(held, start)| held == pid && start == procfs.start_ticks(pid))
    }

    /// Looks at processes, has `more` add to each look, and hands what comes of it to `take`. Waits no longer than
    /// `patience` for the next one, times the number of runnable threads per processor: on a crowded machine a reader
    /// that is slow is not stuck. Gives how many were not read: there was no waiting for them, or a reader of an earlier
    /// pass is stuck at them still, or so many are that there is no room for more.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn pass<T: Send + 'static>(
        &'static self,
        procfs: &Procfs,
        patience: Duration,
        mut pids: Vec<u32>,
        more: fn(&Procfs, u32, Result<ProcessReading, ProcfsError>) -> T,
        mut take: impl FnMut(u32, T),
    ) -> Result<usize, ProcfsError> {
        let all = pids.len();
        pids.retain(|pid| !self.is_held_by(procfs, *pid));
        let mut left = pids.len();
        let skipped = all - left;
        if left == 0 {
            return Ok(skipped);
        }
        let work = Arc::new(Work {
            procfs: procfs.clone(),
            pids,
            next: AtomicUsize::new(0),
            more,
        });
        let (send, looks) = channel();
        let readers = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 4));
        let mut working = self.start(&work, &send, readers.min(left))?;
        // Who is at which process.
        let mut at = HashMap::new();
        let (mut in_vain, mut waited) = (0, 0);
        while left > 0 && working > 0 && in_vain < ROUNDS {
            match looks.recv_timeout(patience / ROUNDS) {
                Ok(Said::Begun(id, pid)) => drop(at.insert(id, pid)),
                Ok(Said::Found(id, pid, found)) => {
                    at.remove(&id);
                    take(pid, found);
                    left -= 1;
                    (in_vain, waited) = (0, 0);
                }
                Err(_) if waited + 1 < sys::runnable_per_processor().min(CROWD_MAX) => waited += 1,
                Err(_) => {
                    in_vain += 1;
                    waited = 0;
                    self.note(procfs, &at);
                    let unclaimed = work.unclaimed();
                    if unclaimed > 0 {
                        // Those who are stuck leave when they come loose.
                        let room = self.start(&work, &send, at.len().min(unclaimed))?;
                        // One of them may have come loose and left again.
                        working = working.saturating_sub(at.len()) + room;
                        at.clear();
                    }
                }
            }
        }
        Ok(skipped + left)
    }

    /// Starts so many readers, or as many as there is room for: how many.
    fn start<T: Send + 'static>(
        &'static self,
        work: &Arc<Work<T>>,
        send: &Sender<Said<T>>,
        count: usize,
    ) -> Result<usize, ProcfsError> {
        for started in 0..count {
            let Some(place) = self.place() else {
                return Ok(started);
            };
            let (work, send) = (Arc::clone(work), send.clone());
            let thread = std::thread::Builder::new().name("procfs".into());
            let thread = thread.spawn(move || work.run(&place, &send));
            thread.map_err(ProcfsError::Thread)?;
        }
        Ok(count)
    }
}

/// What the readers of one pass share.
struct Work<T> {
    procfs: Procfs,
    pids: Vec<u32>,
    /// Index of the next pid.
    next: AtomicUsize,
    more: fn(&Procfs, u32, Result<ProcessReading, ProcfsError>) -> T,
}

/// What a reader, by its id, says of a process.
enum Said<T> {
    Begun(u64, u32),
    Found(u64, u32, T),
}

impl<T> Work<T> {
    fn run(&self, place: &ReaderSlot, send: &Sender<Said<T>>) {
        let mut reader = Reader::new(&self.procfs);
        while let Some(pid) = self.pids.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if send.send(Said::Begun(place.id, *pid)).is_err() {
                return;
            }
            let found = (self.more)(&self.procfs, *pid, reader.look(*pid));
            if send.send(Said::Found(place.id, *pid, found)).is_err() || place.is_stuck() {
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

    /// A fourth of it is waited before a reader counts as stuck: longer than a busy machine keeps one from a file.
    const SHORT: Duration = Duration::from_secs(2);
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

    fn readers(most: usize) -> &'static Readers {
        Box::leak(Box::new(Readers::new(most)))
    }

    /// Who was read, and how many were not.
    fn pass(readers: &'static Readers, root: &Path, patience: Duration) -> (Vec<u32>, usize) {
        let procfs = Procfs::new(root);
        let (mut read, mut pids) = (Vec::new(), procfs.pids().unwrap());
        // Those who hold their readers are first in line.
        pids.sort_unstable();
        let take = |pid, look: Result<ProcessReading, ProcfsError>| {
            assert!(matches!(look, Ok(ProcessReading::Alive(_))), "{look:?}");
            read.push(pid);
        };
        let unread = readers.pass(&procfs, patience, pids, |_, _, look| look, take);
        read.sort_unstable();
        (read, unread.unwrap())
    }

    fn at_work(readers: &Readers) -> usize {
        readers.threads().len()
    }

    /// Waits until just so many are at work: whoever is done leaves a moment after it has told of the last one.
    fn await_at_work(readers: &Readers, count: usize) {
        let end = Instant::now() + Duration::from_secs(10);
        while at_work(readers) != count {
            assert!(
                Instant::now() < end,
                "{} are at work, not {count}",
                at_work(readers)
            );
            std::thread::yield_now();
        }
    }

    /// Those who read these pipes come to the end, and leave.
    fn loosen(readers: &Readers, pipes: &[PathBuf]) {
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
        assert_eq!(pass(readers, root, SHORT), (others.clone(), 6));
        await_at_work(readers, 6);
        for _ in 0..5 {
            assert_eq!(pass(readers, root, FOR_EVER), (others.clone(), 6));
            // Those who have not left yet would take the room of the next pass.
            await_at_work(readers, 6);
        }
        // Another who has got such a pid is read.
        let aside = root.join("aside");
        fs::rename(&pipes[0], &aside).unwrap();
        process(root, 10, 77);
        assert_eq!(pass(readers, root, FOR_EVER).0, [&[10], &*others].concat());
        loosen(readers, &[&[aside], &pipes[1..]].concat());
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
            assert_eq!(pass(readers, root, patience), (Vec::new(), 20), "{n}");
            assert_eq!(at_work(readers), 3);
        }
        loosen(readers, &pipes[..3]);
        (10..20).for_each(|pid| fs::remove_dir_all(root.join(pid.to_string())).unwrap());
        assert_eq!(pass(readers, root, FOR_EVER), ((20..30).collect(), 0));
    }
}
