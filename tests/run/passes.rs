//! The command runs in the same environment as without `reaper run`: signals, file descriptors, limits, streams.

use std::fs::{self, File};
use std::io::Read;
use std::process::Stdio;

use super::{RunWorld, ScenarioFn};

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("signals-as-found", signals_as_found),
    ("surroundings", surroundings),
    ("streams", streams),
    ("idle-streams", idle_streams),
    ("idle-slow-reader", idle_slow_reader),
    ("idle-full-disk", idle_full_disk),
];

/// The command inherits blocked and ignored signals from the caller of `reaper run`.
fn signals_as_found(place: &RunWorld) {
    let prepare = "use POSIX; ($b, $i) = (shift, shift); @i = split ' ', $i
        for (grep { $_ != 9 && $_ != 19 } 1..31, 34..64) { $n = $_
            sigaction($n, POSIX::SigAction->new((grep { $_ == $n } @i) ? 'IGNORE' : 'DEFAULT')) }
        sigprocmask(SIG_SETMASK, POSIX::SigSet->new(split ' ', $b)); exec @ARGV";
    let prepare = prepare.replace('\n', ";");
    let grep = ["grep", "-E", "Sig(Blk|Ign|Cgt)|ShdPnd", "/proc/self/status"];
    for (blocked, ignored) in [
        ("", ""),
        // PIPE; USR1 and TERM; INT, HUP and PIPE; CHLD, PIPE, WINCH and one without a name, and CHLD, TSTP and SEGV.
        ("", "13"),
        ("10 15", ""),
        ("", "2 1 13"),
        ("17 13 28 40", "17 20 11"),
    ] {
        let find = |before: &[&str]| {
            let mut perl = place.command("perl");
            perl.args(["-e", &prepare, blocked, ignored]).args(before);
            let said = crate::cli::run(place.dir.path(), perl.args(grep));
            assert_eq!(said.code, Some(0), "{}", said.err);
            said.out
        };
        let plain = find(&["/usr/bin/env"]);
        assert_eq!(
            find(&["./reaper", "run", "--"]),
            plain,
            "{blocked}; {ignored}"
        );
        let watched = find(&["./reaper", "run", "--idle", "9s", "--"]);
        assert_eq!(watched, plain, "{blocked}; {ignored}");
    }
}

/// The command runs as without `reaper run`. It inherits open files, limits, environment, directory, umask, priority,
/// process group, session and cgroup.
fn surroundings(place: &RunWorld) {
    let script = "ls /proc/self/fd; cat /proc/self/limits; env | sort; pwd; umask; nice
        cut -d ' ' -f 5,6,8 /proc/$$/stat; cat /proc/self/oom_score_adj /proc/self/cgroup; ulimit -a";
    fs::write(place.path("print"), script).expect("write the script");
    let script = "ulimit -n 123; ulimit -c 0; umask 027; exec 7< /dev/null 200> /dev/null
        export A= B=x; nice -n 3 env _=x ./reaper run -- sh ./print > with
        nice -n 3 env _=x sh ./print > without; diff without with";
    let said = place.bash(script, &[]);
    assert_eq!(
        (said.code, said.out.as_str()),
        (Some(0), ""),
        "{}",
        said.err
    );
    assert!(place.read("with").contains("B=x"));
}

fn streams(place: &RunWorld) {
    flow(place, "");
    let closed = place.bash("./reaper run -- sh -c 'cat; echo $?' <&-", &[]);
    assert_eq!(closed.out, "0\n", "{}", closed.err);
    let out = place.bash("./reaper run -- sh -c 'exit 4' >&- 2>&-", &[]);
    assert_eq!(out.code, Some(4));
}

/// With `--idle`, the command's output passes through `reaper run`.
fn idle_streams(place: &RunWorld) {
    flow(place, "--idle 20s");
    // Both streams go to one pipe and keep their order.
    let script = "./reaper run --idle 20s -- bash -c 'for i in {1..500}; do echo $i; echo $i >&2; done' 2>&1 | uniq -c | grep -vc '^ *2 '";
    let said = place.bash(script, &[]);
    assert_eq!(said.out, "0\n", "{}", said.err);
    let said = place.run(&["--idle", "20s", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((said.out.as_str(), said.err.as_str()), ("out\n", "err\n"));
}

/// Passes many bytes through `cat`, and ends when the reader closes the pipe.
fn flow(place: &RunWorld, option: &str) {
    let script = "head -c 10000000 /dev/urandom > bytes
        ./reaper run $1 -- cat < bytes | cmp - bytes
        cat bytes | ./reaper run $1 -- cat > copy; cmp copy bytes
        ./reaper run $1 -- yes | head -n 1; echo ${PIPESTATUS[0]}";
    let said = place.bash(script, &[option]);
    assert_eq!(said.out, "y\n141\n", "{}", said.err);
    place.assert_alone();
}

/// A slow reader gets all output.
fn idle_slow_reader(place: &RunWorld) {
    let (mut from, to) = std::io::pipe().expect("make a pipe");
    let mut command = place.reaper(&["--idle", "60s", "--", "sh", "-c"]);
    command.args(["head -c 100000 /dev/zero; echo > written"]);
    command
        .stdin(Stdio::null())
        .stdout(to)
        .stderr(Stdio::null());
    let mut run = super::Started(command.spawn().expect("start the run"));
    drop(command);
    place.await_content("written", |content| !content.is_empty());
    // Longer than the run waits for the output pipe to close.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let mut read = Vec::new();
    from.read_to_end(&mut read).expect("read the output");
    assert_eq!((read.len(), run.end()), (100_000, 0));
}

fn idle_full_disk(place: &RunWorld) {
    let mut command = place.reaper(&["--idle", "60s", "--", "yes"]);
    let full = File::options()
        .write(true)
        .open("/dev/full")
        .expect("open /dev/full");
    let errors = File::create(place.path("err")).expect("create a file");
    command.stdin(Stdio::null()).stdout(full).stderr(errors);
    let mut run = super::Started(command.spawn().expect("start the run"));
    assert_eq!(run.end(), 141);
    assert!(
        place.read("err").contains("no space left"),
        "{}",
        place.read("err")
    );
    place.assert_alone();
}
