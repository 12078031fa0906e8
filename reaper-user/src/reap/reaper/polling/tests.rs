//! Real processes of the test that are found repeatedly.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use super::*;
use reaper_host::kernel::ProcessHandle;
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::TICK_NS;

/// Shell that ignores SIGTERM if it is `deaf`.
struct Shell {
    child: Child,
    key: ProcessKey,
}

impl Shell {
    fn new(deaf: bool) -> Shell {
        let trap = if deaf { "trap '' TERM;" } else { "" };
        Shell::running(&format!("{trap} echo up; exec sleep 60"))
    }

    /// The script must print a line when it is ready.
    fn running(script: &str) -> Shell {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        let pid = child.id();
        let ticks = Procfs::default().start_ticks(pid).unwrap();
        let start = ticks * TICK_NS;
        Shell {
            child,
            key: ProcessKey { pid, start },
        }
    }

    fn due(&self) -> Due {
        self.due_with(DueProcess::default())
    }

    fn due_with(&self, process: DueProcess) -> Due {
        HashMap::from_iter([(self.key, process)])
    }

    fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the signal that ended it.
    fn end_signal(&mut self) -> Option<i32> {
        self.child.wait().unwrap().signal()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn polling_reaper(grace: Duration, kill_timeout: Duration) -> PollingReaper {
    let times = Times {
        grace,
        kill_timeout,
    };
    PollingReaper::new(Arc::new(ExitPoll::new().unwrap()), times, Signal::SIGTERM)
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn due_process_is_ended_and_in_results() {
    let child = Shell::new(false);
    let times = Times {
        grace: LONG,
        ..Times::default()
    };
    let results = reap_all(|_| Ok::<Due, ()>(child.due()), times).unwrap();
    assert_eq!(results.len(), 1);
    assert_eq!(
        (results[0].key, results[0].signal),
        (child.key, Some(Signal::SIGTERM))
    );
    assert!(matches!(results[0].outcome, ReapOutcome::Exited(_)));
}

#[test]
fn process_with_other_uids_is_not_signalled() {
    let (mut same, mut other) = (Shell::new(false), Shell::new(false));
    let pidfd = Pidfd::open(same.key.pid).unwrap();
    let uids = pidfd.uids(same.key.pid).unwrap();
    let others = Uids {
        real: uids.real + 1,
        ..uids
    };
    let with = |uids| DueProcess {
        uids: Some(uids),
        ..DueProcess::default()
    };
    let due = Due::from_iter([(same.key, with(uids)), (other.key, with(others))]);
    let mut reaper = polling_reaper(LONG, LONG);
    reaper.round(|_| Ok::<Due, ()>(due.clone())).unwrap();
    let sent = reaper.reaper.targets[&same.key].last_signal;
    assert_eq!(sent, Some(Signal::SIGTERM));
    assert_eq!(same.end_signal(), Some(15));
    assert!(other.is_alive());
    let results = reaper.results();
    let result = results
        .iter()
        .find(|result| result.key == other.key)
        .unwrap();
    let released = ReapOutcome::NotSent(ReleaseReason::UidUnreadable);
    assert_eq!((result.outcome, result.signal), (released, None));
}

#[test]
fn program_with_grace_gets_no_sigkill_and_keeps_its_helper() {
    let (mut program, mut helper, mut other) =
        (Shell::new(true), Shell::new(false), Shell::new(true));
    let with = |ns, needed_by| DueProcess {
        grace: Grace { ns, needed_by },
        ..DueProcess::default()
    };
    let mut due = other.due();
    due.extend(program.due_with(with(sys::nanoseconds(LONG), None)));
    due.extend(helper.due_with(with(0, Some(program.key))));
    let mut reaper = polling_reaper(Duration::from_millis(200), LONG);
    while other.is_alive() {
        reaper.round(|_| Ok::<Due, ()>(due.clone())).unwrap();
        reaper.wait(None);
    }
    assert!(program.is_alive() && helper.is_alive());
    program.child.kill().unwrap();
    while helper.is_alive() {
        reaper.round(|_| Ok::<Due, ()>(due.clone())).unwrap();
        reaper.wait(None);
    }
    assert_eq!(helper.end_signal(), Some(15));
    let signals = reaper.results().into_iter().map(|result| result.signal);
    let expected = [Signal::SIGTERM, Signal::SIGTERM, Signal::SIGKILL].map(Some);
    assert_eq!(signals.collect::<Vec<_>>(), expected);
}

#[test]
fn without_free_files_processes_are_claimed_one_by_one() {
    let (first, second) = (Shell::new(true), Shell::new(true));
    let mut due = first.due();
    due.extend(second.due());
    let mut reaper = polling_reaper(LONG, LONG);
    reaper.reaper.files_max = 0;
    for new in [1, 0] {
        let round = reaper.round(|_| Ok::<Due, ()>(due.clone()));
        assert_eq!(round, Ok(new));
    }
}

/// Returns whether a process that had this signal and does not exit is given up.
fn is_given_up(child: &Shell, sent: Signal, kill_timeout: Duration) -> bool {
    let mut reaper = polling_reaper(Duration::ZERO, kill_timeout);
    let target = Target {
        last_signal: Some(sent),
        ..Target::default()
    };
    reaper.reaper.insert(child.key, target);
    reaper.reaper.queue.push(child.key);
    reaper.reaper.open_queued();
    for escalation in reaper.reaper.escalations.values_mut() {
        escalation.on_claim(child.key);
    }
    for _ in 0..500 {
        reaper.tick();
        thread::sleep(RETRY_INTERVAL);
    }
    reaper.is_finished()
}

#[test]
fn killed_process_is_given_up_only_without_progress() {
    let (sleeps, runs) = (
        Shell::new(true),
        Shell::running("echo up; while :; do :; done"),
    );
    let cases = [
        (&sleeps, Signal::SIGKILL, Duration::ZERO, true),
        (&sleeps, Signal::SIGKILL, LONG, false),
        // It has not had SIGKILL yet.
        (&sleeps, Signal::SIGTERM, Duration::ZERO, false),
    ];
    for (number, (child, sent, kill_timeout, given_up)) in cases.into_iter().enumerate() {
        assert_eq!(is_given_up(child, sent, kill_timeout), given_up, "{number}");
    }
    let mut none_left = polling_reaper(Duration::ZERO, Duration::ZERO);
    (0..5).for_each(|_| none_left.tick());
    assert!(!none_left.is_finished());
    assert!(!is_given_up(&runs, Signal::SIGKILL, Duration::ZERO));
}

#[test]
fn stopped_tree_continues_after_its_signal() {
    let (mut heeds, mut deaf) = (Shell::new(false), Shell::new(true));
    let (procfs, due) = (Procfs::default(), heeds.due());
    let due = due.into_iter().chain(deaf.due()).collect::<Due>();
    let mut reaper = polling_reaper(LONG, LONG);
    let mut searches = 0;
    let mut find = |_: &HashSet<ProcessKey>| {
        searches += 1;
        Ok::<Due, ()>(due.clone())
    };
    reaper.hold(&mut find).unwrap();
    for child in [&heeds, &deaf] {
        assert_eq!(procfs.state(child.key.pid), Some('T'));
    }
    reaper.round(&mut find).unwrap();
    assert_eq!(heeds.end_signal(), Some(15));
    reaper.end_grace();
    reaper.round(&mut find).unwrap();
    assert_eq!(deaf.end_signal(), Some(9));
    assert!(searches >= 4, "before and after each opening");
}
