//! Membership of processes that started and lost their parents between two scans of the process table.

use std::sync::Arc;

use super::rules::{read, world};
use super::world::{INIT, World};
use crate::Scope;
use crate::event::{ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS};
use crate::policy::Reason;

/// Scans an agent below a shell, with a tool. Their start times are in different ticks. Returns the agent and the tool.
fn scanned() -> (World, ProcessKey, ProcessKey) {
    with_rules("")
}

fn with_rules(rules: &str) -> (World, ProcessKey, ProcessKey) {
    let mut w = world(read(&format!("honor_keep = false\n{rules}")));
    w.model.set_infers_membership(true);
    let shell = discover(&mut w, 1, "bash", |_| {});
    let agent = discover(&mut w, shell.pid, "claude", |_| {});
    let tool = discover(&mut w, agent.pid, "npm", |_| {});
    assert!(
        w.is_member(tool)
            && w.model
                .tree
                .get(tool)
                .unwrap()
                .state
                .member
                .inferred
                .is_none()
    );
    (w, agent, tool)
}

/// Reports a process discovered by a scan. It leads its own kernel session, unless `change` sets another.
pub(super) fn discover(
    w: &mut World,
    parent: u32,
    program: &str,
    change: impl FnOnce(&mut Image),
) -> ProcessKey {
    w.now += TICK_NS;
    let key = w.new_key();
    w.row_with(key, parent, program, |entry: &mut ProcEntry| {
        let mut image = Image::clone(&entry.image);
        (image.sid, image.pgid) = (key.pid, key.pid);
        change(&mut image);
        entry.image = Arc::new(image);
    })
}

fn is_inferred(w: &World, key: ProcessKey) -> bool {
    w.model
        .tree
        .get(key)
        .unwrap()
        .state
        .member
        .inferred
        .is_some()
}

#[test]
fn process_group_or_session_of_a_member_infers_membership() {
    let (mut w, agent, tool) = scanned();
    let of_group = discover(&mut w, 1, "server", |image| image.pgid = tool.pid);
    let of_session = discover(&mut w, 1, "server", |image| {
        (image.sid, image.pgid) = (tool.pid, 7);
    });
    let below = discover(&mut w, of_group.pid, "worker", |_| {});
    // Also if the group leader has just exited.
    w.exit(tool);
    let of_gone = discover(&mut w, 1, "server", |image| image.pgid = tool.pid);
    for key in [of_group, of_session, below, of_gone] {
        assert_eq!(w.root_of(key), Some(agent), "{}", key.pid);
        assert!(is_inferred(&w, key));
        assert_eq!(w.why(key), "keep root_alive");
        let node = w.model.tree.get(key).unwrap();
        assert_eq!(node.provenance, Provenance::Inferred);
    }
    let child = discover(&mut w, agent.pid, "npm", |_| {});
    assert!(w.is_member(child) && !is_inferred(&w, child));
}

#[test]
fn inconclusive_ids_infer_no_membership() {
    let (mut w, agent, tool) = scanned();
    let shell = w.model.tree.get(agent).unwrap().parent.unwrap();
    // In the session of the shell's terminal, which the agent is in too.
    let beside = discover(&mut w, 1, "vim", |image| image.sid = shell.pid);
    // `claude | tee log`: a child of the shell in the agent's process group.
    let tee = discover(&mut w, shell.pid, "tee", |image| {
        (image.sid, image.pgid) = (shell.pid, agent.pid);
    });
    let no_ids = discover(&mut w, 1, "x", |image| (image.sid, image.pgid) = (0, 0));
    let unknown = discover(&mut w, 1, "x", |image| image.pgid = 9999);
    // Started before the process that has this pid now.
    let old = ProcessKey {
        start: tool.start - TICK_NS,
        ..w.new_key()
    };
    let old = w.row_with(old, 1, "x", |entry| {
        entry.image = Arc::new(Image {
            pgid: tool.pid,
            ..Image::clone(&entry.image)
        });
    });
    for key in [beside, tee, no_ids, unknown, old] {
        assert!(!w.is_member(key), "{}", key.pid);
    }
}

#[test]
fn membership_is_not_inferred_if_forks_are_reported() {
    let (mut w, _, tool) = scanned();
    w.model.set_infers_membership(false);
    let orphan = discover(&mut w, 1, "server", |image| image.pgid = tool.pid);
    assert!(!w.is_member(orphan));
}

#[test]
fn exclusive_cgroup_of_a_session_infers_membership() {
    let mut w = world(read(""));
    w.model.set_infers_membership(true);
    let shell = discover(&mut w, 1, "bash", |image| image.cgroup_id = 10);
    let agent = discover(&mut w, shell.pid, "claude", |image| image.cgroup_id = 20);
    let own = discover(&mut w, 1, "server", |image| image.cgroup_id = 20);
    let other = discover(&mut w, 1, "server", |image| image.cgroup_id = 10);
    assert_eq!((w.root_of(own), w.is_member(other)), (Some(agent), false));
    // Not if the agent shares the cgroup with other processes from its start.
    let codex = discover(&mut w, shell.pid, "codex", |image| image.cgroup_id = 10);
    let other = discover(&mut w, 1, "server", |image| image.cgroup_id = 10);
    assert!(w.is_member(codex) && !w.is_member(other));
}

#[test]
fn cgroup_infers_no_membership_outside_the_scope() {
    let orphan = |scoped: bool, pgid: bool| {
        let shell = ProcessKey {
            pid: 50,
            start: 1_000_000_000 + 2 * TICK_NS,
        };
        let scope = Scope {
            roots: scoped.then_some(shell).into_iter().collect(),
            ..Scope::default()
        };
        let mut w = World::scoped(scope);
        w.model.set_infers_membership(true);
        let shell = w.row_with(shell, 1, "bash", |entry| set_cgroup(entry, 10));
        let agent = discover(&mut w, shell.pid, "claude", |image| image.cgroup_id = 20);
        let orphan = discover(&mut w, 1, "server", |image| {
            image.cgroup_id = 20;
            if pgid {
                image.pgid = agent.pid;
            }
        });
        w.root_of(orphan) == Some(agent)
    };
    assert!(orphan(false, false) && !orphan(true, false));
    // A process group that a member leads is evidence in any scope.
    assert!(orphan(true, true));
}

fn set_cgroup(entry: &mut ProcEntry, id: u64) {
    let mut image = Image::clone(&entry.image);
    (image.cgroup_id, image.sid, image.pgid) = (id, entry.key.pid, entry.key.pid);
    entry.image = Arc::new(image);
}

#[test]
fn boundaries_and_agents_are_never_inferred_members() {
    let (mut w, agent, tool) = with_rules("[[boundary]]\nname = 'tmux'\ncomm = 'tmux'\n");
    let tmux = discover(&mut w, 1, "tmux", |image| image.pgid = tool.pid);
    let pane = discover(&mut w, tmux.pid, "bash", |_| {});
    assert!(!w.is_member(tmux) && !w.is_member(pane));
    let codex = discover(&mut w, 1, "codex", |image| image.pgid = tool.pid);
    assert_eq!(w.root_of(codex), Some(codex));
    assert!(!is_inferred(&w, codex));
    w.kill(agent);
    assert_eq!(
        w.why(codex),
        "keep root_alive",
        "evidence does not nest a session"
    );
}

#[test]
fn only_rules_with_inferred_true_reap_inferred_members() {
    let due = |rules: &str| {
        let (mut w, agent, tool) = with_rules(rules);
        let orphan = discover(&mut w, 1, "server", |image| image.pgid = tool.pid);
        let below = discover(&mut w, orphan.pid, "worker", |_| {});
        w.exit_with(agent, ExitStatus::Exited(0), Some(INIT));
        assert_eq!(w.why(below), w.why(orphan));
        assert_ne!(
            w.decide(tool).reason,
            Reason::Inferred,
            "its fork was reported"
        );
        w.why(orphan)
    };
    let rule = |text: &str| format!("[[rule]]\nname = 'r'\n{text}\n");
    assert_eq!(due(""), "report inferred");
    assert_eq!(
        due(&rule("action = 'reap'\nsession = 'gone'")),
        "report inferred"
    );
    assert_eq!(
        due(&rule("action = 'reap'\nsession = 'gone'\nafter = '1min'")),
        "report inferred"
    );
    assert_eq!(
        due(&rule("action = 'reap'\ninferred = false")),
        "report inferred"
    );
    assert_eq!(
        due(&rule("action = 'reap'\ninferred = true")),
        "reap root_exited r"
    );
    assert_eq!(
        due(&rule("action = 'keep'\ninferred = true")),
        "keep keep_rule r"
    );
    assert_eq!(
        due(&rule("action = 'report'\ninferred = false")),
        "report inferred"
    );
    assert_eq!(
        due(&rule("action = 'keep'\ncomm = ['server', 'worker']")),
        "keep keep_rule r"
    );
    // While the root is alive, a rule without `inferred` does not reap it.
    let greedy = rule("action = 'reap'\nsession = 'any'\ncomm = 'server'");
    let (mut w, _, tool) = with_rules(&greedy);
    let orphan = discover(&mut w, 1, "server", |image| image.pgid = tool.pid);
    assert_eq!(w.why(orphan), "keep root_alive");
}
