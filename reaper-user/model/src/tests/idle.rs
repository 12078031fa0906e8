//! Rules about roots that live: servers that nobody uses, agents whose client is gone.

use std::sync::Arc;

use super::rules::{pass, ruled, tell, world};
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

/// A server with a tool that has run for an hour.
fn start() -> (World, ProcessKey, ProcessKey) {
    let mut w = world(ruled(RULES));
    let server = w.spawn(INIT, "server");
    let tool = w.spawn(server, "npm");
    pass(&mut w, 60 * MINUTE);
    stdio(&mut w, server, Stdio::Other);
    (w, server, tool)
}

fn stdio(w: &mut World, key: ProcessKey, stdio: Stdio) {
    let found = Facts {
        stdio: Fact::Known(stdio),
        ..Facts::NOTHING
    };
    tell(w, key, FactSet::STDIO, found);
}

fn reads(w: &mut World, key: ProcessKey, activity: Activity) {
    let found = Facts {
        activity: Fact::Known(Arc::new(activity)),
        ..Facts::NOTHING
    };
    tell(w, key, FactSet::ACTIVITY, found);
}

/// Reads all of a tree, of which nothing has worked and none has a client.
fn reads_idle(w: &mut World, keys: &[ProcessKey]) {
    w.model.forget_activity_within(keys[0]);
    keys.iter()
        .for_each(|key| reads(w, *key, Activity::default()));
    w.model.on_tree_read(keys[0]);
}

#[test]
fn unused_server_is_reaped_after_its_time_and_its_tree_with_it() {
    let (mut w, server, tool) = start();
    assert_eq!(w.decide(server).needs, FactSet::ACTIVITY);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    assert_eq!(w.decide(server).until, Some(w.now + 5 * MINUTE));
    pass(&mut w, 29 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    assert_eq!(w.decide(server).until, Some(w.now + MINUTE));
    pass(&mut w, MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
    assert_eq!(w.why(tool), "keep root_alive");
    // It was told to end: status 0 does not say that its work was done.
    w.model
        .on_signal_sent(server, reaper_common::MEMBER_SIGTERM_SENT);
    w.exit(server);
    assert_eq!(w.why(tool), "reap root_exited");
}

#[test]
fn nothing_is_reaped_by_an_old_reading() {
    let (mut w, server, tool) = start();
    reads_idle(&mut w, &[server, tool]);
    pass(&mut w, 30 * MINUTE);
    assert_eq!(w.decide(server).needs, FactSet::ACTIVITY);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn use_in_between_begins_the_time_again() {
    let client = |inode: u64| Activity {
        clients: [inode].into(),
        ..Activity::default()
    };
    let worked = Activity {
        cpu_ns: 40 * MINUTE,
        ..Activity::default()
    };
    for (of_tool, what) in [(false, "server"), (true, "tool")] {
        for use_of_it in [client(7), worked.clone()] {
            let (mut w, server, tool) = start();
            reads_idle(&mut w, &[server, tool]);
            pass(&mut w, 20 * MINUTE);
            let (used, idle) = if of_tool {
                (tool, server)
            } else {
                (server, tool)
            };
            w.model.forget_activity_within(server);
            reads(&mut w, used, use_of_it);
            reads(&mut w, idle, Activity::default());
            assert_eq!(w.why(server), "keep root_alive", "{what}");
            pass(&mut w, 10 * MINUTE);
            w.model.forget_activity_within(server);
            let spent = Activity {
                cpu_ns: 40 * MINUTE,
                ..Activity::default()
            };
            [server, tool]
                .iter()
                .for_each(|key| reads(&mut w, *key, spent.clone()));
            assert_eq!(w.why(server), "keep root_alive", "{what}");
        }
    }
}

#[test]
fn time_begins_when_the_client_was_seen_last() {
    let (mut w, server, tool) = start();
    let used = Activity {
        clients: [7].into(),
        ..Activity::default()
    };
    for _ in 0..12 {
        w.model.forget_activity_within(server);
        reads(&mut w, server, used.clone());
        reads(&mut w, tool, Activity::default());
        w.model.on_tree_read(server);
        assert_eq!(w.why(server), "keep root_alive");
        pass(&mut w, 5 * MINUTE);
    }
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    pass(&mut w, 24 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    pass(&mut w, MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn child_born_in_between_begins_the_time_again() {
    let (mut w, server, tool) = start();
    reads_idle(&mut w, &[server, tool]);
    pass(&mut w, 20 * MINUTE);
    let short = w.spawn(tool, "git");
    assert_eq!(w.why(server), "keep root_alive");
    w.exit(short);
    pass(&mut w, 10 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    pass(&mut w, 20 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn work_of_a_process_that_has_ended_begins_the_time_again() {
    let (mut w, server, tool) = start();
    reads_idle(&mut w, &[server, tool]);
    pass(&mut w, 29 * MINUTE);
    w.exit(tool);
    pass(&mut w, 2 * MINUTE);
    reads_idle(&mut w, &[server]);
    assert_eq!(w.why(server), "keep root_alive");
}

#[test]
fn long_time_is_looked_at_every_five_minutes() {
    let rules = RULES.replace("30min", "12h");
    let mut w = world(ruled(&rules));
    let server = w.spawn(INIT, "server");
    pass(&mut w, 60 * MINUTE);
    stdio(&mut w, server, Stdio::Other);
    reads_idle(&mut w, &[server]);
    assert_eq!(w.decide(server).until, Some(w.now + 5 * MINUTE));
}

#[test]
fn server_with_a_terminal_is_looked_at_again() {
    let rules = RULES.replace("idle = '30min'", "idle = '30min'\ntty = false");
    let mut w = world(ruled(&rules));
    let server = w.spawn(INIT, "server");
    pass(&mut w, 60 * MINUTE);
    let terminal = |tty| Facts {
        kernel_session: Fact::Known(KernelSession { sid: 7, tty }),
        ..Facts::NOTHING
    };
    tell(&mut w, server, FactSet::KERNEL_SESSION, terminal(5));
    assert_eq!(w.why(server), "keep root_alive");
    let until = w.decide(server).until.unwrap();
    assert!(until <= w.now + 30 * MINUTE, "{until}");
    tell(&mut w, server, FactSet::KERNEL_SESSION, terminal(0));
    assert_eq!(w.decide(server).needs, FactSet::STDIO);
}

#[test]
fn server_that_cannot_be_read_or_is_connected_lives() {
    let (mut w, server, tool) = start();
    reads_idle(&mut w, &[server, tool]);
    pass(&mut w, 60 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
    stdio(&mut w, server, Stdio::Connected);
    assert_eq!(w.why(server), "keep root_alive");
    stdio(&mut w, server, Stdio::Other);
    tell(&mut w, tool, FactSet::ACTIVITY, Facts::unreadable());
    assert_eq!(w.why(server), "keep root_alive");
}

#[test]
fn server_with_an_agent_below_it_is_in_use() {
    let (mut w, server, tool) = start();
    let worker = w.spawn(server, "codex");
    pass(&mut w, 60 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    pass(&mut w, 60 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    w.exit(worker);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "keep root_alive");
    pass(&mut w, 30 * MINUTE);
    reads_idle(&mut w, &[server, tool]);
    assert_eq!(w.why(server), "reap reap_rule unused");
}

#[test]
fn agent_is_due_once_it_was_an_orphan_and_hung_up_and_idle_for_its_time() {
    let mut w = world(ruled(RULES));
    let editor = w.spawn(INIT, "bash");
    let agent = w.spawn(editor, "claude --acp");
    pass(&mut w, 60 * MINUTE);
    // Its parent lives.
    assert_eq!(w.decide(agent).needs, FactSet::NONE);
    w.exit(editor);
    assert_eq!(w.decide(agent).needs, FactSet::STDIO);
    stdio(&mut w, agent, Stdio::Connected);
    assert_eq!(w.why(agent), "keep root_alive");
    // The files of its client may be closed a moment later.
    let soon = w.model.monotonic_now() + MINUTE / 60;
    assert!(w.decide(agent).until.is_some_and(|until| until <= soon));
    pass(&mut w, 20 * MINUTE);
    stdio(&mut w, agent, Stdio::HungUp);
    reads_idle(&mut w, &[agent]);
    assert_eq!(w.why(agent), "keep root_alive");
    pass(&mut w, MINUTE);
    reads_idle(&mut w, &[agent]);
    assert_eq!(w.why(agent), "reap reap_rule hung-up");
    stdio(&mut w, agent, Stdio::Other);
    assert_eq!(w.why(agent), "keep root_alive");
}

#[test]
fn only_a_root_that_a_rule_speaks_of_may_be_judged() {
    let (mut w, server, tool) = start();
    let agent = w.spawn(INIT, "claude");
    let of = |key| w.model.has_rules_for_root(key);
    assert_eq!([server, tool, agent].map(of), [true, false, false]);
}

#[test]
fn member_that_is_unread_counts_as_working_now() {
    let (mut w, server, tool) = start();
    reads_idle(&mut w, &[server, tool]);
    pass(&mut w, 20 * MINUTE);
    w.model.forget_facts(tool, FactSet::ACTIVITY);
    let session = w.model.sessions.by_root(server).unwrap();
    let now = w.model.monotonic_now();
    assert!(
        matches!(w.model.idle_since(session), IdleSince::Since { idle, .. } if idle == now),
        "it is no client"
    );
}
