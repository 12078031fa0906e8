use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn outcome_name(state: RunState) -> Option<&'static str> {
    outcome(&state).map(RunOutcome::as_str)
}

#[test]
fn outcome_of_each_state() {
    let lives = RunState {
        age: LONG,
        silent: LONG,
        ..RunState::default()
    };
    let ended = |end| RunState {
        end: Some(end),
        ..lives
    };
    let with = |done, state| RunState {
        done: Some(done),
        ..state
    };
    let stopped = |state| RunState {
        stop: Some(15),
        ..state
    };
    let late = RunState {
        budget: Some(LONG),
        ..lives
    };
    let silent = RunState {
        idle: Some(LONG),
        ..lives
    };
    for (state, expected) in [
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
        assert_eq!(outcome_name(state), expected, "{state:?}");
    }
}

#[test]
fn exit_status_is_that_of_a_shell() {
    assert_eq!(CommandExit::Exited(255).status(), 255);
    assert_eq!(CommandExit::Killed(15).status(), 143);
    assert_eq!(CommandExit::Killed(64).status(), 192);
}

fn any_state() -> impl Strategy<Value = RunState> {
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
    /// A run in progress without an outcome had none earlier either.
    #[test]
    fn time_does_not_change_the_outcome_of_an_ended_run(state in any_state(), later in 0..9_u64) {
        let more = Duration::from_secs(later);
        let older = RunState { age: state.age + more, silent: state.silent + more, ..state };
        if state.end.is_some() || state.stop.is_some() {
            prop_assert_eq!(outcome(&state), outcome(&older));
            prop_assert!(outcome(&state).is_some());
        } else if outcome(&older).is_none() {
            prop_assert_eq!(outcome(&state), None);
        }
    }

    #[test]
    fn stopped_run_is_never_a_failure(state in any_state()) {
        let stopped = RunState { stop: Some(15), ..state };
        prop_assert!(!outcome(&stopped).unwrap().is_failure());
    }
}
