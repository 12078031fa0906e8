//! Threads for reads that can block.
//!
//! A read of another process's memory can take forever: a process in uninterruptible sleep can hold the lock that the
//! reader needs. A thread that is stuck in such a read is replaced, up to a bound, and ends once the read returns. A thread
//! that merely waits for a processor is not stuck, however long that takes on a busy machine.
//!
//! Jobs are queued by owner, mostly a user, and the threads take a job of each in turn. So a user with many jobs delays another by
//! one job, and a user whose reads get stuck does not occupy all threads. Jobs that nothing waits for any more are dropped
//! before they begin.
//!
//! The threads start with normal priority: a user who makes the service read much must not delay the processes of others.
//! Only a job that the engine waits for raises it.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::sys;

/// Number of threads.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Threads that stay when there is nothing to do.
    pub idle: usize,
    /// Threads that are not stuck.
    pub threads: usize,
    /// All threads, with those that were replaced.
    pub most: usize,
    /// Most jobs of an owner that run at a time. As many more can be stuck in threads that were replaced.
    pub of_owner: usize,
}

impl Size {
    /// As many as may be stuck, which end when there is nothing to do.
    pub const fn fixed(threads: usize) -> Size {
        Size {
            idle: 0,
            threads,
            most: threads,
            of_owner: threads,
        }
    }
}

/// A piece of work for one thread.
pub struct Job {
    /// Owners take turns: the real uid of the user whose process is read, or the number of a pass over many processes.
    pub owner: u32,
    /// Identifies the job in the results of [`Workers::replace_stuck`].
    pub id: u64,
    /// Whether the job runs before those of the same owner that are not urgent.
    pub is_urgent: bool,
    /// The job is dropped unless another reference to this exists when its turn comes.
    pub wanted: Weak<()>,
    pub work: Box<dyn FnOnce(&Slot) + Send>,
}

/// A pool of threads. When it is dropped, queued jobs are dropped too, and each thread ends after its job.
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
    /// Owner of the last job that was begun.
    turn: u32,
    threads: HashMap<u64, Thread>,
    /// Last number of a thread or a job.
    last: u64,
    /// Number of threads that wait for a job and have not been woken.
    idle: usize,
    /// Number of threads that were woken and do not run yet.
    woken: usize,
    is_closed: bool,
}

/// Queued jobs of one owner: those that are not urgent come after those that are, and each by its number.
type Queue = BTreeMap<(bool, u64), Job>;

#[derive(Clone, Copy, Default)]
struct Thread {
    /// See [`sys::thread_id`]. `None` until the thread runs.
    thread_id: Option<u32>,
    /// Owner of the job that runs. `None` while the thread waits for one.
    owner: Option<u32>,
    id: u64,
    /// When the job began, in ns of CLOCK_MONOTONIC.
    since: u64,
    /// What it sleeps in, if it did at the last check.
    sleep: Option<Sleep>,
    is_stuck: bool,
    /// Whether another thread runs in the place of this one, which is stuck.
    is_replaced: bool,
}

#[derive(Clone, Copy)]
struct Sleep {
    /// See [`sys::sleep_number`].
    number: u64,
    /// When a check found it first, in ns of CLOCK_MONOTONIC.
    since: u64,
}

impl Thread {
    /// Notes that a job begins, or that it goes on with something else.
    fn begin(&mut self, id: u64) {
        (self.id, self.since) = (id, sys::monotonic());
        (self.sleep, self.is_stuck) = (None, false);
    }

    /// Notes what the thread sleeps in. Returns for how long, in ns, it has at least slept in that without a break.
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
    /// Removes the next job of the owner whose turn it is, among those who may run another.
    fn next_job(&mut self, of_owner: usize) -> Option<Job> {
        let later = self
            .queues
            .range((Bound::Excluded(self.turn), Bound::Unbounded));
        let owners = later.chain(self.queues.range(..=self.turn));
        let owners: Vec<u32> = owners.map(|(owner, _)| *owner).collect();
        for owner in owners {
            if self.count(owner, false) >= of_owner {
                continue;
            }
            let queue = self.queues.get_mut(&owner)?;
            let jobs = std::iter::from_fn(|| queue.pop_first());
            let job = jobs.map(|(_, job)| job).find(Job::is_wanted);
            if queue.is_empty() {
                self.queues.remove(&owner);
            }
            if job.is_some() {
                self.turn = owner;
                return job;
            }
        }
        None
    }

    /// Number of jobs of an owner that run in threads which are replaced, or which are not.
    fn count(&self, owner: u32, is_replaced: bool) -> usize {
        let is_of =
            |thread: &&Thread| thread.owner == Some(owner) && thread.is_replaced == is_replaced;
        self.threads.values().filter(is_of).count()
    }

    fn active(&self) -> usize {
        let is_active = |thread: &&Thread| !thread.is_replaced;
        self.threads.values().filter(is_active).count()
    }
}

impl Workers {
    /// Returns a pool without threads: they start with the first jobs. `name` is the threads'.
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
    /// There is no thread, and none can be started.
    pub fn submit(&self, job: Job) -> io::Result<()> {
        let mut state = self.0.lock();
        let owner = job.owner;
        state.last += 1;
        let place = (!job.is_urgent, state.last);
        let queue = state.queues.entry(owner).or_default();
        queue.insert(place, job);
        // Unwanted jobs are dropped here too, since no turn may come while all threads of the user are stuck.
        if queue.len().is_power_of_two() {
            queue.retain(|_, job| job.is_wanted());
        }
        if state.count(owner, false) >= self.0.size.of_owner {
            return Ok(());
        }
        self.add_thread(&mut state)
    }

    /// Marks each thread as stuck that sleeps in one system call and has done so for `limit` (in ns) by this and earlier
    /// checks, and replaces it if there is room. Without a limit one check is enough. Returns what the newly marked ones are at.
    /// Only threads of `owner` if there is one.
    pub fn replace_stuck(&self, limit: u64, owner: Option<u32>) -> Vec<u64> {
        let mut state = self.0.lock();
        let Size { most, of_owner, .. } = self.0.size;
        let now = sys::monotonic();
        let mut found = Vec::new();
        let mut stuck: Vec<(u64, u32)> = Vec::new();
        for (number, thread) in &mut state.threads {
            let is_meant = |of: &u32| !thread.is_replaced && owner.is_none_or(|owner| owner == *of);
            let Some(owner) = thread.owner.filter(is_meant) else {
                continue;
            };
            if thread.check(now).is_some_and(|slept| slept >= limit) {
                if !thread.is_stuck {
                    found.push(thread.id);
                }
                thread.is_stuck = true;
                stuck.push((*number, owner));
            }
        }
        for (number, owner) in stuck {
            let has_room = state.threads.len() < most && state.count(owner, true) < of_owner;
            if let Some(thread) = state.threads.get_mut(&number) {
                thread.is_replaced = has_room;
            }
            if has_room
                && !state.queues.is_empty()
                && let Err(error) = self.add_thread(&mut state)
            {
                tracing::warn!("cannot start a thread to read /proc: {error}");
            }
        }
        found
    }

    /// Returns what stuck threads are at, and since when (in ns since boot). If the machine was suspended meanwhile, it is
    /// said to be later.
    pub fn stuck(&self) -> Vec<(u64, u64)> {
        let state = self.0.lock();
        let stuck = state.threads.values().filter(|thread| thread.is_stuck);
        let suspended = sys::suspended();
        stuck
            .map(|thread| (thread.id, thread.since + suspended))
            .collect()
    }

    /// Returns whether some thread has a job of this owner, or is about to take one, and is not stuck.
    pub fn is_moving(&self, owner: u32) -> bool {
        let state = self.0.lock();
        let mut threads = state.threads.values();
        threads.any(|thread| match thread.owner {
            Some(of) => of == owner && !thread.is_stuck,
            None => state.queues.contains_key(&owner),
        })
    }

    /// Returns whether a queued job will run though no stuck read returns.
    pub fn has_room(&self) -> bool {
        let state = self.0.lock();
        state.threads.len() < self.0.size.most
            || state.threads.values().any(|thread| !thread.is_stuck)
    }

    #[cfg(test)]
    pub fn threads(&self) -> usize {
        self.0.lock().threads.len()
    }

    /// Wakes a thread, or starts one if all are busy and there is room.
    fn add_thread(&self, state: &mut State) -> io::Result<()> {
        let Shared { name, size, .. } = *self.0;
        if state.idle > 0 {
            (state.idle, state.woken) = (state.idle - 1, state.woken + 1);
            self.0.wakeup.notify_one();
        } else if state.active() < size.threads && state.threads.len() < size.most {
            state.last += 1;
            let number = state.last;
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
        // No job runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that runs a job.
pub struct Slot {
    shared: Arc<Shared>,
    number: u64,
}

impl Slot {
    /// Notes that the job goes on with something else, for which the thread has as much time as for a job.
    pub fn begin(&self, id: u64) {
        let mut state = self.shared.lock();
        if let Some(thread) = state.threads.get_mut(&self.number) {
            thread.begin(id);
        }
    }

    /// Returns whether another thread runs in the place of this one, so that a job of several parts must not go on.
    pub fn is_replaced(&self) -> bool {
        let state = self.shared.lock();
        let thread = state.threads.get(&self.number);
        thread.is_none_or(|thread| thread.is_replaced)
    }

    fn run(self) {
        while let Some(job) = self.next() {
            (job.work)(&self);
        }
    }

    /// Waits for the next job. Returns `None` if the thread has to end.
    fn next(&self) -> Option<Job> {
        let mut state = self.shared.lock();
        let Size {
            idle,
            threads,
            of_owner,
            ..
        } = self.shared.size;
        // Under the same lock, so that no job is left to a thread that ends.
        let end = |state: &mut State| {
            state.threads.remove(&self.number);
            None
        };
        let waiting = Thread {
            thread_id: Some(sys::thread_id()),
            ..Thread::default()
        };
        let before = state.threads.insert(self.number, waiting);
        // Others may run in its place.
        if before.is_some_and(|thread| thread.is_replaced) && state.active() > threads {
            return end(&mut state);
        }
        loop {
            if let Some(job) = state.next_job(of_owner) {
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
    // After a job that has panicked.
    fn drop(&mut self) {
        self.shared.lock().threads.remove(&self.number);
    }
}
