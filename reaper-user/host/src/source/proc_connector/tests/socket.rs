//! What is said where it cannot be used, and a real process.

use std::process::{Command, Stdio};
use std::time::Instant;

use nix::errno::Errno;

use super::*;
use crate::source::proc_connector::listening::PATIENCE;

/// One that is told nothing.
fn deaf() -> ProcConnector {
    ProcConnector {
        inbox: Inbox::new(Listening::deaf(), Vec::new()),
        translator: Translator::new(Procfs::new("/nowhere"), Box::new(number), PATIENCE),
        outrun: false,
        survey_after: None,
        delay: 0,
        grown: 0,
        behind: 0,
    }
}

#[test]
fn a_socket_that_fails_is_told_of_and_not_read_again_and_again() {
    let mut connector = deaf();
    assert!(connector.failure().is_none());
    assert_eq!(connector.drain(&mut drop), Drained::default());
    let failure = connector.failure().expect("it has failed").to_string();
    assert!(failure.contains("nothing any more: ENOTSOCK"), "{failure}");
}

#[test]
fn one_that_falls_back_for_long_is_given_up_and_one_that_catches_up_is_not() {
    let old = sys::monotonic() - 2 * DELAY_MAX;
    let mut connector = deaf();
    for step in 0..=u64::from(GROWN_MAX) {
        assert!(connector.failure().is_none());
        // A stopped service finds much that is old, and works it off.
        connector.look_for_delay(Some(old + step * 10_000_000));
    }
    assert!(connector.failure().is_none());
    for _ in 0..=GROWN_MAX {
        assert!(connector.failure().is_none());
        connector.look_for_delay(Some(old));
    }
    let failure = connector.failure().expect("it is given up").to_string();
    assert!(failure.contains("more than can be read"), "{failure}");
}

#[test]
fn each_reason_says_what_to_do() {
    for (error, word) in [
        (
            ConnectorError::open(Errno::EPROTONOSUPPORT),
            "CONFIG_CONNECTOR",
        ),
        (ConnectorError::open(Errno::EPERM), "as root"),
        (
            ConnectorError::ask(Errno::ECONNREFUSED),
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
fn a_real_life() {
    if let Err(error) = probe() {
        eprintln!("left out: {error}");
        return;
    }
    // The kernel may be short of memory for a message, and says so.
    assert!(
        (0..5).any(|_| is_told_of_a_life()),
        "something was lost each time"
    );
}

#[test]
fn a_flood_before_the_answer_is_read_does_not_hide_it() {
    if let Err(error) = probe() {
        eprintln!("left out: {error}");
        return;
    }
    let (listening, own) = Listening::ask(1).unwrap();
    // The kernel gives room for a few all the same.
    for _ in 0..30 {
        assert!(Command::new("/bin/true").status().unwrap().success());
    }
    let mut early = Vec::new();
    listening.await_answer(own, &mut early).unwrap();
    assert!(early.len() < 60, "not all have found room");
}

/// Whether nothing was lost of what the kernel tells meanwhile.
fn is_told_of_a_life() -> bool {
    let mut source = ProcConnector::open(1 << 20).unwrap();
    let mut child = Command::new("/bin/true")
        .arg("a mark")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let (pid, me) = (child.id(), std::process::id());
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut story = Vec::new();
    let mut names = Vec::new();
    while !story.contains(&"exit") {
        if source.lost() != Lost::default() {
            child.wait().unwrap();
            return false;
        }
        assert!(Instant::now() < deadline, "{story:?}");
        source.inbox.listening.0.wait(Duration::from_millis(100));
        source.drain(&mut |event| match event.kind {
            EventKind::Fork {
                child,
                parent,
                pidfd_inode,
                ..
            } if child.pid == pid => {
                assert_eq!(parent.map(|key| key.pid), Some(me));
                assert_eq!(pidfd_inode, number(pid));
                names.push(child);
                story.push("fork");
            }
            EventKind::Exec { key, image, .. } if key.pid == pid => {
                // It may have been gone before what it ran was looked at.
                assert!(image.argv.is_empty() || image.argv.ends_with(b"\0a mark\0"));
                names.push(key);
                story.push("exec");
            }
            EventKind::Exit {
                key,
                exit_status: ended,
                ..
            } if key.pid == pid => {
                assert_eq!(ended, ExitStatus::Exited(0));
                names.push(key);
                story.push("exit");
            }
            _ => {}
        });
    }
    let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
    child.wait().unwrap();
    assert_eq!(story, ["fork", "exec", "exit"]);
    assert!(names.iter().all(|name| *name == names[0]));
    assert!(names[0].has_same_tick(ProcessKey { pid, start }));
    true
}

#[test]
fn a_number_tells_from_whoever_has_pid_and_tick() {
    let mut glimpses = glimpse::Glimpses::new(&Procfs::default(), Box::new(number));
    let pid = std::process::id();
    let start = Procfs::default().start_ticks(pid).unwrap() * TICK_NS;
    let mut state = |number| glimpses.state(ProcessKey { pid, start }, number);
    let lives = |state| matches!(state, glimpse::State::Lives { .. });
    assert!(lives(state(0)) && lives(state(number(pid))));
    // Kernels before 6.9 have none by which that could be told.
    let other = state(number(pid) + 1);
    assert!(other == glimpse::State::Gone || number(pid) == 0);
}
