//! What each step of the model means for the rest: what is told, what is to be decided, what the
//! kernel has to hear of.

use hashbrown::{HashMap, HashSet};
use nix::sys::signal::Signal;
use reaper_common::MEMBER_KILL;

use crate::config::EventScope;
use crate::export::{Body, GivenBack, Lifecycle, Names, Record, SessionRef, Sink, Who};
use crate::reap::{Reaper, Sent, Signaller};
use reaper_model::event::{Event, EventKind, ExitStatus, ProcessKey, Provenance};
use reaper_model::policy::{Reason, Verdict};
use reaper_model::session::{Session, SessionEvent, SessionId, Succession};
use reaper_model::{Change, Model, Node, Output};

/// What has to be decided about once the ring is drained.
pub enum Pending {
    Process(ProcessKey),
    /// All members of a session and of those nested in it.
    Session(SessionId),
}

/// What was done about a session.
#[derive(Default)]
pub struct Tally {
    pub reaped: u32,
    pub failed: u32,
    /// Memory of those reaped.
    pub memory: GivenBack,
    /// Records that were lost while it was open.
    pub lost: u64,
    /// Nothing of it lives any more, but not all ends are confirmed, or who has escaped from it is still looked for.
    pub closed: Option<SessionRef>,
    /// Then: when the last of its members had ended, in ns since boot.
    pub last_end: u64,
    /// Its members were decided about as those of one whose root is gone.
    pub judged: bool,
    /// Counts of the last report that it is closed. The stream has the first report only, the journal each change.
    pub told: Option<Counts>,
}

/// Numbers of members in a report that a session is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub reaped: u32,
    pub kept: u32,
    pub failed: u32,
}

/// See the module.
pub struct Follow {
    pub reaper: Reaper,
    pub out: Sink,
    events: EventScope,
    /// Who descends from a process in scope is followed, whether or not an agent has begun there.
    scoped: bool,
    /// Who is found now is news: it came since the last look.
    pub finds_news: bool,
    pub pending: Vec<Pending>,
    /// What was decided last about a living member.
    pub decided: HashMap<ProcessKey, (Verdict, Reason)>,
    /// Sessions whose root has exited and that another agent may continue.
    pub handovers: Vec<SessionId>,
    /// Orphans whose adopter is not known yet.
    pub parentless: Vec<ProcessKey>,
    /// Members that run another program, or have only now been found to be members.
    pub fresh: Vec<ProcessKey>,
    /// Of whom what they have from their makers may tell whose they are.
    pub suspects: Vec<ProcessKey>,
    /// Who lives and has come to be known by something else than a fork or a look: of whom the fork was lost.
    pub turned_up: HashSet<ProcessKey>,
    /// These are taken note of: the source tells of the forks of all.
    pub notes_turned_up: bool,
    /// Of whom the kernel's map may have to say something else than it does.
    pub touched: Vec<ProcessKey>,
    /// Sessions that are not any more what was left of them in the kernel.
    pub changed: Vec<SessionId>,
    /// Sessions of which nothing lives, and when the last of each had ended.
    pub closed: Vec<(SessionId, SessionRef, u64)>,
    /// Sessions opened.
    pub opened: u64,
    /// Signals that probes have sent.
    pub signals: u64,
    /// To whom: that they are to be reaped has been told with the signal.
    pub foretold: HashSet<ProcessKey>,
    /// Ends of processes that somebody else has signalled, and that nobody had claimed yet.
    pub ends: Vec<(Who, SessionId, ExitStatus, Signal)>,
}

impl Follow {
    pub fn new(reaper: Reaper, out: Sink, events: EventScope, scoped: bool) -> Follow {
        Follow {
            reaper,
            out,
            events,
            scoped,
            finds_news: false,
            pending: Vec::new(),
            decided: HashMap::new(),
            handovers: Vec::new(),
            parentless: Vec::new(),
            fresh: Vec::new(),
            suspects: Vec::new(),
            turned_up: HashSet::new(),
            notes_turned_up: false,
            touched: Vec::new(),
            changed: Vec::new(),
            closed: Vec::new(),
            opened: 0,
            signals: 0,
            foretold: HashSet::new(),
            ends: Vec::new(),
        }
    }

    /// Handles an output of the model.
    pub fn on_output(&mut self, model: &Model, event: &Event, output: &Output) {
        match output {
            Output::Tree(change) => self.on_change(model, event, change),
            Output::Session(session_event) => {
                self.on_session_event(model, event.time, session_event)
            }
        }
    }

    fn on_change(&mut self, model: &Model, event: &Event, change: &Change) {
        let Event {
            time,
            provenance: told_by,
            ..
        } = *event;
        match *change {
            Change::Born {
                key, provenance, ..
            } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                self.joined(model, node);
                let is_found =
                    provenance == Provenance::Procfs && node.state.member.session.is_some();
                if is_found || model.is_awaited(key) {
                    self.fresh.push(key);
                }
                match event.kind {
                    EventKind::Discovered(_) if model.is_unattributed(key) => {
                        self.suspects.push(key)
                    }
                    EventKind::Discovered(_) | EventKind::Fork { .. } => {}
                    _ if self.notes_turned_up => drop(self.turned_up.insert(key)),
                    _ => {}
                }
                // The process table is no news, nor is what was known before.
                if provenance != Provenance::Procfs || self.finds_news {
                    let how = match node.state.member.inferred {
                        Some(_) => Provenance::Inferred,
                        None => provenance,
                    };
                    self.lifecycle(model, node, time, Lifecycle::Fork, how);
                }
            }
            Change::Execed { key } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                let member = node.state.member.session.is_some();
                if self.decided.contains_key(&key)
                    || member && model.rules.has_rules_for_living(node.orphaned.is_some())
                {
                    self.pending.push(Pending::Process(key));
                }
                if member || model.is_awaited(key) {
                    self.fresh.push(key);
                }
                // It may have become a server.
                if node.state.member.root && model.has_rules_for_root(key) {
                    self.pending.push(Pending::Process(key));
                }
                // As the program of its root says whether the probes may end a session.
                self.changed
                    .extend(node.state.member.session.filter(|_| node.state.member.root));
                self.touch(node);
                self.lifecycle(model, node, time, Lifecycle::Exec, told_by);
            }
            Change::Moved { key } => {
                let Some(node) = model.tree.get(key) else {
                    return;
                };
                if node.state.member.session.is_some() {
                    self.fresh.push(key);
                }
                if self.decided.contains_key(&key) {
                    self.pending.push(Pending::Process(key));
                }
                self.touch(node);
                self.lifecycle(model, node, time, Lifecycle::Move, told_by);
            }
            Change::Exited {
                ref node,
                ended,
                peak_rss,
                provenance,
                ref orphans,
            } => {
                self.lifecycle(
                    model,
                    node,
                    time,
                    Lifecycle::Exit { ended, peak_rss },
                    provenance,
                );
                let claimed = self.reaper.is_claimed(node.key);
                self.foretold.remove(&node.key);
                self.turned_up.remove(&node.key);
                self.reaper.exited(node, ended, orphans);
                if let Some(session) = node
                    .state
                    .member
                    .session
                    .filter(|_| node.state.member.signalled != 0 && !claimed)
                {
                    let signal = match node.state.member.signalled & MEMBER_KILL {
                        0 => Signal::SIGTERM,
                        _ => Signal::SIGKILL,
                    };
                    let who = Who::new(model, node);
                    self.ends.push((who, session, ended, signal));
                }
                let was_kept = self
                    .decided
                    .remove(&node.key)
                    .is_some_and(|(verdict, _)| verdict != Verdict::Reap);
                if let Some(id) = node.state.member.session
                    && was_kept
                    && model.sessions.due(id).is_some()
                {
                    self.pending.push(Pending::Session(id));
                }
                orphans
                    .iter()
                    .for_each(|orphan| self.orphaned(model, node, *orphan, time));
            }
            Change::Signalled { key, signal } => self.signalled(model, key, signal, time),
            Change::Reparented {
                key,
                old_parent,
                adopter,
                orphaned,
            } => {
                let Some(node) = model.tree.get(key).filter(|node| self.is_told(node)) else {
                    return;
                };
                if let Some(old_parent) = old_parent.filter(|_| orphaned) {
                    // Its parent's exit is not known, or not yet.
                    self.is_orphan(model, old_parent, key, time);
                }
                // By the key that the tree knows it by.
                let old_parent = node.orphaned.map(|from| from.old_parent).or(old_parent);
                let name = |key: Option<ProcessKey>| match key {
                    Some(key) => model.tree.comm(key).to_vec(),
                    None => Vec::new(),
                };
                let ending = node.orphaned.is_some_and(|from| from.namespace_ending);
                let body = Body::Reparent {
                    who: Who::new(model, node),
                    old_parent,
                    old_parent_command: name(old_parent),
                    adopter,
                    adopter_command: name(adopter),
                    namespace_ending: adopter.is_none() && ending,
                    provenance: told_by,
                };
                self.tell(time, body);
            }
        }
    }

    /// It may be a member from now on.
    fn joined(&mut self, model: &Model, node: &Node) {
        if node.state.member.session.is_some_and(|_| {
            model.rules.has_rules_for_living(false) || model.escalation_of(node).is_some()
        }) {
            self.pending.push(Pending::Process(node.key));
        }
        self.touch(node);
    }

    /// Handles a process that is found to be a member later than it began.
    pub fn joined_late(&mut self, model: &Model, key: ProcessKey, time: u64) {
        let Some(node) = model.tree.get(key) else {
            return;
        };
        self.joined(model, node);
        self.fresh.push(key);
        let how = match node.state.member.inferred {
            Some(_) => Provenance::Inferred,
            None => node.provenance,
        };
        self.lifecycle(model, node, time, Lifecycle::Fork, how);
    }

    fn orphaned(&mut self, model: &Model, parent: &Node, orphan: ProcessKey, time: u64) {
        self.parentless.push(orphan);
        if self.tell_orphan(model, parent.key, &parent.image.comm, orphan, time) {
            self.pending.push(Pending::Process(orphan));
        }
    }

    fn is_orphan(&mut self, model: &Model, old_parent: ProcessKey, orphan: ProcessKey, time: u64) {
        let command = model.tree.comm(old_parent);
        // The exit of a root is reported after its children, which the probe may have signalled. Until then a member of
        // its session would pass for detached; its exit re-evaluates all of them.
        let exits_with = model
            .tree
            .get(old_parent)
            .and_then(|parent| parent.state.member.session);
        let own = model
            .tree
            .get(orphan)
            .and_then(|node| node.state.member.session);
        let is_member = |outer| {
            let mut outwards = own.into_iter().flat_map(|id| model.sessions.outwards(id));
            outwards.any(|session| session.id == outer)
        };
        if self.tell_orphan(model, old_parent, command, orphan, time)
            && !exits_with.is_some_and(is_member)
        {
            self.pending.push(Pending::Process(orphan));
        }
    }

    /// Tells of an orphan, if it is a member.
    fn tell_orphan(
        &mut self,
        model: &Model,
        parent: ProcessKey,
        command: &[u8],
        orphan: ProcessKey,
        time: u64,
    ) -> bool {
        let Some(node) = model
            .tree
            .get(orphan)
            .filter(|node| node.state.member.session.is_some())
        else {
            return false;
        };
        let body = Body::Orphan {
            who: Who::new(model, node),
            old_parent: Some(parent),
            parent_command: command.to_vec(),
        };
        self.tell(time, body);
        true
    }

    /// Notes whose mark in the kernel may have to change: of strangers there is none.
    fn touch(&mut self, node: &Node) {
        let marked = node.membership.is_some_and(|mark| mark.flags != 0);
        let followed =
            node.state.member.session.is_some() || self.scoped && node.state.member.in_scope;
        if marked || followed || node.state.member.boundary.is_some() || node.state.member.watched {
            self.touched.push(node.key);
        }
    }

    /// Notes all members of a session.
    pub fn touch_members(&mut self, model: &Model, session: &Session) {
        let members = session.members().filter_map(|pid| model.tree.by_pid(pid));
        for node in members {
            self.touched.push(node.key);
            self.fresh.push(node.key);
        }
    }

    /// A probe has sent a signal.
    fn signalled(&mut self, model: &Model, key: ProcessKey, signal: u8, time: u64) {
        let node = model.tree.get(key);
        let signal = Signal::try_from(i32::from(signal));
        if let (Some(node), Ok(signal)) = (node, signal) {
            self.signals += 1;
            self.touched.push(key);
            if !self.reaper.has_told(key) && self.foretold.insert(key) {
                // On what the service has left word of: at the root's exit, or when nothing else helped.
                let reason = match signal {
                    Signal::SIGTERM => Reason::RootExited,
                    _ => Reason::BornWhileDue,
                };
                let names = Names {
                    verdict: "reap",
                    reason: reason.name(),
                    rule: None,
                    memory: None,
                };
                let who = Who::new(model, node);
                self.tell(time, Body::Decision { who, names });
            }
            let sent = Sent {
                key,
                signal,
                latency: None,
                by: Signaller::Kernel,
            };
            let who = Who::new(model, node);
            self.tell(time, Body::Signal { who, sent });
        }
    }

    /// Takes in what became of a session.
    pub fn on_session_event(&mut self, model: &Model, time: u64, session_event: &SessionEvent) {
        match session_event {
            SessionEvent::Opened { session, starter } => {
                let Some(session) = model.sessions.get(*session) else {
                    return;
                };
                let Some(root) = model.tree.get(session.root) else {
                    return;
                };
                self.opened += 1;
                self.changed.push(session.id);
                if model.has_rules_for_root(session.root) {
                    self.pending.push(Pending::Process(session.root));
                }
                self.touched.extend(root.parent);
                // Some may have been found before it was known whose they are.
                self.touch_members(model, session);
                let name = |id: Option<SessionId>| {
                    let session = id.and_then(|id| model.sessions.get(id));
                    session.map(SessionRef::from)
                };
                let body = Body::SessionOpen {
                    who: Who::new(model, root),
                    kind: session.kind,
                    rule: session.agent.clone(),
                    outer: name(session.outer),
                    starter: name(*starter),
                };
                self.tell(time, body);
            }
            SessionEvent::Boundary { key, session, rule } => {
                self.touched.push(*key);
                let Some(node) = model.tree.get(*key) else {
                    return;
                };
                let session = model.sessions.get(*session).map(SessionRef::from);
                self.tell(
                    time,
                    Body::Boundary {
                        who: Who::new(model, node),
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
                // An end that was told of before was none.
                self.pending
                    .retain(|pending| !matches!(pending, Pending::Session(id) if id == session));
                self.changed.push(*session);
                self.touched.push(*root);
                if model.has_rules_for_root(*root) {
                    self.pending.push(Pending::Process(*root));
                }
                let Some(session) = model.sessions.find(*session).map(SessionRef::from) else {
                    return;
                };
                let Some(node) = model.tree.get(*root) else {
                    return;
                };
                self.tell(
                    time,
                    Body::SessionRelaunch {
                        session,
                        who: Who::new(model, node),
                        old_root: *old_root,
                    },
                );
            }
            SessionEvent::RootExited { session } => {
                self.pending.push(Pending::Session(*session));
                let Some(session) = model.sessions.find(*session) else {
                    return;
                };
                self.changed.push(session.id);
                if session.succession == Succession::Awaited {
                    self.handovers.push(session.id);
                }
                let members = model
                    .sessions
                    .inwards(session.id)
                    .map(|s| s.members().count())
                    .sum();
                let Some(gone) = session.root_exit else {
                    return;
                };
                let (root, ended, kind) = (session.root, gone.ended, session.kind);
                let session = SessionRef::from(session);
                self.tell(
                    time,
                    Body::SessionRootGone {
                        session,
                        kind,
                        root,
                        ended,
                        members,
                    },
                );
            }
            // Told, and decided about, when all is taken in.
            SessionEvent::Restored { .. } => {}
            SessionEvent::Closed { session } => {
                let name = SessionRef::from(&**session);
                self.closed.push((session.id, name, session.last_exit_at))
            }
        }
    }

    fn is_told(&self, node: &Node) -> bool {
        node.state.member.session.is_some()
            || (self.events == EventScope::All && node.state.member.in_scope)
    }

    fn lifecycle(
        &mut self,
        model: &Model,
        node: &Node,
        time: u64,
        what: Lifecycle,
        provenance: Provenance,
    ) {
        if self.is_told(node) {
            self.tell(
                time,
                Body::Lifecycle {
                    what,
                    who: Who::new(model, node),
                    provenance,
                },
            );
        }
    }

    fn tell(&mut self, time: u64, body: Body) {
        self.out.push(Record { time, body });
    }
}
