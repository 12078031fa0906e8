//! Idle sessions: since when nothing in the tree of an agent has worked and no client was connected to it.
//!
//! No event reports work. Each process is read again and again, and two readings are compared: it has worked if it has
//! used more CPU time or I/O than an idle program with timers does. The births of children are known from events.

use std::sync::Arc;

use super::Model;
use super::agent::SessionKind;
use super::event::Key;
use super::facts::{Known, Needs};
use super::session::{Session, SessionId};
use super::tree::Node;

/// CPU time that an idle program may use, per second, in ns. Measured without a client: `opencode serve` 14 ms, codex's
/// server 0.1 ms.
const HEARTBEAT_CPU_NS: u64 = 20_000_000;
/// CPU time is counted in ticks of 10 ms, so that each reading may be one tick off.
const TICK_NS: u64 = super::event::TICK_NS;
/// Bytes that an idle program may read and write, per second; the kernel does not count send(2) and recv(2). Measured
/// without a client: codex's server 140, `opencode serve` 100. A client that connects to codex's server, says hello and
/// leaves moves 150 KB.
const HEARTBEAT_IO: u64 = 256;
/// Bytes beyond that for one reading.
const IO_MARGIN: u64 = 8 << 10;
/// Members beyond which a session is taken to be in use without being read.
const MEMBERS_MAX: usize = 1024;

/// What a process has used up to one reading, and its connections then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// CPU time of all its threads, in ns.
    pub cpu_ns: u64,
    /// Bytes that it has read and written (`rchar` and `wchar` of proc_pid_io(5)), without send(2) and recv(2).
    pub io_bytes: u64,
    /// Resident memory in bytes.
    pub rss: u64,
    /// Swapped out memory in bytes.
    pub swap: u64,
    /// For each connection that it has accepted the inode number of the client's socket; 0 where that is not known.
    pub clients: Box<[u64]>,
    /// Inode numbers of its other connected sockets.
    pub sockets: Box<[u64]>,
}

/// Memory of all processes of a session and of those nested in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeMemory {
    /// Resident bytes. Pages that several processes share count for each.
    pub rss: u64,
    /// Swapped out bytes.
    pub swap: u64,
}

/// Since when a process has not worked, as its readings show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Idle {
    /// The first of the readings between which it has not worked.
    first: Reading,
    last: Reading,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    /// In ns of CLOCK_MONOTONIC.
    at: u64,
    cpu_ns: u64,
    io_bytes: u64,
}

impl Reading {
    /// Whether the process has used more since then than a heartbeat.
    fn has_worked_until(self, now: Reading) -> bool {
        let seconds = now.at.saturating_sub(self.at) / 1_000_000_000 + 1;
        let cpu = now.cpu_ns.saturating_sub(self.cpu_ns);
        let io = now.io_bytes.saturating_sub(self.io_bytes);
        cpu > seconds * HEARTBEAT_CPU_NS + TICK_NS || io > seconds * HEARTBEAT_IO + IO_MARGIN
    }
}

impl Idle {
    /// Returns the state after a reading at `now`, in ns of CLOCK_MONOTONIC.
    ///
    /// Each step and the whole time must be within the heartbeat: many short steps would hide work in their margins, and
    /// a long time would hide a short burst.
    pub(super) fn after(before: Option<Idle>, activity: &Activity, now: u64) -> Idle {
        let last = Reading {
            at: now,
            cpu_ns: activity.cpu_ns,
            io_bytes: activity.io_bytes,
        };
        let is_idle = |before: &Idle| {
            !before.first.has_worked_until(last) && !before.last.has_worked_until(last)
        };
        let first = before.filter(is_idle).map_or(last, |before| before.first);
        Idle { first, last }
    }

    /// Returns since when it has not worked, in ns of CLOCK_MONOTONIC.
    fn since(self) -> u64 {
        self.first.at
    }
}

/// Since when a session is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleSince {
    /// [`Needs::ACTIVITY`] of its processes must be read first.
    Unread,
    /// A client is connected, an agent runs below it, or something could not be read.
    InUse,
    /// Both in ns of CLOCK_MONOTONIC.
    Since { idle: u64, read_at: u64 },
}

impl Model {
    /// Returns the members of a session and of those nested in it.
    pub fn members_within(&self, id: SessionId) -> impl Iterator<Item = &Node> {
        let sessions = self.sessions.inwards(id);
        let pids = sessions.flat_map(Session::members);
        pids.filter_map(|pid| self.tree.by_pid(pid))
    }

    /// Returns what a session's tree had of memory when that was read last; `None` if it was not read of all.
    pub fn memory_within(&self, id: SessionId) -> Option<TreeMemory> {
        let mut memory = TreeMemory { rss: 0, swap: 0 };
        for node in self.members_within(id) {
            let Known::Is(read) = activity(node) else {
                return None;
            };
            memory.rss = memory.rss.saturating_add(read.rss);
            memory.swap = memory.swap.saturating_add(read.swap);
        }
        Some(memory)
    }

    /// Returns since when nothing in the tree of a session has worked, and when the first of its processes was read. A
    /// process that has come or has run another program since the last reading counts as working now.
    pub(super) fn idle_since(&self, session: &Session) -> IdleSince {
        let root = self.tree.get(session.root);
        if root.is_some_and(|root| !root.lacks(Needs::ACTIVITY).is_none()) {
            return IdleSince::Unread;
        }
        let members: Vec<&Node> = self.members_within(session.id).collect();
        if members.len() > MEMBERS_MAX {
            return IdleSince::InUse;
        }
        let now = self.awake_now();
        let (mut idle, mut read_at) = (0, now);
        let mut read = Vec::with_capacity(members.len());
        for node in members {
            match (activity(node), node.idle()) {
                (Known::Is(activity), Some(since)) => {
                    read.push(activity);
                    idle = idle.max(since.since());
                    read_at = read_at.min(since.last.at);
                }
                (Known::Unasked, _) => idle = now,
                _ => return IdleSince::InUse,
            }
        }
        if has_client(&read) || self.has_agent_below(session) {
            return IdleSince::InUse;
        }
        // Also what has ended since then has worked.
        let within = self.sessions.inwards(session.id);
        let changed = within.map(|one| one.last_birth.max(one.last_end).max(one.last_use));
        let changed = changed.max();
        IdleSince::Since {
            idle: idle.max(self.clock.awake(changed.unwrap_or(0))),
            read_at,
        }
    }

    /// Takes note of the use of a root's tree once all of it has been read.
    pub fn on_tree_read(&mut self, root: Key) {
        let now = self.clock.now();
        let Some(session) = self.sessions.of_root(root) else {
            return;
        };
        let id = session.id;
        let read = self.members_within(id).map(activity);
        let read: Vec<_> = read
            .filter_map(|activity| match activity {
                Known::Is(activity) => Some(activity),
                Known::Unasked | Known::Unreadable => None,
            })
            .collect();
        if (has_client(&read) || self.has_agent_below(session))
            && let Some(session) = self.sessions.get_mut(id)
        {
            session.last_use = now;
        }
    }

    /// Whether an agent that is not nested in a server's session runs below the server.
    fn has_agent_below(&self, server: &Session) -> bool {
        let is_below = |session: &Session| {
            session.kind == SessionKind::Agent
                && session.root_gone.is_none()
                && self
                    .tree
                    .ancestors(session.root)
                    .any(|above| above.session == Some(server.id))
        };
        server.kind == SessionKind::Server && self.sessions.iter().any(is_below)
    }

    /// Forgets how busy the processes of a root's session are, so that they are read again.
    pub fn forget_activity_within(&mut self, root: Key) {
        // Most processes are no roots, and looking for their session is not free.
        let is_root = self.tree.get(root).is_some_and(|node| node.root);
        let session = is_root.then(|| self.sessions.of_root(root)).flatten();
        let Some(id) = session.map(|session| session.id) else {
            return;
        };
        let members: Vec<Key> = self.members_within(id).map(|node| node.key).collect();
        for key in members {
            self.forget_facts(key, Needs::ACTIVITY);
        }
    }
}

fn activity(node: &Node) -> &Known<Arc<Activity>> {
    node.facts()
        .map_or(&Known::Unasked, |facts| &facts.activity)
}

/// Whether one of the processes has accepted a connection that none of them has made.
fn has_client(read: &[&Arc<Activity>]) -> bool {
    let own = read.iter().flat_map(|one| one.sockets.iter());
    let own: hashbrown::HashSet<u64> = own.copied().collect();
    let mut clients = read.iter().flat_map(|one| one.clients.iter());
    clients.any(|client| !own.contains(client))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn used(cpu_ms: u64, io_bytes: u64) -> Activity {
        Activity {
            cpu_ns: cpu_ms * 1_000_000,
            io_bytes,
            ..Activity::default()
        }
    }

    #[test]
    fn process_with_a_heartbeat_stays_idle() {
        let first = Idle::after(None, &used(5000, 1 << 20), 100 * SECOND);
        assert_eq!(first.since(), 100 * SECOND);
        let later = Idle::after(Some(first), &used(9200, (1 << 20) + 42_000), 400 * SECOND);
        assert_eq!(later.since(), 100 * SECOND);
    }

    #[test]
    fn process_that_works_between_two_readings_is_idle_from_the_second() {
        let first = Idle::after(None, &used(0, 0), 100 * SECOND);
        for busy in [used(7000, 0), used(4, 150_000)] {
            let later = Idle::after(Some(first), &busy, 400 * SECOND);
            assert_eq!(later.since(), 400 * SECOND, "{busy:?}");
        }
    }

    #[test]
    fn work_in_many_short_steps_is_work() {
        let mut idle = Idle::after(None, &used(0, 0), 0);
        // 15 % of a processor, looked at six times a second.
        for step in 1..600 {
            let now = step * SECOND / 6;
            idle = Idle::after(Some(idle), &used(step * 25, 0), now);
        }
        assert!(idle.since() > 90 * SECOND, "{idle:?}");
    }

    #[test]
    fn connection_between_two_members_is_no_client() {
        let server = Arc::new(Activity {
            clients: [7].into(),
            ..Activity::default()
        });
        let member = Arc::new(Activity {
            sockets: [7].into(),
            ..Activity::default()
        });
        assert!(has_client(&[&server]));
        assert!(!has_client(&[&server, &member]));
        let unknown = Arc::new(Activity {
            clients: [0].into(),
            ..Activity::default()
        });
        assert!(has_client(&[&unknown, &member]));
    }
}
