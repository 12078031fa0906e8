use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::*;
use reaper_host::sys::child::BlockedSignals;

/// The check and its children are killed when its time limit expires, and the next one starts.
#[test]
fn hanging_check_is_killed() {
    let signals = BlockedSignals::begin().unwrap();
    let done_when = DoneWhen {
        command: "sleep 600; :".to_owned(),
        every: Duration::ZERO,
    };
    let mut check = DoneCheck::new(&done_when, signals.inherited);
    check.poll(false);
    let mut running = check.running.expect("no check is running");
    let left = Duration::from_nanos(check.deadline().unwrap() - sys::monotonic());
    assert!(left > CHECK_MAX / 2 && left <= CHECK_MAX, "{left:?}");
    check.poll(false);
    assert_eq!(check.running.unwrap().pid, running.pid);
    let first = Pid::from_raw(running.pid.cast_signed());
    running.deadline_ns = sys::monotonic();
    check.running = Some(running);
    check.poll(true);
    assert!(!check.is_done() && !check.is_final());
    // Not checked for SIGKILL: the shell exits by itself if its child is killed first.
    waitpid(first, None).unwrap();
    let next = check.running.expect("no second check is running");
    assert!(next.after_exit && next.pid != running.pid);
    check.cancel();
    waitpid(Pid::from_raw(next.pid.cast_signed()), None).unwrap();
    assert!(check.is_final());
}
