//! Processes of the test's own that are found again and again.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use super::*;
use reaper_host::kernel::ProcessHandle;
use reaper_host::sys::pidfd::Pidfd;
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

fn endings(grace: Duration, kill_timeout: Duration) -> PollingReaper {
    let times = Times {
        grace,
        kill_timeout,
    };
    PollingReaper::new(Arc::new(ExitPoll::new().unwrap()), times, Signal::SIGTERM)
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
    let mut endings = endings(LONG, LONG);
    endings.round(|_| Ok::<Due, ()>(due.clone())).unwrap();
    let sent = endings.reaper.targets[&same.key].last_signal;
    assert_eq!(sent, Some(Signal::SIGTERM));
    assert_eq!(same.ended(), Some(15));
    assert!(other.lives());
    let told = endings.results();
    let told = told.iter().find(|one| one.key == other.key).unwrap();
    let spared = ReapOutcome::NotSent(ReleaseReason::UidUnreadable);
    assert_eq!((told.outcome, told.signal), (spared, None));
}

#[test]
fn without_free_files_one_is_ended_at_a_time() {
    let (first, second) = (One::new(true), One::new(true));
    let mut due = first.due();
    due.extend(second.due());
    let mut endings = endings(LONG, LONG);
    endings.reaper.files_max = 0;
    for came in [1, 0] {
        let round = endings.round(|_| Ok::<Due, ()>(due.clone()));
        assert_eq!(round, Ok(came));
    }
}

/// Whether a process is given up that was sent this signal, and does not end of it.
fn is_given_up(one: &One, sent: Signal, kill_timeout: Duration) -> bool {
    let mut endings = endings(Duration::ZERO, kill_timeout);
    let target = Target {
        last_signal: Some(sent),
        ..Target::default()
    };
    endings.reaper.insert(one.key, target);
    endings.reaper.queue.push(one.key);
    endings.reaper.open_queued();
    for ladder in endings.reaper.escalations.values_mut() {
        ladder.on_claim(one.key);
    }
    for _ in 0..500 {
        endings.tick();
        thread::sleep(LOOK_AGAIN);
    }
    endings.is_over()
}

#[test]
fn only_the_killed_are_given_up_and_only_when_nothing_moves() {
    let (sleeps, runs) = (One::new(true), One::running("echo up; while :; do :; done"));
    let cases = [
        (&sleeps, Signal::SIGKILL, Duration::ZERO, true),
        (&sleeps, Signal::SIGKILL, LONG, false),
        // It gets its SIGKILL first.
        (&sleeps, Signal::SIGTERM, Duration::ZERO, false),
    ];
    for (number, (one, sent, kill_timeout, given_up)) in cases.into_iter().enumerate() {
        assert_eq!(is_given_up(one, sent, kill_timeout), given_up, "{number}");
    }
    let mut none_left = endings(Duration::ZERO, Duration::ZERO);
    (0..5).for_each(|_| none_left.tick());
    assert!(!none_left.is_over());
    assert!(!is_given_up(&runs, Signal::SIGKILL, Duration::ZERO));
}

#[test]
fn held_tree_goes_on_with_its_signal() {
    let (mut heeds, mut deaf) = (One::new(false), One::new(true));
    let (procfs, due) = (Procfs::default(), heeds.due());
    let due = due.into_iter().chain(deaf.due()).collect::<Due>();
    let mut endings = endings(LONG, LONG);
    let mut looked = 0;
    let mut find = |_: &HashSet<ProcessKey>| {
        looked += 1;
        Ok::<Due, ()>(due.clone())
    };
    endings.hold(&mut find).unwrap();
    for one in [&heeds, &deaf] {
        assert_eq!(procfs.state(one.key.pid), Some('T'));
    }
    endings.round(&mut find).unwrap();
    assert_eq!(heeds.ended(), Some(15));
    endings.hasten();
    endings.round(&mut find).unwrap();
    assert_eq!(deaf.ended(), Some(9));
    assert!(looked >= 4, "each round looks before and after the opening");
}
