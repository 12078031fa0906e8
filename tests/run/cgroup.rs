//! `reaper run --cgroup`. Each test runs in its own cgroup, which is delegated to the test's user.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{RunWorld, ScenarioFn, Started, reported};
use crate::cgroup::Cgroup;
use crate::cli::{self, CommandOutput};
use crate::proc::{self, ProcessKey};
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("cgroup", |place| with_delegated_cgroup(place, nothing_left)),
    ("cgroup-statuses", |place| {
        with_delegated_cgroup(place, statuses)
    }),
    ("cgroup-and-time", |place| {
        with_delegated_cgroup(place, time_is_up)
    }),
    ("cgroups-below", |place| with_delegated_cgroup(place, below)),
    ("cgroup-closed-off", |place| {
        with_delegated_cgroup(place, closed_off)
    }),
    ("cgroup-closed-off-with-owner", |place| {
        with_delegated_cgroup(place, closed_off_with_owner)
    }),
    ("cgroup-with-outside-process", |place| {
        with_delegated_cgroup(place, outside_process)
    }),
    ("cgroup-and-hook", |place| {
        with_delegated_cgroup(place, hook)
    }),
    ("cgroup-without-record", |place| {
        with_delegated_cgroup(place, unrecorded)
    }),
    ("cgroup-of-killed-run", |place| {
        with_delegated_cgroup(place, lost)
    }),
    ("cgroup-of-killed-run-ignoring-signal", |place| {
        with_delegated_cgroup(place, lost_and_ignoring_signal)
    }),
    ("cgroup-of-run-killed-before-start", |place| {
        with_delegated_cgroup(place, never_begun)
    }),
    ("cgroup-refused", |place| {
        with_delegated_cgroup(place, refused)
    }),
];

pub const ROOT_SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("cgroup-not-mounted", |place| {
        with_delegated_cgroup(place, not_mounted)
    }),
    ("cgroup-of-killed-run-not-mounted", |place| {
        with_delegated_cgroup(place, lost_and_not_mounted)
    }),
    ("cgroup-of-threads", |place| {
        with_delegated_cgroup(place, threaded)
    }),
    ("cgroup-with-owner", |place| {
        with_delegated_cgroup(place, with_owner)
    }),
];

fn with_delegated_cgroup(place: &RunWorld, scenario: fn(&RunWorld, &DelegatedCgroup)) {
    let home = DelegatedCgroup::new(place);
    scenario(place, &home);
    home.assert_empty();
}

/// Cgroup that is delegated to the test's user, with an untracked process in it that must survive.
struct DelegatedCgroup {
    outsider: Started,
    cgroup: Cgroup,
}

impl DelegatedCgroup {
    fn new(place: &RunWorld) -> DelegatedCgroup {
        let cgroup = Cgroup::new("");
        for name in [
            "",
            "cgroup.procs",
            "cgroup.threads",
            "cgroup.subtree_control",
        ] {
            let path = cgroup.path().join(name);
            chown(&path, Some(place.uid), Some(place.uid)).expect("delegate the cgroup");
        }
        let mut sleep = Command::new("sleep");
        sleep.arg("600").env_clear().uid(place.uid).gid(place.uid);
        enter(cgroup.path(), &mut sleep);
        let outsider = Started(sleep.spawn().expect("start the outsider"));
        DelegatedCgroup { outsider, cgroup }
    }

    fn path(&self) -> &Path {
        self.cgroup.path()
    }

    /// Returns a command that runs `reaper run --cgroup` with these arguments in this cgroup.
    fn reaper(&self, place: &RunWorld, words: &[&str]) -> Command {
        let mut command = place.reaper(&[&["--cgroup"], words].concat());
        enter(self.path(), &mut command);
        command
    }

    /// Runs [`DelegatedCgroup::reaper`] until it exits, and asserts that no process and no cgroup is left.
    fn run(&self, place: &RunWorld, words: &[&str]) -> CommandOutput {
        let said = cli::run(place.dir.path(), &mut self.reaper(place, words));
        place.assert_alone();
        self.assert_empty();
        said
    }

    /// Returns the child cgroups.
    fn below(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path())
            .expect("list the cgroup")
            .flatten();
        let paths = entries.map(|entry| entry.path());
        paths.filter(|path| path.is_dir()).collect()
    }

    fn assert_empty(&self) {
        let below = self.below();
        assert!(below.is_empty(), "cgroups left: {below:?}");
    }

    /// Returns the only child cgroup, that of the run.
    fn leaf(&self) -> PathBuf {
        let below = self.below();
        assert_eq!(below.len(), 1, "{below:?}");
        below[0].clone()
    }
}

impl Drop for DelegatedCgroup {
    fn drop(&mut self) {
        let alive = self.outsider.lives();
        // A failed test may leave processes there.
        for below in self.below() {
            let _ = fs::write(below.join("cgroup.kill"), "1");
            eventually("the cgroup is removed", || fs::remove_dir(&below).ok());
        }
        let _ = self.outsider.0.kill();
        assert!(
            alive || std::thread::panicking(),
            "an untracked process was ended"
        );
    }
}

/// Makes a command start in `cgroup`, whatever its user.
fn enter(cgroup: &Path, command: &mut Command) {
    let procs = File::options()
        .write(true)
        .open(cgroup.join("cgroup.procs"));
    let procs = procs.expect("open the cgroup");
    // SAFETY: the closure makes only a system call between fork and exec.
    unsafe { command.pre_exec(move || (&procs).write_all(b"0")) };
}

/// Returns the cgroup v2 path of a process, relative to the root of the hierarchy.
fn cgroup_of(process: ProcessKey) -> String {
    let file = fs::read_to_string(format!("/proc/{}/cgroup", process.pid))
        .expect("read the cgroup of a process");
    let mut lines = file.lines().filter_map(|line| line.strip_prefix("0::"));
    lines.next().expect("a cgroup v2 line").to_owned()
}

/// The command runs in the run's cgroup, `reaper run` does not. All that the command leaves there is ended, even a process
/// without its environment.
fn nothing_left(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "trap '' TERM
        (setsid sh -c 'echo $$ > first; exec sleep 60' &)
        (setsid env -i sh -c 'trap \"\" TERM; echo $$ > second; while :; do sleep 0.05; done' &)
        until [ -s first ] && [ -s second ]; do sleep 0.01; done
        echo $$ > pid; until [ -e go ]; do sleep 0.02; done; exit 3";
    let words = reported(&["--grace", "500ms"], script);
    let mut run = place.start_as(&mut home.reaper(place, &words));
    let left = ["pid", "first", "second"].map(|name| place.await_pid(name));
    let own = cgroup_of(proc::stat(run.pid()).expect("the run").id);
    let leaf = home.leaf();
    let name = leaf.file_name().expect("a name").to_str().expect("UTF-8");
    let id = name
        .strip_prefix("reaper-run-")
        .expect("the name of a run's cgroup");
    for one in left {
        assert_eq!(cgroup_of(one), format!("{own}/{name}"));
    }
    let known = &place.ps(&[])[0];
    assert_eq!(
        (&known["id"], &known["cgroup"]),
        (&id.into(), &leaf.to_str().into())
    );
    fs::write(place.path("go"), "").expect("let the command exit");
    assert_eq!((run.end(), place.read("err").as_str()), (3, ""));
    assert!(!left.iter().any(|one| one.is_alive()));
    let report = place.report();
    assert_eq!(
        (&report["outcome"], &report["survivors"]),
        (&"failed".into(), &serde_json::json!([]))
    );
    assert!(report["ended"].as_u64() >= Some(2), "{report}");
    assert!(report["killed"].as_u64() >= Some(1), "{report}");
}

/// The exit status is the command's, as without a cgroup.
fn statuses(place: &RunWorld, home: &DelegatedCgroup) {
    fs::write(place.path("plain"), "").expect("write a file");
    for (words, status) in [
        (&["true"][..], 0),
        (&["sh", "-c", "exit 7"], 7),
        (&["sh", "-c", "kill -9 $$"], 137),
        (&["./absent"], 127),
        (&["./plain"], 126),
    ] {
        let said = home.run(place, &[&["--"], words].concat());
        assert_eq!(said.code, Some(status), "{words:?}: {}", said.err);
        assert_eq!(
            said.err.is_empty(),
            !(126..128).contains(&status),
            "{}",
            said.err
        );
    }
}

fn time_is_up(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "trap '' TERM; (setsid sleep 60 &); while :; do sleep 0.05; done";
    let words = [
        "--timeout",
        "500ms",
        "--grace",
        "200ms",
        "--",
        "sh",
        "-c",
        script,
    ];
    let words = [&["-q"], &words[..]].concat();
    let said = home.run(place, &words);
    assert_eq!((said.code, said.err.as_str()), (Some(124), ""));
}

/// Child cgroups that the command creates belong to the run. So do threaded ones.
fn below(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "cd $(ls -d \"$0\"/reaper-run-*) && mkdir -p a/b t/threads || exit 1
        echo threaded > t/threads/cgroup.type || exit 2
        ignores_term='trap \"\" TERM; echo $$; while :; do sleep 0.05; done'
        (setsid sh -c \"echo 0 > a/b/cgroup.procs && $ignores_term\" > \"$1/first\" &)
        (setsid sh -c \"echo 0 > t/cgroup.procs && echo 0 > t/threads/cgroup.threads && $ignores_term\" > \"$1/second\" &)
        until [ -s \"$1/first\" ] && [ -s \"$1/second\" ]; do sleep 0.01; done; exit 5";
    let places = [home.path(), place.dir.path()];
    let [own, dir] = places.map(|path| path.to_str().expect("UTF-8"));
    let words = ["--grace", "200ms", "--timeout", "60s"];
    let words = [&words[..], &["--", "sh", "-c", script, own, dir]].concat();
    let said = home.run(place, &words);
    assert_eq!((said.code, said.err.as_str()), (Some(5), ""));
}

/// A process moved into the run's cgroup belongs to the run. That holds even if the user may not signal it.
fn outside_process(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "echo $$ > pid; until [ -e go ]; do sleep 0.02; done; exit 4";
    // Root sends SIGTERM. On a slow machine, the process needs time to exit.
    let grace = if place.uid == 0 { "60s" } else { "300ms" };
    let words = reported(&["--grace", grace], script);
    let mut run = place.start_as(&mut home.reaper(place, &words));
    place.await_pid("pid");
    let mut sleep = Command::new("sleep");
    enter(&home.leaf(), sleep.arg("600"));
    let mut outsider = Started(sleep.spawn().expect("start a process of this test's user"));
    fs::write(place.path("go"), "").expect("let the command exit");
    assert_eq!((run.end(), place.read("err").as_str()), (4, ""));
    assert_eq!(outsider.end(), if place.uid == 0 { 143 } else { 137 });
    let report = place.report();
    assert_eq!(report["ended"], 1, "{report}");
}

/// The hook runs in a cgroup of the same name. Child cgroups that the command created do not matter.
fn hook(place: &RunWorld, home: &DelegatedCgroup) {
    let hook = "grep ^0: /proc/self/cgroup > hook; setsid sleep 60 &";
    let script = "mkdir $(ls -d \"$0\"/reaper-run-*)/x; grep ^0: /proc/self/cgroup > own";
    let own = home.path().to_str().expect("UTF-8");
    let said = home.run(
        place,
        &["--on-success", hook, "--", "sh", "-c", script, own],
    );
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    assert!(place.read("own").contains("/reaper-run-"));
    assert_eq!(place.read("own"), place.read("hook"));
}

/// A run that cannot be recorded has a cgroup too.
fn unrecorded(place: &RunWorld, home: &DelegatedCgroup) {
    fs::write(place.path("state"), "").expect("write a file");
    let script = "(setsid sleep 60 &); grep -q /reaper-run- /proc/self/cgroup";
    let said = home.run(place, &["--", "sh", "-c", script]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
}

/// The next `reaper` command ends even processes without any sign of descent. It sends the signal of `--signal` first.
fn lost(place: &RunWorld, home: &DelegatedCgroup) {
    let drains = "trap \"sleep 0.3; echo drained > drained; exit\" USR1; echo $$ > first; while :; do sleep 0.05; done";
    let known = lose(place, home, "60s", drains);
    assert_eq!(place.read("drained"), "drained\n");
    assert_eq!(known["killed"], 0, "{known}");
}

/// Processes that ignore USR1 get SIGKILL.
fn lost_and_ignoring_signal(place: &RunWorld, home: &DelegatedCgroup) {
    let ignores_signal = "trap \"\" USR1; echo $$ > first; while :; do sleep 0.05; done";
    let known = lose(place, home, "200ms", ignores_signal);
    assert!(known["killed"].as_u64() >= Some(1), "{known}");
}

/// Kills the owner of a run with two orphans. One of them runs `script`. Then `reaper ps` must end the run. Returns the
/// run as `reaper ps` shows it afterwards.
fn lose(place: &RunWorld, home: &DelegatedCgroup, grace: &str, script: &str) -> serde_json::Value {
    let script = format!(
        "(setsid sh -c '{script}' &); (setsid env -i sh -c 'echo $$ > second; exec sleep 60' &)
        until [ -s first ] && [ -s second ]; do sleep 0.01; done; echo $$ > pid; exec sleep 60"
    );
    let words = ["--name", "x", "--signal", "USR1", "--grace", grace, "--"];
    let words = [&words[..], &["sh", "-c", &script]].concat();
    let run = place.start_as(&mut home.reaper(place, &words));
    let left = ["pid", "first", "second"].map(|name| place.await_pid(name));
    run.signal(nix::libc::SIGKILL);
    eventually("the orphans are adopted", || {
        let all = left.map(|one| proc::stat(one.pid).map(|stat| stat.parent));
        let lost = all.iter().all(|parent| *parent != Some(run.pid()));
        lost.then_some(())
    });
    assert!(left.iter().all(|one| one.is_alive()));
    let said = place.ask(&["ps", "--all"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("closed run "), "{}", said.err);
    assert!(!left.iter().any(|one| one.is_alive()));
    place.assert_alone();
    let known = place.ps(&["--all"]).remove(0);
    assert!(known["ended"].as_u64() >= Some(3), "{known}");
    known
}

/// A `reaper` command that cannot see the cgroup does not close the run: orphans in the cgroup would survive.
fn lost_and_not_mounted(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "(setsid sh -c 'echo $$ > escaped; exec sleep 60' &)
        until [ -s escaped ]; do sleep 0.01; done; echo $$ > pid; exec sleep 60";
    let mut run =
        place.start_as(&mut home.reaper(place, &["--name", "x", "--", "sh", "-c", script]));
    let left = ["pid", "escaped"].map(|name| place.await_pid(name));
    run.signal(nix::libc::SIGKILL);
    assert_eq!(run.end(), 137);
    let script = "umount -l \"$(findmnt -n -o TARGET -T \"$0\")\" && ./reaper ps";
    let mut unshare = place.command("unshare");
    unshare.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    let said = cli::run(place.dir.path(), unshare.arg(home.path()));
    assert!(said.err.contains("is not visible"), "{}", said.err);
    assert!(said.out.contains(" x "), "{}", said.out);
    assert!(left.iter().all(|one| one.is_alive()));
    let said = place.ask(&["ps"]);
    assert!(said.err.contains("closed run "), "{}", said.err);
    place.assert_alone();
}

/// An unreadable child cgroup protects no other process.
fn closed_off(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "for leaf in \"$0\"/reaper-run-*; do mkdir -m 0 \"$leaf/x\" || exit 9; done
        (setsid sh -c 'trap \"\" TERM; echo up > up; while :; do sleep 0.1; done' &)
        until [ -s up ]; do sleep 0.01; done; exit 3";
    let path = home.path().display().to_string();
    let said = home.run(
        place,
        &["--grace", "200ms", "--", "sh", "-c", script, &path],
    );
    assert_eq!((said.code, said.err.as_str()), (Some(3), ""));
}

/// The owner is moved into a child cgroup that it cannot read. It does not kill itself.
fn closed_off_with_owner(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "for leaf in \"$0\"/reaper-run-*; do
            mkdir \"$leaf/x\" && echo $PPID > \"$leaf/x/cgroup.procs\" && chmod 0 \"$leaf/x\" || exit 9
        done
        (setsid sh -c 'trap \"\" TERM; echo up > up; exec sleep 60' &)
        until [ -s up ]; do sleep 0.01; done; exit 6";
    let path = home.path().display().to_string();
    let words = ["--grace", "200ms", "--", "sh", "-c", script, &path];
    let said = cli::run(place.dir.path(), &mut home.reaper(place, &words));
    assert_eq!(said.code, Some(6), "{}", said.err);
    assert!(
        said.err.contains("cannot remove the cgroup"),
        "{}",
        said.err
    );
    for left in home.below() {
        eventually("the cgroup is removed", || {
            fs::remove_dir(left.join("x")).ok()
        });
        fs::remove_dir(&left).expect("remove the cgroup");
    }
}

/// The cgroup of a run that is killed before its command starts is removed.
fn never_begun(place: &RunWorld, home: &DelegatedCgroup) {
    let holds = place.start_as(&mut place.reaper(&["--limit", "x=1", "--", "sleep", "60"]));
    // The run is recorded before it has the slot.
    eventually("the slot is taken", || {
        (place.ps(&[]).first()?["state"] == "running").then_some(())
    });
    let waits = place.start_as(&mut home.reaper(place, &["--limit", "x=1", "--", "true"]));
    eventually("the cgroup of the run exists", || {
        home.below().first().map(drop)
    });
    waits.signal(nix::libc::SIGKILL);
    eventually("the run is closed", || {
        place.ask(&["ps"]);
        home.below().is_empty().then_some(())
    });
    holds.signal(nix::libc::SIGTERM);
    place.await_alone();
}

/// If no cgroup can be created, the command is not started. The error says what to do.
fn refused(place: &RunWorld, home: &DelegatedCgroup) {
    let limit = home.path().join("cgroup.max.descendants");
    fs::write(&limit, "0").expect("allow no child cgroup");
    refuse(
        place,
        home,
        &[
            home.path().to_str().expect("UTF-8"),
            "raise cgroup.max.descendants",
        ],
    );
    fs::write(&limit, "max").expect("allow child cgroups");
    if place.uid == 0 {
        return;
    }
    for name in ["cgroup.procs", ""] {
        chown(home.path().join(name), Some(0), Some(0)).expect("revoke the delegation");
        refuse(
            place,
            home,
            &[
                home.path().to_str().expect("UTF-8"),
                "not delegated",
                "systemd-run",
            ],
        );
    }
    let mut detached = home.reaper(place, &["--detach", "--", "touch", "begun"]);
    let said = cli::run(place.dir.path(), &mut detached);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(said.err.contains("not delegated"), "{}", said.err);
}

fn refuse(place: &RunWorld, home: &DelegatedCgroup, why: &[&str]) {
    let said = home.run(place, &["--", "touch", "begun"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    for word in why {
        assert!(said.err.contains(word), "{word}: {}", said.err);
    }
    assert!(!place.path("begun").exists());
}

/// Fails where the cgroup file system is read-only, and where it is not mounted.
fn not_mounted(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "set -e; at=$(findmnt -n -o TARGET -T \"$0\")
        mount -o remount,bind,ro \"$at\"; $1 || echo $?; umount -l \"$at\"; $1 || echo $?";
    let mut unshare = place.command("unshare");
    unshare.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    unshare
        .arg(home.path())
        .arg("./reaper run --cgroup -- touch begun");
    enter(home.path(), &mut unshare);
    let said = cli::run(place.dir.path(), &mut unshare);
    assert_eq!(said.out, "125\n125\n", "{}", said.err);
    assert!(
        said.err.contains("read-only") && said.err.contains("no cgroup of version 2"),
        "{}",
        said.err
    );
    assert!(!place.path("begun").exists());
}

fn threaded(place: &RunWorld, home: &DelegatedCgroup) {
    let threads = home.path().join("threads");
    fs::create_dir(&threads).expect("make a cgroup");
    fs::write(threads.join("cgroup.type"), "threaded").expect("make the cgroup threaded");
    let mut command = place.reaper(&["--cgroup", "--", "touch", "begun"]);
    enter(home.path(), &mut command);
    let said = cli::run(place.dir.path(), &mut command);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(said.err.contains("threaded cgroup"), "{}", said.err);
    assert!(!place.path("begun").exists());
    fs::remove_dir(&threads).expect("remove the cgroup");
}

/// The owner and its shell are moved into the run's cgroup. Both survive, and the other processes do not.
fn with_owner(place: &RunWorld, home: &DelegatedCgroup) {
    let script = "cd $(ls -d \"$0\"/reaper-run-*) && echo $PPID > cgroup.procs
        cut -d' ' -f4 /proc/$PPID/stat > cgroup.procs; (setsid sh -c \"trap '' TERM; sleep 60\" &); exit 6";
    let line = format!(
        "./reaper run --cgroup --grace 200ms -- sh -c '{}' {}; echo $?",
        script.replace('\'', "'\\''"),
        home.path().display()
    );
    let mut shell = place.command("sh");
    shell.args(["-c", &line]);
    enter(home.path(), &mut shell);
    let said = cli::run(place.dir.path(), &mut shell);
    assert_eq!(said.out, "6\n", "{}", said.err);
    assert!(
        said.err.contains("cannot remove the cgroup"),
        "{}",
        said.err
    );
    place.assert_alone();
    for left in home.below() {
        eventually("the cgroup is removed", || fs::remove_dir(&left).ok());
    }
}
