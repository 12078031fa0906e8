//! What /proc does not tell when it is asked.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::*;
use crate::source::proc_connector::translate::again::{LOOK_AFTER, TRIES, UNREAD_MAX};

impl World {
    /// What another look finds at a time, and how many are left to be looked at after it.
    fn again(&mut self, now: u64) -> (String, usize) {
        let mut told = Vec::new();
        let mut sink = |event| told.push(short(&event));
        let left = self.translator.look_again(now, &mut sink);
        (told.join(", "), left)
    }
}

#[test]
fn what_could_not_be_read_is_read_later() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.file(10, "status", "Uid:\tnobody\n");
    assert_eq!(w.exec(START + 2, 10), "exec 10+1 of nobody uid 1000 ");
    assert_eq!(w.again(0), (String::new(), 1));
    w.process(10, 1, 500);
    let told = "exec 10+1 of 1 uid 1000 /usr/bin/prog";
    assert_eq!(w.again(0), (told.into(), 0));
    assert_eq!(w.again(0), (String::new(), 0));
}

#[test]
fn what_cannot_be_read_is_not_gone() {
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.file(10, "stat", "10 (x");
    w.survey();
    assert_eq!(w.exec(START + 2, 10), "exec 10+1 of nobody uid 1000 ");
    assert_eq!(w.exit(START + 3, 10, 10, 0), "");
    w.stat(10, 1, 500, 'Z', 1);
    assert_eq!(w.exit(START + 4, 11, 10, 0), "exit 10+1 0");
}

#[test]
fn an_end_that_could_not_be_read_is_looked_for_a_few_times() {
    let nothing = |left| (String::new(), left);
    let begun = || {
        let mut w = World::new();
        w.process(10, 1, 500);
        w.fork(START + 1, 1, 10);
        w.file(10, "stat", "10 (x");
        // Of its other threads too.
        for thread in 10..13 {
            assert_eq!(w.exit(START + 3, thread, 10, 3 << 8), "");
        }
        w
    };
    let mut w = begun();
    assert_eq!(w.again(0), nothing(1));
    w.vanish(10);
    assert_eq!(w.again(1), nothing(1), "not yet");
    let soon = LOOK_AFTER;
    assert_eq!(w.again(soon), ("exit 10+1 3 inferred".into(), 0));
    assert_eq!(w.translator.take_missed(), 0);
    // It lives, and has lost its first thread, or none.
    for state in ['Z', 'S'] {
        let mut w = begun();
        w.stat(10, 1, 500, state, 2);
        assert_eq!(w.again(soon), nothing(0));
        w.vanish(10);
        let last = w.exit(START + 4, 12, 10, 9);
        assert_eq!(last, if state == 'Z' { "exit 10+1 by 9" } else { "" });
    }
    // It has begun anew.
    let mut w = begun();
    w.process(10, 1, 500);
    w.exec(START + 4, 10);
    w.vanish(10);
    assert_eq!(w.again(soon), nothing(0));
    // There is no telling for long.
    let mut w = begun();
    for n in 0..u64::from(TRIES) {
        assert_eq!(w.again(n * soon), nothing(1));
    }
    assert_eq!(w.again(10 * soon), nothing(0));
    assert_eq!(w.translator.take_missed(), 1);
    assert_eq!(w.translator.take_missed(), 0);
}

#[test]
fn there_is_a_bound_on_those_who_are_looked_for() {
    let mut w = World::new();
    let all: Vec<u32> = (10..10 + UNREAD_MAX as u32 + 5).collect();
    for pid in &all {
        w.process(*pid, 1, 500);
        w.fork(START + 1, 1, *pid);
        w.file(*pid, "stat", "");
        w.exit(START + 2, *pid, *pid, 0);
    }
    assert_eq!(w.translator.take_missed(), 5);
    assert_eq!(w.again(0), (String::new(), UNREAD_MAX));
}

/// Set in a process of this test's own, which may use up its open files.
const STARVED: &str = "REAPER_TEST_STARVED";

#[test]
fn an_end_is_told_once_there_are_open_files_again() {
    const NAME: &str =
        "source::proc_connector::tests::unread::an_end_is_told_once_there_are_open_files_again";
    if std::env::var_os(STARVED).is_none() {
        let program = std::env::current_exe().unwrap();
        let mut again = std::process::Command::new(program);
        let run = again.args(["--exact", NAME]).env(STARVED, "1").output();
        let run = run.unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(said.contains("1 passed"), "{said}");
        return;
    }
    let mut w = World::new();
    w.process(10, 1, 500);
    w.fork(START + 1, 1, 10);
    w.vanish(10);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 64, most).unwrap();
    let mut all = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        all.push(file);
    }
    assert_eq!(w.exit(START + 2, 10, 10, 0), "");
    assert_eq!(w.again(0), (String::new(), 1));
    all.clear();
    let told = "exit 10+1 0 inferred";
    assert_eq!(w.again(LOOK_AFTER), (told.into(), 0));
}

#[test]
fn nobody_waits_for_a_process_that_holds_its_reader() {
    let mut w = World::patient(Duration::from_millis(200));
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
    let began = Instant::now();
    for pid in pids {
        // Unknown, and so kept.
        let exec = format!("exec {pid}+0 of nobody uid 1000 ");
        assert_eq!(w.exec(START, pid), exec);
    }
    assert!(
        began.elapsed() < Duration::from_millis(19 * 200),
        "those that are over the bound are not waited for"
    );
    for pipe in &pipes[..16] {
        drop(std::fs::File::options().write(true).open(pipe).unwrap());
    }
    // Once they are loose there is room again.
    w.process(40, 1, 500);
    w.fork(START, 1, 40);
    let deadline = Instant::now() + Duration::from_secs(20);
    while w.exec(START, 40) != "exec 40+0 of 1 uid 1000 /usr/bin/prog" {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}
