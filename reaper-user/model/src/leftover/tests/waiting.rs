//! Rules with a delay before a reap.

use super::*;

fn listens(pid: u32, parent: u32, listening: Fact<bool>) -> P {
    P {
        listening,
        ..p(pid, parent, 100 + u64::from(pid), NODE, DEAD)
    }
}

#[test]
fn server_delay_runs_from_its_discovery() {
    let waited = |listening, seconds: Option<u64>| {
        let all = table(&[listens(200, 1, listening)]);
        let subtree_root = all.rows[&200].entry.key;
        let found = scan(&all, |q| {
            q.waited
                .extend(seconds.map(|waited| (subtree_root, waited * S)));
        });
        found[0].verdict.clone()
    };
    let wait = |rest: u64| LeftoverVerdict::Wait {
        rule: "servers".into(),
        remaining_ns: rest * S,
        relative: None,
    };
    for (listening, seconds, expected) in [
        (Fact::Known(true), None, wait(600)),
        (Fact::Known(true), Some(0), wait(600)),
        (Fact::Known(true), Some(599), wait(1)),
        (Fact::Known(true), Some(600), LeftoverVerdict::Reap),
        (Fact::Known(false), None, LeftoverVerdict::Reap),
        // It may listen.
        (Fact::Unread, None, wait(600)),
        (Fact::Unreadable, None, wait(600)),
        (Fact::Unreadable, Some(601), LeftoverVerdict::Reap),
    ] {
        assert_eq!(
            waited(listening, seconds),
            expected,
            "{listening:?} {seconds:?}"
        );
    }
    // Without a reap there is no delay.
    check(
        "no_owner",
        &[P {
            listening: Fact::Known(true),
            ..p(200, 1, 100, NODE, BARE)
        }],
    );
}

#[test]
fn ancestors_and_descendants_wait_with_server() {
    let is = Fact::Known;
    let all = [
        listens(200, 1, is(false)),
        listens(201, 200, is(false)),
        listens(202, 201, is(true)),
        listens(203, 202, is(false)),
        listens(204, 200, is(false)),
        // Another tree.
        listens(210, 1, is(false)),
    ];
    let mut all = table(&all);
    let found = scan(&all, |_| {});
    let reasons = |found: &[Leftover]| [200, 201, 202, 203, 204, 210].map(|pid| why(found, pid));
    let wait = "rule_delay";
    assert_eq!(reasons(&found), [wait, wait, wait, wait, "reap", "reap"]);
    let waiting = found
        .iter()
        .find(|leftover| leftover.key.pid == 200)
        .unwrap();
    assert!(
        matches!(
            waiting.verdict,
            LeftoverVerdict::Wait {
                relative: Some(202),
                ..
            }
        ),
        "{waiting:?}"
    );
    // A kept process in between does not stop the effect on its ancestors.
    let image = Arc::make_mut(&mut all.rows.get_mut(&201).unwrap().entry.image);
    image.exe = b"/usr/bin/sway".to_vec();
    let found = scan(&all, |_| {});
    let keep = "keep_rule";
    // The kept process may have passed its marker on to the other tree.
    let other = "multiplexed";
    assert_eq!(reasons(&found), [wait, keep, keep, keep, "reap", other]);
    let subtree_root = all.rows[&200].entry.key;
    let found = scan(&all, |q| q.waited.extend([(subtree_root, u64::MAX)]));
    assert_eq!(why(&found, 200), "reap");
}

#[test]
fn verdict_has_its_name_in_json() {
    let rule: Arc<str> = "servers".into();
    for (verdict, name) in [
        (LeftoverVerdict::Reap, "reap"),
        (LeftoverVerdict::Report(Uncertainty::Young), "report"),
        (
            LeftoverVerdict::Wait {
                rule,
                remaining_ns: 1,
                relative: None,
            },
            "wait",
        ),
        (
            LeftoverVerdict::Keep {
                reason: KeepReason::Boundary,
                rule: None,
                relative: None,
            },
            "keep",
        ),
    ] {
        assert_eq!(verdict.name(), name);
    }
}
