//! Run records, and the commands that use them: `ps`, `stop`, `wait`, `logs`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use super::{RunWorld, ScenarioFn, reported};
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("detached", detached),
    ("detached-cannot-start", detached_cannot_start),
    ("stopped", stopped),
    ("stop-races", stop_races),
    ("stop-of-unknown-run", stop_of_unknown_run),
    ("stop-of-several", stop_of_several),
    ("waited-for", waited_for),
    ("two-hundred-runs", two_hundred_runs),
    ("slots", slots),
    ("slot-of-killed-run", slot_of_killed_run),
    ("names", names),
    ("unusable-records", unusable_records),
];

/// A detached run shows all its properties while it runs and afterwards.
fn detached(place: &RunWorld) {
    let script = "echo one; echo two >&2; setsid sleep 60 & until [ -e go ]; do sleep 0.02; done; echo three; exit 7";
    let words = [
        "run",
        "--detach",
        "--name",
        "web",
        "--session",
        "turn 17",
        "--agent",
        "codex",
        "--timeout",
        "1h",
    ];
    let said = place.ask(&reported(&words, script));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let id = said.out.trim_end().to_owned();
    assert_eq!(said.out, format!("{id}\n"));
    let runs = place.ps(&[]);
    let run = &runs[0];
    for (field, value) in [
        ("id", id.as_str()),
        ("name", "web"),
        ("session", "turn 17"),
        ("agent", "codex"),
        ("state", "running"),
    ] {
        assert_eq!(run[field], value, "{run}");
    }
    let left = run["remaining_ms"].as_u64().expect("the remaining time");
    assert!((3_000_000..=3_600_000).contains(&left), "{left}");
    assert_eq!(run["uid"], place.uid);
    let table = place.ask(&["ps"]).out;
    assert!(table.contains(&id) && table.contains("turn 17"), "{table}");
    let followed = place.start_as(place.command("./reaper").args(["logs", "-f", "web"]));
    place.await_content("out", |content| {
        content.contains("one\n") && content.contains("two\n")
    });
    assert_eq!(place.ask(&["logs", &id[..3]]).out, "one\ntwo\n");
    fs::write(place.path("go"), "").expect("let the command exit");
    let waited = place.ask(&["wait", "web"]);
    assert_eq!(
        (waited.code, waited.out.as_str()),
        (Some(7), ""),
        "{}",
        waited.err
    );
    let mut followed = followed;
    assert_eq!(followed.end(), 0, "{}", place.read("err"));
    assert!(place.read("out").ends_with("three\n"));
    place.await_alone();
    assert!(place.ps(&[]).is_empty());
    let run = &place.ps(&["--all"])[0];
    assert_eq!(
        (&run["state"], &run["outcome"], &run["exit_code"]),
        (&"closed".into(), &"failed".into(), &7.into())
    );
    let report = place.report();
    for (field, value) in [
        ("run_id", id.as_str()),
        ("name", "web"),
        ("session", "turn 17"),
        ("agent", "codex"),
    ] {
        assert_eq!(report[field], value, "{report}");
    }
}

/// `run --detach` reports why the command cannot start, with the exit status of an attached run.
fn detached_cannot_start(place: &RunWorld) {
    fs::write(place.path("plain"), "").expect("write a file");
    for (command, status) in [("./absent", 127), ("./plain", 126)] {
        let said = place.ask(&["run", "--detach", "--", command]);
        assert_eq!(
            (said.code, said.out.as_str()),
            (Some(status), ""),
            "{}",
            said.err
        );
        assert_eq!(said.err.matches(command).count(), 1, "{}", said.err);
    }
    assert!(place.ps(&[]).is_empty());
    assert_eq!(place.ps(&["--all"])[0]["status"], 127);
}

/// `stop` ends the whole tree and grants the run's grace. It also ends a run whose owner is stopped.
fn stopped(place: &RunWorld) {
    let script = "trap 'sleep 0.3; echo drained > drained; exit 0' TERM; setsid sleep 60 & echo $$ > up; while :; do sleep 0.05; done";
    let mut run = place.start(&[
        "--name",
        "x",
        "--on-failure",
        "touch hook",
        "--on-success",
        "touch hook",
        "--",
        "sh",
        "-c",
        script,
    ]);
    place.await_pid("up");
    let said = place.ask(&["stop", "x"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.contains("(x) stopped"), "{}", said.out);
    place.await_alone();
    assert_eq!(place.read("drained"), "drained\n");
    assert_eq!(run.end(), 0);
    assert_eq!(place.ps(&["--all"])[0]["outcome"], "cancelled");
    assert!(!place.path("hook").exists(), "a hook ran after a stop");
    let said = place.ask(&["stop", "x"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.out.contains("had already ended: cancelled"),
        "{}",
        said.out
    );
    // The command ignores SIGTERM, and its owner is stopped by SIGSTOP.
    let script = "trap '' TERM; echo $$ > pid; while :; do sleep 0.05; done";
    let mut run = place.start(&["--grace", "200ms", "--", "sh", "-c", script]);
    place.await_pid("pid");
    run.signal(nix::libc::SIGSTOP);
    let id = place.ps(&[])[0]["id"].as_str().expect("an id").to_owned();
    let said = place.ask(&["stop", &id]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(run.end(), 137);
    place.await_alone();
}

/// `stop` races with the timeout and with the command's exit. Each run has one outcome, and the status fits it. A unit test
/// in `run/runs/tests.rs` runs many such races without processes.
fn stop_races(place: &RunWorld) {
    let script = "for i in $(seq 60); do
            case $((i % 2)) in
                0) ./reaper run -q --name r$i --timeout 60ms -- sleep 60 & ;;
                1) ./reaper run --name r$i -- sleep 0.06 & ;;
            esac
            run=$!
            sleep 0.0$((i % 8))
            ./reaper stop r$i >> stops 2>&1 & a=$!; ./reaper stop r$i >> stops 2>&1 & b=$!
            wait $run; echo r$i $? >> statuses
            wait $a $b
        done";
    let said = place.bash(script, &[]);
    assert_eq!(said.out + &said.err, "");
    place.await_alone();
    let statuses = place.read("statuses");
    let runs = place.ps(&["--all"]);
    assert_eq!((runs.len(), statuses.lines().count()), (60, 60));
    for line in statuses.lines() {
        let (name, status) = line.split_once(' ').expect("a name and a status");
        let run = runs
            .iter()
            .find(|run| run["name"] == name)
            .expect("the run");
        let path = place
            .records()
            .join(format!("{}.over", run["id"].as_str().expect("an id")));
        let record = fs::read_to_string(path).expect("read the record");
        assert_eq!(record.matches("{\"over\":").count(), 1, "{record}");
        let outcome = run["outcome"].as_str().expect("an outcome");
        let fits: &[&str] = match outcome {
            "timeout" => &["124"],
            "success" => &["0"],
            // Signalled just before the command exited, or before it started.
            "cancelled" => &["143", "137", "0"],
            other => panic!("{other}: {record}"),
        };
        assert!(fits.contains(&status), "{line}: {record}");
        assert_eq!(run["status"].to_string(), status, "{record}");
    }
}

fn stop_of_unknown_run(place: &RunWorld) {
    let outsider = place.canary.id().to_string();
    for words in [["stop", "absent"], ["stop", &outsider], ["logs", "absent"]] {
        let said = place.ask(&words);
        assert_eq!((said.code, said.out.as_str()), (Some(125), ""), "{words:?}");
        assert!(said.err.contains("reaper ps"), "{}", said.err);
    }
    for (words, status) in [
        (&["stop"][..], 2),
        (&["wait"], 125),
        (&["wait", "absent"], 125),
        (&["ps", "x"], 2),
    ] {
        assert_eq!(place.ask(words).code, Some(status), "{words:?}");
    }
    place.run(&["--name", "loud", "--", "true"]);
    let said = place.ask(&["logs", "loud"]);
    assert_eq!(said.code, Some(125));
    assert!(said.err.contains("was not detached"), "{}", said.err);
}

/// A run that does not exist does not prevent stopping the others.
fn stop_of_several(place: &RunWorld) {
    for name in ["a", "b"] {
        let said = place.ask(&["run", "--detach", "--name", name, "--", "sleep", "60"]);
        assert_eq!(said.code, Some(0), "{}", said.err);
    }
    let said = place.ask(&["stop", "a", "absent", "b"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(said.err.contains("no run absent"), "{}", said.err);
    assert_eq!(said.out.matches(") stopped\n").count(), 2, "{}", said.out);
    place.await_alone();
}

/// Several commands wait for one run.
fn waited_for(place: &RunWorld) {
    let script =
        "./reaper run --name x -- sh -c 'until [ -e go ]; do sleep 0.02; done; kill -9 $$' & run=$!
        until ./reaper ps | grep -q running; do sleep 0.02; done
        for i in 1 2 3 4; do ./reaper wait x & waits=\"$waits $!\"; done
        touch go
        for one in $run $waits; do wait $one; echo $?; done";
    let said = place.bash(script, &[]);
    assert_eq!(said.out, "137\n".repeat(5), "{}", said.err);
}

fn two_hundred_runs(place: &RunWorld) {
    let script = "mkfifo gate; for i in $(seq 200); do
            ./reaper run --session s$i -- sh -c 'setsid sleep 60 & read line < gate; exit $0' $((i % 100)) &
        done
        : > started; wait; : > over";
    let mut bash = place.command("bash");
    let mut bash = place.start_as(bash.args(["-c", script]));
    eventually("two hundred runs", || {
        let runs = place.ps(&[]);
        (runs.iter().filter(|run| run["state"] == "running").count() == 200).then_some(())
    });
    let ids: std::collections::HashSet<String> = place
        .ps(&[])
        .iter()
        .map(|run| run["id"].to_string())
        .collect();
    assert_eq!(ids.len(), 200);
    // While the gate is open for writing, a late reader does not block. Once it is closed, all read end of file.
    let gate = fs::File::options()
        .read(true)
        .write(true)
        .open(place.path("gate"))
        .expect("open the gate");
    use std::io::Write;
    (&gate)
        .write_all("go\n".repeat(200).as_bytes())
        .expect("let the commands exit");
    assert_eq!(bash.end(), 0, "{}", place.read("err"));
    drop(gate);
    place.await_alone();
    assert_eq!(place.read("err"), "");
    assert!(place.ps(&[]).is_empty());
    let all = place.ps(&["--all"]);
    assert!((1..=120).contains(&all.len()), "{} are kept", all.len());
    assert!(all.iter().all(|run| run["ended"] == 1), "{all:?}");
}

/// At most two runs hold a slot at the same time.
fn slots(place: &RunWorld) {
    let script = "for i in 1 2 3 4 5 6; do
            ./reaper run --name r$i --limit gpu=2 -- sh -c 'echo + $0 >> log; sleep 0.2; echo - $0 >> log' $i &
            until ./reaper ps --json | grep -q '\"name\":\"r'$i'\"' || ./reaper ps --all | grep -q \" r$i \"; do sleep 0.01; done
        done; wait";
    let said = place.bash(script, &[]);
    assert_eq!(said.err, "");
    let log = place.read("log");
    let mut now = 0;
    for line in log.lines() {
        now += if line.starts_with('+') { 1 } else { -1 };
        assert!((0..=2).contains(&now), "{log}");
    }
    assert_eq!(log.lines().count(), 12, "{log}");
}

/// A killed run frees its slot. A run that is stopped while it waits never starts.
fn slot_of_killed_run(place: &RunWorld) {
    let mut first = place.start(&[
        "--limit",
        "x=1",
        "--",
        "sh",
        "-c",
        "echo $$ > up; exec sleep 60",
    ]);
    place.await_pid("up");
    let said = place.ask(&[
        "run", "--detach", "--limit", "x=1", "--name", "second", "--", "touch", "second",
    ]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let said = place.ask(&[
        "run", "--detach", "--limit", "x=1", "--name", "third", "--", "touch", "third",
    ]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let state = |name: &str| {
        let runs = place.ps(&["--all"]);
        let run = runs
            .into_iter()
            .find(|run| run["name"] == name)
            .expect("the run");
        (run["state"].clone(), run["outcome"].clone())
    };
    assert_eq!(state("second"), ("waiting".into(), Value::Null));
    let said = place.ask(&["stop", "second"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(state("second"), ("closed".into(), "cancelled".into()));
    first.signal(nix::libc::SIGKILL);
    assert_eq!(first.end(), 137);
    assert_eq!(place.ask(&["wait", "third"]).code, Some(0));
    assert!(place.path("third").exists() && !place.path("second").exists());
    // A later `reaper` command has ended what the killed run left.
    place.await_alone();
}

fn names(place: &RunWorld) {
    let mut run = place.start(&[
        "--name",
        "web",
        "--",
        "sh",
        "-c",
        "echo $$ > up; exec sleep 60",
    ]);
    place.await_pid("up");
    let said = place.ask(&["run", "--name", "web", "--", "touch", "begun"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(
        said.err.contains("web") && said.err.contains("reaper stop"),
        "{}",
        said.err
    );
    let said = place.ask(&["run", "--detach", "--name", "web", "--", "touch", "begun"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert_eq!(said.err.matches("is in use").count(), 1, "{}", said.err);
    assert!(!place.path("begun").exists());
    run.signal(nix::libc::SIGTERM);
    assert_eq!(run.end(), 143);
    assert_eq!(place.run(&["--name", "web", "--", "true"]).code, Some(0));
    for words in [
        ["--name", "../x"],
        ["--name", ""],
        ["--name", "a b"],
        ["--limit", "x"],
        ["--limit", "x=0"],
        ["--limit", "..=1"],
        ["--limit", "x=-1"],
        ["--session", "two\nlines"],
    ] {
        let said = place.run(&[&words[..], &["--", "touch", "begun"]].concat());
        assert_eq!(said.code, Some(125), "{words:?}");
        assert!(said.err.contains(words[0]), "{}", said.err);
    }
    assert!(!place.path("begun").exists());
}

/// A plain run works without a record. A run that needs its record is refused, and its command is not started.
fn unusable_records(place: &RunWorld) {
    let with = |state: &str, words: &[&str]| {
        let mut command = place.reaper(words);
        crate::cli::run(
            place.dir.path(),
            command.env("XDG_STATE_HOME", place.path(state)),
        )
    };
    fs::write(place.path("file"), "").expect("write a file");
    fs::create_dir_all(place.path("open/reaper/runs")).expect("create a directory");
    fs::set_permissions(
        place.path("open/reaper/runs"),
        Permissions::from_mode(0o777),
    )
    .expect("make the directory writable for all users");
    for state in ["file", "open", "/proc/absent"] {
        let said = with(state, &["--", "sh", "-c", "exit 3"]);
        assert_eq!((said.code, said.err.as_str()), (Some(3), ""), "{state}");
        for option in [&["--name", "x"][..], &["--detach"], &["--limit", "x=1"]] {
            let said = with(state, &[option, &["--", "touch", "begun"]].concat());
            assert_eq!(said.code, Some(125), "{state} {option:?}");
            assert!(
                said.err.contains("cannot use the records of runs"),
                "{}",
                said.err
            );
        }
        let mut ps = place.command("./reaper");
        let said = crate::cli::run(
            place.dir.path(),
            ps.arg("ps").env("XDG_STATE_HOME", place.path(state)),
        );
        assert_eq!(said.code, Some(1), "{state}: {}", said.err);
    }
    assert!(!place.path("begun").exists());
}
