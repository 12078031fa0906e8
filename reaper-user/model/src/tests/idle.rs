//! Rules about living roots: unused servers, and agents whose client has exited.

use std::sync::Arc;

use super::rules::{advance, ruled, set_facts, world};
use super::world::{INIT, World};
use crate::activity::Activity;
use crate::event::ProcessKey;
use crate::facts::{Fact, FactSet, Facts, KernelSession, Stdio};
use crate::idle::IdleSince;

const MINUTE: u64 = 60_000_000_000;
const RULES: &str = "[[server]]\nname = 'server'\ncomm = 'server'\n\
     [[rule]]\nname = 'unused'\naction = 'reap'\nsession = 'alive'\nserver = true\nidle = '30min'\n\
     [[rule]]\nname = 'hung-up'\naction = 'reap'\nsession = 'alive'\norphan = true\nhung_up = true\nidle = '1min'\n\
     options = '--acp'\ncomm = 'claude'\n";

/// Returns a server with a tool; both have run for an hour.
fn start() -> (World, ProcessKey, ProcessKey) {
    let mut w = world(ruled(RULES));
    let server = w.spawn(INIT, "server");
    let tool = w.spawn(server, "npm");
    advance(&mut w, 60 * MINUTE);
    set_stdio(&mut w, server, Stdio::Other);
    (w, server, tool)
}

fn set_stdio(w: &mut World, key: ProcessKey, stdio: Stdio) {
    let found = Facts {
        stdio: Fact::Known(stdio),
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::STDIO, found);
}

fn set_activity(w: &mut World, key: ProcessKey, activity: Activity) {
    let found = Facts {
        activity: Fact::Known(Arc::new(activity)),
        ..Facts::NOTHING
    };
    set_facts(w, key, FactSet::ACTIVITY, found);
}

/// Delivers the activity of a whole tree without work and clients.
pub(super) fn set_tree_idle(w: &mut World, keys: &[ProcessKey]) {
    w.model.forget_activity_within(keys[0]);
    keys.iter()
        .for_each(|key| set_activity(w, *key, Activity::default()));
    w.model.on_tree_read(keys[0]);
}

#[test]
fn idle_server_is_reaped_and_then_its_members() {
    let (mut w, server, tool) = start();
    assert_eq!(w.decide(server).needs, FactSet::ACTIVITY);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    assert_eq!(w.decide(server).until, Some(w.now + 5 * MINUTE));
    advance(&mut w, 29 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    assert_eq!(w.decide(server).until, Some(w.now + MINUTE));
    advance(&mut w, MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
    assert_eq!(w.why(tool), "keep root_alive");
    // The root exits after a signal, so status 0 does not mean that it exited normally.
    w.model
        .on_signal_sent(server, reaper_common::MEMBER_SIGTERM_SENT);
    w.exit(server);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn idle_rule_reaps_only_with_a_recent_reading() {
    let (mut w, server, tool) = start();
    set_tree_idle(&mut w, &[server, tool]);
    advance(&mut w, 30 * MINUTE);
    assert_eq!(w.decide(server).needs, FactSet::ACTIVITY);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn use_restarts_the_idle_time() {
    let client = |inode: u64| Activity {
        clients: [inode].into(),
        ..Activity::default()
    };
    let worked = Activity {
        cpu_ns: 40 * MINUTE,
        ..Activity::default()
    };
    for (of_tool, what) in [(false, "server"), (true, "tool")] {
        for activity in [client(7), worked.clone()] {
            let (mut w, server, tool) = start();
            set_tree_idle(&mut w, &[server, tool]);
            advance(&mut w, 20 * MINUTE);
            let (used, idle) = if of_tool {
                (tool, server)
            } else {
                (server, tool)
            };
            w.model.forget_activity_within(server);
            set_activity(&mut w, used, activity);
            set_activity(&mut w, idle, Activity::default());
            assert_eq!(w.why(server), "keep root_alive", "{what}");
            advance(&mut w, 10 * MINUTE);
            w.model.forget_activity_within(server);
            let spent = Activity {
                cpu_ns: 40 * MINUTE,
                ..Activity::default()
            };
            [server, tool]
                .iter()
                .for_each(|key| set_activity(&mut w, *key, spent.clone()));
            assert_eq!(w.why(server), "keep root_alive", "{what}");
        }
    }
}

#[test]
fn idle_time_starts_when_the_client_was_last_seen() {
    let (mut w, server, tool) = start();
    let used = Activity {
        clients: [7].into(),
        ..Activity::default()
    };
    for _ in 0..12 {
        w.model.forget_activity_within(server);
        set_activity(&mut w, server, used.clone());
        set_activity(&mut w, tool, Activity::default());
        w.model.on_tree_read(server);
        assert_eq!(w.why(server), "keep root_alive");
        advance(&mut w, 5 * MINUTE);
    }
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    advance(&mut w, 24 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    advance(&mut w, MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn new_child_restarts_the_idle_time() {
    let (mut w, server, tool) = start();
    set_tree_idle(&mut w, &[server, tool]);
    advance(&mut w, 20 * MINUTE);
    let short = w.spawn(tool, "git");
    assert_eq!(w.why(server), "keep root_alive");
    w.exit(short);
    advance(&mut w, 10 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    advance(&mut w, 20 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn exit_of_a_member_restarts_the_idle_time() {
    let (mut w, server, tool) = start();
    set_tree_idle(&mut w, &[server, tool]);
    advance(&mut w, 29 * MINUTE);
    w.exit(tool);
    advance(&mut w, 2 * MINUTE);
    set_tree_idle(&mut w, &[server]);
    assert_eq!(w.why(server), "keep root_alive");
}

#[test]
fn long_idle_time_is_checked_every_five_minutes() {
    let rules = RULES.replace("30min", "12h");
    let mut w = world(ruled(&rules));
    let server = w.spawn(INIT, "server");
    advance(&mut w, 60 * MINUTE);
    set_stdio(&mut w, server, Stdio::Other);
    set_tree_idle(&mut w, &[server]);
    assert_eq!(w.decide(server).until, Some(w.now + 5 * MINUTE));
}

#[test]
fn server_with_a_terminal_is_checked_again() {
    let rules = RULES.replace("idle = '30min'", "idle = '30min'\ntty = false");
    let mut w = world(ruled(&rules));
    let server = w.spawn(INIT, "server");
    advance(&mut w, 60 * MINUTE);
    let terminal = |tty| Facts {
        kernel_session: Fact::Known(KernelSession { sid: 7, tty }),
        ..Facts::NOTHING
    };
    set_facts(&mut w, server, FactSet::KERNEL_SESSION, terminal(5));
    assert_eq!(w.why(server), "keep root_alive");
    let until = w.decide(server).until.unwrap();
    assert!(until <= w.now + 30 * MINUTE, "{until}");
    set_facts(&mut w, server, FactSet::KERNEL_SESSION, terminal(0));
    assert_eq!(w.decide(server).needs, FactSet::STDIO);
}

#[test]
fn unreadable_or_connected_server_is_kept() {
    let (mut w, server, tool) = start();
    set_tree_idle(&mut w, &[server, tool]);
    advance(&mut w, 60 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
    set_stdio(&mut w, server, Stdio::Connected(9));
    assert_eq!(w.why(server), "keep root_alive");
    set_stdio(&mut w, server, Stdio::Other);
    set_facts(&mut w, tool, FactSet::ACTIVITY, Facts::unreadable());
    assert_eq!(w.why(server), "keep root_alive");
}

#[test]
fn server_with_an_agent_below_it_is_in_use() {
    let (mut w, server, tool) = start();
    // Agents elsewhere, which share ancestors.
    let shell = w.spawn(INIT, "bash");
    for agent in ["claude", "codex"] {
        w.spawn(shell, agent);
    }
    let worker = w.spawn(server, "codex");
    advance(&mut w, 60 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    advance(&mut w, 60 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    w.exit(worker);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    advance(&mut w, 30 * MINUTE);
    set_tree_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn agent_is_reaped_when_orphaned_hung_up_and_idle() {
    let mut w = world(ruled(RULES));
    let editor = w.spawn(INIT, "bash");
    let agent = w.spawn(editor, "claude --acp");
    advance(&mut w, 60 * MINUTE);
    // The parent is alive.
    assert_eq!(w.decide(agent).needs, FactSet::NONE);
    w.exit(editor);
    assert_eq!(w.decide(agent).needs, FactSet::STDIO);
    set_stdio(&mut w, agent, Stdio::Connected(9));
    assert_eq!(w.why(agent), "keep root_alive");
    // The kernel may close the files of the client a moment later.
    let soon = w.model.monotonic_now() + MINUTE / 60;
    assert!(w.decide(agent).until.is_some_and(|until| until <= soon));
    advance(&mut w, 20 * MINUTE);
    set_stdio(&mut w, agent, Stdio::HungUp);
    set_tree_idle(&mut w, &[agent]);
    assert_eq!(w.why(agent), "keep root_alive");
    advance(&mut w, MINUTE);
    set_tree_idle(&mut w, &[agent]);
    assert_eq!(w.why(agent), "reap reap_rule hung-up");
    set_stdio(&mut w, agent, Stdio::Other);
    assert_eq!(w.why(agent), "keep root_alive");
}

#[test]
fn only_root_that_matches_a_root_rule_is_evaluated() {
    let (mut w, server, tool) = start();
    let agent = w.spawn(INIT, "claude");
    let of = |key| w.model.has_rules_for_root(key);
    assert_eq!([server, tool, agent].map(of), [true, false, false]);
}

#[test]
fn unread_member_counts_as_busy() {
    let (mut w, server, tool) = start();
    set_tree_idle(&mut w, &[server, tool]);
    advance(&mut w, 20 * MINUTE);
    w.model.forget_facts(tool, FactSet::ACTIVITY);
    let session = w.model.sessions.by_root(server).unwrap();
    let now = w.model.monotonic_now();
    assert!(
        matches!(w.model.idle_since(session), IdleSince::Since { idle, .. } if idle == now),
        "the idle time starts now"
    );
}
