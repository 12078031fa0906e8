//! Tests of a service without BPF: for an unprivileged user, in a container, with a restricted /proc, and without pidfds.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use nix::errno::Errno;

use super::{CommandOutput, run};
use crate::daemon::REAPER;
use crate::trees::trial;
use crate::world::{TempDir, copy, link};

pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "unprivileged-service", || {
            let said = run_unprivileged(61_001, &["setpriv"], "procfs");
            assert!(said.out.contains("through procfs"), "{}", said.out);
        }),
        trial("cli", "proc-of-another-pid-namespace", foreign_proc),
        trial("cli", "unprivileged-service-in-a-container", || {
            let said = run_unprivileged(61_002, &CONTAINER, "auto");
            let why = "proc-connector cannot be used: ";
            assert!(said.out.contains("through procfs"), "{}", said.out);
            assert!(said.out.contains(why), "{}", said.out);
        }),
        trial("cli", "without-pidfds", without_pidfds),
        trial("cli", "malformed-proc-file", malformed_proc_file),
        trial("cli", "unprivileged-service-with-hidden-processes", || {
            let said = run_unprivileged(61_003, &HIDDEN, "procfs");
            assert!(said.out.contains("hidepid"), "{}", said.out);
        }),
    ]
}

/// Every source and `reaper run` refuse a /proc of another PID namespace, where each pid would mean another process.
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
        let why = "it shows the processes of another pid namespace";
        assert!(said.err.contains(why), "{arguments:?}: {}", said.err);
    };
    let place = dir.path().join("run").display().to_string();
    for source in ["auto", "ebpf", "proc-connector", "procfs"] {
        // In observe mode, so that it does no harm if it starts nevertheless.
        let daemon = [
            "daemon",
            "--observe",
            "--no-journal",
            "--no-pin",
            "--runtime-dir",
            &place,
        ];
        refused(3, &[&daemon[..], &["--source", source]].concat());
    }
    refused(125, &["run", "--", "true"]);
}

/// Command prefix: a new PID namespace with its own /proc.
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
/// Command prefix: the same, with a /proc that shows users only their own processes.
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

/// Start of every script: a daemon on the script's descendants, a canary, and an agent with two children.
const BEGIN: &str = r#"
export XDG_RUNTIME_DIR=$PWD/run XDG_STATE_HOME=$PWD/state HOME=$PWD
await() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        [ $n -lt 150 ] || { echo "timed out: $1"; cat stdout; exit 9; }
        sleep 0.1
    done
}
trap 'kill -KILL $(cat daemon canary agent one two) 2> /dev/null' EXIT
./reaper doctor
./reaper daemon --user --verbose --scope $$ --source SOURCE --config config.toml > stdout 2>&1 &
daemon=$!
echo $daemon > daemon
await 'grep -q " ready " stdout'
sleep 100 &
canary=$!
echo $canary > canary
./my-agent -c 'sleep 101 & echo $! > one; sleep 102 & echo $! > two; echo $$ > agent; wait' &
await '[ -s agent ] && [ "$(./reaper tree --socket run/reaper/*.sock | grep -c -- "- sleep 10")" = 2 ]'
"#;

/// End of every script.
const END: &str = r#"
await 'grep -q " closed " stdout'
kill -0 $canary && echo the canary lives
kill $canary
kill -INT $daemon
wait $daemon
echo "the daemon ended with $?"
cat stdout
"#;

/// Runs a script between [`BEGIN`] and [`END`] as this user, by a command that starts with `prefix`.
///
/// No other process of the user may run. The prefix ends with `setpriv`, or with a shell script that runs it.
fn run_script_as(uid: u32, prefix: &[String], source: &str, script: &str) -> CommandOutput {
    let dir = TempDir::new();
    let place = dir.path();
    link(Path::new(REAPER), &place.join("reaper"));
    copy("/bin/sh", place.join("my-agent"));
    let script = [BEGIN, script, END].concat().replace("SOURCE", source);
    fs::write(place.join("script"), script).expect("write the script");
    // With a source that polls, the exit status of the agent is unknown, and so may have been 0.
    let rules = "[[agent]]\nname = \"mine\"\ncomm = \"my-agent\"\n\
         [[rule]]\nname = \"young\"\naction = \"reap\"\nsession = \"ok\"\nenabled = false\n";
    fs::write(place.join("config.toml"), rules).expect("write the config");
    fs::create_dir(place.join("run")).expect("create a directory");
    for path in [place.to_owned(), place.join("run")] {
        chown(&path, Some(uid), Some(uid)).expect("change the owner");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("change the mode");
    }
    let (program, arguments) = prefix.split_first().expect("a program");
    let mut command = Command::new(program);
    command.args(arguments);
    if prefix.last().is_some_and(|last| last.contains("$@")) {
        command.arg("sh");
    }
    let uid = uid.to_string();
    command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups"]);
    let said = run(place, command.args(["sh", "script"]).current_dir(place));
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    for line in ["the canary lives", "the daemon ended with 0"] {
        assert_eq!(said.count(line), 1, "{}", said.out);
    }
    said
}

/// Asserts that the daemon of an unprivileged user reaps the children of a killed agent.
fn run_unprivileged(uid: u32, prefix: &[&str], source: &str) -> CommandOutput {
    let prefix: Vec<String> = prefix.iter().map(|word| word.to_string()).collect();
    let said = run_script_as(uid, &prefix, source, r#"kill -KILL "$(cat agent)""#);
    assert_eq!(said.count("SIGTERM  "), 2, "signals: {}", said.out);
    assert_eq!(said.count("2 reaped"), 2, "{}", said.out);
    // The doctor knows why BPF is not usable here. So it does not ask the user to report an unknown error.
    assert_eq!(said.count("first: load probes"), 1, "{}", said.out);
    assert_eq!(said.count("report a bug"), 0, "{}", said.out);
    said
}

/// Without pidfds, as with an old container runtime, the daemon and `scan` signal no process. They and the doctor say
/// so.
fn without_pidfds() {
    let this = std::env::current_exe().expect("this program's path");
    let this = this.display().to_string();
    for (uid, errno) in [(61_004, Errno::EPERM), (61_005, Errno::ENOSYS)] {
        let number = (errno as i32).to_string();
        let wrapper = [
            "test-process",
            "without-pidfds",
            "filter",
            "/",
            &number,
            "setpriv",
        ];
        let prefix = std::iter::once(&*this).chain(wrapper).map(String::from);
        let script = r#"
kill -KILL "$(cat agent)"
await '[ "$(grep -c " would reap " stdout)" = 2 ]'
kill -0 "$(cat one)" && kill -0 "$(cat two)" && echo both live
./reaper scan --reap --config config.toml --scope $$; echo "the scan ended with $?"
kill "$(cat one)" "$(cat two)"
"#;
        let said = run_script_as(uid, &prefix.collect::<Vec<_>>(), "procfs", script);
        for word in [
            &*format!("refused: {errno}"),
            ", but it can only observe: no process can be signalled",
            "this service only observes: cannot open or signal processes by pidfds",
            "both live",
            "the scan ended with 1",
        ] {
            assert_eq!(said.count(word), 1, "no '{word}': {}{}", said.out, said.err);
        }
        assert!(said.err.contains("cannot reap"), "{}", said.err);
        // No line about a signal: the script has sent one to each.
        assert_eq!(said.count("SIGTERM  "), 0, "{}", said.out);
        // The lines about the agent, about its end, and about that of the service.
        let sums = said.count("2 processes would have been reaped");
        assert_eq!(sums, 3, "{}", said.out);
    }
}

/// A process whose /proc/PID/stat is malformed is reported once and not signalled.
fn malformed_proc_file() {
    let script = r#"
two=$(cat two)
printf '7 (x) S 1' > bad
mount --bind bad /proc/$two/stat || exit 8
await 'grep -q "cannot parse /proc/$two/stat" stdout'
kill -KILL "$(cat agent)"
await '! kill -0 "$(cat one)" 2> /dev/null'
kill -0 $two && echo it is left alone
kill $two
"#;
    let own_mounts = ["unshare", "--mount", "--propagation", "private", "setpriv"];
    let prefix: Vec<String> = own_mounts.map(String::from).into();
    let said = run_script_as(0, &prefix, "procfs", script);
    for word in ["cannot parse", "it is left alone"] {
        assert_eq!(said.count(word), 1, "'{word}': {}", said.out);
    }
    assert_eq!(said.count("SIGTERM  "), 1, "signals: {}", said.out);
    assert_eq!(said.count("gap"), 0, "{}", said.out);
}

impl CommandOutput {
    /// Returns how often the output contains `text`.
    fn count(&self, text: &str) -> usize {
        self.out.matches(text).count()
    }
}
