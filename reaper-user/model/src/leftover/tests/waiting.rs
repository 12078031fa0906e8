//! Rules that give time before one is reaped.

use super::*;

fn listens(pid: u32, parent: u32, listening: Fact<bool>) -> P {
    P {
        listening,
        ..p(pid, parent, 100 + u64::from(pid), NODE, DEAD)
    }
}

#[test]
fn a_server_has_its_time_from_when_it_was_found() {
    let waited = |listening, seconds: Option<u64>| {
        let all = table(&[listens(200, 1, listening)]);
        let head = all.rows[&200].entry.key;
        let strays = ask(&all, |q| {
            q.waited.extend(seconds.map(|waited| (head, waited * S)));
        });
        strays[0].verdict.clone()
    };
    let wait = |rest: u64| LeftoverVerdict::Wait {
        rule: "servers".into(),
        rest: rest * S,
        kin: None,
    };
    for (listening, seconds, expected) in [
        (Fact::Known(true), None, wait(600)),
        (Fact::Known(true), Some(0), wait(600)),
        (Fact::Known(true), Some(599), wait(1)),
        (Fact::Known(true), Some(600), LeftoverVerdict::Reap),
        (Fact::Known(false), None, LeftoverVerdict::Reap),
        // It may.
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
    // Nothing is to be waited for where all is left alone.
    check(
        "no_owner",
        &[P {
            listening: Fact::Known(true),
            ..p(200, 1, 100, NODE, BARE)
        }],
    );
}

#[test]
fn those_above_and_below_a_server_wait_with_it() {
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
    let strays = ask(&all, |_| {});
    let said_of = |strays: &[Leftover]| [200, 201, 202, 203, 204, 210].map(|pid| said(strays, pid));
    let wait = "rule_delay";
    assert_eq!(said_of(&strays), [wait, wait, wait, wait, "reap", "reap"]);
    let kin = strays.iter().find(|stray| stray.key.pid == 200).unwrap();
    assert!(
        matches!(kin.verdict, LeftoverVerdict::Wait { kin: Some(202), .. }),
        "{kin:?}"
    );
    // One in the midst that is kept stops nothing.
    let image = Arc::make_mut(&mut all.rows.get_mut(&201).unwrap().entry.image);
    image.exe = b"/usr/bin/sway".to_vec();
    let strays = ask(&all, |_| {});
    let keep = "keep_rule";
    // Of the other tree it may be where its mark is from.
    let other = "multiplexed";
    assert_eq!(said_of(&strays), [wait, keep, keep, keep, "reap", other]);
    let head = all.rows[&200].entry.key;
    let strays = ask(&all, |q| q.waited.extend([(head, u64::MAX)]));
    assert_eq!(said(&strays, 200), "reap");
}

#[test]
fn verdicts_have_their_names() {
    let rule: Arc<str> = "servers".into();
    for (verdict, name) in [
        (LeftoverVerdict::Reap, "reap"),
        (LeftoverVerdict::Report(Uncertainty::Young), "report"),
        (
            LeftoverVerdict::Wait {
                rule,
                rest: 1,
                kin: None,
            },
            "wait",
        ),
        (
            LeftoverVerdict::Keep {
                spare: KeepReason::Boundary,
                rule: None,
                kin: None,
            },
            "keep",
        ),
    ] {
        assert_eq!(verdict.name(), name);
    }
}
