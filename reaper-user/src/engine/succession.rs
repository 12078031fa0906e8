//! Searches for the agents that continue sessions whose roots have exited.
//!
//! A first search runs at once. If it finds no successor, a second one runs at the deadline for successors, and its
//! result is final unless something could not be read. The model names the facts that worker threads read for a search.

use std::collections::BTreeMap;
use std::mem;

use super::Engine;
use super::queue::Queued;
use reaper_host::facts::Urgency;
use reaper_model::session::{Session, SessionId, Succession, SuccessorSearch};

/// Number of further searches after the deadline if something could not be read.
const RETRIES: u32 = 3;
/// Delay before the first further search, in ns. Each later one waits four times as long.
const RETRY_DELAY_NS: u64 = 1_000_000_000;

/// Sessions for which a successor is searched.
#[derive(Default)]
pub struct Successions {
    /// Number of searches after the deadline, by time of the next search (ns of CLOCK_MONOTONIC) and session.
    timed: BTreeMap<(u64, SessionId), u32>,
    /// Sessions for which facts are being read, with the same number.
    reading: Vec<(SessionId, u32)>,
    /// Whether facts for a search have arrived since the last search.
    has_facts: bool,
}

impl Successions {
    /// Returns when the next search is due, in ns of CLOCK_MONOTONIC.
    pub fn next(&self) -> Option<u64> {
        self.timed.first_key_value().map(|((at, _), _)| *at)
    }

    /// Notes that facts have arrived, so that the waiting searches run again.
    pub fn on_facts(&mut self) {
        self.has_facts = true;
    }
}

impl Engine {
    /// Runs the searches that are due, and those whose facts have been read. During a gap, none runs.
    pub(super) fn find_successors(&mut self) {
        let new = mem::take(&mut self.ingest.awaiting_successor).into_iter();
        let successions = &mut self.successions;
        successions.timed.extend(new.map(|id| ((0, id), 0)));
        // The successor may have been born in the gap.
        if self.gap.is_some() {
            return;
        }
        let now = self.kernel.clock.monotonic();
        let later = successions.timed.split_off(&(now + 1, SessionId(0)));
        let due = mem::replace(&mut successions.timed, later);
        let read = match mem::take(&mut successions.has_facts) {
            true => mem::take(&mut successions.reading),
            false => Vec::new(),
        };
        for (id, tries) in read {
            self.search_successor((id, tries), now, false);
        }
        for ((_, id), tries) in due {
            self.search_successor((id, tries), now, true);
        }
    }

    /// Runs one search. If facts are missing, requests them, and the search runs again when they arrive.
    ///
    /// A successor becomes the root of the session. Without one, the next search is scheduled for the deadline. After
    /// the deadline the members are evaluated, and only unreadable facts lead to further searches, up to [`RETRIES`].
    ///
    /// `tries` is the number of these. With `rereads`, the facts of an earlier search are read again.
    fn search_successor(&mut self, (id, tries): (SessionId, u32), now: u64, rereads: bool) {
        let state = self.model.succession(id);
        if !state.is_some_and(Succession::is_open) {
            return;
        }
        if rereads {
            self.model.forget_conversations(id);
        }
        let found = self.model.find_successor(id);
        if let SuccessorSearch::Needs(needs) = found {
            for (key, needs) in needs {
                self.request_facts_of(key, needs, Urgency::Urgent);
            }
            return self.successions.reading.push((id, tries));
        }
        if let SuccessorSearch::Found(root) = found {
            for session_event in self.model.set_successor(id, root) {
                self.ingest.on_session_event(
                    &self.model,
                    self.kernel.clock.boot_time(),
                    &session_event,
                );
            }
            return self.reevaluate(id);
        }
        let session = self.model.sessions.get(id);
        let deadline = session.and_then(|session| self.model.succession_deadline(session));
        if let Some(deadline) = deadline.filter(|deadline| now < *deadline) {
            self.successions.timed.insert((deadline, id), tries);
            return;
        }
        let unreadable = found == SuccessorSearch::Unreadable;
        let state = match unreadable {
            true => Succession::Unknown,
            false => Succession::Excluded,
        };
        self.model.set_succession(id, state);
        self.ingest.queued.push(Queued::Session(id));
        if unreadable && tries < RETRIES {
            let next = now + (RETRY_DELAY_NS << (2 * tries));
            self.successions.timed.insert((next, id), tries + 1);
        }
    }

    /// Queues the evaluation of the members of a session and of those nested in it.
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
