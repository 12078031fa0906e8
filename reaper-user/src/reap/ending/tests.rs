//! Ending processes that are looked for again and again, on processes of the test's own.

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

const LONG: Duration = Duration::from_secs(600);

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
    // Grace, patience, how many are left, and whether they are given up.
    let cases = [
        (Duration::ZERO, Duration::ZERO, 1, true),
        (Duration::ZERO, Duration::ZERO, 0, false),
        (Duration::ZERO, LONG, 1, false),
        (soon, Duration::ZERO, 1, false),
    ];
    for case in cases {
        let (grace, kill_timeout, left, given_up) = case;
        let times = Times {
            grace,
            kill_timeout,
        };
        let mut endings = PollingReaper::new(times, Signal::SIGTERM);
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
