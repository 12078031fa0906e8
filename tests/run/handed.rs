//! `reaper run` that leaves the end of its tree to a service: one hand ends all, and what it does is in its stream. Where the
//! service is silent, who owns the command sees to it.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{RunWorld, ScenarioFn, Started};
use crate::cli;
use crate::daemon::{self, Daemon, Event};
use crate::world::{eventually, link};

pub const STORIES: &[(&str, ScenarioFn)] = &[
    ("ended-by-a-service", ended),
    ("ended-at-once-by-a-service", hastened),
    ("service-stands-still", stands_still),
    (
        "service-stands-still-in-the-grace",
        stands_still_in_the_grace,
    ),
    ("service-dies-in-the-grace", dies_in_the_grace),
    ("service-asks-once", asks_once),
    ("service-and-a-run-inside", inside),
    ("service-observes", observes),
    ("service-of-others", others),
];

const SCRIPTS: [(&str, &str); 4] = [
    // It goes on starting others.
    (
        "leaves-a-deaf-one",
        "sh -c 'trap \"\" TERM INT; echo up > up; while :; do sleep 0.05; done' &
        until [ -e up ]; do sleep 0.01; done; exit 5",
    ),
    // Says when it is asked, and leaves then, as soon as one that it starts first is up: that takes its time, says when it is asked,
    // and waits whether it is once more.
    (
        "server",
        "trap 'echo asked >> asked; sh ./late & until [ -e late-up ]; do sleep 0.01; done; exit' TERM
        echo up > up; while :; do sleep 0.02; done",
    ),
    (
        "late",
        "sleep 0.2; trap 'echo asked >> asked; n=980' TERM; echo up > late-up
        n=0; while [ $n -lt 1000 ]; do sleep 0.02; n=$((n + 1)); done",
    ),
    (
        "agent",
        "setsid sh ./server & until [ -e up ]; do sleep 0.01; done; exit 0",
    ),
];

/// A shell that runs a script, and a service that watches it.
pub(super) struct Watched {
    pub(super) shell: Started,
    pub(super) service: Daemon,
}

impl Watched {
    /// The service's socket is `sock`, and `reaper` is called as it is where it is installed: by that it is known.
    pub(super) fn begin(place: &RunWorld, script: &str, more: &[&str]) -> Watched {
        let script = format!("until [ -e go ]; do sleep 0.01; done; {script}");
        let mut shell = place.command("sh");
        let shell = place.start_as(shell.args(["-c", &script]));
        link(Path::new(daemon::REAPER), &place.path("bin/reaper"));
        std::fs::copy("/bin/sh", place.path("bin/claude")).expect("copy a shell");
        for (name, script) in SCRIPTS {
            std::fs::write(place.path(name), script).expect("write a script");
        }
        let scope = shell.pid().to_string();
        let files = place.path("service");
        std::fs::create_dir(&files).expect("create a directory");
        // With the usual grace: a shell has to come to ask, and on a busy machine that takes its time.
        let arguments = daemon::arguments(&files, Some(&scope), "", more);
        let service = Daemon::start(&files, &arguments);
        let run = std::fs::read_dir(files.join("run")).expect("list the runtime directory");
        let socket = run
            .map(|entry| entry.expect("list the runtime directory").path())
            .find(|path| path.extension().is_some_and(|suffix| suffix == "sock"));
        let socket = socket.expect("a service has a socket");
        std::os::unix::fs::symlink(socket, place.path("sock")).expect("link the socket");
        open(place, "go");
        Watched { shell, service }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.service.pid()), signal).expect("signal the service");
    }

    /// Waits until it has told of one like that.
    pub(super) fn await_event(&self, like: impl Fn(&Event) -> bool) {
        eventually("the service tells", || {
            self.service.events().iter().any(&like).then_some(())
        });
    }

    /// How often it has told of one like that.
    fn count(&self, like: impl Fn(&Event) -> bool) -> usize {
        self.service
            .events()
            .iter()
            .filter(|event| like(event))
            .count()
    }

    /// The script comes to its end, and nothing is left.
    fn end(mut self, place: &RunWorld, status: i32) {
        assert_eq!(self.shell.end(), status, "{}", place.read("err"));
        place.await_alone();
    }
}

pub(super) fn open(place: &RunWorld, gate: &str) {
    std::fs::write(place.path(gate), "").expect("open the gate");
}

fn report(place: &RunWorld, name: &str) -> serde_json::Value {
    serde_json::from_str(&place.read(name)).expect("a report")
}

fn is_ordered(event: &Event) -> bool {
    event.event == "decision" && event.reason.as_deref() == Some("end_ordered")
}

fn is_sent(signal: &'static str) -> impl Fn(&Event) -> bool {
    move |event| event.event == "signal" && event.signal.as_deref() == Some(signal)
}

/// Asks the service.
fn ask(place: &RunWorld, args: &[&str]) -> cli::CommandOutput {
    let mut command = place.command("./bin/reaper");
    let dir = place.path("asked");
    std::fs::create_dir_all(&dir).expect("create a directory");
    cli::run(&dir, command.args(args).args(["--socket", "sock"]))
}

/// What a run has left behind, or ran when its time was over, is told in the stream; what follows on it is let be.
fn ended(place: &RunWorld) {
    let hook = "setsid sleep 60 & sleep 0.3; echo $REAPER_OUTCOME > hook";
    let script = format!(
        "run='./bin/reaper run --socket sock'
        $run --report left --on-failure '{hook}' -- sh -c 'for i in 1 2 3 4 5; do setsid sleep 60 & done; exit 3'; echo $? >> said
        $run --report killed --grace 300ms --signal INT --timeout 3s -- sh -c 'trap : TERM INT; while :; do sleep 0.02; done'; echo $? >> said
        $run --report first --leader-first --timeout 3s -- sh -c 'sleep 60 & trap \"exit 7\" TERM; while :; do sleep 0.02; done'; echo $? >> said
        $run --report nothing -- true; echo $? >> said
        until [ -e leave ]; do sleep 0.01; done"
    );
    let watched = Watched::begin(place, &script, &[]);
    place.await_content("said", |said| said.lines().count() == 4);
    assert_eq!(
        place.read("said"),
        "3\n124\n124\n0\n",
        "{}",
        place.read("err")
    );
    assert_eq!(place.read("hook"), "failed\n");
    let left = report(place, "left");
    let told = ["ended", "killed"].map(|figure| left[figure].as_u64());
    assert_eq!(told, [Some(5), Some(0)], "{left}");
    let killed = report(place, "killed");
    assert_eq!(killed["exit_signal"], 9, "{killed}");
    assert_eq!(report(place, "first")["exit_code"], 7);
    for name in ["left", "killed", "first", "nothing"] {
        let report = report(place, name);
        assert_eq!(
            report["survivors"].as_array().map(Vec::len),
            Some(0),
            "{report}"
        );
    }
    // Five, then the hook's; the second is asked by a signal of its own, and its children go by themselves.
    eventually("all of it is in the stream", || {
        let all = watched.count(is_ordered) >= 8 && watched.count(is_sent("SIGTERM")) >= 6;
        let all = all && watched.count(is_sent("SIGINT")) >= 1;
        let closed = watched.count(|event| event.event == "session.close");
        (all && watched.count(is_sent("SIGKILL")) >= 1 && closed == 4).then_some(())
    });
    open(place, "leave");
    watched.end(place, 0);
}

/// Who asks a second time for an end cuts the grace short.
fn hastened(place: &RunWorld) {
    let script = "
        ./bin/reaper run --socket sock --grace 10min --report report -- sh ./leaves-a-deaf-one &
        echo $! > owner; wait; echo over > over; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    let owner = place.await_pid("owner");
    eventually("it is told what awaits them", || {
        let events = watched.service.events();
        let mut asked = events.iter().filter(|event| is_sent("SIGTERM")(event));
        let explained = |event: &Event| {
            let pid = event.pid.expect("a pid").to_string();
            let said = ask(place, &["explain", &pid]).out;
            said.contains("SIGTERM, and SIGKILL 10m later")
        };
        asked.any(explained).then_some(())
    });
    assert!(owner.signal(Signal::SIGTERM), "the owner is there");
    place.await_content("over", |said| !said.is_empty());
    let report = report(place, "report");
    assert!(report["ended"].as_u64() >= Some(1), "{report}");
    // Who goes at the first signal may be gone before its memory is read; this one was there for that.
    assert!(report["memory.rss"].as_u64() > Some(0), "{report}");
    watched.await_event(is_sent("SIGKILL"));
    open(place, "leave");
    watched.end(place, 0);
}

/// What it was asked before it stood still it does not do when that is over: by then something else runs.
fn stands_still(place: &RunWorld) {
    let script = "
        ./bin/reaper run --socket sock --on-failure 'echo up > up; until [ -e enough ]; do sleep 0.01; done; echo $REAPER_OUTCOME > hook' \
            -- sh -c 'setsid sleep 60 & until [ -e still ]; do sleep 0.01; done; exit 3'";
    let watched = Watched::begin(place, script, &[]);
    watched.await_event(|event| event.event == "session.open");
    watched.signal(Signal::SIGSTOP);
    open(place, "still");
    place.await_content("up", |said| !said.is_empty());
    watched.signal(Signal::SIGCONT);
    // It answers in order.
    let said = ask(place, &["status"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    open(place, "enough");
    let service = &watched.service;
    place.await_content("hook", |said| said == "failed\n");
    let ordered = service
        .events()
        .iter()
        .filter(|event| is_ordered(event))
        .count();
    assert_eq!(ordered, 0, "what it was asked too late was done");
    watched.end(place, 3);
}

/// A run that leaves one behind who does not end when it is asked. In its grace a test has to hear of that and stop the service.
const DEAF: &str =
    "./bin/reaper run --socket sock --grace 2s --report report -- sh ./leaves-a-deaf-one";

fn stands_still_in_the_grace(place: &RunWorld) {
    let watched = Watched::begin(
        place,
        &format!("{DEAF}; echo $? > said; until [ -e leave ]; do sleep 0.01; done"),
        &[],
    );
    watched.await_event(is_sent("SIGTERM"));
    watched.signal(Signal::SIGSTOP);
    assert_eq!(place.await_content("said", |said| !said.is_empty()), "5\n");
    let report = report(place, "report");
    assert!(report["killed"].as_u64() >= Some(1), "{report}");
    watched.signal(Signal::SIGCONT);
    open(place, "leave");
    watched.end(place, 0);
}

fn dies_in_the_grace(place: &RunWorld) {
    let watched = Watched::begin(place, DEAF, &[]);
    watched.await_event(is_sent("SIGTERM"));
    watched.signal(Signal::SIGKILL);
    watched.end(place, 5);
    let report = report(place, "report");
    assert!(report["killed"].as_u64() >= Some(1), "{report}");
}

/// Whoever is left by an agent in a run, which the service ends when the agent is gone, is asked by one of both, and so is who is
/// born in the grace.
fn asks_once(place: &RunWorld) {
    let script = "
        run='./bin/reaper run --socket sock'
        $run -- ./bin/claude ./agent; mv asked by-agent; rm up late-up
        $run -- sh ./agent; mv asked by-command; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    place.await_content("by-command", |said| !said.is_empty());
    for name in ["by-agent", "by-command"] {
        assert_eq!(place.read(name), "asked\n".repeat(2), "{name}");
    }
    let is_agent = |event: &Event| {
        event.event == "session.open" && event.agent.as_deref() != Some("reaper-run")
    };
    watched.await_event(is_agent);
    assert_eq!(watched.count(is_agent), 1, "the agent was recognised");
    open(place, "leave");
    watched.end(place, 0);
}

/// A run in a run, which asks for the same with another grace, takes nobody from the outer one's ladder.
fn inside(place: &RunWorld) {
    let script = "
        run='./bin/reaper run --socket sock'
        $run --done-when 'test -e left' --every 50ms --grace 500ms --report report -- \
            $run --grace 10min -- sh -c 'sh ./leaves-a-deaf-one; echo left > left; exec sleep 60'
        echo $? > said; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    assert_eq!(place.await_content("said", |said| !said.is_empty()), "0\n");
    let report = report(place, "report");
    assert_eq!(
        report["survivors"].as_array().map(Vec::len),
        Some(0),
        "{report}"
    );
    let released = |event: &Event| {
        let outcome = event.outcome.as_deref();
        outcome.is_some_and(|outcome| ["root_alive", "detached"].contains(&outcome))
    };
    assert_eq!(watched.count(released), 0);
    watched.await_event(is_sent("SIGKILL"));
    open(place, "leave");
    watched.end(place, 0);
}

/// One that ends nothing is no help.
fn observes(place: &RunWorld) {
    let watched = Watched::begin(place, DEAF, &["--observe"]);
    watched.await_event(|event| event.event == "session.root_exit");
    assert_eq!(watched.count(|event| event.event == "signal"), 0);
    watched.end(place, 5);
}

/// Whoever is not its concern is ended by the owner: what is no member of any session.
fn others(place: &RunWorld) {
    let script = "
        ./bin/reaper run --socket sock --report report -- sh -c 'tmux -S tmux -f /dev/null new-session -d \"sleep 60\"; setsid sleep 60 & exit 3'
        echo $? > said; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    assert_eq!(place.await_content("said", |said| !said.is_empty()), "3\n");
    let report = report(place, "report");
    assert!(report["ended"].as_u64() >= Some(2), "{report}");
    watched.await_event(is_ordered);
    open(place, "leave");
    watched.end(place, 0);
}
