//! Tests of several processes that get the same pid in the same clock tick.

use super::*;

#[test]
fn processes_with_the_same_pid_and_tick_differ_by_inode() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.set_inode(10, 77);
    w.fork(START + 1, 1, 10);
    let first = w.translator.key(10).unwrap();
    assert!(w.translator.is_alive(first));
    // The inode cannot be read, because no file can be opened.
    w.set_inode(10, 0);
    assert!(!w.translator.is_alive(first));
    w.reconcile();
    assert_eq!(w.translator.key(10), Some(first), "that is no exit either");
    // Another process has its pid, which has not been reported yet.
    w.set_inode(10, 78);
    assert!(!w.translator.is_alive(first));
    // Its exit is reported late, and is recognised nevertheless.
    assert_eq!(w.exit(START + 2, 10, 10, 5 << 8), "exit 10+1 5");
    w.fork(START + 3, 1, 10);
    let second = w.translator.key(10).unwrap();
    assert!(w.translator.is_alive(second));
    w.set_inode(10, 79);
    w.reconcile();
    assert_ne!(w.translator.key(10), Some(second));
    // The inode of a later process with the pid is not taken for that of an earlier one.
    w.process(11, 1, 510);
    w.set_inode(11, 80);
    w.reconcile();
    let mut events = Vec::new();
    let fork = ConnectorEvent::Fork {
        parent: 1,
        child: 11,
    };
    let mut out = Output {
        may_have_execed: &mut |_| false,
        sink: &mut |event| events.push(event.kind),
    };
    w.translator.translate(START + 4, fork, &mut out);
    assert!(matches!(
        events[..],
        [EventKind::Fork { pidfd_inode: 0, .. }]
    ));
}
