//! Properties of decisions by rules, with random facts in random order.

use std::sync::Arc;

use proptest::prelude::*;

use super::rules::{MINUTE, advance, read, world};
use super::world::{INIT, World};
use crate::event::{ExitStatus, Image, ProcessKey};
use crate::facts::{Fact, FactSet, Facts, KernelSession};
use crate::policy::Verdict;
use crate::user_keep::UserKeep;

/// A change about one member, or the exit of the root. The steps are independent of each other.
#[derive(Clone, Debug)]
enum Step {
    Facts(usize, FactSet, Box<Facts>),
    Keep(usize),
    Uid(usize, u32),
    RootExit(ExitStatus),
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
    let markers = fact(0u64..8);
    let session = fact((0u32..3, 0u32..2).prop_map(|(sid, tty)| KernelSession { sid, tty }));
    let (listening, stdin) = (fact(any::<bool>()), fact(any::<bool>()));
    (markers, unit, listening, fact(0u32..200), session, stdin).prop_map(
        |(markers, unit, listening, cpu, session, stdin)| Facts {
            markers,
            unit,
            listening,
            cpu,
            kernel_session: session,
            stdin_is_terminal: stdin,
            inherited: Fact::Unread,
            conversations: Fact::Unread,
            activity: Fact::Unread,
            stdio: Fact::Unread,
            arguments: Fact::Unread,
            script: Fact::Unread,
            local_sockets: Fact::Unread,
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

fn exit_statuses() -> impl Strategy<Value = ExitStatus> {
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

/// Generates facts for each member, some keeps and uids, and possibly the root's exit.
fn steps() -> impl Strategy<Value = Vec<Step>> {
    let of_one = (facts(), any::<bool>(), prop::option::of(0u32..2));
    (
        prop::collection::vec(of_one, 4),
        prop::option::of(exit_statuses()),
    )
        .prop_map(|(members, exit)| {
            let mut steps: Vec<Step> = exit.into_iter().map(Step::RootExit).collect();
            for (nth, (facts, keep, uid)) in members.into_iter().enumerate() {
                steps.extend(ALL.map(|needs| Step::Facts(nth, needs, facts.clone().into())));
                steps.extend((keep && nth == 0).then_some(Step::Keep(nth)));
                steps.extend(uid.map(|uid| Step::Uid(nth, 1000 + uid)));
            }
            steps
        })
}

/// Rules with many conditions, one of which reaps members of any session.
const MANY: &str = "[[rule]]\nname = 'greedy'\naction = 'reap'\nsession = 'any'\nargv = ['tool*', 'bash*', 'server*', 'claude*', 'init*']\nenvironment = ['A=1']\n\
    [[keep]]\nname = 'other'\nuid = 'other'\n\
    [[rule]]\nname = 'own'\naction = 'keep'\nown_unit = true\n\
    [[rule]]\nname = 'ask'\naction = 'reap'\nafter = '1min'\nsession = 'ok'\nlistening = true\n\
    [[rule]]\nname = 'busy'\naction = 'reap'\nsession = 'alive'\norphan = true\nmin_cpu = 90\n\
    [[rule]]\nname = 'look'\naction = 'report'\nnew_session = true\n";

/// Applies the steps to a tree. Returns the members, the other processes, and an inferred member.
///
/// The other processes are below a boundary, or are siblings or ancestors of the agent.
fn apply(steps: &[Step], time: u64) -> (World, Vec<ProcessKey>, Vec<ProcessKey>, ProcessKey) {
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
    let escaped = w.row_with(escaped, 1, "server", |entry| {
        entry.image = Arc::new(Image {
            pgid: tool.pid,
            ..Image::clone(&entry.image)
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
    for step in steps {
        match step {
            Step::Facts(nth, needs, facts) => {
                let at = w.now;
                w.model
                    .set_facts(members[*nth], *needs, Facts::clone(facts), at);
                // The same facts about processes that no rule applies to.
                for other in [others[*nth + 1], escaped] {
                    w.model.set_facts(other, *needs, Facts::clone(facts), at);
                }
            }
            Step::Keep(nth) => {
                let keep = UserKeep {
                    until_monotonic_ns: None,
                    with_descendants: false,
                    by_uid: 0,
                    made_at: 1,
                };
                assert_eq!(w.model.keep(members[*nth], keep), 1);
            }
            Step::Uid(nth, uid) => {
                let uids = crate::event::Uids {
                    real: *uid,
                    effective: *uid,
                };
                w.model.set_uids(members[*nth], uids);
            }
            Step::RootExit(status) => w.exit_with(agent, *status, Some(INIT)),
        }
    }
    advance(&mut w, time);
    (w, members, others, escaped)
}

proptest! {
    #[test]
    fn only_members_are_reaped(steps in steps(), time in 0..2 * MINUTE) {
        let (w, _, others, _) = apply(&steps, time);
        for key in others {
            prop_assert_eq!(w.decide(key).verdict, Verdict::Keep, "{}", w.why(key));
            prop_assert_eq!(w.decide(key).needs, FactSet::NONE);
        }
    }

    #[test]
    fn inferred_member_is_not_reaped(steps in steps(), time in 0..2 * MINUTE) {
        let (w, _, _, escaped) = apply(&steps, time);
        prop_assert_ne!(w.decide(escaped).verdict, Verdict::Reap, "{}", w.why(escaped));
        prop_assert!(!w.model.is_kernel_killable(w.model.tree.get(escaped).unwrap()));
    }

    #[test]
    fn order_of_facts_does_not_change_decisions(
        (first, second) in steps().prop_flat_map(|steps| (Just(steps.clone()), Just(steps).prop_shuffle())),
        later in any::<bool>(),
    ) {
        let time = if later { 2 * MINUTE } else { 0 };
        let (one, members, ..) = apply(&first, time);
        let (other, ..) = apply(&second, time);
        for key in members {
            let decision = |w: &World| (w.why(key), w.decide(key).needs);
            prop_assert_eq!(decision(&one), decision(&other));
        }
    }

    #[test]
    fn kernel_killable_member_is_reaped_when_its_root_is_killed(steps in steps()) {
        let steps: Vec<Step> = steps.into_iter().filter(|step| !matches!(step, Step::RootExit(_))).collect();
        let (mut w, members, ..) = apply(&steps, 0);
        let killable: Vec<ProcessKey> = members
            .into_iter()
            .filter(|key| w.model.is_kernel_killable(w.model.tree.get(*key).unwrap()))
            .collect();
        let agent = w.model.sessions.iter().next().unwrap().root;
        w.kill(agent);
        for key in killable {
            prop_assert_eq!(w.decide(key).verdict, Verdict::Reap, "{}", w.why(key));
        }
    }
}
