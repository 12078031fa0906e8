use super::*;

const S: u64 = 1_000_000_000;

/// Opened at 10 s with a grace of 5 s, giving up after 1 s; `n` processes are on it.
fn ladder(n: u32) -> Escalation {
    let mut ladder = Escalation::new(Times::default(), 10 * S);
    (0..n).for_each(|pid| ladder.on_claim(key(pid)));
    ladder
}

fn key(pid: u32) -> ProcessKey {
    ProcessKey { pid, start: 1 }
}

/// A look at the ladder's deadline, as the reaper takes it; true if it gives up.
fn look(ladder: &mut Escalation, moves: bool) -> bool {
    let now = ladder.deadline();
    let stuck = !moves && ladder.on_stall();
    if !stuck {
        ladder.on_progress(now);
    }
    stuck
}

#[test]
fn the_grace_runs_from_the_opening_and_ends_in_sigkill() {
    let mut ladder = ladder(1);
    assert!(ladder.is_before_kill());
    assert_eq!(ladder.deadline(), 15 * S);
    ladder.kill(15 * S);
    assert!(!ladder.is_before_kill());
    assert!(ladder.deadline() <= 16 * S);
}

#[test]
fn one_that_is_taken_over_goes_on_where_it_was() {
    for (now, gentle, deadline) in [
        (0, true, 15 * S),
        (15 * S - 1, true, 15 * S),
        // Giving up begins anew: nobody has looked meanwhile.
        (15 * S, false, 15 * S + S / 2),
        (99 * S, false, 99 * S + S / 2),
    ] {
        let ladder = Escalation::resumed(Times::default(), 15 * S, now);
        assert_eq!(
            (ladder.is_before_kill(), ladder.deadline()),
            (gentle, deadline),
            "{now}"
        );
        assert!(ladder.is_empty());
    }
}

#[test]
fn what_a_process_is_sent() {
    const BOTH: u32 = MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT;
    let mut ladder = ladder(1);
    for (had, init, gentle) in [
        (0, false, SignalStep::Terminate(Signal::SIGTERM)),
        (MEMBER_SIGTERM_SENT, false, SignalStep::Continue),
        (MEMBER_SIGKILL_SENT, false, SignalStep::Kill),
        (BOTH, false, SignalStep::Kill),
        (0, true, SignalStep::Kill),
        (MEMBER_SIGTERM_SENT, true, SignalStep::Kill),
    ] {
        assert_eq!(ladder.step(had, init), gentle, "{had} {init}");
    }
    ladder.kill(15 * S);
    for had in [0, MEMBER_SIGTERM_SENT, MEMBER_SIGKILL_SENT, BOTH] {
        assert_eq!(ladder.step(had, false), SignalStep::Kill, "{had}");
    }
}

#[test]
fn nothing_that_happens_in_the_grace_moves_its_end() {
    let mut ladder = ladder(3);
    ladder.on_progress(12 * S);
    ladder.on_finished(key(0), 13 * S);
    assert!(!ladder.is_empty());
    assert!(!ladder.on_birth(14 * S));
    assert!(ladder.is_before_kill());
    assert_eq!(ladder.deadline(), 15 * S);
}

#[test]
fn more_than_256_births_end_the_grace_once() {
    let mut ladder = ladder(1);
    assert!((0..256).all(|_| !ladder.on_birth(11 * S)));
    assert!(ladder.is_before_kill());
    assert!(ladder.on_birth(11 * S), "the 257th");
    assert!(!ladder.is_before_kill());
    assert!(!ladder.on_birth(11 * S), "it is told once");
}

#[test]
fn births_after_the_grace_change_nothing() {
    let mut ladder = ladder(1);
    ladder.kill(15 * S);
    let deadline = ladder.deadline();
    assert!((0..1000).all(|_| !ladder.on_birth(15 * S)));
    assert_eq!(ladder.deadline(), deadline);
}

#[test]
fn without_progress_it_gives_up_when_the_time_is_over() {
    let mut ladder = ladder(1);
    ladder.kill(15 * S);
    assert!(!look(&mut ladder, false));
    assert_eq!(ladder.deadline(), 16 * S);
    assert!(look(&mut ladder, false));
}

#[test]
fn progress_gives_the_whole_time_anew() {
    let mut ladder = ladder(1);
    ladder.kill(15 * S);
    assert!(!look(&mut ladder, false));
    let moved = ladder.deadline();
    assert!(!look(&mut ladder, true));
    assert!(!look(&mut ladder, false), "only half of the time is over");
    assert_eq!(ladder.deadline(), moved + S);
    assert!(look(&mut ladder, false));
}

#[test]
fn an_end_is_progress() {
    let mut ladder = ladder(2);
    ladder.kill(15 * S);
    assert!(!look(&mut ladder, false));
    ladder.on_finished(key(0), ladder.deadline());
    assert!(!ladder.is_empty());
    assert!(!look(&mut ladder, false), "only half of the time is over");
    assert!(look(&mut ladder, false));
}

#[test]
fn the_last_one_off_closes_it() {
    let mut ladder = ladder(2);
    ladder.on_finished(key(0), 11 * S);
    assert!(!ladder.is_empty());
    ladder.on_claim(key(2));
    ladder.on_finished(key(1), 11 * S);
    assert_eq!(ladder.claims().collect::<Vec<_>>(), [key(2)]);
    assert!(!ladder.is_empty());
    ladder.on_finished(key(2), 11 * S);
    assert!(ladder.is_empty());
}

#[test]
fn times_without_end_do_not_overflow() {
    let times = Times {
        grace: Duration::MAX,
        kill_timeout: Duration::MAX,
    };
    let mut ladder = Escalation::new(times, 10 * S);
    assert!(ladder.deadline() > u64::MAX / 2);
    ladder.kill(10 * S);
    assert!(ladder.deadline() > 10 * S);
}
