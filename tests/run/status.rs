//! Exit status of `reaper run`.

use std::fs;

use serde_json::Value;

use super::{RunWorld, ScenarioFn};

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("status", status),
    ("status-of-signals", status_of_signals),
    ("cannot-be-run", cannot_be_run),
    ("time-runs-out", time_runs_out),
    ("ends-told", ends_told),
];

pub const ROOT_SCENARIOS: &[(&str, ScenarioFn)] = &[("no-proc", no_proc)];

/// The exit status is that of the command.
fn status(place: &RunWorld) {
    let script = "for n in $(seq 0 255); do ./reaper run -- sh -c 'exit $0' $n
        said=$?; [ $said = $n ] || echo $n gives $said; done";
    let said = place.bash(script, &[]);
    assert_eq!(said.out + &said.err, "");
}

/// The exit status is 128 plus the signal number, as in shells, for real-time signals too.
fn status_of_signals(place: &RunWorld) {
    let script = "ulimit -c 0
        for n in $(seq 1 16) $(seq 24 27) $(seq 29 31) $(seq 34 64); do ./reaper run -- perl -e '$SIG{FPE} = q(DEFAULT); kill $ARGV[0], $$' $n
        said=$?; [ $said = $((128 + n)) ] || echo $n gives $said; done 2>&1 | grep -v core";
    let said = place.bash(script, &[]);
    assert_eq!(said.out + &said.err, "");
}

/// The exit statuses 125 to 127 are those of `env` and `timeout`.
fn cannot_be_run(place: &RunWorld) {
    fs::write(place.path("plain"), "").expect("write a file");
    let script = |name: &str, text: &str| {
        fs::write(place.path(name), text).expect("write a script");
        let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(place.path(name), all).expect("make it a program");
    };
    script("orphaned", "#!/absent/interpreter\n");
    script("bare", "exit 7\n");
    for (words, status, about) in [
        (&[][..], 125, "COMMAND"),
        (&["--absent", "true"], 125, "--absent"),
        (&["--timeout", "1e1", "true"], 125, "--timeout"),
        (&["--idle", "0", "true"], 125, "--idle"),
        (&["--signal", "NONE", "true"], 125, "NONE"),
        (&["./plain"], 126, "./plain"),
        (&["."], 126, "."),
        (&["./plain/x"], 126, "./plain/x"),
        (&["./absent"], 127, "./absent"),
        (&["absent-command"], 127, "absent-command"),
        (&["./orphaned"], 127, "interpreter"),
        (&["./bare"], 7, ""),
        (&["--idle", "9s", "./absent"], 127, "./absent"),
    ] {
        let said = place.run(words);
        assert_eq!(said.code, Some(status), "{words:?}: {}", said.err);
        assert!(said.err.contains(about), "{words:?}: {}", said.err);
    }
}

fn time_runs_out(place: &RunWorld) {
    let silent = "echo said; exec sleep 60";
    // A shell that waits for its child would print "Terminated".
    let works = "(while :; do :; done) & exec sleep 60";
    let timeout = "reaper run: ended after --timeout 200ms, ";
    let idle = "reaper run: ended after --idle 300ms, ";
    for (words, status, line) in [
        (
            &["--timeout", "200ms", "--", "sleep", "60"][..],
            124,
            timeout,
        ),
        (
            &[
                "--timeout",
                "200ms",
                "--",
                "sh",
                "-c",
                "trap 'exit 3' TERM; sleep 60 & wait",
            ],
            124,
            timeout,
        ),
        (&["--timeout", "60s", "--", "sh", "-c", "exit 3"], 3, ""),
        (&["--timeout", "0.2", "--", "sleep", "60"], 124, timeout),
        (&["--timeout", ".2", "--", "sleep", "60"], 124, timeout),
        (&["--timeout", "60", "--", "sleep", "0.3"], 0, ""),
        (&["--timeout", "0", "--", "sleep", "0.3"], 0, ""),
        (&["--idle", "300ms", "--", "sh", "-c", silent], 124, idle),
        (&["--idle", "300ms", "--", "sh", "-c", works], 124, idle),
    ] {
        let said = place.run(words);
        assert_eq!(said.code, Some(status), "{words:?}: {}", said.err);
        assert!(said.err.starts_with(line), "{words:?}: {}", said.err);
        let lines = usize::from(!line.is_empty());
        assert_eq!(said.err.lines().count(), lines, "{words:?}: {}", said.err);
    }
}

/// One line names the limit that ended the run. `-q` omits it, `-v` adds a line for each process, and `--json` has the
/// same facts instead.
fn ends_told(place: &RunWorld) {
    let script = "sleep 60 & setsid sleep 60 & wait";
    let limited = |options: &[&str]| {
        let words = [options, &["--timeout", "300ms", "--", "sh", "-c", script]].concat();
        let said = place.run(&words);
        assert_eq!(said.code, Some(124), "{options:?}: {}", said.err);
        said.err
    };
    let line = |reaped| match reaped {
        1 => "reaper run: ended after --timeout 300ms, 1 process reaped".to_owned(),
        n => format!("reaper run: ended after --timeout 300ms, {n} processes reaped"),
    };
    let plain = limited(&[]);
    assert!((1..=3).any(|n| plain == line(n) + "\n"), "{plain}");
    assert_eq!(limited(&["-q"]), "");
    for options in [&["-v"][..], &["-v", "--leader-first"]] {
        let all = limited(options);
        let reaped = all.lines().count() - 1;
        assert!(reaped > 0 && all.ends_with(&(line(reaped) + "\n")), "{all}");
        assert!(all.contains(" (sh): SIGTERM\n"), "{all}");
        assert_eq!(all.matches(": SIGTERM\n").count(), reaped, "{all}");
    }
    let report: Value = serde_json::from_str(&limited(&["--json", "-v"])).expect("JSON");
    let (outcome, limit) = (&report["outcome"], &report["limit_ms"]);
    assert_eq!((outcome, limit), (&"timeout".into(), &300.into()));
    assert_eq!(report["processes"][0]["pid"], report["pid"]);

    // Exits only when the name of its child has changed, because the line shows it.
    let script =
        "setsid sleep 60 & while read name </proc/$!/comm; [ $name != sleep ]; do :; done; exit 3";
    let left = ["--", "sh", "-c", script];
    let said = place.run(&left);
    assert_eq!((said.code, said.err.as_str()), (Some(3), ""));
    let said = place.run(&[&["--verbose"], &left[..]].concat());
    assert!(
        said.err
            .ends_with(" (sleep): SIGTERM\nreaper run: 1 process reaped\n"),
        "{}",
        said.err
    );
    let said = place.run(&["-q", "-v", "true"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
}

/// The command is not started if leftovers could not be found: /proc of another PID namespace shows other processes.
fn no_proc(place: &RunWorld) {
    let said = place.bash("unshare --pid --fork ./reaper run -- touch begun", &[]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(said.err.contains("/proc"), "{}", said.err);
    assert!(!place.path("begun").exists(), "the command was started");
}
