//! Searches for the agents that continue sessions whose roots have exited.
//!
//! A first search runs at once. If it finds nothing, a second one runs at the end of the time in which a successor may
//! appear, and decides. The model says what has to be read; worker threads read it.

use super::Engine;
use super::ingest::Queued;
use reaper_host::facts::Urgency;
use reaper_model::session::{Session, SessionId, Succession, SuccessorSearch};

/// Number of searches after the deadline for a session about which something could not be read.
const TRIES: u32 = 3;
/// Delay before the first of these, in ns; each further one waits four times as long.
const TRY_AFTER_NS: u64 = 1_000_000_000;

/// Sessions for which a successor is searched.
#[derive(Default)]
pub struct Successions {
    open: Vec<Open>,
    /// Whether facts that a search asked for have been read since the last search.
    has_facts: bool,
}

struct Open {
    session: SessionId,
    /// Time of the next search, in ns of CLOCK_MONOTONIC; `None` while facts for one are being read.
    next: Option<u64>,
    /// Searches after the deadline.
    tries: u32,
}

impl Successions {
    /// Returns when the next search is due, in ns of CLOCK_MONOTONIC.
    pub fn next(&self) -> Option<u64> {
        self.open.iter().filter_map(|open| open.next).min()
    }

    /// Notes that facts for a search have been read: those that wait for some run again.
    pub fn on_facts(&mut self) {
        self.has_facts = true;
    }
}

impl Engine {
    /// Runs the searches that are due, and those whose facts have been read.
    pub(super) fn find_successors(&mut self) {
        let new = std::mem::take(&mut self.ingest.awaiting_successor).into_iter();
        self.successions.open.extend(new.map(|session| Open {
            session,
            next: Some(0),
            tries: 0,
        }));
        // A successor may be among the processes that a gap hides.
        if self.successions.open.is_empty() || self.gap.is_some() {
            return;
        }
        let now = self.kernel.clock.monotonic();
        let has_facts = std::mem::take(&mut self.successions.has_facts);
        let open = std::mem::take(&mut self.successions.open).into_iter();
        let open: Vec<Open> = open
            .filter_map(|open| self.search_successor(open, now, has_facts))
            .collect();
        self.successions.open.extend(open);
    }

    /// Runs one search if it is due, or if facts for it may have been read. A search looks at all sessions, so it does not
    /// run in each round. Returns what is left to do.
    fn search_successor(&mut self, mut open: Open, now: u64, has_facts: bool) -> Option<Open> {
        let id = open.session;
        if self.model.succession(id)? == Succession::Excluded {
            return None;
        }
        if open.next.map_or(!has_facts, |next| next > now) {
            return Some(open);
        }
        if open.next.take().is_some() {
            self.model.forget_conversations(id);
        }
        let found = self.model.find_successor(id);
        if let SuccessorSearch::Needs(needs) = found {
            for (key, needs) in needs {
                self.deferred
                    .facts
                    .request(key, None, needs, Urgency::Urgent);
            }
            return Some(open);
        }
        if let SuccessorSearch::Found(root) = found {
            for session_event in self.model.set_successor(id, root) {
                self.ingest.on_session_event(
                    &self.model,
                    self.kernel.clock.boot_time(),
                    &session_event,
                );
            }
            self.reevaluate(id);
            return None;
        }
        let session = self.model.sessions.get(id)?;
        let deadline = self.model.succession_deadline(session).unwrap_or(0);
        if now < deadline {
            open.next = Some(deadline);
            return Some(open);
        }
        let unreadable = found == SuccessorSearch::Unreadable;
        let state = match unreadable {
            true => Succession::Unknown,
            false => Succession::Excluded,
        };
        self.model.set_succession(id, state);
        self.ingest.queued.push(Queued::Session(id));
        open.next = Some(now + (TRY_AFTER_NS << (2 * open.tries)));
        open.tries += 1;
        (unreadable && open.tries <= TRIES).then_some(open)
    }

    /// Re-evaluates the members of a session and of those nested in it.
    fn reevaluate(&mut self, id: SessionId) {
        let members = self
            .model
            .sessions
            .with_nested(id)
            .flat_map(Session::members);
        let nodes = members.filter_map(|pid| self.model.tree.by_pid(pid));
        let members = nodes.map(|node| Queued::Process(node.key));
        self.ingest.queued.extend(members);
    }
}
