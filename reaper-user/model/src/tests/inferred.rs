//! Whose those are who came and lost their makers between two looks at the process table.

use std::sync::Arc;

use super::rules::{read, world};
use super::world::{INIT, World};
use crate::Scope;
use crate::event::{ExitStatus, Image, ProcEntry, ProcessKey, Provenance, TICK_NS};
use crate::policy::Reason;

/// Looks, and finds `agent` below a shell, with a tool; all began in ticks of their own.
fn looked() -> (World, ProcessKey, ProcessKey) {
    with_rules("")
}

fn with_rules(rules: &str) -> (World, ProcessKey, ProcessKey) {
    let mut w = world(read(&format!("honor_keep = false\n{rules}")));
    w.model.set_infers_membership(true);
    let shell = found(&mut w, 1, "bash", |_| {});
    let agent = found(&mut w, shell.pid, "claude", |_| {});
    let tool = found(&mut w, agent.pid, "npm", |_| {});
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

/// Somebody is found, in a session of the kernel of his own unless `change` says otherwise.
pub(super) fn found(
    w: &mut World,
    parent: u32,
    program: &str,
    change: impl FnOnce(&mut Image),
) -> ProcessKey {
    w.now += TICK_NS;
    let key = w.new_key();
    w.row_with(key, parent, program, |seen: &mut ProcEntry| {
        let mut image = Image::clone(&seen.image);
        (image.sid, image.pgid) = (key.pid, key.pid);
        change(&mut image);
        seen.image = Arc::new(image);
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
fn by_the_group_or_session_that_a_member_began_one_is_its_own() {
    let (mut w, agent, tool) = looked();
    let of_group = found(&mut w, 1, "server", |image| image.pgid = tool.pid);
    let of_session = found(&mut w, 1, "server", |image| {
        (image.sid, image.pgid) = (tool.pid, 7);
    });
    let below = found(&mut w, of_group.pid, "worker", |_| {});
    // Also of one that has just left.
    w.exit(tool);
    let of_gone = found(&mut w, 1, "server", |image| image.pgid = tool.pid);
    for key in [of_group, of_session, below, of_gone] {
        assert_eq!(w.root_of(key), Some(agent), "{}", key.pid);
        assert!(is_inferred(&w, key));
        assert_eq!(w.why(key), "keep root_alive");
        let node = w.model.tree.get(key).unwrap();
        assert_eq!(node.provenance, Provenance::Inferred);
    }
    let seen = found(&mut w, agent.pid, "npm", |_| {});
    assert!(w.is_member(seen) && !is_inferred(&w, seen));
}

#[test]
fn what_proves_nothing_makes_nobody_a_member() {
    let (mut w, agent, tool) = looked();
    let shell = w.model.tree.get(agent).unwrap().parent.unwrap();
    // The shell's terminal, which the agent is in too.
    let beside = found(&mut w, 1, "vim", |image| image.sid = shell.pid);
    // `claude | tee log`: the shell's own child in the agent's group.
    let tee = found(&mut w, shell.pid, "tee", |image| {
        (image.sid, image.pgid) = (shell.pid, agent.pid);
    });
    let nobody = found(&mut w, 1, "x", |image| (image.sid, image.pgid) = (0, 0));
    let unknown = found(&mut w, 1, "x", |image| image.pgid = 9999);
    // It was there before whoever has that pid now.
    let old = ProcessKey {
        start: tool.start - TICK_NS,
        ..w.new_key()
    };
    let old = w.row_with(old, 1, "x", |seen| {
        seen.image = Arc::new(Image {
            pgid: tool.pid,
            ..Image::clone(&seen.image)
        });
    });
    for key in [beside, tee, nobody, unknown, old] {
        assert!(!w.is_member(key), "{}", key.pid);
    }
}

#[test]
fn where_the_kernel_tells_nothing_is_concluded() {
    let (mut w, _, tool) = looked();
    w.model.set_infers_membership(false);
    let orphan = found(&mut w, 1, "server", |image| image.pgid = tool.pid);
    assert!(!w.is_member(orphan));
}

#[test]
fn a_cgroup_that_is_the_sessions_own_tells_too() {
    let mut w = world(read(""));
    w.model.set_infers_membership(true);
    let shell = found(&mut w, 1, "bash", |image| image.cgroup_id = 10);
    let agent = found(&mut w, shell.pid, "claude", |image| image.cgroup_id = 20);
    let own = found(&mut w, 1, "server", |image| image.cgroup_id = 20);
    let other = found(&mut w, 1, "server", |image| image.cgroup_id = 10);
    assert_eq!((w.root_of(own), w.is_member(other)), (Some(agent), false));
    // Not where it shares that with others from the beginning.
    let codex = found(&mut w, shell.pid, "codex", |image| image.cgroup_id = 10);
    let other = found(&mut w, 1, "server", |image| image.cgroup_id = 10);
    assert!(w.is_member(codex) && !w.is_member(other));
}

#[test]
fn a_cgroup_tells_nothing_of_who_is_not_in_scope_as_it_may_be_that_of_an_agent_outside() {
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
        let shell = w.row_with(shell, 1, "bash", |seen| set_cgroup(seen, 10));
        let agent = found(&mut w, shell.pid, "claude", |image| image.cgroup_id = 20);
        let orphan = found(&mut w, 1, "server", |image| {
            image.cgroup_id = 20;
            if pgid {
                image.pgid = agent.pid;
            }
        });
        w.root_of(orphan) == Some(agent)
    };
    assert!(orphan(false, false) && !orphan(true, false));
    // A member began its group: that holds everywhere.
    assert!(orphan(true, true));
}

fn set_cgroup(seen: &mut ProcEntry, id: u64) {
    let mut image = Image::clone(&seen.image);
    (image.cgroup_id, image.sid, image.pgid) = (id, seen.key.pid, seen.key.pid);
    seen.image = Arc::new(image);
}

#[test]
fn boundaries_and_agents_are_what_they_are() {
    let (mut w, agent, tool) = with_rules("[[boundary]]\nname = 'tmux'\ncomm = 'tmux'\n");
    let tmux = found(&mut w, 1, "tmux", |image| image.pgid = tool.pid);
    let pane = found(&mut w, tmux.pid, "bash", |_| {});
    assert!(!w.is_member(tmux) && !w.is_member(pane));
    let codex = found(&mut w, 1, "codex", |image| image.pgid = tool.pid);
    assert_eq!(w.root_of(codex), Some(codex));
    assert!(!is_inferred(&w, codex));
    w.dies_by_signal(agent);
    assert_eq!(
        w.why(codex),
        "keep root_alive",
        "evidence makes it nobody's"
    );
}

#[test]
fn only_a_rule_that_says_so_reaps_on_evidence() {
    let due = |rules: &str| {
        let (mut w, agent, tool) = with_rules(rules);
        let orphan = found(&mut w, 1, "server", |image| image.pgid = tool.pid);
        let below = found(&mut w, orphan.pid, "worker", |_| {});
        w.end(agent, ExitStatus::Exited(0), Some(INIT));
        assert_eq!(w.why(below), w.why(orphan));
        assert_ne!(
            w.decide(tool).reason,
            Reason::Inferred,
            "its birth was seen"
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
    // Under a living agent it lives by right of that, whatever a rule says of others.
    let greedy = rule("action = 'reap'\nsession = 'any'\ncomm = 'server'");
    let (mut w, _, tool) = with_rules(&greedy);
    let orphan = found(&mut w, 1, "server", |image| image.pgid = tool.pid);
    assert_eq!(w.why(orphan), "keep root_alive");
}
