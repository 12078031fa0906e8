//! Signals to real processes that other senders have signalled before.

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
use reaper_model::policy::{Decision, Reason};
use reaper_model::ruleset::{Action, Condition, Field, Matcher, Pattern, Rule, Ruleset};
use reaper_model::{Model, Scope};

/// Agent that exists in the model only.
const ROOT: ProcessKey = ProcessKey {
    pid: u32::MAX,
    start: 1,
};

/// Delays that no test exceeds.
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

/// Shell that reports SIGTERM and continues. Its agent has exited.
struct Orphan {
    child: Child,
    output: BufReader<ChildStdout>,
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
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
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
            output,
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
        orphan.apply(runs(ROOT, "agent"));
        orphan.fork(key, ROOT);
        orphan.apply(runs(key, "sh"));
        orphan.exit(ROOT);
        orphan
    }

    fn fork(&mut self, child: ProcessKey, parent: ProcessKey) {
        self.apply(EventKind::Fork {
            child,
            parent: Some(parent),
            creator: Some(parent),
            uids: Uids::default(),
            pidfd_inode: 0,
            namespace_init: false,
            membership: None,
        });
    }

    fn apply(&mut self, kind: EventKind) {
        let event = Event {
            time: 10,
            provenance: Provenance::Kernel,
            kind,
        };
        self.model.apply(&event, &mut Vec::new());
    }

    fn exit(&mut self, key: ProcessKey) {
        self.apply(EventKind::Exit {
            key,
            parent: None,
            exit_status: ExitStatus::Exited(0),
            peak_rss: 0,
            membership: None,
        });
    }

    fn signalled(&mut self, signal: Signal) {
        self.apply(EventKind::SignalSent {
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

    /// Kills the shell if it is alive. Returns all of its output since it was ready.
    fn kill_and_read(&mut self) -> String {
        let _ = self.child.kill();
        self.child.wait().unwrap();
        let mut output = String::new();
        self.output.read_to_string(&mut output).unwrap();
        output
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// Simulation of a process that has reached its limit of open files.
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

/// Returns the signals in the reports, and the outcome.
fn summary(reports: &[ReapEvent]) -> (Vec<Signal>, Option<(ReapOutcome, Option<Signal>)>) {
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
fn process_that_had_sigterm_gets_no_second_one() {
    let mut orphan = Orphan::new();
    orphan.signalled(Signal::SIGTERM);
    orphan.claim();
    assert_eq!(summary(&orphan.signal()), (vec![], None));
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
    orphan
        .reaper
        .update(session, |escalation| escalation.kill(0));
    orphan.reaper.queue_all(session);
    assert_eq!(summary(&orphan.signal()), (vec![Signal::SIGKILL], None));
    assert_eq!(orphan.kill_and_read(), "");
    let (ready, unrecorded) = orphan.reaper.confirm_exits();
    assert_eq!((ready, unrecorded), (1, vec![orphan.key]));
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert_eq!(
        summary(&orphan.reaper.take_reports()),
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
fn exited_process_at_stop_is_not_failed() {
    for is_recorded in [true, false] {
        let mut orphan = Orphan::new();
        orphan.claim();
        assert_eq!(summary(&orphan.signal()), (vec![Signal::SIGTERM], None));
        orphan.kill_and_read();
        let node = orphan.model.tree.get(orphan.key).unwrap().clone();
        let expected = ExitStatus::Signalled {
            signal: 9,
            core: false,
        };
        if is_recorded {
            orphan.reaper.on_exit(&node, expected, &[]);
        }
        orphan.reaper.stop();
        let expected = if is_recorded {
            expected
        } else {
            ExitStatus::Unknown
        };
        let (_, outcome) = summary(&orphan.reaper.take_reports());
        let (outcome, _) = outcome.unwrap();
        assert_eq!(outcome, ReapOutcome::Exited(expected), "{is_recorded}");
    }
}

#[test]
fn living_process_at_stop_is_failed() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.signal();
    orphan.reaper.stop();
    let (_, outcome) = summary(&orphan.reaper.take_reports());
    let (outcome, _) = outcome.unwrap();
    assert_eq!(outcome, ReapOutcome::Failed(ReapFailure::Stopped));
}

#[test]
fn stopped_process_that_had_sigterm_is_woken() {
    let mut orphan = Orphan::new();
    for signal in [Signal::SIGSTOP, Signal::SIGTERM] {
        send_signal(&orphan, signal);
    }
    orphan.signalled(Signal::SIGTERM);
    orphan.claim();
    assert_eq!(summary(&orphan.signal()), (vec![], None));
    let mut line = String::new();
    orphan.output.read_line(&mut line).unwrap();
    assert_eq!(line, "termed\n");
    assert_eq!(orphan.kill_and_read(), "", "no second SIGTERM");
}

#[test]
fn exit_after_signal_of_other_sender_is_reaped() {
    // It exits before its pidfd is opened, after that, or its exit record arrives after the round of signals.
    for when in 0..3 {
        let mut orphan = Orphan::new();
        orphan.signalled(Signal::SIGTERM);
        orphan.claim();
        if when > 0 {
            orphan.reaper.open_queued();
        }
        orphan.kill_and_read();
        let mut reports = Vec::new();
        if when > 1 {
            reports.extend(orphan.signal());
            assert!(orphan.reaper.is_claimed(orphan.key), "no exit record");
        }
        let node = orphan.model.tree.get(orphan.key).unwrap().clone();
        orphan.reaper.on_exit(&node, ExitStatus::Exited(1), &[]);
        reports.extend(orphan.signal());
        orphan.reaper.confirm_exits();
        reports.extend(orphan.reaper.take_reports());
        let expected = (
            ReapOutcome::Exited(ExitStatus::Exited(1)),
            Some(Signal::SIGTERM),
        );
        assert_eq!(summary(&reports), (vec![], Some(expected)), "{when}");
    }
}

#[test]
fn resumed_escalation_past_its_deadline_kills_at_once() {
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
    assert_eq!(summary(&orphan.signal()), (vec![Signal::SIGKILL], None));
    assert_eq!(orphan.kill_and_read(), "");
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
    assert_eq!(summary(&orphan.signal()), (vec![Signal::SIGKILL], None));
    for _ in 0..5 {
        orphan.reaper.tick(|_| ('R', 0));
        assert_eq!(summary(&orphan.signal()), (vec![], None));
    }
    for _ in 0..2 {
        orphan.reaper.tick(|_| ('D', 0));
    }
    let stuck = ReapOutcome::Failed(ReapFailure::KillTimeout('D'));
    let stuck = Some((stuck, Some(Signal::SIGKILL)));
    assert_eq!(summary(&orphan.signal()), (vec![], stuck));
}

#[test]
fn unconfirmed_process_is_not_signalled() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.reaper.open_queued();
    orphan.reaper.release_failed(orphan.key, nix::Error::EPERM);
    let failed = ReapOutcome::Failed(ReapFailure::Errno(nix::libc::EPERM));
    assert_eq!(summary(&orphan.signal()), (vec![], Some((failed, None))));
    assert_eq!(orphan.kill_and_read(), "");
    // While another pidfd is open, the process can be opened later.
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.reaper.open_queued();
    orphan.reaper.open_pidfds += 1;
    orphan.reaper.release_failed(orphan.key, nix::Error::EPERM);
    assert_eq!(summary(&orphan.signal()), (vec![], None));
    assert_eq!(orphan.reaper.waiting_for_files, [orphan.key]);
    assert_eq!(orphan.kill_and_read(), "");
}

#[test]
fn files_above_limit_wait_unless_none_is_open() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.reaper.files_max = 0;
    orphan.reaper.open_pidfds += 1;
    assert_eq!(summary(&orphan.signal()), (vec![], None));
    assert_eq!(orphan.reaper.waiting_for_files, [orphan.key]);
    // The only pidfd is kept open in any case.
    orphan.reaper.open_pidfds -= 1;
    orphan.reaper.queue = std::mem::take(&mut orphan.reaper.waiting_for_files).into();
    assert_eq!(summary(&orphan.signal()), (vec![Signal::SIGTERM], None));
    orphan.kill_and_read();
}

#[test]
fn exit_lets_one_waiting_process_be_opened() {
    let others = [7, 8, 9].map(|pid| ProcessKey { pid, start: 2 });
    for (open, turns) in [(1, 1), (0, 3)] {
        let mut orphan = Orphan::new();
        orphan.claim();
        orphan.reaper.open_queued();
        orphan.reaper.open_pidfds += open;
        let own = orphan.key;
        for other in others {
            orphan.fork(other, own);
            orphan.key = other;
            orphan.claim();
        }
        // This process has exited meanwhile.
        let exited_key = ProcessKey { pid: 6, start: 2 };
        orphan.reaper.waiting_for_files = [exited_key].into_iter().chain(others).collect();
        orphan.reaper.queue.clear();
        orphan.reaper.on_unrecorded_exit(own);
        assert_eq!(orphan.reaper.queue, others[..turns]);
        assert_eq!(orphan.reaper.waiting_for_files, &others[turns..]);
    }
}

#[test]
fn process_without_free_file_waits_for_an_exit() {
    for (others, waits) in [(1, true), (0, false)] {
        let mut orphan = Orphan::new();
        orphan.claim();
        orphan.reaper.signals = Arc::new(NoFiles::default());
        orphan.reaper.open_pidfds += others;
        let failed = ReapOutcome::Failed(ReapFailure::Errno(nix::libc::EMFILE));
        let outcome = (!waits).then_some((failed, None));
        assert_eq!(summary(&orphan.signal()), (vec![], outcome), "{others}");
        assert_eq!(!orphan.reaper.waiting_for_files.is_empty(), waits);
    }
}

#[test]
fn claim_of_signalled_process_is_reported_in_enforce() {
    for (observe, signalled, is_reported) in [
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
        assert_eq!(reported, is_reported, "{observe} {signalled}");
        assert_eq!(orphan.reaper.take_reports().len(), usize::from(is_reported));
        assert_eq!(orphan.reaper.open_escalations(), usize::from(!observe));
    }
}

/// The agent exits at 10 ns, in the first clock tick. A start of 0 may be any time in that tick.
#[test]
fn child_in_tick_of_root_exit_is_left_to_a_signalled_parent() {
    for (is_signalled, start, is_left) in [(true, 0, true), (true, 5, false), (false, 0, false)] {
        let mut orphan = Orphan::new();
        if is_signalled {
            orphan.claim();
            orphan.signal();
        }
        let child = ProcessKey {
            pid: u32::MAX - 1,
            start,
        };
        orphan.fork(child, orphan.key);
        let decision = orphan.model.decide(child);
        assert_eq!(decision.reason, Reason::RootExited);
        assert!(orphan.reaper.claim(&orphan.model, child, &decision));
        let queued = orphan.reaper.queued();
        assert_eq!(queued.is_empty(), is_left, "{is_signalled} {start}");
    }
}

/// Claims the shell with a grace of 3,000 s, and below it a process that exists in the model only.
fn orphan_with_helper() -> (Orphan, ProcessKey) {
    let mut orphan = Orphan::new();
    let helper = ProcessKey {
        pid: u32::MAX - 1,
        start: 5,
    };
    orphan.fork(helper, orphan.key);
    for (key, grace_ns, needed_by) in [
        (orphan.key, 3_000_000_000_000, None),
        (helper, 0, Some(orphan.key)),
    ] {
        let decision = Decision {
            grace_ns,
            needed_by,
            ..orphan.model.decide(key)
        };
        assert!(orphan.reaper.claim(&orphan.model, key, &decision));
    }
    (orphan, helper)
}

#[test]
fn helper_is_left_until_the_program_with_grace_exits() {
    let (mut orphan, helper) = orphan_with_helper();
    let session = orphan.reaper.targets[&helper].escalation;
    assert_eq!(summary(&orphan.signal()), (vec![Signal::SIGTERM], None));
    // The general grace is over.
    orphan
        .reaper
        .update(session, |escalation| escalation.kill(0));
    for _ in 0..2 {
        orphan.reaper.queue_all(session);
        assert_eq!(summary(&orphan.signal()), (vec![], None));
        assert_eq!(orphan.reaper.left[&orphan.key], [helper].into());
    }
    orphan.kill_and_read();
    let (_, unrecorded) = orphan.reaper.confirm_exits();
    assert_eq!(unrecorded, [orphan.key]);
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert_eq!(orphan.reaper.queued(), [helper]);
    assert!(orphan.reaper.left.is_empty());
    assert!(!orphan.reaper.is_left(helper));
    // It has the general grace from now on.
    assert!(orphan.reaper.targets[&helper].kill_at > orphan.reaper.clock.monotonic());
}

#[test]
fn helper_is_signalled_before_the_grace_of_its_program_is_over() {
    let (mut orphan, helper) = orphan_with_helper();
    assert!(orphan.reaper.is_left(helper));
    let now = orphan.reaper.clock.monotonic();
    let program = orphan.reaper.targets.get_mut(&orphan.key).unwrap();
    program.kill_at = now + 600_000_000_000;
    assert!(!orphan.reaper.is_left(helper));
    assert!(orphan.reaper.targets[&helper].kill_at > now);
}

#[test]
fn observe_reports_decision_without_pidfd() {
    let mut orphan = Orphan::new();
    orphan.reaper = reaper(TIMES, true);
    orphan.claim();
    orphan.reaper.signals = Arc::new(NoFiles::default());
    let reports = orphan.signal();
    let observed = ReapOutcome::NotSent(ReleaseReason::ObserveMode);
    assert_eq!(summary(&reports), (vec![], Some((observed, None))));
    assert!(
        matches!(reports[0], ReapEvent::Decided { .. }),
        "{reports:?}"
    );
    assert!(orphan.reaper.queued().is_empty());
    assert_eq!(orphan.kill_and_read(), "");
}

#[test]
fn memory_is_read_once_after_first_signal() {
    let mut orphan = Orphan::new();
    let reads = std::cell::Cell::new(0);
    let read = |pid| {
        reads.set(reads.get() + 1);
        Procfs::default().memory(pid, false)
    };
    orphan.claim();
    orphan.reaper.open_queued();
    orphan.reaper.measure_memory(usize::MAX, read);
    assert_eq!(reads.get(), 0, "before the first signal");
    orphan.signal();
    orphan.reaper.measure_memory(usize::MAX, read);
    orphan.reaper.measure_memory(usize::MAX, read);
    assert_eq!(reads.get(), 1);
    orphan.kill_and_read();
    orphan.reaper.confirm_exits();
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert!(reported_memory(&mut orphan).is_some_and(|memory| memory.rss > 100 << 10));
}

#[test]
fn exited_process_has_no_memory_reading() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.signal();
    orphan.kill_and_read();
    // The memory of another process with the same pid.
    let memory = ProcessMemory {
        rss: 1 << 20,
        ..ProcessMemory::default()
    };
    orphan.reaper.measure_memory(usize::MAX, |_| Some(memory));
    orphan.reaper.on_unrecorded_exit(orphan.key);
    assert_eq!(reported_memory(&mut orphan), None);
}

#[test]
fn living_process_has_no_freed_memory() {
    let mut orphan = Orphan::new();
    orphan.claim();
    orphan.signal();
    orphan
        .reaper
        .measure_memory(usize::MAX, |pid| Procfs::default().memory(pid, false));
    orphan.reaper.stop();
    assert_eq!(reported_memory(&mut orphan), None);
}

/// Returns the memory in the only outcome.
fn reported_memory(orphan: &mut Orphan) -> Option<ProcessMemory> {
    let reports = orphan.reaper.take_reports();
    let outcome = reports.iter().find_map(|report| match report {
        ReapEvent::Outcome { result, .. } => Some(result.memory),
        _ => None,
    });
    outcome.expect("an outcome")
}

fn send_signal(orphan: &Orphan, signal: Signal) {
    let pidfd = Pidfd::open(orphan.key.pid).unwrap();
    send::signal_own(&pidfd, orphan.key.pid, signal).unwrap();
}
