//! Runs whose owner was killed by SIGKILL, without a service. The next `reaper` command closes them.

use std::fs;
use std::path::PathBuf;

use super::{RunWorld, ScenarioFn, Started, UNPRIVILEGED_UID};
use crate::proc::ProcessKey;
use crate::world::eventually;

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("owner-killed", owner_killed),
    ("owner-killed-during-stop", owner_killed_during_stop),
    (
        "owner-killed-right-after-start",
        owner_killed_right_after_start,
    ),
    ("owner-killed-and-next-run", owner_killed_and_next_run),
    ("owner-killed-during-probe", owner_killed_during_probe),
    ("owner-killed-during-hook", owner_killed_during_hook),
    ("bot-crashed", bot_crashed),
    ("another-boot", another_boot),
    ("damaged-record", damaged_record),
];

pub const ROOT_SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("records-full", records_full),
    ("disk-full-during-run", disk_full),
    ("disk-read-only-during-run", disk_read_only),
    ("container-killed", container_killed),
    ("records-of-others", records_of_others),
];

/// Starts a run, kills its owner, and returns both with the surviving tree: the command, and a child that runs `script`.
fn lose(place: &RunWorld, words: &[&str], script: &str) -> (Started, [ProcessKey; 2]) {
    let script = format!(
        "sh -c '{script}' & echo $$ > command; until [ -s child ]; do sleep 0.01; done; wait"
    );
    let mut run = place.start(&[words, &["--", "sh", "-c", &script]].concat());
    let tree = [place.await_pid("command"), place.await_pid("child")];
    run.signal(nix::libc::SIGKILL);
    assert_eq!(run.end(), 137);
    assert!(tree.iter().all(|one| one.is_alive()));
    (run, tree)
}

const SLEEPS: &str = "echo $$ > child; exec sleep 60";

/// The next command ends the tree with the signal and the grace of the run.
fn owner_killed(place: &RunWorld) {
    let drains = "trap \"sleep 0.3; echo drained > drained; exit\" USR1; echo $$ > child; while :; do sleep 0.05; done";
    lose(
        place,
        &["--name", "x", "--signal", "USR1", "--grace", "20s"],
        drains,
    );
    let said = place.ask(&["ps", "--all"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.err.contains("(x): its `reaper run` was killed"),
        "{}",
        said.err
    );
    assert!(said.out.contains("death"), "{}", said.out);
    place.assert_alone();
    assert_eq!(place.read("drained"), "drained\n");
    assert_eq!(place.ask(&["wait", "x"]).code, Some(1));
    assert_eq!(place.ask(&["ps"]).err, "", "a closed run is reported once");
}

/// A `reaper stop` in progress completes after the owner is killed. It sends SIGKILL to a process that ignores SIGTERM.
fn owner_killed_during_stop(place: &RunWorld) {
    let ignores_term = "trap \"\" TERM; echo $$ > child; while :; do sleep 0.05; done";
    let script = format!(
        "sh -c '{ignores_term}' & trap '' TERM; echo $$ > command; while :; do sleep 0.05; done"
    );
    let run = place.start(&["--name", "x", "--grace", "2s", "--", "sh", "-c", &script]);
    place.await_pid("command");
    place.await_pid("child");
    let mut stop = place.command("./reaper");
    let mut stop = stop
        .args(["stop", "x"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("start `reaper stop`");
    eventually("the run is ending", || {
        let runs = place.ps(&[]);
        runs.iter()
            .any(|run| run["state"] == "ending")
            .then_some(())
    });
    run.signal(nix::libc::SIGKILL);
    // `reaper stop` takes over from the killed owner.
    assert_eq!(stop.wait().expect("wait for `reaper stop`").code(), Some(0));
    place.assert_alone();
    assert_eq!(place.ps(&["--all"])[0]["outcome"], "cancelled");
}

/// However soon the owner is killed after its start, every process of the run is recorded.
fn owner_killed_right_after_start(place: &RunWorld) {
    let script =
        "for n in 0 1 2 3 4; do for wait in 0 0.001 0.002 0.003 0.004 0.006 0.008 0.012; do
            ./reaper run -- sh -c 'sleep 60 & wait' &
            sleep $wait
            kill -KILL $!
        done; done 2> killed; wait 2>> killed";
    // Some test hosts have no bash.
    place.script("sh", script, &[]);
    // A child keeps the record locked until its exec.
    eventually("nothing is left", || {
        let open = place.ps(&[]);
        (open.is_empty() && place.living().is_empty()).then_some(())
    });
}

/// The kernel kills the probe with its owner, before any other `reaper` command runs.
fn owner_killed_during_probe(place: &RunWorld) {
    let probe = "echo $$ > probe; exec sleep 60";
    let words = ["--every", "10ms", "--done-when", probe, "--", "sleep", "60"];
    let mut run = place.start(&words);
    let probe_shell = place.await_pid("probe");
    run.signal(nix::libc::SIGKILL);
    assert_eq!(run.end(), 137);
    eventually("the probe is killed", || {
        (!probe_shell.is_alive()).then_some(())
    });
    place.ask(&["ps"]);
    place.await_alone();
}

/// The next `reaper` command ends a hook as it ends the command.
fn owner_killed_during_hook(place: &RunWorld) {
    let hook = "sleep 60 & echo $$ > hook; wait";
    let mut run = place.start(&["--on-success", hook, "--", "true"]);
    let hook = place.await_pid("hook");
    run.signal(nix::libc::SIGKILL);
    assert_eq!(run.end(), 137);
    assert!(hook.is_alive());
    place.ask(&["ps"]);
    place.await_alone();
    assert_eq!(place.ps(&["--all"])[0]["outcome"], "success");
}

/// A bot is killed during two turns, together with the owner of one. The next bot reads the run records. `reaper ps` ends
/// the turn without an owner, and `reaper stop` cancels the other.
fn bot_crashed(place: &RunWorld) {
    let turn = "setsid sleep 60 & echo $$ > $0; exec sleep 60";
    let script = format!(
        "for n in 1 2; do ./reaper run --agent bot --session turn$n -- sh -c '{turn}' turn$n & echo $! > run$n; done; wait"
    );
    let mut bot = place.command("sh");
    let mut bot = place.start_as(bot.args(["-c", &script]));
    let turns = [1, 2].map(|n| place.await_pid(&format!("turn{n}")));
    let lost = place.await_pid("run1");
    bot.signal(nix::libc::SIGKILL);
    assert_eq!(bot.end(), 137);
    assert!(lost.signal(nix::sys::signal::Signal::SIGKILL));
    eventually("the owner has exited", || (!lost.is_alive()).then_some(()));
    assert!(turns.iter().all(|turn| turn.is_alive()));
    // Each open run has a record file.
    let open = open_records(place);
    assert_eq!(open.len(), 2);
    let said = fs::read_to_string(&open[0]).expect("read a record");
    assert!(said.contains("\"agent\":\"bot\"") && said.contains("boot_id"));
    // The next bot.
    let runs = place.ps(&[]);
    assert!(!turns[0].is_alive() && turns[1].is_alive());
    assert_eq!((runs.len(), &runs[0]["session"]), (1, &"turn2".into()));
    let id = runs[0]["id"].as_str().expect("an id");
    let said = place.ask(&["stop", id]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    place.await_alone();
    let all = place.ps(&["--all"]);
    let outcome = |session: &str| {
        let run = all.iter().find(|run| run["session"] == session);
        run.map(|run| run["outcome"].clone())
    };
    assert_eq!(outcome("turn1"), Some("death".into()));
    assert_eq!(outcome("turn2"), Some("cancelled".into()));
}

/// The next `reaper run` ends the lost tree before it starts its own command.
fn owner_killed_and_next_run(place: &RunWorld) {
    let (_run, tree) = lose(place, &[], SLEEPS);
    let said = place.ask(&[
        "run",
        "--",
        "sh",
        "-c",
        &format!("readlink /proc/{}/exe", tree[0].pid),
    ]);
    // A zombie has no executable.
    assert_ne!(said.code, Some(0), "the lost tree is alive: {}", said.out);
    assert!(!said.err.contains("reaper:"), "{}", said.err);
    place.assert_alone();
}

/// Never signals processes recorded in another boot.
fn another_boot(place: &RunWorld) {
    let (_run, tree) = lose(place, &["--name", "x"], SLEEPS);
    change_record(place, |record| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("read the boot id");
        record.replace(boot.trim(), "01234567-89ab-cdef-0123-456789abcdef")
    });
    let said = place.ask(&["ps", "--all"]);
    assert!(said.err.contains("rebooted"), "{}", said.err);
    assert!(said.out.contains("death"), "{}", said.out);
    assert!(tree.iter().all(|one| one.is_alive()));
    let said = place.ask(&["stop", "x"]);
    assert!(said.out.contains("had already ended"), "{}", said.out);
    assert!(tree.iter().all(|one| one.is_alive()));
}

/// A damaged record is moved aside and reported. Other runs work.
fn damaged_record(place: &RunWorld) {
    let (_run, tree) = lose(place, &["--name", "x"], SLEEPS);
    change_record(place, |record| record.replacen("\"wrapper\"", "\"wrap", 1));
    let mut other = place.start(&[
        "--name",
        "y",
        "--",
        "sh",
        "-c",
        "echo $$ > up; exec sleep 60",
    ]);
    place.await_pid("up");
    let said = place.read("err") + &place.ask(&["ps"]).err;
    assert!(said.contains("damaged"), "{said}");
    let runs = place.ps(&[]);
    assert_eq!((runs.len(), &runs[0]["name"]), (1, &"y".into()));
    assert_eq!(place.ask(&["stop", "y"]).code, Some(0));
    assert_eq!(other.end(), 143);
    assert!(tree.iter().all(|one| one.is_alive()));
    let files = fs::read_dir(place.records())
        .expect("list the records")
        .flatten();
    let aside = files.filter(|file| file.path().extension().unwrap_or_default() == "damaged");
    assert_eq!(aside.count(), 1);
}

fn change_record(place: &RunWorld, change: impl FnOnce(String) -> String) {
    let path = &open_records(place)[0];
    let record = fs::read_to_string(path).expect("read the record");
    fs::write(path, change(record)).expect("write the record");
}

fn open_records(place: &RunWorld) -> Vec<PathBuf> {
    let files = fs::read_dir(place.records()).expect("list the records");
    let paths = files.flatten().map(|file| file.path());
    let open = paths.filter(|path| path.extension().unwrap_or_default() == "run");
    open.collect()
}

/// Script that ignores SIGTERM.
const IGNORES_TERM: &str = "trap \"\" TERM; echo $$ > $0; while :; do sleep 0.05; done";

/// Starts the runs `one` and `two`, and kills the owner of `two`. Their records are on a separate file system. Then
/// runs `script`, which stops `one` and prints whether each is alive. Asserts that neither is.
fn with_disk(place: &RunWorld, script: &str) -> crate::cli::CommandOutput {
    let mount = "set -e; mount -t tmpfs -o size=128k,mode=700 none state
        run() { name=$1; shift; ./reaper run --name $name --grace 200ms -- sh -c \"$ignores_term\" $name 2>> errors &
            last=$!; until [ -s $name ]; do sleep 0.01; done; }
        lives() { readlink /proc/$(cat $1)/exe > /dev/null && echo $1 lives || echo $1 is gone; }
        run one; run two; kill -KILL $last; wait $last 2> /dev/null || true";
    fs::create_dir(place.path("state")).expect("create a directory");
    let mut command = place.command("unshare");
    command.env("ignores_term", IGNORES_TERM);
    let words = ["--mount", "--propagation", "private", "sh", "-c"];
    let said = crate::cli::run(
        place.dir.path(),
        command.args(words).arg(format!("{mount}\n{script}")),
    );
    place.await_alone();
    assert!(
        said.out.contains("(one) stopped\n") && said.out.ends_with("one is gone\ntwo is gone\n"),
        "{}{}",
        said.out,
        said.err
    );
    said
}

/// A disk that becomes full has room for the end of each run. The record reserves it.
fn disk_full(place: &RunWorld) {
    let script = "cat /dev/zero > state/fill 2> /dev/null || true
        ./reaper stop one; ./reaper ps --all --json > ps; lives one; lives two
        wait $(jobs -p) 2> /dev/null || true";
    with_disk(place, script);
    let said = place.read("ps");
    for outcome in ["\"cancelled\"", "\"death\""] {
        assert_eq!(said.matches(outcome).count(), 1, "{said}");
    }
    assert!(!said.contains("could not be written"), "{said}");
}

/// A command that cannot write the record ends the run all the same, and reports the failed write.
fn disk_read_only(place: &RunWorld) {
    let script = "cat > inner << 'END'
            mount --bind state state; mount -o remount,bind,ro state
            ./reaper stop one
END
        unshare --mount --propagation private sh ./inner; lives one; lives two";
    let said = with_disk(place, script);
    let is_unwritten = |line: &&str| line.contains("cannot be written") && line.contains("record");
    let unwritten = said.err.lines().filter(is_unwritten).count();
    assert_eq!(unwritten, 2, "{}", said.err);
}

/// The kernel kills a whole PID namespace at once. The name of its run is free again.
fn container_killed(place: &RunWorld) {
    let inside = "./reaper run --name x -- sh -c 'echo > up; exec sleep 60'";
    let words = [
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
    ];
    let mut unshare = place.command("unshare");
    let mut container = place.start_as(unshare.args(words).arg(inside));
    place.await_content("up", |content| !content.is_empty());
    let said = place.ask(&["run", "--name", "x", "--", "touch", "begun"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    container.signal(nix::libc::SIGKILL);
    assert_eq!(container.end(), 137);
    place.await_alone();
    let said = place.ask(&["run", "--name", "x", "--", "touch", "begun"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(place.path("begun").exists());
}

/// Runs on a full and on a read-only file system: only a run that needs its record is refused.
fn records_full(place: &RunWorld) {
    let script =
        "set -e; mount -t tmpfs -o size=16k,mode=700 none state; mkdir -p state/reaper/runs
        head -c 100000 /dev/zero > state/fill 2> /dev/null || true
        $0 $1
        mount -o remount,ro state
        $0 $1";
    let runs = "./reaper run -- sh -c 'exit 3' > out 2>&1; echo $? $(cat out | wc -c)
        ./reaper run --name x -- touch begun > out 2>&1; echo $? $(grep -c 'cannot use the records of runs' out)";
    fs::create_dir(place.path("state")).expect("create a directory");
    fs::write(place.path("script"), runs).expect("write the script");
    let mut command = place.command("unshare");
    let said = crate::cli::run(
        &place.path("state"),
        command.args([
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-c",
            script,
            "bash",
            "script",
        ]),
    );
    assert_eq!(said.out, "3 0\n125 1\n".repeat(2), "{}", said.err);
    assert!(!place.path("begun").exists());
}

/// Root ignores run records of another user and does not write to their directory.
fn records_of_others(place: &RunWorld) {
    let mut command = place.reaper(&["--name", "x", "--", "true"]);
    let said = crate::cli::run(place.dir.path(), &mut command);
    assert_eq!(said.code, Some(0), "{}", said.err);
    std::os::unix::fs::chown(place.records(), Some(UNPRIVILEGED_UID), None)
        .expect("change the owner");
    let said = place.ask(&["ps", "--all"]);
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(
        said.err.contains(&format!("owner {UNPRIVILEGED_UID}")),
        "{}",
        said.err
    );
    let said = place.ask(&["run", "--", "sh", "-c", "exit 3"]);
    assert_eq!((said.code, said.err.as_str()), (Some(3), ""));
    let said = place.ask(&["run", "--name", "x", "--", "touch", "begun"]);
    assert_eq!(said.code, Some(125), "{}", said.err);
    assert!(!place.path("begun").exists());
}
