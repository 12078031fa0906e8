//! Comparison of each lookup with a scan of all sessions.

use super::*;
use crate::session::Sessions;

impl Sessions {
    /// Asserts that each lookup finds what a scan of all sessions finds.
    pub(crate) fn assert_indexed(&self) {
        let keys = self.iter().flat_map(|session| {
            let keys = session.index_keys().into_iter().flatten();
            keys.map(|key| (key, session.id))
        });
        assert_eq!(self.open.by_key, keys.collect());
        for key in self.open.followers.keys() {
            assert!(self.open.ids(*key).next().is_some(), "{key:?} is unused");
        }
        let mut nested: BTreeMap<SessionId, Vec<SessionId>> = BTreeMap::new();
        for session in self.iter() {
            let outwards: Vec<&Session> = self.with_enclosing(session.id).collect();
            let outermost = outwards.last().and_then(|last| self.get(last.outer?));
            assert!(outermost.is_none(), "{:?} is nested in itself", session.id);
            for outer in &outwards {
                nested.entry(outer.id).or_default().push(session.id);
            }
            let mut ended = outwards.iter().filter(|session| session.end().is_some());
            let first = ended.clone().filter_map(|session| session.end());
            let due = ended.next_back().map(|session| session.id);
            let due = due.zip(first.min_by_key(|end| end.at));
            let indexed = self.due(session.id);
            assert_eq!(indexed.map(|(outer, first)| (outer.id, first)), due);

            let awaits = |other: &&&Session| other.succession.is_open();
            let awaiting = outwards.iter().find(awaits).map(|session| session.id);
            let is_command = |other: &&Session| {
                let run = other.outer.and_then(|outer| self.get(outer));
                other.is_command_of(run)
            };
            let is_ended_by_run = outwards.iter().any(is_command);
            let nesting = session.nesting;
            assert_eq!(nesting.awaiting, awaiting);
            assert_eq!(nesting.is_ended_by_run, is_ended_by_run);
            assert_eq!(nesting.depth as usize, outwards.len() - 1);
            let exits = outwards.iter().filter_map(|outer| outer.root_exit);
            let last = exits.map(|exit| exit.at).max().unwrap_or(0);
            assert_eq!(nesting.last_root_exit_at, last);

            let living = |other: &&Session| other.root == session.root && other.root_exit.is_none();
            let by_root = self.by_root(session.root).map(|session| session.id);
            assert_eq!(by_root, self.iter().find(living).map(|session| session.id));
            let start = session.first_root.start;
            for start in [start, start + TICK_NS] {
                let real = session.uids.real;
                let is_earlier = |other: &&Session| {
                    let other = (other.uids.real, other.first_root.start / TICK_NS);
                    other.0 == real && other.1 < start / TICK_NS
                };
                let scanned = self.iter().filter(is_earlier).map(|other| other.id);
                let indexed = self.open.of_user_before(real, start);
                let indexed: BTreeSet<SessionId> = indexed.map(|other| other.id).collect();
                assert_eq!(indexed, scanned.collect(), "before {start}");
            }
            for start in [start, start - start % TICK_NS, start + 1] {
                let name = ProcessKey {
                    start,
                    ..session.first_root
                };
                let named = self.iter().find(|other| other.has_name(name));
                let by_name = self.by_first_root(name).map(|session| session.id);
                assert_eq!(by_name, named.map(|session| session.id), "{name}");
            }
        }
        for (outer, nested) in nested {
            let found = self.with_nested(outer).map(|session| session.id);
            assert_eq!(found.collect::<Vec<_>>(), nested);
        }
    }
}
