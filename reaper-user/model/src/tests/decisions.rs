//! Processes that are never reaped, keeps, and the scope.

use super::world::{INIT, OWN_PID, USER, World, image};
use crate::Scope;
use crate::event::{ExitStatus, Image, ProcessKey, TICK_NS, Uids};

const OWN: ProcessKey = ProcessKey {
    pid: OWN_PID,
    start: 5,
};
const ROOT_USER: Uids = Uids {
    real: 0,
    effective: 0,
};

#[test]
fn service_and_its_ancestors_in_a_session_are_never_reaped() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    w.fork_as(OWN, shell, shell);
    w.exec(OWN, "reaper");
    let below = w.spawn(OWN, "helper");
    let sibling = w.spawn(shell, "npm");
    w.kill(agent);
    let keys = [OWN, shell, below, sibling];
    assert_eq!(
        keys.map(|key| w.why(key)),
        [
            "keep never_self",
            "keep never_self",
            "reap root_exited",
            "reap root_exited"
        ]
    );
}

#[test]
fn ancestor_known_only_from_a_late_fork_is_never_reaped() {
    for program in ["bash", "tmux"] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        // Discovered in /proc below an adopter, before the fork event is read.
        let parent = ProcessKey {
            pid: 70,
            start: 99 * TICK_NS,
        };
        w.row(parent, 1, program);
        w.row(
            ProcessKey {
                start: 99 * TICK_NS,
                ..OWN
            },
            70,
            "reaper",
        );
        w.fork_as(parent, shell, shell);
        w.kill(agent);
        assert_eq!(w.why(shell), "keep never_self");
    }
}

#[test]
fn pid_1_is_never_reaped_even_if_it_is_an_agent() {
    let mut w = World::new();
    w.exec(INIT, "claude");
    assert_eq!(w.why(INIT), "keep never_pid1");
    let inner = w.spawn(INIT, "codex");
    assert_eq!(w.why(inner), "keep root_alive");
}

#[test]
fn kernel_thread_below_a_member_is_never_reaped() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let thread = ProcessKey {
        pid: 50,
        start: 9 * TICK_NS,
    };
    w.row_with(thread, agent.pid, "kworker", |row| row.kernel_thread = true);
    w.kill(agent);
    assert_eq!(w.why(thread), "keep never_kernel_thread");
}

#[test]
fn other_uid_is_kept_with_its_descendants() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    w.uids = ROOT_USER;
    let sudo = w.spawn(agent, "sudo");
    let daemon = w.spawn(sudo, "dockerd");
    w.uids = USER;
    let user = w.spawn(daemon, "npm");
    w.kill(agent);
    let keys = [sudo, daemon, user];
    assert_eq!(
        keys.map(|key| w.why(key)),
        [
            "keep other_uid other-uid",
            "keep other_uid other-uid",
            "keep ancestor_kept other-uid"
        ]
    );
    assert!(w.decide(user).due.is_some(), "a kept member is due too");
}

#[test]
fn different_real_or_effective_uid_is_another_uid() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.kill(agent);
    for uids in [
        Uids { real: 0, ..USER },
        Uids {
            effective: 0,
            ..USER
        },
    ] {
        w.model.set_uids(tool, uids);
        assert_eq!(w.why(tool), "keep other_uid other-uid");
    }
    w.model.set_uids(tool, USER);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn descendants_of_a_kept_process_are_kept_until_it_exits() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let apt = w.spawn(agent, "apt");
    let script = w.spawn(apt, "sh");
    let deep = w.spawn(script, "ldconfig");
    w.kill(agent);
    assert_eq!(
        [apt, script, deep].map(|key| w.why(key)),
        [
            "keep keep_rule apt",
            "keep ancestor_kept apt",
            "keep ancestor_kept apt"
        ]
    );
    w.exit(apt);
    assert_eq!(
        [script, deep].map(|key| w.why(key)),
        ["reap root_exited"; 2]
    );
}

#[test]
fn keep_applies_to_the_current_program() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "apt");
    w.kill(agent);
    w.exec(tool, "node");
    assert_eq!(w.why(tool), "reap root_exited");
    w.exec(tool, "apt");
    assert_eq!(w.why(tool), "keep keep_rule apt");
}

#[test]
fn child_forked_after_root_exit_has_its_own_reason() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let trap = w.spawn(agent, "sh");
    w.kill(agent);
    let cleanup = w.spawn(trap, "rm");
    assert_eq!(
        [trap, cleanup].map(|key| w.why(key)),
        ["reap root_exited", "reap forked_after_root_exit"]
    );
}

#[test]
fn exited_or_unknown_process_is_no_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.kill(agent);
    w.kill(tool);
    let never = ProcessKey { pid: 9, start: 9 };
    assert_eq!(
        [tool, never].map(|key| w.why(key)),
        ["keep not_a_member"; 2]
    );
}

#[test]
fn agent_outside_the_scope_opens_no_session() {
    let scope = |key| Scope {
        roots: vec![key],
        ..Scope::default()
    };
    let mut w = World::new();
    let inside = w.spawn(INIT, "bash");
    let mut w = World::scoped(scope(inside));
    assert_eq!(w.spawn(INIT, "bash"), inside);
    let agents = [inside, INIT].map(|parent| w.spawn(parent, "claude"));
    let tools = agents.map(|agent| w.spawn(agent, "npm"));
    w.exit(inside);
    agents.into_iter().for_each(|agent| w.kill(agent));
    assert_eq!(
        tools.map(|key| w.why(key)),
        ["reap root_exited", "keep not_a_member"]
    );
}

#[test]
fn scope_by_cgroup_covers_its_processes_and_descendants() {
    let mut w = World::scoped(Scope {
        cgroups: vec![77],
        ..Scope::default()
    });
    let agent = ProcessKey {
        pid: 60,
        start: TICK_NS,
    };
    w.row_with(agent, 1, "claude", |row| {
        std::sync::Arc::make_mut(&mut row.image).cgroup_id = 77;
    });
    let other = w.spawn(INIT, "claude");
    let tools = [agent, other].map(|agent| w.spawn(agent, "npm"));
    [agent, other].into_iter().for_each(|agent| w.kill(agent));
    assert_eq!(
        tools.map(|key| w.why(key)),
        ["reap root_exited", "keep not_a_member"]
    );
}

#[test]
fn added_cgroup_widens_the_scope() {
    let mut w = World::scoped(Scope {
        cgroups: vec![77],
        ..Scope::default()
    });
    let runs = |w: &mut World| {
        let agent = w.fork(INIT);
        let mut image = Image::clone(&image("claude", 0));
        image.cgroup_id = 78;
        w.exec_image(agent, image);
        w.is_member(agent)
    };
    assert!(!runs(&mut w));
    w.model.add_cgroup(78);
    assert!(runs(&mut w));
}

#[test]
fn user_service_ignores_agents_of_other_uids() {
    let mut w = World::scoped(Scope {
        uid: Some(1000),
        ..Scope::default()
    });
    let agents = [1000, 1001].map(|uid| {
        let agent = w.new_key();
        w.row_with(agent, 1, "claude", |row| {
            row.uids = Uids {
                real: uid,
                effective: uid,
            };
        })
    });
    // Nor an agent of another uid below a member.
    let shell = w.spawn(agents[0], "sh");
    w.uids = Uids {
        real: 1001,
        effective: 1001,
    };
    let other = w.spawn(shell, "claude");
    let agents = [agents[0], agents[1], other];
    let open = agents.map(|agent| w.model.sessions.by_root(agent).is_some());
    assert_eq!(open, [true, false, false]);
}

#[test]
fn exit_of_root_with_unknown_status_makes_members_due() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.exit_with(agent, ExitStatus::Unknown, None);
    assert_eq!(w.why(tool), "reap root_exited");
}
