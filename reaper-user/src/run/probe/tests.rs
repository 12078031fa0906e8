use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::*;
use reaper_host::sys::child::BlockedSignals;

/// One that hangs: when its time is over it is killed, and what it has started too, and the next is asked.
#[test]
fn one_that_does_not_answer_is_given_up() {
    let held = BlockedSignals::begin().unwrap();
    let what = DoneWhen {
        command: "sleep 600; :".to_owned(),
        every: Duration::ZERO,
    };
    let mut probe = DoneProbe::new(&what, held.inherited);
    probe.go_on(false);
    let mut asked = probe.asked.expect("it is being asked");
    let left = Duration::from_nanos(probe.deadline().unwrap() - sys::monotonic());
    assert!(left > PATIENCE / 2 && left <= PATIENCE, "{left:?}");
    probe.go_on(false);
    assert_eq!(probe.asked.unwrap().pid, asked.pid);
    let first = Pid::from_raw(asked.pid.cast_signed());
    // Its time is over.
    asked.until = sys::monotonic();
    probe.asked = Some(asked);
    probe.go_on(true);
    assert!(!probe.is_done() && !probe.is_final());
    // However it ends of that: what it has started may be killed before it.
    waitpid(first, None).unwrap();
    let next = probe.asked.expect("the next is asked");
    assert!(next.at_the_end && next.pid != asked.pid);
    probe.give_up();
    waitpid(Pid::from_raw(next.pid.cast_signed()), None).unwrap();
    assert!(probe.is_final());
}
