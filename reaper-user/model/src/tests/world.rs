//! A little world to tell stories in: processes fork, run programs and exit, and the model is told so.
//!
//! Programs are named by their comm. `claude` and `codex` are agents, `app-server` is a server, `tmux` is a boundary, `apt` is kept,
//! and so is what runs under another uid than its agent; all else is plain. After each event the whole
//! model is checked for consistency.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::event::{
    Event, EventKind, ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS, Uids,
};
use crate::policy::Decision;
use crate::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, Ruleset, UidIs};
use crate::session::SessionEvent;
use crate::{Model, Output, Scope};

/// Pid of the program itself; nobody has it unless a story says so.
pub const OWN_PID: u32 = 4_000_000;
/// The init of the world: seeded, as in any.
pub const INIT: ProcessKey = ProcessKey { pid: 1, start: 0 };
/// The user that runs everything unless a story says otherwise.
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
        rule.when.uid = other_uid.then_some(UidIs::Other);
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
    /// Terminal of the programs that are run from here on.
    pub tty: u32,
    /// Who runs the programs from here on.
    pub uids: Uids,
    /// What became of sessions: `opened claude`, `root_exited claude`, …
    pub session_events: Vec<String>,
    /// All that was told, in order.
    pub events: Vec<Event>,
    /// Children by the kernel's account, which the stories are told from.
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

    /// Tells the model one thing, one millisecond after the last.
    pub fn tell(&mut self, provenance: Provenance, kind: EventKind) {
        self.now += 1_000_000;
        let event = Event {
            time: self.now,
            provenance,
            kind,
        };
        self.apply(event);
    }

    pub fn kernel(&mut self, kind: EventKind) {
        self.tell(Provenance::Kernel, kind);
    }

    pub fn apply(&mut self, event: Event) {
        let mut out = Vec::new();
        self.model.apply(&event, &mut out);
        self.session_events.extend(named(&self.model, &out));
        self.events.push(event);
        assert_consistent(&self.model);
    }

    /// Tells the last `n` events once more.
    pub fn repeat(&mut self, n: usize) {
        let again = self.events[self.events.len() - n..].to_vec();
        again.into_iter().for_each(|event| self.apply(event));
    }

    /// A key nobody has had.
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

    /// A fork with `CLONE_PARENT`: the child is its creator's sibling.
    pub fn clone_parent(&mut self, creator: ProcessKey, parent: ProcessKey) -> ProcessKey {
        let child = self.new_key();
        self.fork_as(child, parent, creator);
        child
    }

    pub fn fork_as(&mut self, child: ProcessKey, parent: ProcessKey, creator: ProcessKey) {
        self.fork_event(child, parent, creator, false);
    }

    /// A child that is the init of a pid namespace.
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
        self.runs(key, image);
    }

    /// Runs this program.
    pub fn runs(&mut self, key: ProcessKey, image: Image) {
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

    /// Exits with status 0; its children go to the world's init.
    pub fn exit(&mut self, key: ProcessKey) {
        self.end(key, ExitStatus::Exited(0), Some(INIT));
    }

    /// Is ended by SIGKILL.
    pub fn dies_by_signal(&mut self, key: ProcessKey) {
        let ended = ExitStatus::Signalled {
            signal: 9,
            core: false,
        };
        self.end(key, ended, Some(INIT));
    }

    /// Ends; `None` for an adopter: what becomes of the children is not told.
    pub fn end(&mut self, key: ProcessKey, ended: ExitStatus, adopter: Option<ProcessKey>) {
        self.kernel(EventKind::Exit {
            key,
            parent: None,
            exit_status: ended,
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

    /// A row of the process table; gives the key under which it is known from there.
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
        let mut seen = ProcEntry {
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
        change(&mut seen);
        self.tell(Provenance::Procfs, EventKind::Discovered(seen));
        key
    }

    pub fn decide(&self, key: ProcessKey) -> Decision {
        self.model.decide(key)
    }

    /// The decision in words: `reap root_exited`, `keep keep_rule apt`.
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

    /// The root of the innermost session of a process.
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

    /// All decisions about all that lives.
    pub fn decisions(&self) -> BTreeMap<ProcessKey, String> {
        let keys = self.model.tree.iter().map(|node| node.key);
        keys.map(|key| (key, self.why(key))).collect()
    }
}

/// Names of what has happened to sessions.
pub fn named(model: &Model, out: &[Output]) -> Vec<String> {
    let session_events = out.iter().filter_map(|output| match output {
        Output::Session(session_event) => Some(name(model, session_event)),
        Output::Tree(_) | Output::Settled { .. } => None,
    });
    session_events.collect()
}

fn name(model: &Model, session_event: &SessionEvent) -> String {
    let agent = |id| {
        let session = model.sessions.find(id);
        session.map_or("of a closed one".into(), |session| {
            session.agent.to_string()
        })
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

/// Everything that must hold between the parts of a model, whatever it has been told.
pub fn assert_consistent(model: &Model) {
    let tree = &model.tree;
    let cgroups = tree.iter().map(|node| (node.image.cgroup_id, node.key.pid));
    assert_eq!(*tree.cgroups(), cgroups.collect());
    for node in tree.iter() {
        for pid in node.children() {
            let child = tree.by_pid(*pid).expect("a listed child lives");
            assert_eq!(
                child.parent,
                Some(node.key),
                "{pid} is listed by its parent"
            );
        }
        if let Some(parent) = node.parent {
            let parent = tree.get(parent).expect("a parent lives");
            let times = parent.children().iter().filter(|pid| **pid == node.key.pid);
            assert_eq!(times.count(), 1, "{} is listed once", node.key);
        }
        if let Some(id) = node.state.member.session {
            let session = model.sessions.get(id).expect("a member's session is known");
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
            let node = tree.by_pid(pid).expect("a member lives");
            assert_eq!(node.state.member.session, Some(session.id), "{}", node.key);
        }
        let nested = |outer| model.sessions.iter().any(|s| s.outer == Some(outer));
        let over = session.is_empty() && session.root_exit.is_some();
        assert!(
            !over || nested(session.id) || model.sessions.is_restoring,
            "a session that is over is closed"
        );
        let root = tree.get(session.root);
        assert!(
            root.is_some() || session.root_exit.is_some(),
            "a root lives or is gone"
        );
        assert!(session.outer != Some(session.id));
    }
    model.sessions.assert_indexed();
}
