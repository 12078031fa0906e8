//! Tests of the readers of a service: clients in another PID namespace, and programs that stop reading its stream.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use libtest_mimic::Trial;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::service_requests::{ask, socket};
use super::{reaper, run};
use crate::daemon::{self, REAPER};
use crate::trees::{CONFIG, trial};
use crate::world::{TempDir, World, eventually};

/// Returns the tests that need root.
pub fn privileged() -> Vec<Trial> {
    vec![
        trial("cli", "reader-in-inner-pid-namespace", inner_reader),
        trial("cli", "reader-in-outer-pid-namespace", outer_reader),
        trial("cli", "reader-of-json-closes-stdout", || {
            closed_stdout(true)
        }),
        trial("cli", "reader-of-lines-closes-stdout", || {
            closed_stdout(false)
        }),
    ]
}

/// Command prefix: a new PID namespace with its own /proc.
const CONTAINER: [&str; 5] = ["--pid", "--fork", "--kill-child", "--mount-proc", REAPER];

/// Requests of each kind. Each answer would have pids of the service's namespace.
const REQUESTS: [&[&str]; 8] = [
    &["status"],
    &["tree", "--all", "--json"],
    &["agents", "--json"],
    &["explain", "1"],
    &["keep", "--list"],
    &["keep", "1"],
    &["scan"],
    &["history"],
];

/// A client in a container gets no answer, whatever it asks. A client beside it does.
fn inner_reader() {
    let mut world = World::new(true);
    world.start_daemon(CONFIG, &["--observe"]);
    let socket = socket(&world);
    for request in REQUESTS {
        let mut inner = Command::new("unshare");
        inner.args(CONTAINER).args(request);
        let said = run(world.dir(), inner.args(["--socket", &socket]));
        assert_eq!(said.code, Some(1), "{request:?}: {}{}", said.out, said.err);
        assert_eq!(said.out, "", "{request:?}");
        assert!(
            said.err.contains("another pid namespace"),
            "{request:?}: {}",
            said.err
        );
    }
    let said = ask(&world, &["status"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
}

/// A client on the host gets no answer of a service in a container.
fn outer_reader() {
    let dir = TempDir::new();
    let options = ["--observe", "--source", "procfs"];
    let arguments = daemon::arguments(dir.path(), Some("1"), CONFIG, &options);
    let mut inner = Command::new("unshare");
    inner.args(CONTAINER).args(arguments);
    let inner = inner.current_dir(dir.path()).stdin(Stdio::null());
    let mut service = inner
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start a service in a container");
    let socket = eventually("the service has a socket", || {
        let files = std::fs::read_dir(dir.path().join("run")).ok()?;
        let mut paths = files.flatten().map(|file| file.path());
        paths.find(|path| path.extension().is_some_and(|end| end == "sock"))
    });
    let socket = socket.display().to_string();
    let said = reaper(dir.path(), &["status", "--socket", &socket]);
    // `unshare --kill-child` kills the service with it.
    service.kill().expect("kill the service");
    service.wait().expect("wait for it");
    assert_eq!(said.code, Some(1), "{}{}", said.out, said.err);
    assert!(said.err.contains("another pid namespace"), "{}", said.err);
}

/// A service that prints JSON ends when its reader closes the pipe. That needs no event to write. A service that prints
/// lines for people continues.
fn closed_stdout(json: bool) {
    let mut world = World::new(true);
    let scope = world.process("launcher").pid.to_string();
    let mut arguments = daemon::arguments(world.dir(), Some(&scope), CONFIG, &["--observe"]);
    arguments.extend(json.then(|| "--json".to_owned()));
    let mut service = Command::new(REAPER);
    service.args(&arguments).current_dir(world.dir());
    let mut service = service
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("start a service");
    let mut reader = BufReader::new(service.stdout.take().expect("a pipe"));
    eventually("the service is ready", || {
        let mut line = String::new();
        reader.read_line(&mut line).expect("read a line");
        line.contains("ready").then_some(())
    });
    drop(reader);
    if !json {
        let said = ask(&world, &["status"]);
        assert_eq!(said.code, Some(0), "{}", said.err);
        world.launch("worker", "sleep", "later", &[]);
        world.await_processes("later", 1);
        let said = ask(&world, &["status"]);
        assert_eq!(said.code, Some(0), "{}", said.err);
        let pid = Pid::from_raw(service.id().cast_signed());
        kill(pid, Signal::SIGINT).expect("interrupt the service");
    }
    let status = eventually("the service ends", || service.try_wait().expect("wait"));
    assert_eq!(status.code(), Some(0));
    let events = daemon::read_events(world.dir());
    let summary = events.last().expect("an event");
    let reason = if json { "stdout_closed" } else { "SIGINT" };
    assert_eq!(
        (summary.event.as_str(), summary.reason.as_deref()),
        ("summary", Some(reason))
    );
}
