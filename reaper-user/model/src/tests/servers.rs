//! Agents' servers: their sessions are nested in no other, and no session is nested in them.

use reaper_common::{MEMBER_NAME_MATCHED, MEMBER_TRACKED};

use super::world::{INIT, World};
use crate::Scope;
use crate::event::Membership;
use crate::ruleset::SessionKind;

#[test]
fn server_outlives_its_starter_and_owns_its_descendants() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "codex");
    let own_tool = w.spawn(agent, "npm");
    let server = w.spawn(agent, "app-server");
    let server_tool = w.spawn(server, "npm");
    assert_eq!(w.session_events(), ["opened codex", "opened app-server"]);
    assert_eq!(w.root_of(server_tool), Some(server));
    w.kill(agent);
    assert_eq!(
        [own_tool, server, server_tool].map(|key| w.why(key)),
        ["reap root_exited", "keep root_alive", "keep root_alive"]
    );
    w.kill(server);
    assert_eq!(w.why(server_tool), "reap root_exited");
}

#[test]
fn server_started_outside_any_agent_opens_a_session() {
    let mut w = World::new();
    let server = w.spawn(INIT, "app-server");
    let tool = w.spawn(server, "npm");
    let session = w.model.sessions.by_root(server).unwrap();
    assert_eq!(session.kind, SessionKind::Server);
    w.exit(server);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn agent_below_a_server_is_not_nested_in_it() {
    let mut w = World::new();
    let server = w.spawn(INIT, "app-server");
    let shell = w.spawn(server, "bash");
    let worker = w.spawn(shell, "claude");
    let tool = w.spawn(worker, "npm");
    let nested = w.spawn(worker, "codex");
    w.kill(server);
    assert_eq!(
        [shell, worker, tool, nested].map(|key| w.why(key)),
        [
            "reap root_exited",
            "keep root_alive",
            "keep root_alive",
            "keep root_alive"
        ]
    );
    w.kill(worker);
    assert_eq!(
        [tool, nested].map(|key| w.why(key)),
        ["reap root_exited"; 2]
    );
}

#[test]
fn server_below_another_server_is_not_nested_in_it() {
    let mut w = World::new();
    let launcher = w.spawn(INIT, "app-server");
    let server = w.spawn(launcher, "app-server --native");
    let tool = w.spawn(server, "npm");
    w.kill(launcher);
    assert_eq!(
        [server, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep root_alive"]
    );
}

#[test]
fn nested_agent_that_becomes_a_server_leaves_the_outer_session() {
    let mut w = World::new();
    let outer = w.spawn(INIT, "claude");
    let shim = w.spawn(outer, "codex");
    w.exec(shim, "app-server");
    let tool = w.spawn(shim, "npm");
    w.kill(outer);
    assert_eq!(
        [shim, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep root_alive"]
    );
}

#[test]
fn agent_nested_in_a_root_that_becomes_a_server_is_not_due() {
    let mut w = World::new();
    let root = w.spawn(INIT, "codex");
    let nested = w.spawn(root, "claude");
    let tool = w.spawn(nested, "npm");
    w.exec(root, "app-server");
    w.kill(root);
    assert_eq!([nested, tool].map(|key| w.why(key)), ["keep root_alive"; 2]);
}

#[test]
fn discovered_server_below_an_agent_is_not_nested_in_it() {
    let mut w = World::new();
    let agent = w.new_key();
    let agent = w.row(agent, 1, "codex");
    let server = w.new_key();
    let server = w.row(server, agent.pid, "app-server");
    let tool = w.new_key();
    let tool = w.row(tool, server.pid, "npm");
    w.kill(agent);
    assert_eq!(
        [server, tool].map(|key| w.why(key)),
        ["keep root_alive", "keep root_alive"]
    );
    w.kill(server);
    assert_eq!(w.why(tool), "reap root_exited");
}

/// A scan reads a child before its parent if pids have wrapped around.
#[test]
fn server_discovered_before_its_starter_is_not_nested_in_it() {
    let mut w = World::new();
    let agent = w.new_key();
    w.now += 50_000_000;
    let server = w.new_key();
    let membership = |key| Membership {
        session: Some(key),
        flags: MEMBER_TRACKED | MEMBER_NAME_MATCHED,
    };
    let matched = membership(agent);
    let server = w.row_with(server, agent.pid, "app-server", |row| {
        row.membership = Some(matched)
    });
    let agent = w.row_with(agent, 1, "codex", |row| row.membership = Some(matched));
    w.kill(agent);
    assert_eq!(w.why(server), "keep root_alive");
}

#[test]
fn server_of_another_user_ends_membership_in_a_user_service() {
    let mut w = World::scoped(Scope {
        uid: Some(1000),
        ..Scope::default()
    });
    let agent = w.spawn(INIT, "claude");
    w.uids.real = 1001;
    let server = w.spawn(agent, "app-server");
    assert!(!w.is_member(server));
    w.kill(agent);
    assert_eq!(w.why(server), "keep not_a_member");
}
