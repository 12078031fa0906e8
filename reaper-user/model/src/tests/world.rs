//! A simulated host for tests: processes fork, exec and exit, and each event is reported to the model.
//!
//! A program is named by its comm. `claude` and `codex` are agents, `app-server` is a server, `tmux` is a boundary, and
//! `apt` is kept. A process with another uid than its agent is kept too. After each event the model is checked for
//! consistency.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::event::{
    Event, EventKind, ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS, Uids,
};
use crate::policy::Decision;
use crate::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, Ruleset, UidCondition};
use crate::session::SessionEvent;
use crate::{Model, Output, Scope};

/// Pid of the service. No process has it unless a test adds one.
pub const OWN_PID: u32 = 4_000_000;
/// Init, which each world starts with.
pub const INIT: ProcessKey = ProcessKey { pid: 1, start: 0 };
/// User of all processes, unless a test sets another.
pub const USER: Uids = Uids {
    real: 1000,
    effective: 1000,
};

pub fn rules() -> Ruleset {
    let rule = |name: &str, action, other_uid| {
        let condition = Condition {
            field: Field::Comm,
            any_of: vec![Pattern::comm(name).unwrap()],
            negative: false,
        };
        let matchers = if other_uid {
            vec![]
        } else {
            vec![Matcher::new(vec![condition])]
        };
        let mut rule = Rule::new(name, action, matchers);
        rule.when.uid = other_uid.then_some(UidCondition::Other);
        rule
    };
    Ruleset::new(vec![
        rule("claude", Action::Agent, false),
        rule("codex", Action::Agent, false),
        rule("app-server", Action::Server, false),
        rule("tmux", Action::Boundary, false),
        rule("apt", Action::Keep, false),
        rule("other-uid", Action::Keep, true),
    ])
}

pub fn image(program: &str, tty: u32) -> Arc<Image> {
    let comm = program.split(' ').next().unwrap_or_default();
    Arc::new(Image {
        comm: comm.into(),
        exe: format!("/bin/{comm}").into(),
        argv: format!("{}\0", program.replace(' ', "\0")).into(),
        tty,
        ..Image::default()
    })
}

pub struct World {
    pub model: Model,
    /// Terminal of the programs that start from now on.
    pub tty: u32,
    /// Uids of the processes that start from now on.
    pub uids: Uids,
    /// Session events so far: `opened claude`, `root_exited claude`, …
    pub session_events: Vec<String>,
    /// Reported events in their order.
    pub events: Vec<Event>,
    /// Living children of each process.
    children: BTreeMap<ProcessKey, Vec<ProcessKey>>,
    pub now: u64,
    next_pid: u32,
}

impl World {
    pub fn new() -> World {
        World::scoped(Scope::default())
    }

    pub fn scoped(scope: Scope) -> World {
        let mut world = World {
            model: Model::new(rules(), scope, OWN_PID),
            tty: 0,
            uids: USER,
            session_events: vec![],
            events: vec![],
            children: BTreeMap::new(),
            now: 1_000_000_000,
            next_pid: 100,
        };
        world.row(INIT, 0, "init");
        world
    }

    /// Reports an event to the model, one millisecond after the last one.
    pub fn report(&mut self, provenance: Provenance, kind: EventKind) {
        self.now += 1_000_000;
        let event = Event {
            time: self.now,
            provenance,
            kind,
        };
        self.apply(event);
    }

    pub fn kernel(&mut self, kind: EventKind) {
        self.report(Provenance::Kernel, kind);
    }

    pub fn apply(&mut self, event: Event) {
        let mut out = Vec::new();
        self.model.apply(&event, &mut out);
        self.session_events
            .extend(session_event_names(&self.model, &out));
        self.events.push(event);
        assert_consistent(&self.model);
    }

    /// Reports the last `n` events once more.
    pub fn repeat(&mut self, n: usize) {
        let again = self.events[self.events.len() - n..].to_vec();
        again.into_iter().for_each(|event| self.apply(event));
    }

    /// Returns an unused key.
    pub fn new_key(&mut self) -> ProcessKey {
        self.next_pid += 1;
        ProcessKey {
            pid: self.next_pid,
            start: self.now + 1_000_000,
        }
    }

    pub fn fork(&mut self, parent: ProcessKey) -> ProcessKey {
        let child = self.new_key();
        self.fork_as(child, parent, parent);
        child
    }

    /// Forks with `CLONE_PARENT`: the child is a sibling of its creator.
    pub fn clone_parent(&mut self, creator: ProcessKey, parent: ProcessKey) -> ProcessKey {
        let child = self.new_key();
        self.fork_as(child, parent, creator);
        child
    }

    pub fn fork_as(&mut self, child: ProcessKey, parent: ProcessKey, creator: ProcessKey) {
        self.fork_event(child, parent, creator, false);
    }

    /// Forks a child that is the init of a new pid namespace.
    pub fn namespace(&mut self, parent: ProcessKey) -> ProcessKey {
        let child = self.new_key();
        self.fork_event(child, parent, parent, true);
        child
    }

    fn fork_event(
        &mut self,
        child: ProcessKey,
        parent: ProcessKey,
        creator: ProcessKey,
        namespace_init: bool,
    ) {
        self.children.entry(parent).or_default().push(child);
        let uids = self.uids;
        self.kernel(EventKind::Fork {
            child,
            parent: Some(parent),
            creator: Some(creator),
            uids,
            pidfd_inode: 0,
            namespace_init,
            membership: None,
        });
    }

    pub fn exec(&mut self, key: ProcessKey, program: &str) {
        let image = Image::clone(&image(program, self.tty));
        self.exec_image(key, image);
    }

    /// Executes a program.
    pub fn exec_image(&mut self, key: ProcessKey, image: Image) {
        let uids = self.uids;
        let has = |(parent, children): (&ProcessKey, &Vec<ProcessKey>)| {
            children.contains(&key).then_some(*parent)
        };
        let parent = self.children.iter().find_map(has);
        self.kernel(EventKind::Exec {
            key,
            parent,
            uids,
            pidfd_inode: 0,
            image: image.into(),
            membership: None,
        });
    }

    pub fn spawn(&mut self, parent: ProcessKey, program: &str) -> ProcessKey {
        let child = self.fork(parent);
        self.exec(child, program);
        child
    }

    /// Exits with status 0. Init adopts the children.
    pub fn exit(&mut self, key: ProcessKey) {
        self.exit_with(key, ExitStatus::Exited(0), Some(INIT));
    }

    /// Exits by SIGKILL. Init adopts the children.
    pub fn kill(&mut self, key: ProcessKey) {
        let status = ExitStatus::Signalled {
            signal: 9,
            core: false,
        };
        self.exit_with(key, status, Some(INIT));
    }

    /// Exits with a status. Without an adopter, no reparenting of the children is reported.
    pub fn exit_with(&mut self, key: ProcessKey, status: ExitStatus, adopter: Option<ProcessKey>) {
        self.kernel(EventKind::Exit {
            key,
            parent: None,
            exit_status: status,
            peak_rss: 0,
            membership: None,
        });
        self.children
            .values_mut()
            .for_each(|c| c.retain(|k| *k != key));
        let children = self.children.remove(&key).unwrap_or_default();
        if let Some(adopter) = adopter {
            for child in children {
                self.adopt(child, key, adopter);
            }
        }
    }

    pub fn adopt(&mut self, child: ProcessKey, old_parent: ProcessKey, adopter: ProcessKey) {
        self.children
            .values_mut()
            .for_each(|c| c.retain(|k| *k != child));
        self.children.entry(adopter).or_default().push(child);
        self.kernel(EventKind::Reparent {
            child,
            old_parent: Some(old_parent),
            adopter: Some(adopter),
            membership: None,
        });
    }

    /// Reports a row of a scan of /proc and returns its key, in which the start is exact only to the clock tick.
    pub fn row(&mut self, key: ProcessKey, parent: u32, program: &str) -> ProcessKey {
        self.row_with(key, parent, program, |_| {})
    }

    pub fn row_with(
        &mut self,
        key: ProcessKey,
        parent: u32,
        program: &str,
        change: impl FnOnce(&mut ProcEntry),
    ) -> ProcessKey {
        let start = key.start - key.start % TICK_NS;
        let key = ProcessKey { start, ..key };
        let mut entry = ProcEntry {
            read_at: self.now,
            exact: false,
            pidfd_inode: 0,
            membership: None,
            key,
            parent,
            uids: self.uids,
            image: image(program, self.tty),
            kernel_thread: false,
            namespace_init: false,
        };
        change(&mut entry);
        self.report(Provenance::Procfs, EventKind::Discovered(entry));
        key
    }

    pub fn decide(&self, key: ProcessKey) -> Decision {
        self.model.decide(key)
    }

    /// Returns the decision as text: `reap root_exited`, `keep keep_rule apt`.
    pub fn why(&self, key: ProcessKey) -> String {
        let decision = self.decide(key);
        let verdict = decision.verdict.name();
        let rule = decision.rule.map(|rule| format!(" {rule}"));
        format!(
            "{verdict} {}{}",
            decision.reason.name(),
            rule.unwrap_or_default()
        )
    }

    /// Returns the root of the session of a process.
    pub fn root_of(&self, key: ProcessKey) -> Option<ProcessKey> {
        let session = self.model.tree.get(key)?.state.member.session?;
        Some(self.model.sessions.get(session)?.root)
    }

    pub fn is_member(&self, key: ProcessKey) -> bool {
        self.root_of(key).is_some()
    }

    pub fn session_events(&mut self) -> Vec<String> {
        std::mem::take(&mut self.session_events)
    }

    /// Returns the decisions about all living processes.
    pub fn decisions(&self) -> BTreeMap<ProcessKey, String> {
        let keys = self.model.tree.iter().map(|node| node.key);
        keys.map(|key| (key, self.why(key))).collect()
    }
}

/// Returns the session events among outputs, as text.
pub fn session_event_names(model: &Model, out: &[Output]) -> Vec<String> {
    let session_events = out.iter().filter_map(|output| match output {
        Output::Session(session_event) => Some(name(model, session_event)),
        Output::Tree(_) | Output::Settled { .. } => None,
    });
    session_events.collect()
}

fn name(model: &Model, session_event: &SessionEvent) -> String {
    let agent = |id| {
        let session = model.sessions.find(id);
        session.map_or("(closed)".into(), |session| session.agent.to_string())
    };
    match session_event {
        SessionEvent::Opened { session, .. } => format!("opened {}", agent(*session)),
        SessionEvent::Restored { session } => format!("restored {}", agent(*session)),
        SessionEvent::Boundary { session, rule, .. } => {
            format!("boundary {rule} in {}", agent(*session))
        }
        SessionEvent::Relaunched { session, .. } => format!("relaunched {}", agent(*session)),
        SessionEvent::RootExited { session } => format!("root_exited {}", agent(*session)),
        SessionEvent::Closed { session } => format!("closed {}", session.agent),
    }
}

/// Checks the invariants between the parts of a model. They hold after any events.
pub fn assert_consistent(model: &Model) {
    let tree = &model.tree;
    let cgroups = tree.iter().map(|node| (node.image.cgroup_id, node.key.pid));
    assert_eq!(*tree.cgroups(), cgroups.collect());
    for node in tree.iter() {
        for pid in node.children() {
            let child = tree.by_pid(*pid).expect("a listed child is alive");
            assert_eq!(
                child.parent,
                Some(node.key),
                "{pid} is listed as a child of its parent"
            );
        }
        if let Some(parent) = node.parent {
            let parent = tree.get(parent).expect("a parent is alive");
            let times = parent.children().iter().filter(|pid| **pid == node.key.pid);
            assert_eq!(times.count(), 1, "{} is listed once", node.key);
        }
        if let Some(id) = node.state.member.session {
            let session = model
                .sessions
                .get(id)
                .expect("the session of a member is open");
            assert!(session.members().any(|pid| pid == node.key.pid));
            assert!(
                node.state.member.boundary.is_none() && node.state.member.in_scope,
                "{}",
                node.key
            );
        }
        assert!(
            !node.state.member.is_lineage_uncertain || node.state.member.session.is_some(),
            "{}",
            node.key
        );
    }
    for session in model.sessions.iter() {
        for pid in session.members() {
            let node = tree.by_pid(pid).expect("a member is alive");
            assert_eq!(node.state.member.session, Some(session.id), "{}", node.key);
        }
        let nested = |outer| model.sessions.iter().any(|s| s.outer == Some(outer));
        let is_finished = session.is_empty() && session.root_exit.is_some();
        assert!(
            !is_finished || nested(session.id) || model.sessions.is_restoring,
            "a session without root and members is closed"
        );
        let root = tree.get(session.root);
        assert!(
            root.is_some() || session.root_exit.is_some(),
            "a root is alive or its exit is known"
        );
        assert!(session.outer != Some(session.id));
    }
    model.sessions.assert_indexed();
}
