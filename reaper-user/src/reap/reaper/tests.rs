//! What real processes are sent that others have signalled before.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::*;
use crate::reap::{ReapFailure, ReapOutcome, ReleaseReason, send};
use reaper_host::kernel::{ProcessTable, SystemClock, WatchedHandle};
use reaper_host::source::procfs::{ProcessMemory, Procfs};
use reaper_host::sys::exit_poll::ExitPoll;
use reaper_host::sys::pidfd::Pidfd;
use reaper_model::event::{Event, EventKind, ExitStatus, Image, Provenance, Uids};
use reaper_model::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, Ruleset};
use reaper_model::{Model, Scope};

/// The agent: no process that there is.
const ROOT: ProcessKey = ProcessKey {
    pid: u32::MAX,
    start: 1,
};

/// Grace and patience of the tests' ladders.
const TIMES: Times = Times {
    grace: Duration::from_secs(600),
    kill_timeout: Duration::from_secs(60),
};

fn reaper(times: Times, observe: bool) -> Reaper {
    let signals = Arc::new(ExitPoll::new().unwrap());
    Reaper::new(
        std::process::id(),
        Arc::new(SystemClock),
        signals,
        times,
        observe,
    )
}

/// A shell that says when it is sent SIGTERM, and stays; its agent is gone.
struct Orphan {
    child: Child,
    said: BufReader<ChildStdout>,
    key: ProcessKey,
    model: Model,
    reaper: Reaper,
}

impl Orphan {
    fn new() -> Orphan {
        let mut child = Command::new("/bin/sh")
            .args([
                "-c",
                "trap 'echo termed' TERM; echo ready; while :; do sleep 0.01; done",
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        let key = ProcessKey {
            pid: child.id(),
            start: 2,
        };
        let named = Condition {
            field: Field::Comm,
            any_of: vec![Pattern::comm("agent").unwrap()],
            negative: false,
        };
        let agent = Rule::new("agent", Action::Agent, vec![Matcher::new(vec![named])]);
        let rules = Ruleset::new(vec![agent]);
        let mut orphan = Orphan {
            child,
            said,
            key,
            model: Model::new(rules, Scope::default(), std::process::id()),
            reaper: reaper(TIMES, false),
        };
        let uids = Uids::default();
        let runs = |key, name: &str| EventKind::Exec {
            key,
            parent: None,
            uids,
            pidfd_inode: 0,
            image: Arc::new(Image {
                comm: name.into(),
                exe: format!("/bin/{name}").into(),
                ..Image::default()
            }),
            membership: None,
        };
        orphan.tell(runs(ROOT, "agent"));
        orphan.born(key, ROOT);
        orphan.tell(runs(key, "sh"));
        orphan.exited(ROOT);
        orphan
    }

    fn born(&mut self, child: ProcessKey, parent: ProcessKey) {
        self.tell(EventKind::Fork {
            child,
            parent: Some(parent),
            creator: Some(parent),
            uids: Uids::default(),
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        });
    }

    fn tell(&mut self, kind: EventKind) {
        let event = Event {
            time: 10,
            provenance: Provenance::Kernel,
            kind,
        };
        self.model.apply(&event, &mut Vec::new());
    }

    fn exited(&mut self, key: ProcessKey) {
        self.tell(EventKind::Exit {
            key,
            parent: None,
            exit_status: ExitStatus::Exited(0),
            peak_rss: 0,
            membership: None,
        });
    }

    fn signalled(&mut self, signal: Signal) {
        self.tell(EventKind::SignalSent {
            key: self.key,
            signal: signal as u8,
        });
    }

    fn claim(&mut self) {
        let decision = self.model.decide(self.key);
        assert!(self.reaper.claim(&self.model, self.key, &decision));
    }

    fn signal(&mut self) -> Vec<ReapEvent> {
        self.reaper.open_queued();
        self.reaper.signal_queued(&mut self.model, true);
        let deadlines = self.reaper.escalations.values().map(Escalation::deadline);
        assert_eq!(self.reaper.next_deadline(), deadlines.min());
        self.reaper.take_reports()
    }

    /// Ends it, if it lives, and gives all that it has said since it was ready.
    fn last_words(&mut self) -> String {
        let _ = self.child.kill();
        self.child.wait().unwrap();
        let mut said = String::new();
        self.said.read_to_string(&mut said).unwrap();
        said
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// No more files can be opened.
struct NoFiles(OwnedFd);

impl Default for NoFiles {
    fn default() -> NoFiles {
        NoFiles(File::open("/dev/null").unwrap().into())
    }
}

impl AsFd for NoFiles {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Signals for NoFiles {
    fn open(&self, _: u32) -> nix::Result<Box<dyn WatchedHandle>> {
        Err(nix::Error::EMFILE)
    }

    fn exited(&self) -> Vec<u64> {
        Vec::new()
    }
}

/// The signals of some reports, and how it ended, if it has.
fn told(reports: &[ReapEvent]) -> (Vec<Signal>, Option<(ReapOutcome, Option<Signal>)>) {
    let mut outcomes = reports.iter().filter_map(|report| match report {
        ReapEvent::Outcome { result, .. } => Some((result.outcome, result.signal)),
        _ => None,
    });
    let signals = reports.iter().filter_map(|report| match report {
        ReapEvent::Signal(sent) => Some(sent.signal),
        _ => None,
    });
    (signals.collect(), outcomes.next())
}

#[test]
fn one_that_had_its_sigterm_gets_no_second_and_is_killed_in_time() {
    let mut orphan = Orphan::new();
    orphan.signalled(Signal::SIGTERM);
    orphan.claim();
    assert_eq!(told(&orphan.signal()), (vec![], None));
    let session = orphan
        .model
        .tree
        .get(orphan.key)
        .unwrap()
        .state
        .member
        .session
        .unwrap();
    assert!(matches!(
        orphan.reaper.stages().collect::<Vec<_>>()[..],
        [(id, Stage::Term { .. })] if id == session
    ));
    orphan.reaper.update(session, |ladder| ladder.kill(0));
    orphan.reaper.queue_all(session);
    assert_eq!(told(&orphan.signal()), (vec![Signal::SIGKILL], None));
    assert_eq!(orphan.last_words(), "");
    let (ready, unrecorded) = orphan.reaper.confirm_exits();
    assert_eq!((ready, unrecorded), (1, vec![orphan.key]));
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert_eq!(
        told(&orphan.reaper.take_reports()),
        (
            vec![],
            Some((
                ReapOutcome::Exited(ExitStatus::Unknown),
                Some(Signal::SIGKILL)
            ))
        )
    );
}

#[test]
fn process_that_has_exited_at_stop_is_no_failure() {
    for is_recorded in [true, false] {
        let mut orphan = Orphan::new();
        orphan.claim();
        assert_eq!(told(&orphan.signal()), (vec![Signal::SIGTERM], None));
        orphan.last_words();
        let node = orphan.model.tree.get(orphan.key).unwrap().clone();
        let ended = ExitStatus::Signalled {
            signal: 9,
            core: false,
        };
        if is_recorded {
            orphan.reaper.on_exit(&node, ended, &[]);
        }
        orphan.reaper.stop();
        let expected = if is_recorded {
            ended
        } else {
            ExitStatus::Unknown
        };
        let (_, outcome) = told(&orphan.reaper.take_reports());
        let (outcome, _) = outcome.unwrap();
        assert_eq!(outcome, ReapOutcome::Exited(expected), "{is_recorded}");
    }
}

#[test]
fn process_that_lives_at_stop_is_a_failure() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.signal();
    orphan.reaper.stop();
    let (_, outcome) = told(&orphan.reaper.take_reports());
    let (outcome, _) = outcome.unwrap();
    assert_eq!(outcome, ReapOutcome::Failed(ReapFailure::Stopped));
}

#[test]
fn one_that_was_stopped_is_woken_for_the_sigterm_it_had() {
    let mut orphan = Orphan::new();
    for signal in [Signal::SIGSTOP, Signal::SIGTERM] {
        end_own(&orphan, signal);
    }
    orphan.signalled(Signal::SIGTERM);
    orphan.claim();
    assert_eq!(told(&orphan.signal()), (vec![], None));
    let mut line = String::new();
    orphan.said.read_line(&mut line).unwrap();
    assert_eq!(line, "termed\n");
    assert_eq!(orphan.last_words(), "", "no second one");
}

#[test]
fn one_that_ends_of_anothers_signal_was_reaped() {
    // Before it is opened, after that, and when its record is still to come.
    for when in 0..3 {
        let mut orphan = Orphan::new();
        orphan.signalled(Signal::SIGTERM);
        orphan.claim();
        if when > 0 {
            orphan.reaper.open_queued();
        }
        orphan.last_words();
        let mut reports = Vec::new();
        if when > 1 {
            reports.extend(orphan.signal());
            assert!(orphan.reaper.is_claimed(orphan.key), "how is not known");
        }
        let node = orphan.model.tree.get(orphan.key).unwrap().clone();
        orphan.reaper.on_exit(&node, ExitStatus::Exited(1), &[]);
        reports.extend(orphan.signal());
        orphan.reaper.confirm_exits();
        reports.extend(orphan.reaper.take_reports());
        let ended = (
            ReapOutcome::Exited(ExitStatus::Exited(1)),
            Some(Signal::SIGTERM),
        );
        assert_eq!(told(&reports), (vec![], Some(ended)), "{when}");
    }
}

#[test]
fn a_ladder_that_is_taken_over_past_its_time_kills_at_once() {
    let mut orphan = Orphan::new();
    let session = orphan
        .model
        .tree
        .get(orphan.key)
        .unwrap()
        .state
        .member
        .session
        .unwrap();
    orphan.reaper.resume(session, 1);
    orphan.claim();
    assert_eq!(orphan.reaper.open_escalations(), 1);
    assert_eq!(told(&orphan.signal()), (vec![Signal::SIGKILL], None));
    assert_eq!(orphan.last_words(), "");
    orphan.reaper.confirm_exits();
    orphan.reaper.on_unrecorded_exit(orphan.key);
    orphan.reaper.close_empty();
    assert_eq!(orphan.reaper.open_escalations(), 0);
}

#[test]
fn killed_process_that_runs_is_not_given_up() {
    let mut orphan = Orphan::new();
    let at_once = Times {
        grace: Duration::ZERO,
        kill_timeout: Duration::ZERO,
    };
    orphan.reaper = reaper(at_once, false);
    orphan.claim();
    orphan.reaper.tick(|_| ('S', 0));
    assert_eq!(told(&orphan.signal()), (vec![Signal::SIGKILL], None));
    for _ in 0..5 {
        orphan.reaper.tick(|_| ('R', 0));
        assert_eq!(told(&orphan.signal()), (vec![], None));
    }
    for _ in 0..2 {
        orphan.reaper.tick(|_| ('D', 0));
    }
    let stuck = ReapOutcome::Failed(ReapFailure::KillTimeout('D'));
    let stuck = Some((stuck, Some(Signal::SIGKILL)));
    assert_eq!(told(&orphan.signal()), (vec![], stuck));
}

#[test]
fn one_for_whom_nobody_vouches_is_sent_nothing() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.reaper.open_queued();
    orphan.reaper.release_failed(orphan.key, nix::Error::EPERM);
    let failed = ReapOutcome::Failed(ReapFailure::Errno(nix::libc::EPERM));
    assert_eq!(told(&orphan.signal()), (vec![], Some((failed, None))));
    assert_eq!(orphan.last_words(), "");
    // While another is open, it may yet have its turn.
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.reaper.open_queued();
    orphan.reaper.open_pidfds += 1;
    orphan.reaper.release_failed(orphan.key, nix::Error::EPERM);
    assert_eq!(told(&orphan.signal()), (vec![], None));
    assert_eq!(orphan.reaper.waiting_for_files, [orphan.key]);
    assert_eq!(orphan.last_words(), "");
}

#[test]
fn some_open_files_are_left_for_others() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.reaper.files_max = 0;
    orphan.reaper.open_pidfds += 1;
    assert_eq!(told(&orphan.signal()), (vec![], None));
    assert_eq!(orphan.reaper.waiting_for_files, [orphan.key]);
    // But for the only one.
    orphan.reaper.open_pidfds -= 1;
    orphan.reaper.queue = std::mem::take(&mut orphan.reaper.waiting_for_files).into();
    assert_eq!(told(&orphan.signal()), (vec![Signal::SIGTERM], None));
    orphan.last_words();
}

#[test]
fn exit_gives_one_process_its_turn_to_be_opened() {
    let others = [7, 8, 9].map(|pid| ProcessKey { pid, start: 2 });
    for (open, turns) in [(1, 1), (0, 3)] {
        let mut orphan = Orphan::new();
        orphan.claim();
        orphan.reaper.open_queued();
        orphan.reaper.open_pidfds += open;
        let own = orphan.key;
        for other in others {
            orphan.born(other, own);
            orphan.key = other;
            orphan.claim();
        }
        // The first one has exited meanwhile.
        let gone = ProcessKey { pid: 6, start: 2 };
        orphan.reaper.waiting_for_files = [gone].into_iter().chain(others).collect();
        orphan.reaper.queue.clear();
        orphan.reaper.on_unrecorded_exit(own);
        assert_eq!(orphan.reaper.queue, others[..turns]);
        assert_eq!(orphan.reaper.waiting_for_files, &others[turns..]);
    }
}

#[test]
fn process_that_cannot_be_opened_has_its_turn_after_others() {
    for (others, waits) in [(1, true), (0, false)] {
        let mut orphan = Orphan::new();
        orphan.claim();
        orphan.reaper.signals = Arc::new(NoFiles::default());
        orphan.reaper.open_pidfds += others;
        let failed = ReapOutcome::Failed(ReapFailure::Errno(nix::libc::EMFILE));
        let outcome = (!waits).then_some((failed, None));
        assert_eq!(told(&orphan.signal()), (vec![], outcome), "{others}");
        assert_eq!(!orphan.reaper.waiting_for_files.is_empty(), waits);
    }
}

#[test]
fn claim_of_a_signalled_process_is_told_except_in_observe() {
    for (observe, signalled, is_told) in [
        (false, true, true),
        (false, false, false),
        (true, true, false),
    ] {
        let mut orphan = Orphan::new();
        orphan.reaper = reaper(TIMES, observe);
        if signalled {
            orphan.signalled(Signal::SIGTERM);
        }
        orphan.claim();
        let reported = orphan.reaper.has_reported(orphan.key);
        assert_eq!(reported, is_told, "{observe} {signalled}");
        assert_eq!(orphan.reaper.take_reports().len(), usize::from(is_told));
        assert_eq!(orphan.reaper.open_escalations(), usize::from(!observe));
    }
}

#[test]
fn in_observe_one_of_whom_there_is_no_pidfd_is_decided_about_all_the_same() {
    let mut orphan = Orphan::new();
    orphan.reaper = reaper(TIMES, true);
    orphan.claim();
    orphan.reaper.signals = Arc::new(NoFiles::default());
    let reports = orphan.signal();
    let observed = ReapOutcome::NotSent(ReleaseReason::ObserveMode);
    assert_eq!(told(&reports), (vec![], Some((observed, None))));
    assert!(
        matches!(reports[0], ReapEvent::Decided { .. }),
        "{reports:?}"
    );
    assert!(orphan.reaper.queued().is_empty());
    assert_eq!(orphan.last_words(), "");
}

#[test]
fn memory_is_read_after_the_first_signal_only_and_told_with_the_end() {
    let mut orphan = Orphan::new();
    let reads = std::cell::Cell::new(0);
    let read = |pid| {
        reads.set(reads.get() + 1);
        Procfs::default().memory(pid, false)
    };
    orphan.claim();
    orphan.reaper.open_queued();
    orphan.reaper.measure_memory(usize::MAX, read);
    assert_eq!(reads.get(), 0, "before its signal");
    orphan.signal();
    orphan.reaper.measure_memory(usize::MAX, read);
    orphan.reaper.measure_memory(usize::MAX, read);
    assert_eq!(reads.get(), 1);
    orphan.last_words();
    orphan.reaper.confirm_exits();
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert!(memory_told(&mut orphan).is_some_and(|memory| memory.rss > 100 << 10));
}

#[test]
fn one_that_is_gone_before_its_memory_is_read_has_none() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.signal();
    orphan.last_words();
    // Whoever has the pid by now.
    let memory = ProcessMemory {
        rss: 1 << 20,
        ..ProcessMemory::default()
    };
    orphan.reaper.measure_memory(usize::MAX, |_| Some(memory));
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert_eq!(memory_told(&mut orphan), None);
}

#[test]
fn one_that_lives_on_gives_nothing_back() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.signal();
    orphan
        .reaper
        .measure_memory(usize::MAX, |pid| Procfs::default().memory(pid, false));
    orphan.reaper.stop();
    assert_eq!(memory_told(&mut orphan), None);
}

/// What is told of its memory with its one outcome.
fn memory_told(orphan: &mut Orphan) -> Option<ProcessMemory> {
    let reports = orphan.reaper.take_reports();
    let outcome = reports.iter().find_map(|report| match report {
        ReapEvent::Outcome { result, .. } => Some(result.memory),
        _ => None,
    });
    outcome.expect("an outcome")
}

fn end_own(orphan: &Orphan, signal: Signal) {
    let pidfd = Pidfd::open(orphan.key.pid).unwrap();
    send::signal_own(&pidfd, orphan.key.pid, signal).unwrap();
}
