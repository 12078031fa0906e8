//! Threads for reads that can block.
//!
//! Reading another process's memory can block forever, because a process in uninterruptible sleep can hold the lock
//! that the reader needs. A thread that is stuck in such a read is replaced, up to a limit, and ends once the read
//! returns. A thread that waits for a processor is not stuck, however long it waits on a busy machine.
//!
//! Each job has an owner, usually a user. The threads take one job per owner in turn. So a user with many jobs delays
//! another user by one job, and a user whose reads get stuck does not occupy all threads. A queued job is dropped
//! once nothing waits for its result.
//!
//! The threads start with normal priority, so that the reads caused by one user do not delay the processes of others.
//! Only a job that the engine waits for raises its priority.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::advice::Advised as _;
use crate::sys;

/// Limits on the number of threads.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Maximum number of threads that stay when there is no job.
    pub idle: usize,
    /// Maximum number of threads that have not been replaced.
    pub threads: usize,
    /// Maximum number of threads, including replaced ones.
    pub max_threads: usize,
    /// Maximum number of running jobs of an owner. As many more can be stuck in replaced threads.
    pub max_per_owner: usize,
}

impl Size {
    /// Returns the limits of a pool of at most `threads` threads, all of which may run jobs of one owner. Stuck threads
    /// are not replaced. Threads end when there is no job.
    pub const fn fixed(threads: usize) -> Size {
        Size {
            idle: 0,
            threads,
            max_threads: threads,
            max_per_owner: threads,
        }
    }
}

/// A unit of work for one thread.
pub struct Job {
    /// Key for taking turns: the real uid of the process that is read, or the number of a pass over many processes.
    pub owner: u32,
    /// Id of the job in the results of [`Workers::replace_stuck`] and [`Workers::stuck`]. Need not be unique.
    pub id: u64,
    /// Whether the job runs before the non-urgent jobs of the same owner.
    pub is_urgent: bool,
    /// Token of the requester. The job is dropped if no strong reference exists when its turn comes.
    pub wanted: Weak<()>,
    /// Work to do; gets the handle of the thread that runs it.
    pub work: Box<dyn FnOnce(&Slot) + Send>,
}

/// A pool of threads. Dropping it drops the queued jobs, and each thread ends after its current job.
pub struct Workers(Arc<Shared>);

struct Shared {
    name: &'static str,
    size: Size,
    state: Mutex<State>,
    wakeup: Condvar,
}

#[derive(Default)]
struct State {
    queues: BTreeMap<u32, Queue>,
    /// Owner of the job that started last.
    last_owner: u32,
    threads: HashMap<u64, Thread>,
    /// Last number given to a thread or a job.
    last_number: u64,
    /// Number of threads that wait for a job and have not been woken.
    idle: usize,
    /// Number of threads that have been woken and do not run yet.
    woken: usize,
    is_closed: bool,
}

/// Queued jobs of one owner, urgent ones first, then by number.
type Queue = BTreeMap<(bool, u64), Job>;

#[derive(Clone, Copy, Default)]
struct Thread {
    /// Thread id ([`sys::thread_id`]). `None` until the thread runs.
    thread_id: Option<u32>,
    /// Owner of the running job. `None` while the thread waits for one.
    owner: Option<u32>,
    /// Id of the running job, or of its current item.
    id: u64,
    /// Start of the job (CLOCK_MONOTONIC, ns).
    since: u64,
    /// Sleep that the last check found, if any.
    sleep: Option<Sleep>,
    is_stuck: bool,
    /// Whether another thread runs in place of this stuck one.
    is_replaced: bool,
}

#[derive(Clone, Copy)]
struct Sleep {
    /// Number of the sleep ([`sys::sleep_number`]).
    number: u64,
    /// Time of the first check that found it (CLOCK_MONOTONIC, ns).
    since: u64,
}

impl Thread {
    /// Records the start of a job or of its next item, with this id. The thread no longer counts as stuck.
    fn begin(&mut self, id: u64) {
        (self.id, self.since) = (id, sys::monotonic());
        (self.sleep, self.is_stuck) = (None, false);
    }

    /// Records the current sleep of the thread, and returns the time in ns since the first check that found this sleep.
    /// `None` if the thread is runnable.
    fn check(&mut self, now: u64) -> Option<u64> {
        let number = self.thread_id.and_then(sys::sleep_number);
        let same = self.sleep.filter(|sleep| Some(sleep.number) == number);
        self.sleep = same.or(number.map(|number| Sleep { number, since: now }));
        self.sleep.map(|sleep| now.saturating_sub(sleep.since))
    }
}

impl Job {
    fn is_wanted(&self) -> bool {
        self.wanted.strong_count() > 0
    }
}

impl State {
    /// Removes and returns the next wanted job, starting with the owner after the last one. Skips owners at their
    /// limit. Drops the unwanted jobs that it finds on the way. `None` if no job may run now.
    fn next_job(&mut self, max_per_owner: usize) -> Option<Job> {
        let later = self
            .queues
            .range((Bound::Excluded(self.last_owner), Bound::Unbounded));
        let owners = later.chain(self.queues.range(..=self.last_owner));
        let owners: Vec<u32> = owners.map(|(owner, _)| *owner).collect();
        for owner in owners {
            if self.count(owner, false) >= max_per_owner {
                continue;
            }
            let queue = self.queues.get_mut(&owner)?;
            let jobs = std::iter::from_fn(|| queue.pop_first());
            let job = jobs.map(|(_, job)| job).find(Job::is_wanted);
            if queue.is_empty() {
                self.queues.remove(&owner);
            }
            if job.is_some() {
                self.last_owner = owner;
                return job;
            }
        }
        None
    }

    /// Returns the number of running jobs of an owner: in replaced threads if `is_replaced`, else in the other threads.
    fn count(&self, owner: u32, is_replaced: bool) -> usize {
        let is_of =
            |thread: &&Thread| thread.owner == Some(owner) && thread.is_replaced == is_replaced;
        self.threads.values().filter(is_of).count()
    }

    /// Returns the number of threads that have not been replaced.
    fn active(&self) -> usize {
        let is_active = |thread: &&Thread| !thread.is_replaced;
        self.threads.values().filter(is_active).count()
    }
}

impl Workers {
    /// Returns a pool without threads. They start with the first jobs and have the given name.
    pub fn new(name: &'static str, size: Size) -> Workers {
        Workers(Arc::new(Shared {
            name,
            size,
            state: Mutex::default(),
            wakeup: Condvar::new(),
        }))
    }

    /// Queues a job. Never waits for a thread.
    ///
    /// # Errors
    /// There is no thread, apart from replaced ones, and none can be started. The job stays queued nevertheless.
    pub fn submit(&self, job: Job) -> io::Result<()> {
        let mut state = self.0.lock();
        let owner = job.owner;
        state.last_number += 1;
        let place = (!job.is_urgent, state.last_number);
        let queue = state.queues.entry(owner).or_default();
        queue.insert(place, job);
        // Also done here, because no turn comes while all threads of the owner are stuck.
        if queue.len().is_power_of_two() {
            queue.retain(|_, job| job.is_wanted());
        }
        if state.count(owner, false) >= self.0.size.max_per_owner {
            return Ok(());
        }
        self.add_thread(&mut state)
    }

    /// Marks as stuck the threads that have slept in one system call for `limit` (ns). Lets other threads run in their
    /// place, as far as [`Size`] permits.
    ///
    /// The time counts from the first call that found this sleep, so with a limit of 0 one call suffices. Checks only
    /// threads that run a job of `owner`, if given. Returns the job ids of newly marked threads, replaced or not.
    pub fn replace_stuck(&self, limit: u64, owner: Option<u32>) -> Vec<u64> {
        let mut state = self.0.lock();
        let Size {
            max_threads,
            max_per_owner,
            ..
        } = self.0.size;
        let now = sys::monotonic();
        let mut newly_stuck = Vec::new();
        let mut stuck: Vec<(u64, u32)> = Vec::new();
        for (number, thread) in &mut state.threads {
            let is_candidate =
                |of: &u32| !thread.is_replaced && owner.is_none_or(|owner| owner == *of);
            let Some(owner) = thread.owner.filter(is_candidate) else {
                continue;
            };
            if thread.check(now).is_some_and(|slept| slept >= limit) {
                if !thread.is_stuck {
                    newly_stuck.push(thread.id);
                }
                thread.is_stuck = true;
                stuck.push((*number, owner));
            }
        }
        for (number, owner) in stuck {
            let has_room =
                state.threads.len() < max_threads && state.count(owner, true) < max_per_owner;
            if let Some(thread) = state.threads.get_mut(&number) {
                thread.is_replaced = has_room;
            }
            if has_room
                && !state.queues.is_empty()
                && let Err(error) = self.add_thread(&mut state)
            {
                tracing::warn!(
                    "cannot start a thread to replace one that is stuck in /proc: {}; decisions may be late",
                    error.advised()
                );
            }
        }
        newly_stuck
    }

    /// Returns the job ids of stuck threads and when these jobs started (ns since boot). If the machine was suspended
    /// since the start, the returned time is too late by that period.
    pub fn stuck(&self) -> Vec<(u64, u64)> {
        let state = self.0.lock();
        let stuck = state.threads.values().filter(|thread| thread.is_stuck);
        let suspended = sys::suspended();
        stuck
            .map(|thread| (thread.id, thread.since + suspended))
            .collect()
    }

    /// Returns whether a thread that is not stuck runs a job of the owner or is about to take one.
    pub fn has_progress(&self, owner: u32) -> bool {
        let state = self.0.lock();
        let mut threads = state.threads.values();
        threads.any(|thread| match thread.owner {
            Some(of) => of == owner && !thread.is_stuck,
            None => state.queues.contains_key(&owner),
        })
    }

    /// Returns whether queued jobs can run even if no stuck read returns: a thread is not stuck, or
    /// there are fewer threads than the maximum.
    pub fn has_room(&self) -> bool {
        let state = self.0.lock();
        state.threads.len() < self.0.size.max_threads
            || state.threads.values().any(|thread| !thread.is_stuck)
    }

    #[cfg(test)]
    pub(crate) fn threads(&self) -> usize {
        self.0.lock().threads.len()
    }

    /// Wakes an idle thread, or starts one if all are busy and [`Size`] permits.
    ///
    /// # Errors
    /// No thread can be started, and all that exist have been replaced.
    fn add_thread(&self, state: &mut State) -> io::Result<()> {
        let Shared { name, size, .. } = *self.0;
        if state.idle > 0 {
            (state.idle, state.woken) = (state.idle - 1, state.woken + 1);
            self.0.wakeup.notify_one();
        } else if state.active() < size.threads && state.threads.len() < size.max_threads {
            state.last_number += 1;
            let number = state.last_number;
            let shared = Arc::clone(&self.0);
            let run = move || Slot { shared, number }.run();
            let thread = std::thread::Builder::new().name(name.into());
            match thread.spawn(run) {
                Ok(_) => drop(state.threads.insert(number, Thread::default())),
                Err(error) if state.active() == 0 => return Err(error),
                Err(_) => {}
            }
        }
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        state.queues.clear();
        self.0.wakeup.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is fine: no job runs while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of a running job on its thread.
pub struct Slot {
    shared: Arc<Shared>,
    number: u64,
}

impl Slot {
    /// Records that the job continues with another item. It gets the time limit of a new job, and `id` as the job's id.
    pub fn begin(&self, id: u64) {
        let mut state = self.shared.lock();
        if let Some(thread) = state.threads.get_mut(&self.number) {
            thread.begin(id);
        }
    }

    /// Returns whether another thread runs in place of this one. A job of several items must then stop.
    pub fn is_replaced(&self) -> bool {
        let state = self.shared.lock();
        let thread = state.threads.get(&self.number);
        thread.is_none_or(|thread| thread.is_replaced)
    }

    /// Runs jobs until the thread must end.
    fn run(self) {
        while let Some(job) = self.next() {
            (job.work)(&self);
        }
    }

    /// Waits for the next job. Returns `None` if the thread must end: the pool was dropped, enough threads are idle, or
    /// enough replacements of this thread run.
    fn next(&self) -> Option<Job> {
        let mut state = self.shared.lock();
        let Size {
            idle,
            threads,
            max_per_owner,
            ..
        } = self.shared.size;
        // Removed under the lock under which the queues were found empty, so no job is left to a thread that ends.
        let end = |state: &mut State| {
            state.threads.remove(&self.number);
            None
        };
        let waiting = Thread {
            thread_id: Some(sys::thread_id()),
            ..Thread::default()
        };
        let before = state.threads.insert(self.number, waiting);
        // Its replacements can already be as many as allowed.
        if before.is_some_and(|thread| thread.is_replaced) && state.active() > threads {
            return end(&mut state);
        }
        loop {
            if let Some(job) = state.next_job(max_per_owner) {
                if let Some(thread) = state.threads.get_mut(&self.number) {
                    thread.owner = Some(job.owner);
                    thread.begin(job.id);
                }
                return Some(job);
            }
            if state.is_closed || state.idle >= idle {
                return end(&mut state);
            }
            state.idle += 1;
            while state.woken == 0 && !state.is_closed {
                let wakeup = &self.shared.wakeup;
                state = wakeup.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.woken = state.woken.saturating_sub(1);
        }
    }
}

impl Drop for Slot {
    // Also runs after a job has panicked.
    fn drop(&mut self) {
        self.shared.lock().threads.remove(&self.number);
    }
}
