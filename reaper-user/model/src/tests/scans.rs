//! Scans of /proc: the changes that they discover, and the later events that they do not undo.

use reaper_common::{MEMBER_NAME_MATCHED, MEMBER_TRACKED, MEMBER_UNCERTAIN};

use super::merging::key;
use super::world::{INIT, USER, World, image};
use crate::event::{EventKind, ExitStatus, Membership, Uids};

#[test]
fn scan_discovers_a_lost_exec() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let server = w.fork(agent);
    let shell = w.spawn(agent, "bash");
    w.row(server, agent.pid, "tmux");
    w.row(shell, agent.pid, "apt");
    w.kill(agent);
    assert_eq!(
        [server, shell].map(|key| w.why(key)),
        ["keep not_a_member", "keep keep_rule apt"]
    );
}

#[test]
fn scan_discovers_changed_uids() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.row_with(tool, agent.pid, "npm", |row| row.uids = Uids::default());
    w.kill(agent);
    assert_eq!(w.why(tool), "keep other_uid other-uid");
}

#[test]
fn scan_of_known_processes_changes_nothing() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm run");
    let before = w.decisions();
    w.session_events();
    w.row(agent, 1, "claude");
    w.row(tool, agent.pid, "npm run");
    assert_eq!(w.decisions(), before);
    assert_eq!(w.model.tree.get(tool).unwrap().key, tool);
    assert!(w.session_events().is_empty());
}

/// The scan reads the process, which then executes another program. Only then the scan's row is applied.
#[test]
fn scan_does_not_undo_a_later_exec() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "bash");
    let (scanned_at, root) = (w.now, Uids::default());
    let [old, new] = [MEMBER_UNCERTAIN, MEMBER_NAME_MATCHED].map(|flag| Membership {
        session: Some(agent),
        flags: MEMBER_TRACKED | flag,
    });
    w.uids = root;
    w.kernel(EventKind::Exec {
        key: tool,
        parent: Some(agent),
        uids: root,
        pidfd_inode: 0,
        image: image("apt", 0),
        membership: Some(new),
    });
    w.row_with(tool, agent.pid, "bash", |row| {
        (row.read_at, row.uids, row.membership) = (scanned_at, USER, Some(old));
    });
    let node = w.model.tree.get(tool).unwrap();
    let known = (&node.image.comm[..], node.uids, node.membership);
    assert_eq!(known, (&b"apt"[..], root, Some(new)));
    w.kill(agent);
    assert_eq!(w.why(tool), "keep keep_rule apt");
}

/// The ring still has an exec from before the scan. The records of the execs in between were lost.
#[test]
fn exec_from_before_a_scan_does_not_undo_it() {
    for (program, now, why) in [
        ("bash", "apt", "keep keep_rule apt"),
        ("bash", "tmux", "keep not_a_member"),
        ("claude", "tmux", "keep not_a_member"),
        // The program before counts too.
        ("tmux", "bash", "keep not_a_member"),
        ("codex", "bash", "reap root_exited"),
        ("npm", "bash", "reap root_exited"),
    ] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let tool = w.spawn(agent, "bash");
        w.uids = Uids::default();
        w.exec(tool, program);
        let Some(old) = w.events.pop() else {
            unreachable!()
        };
        let mut w = World::new();
        w.spawn(INIT, "claude");
        w.spawn(agent, "bash");
        w.now = old.time + 1;
        w.row(tool, agent.pid, now);
        w.apply(old);
        let root = w.root_of(tool);
        let found = w.model.tree.get(tool).unwrap();
        assert_eq!((&found.image.comm[..], found.uids), (now.as_bytes(), USER));
        assert_eq!(root == Some(tool), program == "codex", "{program} {now}");
        w.kill(agent);
        assert_eq!(w.why(tool), why, "{program} {now}");
    }
}

#[test]
fn changed_process_title_is_no_exec() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let worker = w.spawn(agent, "node");
    w.row_with(worker, agent.pid, "node", |row| {
        std::sync::Arc::make_mut(&mut row.image).argv = b"claude: worker\0".to_vec();
    });
    assert_eq!(w.model.tree.get(worker).unwrap().image.argv, b"node\0");
}

#[test]
fn scan_discovers_the_adopter_of_an_orphan() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.exit_with(agent, ExitStatus::Exited(0), None);
    w.row(tool, 1, "npm");
    assert_eq!(w.model.tree.get(tool).unwrap().parent, Some(INIT));
    assert_eq!(w.why(tool), "reap root_exited");
}

/// Between its fork and its exec, /proc shows the parent's program for a child.
#[test]
fn fork_of_an_agent_before_its_exec_is_no_nested_agent() {
    let mut w = World::new();
    w.row(key(10), 1, "claude");
    let child = w.row(key(11), 10, "claude");
    assert_eq!(w.session_events(), ["opened claude"]);
    w.exec(key(11), "bash");
    let server = w.fork(child);
    w.exit(key(11));
    assert_eq!(w.why(server), "keep detached");
}
