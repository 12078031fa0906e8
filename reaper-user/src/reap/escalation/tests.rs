use super::*;

const S: u64 = 1_000_000_000;

/// Opens an escalation of `n` processes at 10 s, with a grace of 5 s and a kill timeout of 1 s.
fn with_claims(n: u32) -> Escalation {
    let mut escalation = Escalation::new(Times::default(), 10 * S);
    (0..n).for_each(|pid| escalation.on_claim(key(pid)));
    escalation
}

fn key(pid: u32) -> ProcessKey {
    ProcessKey { pid, start: 1 }
}

/// Checks for progress at the deadline, as the reaper does. Returns whether it gives up.
fn check(escalation: &mut Escalation, moves: bool) -> bool {
    let now = escalation.deadline();
    let stuck = !moves && escalation.on_stall();
    if !stuck {
        escalation.on_progress(now);
    }
    stuck
}

#[test]
fn grace_starts_at_opening_and_ends_in_sigkill() {
    let mut escalation = with_claims(1);
    assert!(escalation.is_before_kill());
    assert_eq!(escalation.deadline(), 15 * S);
    escalation.kill(15 * S);
    assert!(!escalation.is_before_kill());
    assert!(escalation.deadline() <= 16 * S);
}

#[test]
fn resumed_escalation_keeps_its_deadline() {
    for (now, before_kill, deadline) in [
        (0, true, 15 * S),
        (15 * S - 1, true, 15 * S),
        // The kill timeout starts again, as nothing was checked meanwhile.
        (15 * S, false, 15 * S + S / 2),
        (99 * S, false, 99 * S + S / 2),
    ] {
        let escalation = Escalation::resumed(Times::default(), 15 * S, now);
        assert_eq!(
            (escalation.is_before_kill(), escalation.deadline()),
            (before_kill, deadline),
            "{now}"
        );
        assert!(escalation.is_empty());
    }
}

#[test]
fn step_depends_on_earlier_signals_and_init() {
    const BOTH: u32 = MEMBER_SIGTERM_SENT | MEMBER_SIGKILL_SENT;
    let mut escalation = with_claims(1);
    for (had, init, before_kill) in [
        (0, false, SignalStep::Terminate(Signal::SIGTERM)),
        (MEMBER_SIGTERM_SENT, false, SignalStep::Continue),
        (MEMBER_SIGKILL_SENT, false, SignalStep::Kill),
        (BOTH, false, SignalStep::Kill),
        (0, true, SignalStep::Kill),
        (MEMBER_SIGTERM_SENT, true, SignalStep::Kill),
    ] {
        assert_eq!(
            escalation.step(had, init, false),
            before_kill,
            "{had} {init}"
        );
    }
    escalation.kill(15 * S);
    for had in [0, MEMBER_SIGTERM_SENT, MEMBER_SIGKILL_SENT, BOTH] {
        assert_eq!(
            escalation.step(had, false, false),
            SignalStep::Kill,
            "{had}"
        );
    }
    let term = SignalStep::Terminate(Signal::SIGTERM);
    assert_eq!(escalation.step(0, false, true), term);
    for _ in 0..=BIRTHS_MAX {
        escalation.on_birth(15 * S);
    }
    assert_eq!(escalation.step(0, false, true), SignalStep::Kill);
}

#[test]
fn progress_and_births_do_not_move_end_of_grace() {
    let mut escalation = with_claims(3);
    escalation.on_progress(12 * S);
    escalation.on_finished(key(0), 13 * S);
    assert!(!escalation.is_empty());
    assert!(!escalation.on_birth(14 * S));
    assert!(escalation.is_before_kill());
    assert_eq!(escalation.deadline(), 15 * S);
}

#[test]
fn more_than_256_births_end_the_grace_once() {
    let mut escalation = with_claims(1);
    assert!((0..256).all(|_| !escalation.on_birth(11 * S)));
    assert!(escalation.is_before_kill());
    assert!(escalation.on_birth(11 * S), "birth 257");
    assert!(!escalation.is_before_kill());
    assert!(!escalation.on_birth(11 * S), "reported once");
}

#[test]
fn births_after_the_grace_change_nothing() {
    let mut escalation = with_claims(1);
    escalation.kill(15 * S);
    let deadline = escalation.deadline();
    assert!((0..1000).all(|_| !escalation.on_birth(15 * S)));
    assert_eq!(escalation.deadline(), deadline);
}

#[test]
fn no_progress_gives_up_after_kill_timeout() {
    let mut escalation = with_claims(1);
    escalation.kill(15 * S);
    assert!(!check(&mut escalation, false));
    assert_eq!(escalation.deadline(), 16 * S);
    assert!(check(&mut escalation, false));
}

#[test]
fn progress_restarts_kill_timeout() {
    let mut escalation = with_claims(1);
    escalation.kill(15 * S);
    assert!(!check(&mut escalation, false));
    let moved = escalation.deadline();
    assert!(!check(&mut escalation, true));
    assert!(!check(&mut escalation, false), "half of the time is left");
    assert_eq!(escalation.deadline(), moved + S);
    assert!(check(&mut escalation, false));
}

#[test]
fn exit_is_progress() {
    let mut escalation = with_claims(2);
    escalation.kill(15 * S);
    assert!(!check(&mut escalation, false));
    escalation.on_finished(key(0), escalation.deadline());
    assert!(!escalation.is_empty());
    assert!(!check(&mut escalation, false), "half of the time is left");
    assert!(check(&mut escalation, false));
}

#[test]
fn escalation_without_claims_is_empty() {
    let mut escalation = with_claims(2);
    escalation.on_finished(key(0), 11 * S);
    assert!(!escalation.is_empty());
    escalation.on_claim(key(2));
    escalation.on_finished(key(1), 11 * S);
    assert_eq!(escalation.claims().collect::<Vec<_>>(), [key(2)]);
    assert!(!escalation.is_empty());
    escalation.on_finished(key(2), 11 * S);
    assert!(escalation.is_empty());
}

#[test]
fn maximal_times_do_not_overflow() {
    let times = Times {
        grace: Duration::MAX,
        kill_timeout: Duration::MAX,
    };
    let mut escalation = Escalation::new(times, 10 * S);
    assert!(escalation.deadline() > u64::MAX / 2);
    escalation.kill(10 * S);
    assert!(escalation.deadline() > 10 * S);
}
