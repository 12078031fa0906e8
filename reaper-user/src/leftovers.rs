//! What agents have left behind that nobody watched: found by one look at the process table, and ended.
//!
//! [`find_leftovers`] and [`reap_found`] are what `reaper scan` does where no service answers. [`Scanner`] is the same in a service,
//! on threads of its own: what the service watches is taken from the engine before each look, and what is done is
//! given to the engine, which tells it in the stream.

mod report;
mod service;
#[cfg(test)]
mod tests;

use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use nix::errno::Errno;

use crate::reap::{Due, ReapResult, Times, reap_all};
use reaper_host::facts::{listening, scan_processes};
use reaper_host::source::procfs::{Procfs, ProcfsError};
use reaper_host::sys::{self, pidfd::Pidfd};
use reaper_model::Scope;
use reaper_model::event::ProcessKey;
use reaper_model::facts::Fact;
use reaper_model::leftover::{
    self, Leftover, LeftoverQuery, LeftoverRow, LeftoverVerdict, ProcessTable, RecordedSession,
};
use reaper_model::ruleset::{Rule, Ruleset};
pub use service::Scanner;

/// How old a tool's shell has to be, unless something else is asked for.
pub const MIN_AGE: Duration = Duration::from_secs(600);

/// By what a look goes; the parts of a [`LeftoverQuery`] with the same names.
#[derive(Default)]
pub struct ScanOptions {
    pub rules: Ruleset,
    pub scope: Scope,
    pub uid: Option<u32>,
    pub min_age: Duration,
    pub members: HashMap<u32, ProcessKey>,
    pub watched_since: Option<u64>,
    pub recorded: Vec<RecordedSession>,
    pub kept: Vec<ProcessKey>,
    pub waited: HashMap<ProcessKey, u64>,
    pub by_order: bool,
}

/// What a look has found.
pub struct FoundLeftovers {
    pub table: ProcessTable,
    pub leftovers: Vec<Leftover>,
}

/// What an ending came to.
pub struct LeftoverReapResult {
    /// Those who have come while it went on.
    pub late: Vec<(LeftoverRow, Leftover)>,
    pub ended: Vec<ReapResult>,
}

/// Looks at everybody. Who is `held` was found before, and may have lost since, by what was done, what it was
/// known by.
///
/// # Errors
/// The process table cannot be read.
pub fn find_leftovers(
    terms: &ScanOptions,
    held: &HashSet<ProcessKey>,
) -> Result<FoundLeftovers, ProcfsError> {
    let procfs = Procfs::default();
    let mut table = scan_processes(&procfs)?;
    find_hidden(&mut table);
    let strays = terms.find(&table, held);
    let asks = |rule: &Rule| rule.may_keep() && rule.when.listening.is_some();
    if !terms.rules.rules().iter().any(asks) {
        return Ok(FoundLeftovers {
            table,
            leftovers: strays,
        });
    }
    // What is open is asked of those alone of whom it matters.
    let matters = |stray: &&Leftover| !matches!(stray.verdict, LeftoverVerdict::Report(_));
    let pids = strays.iter().filter(matters).map(|stray| stray.key.pid);
    for (key, listens) in listening(&procfs, pids.collect())? {
        if let Some(row) = table.rows.get_mut(&key.pid)
            && row.entry.key.has_same_tick(key)
        {
            row.listening = listens;
        }
    }
    let strays = terms.find(&table, held);
    Ok(FoundLeftovers {
        table,
        leftovers: strays,
    })
}

/// Takes in those who are named as owners, live, and are not shown: /proc may be mounted so.
fn find_hidden(table: &mut ProcessTable) {
    let traces = table
        .rows
        .values()
        .filter_map(|row| match &row.env_markers {
            Fact::Known(trace) => Some(trace),
            Fact::Unread | Fact::Unreadable => None,
        });
    let owners: HashSet<u32> = traces.flat_map(|trace| trace.owners()).collect();
    let is_hidden = |pid: &u32| {
        // Whatever /proc hides, pidfd_open(2) tells whether there is anybody.
        let lives = Pidfd::open(*pid).err() != Some(Errno::ESRCH);
        lives && !sys::is_visible(*pid)
    };
    let hidden = owners.into_iter().filter(is_hidden);
    table.unread.extend(hidden.map(|pid| (pid, None)));
}

impl ScanOptions {
    fn find(&self, table: &ProcessTable, held: &HashSet<ProcessKey>) -> Vec<Leftover> {
        let of_held = (!held.is_empty()).then(|| RecordedSession {
            agent: "agent".into(),
            root: ProcessKey { pid: 0, start: 0 },
            uid: None,
            members: held.clone(),
        });
        let recorded: Vec<_> = of_held.into_iter().chain(self.recorded.clone()).collect();
        let mut waited = self.waited.clone();
        // Who is being ended, and what is born to them, has had its time.
        waited.extend(held.iter().map(|key| (*key, u64::MAX)));
        let question = LeftoverQuery {
            rules: &self.rules,
            recorded: &recorded,
            own_pid: std::process::id(),
            uid: self.uid,
            scope: &self.scope,
            members: &self.members,
            watched_since: self.watched_since,
            kept: &self.kept,
            min_age: sys::nanoseconds(self.min_age),
            now: sys::boot_time(),
            honor_keep: self.rules.honors_keep(),
            waited: &waited,
            by_order: self.by_order,
        };
        leftover::find(table, &question)
    }
}

/// Ends all that `look` says is to be reaped, up to where it finds nobody new. `found` is what was said
/// before: who was there then and was not to be reaped is not, though by what is done it may come to look so.
/// `look` is given those who are being ended.
///
/// # Errors
/// Those of `look`; what has been signalled by then stays so.
pub fn reap_found<E>(
    found: &FoundLeftovers,
    times: Times,
    mut look: impl FnMut(&HashSet<ProcessKey>) -> Result<FoundLeftovers, E>,
) -> Result<LeftoverReapResult, E> {
    let is_due = |stray: &&Leftover| stray.verdict == LeftoverVerdict::Reap;
    let first = found.leftovers.iter().filter(is_due);
    let first: HashSet<ProcessKey> = first.map(|stray| stray.key).collect();
    let was_there = |key: ProcessKey| {
        let rows = &found.table.rows;
        let row = rows.get(&key.pid);
        row.is_some_and(|row| row.entry.key == key) || found.table.unread.contains_key(&key.pid)
    };
    let mut late: HashMap<ProcessKey, (LeftoverRow, Leftover)> = HashMap::new();
    let find = |held: &HashSet<ProcessKey>| {
        let FoundLeftovers {
            mut table,
            leftovers: strays,
        } = look(held)?;
        let mut due = Due::new();
        for stray in strays.into_iter().filter(|stray| is_due(&stray)) {
            let (key, known) = (stray.key, first.contains(&stray.key));
            if (known || !was_there(key))
                && let Some(row) = table.rows.remove(&key.pid)
            {
                due.insert(key, Some(row.entry.uids));
                if !known {
                    late.entry(key).or_insert((row, stray));
                }
            }
        }
        Ok(due)
    };
    let ended = reap_all(find, times)?;
    // Who was gone again before its turn came is nobody's concern.
    let mut late: Vec<_> = ended
        .iter()
        .filter_map(|end| late.remove(&end.key))
        .collect();
    late.sort_by_key(|(_, stray)| stray.key);
    Ok(LeftoverReapResult { late, ended })
}

/// By pid.
fn by_pid(keys: &[ProcessKey]) -> HashMap<u32, ProcessKey> {
    keys.iter().map(|key| (key.pid, *key)).collect()
}
