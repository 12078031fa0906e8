use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::api::messages::UntrackedReason;
use crate::config::Config;
use reaper_model::event::{Event, EventKind, ExitStatus, Image, Provenance, Uids};
use reaper_model::{Model, Scope};

const RULES: &str = r#"
    [[agent]]
    name = "claude"
    comm = "claude"
    [[boundary]]
    name = "tmux"
    comm = "tmux"
"#;
const ROOT: Peer = Peer { uid: 0 };
const ALICE: Peer = Peer { uid: 1000 };
const BOB: Peer = Peer { uid: 1001 };

struct World {
    model: Model,
    now: u64,
}

impl World {
    fn new() -> World {
        let text = format!("defaults.agents = false\n{RULES}");
        let rules = Config::parse(&text, Path::new("test")).unwrap().rules;
        let model = Model::new(rules, Scope::default(), 4_000_000);
        World { model, now: 1000 }
    }

    fn apply(&mut self, kind: EventKind) {
        self.now += 1;
        let event = Event {
            time: self.now,
            provenance: Provenance::Kernel,
            kind,
        };
        self.model.apply(&event, &mut Vec::new());
    }

    /// Starts a child that runs a program.
    fn run(&mut self, parent: Option<ProcessKey>, pid: u32, program: &str, uid: u32) -> ProcessKey {
        let key = ProcessKey {
            pid,
            start: self.now,
        };
        let uids = Uids {
            real: uid,
            effective: uid,
        };
        self.apply(EventKind::Fork {
            child: key,
            parent,
            creator: parent,
            uids,
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        });
        let image = Image {
            comm: program.into(),
            exe: format!("/bin/{program}").into(),
            argv: format!("{program}\0").into(),
            ..Image::default()
        };
        self.apply(EventKind::Exec {
            key,
            parent,
            uids,
            pidfd_inode: 0,
            image: Arc::new(image),
            membership: None,
        });
        key
    }

    fn exit(&mut self, key: ProcessKey, adopted: Option<(ProcessKey, ProcessKey)>) {
        self.apply(EventKind::Exit {
            key,
            parent: None,
            exit_status: ExitStatus::Exited(3),
            peak_rss: 0,
            membership: None,
        });
        if let Some((child, adopter)) = adopted {
            self.apply(EventKind::Reparent {
                child,
                old_parent: Some(key),
                adopter: Some(adopter),
                membership: None,
            });
        }
    }

    fn pids(&self, peer: Peer, agent: Option<&str>, all: bool) -> Vec<Vec<u32>> {
        let tree = View::new(&self.model, peer).tree(agent, all).unwrap();
        let group = |(_, rows): (_, Vec<crate::api::messages::ProcessSnapshot>)| {
            let mut pids: Vec<u32> = rows.iter().map(|row| row.key.pid).collect();
            pids.sort_unstable();
            pids
        };
        tree.groups.into_iter().map(group).collect()
    }
}

/// init ─ shell ─ claude ─┬─ bash ─ node
///                        ├─ tmux ─ cat
///                        ├─ claude (nested) ─ make
///                        └─ sudo, root's
fn world() -> World {
    let mut world = World::new();
    let init = world.run(None, 1, "init", 0);
    let shell = world.run(Some(init), 10, "sh", 1000);
    let claude = world.run(Some(shell), 20, "claude", 1000);
    let bash = world.run(Some(claude), 30, "bash", 1000);
    world.run(Some(bash), 31, "node", 1000);
    let tmux = world.run(Some(claude), 40, "tmux", 1000);
    world.run(Some(tmux), 41, "cat", 1000);
    let nested = world.run(Some(claude), 50, "claude", 1000);
    world.run(Some(nested), 51, "make", 1000);
    world.run(Some(claude), 60, "sudo", 0);
    world
}

#[test]
fn tree_has_nested_sessions_boundaries_visible_processes() {
    let world = world();
    let whole = vec![20, 30, 31, 40, 50, 51, 60];
    assert_eq!(world.pids(ROOT, None, false).concat(), whole);
    assert_eq!(
        world.pids(ROOT, Some("claude"), true),
        [whole, vec![1, 10, 40, 41]]
    );
    assert_eq!(world.pids(ALICE, None, false), [[20, 30, 31, 40, 50, 51]]);
    assert!(world.pids(BOB, None, true).concat().is_empty());
    let refused = View::new(&world.model, ROOT).tree(Some("unknown"), false);
    assert_eq!(refused.unwrap_err().status, 404);
}

#[test]
fn session_count_depends_on_peer() {
    let world = world();
    let open = |peer| View::new(&world.model, peer).sessions().count();
    assert_eq!([open(ROOT), open(ALICE), open(BOB)], [2, 2, 0]);
    let agents = View::new(&world.model, ALICE).agents();
    assert_eq!(agents.len(), 1);
    assert_eq!((&*agents[0].name, agents[0].sessions.len()), ("claude", 2));
    assert_eq!(agents[0].matches, ["comm claude"]);
}

#[test]
fn explain_lineage_includes_exited_ancestors() {
    let mut world = world();
    let (bash, node, init) = (30, 31, 1);
    let of = |world: &World, pid| world.model.tree.by_pid(pid).unwrap().key;
    let (bash, node, init) = (of(&world, bash), of(&world, node), of(&world, init));
    world.exit(bash, Some((node, init)));
    let snapshot = View::new(&world.model, ALICE).explain(31).unwrap();
    let lineage: Vec<_> = snapshot
        .lineage
        .iter()
        .map(|a| (a.key.pid, a.alive, a.visible))
        .collect();
    assert_eq!(
        lineage,
        [
            (30, false, true),
            (20, true, true),
            (10, true, true),
            (1, true, false)
        ]
    );
    assert_eq!(snapshot.lineage[0].exit_status, Some(ExitStatus::Exited(3)));
    assert_eq!(snapshot.lineage[1].agent.as_deref(), Some("claude"));
    assert_eq!(snapshot.adopter.map(|adopter| adopter.pid), Some(1));
    let decision = snapshot.row.decision.unwrap();
    assert_eq!((decision.decision, decision.reason), ("keep", "detached"));
    assert_eq!(
        (snapshot.untracked_reason, snapshot.exited_root.is_some()),
        (None, false)
    );
}

#[test]
fn explain_untracked_process_has_reason() {
    let mut world = world();
    let init = world.model.tree.by_pid(1).unwrap().key;
    let tmux = world.run(Some(init), 70, "tmux", 1000);
    world.run(Some(tmux), 71, "bash", 1000);
    let view = View::new(&world.model, ROOT);
    let reason = |pid| view.explain(pid).unwrap().untracked_reason;
    assert_eq!(reason(10), Some(UntrackedReason::NoAgent(None)));
    assert_eq!(reason(40), Some(UntrackedReason::Boundary("tmux".into())));
    assert!(matches!(reason(41), Some(UntrackedReason::BelowBoundary(by, _)) if by.pid == 40));
    // A boundary without an agent above it is not the reason.
    assert!(matches!(reason(71), Some(UntrackedReason::NoAgent(Some(by))) if by.pid == 70));
    assert_eq!(reason(31), None);
    let refused = |peer, pid| {
        View::new(&world.model, peer)
            .explain(pid)
            .unwrap_err()
            .status
    };
    assert_eq!(refused(ROOT, 99), 404);
    assert_eq!(refused(ALICE, 60), 403);
    assert_eq!(refused(BOB, 31), 403);
}

#[test]
fn scan_lists_only_members() {
    let world = world();
    let scanned = |peer| {
        let mut rows = View::new(&world.model, peer).scan();
        rows.sort_unstable_by_key(|row| row.key.pid);
        rows.iter().map(|row| row.key.pid).collect::<Vec<_>>()
    };
    assert_eq!(scanned(ROOT), [20, 30, 31, 50, 51, 60]);
    assert_eq!(scanned(BOB), [0; 0]);
}

#[test]
fn lineage_has_exited_parent_of_root() {
    let mut world = world();
    let of = |world: &World, pid| world.model.tree.by_pid(pid).unwrap().key;
    let (shell, claude, init) = (of(&world, 10), of(&world, 20), of(&world, 1));
    world.exit(shell, Some((claude, init)));
    world.exit(claude, None);
    for (peer, visible) in [(ALICE, true), (BOB, false)] {
        let view = View::new(&world.model, peer);
        let node = world.model.tree.by_pid(31).unwrap();
        let lineage = view.lineage(node);
        let known = |at: usize| {
            let ancestor: &crate::api::messages::Ancestor = &lineage[at];
            let comm = ancestor.image.as_ref().map(|image| image.comm.clone());
            let comm = comm.map(|comm| String::from_utf8(comm).unwrap());
            (ancestor.key.pid, comm, ancestor.alive, ancestor.visible)
        };
        assert_eq!(known(1), (20, Some("claude".into()), false, visible));
        assert_eq!(known(2), (10, Some("sh".into()), false, visible));
        assert_eq!(lineage.len(), 3, "the parent of the shell is unknown");
    }
}

#[test]
fn kept_members_of_due_session_are_counted() {
    let mut world = world();
    let claude = world.model.tree.by_pid(20).unwrap().key;
    let node = world.model.tree.by_pid(31).unwrap().key;
    let keep = UserKeep {
        until_monotonic_ns: None,
        with_descendants: true,
        by_uid: 1000,
        made_at: 1,
    };
    assert_eq!(world.model.keep(node, keep), 1);
    let kept = |world: &World| {
        let view = View::new(&world.model, ROOT);
        let count = |session| view.session_snapshot(session).kept;
        view.sessions().map(count).collect::<Vec<_>>()
    };
    assert_eq!(kept(&world), [0, 0], "the agent is alive");
    world.exit(claude, None);
    assert_eq!(kept(&world), [2, 0], "and one of another user");
    world.model.unkeep(node);
    assert_eq!(kept(&world), [1, 0]);
}
