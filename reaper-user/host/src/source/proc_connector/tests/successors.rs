//! Owners of one pid in one clock tick.

use super::*;

#[test]
fn successors_in_the_same_tick_have_other_numbers() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.number(10, 77);
    w.fork(START + 1, 1, 10);
    let first = w.translator.key(10).unwrap();
    assert!(w.translator.lives(first));
    // There is no room for an open file to ask for it.
    w.number(10, 0);
    assert!(!w.translator.lives(first));
    w.survey();
    assert_eq!(w.translator.key(10), Some(first), "nor is that an end");
    // Another has its pid, and no word of that has come yet.
    w.number(10, 78);
    assert!(!w.translator.lives(first));
    // Its end is told late, and looks like one all the same.
    assert_eq!(w.exit(START + 2, 10, 10, 5 << 8), "exit 10+1 5");
    w.fork(START + 3, 1, 10);
    let second = w.translator.key(10).unwrap();
    assert!(w.translator.lives(second));
    w.number(10, 79);
    w.survey();
    assert_ne!(w.translator.key(10), Some(second));
    // Of one whose successor is known, nobody notes the number of that.
    w.process(11, 1, 510);
    w.number(11, 80);
    w.survey();
    let mut told = Vec::new();
    let fork = ConnectorEvent::Fork {
        parent: 1,
        child: 11,
    };
    let mut out = Output {
        has_moved_on: &mut |_| false,
        sink: &mut |event| told.push(event.kind),
    };
    w.translator.take(START + 4, fork, &mut out);
    assert!(matches!(told[..], [EventKind::Fork { pidfd_inode: 0, .. }]));
}
