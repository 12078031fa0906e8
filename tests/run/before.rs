//! Children that a process had before it became `reaper run` by exec: they are not the run's.

use nix::libc;
use nix::sys::signal::Signal;

use super::watched::{Watched, open};
use super::{RunWorld, ScenarioFn, Started};
use crate::proc::ProcessKey;
use crate::world::eventually;

pub const STORIES: &[(&str, ScenarioFn)] = &[
    ("background-job-from-before-lives", job_lives),
    ("process-substitution-reads-to-its-end", substitution_reads),
    ("orphan-of-a-job-from-before-lives", orphan_lives),
    ("status-passes-beside-a-job-from-before", status_passes),
    ("signals-pass-beside-a-job-from-before", signals_pass),
    ("stop-passes-beside-a-job-from-before", stop_passes),
    ("killed-stand-in-ends-the-run", killed_stand_in),
    ("killed-supervisor-ends-the-stand-in", killed_supervisor),
];

/// For which a service is needed.
pub const BESIDE_A_SERVICE: &[(&str, ScenarioFn)] =
    &[("service-ends-a-run-beside-a-job-from-before", service_ends)];

/// A shell that starts a job, writes its pid to `before`, and becomes `reaper run` with these words.
fn becoming(words: &str) -> String {
    format!("setsid sleep 600 & echo $! > before; exec ./reaper run {words}")
}

fn start(place: &RunWorld, words: &str) -> Started {
    place.start_as(place.command("bash").args(["-c", &becoming(words)]))
}

/// The job from before lives, and is the only process that is left.
fn assert_only_job_is_left(place: &RunWorld) {
    let job = place.await_pid("before");
    eventually("only the job from before is left", || {
        (place.living() == [job]).then_some(())
    });
    end(job);
}

fn end(job: ProcessKey) {
    assert!(job.is_alive(), "the job from before was ended");
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
    place.await_content("log", |said| said == "one\ntwo\n");
    place.await_alone();
}

/// The supervisor adopts orphans of its own descendants only.
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
        place.await_content("up", |said| !said.is_empty());
        run.signal(number);
        assert_eq!(run.end(), 7, "{name}");
        assert_eq!(place.read("got"), format!("{name}\n"));
        assert_only_job_is_left(place);
        std::fs::remove_file(place.path("up")).expect("remove the file");
    }
}

/// A shell that waits for `reaper run` sees that the command is stopped, and continues it.
fn stop_passes(place: &RunWorld) {
    let mut run = start(place, "-- sh -c 'echo $$ > pid; kill -TSTP $$; exit 5'");
    place.await_pid("pid");
    let own = run.pid();
    eventually("it is stopped as the command is", || {
        let state = crate::proc::stat(own).map(|stat| stat.state);
        (state == Some(b'T')).then_some(())
    });
    run.signal(libc::SIGCONT);
    assert_eq!(run.end(), 5);
    assert_only_job_is_left(place);
}

const LEAK: &str = "-- sh -c 'setsid sleep 600 & echo $PPID > supervisor; trap \"\" TERM; while :; do sleep 0.01; done'";

/// The supervisor ends the run, also where the command ignores SIGTERM.
fn killed_stand_in(place: &RunWorld) {
    let run = start(place, &format!("--grace 100ms {LEAK}"));
    place.await_pid("supervisor");
    run.signal(libc::SIGKILL);
    assert_only_job_is_left(place);
}

/// What it supervised is ended as after the death of any supervisor: by the next `reaper` of the same user.
fn killed_supervisor(place: &RunWorld) {
    let mut run = start(place, LEAK);
    place.await_pid("supervisor").signal(Signal::SIGKILL);
    assert_eq!(run.end(), 128 + libc::SIGKILL);
    place.ps(&["--all"]);
    assert_only_job_is_left(place);
}

/// The service ends what is left of a run whose stand-in and supervisor are killed, and not the job from before.
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
