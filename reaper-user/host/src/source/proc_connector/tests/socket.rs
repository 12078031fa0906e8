//! Tests of error messages, and tests with the kernel's connector and a real process.

use std::process::{Command, Stdio};
use std::time::Instant;

use nix::errno::Errno;

use super::*;
use crate::source::proc_connector::listener::ANSWER_TIMEOUT;

/// Returns a source whose socket fails.
fn broken() -> ProcConnector {
    ProcConnector {
        inbox: Inbox::new(Listener::broken(), Vec::new()),
        translator: Translator::new(
            Procfs::new("/nowhere"),
            Box::new(pidfd_inode),
            ANSWER_TIMEOUT,
        ),
        falls_behind: false,
        reconcile_after_ns: None,
        backlog_age_ns: 0,
        growing_drains: 0,
        suspended_ns: 0,
    }
}

#[test]
fn failed_socket_is_reported_and_not_read_forever() {
    let mut connector = broken();
    assert!(connector.failure().is_none());
    assert_eq!(connector.drain(&mut drop), Drained::default());
    let failure = connector.failure().expect("it has failed").to_string();
    assert!(failure.contains("events: ENOTSOCK"), "{failure}");
}

#[test]
fn only_a_growing_backlog_fails_the_source() {
    let old = sys::monotonic() - 2 * BACKLOG_AGE_MAX_NS;
    let mut connector = broken();
    for step in 0..=u64::from(GROWING_DRAINS_MAX) {
        assert!(connector.failure().is_none());
        // A service that was stopped finds old messages, and catches up.
        connector.check_backlog(Some(old + step * 10_000_000));
    }
    assert!(connector.failure().is_none());
    for _ in 0..=GROWING_DRAINS_MAX {
        assert!(connector.failure().is_none());
        connector.check_backlog(Some(old));
    }
    let failure = connector.failure().expect("the source fails").to_string();
    assert!(failure.contains("faster than"), "{failure}");
}

#[test]
fn errors_say_what_to_do() {
    for (error, word) in [
        (
            ConnectorError::open(Errno::EPROTONOSUPPORT),
            "CONFIG_CONNECTOR",
        ),
        (ConnectorError::open(Errno::EPERM), "as root"),
        (
            ConnectorError::request(Errno::ECONNREFUSED),
            "network namespace",
        ),
        (ConnectorError::answer(libc::EPERM as u32), "as root"),
        (
            ConnectorError::answer(libc::EPERM.wrapping_neg() as u32),
            "as root",
        ),
        (ConnectorError::answer(libc::EINVAL as u32), "EINVAL"),
        (ConnectorError::Silent, "pid and user namespace"),
    ] {
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn real_process_is_reported_from_fork_to_exit() {
    if let Err(error) = probe() {
        eprintln!("skipped: {error}");
        return;
    }
    // The kernel may lack memory for a message, which then counts as lost.
    assert!(
        (0..5).any(|_| reports_a_process_without_loss()),
        "messages were lost in each attempt"
    );
}

#[test]
fn answer_is_read_although_the_buffer_overflows() {
    if let Err(error) = probe() {
        eprintln!("skipped: {error}");
        return;
    }
    let (listener, own) = Listener::request(1).unwrap();
    // The kernel's smallest buffer still holds a few messages.
    for _ in 0..30 {
        assert!(Command::new("/bin/true").status().unwrap().success());
    }
    let mut early = Vec::new();
    listener.await_answer(own, &mut early).unwrap();
    assert!(early.len() < 60, "the buffer did not overflow");
}

/// Starts a process and checks the reported events. Returns false if messages were lost.
fn reports_a_process_without_loss() -> bool {
    let mut source = ProcConnector::open(1 << 20).unwrap();
    let mut child = Command::new("/bin/true")
        .arg("a mark")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let (pid, me) = (child.id(), std::process::id());
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut kinds = Vec::new();
    let mut keys = Vec::new();
    while !kinds.contains(&"exit") {
        if source.lost() != Lost::default() {
            child.wait().unwrap();
            return false;
        }
        assert!(Instant::now() < deadline, "{kinds:?}");
        source.inbox.listener.0.wait(Duration::from_millis(100));
        source.drain(&mut |event| match event.kind {
            EventKind::Fork {
                child,
                parent,
                pidfd_inode,
                ..
            } if child.pid == pid => {
                assert_eq!(parent.map(|key| key.pid), Some(me));
                assert_eq!(pidfd_inode, super::super::pidfd_inode(pid));
                keys.push(child);
                kinds.push("fork");
            }
            EventKind::Exec { key, image, .. } if key.pid == pid => {
                // The process may have exited before its program was read.
                assert!(image.argv.is_empty() || image.argv.ends_with(b"\0a mark\0"));
                keys.push(key);
                kinds.push("exec");
            }
            EventKind::Exit {
                key,
                exit_status: ended,
                ..
            } if key.pid == pid => {
                assert_eq!(ended, ExitStatus::Exited(0));
                keys.push(key);
                kinds.push("exit");
            }
            _ => {}
        });
    }
    let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
    child.wait().unwrap();
    assert_eq!(kinds, ["fork", "exec", "exit"]);
    assert!(keys.iter().all(|key| *key == keys[0]));
    assert!(keys[0].has_same_tick(ProcessKey { pid, start }));
    true
}

#[test]
fn inode_distinguishes_processes_with_the_same_pid_and_tick() {
    let mut identities = identity::IdentityReader::new(&Procfs::default(), Box::new(pidfd_inode));
    let pid = std::process::id();
    let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
    let mut state = |number| identities.state(ProcessKey { pid, start }, number);
    let lives = |state| matches!(state, identity::State::Lives { .. });
    assert!(lives(state(0)) && lives(state(pidfd_inode(pid))));
    // Kernels before 6.9 have no such numbers.
    let other = state(pidfd_inode(pid) + 1);
    assert!(other == identity::State::Gone || pidfd_inode(pid) == 0);
}
