//! Facts about processes, read from /proc by worker threads that the engine never waits for.
//!
//! ```text
//!   engine ──request──▶ workers, blocking reads of /proc ──▶ answers ──take──▶ engine ──▶ model
//!                          └──── an answer that a decision waits for wakes ──────▲
//! ```
//!
//! A read that gets stuck in the kernel is answered with [`Fact::Unreadable`] in time. Paths of scripts have workers of
//! their own: a file system that hangs must not keep facts from decisions of the same user.

mod reading;
#[cfg_attr(target_os = "macos", path = "scan/darwin.rs")]
mod scan;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use hashbrown::HashMap;
use tokio::sync::Notify;

use crate::sys;
use crate::workers::{Job, Size, Workers};
use reading::{CpuTime, ReadResult, read_facts};
use reaper_model::event::{Image, ProcessKey, TICK_NS};
use reaper_model::facts::{Fact, FactSet, Facts};
use reaper_model::ruleset::Ruleset;
pub use scan::{listening, scan_processes};

/// How long a thread may sleep in one read, in ns, before it counts as stuck. Many times longer where many threads wait for a
/// processor: one of them may hold a lock that the read needs.
const LIMIT: u64 = 100_000_000;
/// Time limit for a request that a decision waits for, in ns: whole trees are read by such, also where hundreds of processes
/// compete for the processor. What is unknown until then is kept.
#[cfg(not(test))]
const LIMIT_WAITED: u64 = 30_000_000_000;
#[cfg(test)]
const LIMIT_WAITED: u64 = 10_000_000_000;
/// Time limit for the path of a script, and for a request that nothing waits for, in ns.
const LIMIT_OTHERS: u64 = 10_000_000_000;
/// Nanoseconds between the two readings that give the CPU use.
const CPU_SPAN: u64 = 1_000_000_000;
/// Open requests of a user beyond which prefetching and paths of scripts are refused.
const OPEN_MAX: usize = 8192;
const FACTS: Size = Size {
    idle: 2,
    threads: 4,
    most: 16,
    of_owner: 2,
};
const SCRIPTS: Size = Size { idle: 0, ..FACTS };

/// How soon facts are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Nothing waits for them.
    Prefetch,
    /// A decision waits for them that may take its time.
    Normal,
    /// A process waits for them with a decision.
    Urgent,
}

/// See [`FactReader::ready`].
pub type ReadyFuture<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Reads facts about processes without keeping its caller waiting. Each request is answered, in any order and in bounded
/// time.
pub trait FactReader {
    /// Requests facts about a process of the real uid `uid`. A fact that is requested already is not requested again, but
    /// becomes as urgent as this. `image` is the program that the process is known to run; without it,
    /// [`FactSet::ARGUMENTS`] and [`FactSet::SCRIPT`] cannot be read.
    ///
    /// The answer to a prefetch has [`Fact::Unread`] where the user has too many requests, or it takes too long.
    fn request(
        &mut self,
        key: ProcessKey,
        image: Option<&Arc<Image>>,
        uid: u32,
        needs: FactSet,
        urgency: Urgency,
    );

    /// Waits until a request that a decision waits for is answered, or has expired, which is an answer too. May be
    /// dropped and called again at any time.
    fn ready(&mut self) -> ReadyFuture<'_>;

    /// Returns all answers since the last call, whether something waits for them or not.
    fn take(&mut self) -> Vec<FactAnswer>;
}

/// What was found out about a process.
#[derive(Clone, Debug)]
pub struct FactAnswer {
    pub key: ProcessKey,
    /// Which facts this is about; all others in `found` mean nothing.
    pub requested: FactSet,
    pub found: Facts,
    /// When the look began, in ns since boot. Marks of a process that has run another program since are
    /// those of the program before it.
    pub at: u64,
}

/// Reads facts on worker threads. When it is dropped, its threads end after their job.
pub struct FactPool {
    shared: Arc<Shared>,
    facts: Workers,
    scripts: Workers,
    done: Receiver<Done>,
    last_id: u64,
    open: HashMap<u64, OpenRequest>,
    /// Ids of the open requests about each process.
    about: HashMap<ProcessKey, Vec<u64>>,
    /// Number of open requests by user.
    of_user: HashMap<u32, usize>,
    /// When requests expire or a CPU use is read again, in ns of the monotonic clock. Some may be closed by then.
    timers: BinaryHeap<Reverse<(u64, u64)>>,
    /// When to look for stuck threads, in ns of the monotonic clock. `None` if nothing waits for an answer.
    next_check: Option<u64>,
    answers: Vec<FactAnswer>,
    /// Whether a decision waits for one of the answers.
    ready: bool,
}

/// What the jobs need.
struct Shared {
    /// Where /proc is.
    root: PathBuf,
    rules: Ruleset,
    woken: Notify,
    done: Sender<Done>,
}

/// What a job has read.
struct Done {
    id: u64,
    /// When the job began, in ns since boot.
    at: u64,
    found: ReadResult,
}

/// A request that is not answered. One for the CPU use is a request by itself, and so is one for the path of a script.
struct OpenRequest {
    key: ProcessKey,
    needs: FactSet,
    /// The program, if [`FactSet::ARGUMENTS`] or [`FactSet::SCRIPT`] are requested.
    image: Option<Arc<Image>>,
    /// Real uid of the process.
    uid: u32,
    urgency: Urgency,
    /// Time of the request or of becoming more urgent, in ns of the monotonic clock.
    since: u64,
    /// First reading of the CPU use.
    used: Option<CpuTime>,
    /// Dropped with the request, so that its queued job is dropped too.
    wanted: Arc<()>,
}

impl OpenRequest {
    fn is_script(&self) -> bool {
        self.needs == FactSet::SCRIPT
    }

    /// Returns when the request expires, in ns of the monotonic clock.
    fn deadline(&self) -> u64 {
        self.since
            + match self.urgency {
                Urgency::Normal | Urgency::Urgent if !self.is_script() => LIMIT_WAITED,
                _ => LIMIT_OTHERS,
            }
    }

    /// Returns the answer if it could not be read in time: if nothing waits for it, as if it had not been requested.
    fn unread(&self) -> Facts {
        match self.urgency {
            Urgency::Prefetch => Facts::default(),
            Urgency::Normal | Urgency::Urgent => Facts::unreadable(),
        }
    }
}

impl FactPool {
    /// Returns a pool that reads below `root`, where /proc is. `rules` say what [`Facts::markers`],
    /// [`Facts::conversations`] and [`Facts::arguments`] are about.
    pub fn new(root: impl Into<PathBuf>, rules: Ruleset) -> FactPool {
        let (send, done) = channel();
        FactPool {
            shared: Arc::new(Shared {
                root: root.into(),
                rules,
                woken: Notify::new(),
                done: send,
            }),
            facts: Workers::new("facts", FACTS),
            scripts: Workers::new("scripts", SCRIPTS),
            done,
            last_id: 0,
            open: HashMap::new(),
            about: HashMap::new(),
            of_user: HashMap::new(),
            timers: BinaryHeap::new(),
            next_check: None,
            answers: Vec::new(),
            ready: false,
        }
    }
}

impl FactReader for FactPool {
    fn request(
        &mut self,
        key: ProcessKey,
        image: Option<&Arc<Image>>,
        uid: u32,
        needs: FactSet,
        urgency: Urgency,
    ) {
        let now = sys::monotonic();
        if urgency > Urgency::Prefetch {
            self.next_check.get_or_insert(now + LIMIT);
        }
        let mut fresh = needs;
        for id in self.about.get(&key).cloned().unwrap_or_default() {
            let Some(open) = self.open.get_mut(&id) else {
                continue;
            };
            let is_wanted = needs.intersects(open.needs);
            fresh = fresh.without(open.needs);
            if is_wanted && urgency > open.urgency {
                (open.urgency, open.since) = (urgency, now);
                self.timers.push(Reverse((open.deadline(), id)));
                // Also where a thread reads it already: that may be slow, and the first answer counts.
                if open.used.is_none() {
                    self.submit(id);
                }
            }
        }
        let apart = FactSet::CPU | FactSet::SCRIPT;
        for needs in [FactSet::CPU, FactSet::SCRIPT]
            .into_iter()
            .filter(|needs| fresh.contains(*needs))
            .chain([fresh.without(apart)])
        {
            if needs.is_empty() {
                continue;
            }
            let request = OpenRequest {
                key,
                needs,
                image: image
                    .filter(|_| needs.intersects(FactSet::ARGUMENTS | FactSet::SCRIPT))
                    .cloned(),
                uid,
                urgency,
                since: now,
                used: None,
                wanted: Arc::default(),
            };
            let may_refuse = urgency == Urgency::Prefetch || request.is_script();
            let of_user = self.of_user.entry(uid).or_default();
            if may_refuse && *of_user >= OPEN_MAX {
                let found = request.unread();
                self.answer(&request, sys::boot_time(), found);
                continue;
            }
            *of_user += 1;
            self.last_id += 1;
            let id = self.last_id;
            self.about.entry(key).or_default().push(id);
            self.timers.push(Reverse((request.deadline(), id)));
            self.open.insert(id, request);
            self.submit(id);
        }
    }

    fn ready(&mut self) -> ReadyFuture<'_> {
        Box::pin(async {
            loop {
                self.collect();
                self.on_time();
                if self.ready {
                    return;
                }
                let woken = self.shared.woken.notified();
                let timer = self.timers.peek().map(|Reverse((at, _))| *at);
                match timer.into_iter().chain(self.next_check).min() {
                    Some(at) => {
                        let left = Duration::from_nanos(at.saturating_sub(sys::monotonic()));
                        // Whichever it was, what is there is looked at again.
                        let _ = tokio::time::timeout(left, woken).await;
                    }
                    None => woken.await,
                }
            }
        })
    }

    fn take(&mut self) -> Vec<FactAnswer> {
        self.collect();
        self.ready = false;
        std::mem::take(&mut self.answers)
    }
}

impl FactPool {
    /// Queues the job of an open request.
    fn submit(&self, id: u64) {
        let Some(request) = self.open.get(&id) else {
            return;
        };
        let workers = match request.is_script() {
            true => &self.scripts,
            false => &self.facts,
        };
        let OpenRequest { key, needs, .. } = *request;
        let (shared, image) = (Arc::clone(&self.shared), request.image.clone());
        let requested = sys::boot_time();
        let wakes = request.urgency > Urgency::Prefetch;
        let work = move || {
            let at = sys::boot_time();
            let found = read_facts(
                &shared.root,
                key,
                needs,
                image.as_ref(),
                &shared.rules,
                requested,
            );
            // Nothing receives it once the pool is dropped.
            let _ = shared.done.send(Done { id, at, found });
            if wakes {
                shared.woken.notify_one();
            }
        };
        let job = Job {
            owner: request.uid,
            id,
            is_urgent: request.urgency == Urgency::Urgent,
            wanted: Arc::downgrade(&request.wanted),
            work: Box::new(move |_| work()),
        };
        if let Err(error) = workers.submit(job) {
            tracing::warn!("cannot start a thread to read /proc: {error}");
        }
    }

    /// Receives what the threads have read.
    fn collect(&mut self) {
        while let Ok(Done { id, at, found }) = self.done.try_recv() {
            let Some(request) = self.open.get_mut(&id) else {
                continue;
            };
            let mut facts = found.facts;
            if let (FactSet::CPU, Some(used)) = (request.needs, found.used) {
                let Some(first) = request.used else {
                    request.used = Some(used);
                    self.timers.push(Reverse((used.at + CPU_SPAN, id)));
                    continue;
                };
                // Queued twice, since it has become urgent.
                if used.at < first.at + CPU_SPAN {
                    continue;
                }
                facts.cpu = Fact::Known(percent(first, used));
            }
            self.close(id, at, facts);
        }
    }

    /// Answers a request.
    fn close(&mut self, id: u64, at: u64, found: Facts) {
        let Some(request) = self.open.remove(&id) else {
            return;
        };
        if let Some(ids) = self.about.get_mut(&request.key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.about.remove(&request.key);
            }
        }
        if let Some(open) = self.of_user.get_mut(&request.uid) {
            *open -= 1;
            if *open == 0 {
                self.of_user.remove(&request.uid);
            }
        }
        self.answer(&request, at, found);
        if self.open.is_empty() {
            self.timers.clear();
            self.next_check = None;
        }
    }

    fn answer(&mut self, request: &OpenRequest, at: u64, found: Facts) {
        self.ready |= request.urgency > Urgency::Prefetch;
        self.answers.push(FactAnswer {
            key: request.key,
            requested: request.needs,
            found,
            at,
        });
    }

    fn on_time(&mut self) {
        let now = sys::monotonic();
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        if timer.into_iter().chain(self.next_check).any(|at| at <= now) {
            self.check_threads();
            let mut open = self.open.values();
            let is_waited = open.any(|request| request.urgency > Urgency::Prefetch);
            self.next_check = is_waited.then_some(now + LIMIT);
        }
        while let Some(Reverse((at, id))) = self.timers.peek().copied()
            && (at <= now || !self.open.contains_key(&id))
        {
            self.timers.pop();
            let Some(request) = self.open.get(&id) else {
                continue;
            };
            if now >= request.deadline() {
                self.close_unread(id);
            } else if request.used.is_some_and(|first| now >= first.at + CPU_SPAN) {
                self.submit(id);
            }
        }
    }

    /// Replaces stuck threads, and answers the requests that these were to read. Only a path of a script is still waited for.
    fn check_threads(&mut self) {
        // Half of it: the first check only notes what a thread sleeps in.
        let limit = LIMIT / 2 * u64::from(sys::runnable_per_processor());
        self.scripts.replace_stuck(limit, None);
        for id in self.facts.replace_stuck(limit, None) {
            self.close_unread(id);
        }
    }

    fn close_unread(&mut self, id: u64) {
        if let Some(request) = self.open.get(&id) {
            let found = request.unread();
            self.close(id, sys::boot_time(), found);
            // A decision may have taken it for requested.
            self.ready = true;
        }
    }
}

/// Percent of one processor.
fn percent(first: CpuTime, second: CpuTime) -> u32 {
    let used = second.ticks.saturating_sub(first.ticks) * TICK_NS;
    let span = second.at.saturating_sub(first.at).max(1);
    u32::try_from(used.saturating_mul(100) / span).unwrap_or(u32::MAX)
}
