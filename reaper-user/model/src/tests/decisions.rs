//! What is never reaped, what is kept, and what is in scope.

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
fn this_program_and_its_ancestors_are_not_reaped_inside_an_agents_session_either() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let shell = w.spawn(agent, "bash");
    w.fork_as(OWN, shell, shell);
    w.exec(OWN, "reaper");
    let below = w.spawn(OWN, "helper");
    let beside = w.spawn(shell, "npm");
    w.dies_by_signal(agent);
    let keys = [OWN, shell, below, beside];
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
fn an_ancestor_of_this_program_that_is_known_from_its_fork_only_is_not_reaped_either() {
    for program in ["bash", "tmux"] {
        let mut w = World::new();
        let agent = w.spawn(INIT, "claude");
        let shell = w.spawn(agent, "bash");
        // Found in /proc with an adopter, before the fork was read.
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
        w.dies_by_signal(agent);
        assert_eq!(w.why(shell), "keep never_self");
    }
}

#[test]
fn pid_1_is_not_reaped_though_it_should_be_an_agent() {
    let mut w = World::new();
    w.exec(INIT, "claude");
    assert_eq!(w.why(INIT), "keep never_pid1");
    let inner = w.spawn(INIT, "codex");
    assert_eq!(w.why(inner), "keep root_alive");
}

#[test]
fn a_kernel_thread_is_not_reaped_though_its_parent_should_be_a_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let thread = ProcessKey {
        pid: 50,
        start: 9 * TICK_NS,
    };
    w.row_with(thread, agent.pid, "kworker", |row| row.kernel_thread = true);
    w.dies_by_signal(agent);
    assert_eq!(w.why(thread), "keep never_kernel_thread");
}

#[test]
fn another_uid_is_kept_and_so_is_what_is_below_it() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    w.uids = ROOT_USER;
    let sudo = w.spawn(agent, "sudo");
    let daemon = w.spawn(sudo, "dockerd");
    w.uids = USER;
    let user = w.spawn(daemon, "npm");
    w.dies_by_signal(agent);
    let keys = [sudo, daemon, user];
    assert_eq!(
        keys.map(|key| w.why(key)),
        [
            "keep other_uid other-uid",
            "keep other_uid other-uid",
            "keep ancestor_kept other-uid"
        ]
    );
    assert!(w.decide(user).due.is_some(), "it is due all the same");
}

#[test]
fn a_real_or_an_effective_uid_of_its_own_is_another_uid() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.dies_by_signal(agent);
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
fn what_a_kept_process_runs_is_kept_until_that_is_gone() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let apt = w.spawn(agent, "apt");
    let script = w.spawn(apt, "sh");
    let deep = w.spawn(script, "ldconfig");
    w.dies_by_signal(agent);
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
fn a_keep_holds_for_what_a_process_runs_now() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "apt");
    w.dies_by_signal(agent);
    w.exec(tool, "node");
    assert_eq!(w.why(tool), "reap root_exited");
    w.exec(tool, "apt");
    assert_eq!(w.why(tool), "keep keep_rule apt");
}

#[test]
fn what_is_born_after_the_end_is_told_apart() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let trap = w.spawn(agent, "sh");
    w.dies_by_signal(agent);
    let cleanup = w.spawn(trap, "rm");
    assert_eq!(
        [trap, cleanup].map(|key| w.why(key)),
        ["reap root_exited", "reap forked_after_root_exit"]
    );
}

#[test]
fn what_exited_and_what_never_was_is_no_member() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.dies_by_signal(agent);
    w.dies_by_signal(tool);
    let never = ProcessKey { pid: 9, start: 9 };
    assert_eq!(
        [tool, never].map(|key| w.why(key)),
        ["keep not_a_member"; 2]
    );
}

#[test]
fn outside_the_scope_there_are_no_agents() {
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
    agents.into_iter().for_each(|agent| w.dies_by_signal(agent));
    assert_eq!(
        tools.map(|key| w.why(key)),
        ["reap root_exited", "keep not_a_member"]
    );
}

#[test]
fn a_cgroup_in_scope_brings_in_what_runs_there_and_descends_from_that() {
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
    [agent, other]
        .into_iter()
        .for_each(|agent| w.dies_by_signal(agent));
    assert_eq!(
        tools.map(|key| w.why(key)),
        ["reap root_exited", "keep not_a_member"]
    );
}

#[test]
fn scope_is_widened_by_a_cgroup_that_is_added() {
    let mut w = World::scoped(Scope {
        cgroups: vec![77],
        ..Scope::default()
    });
    let runs = |w: &mut World| {
        let agent = w.fork(INIT);
        let mut image = Image::clone(&image("claude", 0));
        image.cgroup_id = 78;
        w.runs(agent, image);
        w.is_member(agent)
    };
    assert!(!runs(&mut w));
    w.model.add_cgroup(78);
    assert!(runs(&mut w));
}

#[test]
fn of_a_users_own_service_nobody_elses_are_agents() {
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
    // Nor what somebody else becomes below one.
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
fn a_root_of_which_only_the_vanishing_is_known_is_gone() {
    let mut w = World::new();
    let agent = w.spawn(INIT, "claude");
    let tool = w.spawn(agent, "npm");
    w.end(agent, ExitStatus::Unknown, None);
    assert_eq!(w.why(tool), "reap root_exited");
}
