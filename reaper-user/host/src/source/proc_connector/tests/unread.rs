//! Tests of programs that cannot be read in time.

use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::*;
use crate::source::proc_connector::translate::{ATTEMPTS, RETRY_DELAY_NS, UNREAD_MAX};

impl World {
    /// Creates a world with a process whose program could not be read at its exec.
    fn with_unread() -> World {
        let mut w = World::new();
        w.process(10, 1, 500);
        w.fork(START + 1, 1, 10);
        w.file(10, "status", "Uid:\tinvalid\n");
        assert_eq!(w.exec(START + 2, 10), UNREAD);
        w
    }

    /// Retries at a time, and returns the events and the number of programs that are still unread.
    fn retry(&mut self, now: u64) -> (String, usize) {
        self.events_of(|translator, out| translator.retry(now, out))
    }
}

const UNREAD: &str = "exec 10+1 of none uid 1000 ?";
const UNKNOWN: &str = "exec 10+1 of none uid 1000 ";
const READ: &str = "exec 10+1 of 1 uid 1000 /usr/bin/prog";

#[test]
fn program_that_is_read_late_is_reported_then() {
    let mut w = World::with_unread();
    assert_eq!(w.retry(0), (String::new(), 1));
    w.process(10, 1, 500);
    w.process(11, 10, 500);
    assert_eq!(w.retry(1), (String::new(), 1), "not yet");
    // Other messages do not wait for it. Its copy is not read.
    assert_eq!(w.fork(START + 3, 10, 11), "fork 11+3 of 10+1 uid 1000");
    assert_eq!(w.retry(RETRY_DELAY_NS), (READ.into(), 0));
    assert_eq!(w.retry(RETRY_DELAY_NS), (String::new(), 0));
    assert_eq!(w.fork(START + 4, 10, 12), "fork 12+4 of 10+1 uid 1000");
}

#[test]
fn new_uids_are_reported_with_the_program_that_is_read_late() {
    let mut w = World::with_unread();
    w.process(10, 1, 500);
    w.file(10, "status", "Uid:\t5\t1001\t0\t0\n");
    let becomes = ConnectorEvent::Uids {
        thread: 10,
        process: 10,
        uids: Uids {
            real: 5,
            effective: 1001,
        },
    };
    assert_eq!(w.translate(START + 3, becomes), "");
    assert_eq!(w.retry(0), (READ.replace("1000", "5"), 0));
}

#[test]
fn exec_is_reported_with_its_own_time_when_it_is_read() {
    let mut w = World::with_unread();
    w.process(10, 1, 500);
    let mut times = Vec::new();
    let mut out = Output {
        may_have_execed: &mut |_| false,
        sink: &mut |event| times.push(event.time),
    };
    w.translator.retry(0, &mut out);
    assert_eq!(times, [START + 2]);
}

#[test]
fn program_that_cannot_be_read_is_given_up() {
    let mut w = World::with_unread();
    for n in 1..u64::from(ATTEMPTS) {
        assert_eq!(w.retry(n * RETRY_DELAY_NS), (String::new(), 1));
    }
    assert_eq!(w.retry(10 * RETRY_DELAY_NS), (UNKNOWN.into(), 0));
    // Children that it forks from then on are read themselves.
    w.process(11, 10, 500);
    let copy = "fork 11+3 of 10+1 uid 1000, exec 11+3 of 10+1 uid 1000 /usr/bin/prog";
    assert_eq!(w.fork(START + 3, 10, 11), copy);
}

#[test]
fn program_that_ends_before_it_is_read_stays_unknown() {
    // The process has exited.
    let mut w = World::with_unread();
    w.vanish(10);
    assert_eq!(w.retry(0), (UNKNOWN.into(), 0));
    // It has run another program, which is still to be reported.
    let mut w = World::with_unread();
    w.process(10, 1, 500);
    w.execed.push(10);
    assert_eq!(w.retry(0), (UNKNOWN.into(), 0));
    // That exec has been reported.
    let mut w = World::with_unread();
    w.process(10, 1, 500);
    assert_eq!(w.exec(START + 4, 10), format!("{UNKNOWN}, {READ}"));
    assert_eq!(w.retry(0), (String::new(), 0));
    // Its exit has been reported.
    let mut w = World::with_unread();
    w.vanish(10);
    let exit = format!("{UNKNOWN}, exit 10+1 0");
    assert_eq!(w.exit(START + 4, 10, 10, 0), exit);
    assert_eq!(w.retry(0), (String::new(), 0));
}

#[test]
fn copy_of_an_unread_program_is_read_if_its_parent_has_exited() {
    let copied = || {
        let mut w = World::with_unread();
        w.process(11, 10, 500);
        assert_eq!(w.fork(START + 3, 10, 11), "fork 11+3 of 10+1 uid 1000");
        w
    };
    let mut w = copied();
    w.vanish(10);
    w.exit(START + 4, 10, 10, 0);
    let read = "exec 11+3 of none uid 1000 /usr/bin/prog";
    assert_eq!(w.retry(0), (read.into(), 0));
    // The parent's program also counts for the copy.
    let mut w = copied();
    w.process(10, 1, 500);
    assert_eq!(w.retry(0), (READ.into(), 0));
    // The copy executes another program.
    let mut w = copied();
    let own = "exec 11+3 of 10+1 uid 1000 /usr/bin/prog";
    assert_eq!(w.exec(START + 4, 11), own);
    assert_eq!(w.retry(0), (String::new(), 1));
}

#[test]
fn number_of_programs_that_are_read_again_is_bounded() {
    let mut w = World::new();
    for pid in 10..10 + UNREAD_MAX as u32 + 5 {
        w.process(pid, 1, 500);
        w.fork(START + 1, 1, pid);
        w.file(pid, "status", "");
        let mark = if pid < 10 + UNREAD_MAX as u32 {
            "?"
        } else {
            ""
        };
        assert_eq!(
            w.exec(START + 2, pid),
            format!("exec {pid}+1 of none uid 1000 {mark}")
        );
    }
    assert_eq!(w.retry(0).1, UNREAD_MAX);
}

#[test]
fn exit_that_cannot_be_confirmed_counts_as_lost() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.file(10, "stat", "10 (x");
    w.reconcile();
    assert_eq!(w.exec(START + 2, 10), UNREAD, "it may still be alive");
    assert_eq!(w.exit(START + 3, 10, 10, 0), "");
    assert_eq!(w.translator.take_unverified_exits(), 1);
    assert_eq!(w.translator.take_unverified_exits(), 0);
    w.stat(10, 1, 500, 'Z', 1);
    let exit = format!("{UNKNOWN}, exit 10+1 0");
    assert_eq!(w.exit(START + 4, 11, 10, 0), exit);
}

/// Environment variable of the child process in which the test may use up all file descriptors.
const STARVED: &str = "REAPER_TEST_STARVED";

#[test]
fn process_is_not_gone_while_no_file_can_be_opened() {
    const NAME: &str =
        "source::proc_connector::tests::unread::process_is_not_gone_while_no_file_can_be_opened";
    if std::env::var_os(STARVED).is_none() {
        let program = std::env::current_exe().unwrap();
        let mut again = std::process::Command::new(program);
        let run = again.args(["--exact", NAME]).env(STARVED, "1").output();
        let run = run.unwrap();
        let output = String::from_utf8_lossy(&run.stdout);
        assert!(output.contains("1 passed"), "{output}");
        return;
    }
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 64, most).unwrap();
    let mut all = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        all.push(file);
    }
    assert_eq!(w.exec(START + 2, 10), UNREAD);
    assert_eq!(w.exit(START + 3, 10, 10, 0), "");
    all.clear();
    assert_eq!(w.translator.take_unverified_exits(), 1);
    assert_eq!(w.retry(0), (READ.into(), 0));
}

#[test]
fn translation_does_not_wait_for_a_read_that_blocks() {
    let mut w = World::with_read_timeout(Duration::from_millis(200));
    let pids: Vec<u32> = (10..30).collect();
    let mut pipes = Vec::new();
    for pid in &pids {
        w.process(*pid, 1, 500);
        w.fork(START, 1, *pid);
        let pipe = w.dir.path().join(format!("{pid}/cmdline"));
        std::fs::remove_file(&pipe).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        pipes.push(pipe);
    }
    for (n, pid) in pids.into_iter().enumerate() {
        if n == 16 {
            // Beyond the limit on threads no read is started, or this would wait for an hour.
            w.translator.read_timeout = Duration::from_secs(3600);
        }
        // Its program is unread, so it is kept.
        let exec = format!("exec {pid}+0 of none uid 1000 ?");
        assert_eq!(w.exec(START, pid), exec);
    }
    for pipe in &pipes[..16] {
        drop(std::fs::File::options().write(true).open(pipe).unwrap());
    }
    // Once reads return, programs can be read again.
    w.process(40, 1, 500);
    w.fork(START, 1, 40);
    let deadline = Instant::now() + Duration::from_secs(20);
    while w.exec(START, 40) != "exec 40+0 of 1 uid 1000 /usr/bin/prog" {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}
