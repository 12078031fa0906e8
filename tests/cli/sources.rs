//! Where the probes cannot be had: what a user without any privilege gets instead, in a container too.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use nix::errno::Errno;

use super::{CommandOutput, run};
use crate::daemon::REAPER;
use crate::trees::trial;
use crate::world::{TempDir, link};

pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "nobodys-own-service", || {
            let said = nobodys_service(61_001, &["setpriv"], "procfs");
            assert!(said.out.contains("through procfs"), "{}", said.out);
        }),
        trial("cli", "proc-of-another-pid-namespace", foreign_proc),
        trial("cli", "nobodys-own-service-in-a-container", || {
            let said = nobodys_service(61_002, &CONTAINER, "auto");
            let why = "proc-connector cannot be used: ";
            assert!(said.out.contains("through procfs"), "{}", said.out);
            assert!(said.out.contains(why), "{}", said.out);
        }),
        trial("cli", "without-pidfds", without_pidfds),
        trial("cli", "what-cannot-be-understood", misunderstood),
        trial("cli", "nobodys-own-service-with-hidden-processes", || {
            let said = nobodys_service(61_003, &HIDDEN, "procfs");
            assert!(said.out.contains("hidepid"), "{}", said.out);
        }),
    ]
}

/// Where /proc shows the host's pids to whoever has others, each would be taken for whoever has it here.
fn foreign_proc() {
    let dir = TempDir::new();
    let refused = |status: i32, arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", REAPER]).args(arguments);
        command.env("XDG_STATE_HOME", dir.path().join("state"));
        let said = run(dir.path(), &mut command);
        assert_eq!(
            said.code,
            Some(status),
            "{arguments:?}: {}{}",
            said.out,
            said.err
        );
        let why = "/proc cannot be used: it shows the processes of another pid namespace";
        assert!(said.err.contains(why), "{arguments:?}: {}", said.err);
    };
    let place = dir.path().join("run").display().to_string();
    for source in ["auto", "ebpf", "proc-connector", "procfs"] {
        // If it began all the same, it would only observe.
        let of = [
            "daemon",
            "--observe",
            "--no-journal",
            "--no-pin",
            "--runtime-dir",
            &place,
        ];
        refused(3, &[&of[..], &["--source", source]].concat());
    }
    refused(125, &["run", "--", "true"]);
}

/// Pids of its own, and a /proc for them.
const CONTAINER: [&str; 8] = [
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--propagation",
    "private",
    "setpriv",
];
/// The same, where that shows everybody their own processes alone.
const HIDDEN: [&str; 10] = [
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--propagation",
    "private",
    "sh",
    "-c",
    "mount -o remount,hidepid=2 /proc && setpriv \"$@\"",
];

/// What every script begins with: a service on what descends from it alone, and a canary beside.
const BEGIN: &str = r#"
export XDG_RUNTIME_DIR=$PWD/run XDG_STATE_HOME=$PWD/state HOME=$PWD
until_told() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        [ $n -lt 150 ] || { echo "not told: $1"; cat told; exit 9; }
        sleep 0.1
    done
}
trap 'kill -KILL $(cat daemon canary agent one two) 2> /dev/null' EXIT
./reaper doctor
./reaper daemon --user --scope $$ --source SOURCE --config config.toml > told 2>&1 &
daemon=$!
echo $daemon > daemon
until_told 'grep -q " ready " told'
sleep 100 &
canary=$!
echo $canary > canary
./my-agent -c 'sleep 101 & echo $! > one; sleep 102 & echo $! > two; echo $$ > agent; wait' &
until_told '[ -s agent ] && [ "$(./reaper tree --socket run/reaper/*.sock | grep -c -- "- sleep 10")" = 2 ]'
"#;

/// And ends with.
const END: &str = r#"
until_told 'grep -q " closed " told'
kill -0 $canary && echo the canary lives
kill $canary
kill -INT $daemon
wait $daemon
echo "the daemon ended with $?"
cat told
"#;

/// Runs a script between [`BEGIN`] and [`END`] as a user of whom nothing else runs, in what the words before begin.
fn as_nobody(uid: u32, before: &[String], source: &str, script: &str) -> CommandOutput {
    let dir = TempDir::new();
    let place = dir.path();
    link(Path::new(REAPER), &place.join("reaper"));
    fs::copy("/bin/sh", place.join("my-agent")).expect("copy a shell");
    let script = [BEGIN, script, END].concat().replace("SOURCE", source);
    fs::write(place.join("script"), script).expect("write the script");
    let rule = "[[agent]]\nname = \"mine\"\ncomm = \"my-agent\"\n";
    fs::write(place.join("config.toml"), rule).expect("write the config");
    fs::create_dir(place.join("run")).expect("create a directory");
    for path in [place.to_owned(), place.join("run")] {
        chown(&path, Some(uid), Some(uid)).expect("give it to the user");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("close it to others");
    }
    let (program, arguments) = before.split_first().expect("a program");
    let mut command = Command::new(program);
    command.args(arguments);
    if before.last().is_some_and(|last| last.contains("$@")) {
        command.arg("sh");
    }
    let uid = uid.to_string();
    command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups"]);
    let said = run(place, command.args(["sh", "script"]).current_dir(place));
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    for line in ["the canary lives", "the daemon ended with 0"] {
        assert_eq!(said.told(line), 1, "{}", said.out);
    }
    said
}

/// Has a user watch their own agents, and kills one.
fn nobodys_service(uid: u32, before: &[&str], source: &str) -> CommandOutput {
    let before: Vec<String> = before.iter().map(|word| word.to_string()).collect();
    let said = as_nobody(uid, &before, source, r#"kill -KILL "$(cat agent)""#);
    assert_eq!(said.told("SIGTERM  "), 2, "signals: {}", said.out);
    assert_eq!(said.told("2 reaped, 0 kept, 0 failed"), 2, "{}", said.out);
    // The doctor knows what the probes lack here: nobody has to be told of it.
    assert_eq!(said.told("first: load probes"), 1, "{}", said.out);
    assert_eq!(said.told("report a bug"), 0, "{}", said.out);
    said
}

/// An old container runtime lets nobody have pidfds: nothing is signalled, and that is said, here and by the doctor.
fn without_pidfds() {
    let this = std::env::current_exe().expect("this program's path");
    let this = this.display().to_string();
    for (uid, errno) in [(61_004, Errno::EPERM), (61_005, Errno::ENOSYS)] {
        let number = (errno as i32).to_string();
        let actor = [
            "test-process",
            "without-pidfds",
            "filter",
            "/",
            &number,
            "setpriv",
        ];
        let before = std::iter::once(&*this).chain(actor).map(String::from);
        let script = r#"
kill -KILL "$(cat agent)"
until_told '[ "$(grep -c " reap  " told)" = 2 ]'
kill -0 "$(cat one)" && kill -0 "$(cat two)" && echo both live
./reaper scan --reap --config config.toml --scope $$; echo "the scan ended with $?"
kill "$(cat one)" "$(cat two)"
"#;
        let said = as_nobody(uid, &before.collect::<Vec<_>>(), "procfs", script);
        for word in [
            &*format!("refused: {errno}"),
            ", but it can only observe: no process can be signalled",
            "this service only observes: processes can be neither held nor signalled by pidfds",
            "both live",
            "the scan ended with 1",
        ] {
            assert_eq!(said.told(word), 1, "no '{word}': {}{}", said.out, said.err);
        }
        assert!(said.err.contains("cannot reap"), "{}", said.err);
        assert_eq!(said.told("SIGTERM"), 0, "{}", said.out);
        assert_eq!(said.told("0 reaped, 0 kept, 0 failed"), 2, "{}", said.out);
    }
}

/// A process whose file in /proc is none is told of once, and left alone until it is one.
fn misunderstood() {
    let script = r#"
two=$(cat two)
printf '7 (x) S 1' > bad
mount --bind bad /proc/$two/stat || exit 8
until_told 'grep -q "cannot parse /proc/$two/stat" told'
kill -KILL "$(cat agent)"
until_told '! kill -0 "$(cat one)" 2> /dev/null'
kill -0 $two && echo it is left alone
kill $two
"#;
    let own_mounts = ["unshare", "--mount", "--propagation", "private", "setpriv"];
    let before: Vec<String> = own_mounts.map(String::from).into();
    let said = as_nobody(0, &before, "procfs", script);
    for word in ["cannot parse", "it is left alone"] {
        assert_eq!(said.told(word), 1, "'{word}': {}", said.out);
    }
    assert_eq!(said.told("SIGTERM  "), 1, "signals: {}", said.out);
    assert_eq!(said.told("gap"), 0, "{}", said.out);
}

impl CommandOutput {
    /// How often it was said.
    fn told(&self, what: &str) -> usize {
        self.out.matches(what).count()
    }
}
