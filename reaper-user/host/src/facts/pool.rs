//! Threads that read, of which one that gets stuck holds up nobody but itself.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::reading::{ReadResult, read_facts};
use crate::sys;
use reaper_model::event::{Image, ProcessKey};
use reaper_model::facts::FactSet;
use reaper_model::ruleset::Ruleset;

/// Bytes of a thread's stack: nothing large lives there.
const STACK: usize = 256 << 10;

/// What a thread is to find out.
pub(super) struct Job {
    /// Never 0.
    pub(super) id: u64,
    pub(super) key: ProcessKey,
    pub(super) needs: FactSet,
    /// Whether its answer wakes the reader also where those of the pool do not.
    pub(super) wakes: bool,
    pub(super) image: Option<Arc<Image>>,
    /// Real uid of the process, where the pool has a limit for each user.
    pub(super) uid: u32,
}

/// What it has found out.
pub(super) struct Done {
    pub(super) id: u64,
    /// When it began to look, in ns since boot.
    pub(super) at: u64,
    pub(super) found: ReadResult,
}

/// What all threads share.
pub(super) struct Common {
    /// Of the /proc that is read.
    pub(super) root: PathBuf,
    pub(super) rules: Ruleset,
    pub(super) woken: Arc<Notify>,
}

/// Threads for one kind of work.
pub(super) struct Pool {
    name: &'static str,
    /// Whether an answer wakes whoever waits.
    wakes: bool,
    size: Size,
    common: Arc<Common>,
    jobs: Sender<Job>,
    queue: Arc<Mutex<Receiver<Job>>>,
    done: Sender<Done>,
    threads: Vec<Arc<Thread>>,
    at_work: AtWork,
}

/// Number of threads of a pool.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) first: usize,
    pub(super) most: usize,
    /// Most jobs of one user that are at work at a time. Those beyond it are answered unread.
    pub(super) of_user: usize,
}

/// Number of jobs at work, by real uid.
type AtWork = Arc<Mutex<HashMap<u32, usize>>>;

/// What is to be seen of a thread from outside.
#[derive(Default)]
struct Thread {
    /// Id of what it is at, 0 for nothing.
    job: AtomicU64,
    /// Since when, in ns of the monotonic clock.
    since: AtomicU64,
    /// Another has its place: it ends with what it is at.
    replaced: AtomicBool,
}

impl Thread {
    /// Whether it has been at one job for so long.
    fn is_stuck(&self, now: u64, limit: u64) -> bool {
        self.job.load(Ordering::Acquire) != 0
            && self.since.load(Ordering::Relaxed).saturating_add(limit) <= now
    }
}

impl Pool {
    /// Starts so many threads; there will never be more than the size allows.
    pub(super) fn start(
        name: &'static str,
        size: Size,
        wakes: bool,
        common: &Arc<Common>,
        done: &Sender<Done>,
    ) -> io::Result<Pool> {
        let (jobs, queue) = channel();
        let mut pool = Pool {
            name,
            wakes,
            size,
            common: Arc::clone(common),
            jobs,
            queue: Arc::new(Mutex::new(queue)),
            done: done.clone(),
            threads: Vec::new(),
            at_work: AtWork::default(),
        };
        for _ in 0..size.first {
            pool.add()?;
        }
        Ok(pool)
    }

    /// Blocks nobody: the threads wait for each other, but nobody who asks waits for them.
    pub(super) fn ask(&self, job: Job) {
        // The queue lives as long as this does.
        let _ = self.jobs.send(job);
    }

    /// Since when a thread has been at this, in ns of the monotonic clock.
    pub(super) fn begun(&self, id: u64) -> Option<u64> {
        let at_it = |thread: &&Arc<Thread>| thread.job.load(Ordering::Acquire) == id;
        let thread = self.threads.iter().find(at_it)?;
        Some(thread.since.load(Ordering::Relaxed))
    }

    /// Puts a new thread in the place of each that has been at one job for so long, while there is room for
    /// more; whether some thread is not stuck.
    pub(super) fn mend(&mut self, now: u64, limit: u64) -> bool {
        // Those that have come loose are gone when they have finished.
        self.threads.retain(|thread| Arc::strong_count(thread) > 1);
        let stuck = |thread: &&Arc<Thread>| {
            !thread.replaced.load(Ordering::Relaxed) && thread.is_stuck(now, limit)
        };
        let stuck: Vec<_> = self.threads.iter().filter(stuck).map(Arc::clone).collect();
        for thread in stuck {
            if self.threads.len() >= self.size.most {
                break;
            }
            match self.add() {
                Ok(()) => thread.replaced.store(true, Ordering::Relaxed),
                Err(error) => {
                    tracing::warn!("cannot start a thread to read /proc: {error}");
                    break;
                }
            }
        }
        self.threads
            .iter()
            .any(|thread| !thread.is_stuck(now, limit))
    }

    fn add(&mut self) -> io::Result<()> {
        let thread = Arc::new(Thread::default());
        let worker = Worker {
            wakes: self.wakes,
            common: Arc::clone(&self.common),
            queue: Arc::clone(&self.queue),
            done: self.done.clone(),
            thread: Arc::clone(&thread),
            of_user: self.size.of_user,
            at_work: Arc::clone(&self.at_work),
        };
        let builder = std::thread::Builder::new();
        let builder = builder.name(self.name.into()).stack_size(STACK);
        builder.spawn(move || worker.run())?;
        self.threads.push(thread);
        Ok(())
    }
}

struct Worker {
    wakes: bool,
    common: Arc<Common>,
    queue: Arc<Mutex<Receiver<Job>>>,
    done: Sender<Done>,
    thread: Arc<Thread>,
    of_user: usize,
    at_work: AtWork,
}

impl Worker {
    fn run(self) {
        if self.wakes {
            // Who waits for this is about to send a signal, perhaps on a machine that a tree keeps busy.
            sys::prioritise();
        }
        while let Some(job) = self.next() {
            let Job {
                id,
                key,
                needs,
                wakes,
                ..
            } = job;
            let at = sys::boot_time();
            let Common { root, rules, .. } = &*self.common;
            let found = match self.begin(job.uid) {
                true => read_facts(root, key, needs, job.image.as_ref(), rules),
                false => ReadResult::nothing(),
            };
            self.finish(job.uid);
            if self.done.send(Done { id, at, found }).is_err() {
                return;
            }
            self.thread.job.store(0, Ordering::Release);
            if self.wakes || wakes {
                self.common.woken.notify_one();
            }
            if self.thread.replaced.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Counts a job of a user as at work. Returns whether the user may have so many.
    fn begin(&self, uid: u32) -> bool {
        let Ok(mut at_work) = self.at_work.lock() else {
            return false;
        };
        let count = at_work.entry(uid).or_default();
        *count += 1;
        *count <= self.of_user
    }

    fn finish(&self, uid: u32) {
        if let Ok(mut at_work) = self.at_work.lock()
            && let Entry::Occupied(mut count) = at_work.entry(uid)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let queue = self.queue.lock().ok()?;
        let job = queue.recv().ok()?;
        self.thread.since.store(sys::monotonic(), Ordering::Relaxed);
        self.thread.job.store(job.id, Ordering::Release);
        Some(job)
    }
}
