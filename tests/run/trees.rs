//! Processes that a command leaves behind, and how `reaper run` ends them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;

use super::{REPORT, RunWorld, ScenarioFn, UNPRIVILEGED_UID, reported};
use crate::cli;
use crate::proc;
use crate::world::{copy, eventually};

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("few-open-files", few_open_files),
    ("more-files-than-usual", more_files),
    ("hundred-orphans", hundred_orphans),
    ("leftovers", leftovers),
    ("actors", actors),
    ("grace", grace),
    ("drain", drain),
    ("leader-first", leader_first),
    ("sixty-runs", sixty_runs),
    ("run-outlives-its-parent", parent_dies),
];

pub const ROOT_SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("other-users", other_users),
    ("namespaces", namespaces),
    ("not-permitted", not_permitted),
];

/// Orphans that exit during the run are reaped at once; none remains a zombie.
fn hundred_orphans(place: &RunWorld) {
    let script = "for i in $(seq 100); do (setsid true &); (setsid sleep 60 &); done; echo $$ > pid
        until [ -e go ]; do sleep 0.02; done; exit 3";
    let mut run = place.start(&reported(&[], script));
    let command = place.await_pid("pid");
    eventually("a hundred orphans and no zombie", || {
        let all = proc::all().into_iter();
        let children = all.filter(|one| one.parent == run.pid() && one.id != command);
        let (living, dead): (Vec<_>, Vec<_>) = children.partition(proc::Stat::is_alive);
        (living.len() == 100 && dead.is_empty()).then_some(())
    });
    fs::write(place.path("go"), "").expect("let the command exit");
    assert_eq!(run.end(), 3);
    place.assert_alone();
    assert_eq!(place.report()["ended"], 100);
}

/// Ends what each script leaves behind, and returns the status of the script.
fn leftovers(place: &RunWorld) {
    for (script, status) in [
        ("setsid sleep 60 & exec sleep 0.1", 0),
        ("nohup sleep 60 > /dev/null 2>&1 & disown; exit 4", 4),
        ("env -i sleep 60 & exit 5", 5),
        ("sleep 60 & kill -STOP $!; exit 6", 6),
        (
            "(cd /; umask 0; exec 0<&- 1>&- 2>&-; setsid sleep 60 &); kill -9 $$",
            137,
        ),
        ("exec -a '(x) Z 1 (' sleep 60 & exit 7", 7),
        // Starts another process on SIGTERM.
        (
            "bash -c 'trap \"sleep 60 &\" TERM; echo $$ > up; while :; do sleep 0.05; done' & until [ -s up ]; do sleep 0.01; done; exit 8",
            8,
        ),
        ("trap '' TERM INT HUP; sleep 60 & sleep 60 & exit 9", 9),
    ] {
        let said = place.run(&["--grace", "300ms", "--", "bash", "-c", script]);
        assert_eq!(said.code, Some(status), "{script}: {}", said.err);
        assert!(!said.err.contains("reaper:"), "{script}: {}", said.err);
    }
}

/// Ends processes that evade a reaper, as a child of the command and as the command.
fn actors(place: &RunWorld) {
    for (play, processes) in [
        ("fork-bomb-on-term", 1),
        ("fork-chain-on-term", 1),
        ("exec-chain-on-term", 1),
        ("leader-first", 1),
        ("nested-subreaper", 2),
        ("clone-sibling", 2),
        ("zombie-parent", 1),
        ("thread-exec", 1),
        ("chain 9 3", 9),
        ("swarm 60", 61),
    ] {
        place.install_worker();
        let wait =
            format!("until [ $(wc -l < report) -ge {processes} ]; do sleep 0.01; done; exit 3");
        let words = place.worker_command(play, "role");
        let mut all = vec!["--grace", "100ms", "--", "sh", "-c"];
        let script = format!("\"$@\" & {wait}");
        all.extend([&script, "sh"]);
        all.extend(words.iter().map(String::as_str));
        let said = place.run(&all);
        assert_eq!(said.code, Some(3), "{play}: {}", said.err);
        // As the command.
        place.install_worker();
        let mut all = vec!["--grace", "100ms", "--timeout", "300ms", "--"];
        all.extend(words.iter().map(String::as_str));
        let said = place.run(&all);
        assert_eq!(said.code, Some(124), "{play}: {}", said.err);
    }
}

/// A process that ignores SIGTERM is killed after the grace. `drain` shows that the grace lasts.
fn grace(place: &RunWorld) {
    let script = "sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 0.05; done' &
        until [ -s pid ]; do sleep 0.01; done";
    let said = place.run(&reported(&["--grace", "100ms"], script));
    assert_eq!(said.code, Some(0), "{}", said.err);
    // The process, and perhaps its current child.
    let report = place.report();
    assert!(report["killed"].as_u64() >= Some(1), "{report}");
}

/// A process that needs time to exit gets it, as do the processes that it starts meanwhile.
fn drain(place: &RunWorld) {
    let script = "sh -c 'trap \"sleep 1.2 && echo drained > drained; exit\" TERM; echo $$ > pid; while :; do sleep 0.05; done' &
        until [ -s pid ]; do sleep 0.01; done; kill -9 $$";
    let said = place.run(&["--grace", "1m", "--", "sh", "-c", script]);
    assert_eq!(said.code, Some(137), "{}", said.err);
    assert_eq!(place.read("drained"), "drained\n");
}

/// With `--leader-first`, the worker is not signalled before the leader exits or the grace expires.
fn leader_first(place: &RunWorld) {
    let worker = "sh -c 'trap \"echo x >> signalled\" TERM; trap \"echo x > notified; exit\" USR1; echo $$ > pid; while :; do sleep 0.02; done' & w=$!
        until [ -s pid ]; do sleep 0.01; done;";
    // The run ends the leader once its trap is set.
    let on = "TERM; echo > ready; while :; do sleep 0.02; done";
    let leader = format!("trap 'sleep 0.5; kill -USR1 $w; wait $w; exit 0' {on}");
    let run = |grace: &str, leader: &str| {
        let done = ["--done-when", "test -e ready", "--every", "50ms"];
        let mut words = vec!["--leader-first", "--grace", grace];
        words.extend(done);
        place.run(&reported(&words, &format!("{worker}{leader}")))
    };
    let said = run("1m", &leader);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(
        (
            place.read("signalled").as_str(),
            place.read("notified").as_str()
        ),
        ("", "x\n")
    );
    // A leader that ignores SIGTERM.
    for said in ["ready", "pid"] {
        fs::remove_file(place.path(said)).expect("remove the files of the first run");
    }
    let leader = format!("trap '' {on}");
    let said = run("300ms", &leader);
    assert_eq!(said.code, Some(0), "{}", said.err);
    // The worker was killed after the grace, without a SIGTERM before.
    let report = place.report();
    assert!(report["killed"].as_u64() >= Some(1), "{report}");
    assert_eq!(place.read("signalled"), "");
}

fn sixty_runs(place: &RunWorld) {
    let script = "for i in $(seq 60); do {
            ./reaper run -- sh -c 'setsid sleep 60 & exit $0' $i
            said=$?; [ $said = $i ] || echo $i gives $said
        } & done; wait";
    let said = place.bash(script, &[]);
    assert_eq!(said.out + &said.err, "");
    place.assert_alone();
}

/// Three runs outlive their crashed parent, and each can be stopped.
fn parent_dies(place: &RunWorld) {
    let script = "for i in 1 2 3; do ./reaper run -- sh -c 'setsid sleep 60 & echo $$ > $0; exec sleep 60' turn$i &
        echo $! > run$i; done; wait";
    let mut bot = place.command("bash");
    let mut bot = place.start_as(bot.args(["-c", script]));
    let turns = [1, 2, 3].map(|n| place.await_pid(&format!("turn{n}")));
    let runs = [1, 2, 3].map(|n| place.await_pid(&format!("run{n}")));
    bot.signal(nix::libc::SIGKILL);
    assert_eq!(bot.end(), 137);
    eventually("the turns have lost the bot", || {
        let mut runs = runs.iter().map(|run| proc::stat(run.pid));
        runs.all(|run| run.is_some_and(|run| run.parent != bot.pid()))
            .then_some(())
    });
    assert!(turns.iter().chain(&runs).all(|one| one.is_alive()));
    for run in runs {
        assert!(run.signal(nix::sys::signal::Signal::SIGTERM));
    }
    eventually("no process is left", || {
        place.living().is_empty().then_some(())
    });
}

/// Root ends a process that has changed its user, as `su` and `sudo` do.
fn other_users(place: &RunWorld) {
    let script = format!(
        "setpriv --reuid {UNPRIVILEGED_UID} --regid {UNPRIVILEGED_UID} --clear-groups setsid sleep 60 & exec sleep 0.2"
    );
    let said = place.run(&["--", "sh", "-c", &script]);
    assert_eq!(said.code, Some(0), "{}", said.err);
}

fn namespaces(place: &RunWorld) {
    for (script, status) in [
        // The init of a PID namespace ignores signals without a handler.
        (
            "unshare --pid --fork --kill-child sh -c 'sleep 60 & echo > up; sleep 60; :' & until [ -s up ]; do sleep 0.01; done; exit 3",
            3,
        ),
        (
            "unshare --pid --fork sh -c 'setsid sleep 60 & echo > up; sleep 60; :' & until [ -s up ]; do sleep 0.01; done; exit 4",
            4,
        ),
    ] {
        let _ = fs::remove_file(place.path("up"));
        let said = place.run(&["--grace", "300ms", "--", "sh", "-c", script]);
        assert_eq!(said.code, Some(status), "{}", said.err);
    }
    // `reaper run` as the init of a PID namespace.
    let script = "unshare --pid --fork --mount-proc ./reaper run -- sh -c 'setsid sleep 60 & echo $$ > inside; exit 5'; echo $?";
    let said = place.bash(script, &[]);
    assert_eq!(
        (said.out.as_str(), place.read("inside").as_str()),
        ("5\n", "2\n"),
        "{}",
        said.err
    );
    place.assert_alone();
}

/// A setuid program in a user's run becomes root's and cannot be signalled.
fn not_permitted(place: &RunWorld) {
    let raise = place.path("raise");
    copy("/usr/bin/setpriv", &raise);
    chown(&raise, Some(0), Some(UNPRIVILEGED_UID)).expect("change the owner");
    fs::set_permissions(&raise, Permissions::from_mode(0o4750)).expect("set the setuid bit");
    // The message contains the process name, so the last exec must be over.
    let script = "./raise --reuid 0 --regid 0 --clear-groups sh -c 'echo $$ > pid; exec sleep 60' &
        until grep -qx sleep /proc/$!/comm; do sleep 0.01; done; exit 3";
    let mut command = place.reaper(&["--grace", "200ms", "--json", "--", "sh", "-c", script]);
    let said = cli::run(
        place.dir.path(),
        command.uid(UNPRIVILEGED_UID).gid(UNPRIVILEGED_UID),
    );
    let root = place.await_pid("pid");
    assert_eq!(said.code, Some(3), "{}", said.err);
    let message = format!(
        "left behind: pid {} (sleep): it may not be signalled by this user",
        root.pid
    );
    assert!(said.err.contains(&message), "{}", said.err);
    assert!(root.is_alive());
    assert!(root.signal(nix::sys::signal::Signal::SIGKILL));
}

/// `reaper run` signals more processes at once than its soft limit of open files allows. The hook has the original limit.
fn more_files(place: &RunWorld) {
    let member = "all() { until [ $(wc -l < $1) -ge 70 ]; do sleep 0.5; done; }
        trap 'echo >> signalled; all signalled; exit' TERM; echo >> up; while :; do sleep 0.5; done";
    let command = "for i in $(seq 70); do sh -c \"$MEMBER\" & done
        until [ $(wc -l < up) -ge 70 ]; do sleep 0.1; done; exit 3";
    let mut bash = place.command("bash");
    let script = "ulimit -Sn 64; : > up; : > signalled
        ./reaper run --grace 60s --report \"$0\" --on-failure 'ulimit -Sn > limit' -- sh -c \"$1\"";
    bash.args(["-c", script, REPORT, command])
        .env("MEMBER", member);
    let said = cli::run(place.dir.path(), &mut bash);
    assert_eq!(said.code, Some(3), "{}", said.err);
    let report = place.report();
    assert_eq!(report["killed"], 0, "{report}");
    assert!(report["ended"].as_u64() >= Some(70), "{report}");
    assert_eq!(place.read("limit"), "64\n");
    place.assert_alone();
}

/// The command leaves more processes than its hard limit of open files. So does a killed owner.
fn few_open_files(place: &RunWorld) {
    let many = "ulimit -n 64; many='trap \"\" TERM; for i in $(seq 150); do sleep 60 & done; echo up > up;'";
    let script = format!(
        "{many}; ./reaper run --grace 300ms -- sh -c \"$many exit 3\"; echo $?; rm up
        ./reaper run --grace 300ms -- sh -c \"$many wait\" & until [ -s up ]; do sleep 0.01; done
        kill -KILL $!; wait $! 2> killed; ./reaper ps"
    );
    let said = place.bash(&script, &[]);
    assert_eq!(
        said.out, "3\nNo run is open; `reaper ps --all` lists finished runs too.\n",
        "{}",
        said.err
    );
    assert!(said.err.contains("closed run "), "{}", said.err);
    place.assert_alone();
}
