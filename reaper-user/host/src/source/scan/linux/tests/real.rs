//! The real /proc, and children of this test.

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

/// For something to come that comes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Passes are few: what comes at once does not come of them.
const RARE: ScanOptions = ScanOptions {
    min_interval: Duration::from_millis(20),
    max_interval: Duration::from_secs(600),
};

struct Own(Child);

impl Own {
    fn new(script: &str) -> Own {
        Own(Command::new("/bin/sh")
            .args(["-c", script])
            .spawn()
            .unwrap())
    }

    fn key(&self) -> ProcessKey {
        let pid = self.0.id();
        let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
        ProcessKey { pid, start }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for an event as the engine does.
fn await_event<T>(scan: &mut Scan, what: &str, is: impl Fn(&Event) -> Option<T>) -> T {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let mut found = None;
        scan.drain(&mut |event| found = found.take().or_else(|| is(&event)));
        if let Some(found) = found {
            return found;
        }
        let mut fds = [PollFd::new(scan.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(1000u16)).unwrap();
    }
    panic!("no {what} within {PATIENCE:?}");
}

fn ended(of: ProcessKey) -> impl Fn(&Event) -> Option<ExitStatus> {
    move |event| match event.kind {
        EventKind::Exit {
            key,
            exit_status: ended,
            ..
        } if key == of => Some(ended),
        _ => None,
    }
}

fn seen(pid: u32) -> impl Fn(&Event) -> Option<(ProcessKey, u64)> {
    move |event| match &event.kind {
        EventKind::Discovered(seen) if seen.key.pid == pid => Some((seen.key, seen.pidfd_inode)),
        _ => None,
    }
}

#[test]
fn a_child_is_found_followed_and_told_to_have_ended() {
    let mut scan = Scan::open(&RARE).unwrap();
    scan.drain(&mut |_| {});
    let mut child = Own::new("exec sleep 1000");
    scan.pace.on_activity();
    scan.arm();
    let (key, inode) = await_event(&mut scan, "birth", seen(child.0.id()));
    assert_eq!(key, child.key());
    let pidfd = sys::pidfd::Pidfd::open(key.pid).unwrap();
    assert_eq!(inode, pidfd.unique_inode().unwrap_or(0));
    assert!(!scan.confirms_identity(key));
    scan.watch_exit(key, true);
    assert!(scan.confirms_identity(key));
    // What it runs by now is not known, nor is anything after a pass that failed.
    scan.unread.insert(key.pid);
    assert!(!scan.confirms_identity(key));
    scan.scan_now();
    scan.drain(&mut |_| {});
    assert!(scan.confirms_identity(key));
    scan.failing = true;
    assert!(!scan.confirms_identity(key));
    scan.failing = false;
    child.0.kill().unwrap();
    let how = await_event(&mut scan, "end", ended(key));
    let killed = ExitStatus::Signalled {
        signal: 9,
        core: false,
    };
    assert_eq!(how, killed, "it is a zombie whose status may be read");
    assert!(!scan.confirms_identity(key));
    assert!(scan.watched.is_empty());
    // Once is enough.
    scan.pace.on_exit(sys::monotonic());
    scan.drain(&mut |event| assert_eq!(ended(key)(&event), None));
}

#[test]
fn how_one_ended_is_known_by_its_zombie_also_where_that_is_nothing() {
    for status in [0, 3] {
        let mut scan = Scan::open(&RARE).unwrap();
        let mut child = Command::new("/bin/sh")
            .args(["-c", &format!("read x; exit {status}")])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .map(Own)
            .unwrap();
        let key = child.key();
        scan.watch_exit(key, true);
        child.0.stdin.take();
        let how = await_event(&mut scan, "end", ended(key));
        // Older kernels do not say which of two nothings it is.
        assert!(
            how == ExitStatus::Exited(status) || status == 0 && how == ExitStatus::Unknown,
            "{how:?}"
        );
    }
}

#[test]
fn one_that_is_another_by_now_is_not_held() {
    let mut scan = Scan::open(&RARE).unwrap();
    let child = Own::new("exec sleep 1000");
    let key = child.key();
    // Its predecessor.
    let before = ProcessKey {
        start: key.start - TICK_NS,
        ..key
    };
    scan.watch_exit(before, true);
    assert!(!scan.confirms_identity(before) && !scan.confirms_identity(key));
    scan.watch_exit(key, true);
    assert!(scan.confirms_identity(key) && !scan.confirms_identity(before));
    // Known to the ns by somebody else.
    let exact = ProcessKey {
        start: key.start + 1,
        ..key
    };
    assert!(scan.confirms_identity(exact));
    scan.watch_exit(before, true);
    scan.watch_exit(before, false);
    assert!(scan.confirms_identity(key), "that was about another");
    scan.watch_exit(key, false);
    assert!(!scan.confirms_identity(key));
    assert_eq!((scan.held, scan.watched.len()), (0, 0));
}

#[test]
fn for_whom_there_is_no_room_nobody_vouches_until_there_is() {
    let mut scan = Scan::open(&RARE).unwrap();
    scan.drain(&mut |_| {});
    scan.held_max = 1;
    let [mut first, second] = [(); 2].map(|()| Own::new("exec sleep 1000"));
    let keys = [first.key(), second.key()];
    keys.iter().for_each(|key| scan.watch_exit(*key, true));
    assert!(scan.confirms_identity(keys[0]) && !scan.confirms_identity(keys[1]));
    assert_eq!(scan.pidfd_error(), Some(Errno::EMFILE));
    first.0.kill().unwrap();
    await_event(&mut scan, "end", ended(keys[0]));
    // The pass after that finds room.
    let begun = Instant::now();
    while !scan.confirms_identity(keys[1]) && begun.elapsed() < PATIENCE {
        await_event(&mut scan, "any", |_| None::<()>.or(Some(())));
    }
    assert!(scan.confirms_identity(keys[1]));
    scan.scan_now();
    scan.drain(&mut drop);
    assert_eq!(scan.pidfd_error(), None);
}

#[test]
fn where_pidfds_are_refused_nobody_is_vouched_for_and_ends_are_found_by_looking() {
    let mut scan = Scan::open(&RARE).unwrap();
    assert_eq!(scan.refused, None);
    scan.refused = Some(Errno::EPERM);
    let mut child = Own::new("exec sleep 1000");
    let key = child.key();
    scan.pace.on_activity();
    scan.arm();
    await_event(&mut scan, "birth", seen(key.pid));
    scan.watch_exit(key, true);
    assert!(!scan.confirms_identity(key) && scan.watched.contains_key(&key.pid));
    child.0.kill().unwrap();
    let begun = Instant::now();
    let mut found = None;
    while found.is_none() && begun.elapsed() < PATIENCE {
        scan.scan_now();
        scan.drain(&mut |event| found = found.or_else(|| ended(key)(&event)));
    }
    assert_eq!(found, Some(ExitStatus::Unknown));
    assert_eq!((scan.held, scan.watched.len()), (0, 0));
    assert_eq!(scan.pidfd_error(), Some(Errno::EPERM));
}

#[test]
fn the_tick_of_a_birth_is_over_before_it_is_told() {
    let mut scan = Scan::open(&RARE).unwrap();
    scan.drain(&mut |_| {});
    for _ in 0..10 {
        let child = Own::new("exec sleep 1000");
        scan.pace.on_exit(sys::monotonic());
        scan.arm();
        let pid = child.0.id();
        let (key, time) = await_event(&mut scan, "birth", |event| {
            seen(pid)(event).map(|(key, _)| (key, event.time))
        });
        assert!(time >= key.start + TICK_NS);
    }
}

#[test]
fn a_proc_that_cannot_be_listed_is_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none");
    let error = Scan::of(&none, &ScanOptions::default()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "cannot list the processes in /proc: ENOENT: No such file or directory; mount it"
    );
}
