//! Facts about processes, read from /proc by threads that nobody waits for longer than is good.
//!
//! ```text
//!   engine ──ask──▶ queue ──▶ threads, blocking reads of /proc ──▶ answers ──take──▶ engine ──▶ model
//!                                └──────────── an urgent one wakes ────────────▲
//! ```
//!
//! What is urgent has threads of its own: a process waits for it with a decision. What is asked for ahead
//! is read by another, wakes nobody, and is taken along when something else has come up. Paths of scripts have threads of
//! their own, since a file system that hangs keeps them.
//!
//! To read another process's memory can take for ever: a process that holds its memory map's lock in
//! uninterruptible sleep keeps its readers there too. Such a thread is left to itself, what it was asked is
//! answered with [`Fact::Unreadable`](reaper_model::facts::Fact::Unreadable) in time, and another takes its
//! place, up to a bound. With nothing asked for no thread wakes up.

mod pool;
mod reading;
#[cfg_attr(target_os = "macos", path = "scan/darwin.rs")]
mod scan;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use hashbrown::HashMap;
use tokio::sync::Notify;

use crate::sys;
use pool::{Common, Done, Job, Pool, Size};
use reading::CpuTime;
use reaper_model::event::{Image, ProcessKey, TICK_NS};
use reaper_model::facts::{Fact, FactSet, Facts};
use reaper_model::ruleset::Ruleset;
pub use scan::{listening, scan_processes};

/// How long a thread may take over one process that somebody waits for, in ns.
#[cfg(not(test))]
const LIMIT: u64 = 100_000_000;
/// How long an urgent ask may take in all where many are before it, and one for the CPU use in any case.
#[cfg(not(test))]
const LIMIT_IN_ALL: u64 = 2_000_000_000;
/// Both are longer in tests, where a busy machine may keep a thread in the midst of a look that is to find something.
#[cfg(test)]
const LIMIT: u64 = 1_000_000_000;
#[cfg(test)]
const LIMIT_IN_ALL: u64 = 10_000_000_000;
/// How long an ask may take that a decision waits for and that is not urgent, in ns: whole trees are read by such.
const LIMIT_WAITED: u64 = 30_000_000_000;
/// Between the two looks that tell the CPU use.
const CPU_SPAN: u64 = 1_000_000_000;
/// Asks that are open beyond which what nobody waits for is not read.
const OPEN_MAX: usize = 8192;
/// Time limit for the path of a script, in ns.
const LIMIT_SCRIPT: u64 = 10_000_000_000;
/// Threads for what is urgent.
const URGENT: Size = Size {
    first: 2,
    most: 8,
    of_user: usize::MAX,
};
/// Threads for what is not urgent.
const AHEAD: Size = Size {
    first: 1,
    most: 3,
    of_user: usize::MAX,
};
/// Threads for paths of scripts. A user whose file system hangs keeps at most two of them.
const SCRIPTS: Size = Size {
    first: 2,
    most: 16,
    of_user: 2,
};

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

/// See the module. Belongs to one thread, which it never keeps waiting. When it is dropped, its threads end
/// with what they are at.
pub struct FactPool {
    urgent: Pool,
    ahead: Pool,
    scripts: Pool,
    done: Receiver<Done>,
    woken: Arc<Notify>,
    last_id: u64,
    open: HashMap<u64, OpenRequest>,
    /// Ids of the open ones about each process.
    about: HashMap<ProcessKey, Vec<u64>>,
    /// When to see to what, in ns of the monotonic clock. Some of it may be closed by then.
    timers: BinaryHeap<Reverse<(u64, u64)>>,
    answers: Vec<FactAnswer>,
    /// Among the answers is one that somebody waits for.
    ready: bool,
}

/// An ask that is open. That for the CPU use is one by itself, and so is that for the path of a script.
struct OpenRequest {
    key: ProcessKey,
    needs: FactSet,
    /// What it runs, if [`FactSet::ARGUMENTS`] or [`FactSet::SCRIPT`] are asked for.
    image: Option<Arc<Image>>,
    /// Real uid of the process, if [`FactSet::SCRIPT`] is asked for.
    uid: u32,
    /// In ns of the monotonic clock.
    asked: u64,
    /// Since when somebody has waited for it, in ns of the monotonic clock.
    urgent: Option<u64>,
    /// Whether a decision waits for it, urgent or not.
    waited: bool,
    /// First look of two.
    used: Option<CpuTime>,
}

impl FactPool {
    /// Starts the threads. `root` is where /proc is, `rules` say what [`Facts::markers`], [`Facts::conversations`] and
    /// [`Facts::arguments`] are about.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(root: impl Into<PathBuf>, rules: Ruleset) -> io::Result<FactPool> {
        let woken = Arc::new(Notify::new());
        let common = Arc::new(Common {
            root: root.into(),
            rules,
            woken: Arc::clone(&woken),
        });
        let (send, done) = channel();
        Ok(FactPool {
            urgent: Pool::start("facts", URGENT, true, &common, &send)?,
            ahead: Pool::start("facts-ahead", AHEAD, false, &common, &send)?,
            scripts: Pool::start("scripts", SCRIPTS, false, &common, &send)?,
            done,
            woken,
            last_id: 0,
            open: HashMap::new(),
            about: HashMap::new(),
            timers: BinaryHeap::new(),
            answers: Vec::new(),
            ready: false,
        })
    }

    /// Asks for facts about a process. What is asked for already is not asked again, but becomes urgent if
    /// this is. What is not urgent is answered with [`Fact::Unread`] where there is too much of it, or it
    /// takes too long: nobody has looked, and whoever needs it asks again. Without knowing what the process runs,
    /// [`FactSet::ARGUMENTS`] cannot be read.
    pub fn request(&mut self, key: ProcessKey, needs: FactSet, urgency: Urgency) {
        self.request_of(key, None, needs, urgency);
    }

    /// Does the same as [`FactPool::request`] for a process that is known to run `image`.
    pub fn request_of(
        &mut self,
        key: ProcessKey,
        image: Option<&Arc<Image>>,
        needs: FactSet,
        urgency: Urgency,
    ) {
        let (urgent, waited) = (urgency == Urgency::Urgent, urgency >= Urgency::Normal);
        let now = sys::monotonic();
        let mut fresh = needs;
        for id in self.about.get(&key).cloned().unwrap_or_default() {
            let Some(ask) = self.open.get_mut(&id) else {
                continue;
            };
            let wanted = needs.without(ask.needs) != needs;
            fresh = fresh.without(ask.needs);
            ask.waited |= waited && wanted;
            if urgent && wanted && ask.urgent.is_none() {
                ask.urgent = Some(now);
                let begun = ask.used.is_some();
                self.timers.push(Reverse((now + self.limit(id), id)));
                // The thread that it waits for may be busy with much else: whoever is first answers.
                if !begun {
                    self.send(id);
                }
            }
        }
        if !waited && !self.open.is_empty() {
            self.ahead.mend(now, LIMIT);
            if self.open.len() >= OPEN_MAX {
                let (found, at) = (Facts::default(), sys::boot_time());
                let asked = fresh;
                return self.answers.push(FactAnswer {
                    key,
                    requested: asked,
                    found,
                    at,
                });
            }
        }
        let cpu = fresh.contains(FactSet::CPU);
        for needs in [
            fresh.without(FactSet::CPU),
            if cpu { FactSet::CPU } else { FactSet::NONE },
        ] {
            if needs.is_empty() {
                continue;
            }
            self.last_id += 1;
            let id = self.last_id;
            let ask = OpenRequest {
                key,
                needs,
                image: image
                    .filter(|_| needs.contains(FactSet::ARGUMENTS))
                    .cloned(),
                uid: 0,
                asked: now,
                urgent: urgent.then_some(now),
                waited,
                used: None,
            };
            self.open.insert(id, ask);
            self.about.entry(key).or_default().push(id);
            let limit = if urgent { self.limit(id) } else { LIMIT_IN_ALL };
            self.timers.push(Reverse((now + limit, id)));
            self.send(id);
        }
    }

    /// Asks for [`FactSet::SCRIPT`] of a process of this user. The answer wakes the reader, but no decision waits for it.
    /// It is [`Fact::Unreadable`] where there is too much of it, it takes too long, or a file system of the same user
    /// hangs.
    pub fn request_script(&mut self, key: ProcessKey, image: &Arc<Image>, uid: u32) {
        let about = self.about.get(&key).into_iter().flatten();
        let mut about = about.filter_map(|id| self.open.get(id));
        if about.any(|ask| ask.needs == FactSet::SCRIPT) {
            return;
        }
        let now = sys::monotonic();
        if self.open.len() >= OPEN_MAX {
            self.answers.push(FactAnswer {
                key,
                requested: FactSet::SCRIPT,
                found: Facts::unreadable(),
                at: sys::boot_time(),
            });
            self.ready = true;
            return;
        }
        self.last_id += 1;
        let ask = OpenRequest {
            key,
            needs: FactSet::SCRIPT,
            image: Some(Arc::clone(image)),
            uid,
            asked: now,
            urgent: None,
            waited: true,
            used: None,
        };
        self.open.insert(self.last_id, ask);
        self.about.entry(key).or_default().push(self.last_id);
        self.timers.push(Reverse((now + LIMIT, self.last_id)));
        self.send(self.last_id);
    }

    /// Waits until an urgent ask is answered, or has run out of its time, which is an answer too. May be
    /// dropped and called again at any time.
    pub async fn ready(&mut self) {
        loop {
            self.collect();
            self.see_to_timers();
            if self.ready {
                return;
            }
            let woken = self.woken.notified();
            match self.timers.peek() {
                Some(Reverse((at, _))) => {
                    let left = Duration::from_nanos(at.saturating_sub(sys::monotonic()));
                    // Whichever it was, what is there is looked at again.
                    let _ = tokio::time::timeout(left, woken).await;
                }
                None => woken.await,
            }
        }
    }

    /// All answers since the last call, urgent or not.
    pub fn take(&mut self) -> Vec<FactAnswer> {
        self.collect();
        self.ready = false;
        std::mem::take(&mut self.answers)
    }

    fn limit(&self, id: u64) -> u64 {
        let cpu = self
            .open
            .get(&id)
            .is_some_and(|ask| ask.needs == FactSet::CPU);
        if cpu { LIMIT_IN_ALL } else { LIMIT }
    }

    /// Hands an open ask to a thread.
    fn send(&self, id: u64) {
        let Some(ask) = self.open.get(&id) else {
            return;
        };
        let pool = if ask.needs == FactSet::SCRIPT {
            &self.scripts
        } else if ask.urgent.is_some() {
            &self.urgent
        } else {
            &self.ahead
        };
        let OpenRequest {
            key,
            needs,
            waited,
            uid,
            ..
        } = *ask;
        let image = ask.image.clone();
        pool.ask(Job {
            id,
            key,
            needs,
            wakes: waited,
            image,
            uid,
        });
    }

    /// Takes in what the threads have found.
    fn collect(&mut self) {
        while let Ok(Done { id, at, found }) = self.done.try_recv() {
            let Some(ask) = self.open.get_mut(&id) else {
                continue;
            };
            let mut facts = found.facts;
            if let (FactSet::CPU, Some(used)) = (ask.needs, found.used) {
                let Some(first) = ask.used else {
                    ask.used = Some(used);
                    self.timers.push(Reverse((used.at + CPU_SPAN, id)));
                    continue;
                };
                // Asked for twice, since it has become urgent.
                if used.at < first.at + CPU_SPAN {
                    continue;
                }
                facts.cpu = Fact::Known(percent(first, used));
            }
            self.close(id, at, facts);
        }
    }

    /// Answers an ask.
    fn close(&mut self, id: u64, at: u64, found: Facts) {
        let Some(ask) = self.open.remove(&id) else {
            return;
        };
        if let Some(ids) = self.about.get_mut(&ask.key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.about.remove(&ask.key);
            }
        }
        self.ready |= ask.waited;
        self.answers.push(FactAnswer {
            key: ask.key,
            requested: ask.needs,
            found,
            at,
        });
        if self.open.is_empty() {
            self.timers.clear();
        }
    }

    fn see_to_timers(&mut self) {
        let now = sys::monotonic();
        while let Some(Reverse((at, id))) = self.timers.peek().copied()
            && (at <= now || !self.open.contains_key(&id))
        {
            self.timers.pop();
            if let Some(next) = self.on_timer(id, now) {
                self.timers.push(Reverse((next, id)));
            }
        }
    }

    /// Its time has come; gives when to see to it again.
    fn on_timer(&mut self, id: u64, now: u64) -> Option<u64> {
        let ask = self.open.get(&id)?;
        let cpu = ask.needs == FactSet::CPU;
        if ask.used.is_some_and(|first| now >= first.at + CPU_SPAN) {
            self.send(id);
        }
        if ask.needs == FactSet::SCRIPT {
            if now < ask.asked + LIMIT_SCRIPT {
                self.scripts.mend(now, LIMIT);
                return Some(now + LIMIT);
            }
            self.close(id, sys::boot_time(), Facts::unreadable());
            return None;
        }
        let Some(asked) = ask.urgent else {
            let (limit, found) = match ask.waited {
                true => (LIMIT_WAITED, Facts::unreadable()),
                false => (LIMIT_IN_ALL, Facts::default()),
            };
            if now < ask.asked + limit {
                self.ahead.mend(now, LIMIT);
                return Some((now + LIMIT_IN_ALL).min(ask.asked + limit));
            }
            // Who needs it may have taken it for asked, and waits after all.
            self.close(id, sys::boot_time(), found);
            self.ready = true;
            return None;
        };
        if now < asked + self.limit(id) {
            return None;
        }
        let free = self.urgent.mend(now, LIMIT);
        let again = match self.urgent.begun(id) {
            Some(begun) => (begun + LIMIT > now).then_some(begun + LIMIT),
            // Many are before it, and they are being answered.
            None => free.then_some(now + LIMIT / 4),
        };
        if !cpu && now < asked + LIMIT_IN_ALL && again.is_some() {
            return again;
        }
        self.close(id, sys::boot_time(), Facts::unreadable());
        None
    }
}

/// Percent of one processor.
fn percent(first: CpuTime, second: CpuTime) -> u32 {
    let used = second.ticks.saturating_sub(first.ticks) * TICK_NS;
    let span = second.at.saturating_sub(first.at).max(1);
    u32::try_from(used.saturating_mul(100) / span).unwrap_or(u32::MAX)
}
