//! Children that a process had before it became `reaper run` by exec. They do not belong to the run.
//!
//! In such a process `reaper run` forks a supervisor and itself becomes a stand-in that passes signals and status on.

use nix::libc;
use nix::sys::signal::Signal;

use super::watched::{Watched, open};
use super::{RunWorld, ScenarioFn, Started};
use crate::proc::ProcessKey;
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("pre-existing-job-lives", job_lives),
    ("process-substitution-reads-to-its-end", substitution_reads),
    ("orphan-of-pre-existing-job-lives", orphan_lives),
    ("status-passes-beside-pre-existing-job", status_passes),
    ("signals-pass-beside-pre-existing-job", signals_pass),
    ("stop-passes-beside-pre-existing-job", stop_passes),
    ("killed-stand-in-ends-the-run", killed_stand_in),
    ("killed-supervisor-ends-the-stand-in", killed_supervisor),
];

/// Scenarios that need a service.
pub const BESIDE_A_SERVICE: &[(&str, ScenarioFn)] =
    &[("service-ends-run-beside-pre-existing-job", service_ends)];

/// Returns a script that starts a job, writes its pid to `before`, and becomes `reaper run` with these arguments.
fn becoming(words: &str) -> String {
    format!("setsid sleep 600 & echo $! > before; exec ./reaper run {words}")
}

fn start(place: &RunWorld, words: &str) -> Started {
    place.start_as(place.command("bash").args(["-c", &becoming(words)]))
}

/// Waits until the pre-existing job is the only process left, and kills it.
fn assert_only_job_is_left(place: &RunWorld) {
    let job = place.await_pid("before");
    eventually("only the pre-existing job is left", || {
        (place.living() == [job]).then_some(())
    });
    end(job);
}

fn end(job: ProcessKey) {
    assert!(job.is_alive(), "the pre-existing job was ended");
    job.signal(Signal::SIGKILL);
}

fn job_lives(place: &RunWorld) {
    let said = place.bash(&becoming("-- sh -c 'setsid sleep 600 & exit 3'"), &[]);
    assert_eq!((said.code, &*said.err), (Some(3), ""));
    assert_only_job_is_left(place);
}

fn substitution_reads(place: &RunWorld) {
    let command = "sh -c 'echo one; setsid sleep 600 & echo two'";
    let reader = "(until [ -e go ]; do sleep 0.01; done; cat > log)";
    let script = format!("exec ./reaper run -- {command} > >{reader}");
    let said = place.bash(&script, &[]);
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    open(place, "go");
    place.await_content("log", |content| content == "one\ntwo\n");
    place.await_alone();
}

/// The supervisor adopts only orphans of its descendants.
fn orphan_lives(place: &RunWorld) {
    let script = "mkfifo gate
        sh -c 'sleep 600 & echo $! > orphan; echo $$ > middle; read go < gate' &
        exec ./reaper run -- sh -c '
            until [ -s middle ]; do sleep 0.01; done
            echo > gate
            until [ \"$(cut -d \" \" -f 4 /proc/$(cat orphan)/stat)\" != $(cat middle) ]; do sleep 0.01; done'";
    let said = place.bash(script, &[]);
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    let orphan = place.await_pid("orphan");
    eventually("only the orphan is left", || {
        (place.living() == [orphan]).then_some(())
    });
    end(orphan);
}

fn status_passes(place: &RunWorld) {
    for (words, expected) in [
        ("-- true", 0),
        ("-- sh -c 'exit 3'", 3),
        ("-- ./absent 2> /dev/null", 127),
        ("-- sh -c 'kill -TERM $$'", 143),
        ("-- sh -c 'kill -KILL $$'", 137),
        ("--timeout 50ms -- sleep 600", 124),
    ] {
        let said = place.bash(&becoming(words), &[]);
        assert_eq!(said.code, Some(expected), "{words}: {}", said.err);
        assert_only_job_is_left(place);
    }
}

fn signals_pass(place: &RunWorld) {
    for (name, number) in [
        ("TERM", libc::SIGTERM),
        ("INT", libc::SIGINT),
        ("USR1", libc::SIGUSR1),
    ] {
        let script = format!(
            "-- sh -c 'trap \"echo {name} > got; exit 7\" {name}; echo > up; while :; do sleep 0.01; done'"
        );
        let mut run = start(place, &script);
        place.await_content("up", |content| !content.is_empty());
        run.signal(number);
        assert_eq!(run.end(), 7, "{name}");
        assert_eq!(place.read("got"), format!("{name}\n"));
        assert_only_job_is_left(place);
        std::fs::remove_file(place.path("up")).expect("remove the file");
    }
}

/// A shell that waits for `reaper run` sees the command stop and can continue it.
fn stop_passes(place: &RunWorld) {
    let mut run = start(place, "-- sh -c 'echo $$ > pid; kill -TSTP $$; exit 5'");
    place.await_pid("pid");
    let own = run.pid();
    eventually("`reaper run` stops with the command", || {
        let state = crate::proc::stat(own).map(|stat| stat.state);
        (state == Some(b'T')).then_some(())
    });
    run.signal(libc::SIGCONT);
    assert_eq!(run.end(), 5);
    assert_only_job_is_left(place);
}

const LEAK: &str = "-- sh -c 'setsid sleep 600 & echo $PPID > supervisor; trap \"\" TERM; while :; do sleep 0.01; done'";

/// If the stand-in is killed, the supervisor ends the run, even if the command ignores SIGTERM.
fn killed_stand_in(place: &RunWorld) {
    let run = start(place, &format!("--grace 100ms {LEAK}"));
    place.await_pid("supervisor");
    run.signal(libc::SIGKILL);
    assert_only_job_is_left(place);
}

/// If the supervisor is killed, the next `reaper` command of the same user ends the run.
fn killed_supervisor(place: &RunWorld) {
    let mut run = start(place, LEAK);
    place.await_pid("supervisor").signal(Signal::SIGKILL);
    assert_eq!(run.end(), 128 + libc::SIGKILL);
    place.ps(&["--all"]);
    assert_only_job_is_left(place);
}

/// If both stand-in and supervisor are killed, the service ends the run but not the pre-existing job.
fn service_ends(place: &RunWorld) {
    let leak = LEAK.replace('\'', "'\\''");
    let script = format!(
        "bash -c 'setsid sleep 600 & echo $! > before; exec ./bin/reaper run {leak}' & stand_in=$!
        until [ -s supervisor ]; do sleep 0.01; done
        kill -KILL $stand_in $(cat supervisor)
        until [ -e leave ]; do sleep 0.01; done"
    );
    let mut watched = Watched::begin(place, &script, &[]);
    let job = place.await_pid("before");
    place.await_pid("supervisor");
    let own = watched.shell.pid();
    eventually("the service has ended the run", || {
        let left = place.living().into_iter();
        let mut others = left.filter(|one| {
            let parent = crate::proc::stat(one.pid).map(|stat| stat.parent);
            one.pid != own && parent != Some(own) && *one != job
        });
        others.next().is_none().then_some(())
    });
    watched.await_event(|event| event.event == "session.close");
    end(job);
    open(place, "leave");
    assert_eq!(watched.shell.end(), 0);
}
