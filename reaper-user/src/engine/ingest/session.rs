//! Handles changes of sessions.

use super::Ingest;
use crate::engine::queue::Queued;
use crate::export::{EventBody, ProcessRef, SessionRef};
use reaper_model::Model;
use reaper_model::session::{SessionEvent, SessionId, Succession};

impl Ingest {
    /// Emits the record of a change of a session, and queues the work that follows, such as evaluations. A closed
    /// session is only queued: its record follows once its members are decided. `time` is in ns since boot.
    pub fn on_session_event(&mut self, model: &Model, time: u64, session_event: &SessionEvent) {
        match session_event {
            SessionEvent::Opened { session, starter } => {
                let Some(session) = model.sessions.get(*session) else {
                    return;
                };
                let Some(root) = model.tree.get(session.root) else {
                    return;
                };
                self.sessions_opened += 1;
                self.changed_sessions.push(session.id);
                if model.has_rules_for_root(session.root) {
                    self.queued.push(Queued::Process(session.root));
                }
                self.map_changes.extend(root.parent);
                // Members that were discovered before the session was known.
                self.note_members_changed(model, session);
                let name = |id: Option<SessionId>| {
                    let session = id.and_then(|id| model.sessions.get(id));
                    session.map(SessionRef::from)
                };
                let body = EventBody::SessionOpen {
                    process: ProcessRef::new(model, root),
                    kind: session.kind,
                    rule: session.agent.clone(),
                    outer: name(session.outer),
                    starter: name(*starter),
                };
                self.emit(time, body);
            }
            SessionEvent::Boundary { key, session, rule } => {
                self.map_changes.push(*key);
                let Some(node) = model.tree.get(*key) else {
                    return;
                };
                let session = model.sessions.get(*session).map(SessionRef::from);
                self.emit(
                    time,
                    EventBody::Boundary {
                        process: ProcessRef::new(model, node),
                        session,
                        rule: rule.clone(),
                    },
                );
            }
            SessionEvent::Relaunched {
                session,
                old_root,
                root,
            } => {
                // The session has a new root, so its end is no longer decided.
                self.queued.remove(Queued::Session(*session));
                self.changed_sessions.push(*session);
                self.map_changes.push(*root);
                if model.has_rules_for_root(*root) {
                    self.queued.push(Queued::Process(*root));
                }
                let Some(session) = model.sessions.find(*session).map(SessionRef::from) else {
                    return;
                };
                let Some(node) = model.tree.get(*root) else {
                    return;
                };
                self.emit(
                    time,
                    EventBody::SessionRelaunch {
                        session,
                        process: ProcessRef::new(model, node),
                        old_root: *old_root,
                    },
                );
            }
            SessionEvent::RootExited { session } => {
                self.queued.push(Queued::Session(*session));
                let Some(session) = model.sessions.find(*session) else {
                    return;
                };
                self.changed_sessions.push(session.id);
                if session.succession == Succession::Awaited {
                    self.awaiting_successor.push(session.id);
                }
                let members = model
                    .sessions
                    .with_nested(session.id)
                    .map(|s| s.members().len())
                    .sum();
                let Some(root_exit) = session.root_exit else {
                    return;
                };
                let (root, exit_status, kind) = (session.root, root_exit.exit_status, session.kind);
                let session = SessionRef::from(session);
                self.emit(
                    time,
                    EventBody::SessionRootExit {
                        session,
                        kind,
                        root,
                        exit_status,
                        members,
                    },
                );
            }
            // Emitted and evaluated once all pre-existing processes are read.
            SessionEvent::Restored { .. } => {}
            SessionEvent::Closed { session } => {
                let name = SessionRef::from(&**session);
                self.closed_sessions
                    .push((session.id, name, session.last_exit_at))
            }
        }
    }
}
