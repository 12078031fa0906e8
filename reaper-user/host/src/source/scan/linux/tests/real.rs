//! Tests with the real /proc and child processes of the test.

use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::source::Source;
use crate::source::procfs::Procfs;
use crate::source::scan::{Scan, ScanOptions};
use crate::sys;
use reaper_model::event::{Event, EventKind, ExitStatus, ProcessKey, TICK_NS};

/// Time limit for expected events.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Options with rare passes, so that quick events cannot come from passes.
const RARE: ScanOptions = ScanOptions {
    min_interval: Duration::from_millis(20),
    max_interval: Duration::from_secs(600),
};

/// A child process that is killed when dropped.
struct TestChild(Child);

impl TestChild {
    fn new(script: &str) -> TestChild {
        TestChild(
            Command::new("/bin/sh")
                .args(["-c", script])
                .spawn()
                .unwrap(),
        )
    }

    fn key(&self) -> ProcessKey {
        let pid = self.0.id();
        let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        ProcessKey { pid, start }
    }
}

impl Drop for TestChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for an event as the engine does.
fn await_event<T>(scan: &mut Scan, what: &str, is: impl Fn(&Event) -> Option<T>) -> T {
    let started = Instant::now();
    while started.elapsed() < TIMEOUT {
        let mut found = None;
        scan.drain(&mut |event| found = found.take().or_else(|| is(&event)));
        if let Some(found) = found {
            return found;
        }
        let mut fds = [PollFd::new(scan.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(1000u16)).unwrap();
    }
    panic!("no {what} within {TIMEOUT:?}");
}

fn exit_of(of: ProcessKey) -> impl Fn(&Event) -> Option<ExitStatus> {
    move |event| match event.kind {
        EventKind::Exit {
            key,
            exit_status: status,
            ..
        } if key == of => Some(status),
        _ => None,
    }
}

fn birth_of(pid: u32) -> impl Fn(&Event) -> Option<(ProcessKey, u64)> {
    move |event| match &event.kind {
        EventKind::Discovered(row) if row.key.pid == pid => Some((row.key, row.pidfd_inode)),
        _ => None,
    }
}

#[test]
fn child_is_discovered_held_and_its_exit_reported() {
    let mut scan = Scan::open(&RARE).unwrap();
    scan.drain(&mut |_| {});
    let mut child = TestChild::new("exec sleep 1000");
    scan.schedule.on_activity();
    scan.set_timer();
    let (key, inode) = await_event(&mut scan, "birth", birth_of(child.0.id()));
    assert_eq!(key, child.key());
    let pidfd = sys::pidfd::Pidfd::open(key.pid).unwrap();
    assert_eq!(inode, pidfd.unique_inode().unwrap_or(0));
    assert!(!scan.confirms_identity(key));
    scan.watch_exit(key, true);
    assert!(scan.confirms_identity(key));
    // Not confirmed while its program is unread, or after a failed pass.
    scan.unread.insert(key.pid);
    assert!(!scan.confirms_identity(key));
    scan.scan_now();
    scan.drain(&mut |_| {});
    assert!(scan.confirms_identity(key));
    scan.is_failing = true;
    assert!(!scan.confirms_identity(key));
    scan.is_failing = false;
    child.0.kill().unwrap();
    let status = await_event(&mut scan, "end", exit_of(key));
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    assert_eq!(status, killed, "the status of its zombie is readable");
    assert!(!scan.confirms_identity(key));
    assert!(scan.watched.is_empty());
    // The exit is reported only once.
    scan.schedule.on_exit(sys::monotonic());
    scan.drain(&mut |event| assert_eq!(exit_of(key)(&event), None));
}

#[test]
fn exit_status_is_read_from_the_zombie_even_if_it_is_zero() {
    for status in [0, 3] {
        let mut scan = Scan::open(&RARE).unwrap();
        let mut child = Command::new("/bin/sh")
            .args(["-c", &format!("read x; exit {status}")])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .map(TestChild)
            .unwrap();
        let key = child.key();
        scan.watch_exit(key, true);
        child.0.stdin.take();
        let found = await_event(&mut scan, "end", exit_of(key));
        // Older kernels show 0 both for a hidden status and for a status of 0.
        assert!(
            found == ExitStatus::Exited(status) || status == 0 && found == ExitStatus::Unknown,
            "{found:?}"
        );
    }
}

#[test]
fn process_with_another_start_is_not_held() {
    let mut scan = Scan::open(&RARE).unwrap();
    let child = TestChild::new("exec sleep 1000");
    let key = child.key();
    // An earlier process with the same pid.
    let before = ProcessKey {
        start: key.start - TICK_NS,
        ..key
    };
    scan.watch_exit(before, true);
    assert!(!scan.confirms_identity(before) && !scan.confirms_identity(key));
    scan.watch_exit(key, true);
    assert!(scan.confirms_identity(key) && !scan.confirms_identity(before));
    // The key of another source is exact to the ns.
    let exact = ProcessKey {
        start: key.start + 1,
        ..key
    };
    assert!(scan.confirms_identity(exact));
    scan.watch_exit(before, true);
    scan.watch_exit(before, false);
    assert!(scan.confirms_identity(key), "that was another process");
    scan.watch_exit(key, false);
    assert!(!scan.confirms_identity(key));
    assert_eq!((scan.held_count, scan.watched.len()), (0, 0));
}

#[test]
fn process_without_pidfd_is_confirmed_once_one_is_free() {
    let mut scan = Scan::open(&RARE).unwrap();
    scan.drain(&mut |_| {});
    scan.held_max = 1;
    let [mut first, second] = [(); 2].map(|()| TestChild::new("exec sleep 1000"));
    let keys = [first.key(), second.key()];
    keys.iter().for_each(|key| scan.watch_exit(*key, true));
    assert!(scan.confirms_identity(keys[0]) && !scan.confirms_identity(keys[1]));
    assert_eq!(scan.pidfd_error(), Some(Errno::EMFILE));
    first.0.kill().unwrap();
    await_event(&mut scan, "end", exit_of(keys[0]));
    // The pass after the exit opens the missing pidfd.
    let started = Instant::now();
    while !scan.confirms_identity(keys[1]) && started.elapsed() < TIMEOUT {
        await_event(&mut scan, "any", |_| None::<()>.or(Some(())));
    }
    assert!(scan.confirms_identity(keys[1]));
    scan.scan_now();
    scan.drain(&mut drop);
    assert_eq!(scan.pidfd_error(), None);
}

#[test]
fn without_pidfds_no_process_is_confirmed_and_passes_find_exits() {
    let mut scan = Scan::open(&RARE).unwrap();
    assert_eq!(scan.pidfd_refused, None);
    scan.pidfd_refused = Some(Errno::EPERM);
    let mut child = TestChild::new("exec sleep 1000");
    let key = child.key();
    scan.schedule.on_activity();
    scan.set_timer();
    await_event(&mut scan, "birth", birth_of(key.pid));
    scan.watch_exit(key, true);
    assert!(!scan.confirms_identity(key) && scan.watched.contains_key(&key.pid));
    child.0.kill().unwrap();
    let started = Instant::now();
    let mut found = None;
    while found.is_none() && started.elapsed() < TIMEOUT {
        scan.scan_now();
        scan.drain(&mut |event| found = found.or_else(|| exit_of(key)(&event)));
    }
    assert_eq!(found, Some(ExitStatus::Unknown));
    assert_eq!((scan.held_count, scan.watched.len()), (0, 0));
    assert_eq!(scan.pidfd_error(), Some(Errno::EPERM));
}

#[test]
fn process_is_reported_after_the_tick_of_its_start() {
    let mut scan = Scan::open(&RARE).unwrap();
    scan.drain(&mut |_| {});
    for _ in 0..10 {
        let child = TestChild::new("exec sleep 1000");
        scan.schedule.on_exit(sys::monotonic());
        scan.set_timer();
        let pid = child.0.id();
        let (key, time) = await_event(&mut scan, "birth", |event| {
            birth_of(pid)(event).map(|(key, _)| (key, event.time))
        });
        assert!(time >= key.start + TICK_NS);
    }
}

#[test]
fn missing_proc_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none");
    let error = Scan::of(&none, &ScanOptions::default()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "cannot list the processes in /proc: ENOENT: No such file or directory; check that /proc is mounted and readable"
    );
}
