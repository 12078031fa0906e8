//! What /proc does not tell when it is asked.

use std::iter;
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::*;
use crate::source::proc_connector::translate::again::LOOK_AFTER;
use crate::source::proc_connector::translate::held::HELD_MAX;
use crate::source::proc_connector::translate::unread::{TRIES, UNREAD_MAX};

impl World {
    /// What another look finds at a time, and how many are left to be looked at after it.
    fn again(&mut self, now: u64) -> (String, usize) {
        let mut told = Vec::new();
        let mut sink = |event| told.push(short(&event));
        let mut has_moved_on = |pid| self.moved_on.contains(&pid);
        let left = self
            .translator
            .look_again(now, &mut has_moved_on, &mut sink);
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
    assert_eq!(w.again(1), (String::new(), 1), "not yet");
    assert_eq!(w.again(LOOK_AFTER), (READ.into(), 0));
    assert_eq!(w.again(LOOK_AFTER), (String::new(), 0));
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
    for (n, pid) in pids.into_iter().enumerate() {
        if n == 16 {
            // Whoever waited for one that is over the bound would wait for ever.
            w.translator.programs.patience = Duration::from_secs(3600);
        }
        // Unknown, and so kept.
        let exec = format!("exec {pid}+0 of nobody uid 1000 ");
        assert_eq!(w.exec(START, pid), exec);
    }
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

impl World {
    /// One that has run a program which cannot be read in time, and another that it has made since.
    fn with_unread() -> World {
        let mut w = World::new();
        w.process(10, 1, 500);
        w.fork(START + 1, 1, 10);
        w.file(10, "status", "Uid:\tnobody\n");
        assert_eq!(w.exec(START + 2, 10), "exec 10+1 of nobody uid 1000 ");
        w.process(11, 10, 500);
        assert_eq!(w.fork(START + 3, 10, 11), "", "it waits");
        w
    }
}

impl World {
    /// Tells of so many that there is no room for them to wait; gives what is told of all then.
    fn overflow(&mut self) -> String {
        let mut pids = 12..HELD_MAX as u32;
        let mut told = iter::from_fn(|| Some(self.fork(START + 4, 11, pids.next()?)));
        told.find(|told| !told.is_empty()).unwrap_or_default()
    }
}

const FORKED: &str = "fork 11+3 of 10+1 uid 1000";
const READ: &str = "exec 10+1 of 1 uid 1000 /usr/bin/prog";

#[test]
fn who_is_made_by_one_that_could_not_be_read_is_told_after_what_that_runs() {
    let mut w = World::with_unread();
    w.process(12, 11, 500);
    // Of that one too, whatever it does.
    assert_eq!(w.fork(START + 4, 11, 12), "");
    assert_eq!(w.exec(START + 5, 12), "");
    w.vanish(11);
    assert_eq!(w.exit(START + 6, 11, 11, 0), "");
    // Others do not wait.
    w.process(20, 1, 500);
    assert_eq!(w.fork(START + 7, 1, 20), "fork 20+7 of 1 uid 1000");
    assert_eq!(w.again(0), (String::new(), 2));
    w.process(10, 1, 500);
    let all = [
        READ,
        FORKED,
        "fork 12+4 of 11+3 uid 1000",
        "exec 12+4 of 11+3 uid 1000 /usr/bin/prog",
        "exit 11+3 0",
    ];
    assert_eq!(w.again(LOOK_AFTER), (all.join(", "), 0));
    assert_eq!(w.fork(START + 8, 10, 13), "fork 13+8 of 10+1 uid 1000");
}

#[test]
fn a_copy_of_one_that_is_read_late_is_no_program_of_its_own() {
    let mut w = World::with_unread();
    w.process(12, 11, 500);
    assert_eq!(w.fork(START + 4, 11, 12), "");
    w.vanish(11);
    assert_eq!(w.exit(START + 5, 11, 11, 0), "");
    assert_eq!(w.again(0).0, "");
    w.process(10, 1, 500);
    let all = [READ, FORKED, "fork 12+4 of 11+3 uid 1000", "exit 11+3 0"];
    assert_eq!(w.again(LOOK_AFTER), (all.join(", "), 0));
}

const COPY: &str = "exec 11+3 of 10+1 uid 1000 /usr/bin/prog";

#[test]
fn what_waits_is_told_when_nobody_can_know_better() {
    // It is not to be read.
    let mut w = World::with_unread();
    for n in 0..u64::from(TRIES) {
        assert_eq!(w.again(n * LOOK_AFTER), (String::new(), 2));
    }
    assert_eq!(w.again(10 * LOOK_AFTER), ([FORKED, COPY].join(", "), 0));
    // It has ended, and its copy is asked.
    let mut w = World::with_unread();
    w.vanish(10);
    assert_eq!(w.exit(START + 4, 10, 10, 0), FORKED);
    w.process(11, 1, 500);
    let copy = COPY.replace("10+1", "1");
    assert_eq!(w.again(0), ([&copy, "exit 10+1 0"].join(", "), 0));
}

#[test]
fn whoever_was_made_before_the_next_program_is_told_of_before_it() {
    // It has run another, of which all is known.
    let mut w = World::with_unread();
    w.process(10, 1, 500);
    assert_eq!(w.exec(START + 4, 10), FORKED);
    assert_eq!(w.again(0), ([COPY, READ].join(", "), 0));
    // Of which nothing is known either.
    let mut w = World::with_unread();
    assert_eq!(w.exec(START + 4, 10), FORKED);
    let unknown = "exec 10+1 of nobody uid 1000 ";
    assert_eq!(w.again(0), ([COPY, unknown].join(", "), 1));
    w.process(10, 1, 500);
    assert_eq!(w.again(LOOK_AFTER), (READ.into(), 0));
    // When it is looked at, it has; which is still to be told.
    let mut w = World::with_unread();
    w.process(10, 1, 500);
    w.moved_on.push(10);
    assert_eq!(w.again(0), ([FORKED, COPY].join(", "), 0));
}

#[test]
fn no_more_waits_than_there_is_room_for() {
    let mut w = World::with_unread();
    assert!(w.overflow().starts_with(FORKED));
}

#[test]
fn of_whom_nothing_waits_any_more_is_told_at_once() {
    let mut w = World::with_unread();
    w.process(20, 1, 500);
    assert_eq!(w.fork(START + 4, 1, 20), "fork 20+4 of 1 uid 1000");
    w.file(20, "status", "Uid:\tnobody\n");
    assert_eq!(w.exec(START + 5, 20), "exec 20+4 of nobody uid 1000 ");
    w.process(10, 1, 500);
    assert_eq!(w.again(0), ([READ, FORKED].join(", "), 1));
    // The other one is awaited still.
    let told = w.exec(START + 6, 11);
    assert_eq!(told, "exec 11+3 of 10+1 uid 1000 /usr/bin/prog");
    assert!(w.translator.holds_back());
    w.vanish(20);
    assert_eq!(w.exit(START + 7, 20, 20, 0), "exit 20+4 0");
    assert!(!w.translator.holds_back());
}

#[test]
fn copies_that_were_told_of_too_soon_are_looked_at_themselves() {
    let mut w = World::with_unread();
    w.overflow();
    w.process(10, 1, 500);
    let (told, _) = w.again(0);
    assert!(told.starts_with(&[READ, COPY].join(", ")), "{told}");
}

#[test]
fn what_one_does_whose_child_waits_is_told_after_it() {
    let mut w = World::new();
    for (pid, after) in [(10, 1), (20, 2)] {
        w.process(pid, 1, 500);
        w.fork(START + after, 1, pid);
        w.file(pid, "status", "Uid:\tnobody\n");
        w.exec(START + 3, pid);
    }
    w.process(11, 10, 500);
    assert_eq!(w.fork(START + 4, 10, 11), "");
    w.process(10, 1, 500);
    assert_eq!(w.again(0).0, READ, "the other one is awaited still");
    // An agent by now, whose that child is not.
    assert_eq!(w.exec(START + 5, 10), "");
    w.vanish(20);
    let all = ["fork 11+4 of 10+1 uid 1000", READ, "exit 20+2 0"];
    assert_eq!(w.exit(START + 6, 20, 20, 0), all.join(", "));
}

#[test]
fn an_end_is_told_after_what_those_run_to_whom_it_may_have_handed_over() {
    let mut w = World::new();
    for (pid, maker) in [(10, 1), (11, 10)] {
        w.process(pid, maker, 500);
        w.fork(START + 1, maker, pid);
    }
    w.file(11, "status", "Uid:\tnobody\n");
    assert_eq!(w.exec(START + 2, 11), "exec 11+1 of nobody uid 1000 ");
    w.vanish(10);
    assert_eq!(w.exit(START + 3, 10, 10, 0), "");
    w.process(11, 1, 500);
    let all = "exec 11+1 of 1 uid 1000 /usr/bin/prog, exit 10+1 0";
    assert_eq!(w.again(0), (all.into(), 0));
}
