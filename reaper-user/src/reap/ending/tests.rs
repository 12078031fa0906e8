//! What is left to another, on processes of the test's own.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::reap::ReleaseReason;
use reaper_model::event::TICK_NS;

/// A shell that may not heed SIGTERM.
struct One {
    child: Child,
    key: ProcessKey,
}

impl One {
    fn new(deaf: bool) -> One {
        let trap = if deaf { "trap '' TERM;" } else { "" };
        One::running(&format!("{trap} echo up; exec sleep 60"))
    }

    /// It is to say something when it is ready.
    fn running(script: &str) -> One {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        let pid = child.id();
        let ticks = Procfs::default().start_ticks(pid).unwrap();
        let start = ticks * TICK_NS;
        One {
            child,
            key: ProcessKey { pid, start },
        }
    }

    fn due(&self) -> Due {
        HashMap::from_iter([(self.key, None)])
    }

    fn handed(&self) -> Vec<Handed> {
        vec![Handed {
            key: self.key,
            signal: Signal::SIGTERM,
            memory: None,
        }]
    }

    fn lives(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// By which signal it has ended.
    fn ended(&mut self) -> Option<i32> {
        self.child.wait().unwrap().signal()
    }
}

impl Drop for One {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn endings(grace: Duration) -> PollingReaper {
    let times = Times {
        grace,
        // Longer than a busy machine takes to end one that was sent SIGKILL.
        kill_timeout: Duration::from_secs(2),
    };
    PollingReaper::new(times, Signal::SIGTERM)
}

/// One round, in which these are found.
fn round(endings: &mut PollingReaper, one: &One) {
    let found = endings.round(|_: &HashSet<ProcessKey>| Ok::<Due, ()>(one.due()));
    found.unwrap();
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn who_should_have_been_killed_by_the_other_is_taken_over() {
    for grace in [Duration::ZERO, Duration::from_millis(50)] {
        let mut one = One::new(true);
        let mut endings = endings(grace);
        endings.hand_over(one.handed());
        round(&mut endings, &one);
        assert_eq!(endings.wait(None), 1, "it is the other's");
        while endings.wait(None) > 0 {
            assert!(!endings.is_over(), "it was given up");
            round(&mut endings, &one);
        }
        assert_eq!(one.ended(), Some(9), "{grace:?}");
        let told = endings.told();
        assert_eq!(told[0].signal, Some(Signal::SIGKILL));
        assert!(matches!(told[0].outcome, ReapOutcome::Exited(_)));
    }
}

#[test]
fn where_the_other_is_gone_they_are_asked_from_here() {
    let mut one = One::new(false);
    let mut endings = endings(LONG);
    endings.hand_over(one.handed());
    for _ in 0..3 {
        round(&mut endings, &one);
    }
    assert!(one.lives(), "it is the other's");
    endings.take_over();
    round(&mut endings, &one);
    assert_eq!(one.ended(), Some(15));
}

#[test]
fn what_was_asked_from_here_is_not_asked_again() {
    let (own, others) = (One::new(true), One::new(true));
    let mut endings = endings(LONG);
    round(&mut endings, &own);
    endings.hand_over(others.handed());
    round(&mut endings, &others);
    endings.take_over();
    let sent = |key| endings.targets[&key].strongest;
    assert_eq!(sent(own.key), Some(Signal::SIGTERM));
    assert_eq!(sent(others.key), None, "it is its turn");
}

#[test]
fn who_comes_in_the_grace_is_asked_once_it_is_known_whose_it_is() {
    let (mut own, mut others) = (One::new(false), One::new(false));
    let nobody = One::new(false);
    let mut endings = endings(LONG);
    endings.hand_over(nobody.handed());
    for one in [&own, &others] {
        round(&mut endings, one);
        assert!(endings.has_unasked());
    }
    endings.hand_over(others.handed());
    round(&mut endings, &own);
    assert!(!endings.has_unasked());
    assert_eq!(own.ended(), Some(15));
    round(&mut endings, &others);
    assert!(others.lives(), "it is the other's");
}

#[test]
fn who_was_gone_before_they_were_looked_for_was_ended_by_the_other() {
    let one = One::new(false);
    let key = one.key;
    let mut endings = endings(LONG);
    endings.hand_over(one.handed());
    drop(one);
    let told = endings.told();
    assert_eq!((told[0].key, told[0].signal), (key, Some(Signal::SIGTERM)));
    assert!(matches!(told[0].outcome, ReapOutcome::Exited(_)));
}

#[test]
fn all_that_is_due_is_ended_and_told_of() {
    let one = One::new(false);
    let times = Times {
        grace: LONG,
        ..Times::default()
    };
    let told = reap_all(|_| Ok::<Due, ()>(one.due()), times).unwrap();
    assert_eq!(told.len(), 1);
    assert_eq!(
        (told[0].key, told[0].signal),
        (one.key, Some(Signal::SIGTERM))
    );
    assert!(matches!(told[0].outcome, ReapOutcome::Exited(_)));
}

#[test]
fn process_that_runs_under_other_uids_is_spared() {
    let (mut same, mut other) = (One::new(false), One::new(false));
    let pidfd = Pidfd::open(same.key.pid).unwrap();
    let uids = pidfd.uids(same.key.pid).unwrap();
    let others = Uids {
        real: uids.real + 1,
        ..uids
    };
    let due = Due::from_iter([(same.key, Some(uids)), (other.key, Some(others))]);
    let mut endings = endings(LONG);
    endings.round(|_| Ok::<Due, ()>(due.clone())).unwrap();
    assert_eq!(endings.targets[&same.key].strongest, Some(Signal::SIGTERM));
    assert_eq!(same.ended(), Some(15));
    assert!(other.lives());
    let told = endings.told();
    let told = told.iter().find(|one| one.key == other.key).unwrap();
    let spared = ReapOutcome::NotSent(ReleaseReason::UidUnreadable);
    assert_eq!((told.outcome, told.signal), (spared, None));
}

#[test]
fn without_free_files_one_is_ended_at_a_time() {
    let (first, second) = (One::new(true), One::new(true));
    let mut due = first.due();
    due.extend(second.due());
    let mut endings = endings(LONG);
    endings.files_max = 0;
    for came in [1, 0] {
        let round = endings.round(|_| Ok::<Due, ()>(due.clone()));
        assert_eq!(round, Ok(came));
    }
}

#[test]
fn only_the_killed_are_given_up_and_only_when_nothing_moves() {
    let soon = Duration::from_nanos(1);
    // Grace, patience, how many are left, whether they are another's, and whether they are given up.
    let cases = [
        (Duration::ZERO, Duration::ZERO, 1, false, true),
        (Duration::ZERO, Duration::ZERO, 1, true, false),
        (Duration::ZERO, Duration::ZERO, 0, false, false),
        (Duration::ZERO, LONG, 1, false, false),
        (soon, Duration::ZERO, 1, false, false),
    ];
    for case in cases {
        let (grace, kill_timeout, left, by_another, given_up) = case;
        let times = Times {
            grace,
            kill_timeout,
        };
        let mut endings = PollingReaper::new(times, Signal::SIGTERM);
        endings.by_another = by_another;
        for _ in 0..5 {
            endings.look_for_progress(left);
        }
        assert_eq!(endings.is_over(), given_up, "{case:?}");
    }
}

#[test]
fn killed_process_that_still_runs_is_not_given_up() {
    let one = One::running("echo up; while :; do :; done");
    let times = Times {
        grace: Duration::ZERO,
        kill_timeout: Duration::ZERO,
    };
    for (sent, given_up) in [(Signal::SIGKILL, false), (Signal::SIGTERM, true)] {
        let mut endings = PollingReaper::new(times, Signal::SIGTERM);
        let mut target = Target::new(Pidfd::open(one.key.pid).unwrap());
        target.strongest = Some(sent);
        endings.targets.insert(one.key, target);
        for _ in 0..5 {
            endings.look_for_progress(1);
        }
        assert_eq!(endings.is_over(), given_up, "{sent}");
    }
}

#[test]
fn the_other_has_the_whole_grace_before_it_is_taken_over() {
    for (grace, is_limited) in [(LONG, false), (Duration::ZERO, true)] {
        let mut endings = endings(grace);
        endings.hand_over(Vec::new());
        assert_eq!(endings.until.is_some(), is_limited, "{grace:?}");
    }
}
