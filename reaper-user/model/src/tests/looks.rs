//! What a look at /proc finds to have changed, and what it does not undo.

use reaper_common::{MEMBER_NAME_MATCHED, MEMBER_TRACKED, MEMBER_UNCERTAIN};

use super::merging::key;
use super::world::{INIT, USER, World, image};
use crate::event::{EventKind, ExitStatus, Membership, Uids};

#[test]
fn a_look_at_proc_finds_an_exec_that_was_lost() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let server = w.fork(agent);
    let shell = w.spawn(agent, "bash");
    w.row(server, agent.pid, "tmux");
    w.row(shell, agent.pid, "apt");
    w.dies_by_signal(agent);
    assert_eq!(
        [server, shell].map(|key| w.why(key)),
        ["keep not_a_member", "keep keep_rule apt"]
    );
}

#[test]
fn a_look_at_proc_finds_uids_that_changed() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.row_with(tool, agent.pid, "npm", |row| row.uids = Uids::default());
    w.dies_by_signal(agent);
    assert_eq!(w.why(tool), "keep other_uid other-uid");
}

#[test]
fn a_look_at_proc_changes_nothing_of_what_is_known_already() {
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

/// It was looked at, ran another program, of which the probes told, and only then the look is taken in.
#[test]
fn a_look_at_proc_does_not_undo_an_exec_that_came_after_it() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "bash");
    let (looked, root) = (w.now, Uids::default());
    let flags = MEMBER_TRACKED;
    let [old, new] =
        [flags | MEMBER_UNCERTAIN, flags | MEMBER_NAME_MATCHED].map(|flags| Membership {
            session: Some(agent),
            flags,
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
        (row.read_at, row.uids, row.membership) = (looked, USER, Some(old));
    });
    let node = w.model.tree.get(tool).unwrap();
    let known = (&node.image.comm[..], node.uids, node.membership);
    assert_eq!(known, (&b"apt"[..], root, Some(new)));
    w.dies_by_signal(agent);
    assert_eq!(w.why(tool), "keep keep_rule apt");
}

/// The ring still tells of an exec from before the look; of the ones between, the records were lost.
#[test]
fn an_exec_from_before_a_look_at_proc_does_not_undo_what_was_found() {
    for (program, now, why) in [
        ("bash", "apt", "keep keep_rule apt"),
        ("bash", "tmux", "keep not_a_member"),
        ("claude", "tmux", "keep not_a_member"),
        // What it has been counts.
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
        let inner = w.root_of(tool);
        let found = w.model.tree.get(tool).unwrap();
        assert_eq!((&found.image.comm[..], found.uids), (now.as_bytes(), USER));
        assert_eq!(inner == Some(tool), program == "codex", "{program} {now}");
        w.dies_by_signal(agent);
        assert_eq!(w.why(tool), why, "{program} {now}");
    }
}

#[test]
fn a_title_that_a_program_gives_itself_is_no_exec() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let worker = w.spawn(agent, "node");
    w.row_with(worker, agent.pid, "node", |row| {
        std::sync::Arc::make_mut(&mut row.image).argv = b"claude: worker\0".to_vec();
    });
    assert_eq!(w.model.tree.get(worker).unwrap().image.argv, b"node\0");
}

#[test]
fn a_look_at_proc_finds_the_adopter_of_an_orphan() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.end(agent, ExitStatus::Exited(0), None);
    w.row(tool, 1, "npm");
    assert_eq!(w.model.tree.get(tool).unwrap().parent, Some(INIT));
    assert_eq!(w.why(tool), "reap root_exited");
}

/// Between a fork and an exec, /proc shows the parent's program in the child.
#[test]
fn a_copy_of_an_agent_that_has_not_run_anything_yet_is_no_nested_agent() {
    let mut w = World::new();
    w.row(key(10), 1, "claude");
    let child = w.row(key(11), 10, "claude");
    assert_eq!(w.session_events(), ["opened claude"]);
    w.exec(key(11), "bash");
    let server = w.fork(child);
    w.exit(key(11));
    assert_eq!(w.why(server), "keep detached");
}
