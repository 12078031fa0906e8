//! Programs that become known only some time after their exec.
//!
//! A source that reads programs from /proc reports an exec at once. If the program could not be read in time, the
//! source reports the same exec again later, with or without it. Children forked in between are kept: they have no
//! session, or an uncertain one.
//!
//! A child that was orphaned in between is not settled later.

use std::sync::Arc;

use hashbrown::HashSet;

use super::event::{Event, EventKind, ProcessKey};
use super::session::SessionId;
use super::{Model, Output};

impl Model {
    /// Returns the process whose program this event reports late, its session before, and the time of its exec (ns
    /// since boot). Returns `None` for any other event. A scan of the process table may be the first to report the
    /// program.
    pub(super) fn late_program(
        &self,
        event: &Event,
    ) -> Option<(ProcessKey, Option<SessionId>, u64)> {
        let (node, time) = match &event.kind {
            EventKind::Exec { key, .. } => (self.tree.get(*key)?, Some(event.time)),
            EventKind::Discovered(seen) => {
                let node = self.tree.by_pid(seen.key.pid)?;
                (node.key.has_same_tick(seen.key).then_some(node)?, None)
            }
            _ => return None,
        };
        let since = time.unwrap_or(node.image_at());
        (node.image.is_unread()).then_some((node.key, node.state.member.session, since))
    }

    /// Gives the descendants that a process has forked since its exec the membership that its late program brings.
    /// Reports each as [`Output::Settled`]. `left` is its session from before the program was known, `since` the time
    /// of the exec (ns since boot). Does nothing while the program is unread.
    pub(super) fn settle_below(
        &mut self,
        top: ProcessKey,
        left: Option<SessionId>,
        since: u64,
        out: &mut Vec<Output>,
    ) {
        let Some(node) = self.tree.get(top).filter(|node| !node.image.is_unread()) else {
            return;
        };
        let image = Arc::clone(&node.image);
        let below = self.tree.descendants(top);
        let below = below.filter(|node| node.start() > since);
        let below: Vec<ProcessKey> = below.map(|node| node.key).collect();
        let mut settled: HashSet<ProcessKey> = HashSet::from([top]);
        for key in below {
            let parent = self.tree.get(key).and_then(|node| node.parent);
            if !parent.is_some_and(|parent| settled.contains(&parent))
                || !self.sessions.settle_with(&mut self.tree, key, top, left)
            {
                continue;
            }
            let Some(node) = self.tree.get_mut(key) else {
                continue;
            };
            if !node.reported.execed && node.image.is_unread() {
                node.image = Arc::clone(&image);
                node.state.cached.matched_rules = None;
            }
            // A process with its own program decides about its children.
            if !node.image.is_unread() {
                settled.insert(key);
            }
            let joined = left.is_none() && node.state.member.session.is_some();
            if joined {
                self.inherit_keep(key, None);
            }
            self.inherit_awaited(key);
            self.match_rules(key);
            out.push(Output::Settled { key, joined });
        }
        let mut session_events = std::mem::take(&mut self.session_events);
        self.emit_session_events(&mut session_events, out);
        self.session_events = session_events;
    }
}
