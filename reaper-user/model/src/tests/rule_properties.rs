//! What holds of rules, whatever they ask for and in whatever order it is told.

use std::sync::Arc;

use proptest::prelude::*;

use super::rules::{MINUTE, pass, read, world};
use super::world::{INIT, World};
use crate::event::{ExitStatus, Image, ProcessKey};
use crate::facts::{Fact, FactSet, Facts, KernelSession};
use crate::policy::Verdict;
use crate::user_keep::UserKeep;

/// Something that is told of one of a few members, and has nothing to do with what is told of the others.
#[derive(Clone, Debug)]
enum Told {
    Facts(usize, FactSet, Facts),
    Keep(usize),
    Uid(usize, u32),
    Gone(ExitStatus),
}

fn fact<T: Clone + std::fmt::Debug + 'static>(
    values: impl Strategy<Value = T>,
) -> impl Strategy<Value = Fact<T>> {
    prop_oneof![
        1 => Just(Fact::Unread),
        1 => Just(Fact::Unreadable),
        4 => values.prop_map(Fact::Known),
    ]
}

fn facts() -> impl Strategy<Value = Facts> {
    let unit = prop_oneof![Just(""), Just("session-1.scope"), Just("web.service")];
    let unit = fact(unit.prop_map(std::sync::Arc::from));
    let marks = fact(0u64..8);
    let session = fact((0u32..3, 0u32..2).prop_map(|(sid, tty)| KernelSession { sid, tty }));
    let (listening, input) = (fact(any::<bool>()), fact(any::<bool>()));
    (marks, unit, listening, fact(0u32..200), session, input).prop_map(
        |(marks, unit, listening, cpu, session, input)| Facts {
            markers: marks,
            unit,
            listening,
            cpu,
            kernel_session: session,
            stdin_is_terminal: input,
            inherited: Fact::Unread,
            conversations: Fact::Unread,
            activity: Fact::Unread,
            stdio: Fact::Unread,
            arguments: Fact::Unread,
            script: Fact::Unread,
        },
    )
}

const ALL: [FactSet; 6] = [
    FactSet::STDIN,
    FactSet::MARKERS,
    FactSet::UNIT,
    FactSet::LISTENING,
    FactSet::CPU,
    FactSet::KERNEL_SESSION,
];

fn ends() -> impl Strategy<Value = ExitStatus> {
    prop_oneof![
        Just(ExitStatus::Exited(0)),
        Just(ExitStatus::Exited(1)),
        Just(ExitStatus::Signalled {
            signal: 9,
            core: false
        }),
        Just(ExitStatus::Unknown),
    ]
}

/// For each member what is read of it, bit by bit, and perhaps more; the agent ends somewhere in between.
fn story() -> impl Strategy<Value = Vec<Told>> {
    let of_one = (facts(), any::<bool>(), prop::option::of(0u32..2));
    (prop::collection::vec(of_one, 4), prop::option::of(ends())).prop_map(|(members, end)| {
        let mut told: Vec<Told> = end.into_iter().map(Told::Gone).collect();
        for (nth, (facts, keep, uid)) in members.into_iter().enumerate() {
            told.extend(ALL.map(|needs| Told::Facts(nth, needs, facts.clone())));
            told.extend((keep && nth == 0).then_some(Told::Keep(nth)));
            told.extend(uid.map(|uid| Told::Uid(nth, 1000 + uid)));
        }
        told
    })
}

/// Greedy ones among them.
const MANY: &str = "[[rule]]\nname = 'greedy'\naction = 'reap'\nsession = 'any'\nargv = ['tool*', 'bash*', 'server*', 'claude*', 'init*']\nenvironment = ['A=1']\n\
    [[keep]]\nname = 'other'\nuid = 'other'\n\
    [[rule]]\nname = 'own'\naction = 'keep'\nown_unit = true\n\
    [[rule]]\nname = 'ask'\naction = 'reap'\nafter = '1min'\nsession = 'ok'\nlistening = true\n\
    [[rule]]\nname = 'busy'\naction = 'reap'\nsession = 'alive'\norphan = true\nmin_cpu = 90\n\
    [[rule]]\nname = 'look'\naction = 'report'\nnew_session = true\n";

/// Members of an agent, others, and one of whom only evidence says that it is a member. The others live below a boundary, beside the agent, or above it.
fn told(story: &[Told], time: u64) -> (World, Vec<ProcessKey>, Vec<ProcessKey>, ProcessKey) {
    let rules = read(&format!(
        "{MANY}[[boundary]]\nname = 'tmux'\ncomm = 'tmux'\n"
    ));
    let mut w = world(rules);
    let shell = w.spawn(INIT, "bash");
    let beside = w.spawn(shell, "server");
    let agent = w.spawn(shell, "claude");
    let tool = w.spawn(agent, "bash");
    let below = w.spawn(tool, "tool x");
    let detached = w.spawn(tool, "server");
    let tmux = w.spawn(tool, "tmux");
    let pane = w.spawn(tmux, "bash");
    let last = w.spawn(below, "tool y");
    w.exit(
        w.model
            .tree
            .get(detached)
            .and_then(|node| node.parent)
            .unwrap(),
    );
    let member = w.spawn(agent, "bash");
    w.model.set_infers_membership(true);
    let escaped = w.new_key();
    let escaped = w.row_with(escaped, 1, "server", |seen| {
        seen.image = Arc::new(Image {
            pgid: tool.pid,
            ..Image::clone(&seen.image)
        });
    });
    assert!(
        w.model
            .tree
            .get(escaped)
            .unwrap()
            .state
            .member
            .inferred
            .is_some()
    );
    let members = vec![below, detached, last, member];
    let others = vec![INIT, shell, beside, tmux, pane];
    for told in story {
        match told {
            Told::Facts(nth, needs, facts) => {
                let at = w.now;
                w.model.set_facts(members[*nth], *needs, facts.clone(), at);
                // Also of those that no rule is about.
                for other in [others[*nth + 1], escaped] {
                    w.model.set_facts(other, *needs, facts.clone(), at);
                }
            }
            Told::Keep(nth) => {
                let keep = UserKeep {
                    until_monotonic_ns: None,
                    with_descendants: false,
                    by_uid: 0,
                    made_at: 1,
                };
                assert_eq!(w.model.keep(members[*nth], keep), 1);
            }
            Told::Uid(nth, uid) => {
                let uids = crate::event::Uids {
                    real: *uid,
                    effective: *uid,
                };
                w.model.set_uids(members[*nth], uids);
            }
            Told::Gone(ended) => w.end(agent, *ended, Some(INIT)),
        }
    }
    pass(&mut w, time);
    (w, members, others, escaped)
}

proptest! {
    #[test]
    fn nobody_but_a_member_is_ever_reaped(story in story(), time in 0..2 * MINUTE) {
        let (w, _, others, _) = told(&story, time);
        for key in others {
            prop_assert_eq!(w.decide(key).verdict, Verdict::Keep, "{}", w.why(key));
            prop_assert_eq!(w.decide(key).needs, FactSet::NONE);
        }
    }

    #[test]
    fn on_evidence_alone_nobody_is_reaped(story in story(), time in 0..2 * MINUTE) {
        let (w, _, _, escaped) = told(&story, time);
        prop_assert_ne!(w.decide(escaped).verdict, Verdict::Reap, "{}", w.why(escaped));
        prop_assert!(!w.model.is_kernel_killable(w.model.tree.get(escaped).unwrap()));
    }

    #[test]
    fn what_is_told_in_another_order_is_decided_alike(
        (first, second) in story().prop_flat_map(|story| (Just(story.clone()), Just(story).prop_shuffle())),
        later in any::<bool>(),
    ) {
        let time = if later { 2 * MINUTE } else { 0 };
        let (one, members, ..) = told(&first, time);
        let (other, ..) = told(&second, time);
        for key in members {
            let said = |w: &World| (w.why(key), w.decide(key).needs);
            prop_assert_eq!(said(&one), said(&other));
        }
    }

    #[test]
    fn what_is_clear_is_reaped_at_once_when_a_signal_ends_its_agent(story in story()) {
        let story: Vec<Told> = story.into_iter().filter(|told| !matches!(told, Told::Gone(_))).collect();
        let (mut w, members, ..) = told(&story, 0);
        let clear: Vec<ProcessKey> = members
            .into_iter()
            .filter(|key| w.model.is_kernel_killable(w.model.tree.get(*key).unwrap()))
            .collect();
        let agent = w.model.sessions.iter().next().unwrap().root;
        w.dies_by_signal(agent);
        for key in clear {
            prop_assert_eq!(w.decide(key).verdict, Verdict::Reap, "{}", w.why(key));
        }
    }
}
