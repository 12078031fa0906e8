//! Facts about processes, read from /proc on worker threads. The engine never waits for a read.
//!
//! ```text
//!   engine ──request──▶ workers, blocking reads of /proc ──▶ answers ──take──▶ engine ──▶ model
//!                          └──── an answer that a decision waits for wakes ──────▲
//! ```
//!
//! A read that is stuck in the kernel is answered with [`Fact::Unreadable`] after a time limit. Script paths have their
//! own workers, so that a file system that hangs does not delay the facts for decisions about the same user's processes.

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

use crate::advice::Advised as _;
use crate::source::procfs::Procfs;
use crate::sys;
use crate::workers::{Job, Size, Workers};
use reading::{CpuTime, ReadResult, read_facts};
use reaper_model::event::{Image, ProcessKey, TICK_NS};
use reaper_model::facts::{Fact, FactSet, Facts};
use reaper_model::ruleset::Ruleset;
pub use scan::{listening_ports, scan_pids, scan_processes, socket_facts};

/// Paths of scripts that a scan reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptPaths {
    /// As the process was started. The process chooses that path.
    Given,
    /// With links resolved too, with the rights of this program: that shows where a link leads which others cannot read.
    Resolved,
}

/// Time in ns that a thread may sleep in one read before it counts as stuck. Multiplied by the number of runnable
/// threads per processor: one of these may hold a lock that the read needs.
const LIMIT: u64 = 100_000_000;
/// Time limit in ns for a request that a decision waits for. Long, because whole trees are read, also while hundreds of
/// processes compete for the processor. After it, the fact is [`Fact::Unreadable`], and a rule that needs it keeps the
/// process.
#[cfg(not(test))]
const LIMIT_WAITED: u64 = 30_000_000_000;
#[cfg(test)]
const LIMIT_WAITED: u64 = 10_000_000_000;
/// Time limit in ns for script paths and prefetches.
const LIMIT_OTHERS: u64 = 10_000_000_000;
/// Minimum time in ns between the two readings of the CPU time.
const CPU_SPAN: u64 = 1_000_000_000;
/// Maximum number of open requests per user. Above it, prefetches and script paths are refused.
const OPEN_MAX: usize = 8192;
/// Threads for all facts except script paths.
const FACTS: Size = Size {
    idle: 2,
    threads: 4,
    max_threads: 16,
    max_per_owner: 2,
};
/// Threads for script paths.
const SCRIPTS: Size = Size { idle: 0, ..FACTS };

/// Urgency of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Nothing waits for the facts.
    Prefetch,
    /// A decision that is not urgent waits for the facts. They are read after those of urgent requests of the same
    /// user.
    Normal,
    /// A deferred decision about a process waits for the facts.
    Urgent,
}

/// Future of [`FactReader::ready`].
pub type ReadyFuture<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Reads facts without blocking its caller. Each request is answered in bounded time; answers can come in any order.
pub trait FactReader {
    /// Requests the facts `needs` about a process with the real uid `uid`. They can come in several answers.
    ///
    /// A fact with an open request is not requested twice, but becomes at least as urgent as the new request. `image`
    /// is the known program of the process. Without it, [`FactSet::ARGUMENTS`] and [`FactSet::SCRIPT`] are unreadable.
    ///
    /// A request that takes too long is answered without a read: with [`Fact::Unread`] for a prefetch, else with
    /// [`Fact::Unreadable`]. So are prefetches and requests for script paths if the user has too many open requests.
    fn request(
        &mut self,
        key: ProcessKey,
        image: Option<&Arc<Image>>,
        uid: u32,
        needs: FactSet,
        urgency: Urgency,
    );

    /// Waits until there is an answer that a decision waits for, or a request has expired. Returns at once if this has
    /// happened since the last [`take`](FactReader::take). Can be dropped and called again.
    fn ready(&mut self) -> ReadyFuture<'_>;

    /// Returns all answers since the last call, including those of prefetches. Does not wait; empty if none exist.
    fn take(&mut self) -> Vec<FactAnswer>;

    /// Returns whether a display server (X11 or Wayland) runs on the host, so that processes can have windows. True if that
    /// cannot be read.
    fn has_display(&self) -> bool;
}

/// Facts about the sockets of a process.
pub struct SocketFacts {
    /// Whether one listens.
    pub listening: Fact<bool>,
    /// Whether one is connected to a display server.
    pub window: Fact<bool>,
}

/// Reads [`Facts::listening`] and [`Facts::local_sockets`] of a process. The other facts are unreadable.
pub fn read_sockets(procfs: &Procfs, key: ProcessKey) -> Facts {
    let needs = FactSet::LISTENING | FactSet::LOCAL_SOCKETS;
    let rules = Ruleset::default();
    read_facts(procfs.root(), key, needs, None, &rules, sys::boot_time()).facts
}

/// Returns facts about the sockets of a process.
fn sockets_of(procfs: &Procfs, key: ProcessKey) -> SocketFacts {
    let found = read_sockets(procfs, key);
    SocketFacts {
        listening: found.listening,
        window: match found.local_sockets {
            Fact::Known(local) => Fact::Known(!local.displays.is_empty()),
            Fact::Unread | Fact::Unreadable => Fact::Unreadable,
        },
    }
}

/// Facts found about a process.
#[derive(Clone, Debug)]
pub struct FactAnswer {
    /// Process that was read.
    pub key: ProcessKey,
    /// Facts that were requested. The others in `found` have no meaning.
    pub requested: FactSet,
    /// Facts that were read. One that could not be read is [`Fact::Unreadable`]. After a prefetch that was refused or
    /// has expired, all are [`Fact::Unread`].
    pub found: Facts,
    /// Start of the read (ns since boot). If the process has executed another program since, the markers are those of
    /// the earlier program. For a request that was refused or has expired, the time of the answer.
    pub at: u64,
}

/// Reads facts on worker threads. After it is dropped, each thread ends after its current job.
pub struct FactPool {
    shared: Arc<Shared>,
    facts: Workers,
    scripts: Workers,
    done: Receiver<Done>,
    last_id: u64,
    /// Open requests by id.
    open: HashMap<u64, OpenRequest>,
    /// Ids of the open requests for each process.
    open_ids: HashMap<ProcessKey, Vec<u64>>,
    /// Number of open requests by user.
    open_by_user: HashMap<u32, usize>,
    /// Times at which a request expires or the CPU time is read again (CLOCK_MONOTONIC, ns), with request ids. May
    /// contain closed requests.
    timers: BinaryHeap<Reverse<(u64, u64)>>,
    /// Time of the next check for stuck threads (CLOCK_MONOTONIC, ns). `None` if no decision waits.
    next_check: Option<u64>,
    answers: Vec<FactAnswer>,
    /// Whether a decision waits for one of the answers.
    ready: bool,
}

/// State shared with the jobs.
struct Shared {
    /// Directory of /proc.
    root: PathBuf,
    rules: Ruleset,
    /// Wakes [`FactReader::ready`].
    woken: Notify,
    done: Sender<Done>,
}

/// Result of a job.
struct Done {
    /// Id of the request.
    id: u64,
    /// Start of the job (ns since boot).
    at: u64,
    found: ReadResult,
}

/// An open request. CPU use and script path are always separate requests.
struct OpenRequest {
    key: ProcessKey,
    needs: FactSet,
    /// Program of the process, if [`FactSet::ARGUMENTS`] or [`FactSet::SCRIPT`] is requested.
    image: Option<Arc<Image>>,
    /// Real uid of the process.
    uid: u32,
    urgency: Urgency,
    /// Time of the request, or of its last increase in urgency (CLOCK_MONOTONIC, ns).
    since: u64,
    /// First reading of the CPU time.
    used: Option<CpuTime>,
    /// Token of the request's queued jobs. They are dropped once the request is closed.
    wanted: Arc<()>,
}

impl OpenRequest {
    fn is_script(&self) -> bool {
        self.needs == FactSet::SCRIPT
    }

    /// Returns when the request expires (CLOCK_MONOTONIC, ns).
    fn deadline(&self) -> u64 {
        self.since
            + match self.urgency {
                Urgency::Normal | Urgency::Urgent if !self.is_script() => LIMIT_WAITED,
                _ => LIMIT_OTHERS,
            }
    }

    /// Returns the facts for the answer if the request is refused or expires: unread for a prefetch, else unreadable.
    fn unread(&self) -> Facts {
        match self.urgency {
            Urgency::Prefetch => Facts::default(),
            Urgency::Normal | Urgency::Urgent => Facts::unreadable(),
        }
    }
}

impl FactPool {
    /// Returns a pool that reads /proc at `root`. `rules` define the content of [`Facts::markers`],
    /// [`Facts::conversations`], [`Facts::arguments`] and [`Facts::script`].
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
            open_ids: HashMap::new(),
            open_by_user: HashMap::new(),
            timers: BinaryHeap::new(),
            next_check: None,
            answers: Vec::new(),
            ready: false,
        }
    }
}

impl FactReader for FactPool {
    fn has_display(&self) -> bool {
        reading::has_display().unwrap_or(true)
    }

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
        for id in self.open_ids.get(&key).cloned().unwrap_or_default() {
            let Some(open) = self.open.get_mut(&id) else {
                continue;
            };
            let is_wanted = needs.intersects(open.needs);
            fresh = fresh.without(open.needs);
            if is_wanted && urgency > open.urgency {
                (open.urgency, open.since) = (urgency, now);
                self.timers.push(Reverse((open.deadline(), id)));
                // Done even if a thread reads it already: that thread can be slow, and the first answer counts.
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
            let of_user = self.open_by_user.entry(uid).or_default();
            if may_refuse && *of_user >= OPEN_MAX {
                let found = request.unread();
                self.answer(&request, sys::boot_time(), found);
                continue;
            }
            *of_user += 1;
            self.last_id += 1;
            let id = self.last_id;
            self.open_ids.entry(key).or_default().push(id);
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
                        // The loop checks everything again, whether it was woken or timed out.
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
    /// Queues a job that reads the facts of an open request. Does nothing if the request is closed.
    ///
    /// Logs a warning if no thread can be started. The job then stays queued.
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
            // Fails only if the pool has been dropped.
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
            tracing::warn!(
                "cannot start a thread to read /proc: {}; decisions that need these facts are late",
                error.advised()
            );
        }
    }

    /// Receives the results of finished jobs without waiting, and answers and closes their requests.
    ///
    /// After the first reading of a CPU time, the request stays open for the second one.
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
                // A second job for the first reading, queued when the request became urgent.
                if used.at < first.at + CPU_SPAN {
                    continue;
                }
                facts.cpu = Fact::Known(percent(first, used));
            }
            self.close(id, at, facts);
        }
    }

    /// Closes a request and queues its answer for [`FactReader::take`]. Does nothing if the request is closed already.
    fn close(&mut self, id: u64, at: u64, found: Facts) {
        let Some(request) = self.open.remove(&id) else {
            return;
        };
        if let Some(ids) = self.open_ids.get_mut(&request.key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.open_ids.remove(&request.key);
            }
        }
        if let Some(open) = self.open_by_user.get_mut(&request.uid) {
            *open -= 1;
            if *open == 0 {
                self.open_by_user.remove(&request.uid);
            }
        }
        self.answer(&request, at, found);
        if self.open.is_empty() {
            self.timers.clear();
            self.next_check = None;
        }
    }

    /// Queues an answer. Unless it is that of a prefetch, [`FactReader::ready`] then returns.
    fn answer(&mut self, request: &OpenRequest, at: u64, found: Facts) {
        self.ready |= request.urgency > Urgency::Prefetch;
        self.answers.push(FactAnswer {
            key: request.key,
            requested: request.needs,
            found,
            at,
        });
    }

    /// Does what is due: checks for stuck threads, answers expired requests, and queues the second readings of CPU
    /// times.
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

    /// Replaces stuck threads, as far as their maximum number permits, and answers the requests of their jobs as
    /// expired. Requests for script paths stay open until their time limit.
    fn check_threads(&mut self) {
        // Half of the limit: the first check only records the sleep of a thread.
        let limit = LIMIT / 2 * u64::from(sys::runnable_per_processor());
        self.scripts.replace_stuck(limit, None);
        for id in self.facts.replace_stuck(limit, None) {
            self.close_unread(id);
        }
    }

    /// Closes a request without a read, and makes [`FactReader::ready`] return.
    fn close_unread(&mut self, id: u64) {
        if let Some(request) = self.open.get(&id) {
            let found = request.unread();
            self.close(id, sys::boot_time(), found);
            // A decision may count on this prefetch as its request.
            self.ready = true;
        }
    }
}

/// Returns the CPU use between two readings, in percent of one processor. Several threads can use more than 100 %.
fn percent(first: CpuTime, second: CpuTime) -> u32 {
    let used = second.ticks.saturating_sub(first.ticks) * TICK_NS;
    let span = second.at.saturating_sub(first.at).max(1);
    u32::try_from(used.saturating_mul(100) / span).unwrap_or(u32::MAX)
}
