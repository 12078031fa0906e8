//! Unattended runs: success, failure, death, timeout and cancellation, with hooks, clean-up and report of each.

use std::fs;

use super::{RunWorld, ScenarioFn, reported};

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("endings", endings),
    ("probes", probes),
    ("slow-last-probe", slow_last_probe),
    ("interrupted-last-probe", interrupted_last_probe),
    ("hooks", hooks),
    ("reports", reports),
    ("cleaning-a-link", cleaning_a_link),
];

/// Script that creates a Git repository with a worktree. Background maintenance of Git is off: it would outlive the script.
const REPOSITORY: &str = "set -e; git init -q repo; cd repo
    git config maintenance.auto false; git config gc.auto 0
    git -c user.name=x -c user.email=x@example.org commit -q --allow-empty -m x
    git worktree add -q ../tree";

/// The worktree is removed after a success only.
fn endings(place: &RunWorld) {
    for (script, status, outcome) in [
        // The command does not exit by itself.
        ("touch tree/done; exec sleep 60", 0, "success"),
        ("touch tree/done; exit 7", 0, "success"),
        ("touch tree/half; exit 0", 1, "death"),
        ("kill -9 $$", 137, "death"),
        ("exit 7", 7, "failed"),
        ("setsid sleep 60 & exec sleep 60", 124, "timeout"),
        ("kill -TERM $PPID; exec sleep 60", 143, "cancelled"),
    ] {
        let made = place.bash(REPOSITORY, &[]);
        assert_eq!(made.code, Some(0), "{}", made.err);
        let hook = |option| [option, "echo $REAPER_OUTCOME >> hook"];
        // The timeout must expire in one case only.
        let short = outcome == "timeout";
        let timeout = if short { "1200ms" } else { "60s" };
        let mut words = vec![
            "--done-when",
            "test -e tree/done",
            "--every",
            "100ms",
            "--timeout",
            timeout,
        ];
        words.extend(["--clean-on-success", "tree"]);
        words.extend([hook("--on-success"), hook("--on-failure")].concat());
        let said = place.run(&reported(&words, script));
        assert_eq!(said.code, Some(status), "{script}: {}", said.err);
        let report = place.report();
        assert_eq!(report["outcome"], outcome, "{script}");
        assert_eq!(
            report["survivors"].as_array().map(Vec::len),
            Some(0),
            "{script}"
        );
        assert_eq!(
            place.path("tree").exists(),
            outcome != "success",
            "{script}"
        );
        let followed = match outcome {
            "cancelled" => String::new(),
            other => format!("{other}\n"),
        };
        assert_eq!(place.read("hook"), followed, "{script}");
        for gone in ["repo", "tree"] {
            let _ = fs::remove_dir_all(place.path(gone));
        }
        let _ = fs::remove_file(place.path("hook"));
    }
}

/// Probes that write much, leave a process behind, read stdin, or kill themselves.
fn probes(place: &RunWorld) {
    for probe in [
        "head -c 50000000 /dev/zero; head -c 50000000 /dev/zero >&2; test -e done",
        "setsid sleep 60 & test -e done",
        "cat; test -e done",
        "kill -9 $$ || test -e done",
    ] {
        let _ = fs::remove_file(place.path("done"));
        let script = "sleep 0.3; touch done; exec sleep 60";
        let words = [
            "--timeout",
            "3s",
            "--every",
            "50ms",
            "--done-when",
            probe,
            "--",
            "sh",
            "-c",
            script,
        ];
        let said = place.run(&words);
        let status = if probe.starts_with("kill") { 124 } else { 0 };
        assert_eq!(
            (said.code, said.out.as_str()),
            (Some(status), ""),
            "{probe}: {}",
            said.err
        );
    }
}

/// The last probe, after the command's exit, does not count against the timeout.
fn slow_last_probe(place: &RunWorld) {
    let words = [
        "--timeout",
        "2s",
        "--every",
        "50s",
        "--done-when",
        "sleep 3",
    ];
    let said = place.run(&reported(&words, "exit 7"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(place.report()["outcome"], "success");
}

/// SIGINT cancels the last probe.
fn interrupted_last_probe(place: &RunWorld) {
    let probe = "echo $$ > probing; sleep 60; :";
    let mut run = place.start(&["--every", "50s", "--done-when", probe, "--", "true"]);
    place.await_pid("probing");
    run.signal(nix::libc::SIGINT);
    assert_eq!(run.end(), 1, "{}", place.read("err"));
    place.assert_alone();
}

fn hooks(place: &RunWorld) {
    let said = place.run(&[
        "--on-failure",
        "setsid sleep 60 & echo $REAPER_OUTCOME",
        "--",
        "false",
    ]);
    assert_eq!(
        (said.code, said.out.as_str()),
        (Some(1), "failed\n"),
        "{}",
        said.err
    );
    let said = place.run(&[
        "--on-success",
        "exit 3",
        "--clean-on-success",
        "kept",
        "--",
        "touch",
        "kept",
    ]);
    assert_eq!(said.code, Some(125));
    assert!(
        said.err
            .contains("--on-success \"exit 3\": exited with status 3"),
        "{}",
        said.err
    );
    assert!(
        place.path("kept").exists(),
        "the path was removed after a failed hook"
    );
}

/// A report that cannot be written is an error. A link or device is written through, not replaced by a file.
fn reports(place: &RunWorld) {
    let said = place.run(&["--report", "absent/report.json", "--", "false"]);
    assert_eq!(said.code, Some(125));
    assert!(said.err.contains("absent/report.json"), "{}", said.err);
    fs::create_dir(place.path("closed")).expect("create a directory");
    let script = "chmod 555 closed; ./reaper run --report closed/r -- true; echo $?; ls closed; chmod 755 closed
        ln -s file link; ./reaper run --report link -- true; readlink link; ./reaper run --report /dev/stdout -- true | cat; [ -h /dev/stdout ]; echo $?";
    let said = place.bash(script, &[]);
    let (closed, others) = said.out.split_once("file\n").expect("the link's target");
    // Root may write there.
    assert_eq!(
        closed,
        if place.uid == 0 { "0\nr\n" } else { "125\n" },
        "{}",
        said.err
    );
    let lines: Vec<_> = others.lines().collect();
    for report in [lines[0], &place.read("file")] {
        let report: serde_json::Value = serde_json::from_str(report).expect("a report");
        assert_eq!(report["outcome"], "success");
    }
    assert_eq!(lines[1], "0");
}

/// Removes a link, with and without a trailing slash, but not its target.
fn cleaning_a_link(place: &RunWorld) {
    for typed in ["link", "link/"] {
        let script = "mkdir -p real; echo x > real/file; ln -s real link; ./reaper run --clean-on-success $1 -- true";
        let said = place.bash(script, &[typed]);
        assert_eq!(said.code, Some(0), "{}", said.err);
        assert_eq!(place.read("real/file"), "x\n");
        assert!(
            fs::symlink_metadata(place.path("link")).is_err(),
            "the link is still there"
        );
    }
}
