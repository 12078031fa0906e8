use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::*;
use reaper_host::sys::child::BlockedSignals;

/// The probe and its children are killed when its time limit expires, and the next one starts.
#[test]
fn hanging_probe_is_killed() {
    let signals = BlockedSignals::begin().unwrap();
    let done_when = DoneWhen {
        command: "sleep 600; :".to_owned(),
        every: Duration::ZERO,
    };
    let mut probe = DoneProbe::new(&done_when, signals.inherited);
    probe.poll(false);
    let mut running = probe.running.expect("no probe is running");
    let left = Duration::from_nanos(probe.deadline().unwrap() - sys::monotonic());
    assert!(left > PROBE_MAX / 2 && left <= PROBE_MAX, "{left:?}");
    probe.poll(false);
    assert_eq!(probe.running.unwrap().pid, running.pid);
    let first = Pid::from_raw(running.pid.cast_signed());
    running.deadline_ns = sys::monotonic();
    probe.running = Some(running);
    probe.poll(true);
    assert!(!probe.is_done() && !probe.is_final());
    // Not checked for SIGKILL: the shell exits by itself if its child is killed first.
    waitpid(first, None).unwrap();
    let next = probe.running.expect("no second probe is running");
    assert!(next.after_exit && next.pid != running.pid);
    probe.cancel();
    waitpid(Pid::from_raw(next.pid.cast_signed()), None).unwrap();
    assert!(probe.is_final());
}
