//! Measures the CPU time per event that the model takes for a backlog in which many sessions are open at once.
//!
//! Prints one line for each size: number of sessions, number of events, nanoseconds. Run it with
//! `cargo xtask bench --only replay`.

use std::fs;
use std::sync::Arc;

use reaper_model::event::{Event, EventKind, ExitStatus, Image, ProcessKey, Provenance, Uids};
use reaper_model::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, Ruleset};
use reaper_model::{Model, Scope};

const INIT: ProcessKey = ProcessKey { pid: 1, start: 0 };
const USER: Uids = Uids {
    real: 1000,
    effective: 1000,
};

/// Numbers of sessions to measure.
const SESSIONS: [u32; 3] = [3_000, 12_000, 48_000];

/// Returns the rule of one agent.
fn rules() -> Ruleset {
    let condition = Condition {
        field: Field::Comm,
        any_of: vec![Pattern::comm("claude").unwrap()],
        negative: false,
    };
    let matchers = vec![Matcher::new(vec![condition])];
    Ruleset::new(vec![Rule::new("claude", Action::Agent, matchers)])
}

fn image(program: &str) -> Arc<Image> {
    Arc::new(Image {
        comm: program.into(),
        exe: format!("/bin/{program}").into(),
        argv: format!("{program}\0").into(),
        tty: 1,
        ..Image::default()
    })
}

/// Returns a backlog: each session opens and gets a member, then each root exits, then each member does.
fn backlog(sessions: u32) -> Vec<Event> {
    let mut kinds = Vec::new();
    let key = |pid: u32| ProcessKey {
        pid,
        start: 1_000_000_001 + u64::from(pid) * 1_000,
    };
    let roots = || (0..sessions).map(|n| key(100 + 2 * n));
    let member_of = |root: ProcessKey| key(root.pid + 1);
    let fork = |child, parent| EventKind::Fork {
        child,
        parent: Some(parent),
        creator: Some(parent),
        uids: USER,
        pidfd_inode: 0,
        namespace_init: false,
        membership: None,
    };
    let exec = |key, parent, program| EventKind::Exec {
        key,
        parent: Some(parent),
        uids: USER,
        pidfd_inode: 0,
        image: image(program),
        membership: None,
    };
    let exit = |key| EventKind::Exit {
        key,
        parent: None,
        exit_status: ExitStatus::Exited(0),
        peak_rss: 0,
        membership: None,
    };
    for root in roots() {
        let member = member_of(root);
        kinds.extend([
            fork(root, INIT),
            exec(root, INIT, "claude"),
            fork(member, root),
            exec(member, root, "sleep"),
        ]);
    }
    for root in roots() {
        kinds.push(EventKind::Reparent {
            child: member_of(root),
            old_parent: Some(root),
            adopter: Some(INIT),
            membership: None,
        });
        kinds.push(exit(root));
    }
    kinds.extend(roots().map(member_of).map(exit));
    let event = |(n, kind)| Event {
        time: 2_000_000_000 + n as u64 * 1_000,
        provenance: Provenance::Kernel,
        kind,
    };
    kinds.into_iter().enumerate().map(event).collect()
}

/// Applies a backlog to a new model.
fn replay(events: &[Event]) {
    let mut model = Model::new(rules(), Scope::default(), 4_000_000);
    let mut out = Vec::new();
    model.begin_restore();
    for event in events {
        model.apply(event, &mut out);
        out.clear();
    }
    model.finish_restore(&mut out);
    assert_eq!(model.sessions.iter().count(), 0);
}

/// Returns the CPU time of this thread in nanoseconds, which excludes other work of the machine.
fn cpu_ns() -> u64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

fn main() {
    for sessions in SESSIONS {
        let events = backlog(sessions);
        let begun = cpu_ns();
        replay(&events);
        let took = cpu_ns() - begun;
        println!("{sessions} {} {took}", events.len());
    }
}
