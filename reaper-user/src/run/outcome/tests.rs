use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn said(facts: RunState) -> Option<&'static str> {
    outcome(&facts).map(RunOutcome::as_str)
}

#[test]
fn each_outcome() {
    let lives = RunState {
        age: LONG,
        silent: LONG,
        ..RunState::default()
    };
    let ended = |end| RunState {
        end: Some(end),
        ..lives
    };
    let with = |done, facts| RunState {
        done: Some(done),
        ..facts
    };
    let stopped = |facts| RunState {
        stop: Some(15),
        ..facts
    };
    let late = RunState {
        budget: Some(LONG),
        ..lives
    };
    let silent = RunState {
        idle: Some(LONG),
        ..lives
    };
    for (facts, expected) in [
        (lives, None),
        (with(false, lives), None),
        (with(true, lives), Some("success")),
        (ended(CommandExit::Exited(0)), Some("success")),
        (ended(CommandExit::Exited(3)), Some("failed")),
        (ended(CommandExit::Killed(9)), Some("death")),
        (with(false, ended(CommandExit::Exited(0))), Some("death")),
        (with(false, ended(CommandExit::Exited(3))), Some("failed")),
        (with(true, ended(CommandExit::Exited(3))), Some("success")),
        (with(true, ended(CommandExit::Killed(9))), Some("success")),
        (late, Some("timeout")),
        (with(true, late), Some("success")),
        (with(false, late), Some("timeout")),
        (silent, Some("idle")),
        (
            RunState {
                budget: Some(LONG),
                ..silent
            },
            Some("timeout"),
        ),
        (
            RunState {
                silent: LONG - Duration::from_nanos(1),
                ..silent
            },
            None,
        ),
        (stopped(lives), Some("cancelled")),
        (stopped(ended(CommandExit::Killed(15))), Some("cancelled")),
        (stopped(late), Some("cancelled")),
        (stopped(with(true, lives)), Some("success")),
    ] {
        assert_eq!(said(facts), expected, "{facts:?}");
    }
}

#[test]
fn statuses_are_those_of_a_shell() {
    assert_eq!(CommandExit::Exited(255).status(), 255);
    assert_eq!(CommandExit::Killed(15).status(), 143);
    assert_eq!(CommandExit::Killed(64).status(), 192);
}

fn facts() -> impl Strategy<Value = RunState> {
    let time = || (0..5_u64).prop_map(Duration::from_secs);
    let end = prop_oneof![
        (0..=3_u8).prop_map(CommandExit::Exited),
        (1..=64).prop_map(CommandExit::Killed)
    ];
    (
        any::<Option<bool>>(),
        proptest::option::of(end),
        proptest::option::of(1..=64),
        time(),
        proptest::option::of(time()),
        time(),
        proptest::option::of(time()),
    )
        .prop_map(|(done, end, stop, age, budget, silent, idle)| RunState {
            done,
            end,
            stop,
            age,
            budget,
            silent,
            idle,
        })
}

proptest! {
    /// Who has ended stays so, whatever the clock says; and who is in progress can only get older.
    #[test]
    fn time_changes_nothing_for_who_has_ended(one in facts(), later in 0..9_u64) {
        let more = Duration::from_secs(later);
        let other = RunState { age: one.age + more, silent: one.silent + more, ..one };
        if one.end.is_some() || one.stop.is_some() {
            prop_assert_eq!(outcome(&one), outcome(&other));
            prop_assert!(outcome(&one).is_some());
        } else if outcome(&other).is_none() {
            prop_assert_eq!(outcome(&one), None);
        }
    }

    /// Nobody who was stopped has failed.
    #[test]
    fn a_stop_is_neutral(one in facts()) {
        let stopped = RunState { stop: Some(15), ..one };
        prop_assert!(!outcome(&stopped).unwrap().is_failure());
    }
}
