//! Signals that are sent to `reaper run`.

use nix::libc;

use super::{RunWorld, ScenarioFn, reported};
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("each-signal-once", each_signal_once),
    ("stopped-and-continued", stopped_and_continued),
    ("alarm", alarm),
    ("children-ignored", children_ignored),
    ("second-signal-cuts-the-grace-short", second_signal),
    ("stop-is-neutral", stop_is_neutral),
];

/// Returns the signals that `reaper run` passes to the command.
fn signals() -> impl Iterator<Item = i32> {
    let own = [libc::SIGKILL, libc::SIGSTOP, libc::SIGCHLD, libc::SIGTERM];
    let all = (1..=31).chain(34..=64);
    let most = all.filter(move |n| !own.contains(n));
    // The recorder exits on SIGTERM.
    most.chain([libc::SIGTERM])
}

fn each_signal_once(place: &RunWorld) {
    place.install_worker();
    let words = place.worker_command("recorder", "recorder");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut run = place.start(&words);
    place.await_processes("recorder", 1);
    let mut expected = String::new();
    for number in signals() {
        run.signal(number);
        expected += &format!("{number}\n");
        place.await_content("recorded", |content| content.len() >= expected.len());
    }
    assert_eq!(run.end(), 0, "{}", place.read("err"));
    assert_eq!(place.read("recorded"), expected);
    place.assert_alone();
}

/// `reaper run` stops and continues with its command.
fn stopped_and_continued(place: &RunWorld) {
    let mut run = place.start(&["--", "sh", "-c", "echo $$ > pid; exec sleep 60"]);
    let command = place.await_pid("pid");
    let state = |pid| crate::proc::stat(pid).map(|stat| stat.state);
    let own = run.pid();
    let both = |wanted: &str| {
        eventually(wanted, || {
            let is = |pid| state(pid).is_some_and(|state| wanted.contains(state as char));
            (is(own) && is(command.pid)).then_some(())
        });
    };
    both("S");
    run.signal(libc::SIGTSTP);
    both("T");
    run.signal(libc::SIGCONT);
    both("S");
    run.signal(libc::SIGTERM);
    assert_eq!(run.end(), 143);
}

/// An alarm that was set before the exec goes to `reaper run` only, which passes it on.
fn alarm(place: &RunWorld) {
    let script = "exec perl -e 'alarm 4; exec @ARGV' ./reaper run -- sleep 60";
    let said = place.bash(script, &[]);
    assert_eq!(said.code, Some(142), "{}", said.err);
    place.assert_alone();
}

/// The exit status is reported even if the caller ignores SIGCHLD.
fn children_ignored(place: &RunWorld) {
    let script = "exec perl -e '$SIG{CHLD} = \"IGNORE\"; exec @ARGV' ./reaper run -- sh -c 'setsid sleep 60 & exit 3'";
    let said = place.bash(script, &[]);
    assert_eq!(said.code, Some(3), "{}", said.err);
    place.assert_alone();
}

fn second_signal(place: &RunWorld) {
    let stubborn =
        "sh -c 'trap \"echo x > signalled\" TERM; echo $$ > pid; while :; do sleep 0.05; done' &
        until [ -s pid ]; do sleep 0.01; done";
    let mut run = place.start(&["--grace", "50s", "--", "sh", "-c", stubborn]);
    let left = place.await_pid("pid");
    // The process has ignored SIGTERM.
    place.await_content("signalled", |content| !content.is_empty());
    assert!(run.lives() && left.is_alive());
    run.signal(libc::SIGINT);
    assert_eq!(run.end(), 0);
    place.assert_alone();
}

/// A stopped run is neither a success nor a failure, whatever the command's status.
fn stop_is_neutral(place: &RunWorld) {
    let on = "echo $$ > pid; while :; do sleep 0.01; done";
    for (trap, signal, status) in [
        ("", libc::SIGTERM, 143),
        ("", libc::SIGHUP, 129),
        ("trap 'exit 0' TERM", libc::SIGTERM, 0),
        ("trap 'exit 9' INT", libc::SIGINT, 9),
        ("trap 'sleep 0.3; exit 1' TERM", libc::SIGTERM, 1),
    ] {
        let _ = std::fs::remove_file(place.path("pid"));
        std::fs::create_dir_all(place.path("kept")).expect("create a directory");
        let script = format!("{trap}\n{on}");
        let hooks = [
            "--on-success",
            "touch hook",
            "--on-failure",
            "touch hook",
            "--clean-on-success",
            "kept",
        ];
        let mut run = place.start(&reported(&hooks, &script));
        place.await_pid("pid");
        run.signal(signal);
        assert_eq!(run.end(), status, "{script}");
        assert_eq!(place.report()["outcome"], "cancelled", "{script}");
        assert!(
            place.path("kept").exists() && !place.path("hook").exists(),
            "{script}"
        );
        place.assert_alone();
    }
}
