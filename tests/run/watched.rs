//! `reaper run` with a service that tracks it. The run ends its own tree; the service sends no signals while the run lives.
//! If the run is killed, the service ends what is left.

use std::path::Path;

use nix::sys::signal::Signal;

use super::{RunWorld, ScenarioFn, Started};
use crate::daemon::{self, Daemon, Event};
use crate::world::{copy, eventually, link};

pub const SCENARIOS: &[(&str, ScenarioFn)] = &[
    ("watched-run-ends-its-own-tree", own_tree),
    ("killed-run-is-ended-by-service", killed),
    ("each-process-is-signalled-once", signals_once),
    ("run-in-a-run", inside),
    ("run-ends-processes-outside-sessions", others),
];

const SCRIPTS: [(&str, &str); 5] = [
    // Ignores signals and keeps starting processes.
    (
        "leaves-ignoring-process",
        "sh -c 'trap \"\" TERM INT; echo up > up; while :; do sleep 0.05; done' &
        until [ -e up ]; do sleep 0.01; done; exit 5",
    ),
    // Leaves a process that records SIGTERM and continues.
    (
        "leaves-witness",
        "sh -c 'trap \"echo signalled > signalled\" TERM; echo up > up; while :; do sleep 0.05; done' &
        until [ -e up ]; do sleep 0.01; done; exit 5",
    ),
    // On SIGTERM, records it, starts `late`, waits until that is up, and exits. `late` records SIGTERM too, and waits a while
    // for a second one.
    (
        "server",
        "trap 'echo signalled >> signalled; sh ./late & until [ -e late-up ]; do sleep 0.01; done; exit' TERM
        echo up > up; while :; do sleep 0.02; done",
    ),
    (
        "late",
        "sleep 0.2; trap 'echo signalled >> signalled; n=980' TERM; echo up > late-up
        n=0; while [ $n -lt 1000 ]; do sleep 0.02; n=$((n + 1)); done",
    ),
    (
        "agent",
        "setsid sh ./server & until [ -e up ]; do sleep 0.01; done; exit 0",
    ),
];

/// Shell with a script, and the service that tracks it.
pub(super) struct Watched {
    pub(super) shell: Started,
    pub(super) service: Daemon,
}

impl Watched {
    /// Starts the service, then the script. `reaper` has its installed path `bin/reaper`, because the rules recognise that.
    pub(super) fn begin(place: &RunWorld, script: &str, more: &[&str]) -> Watched {
        let script = format!("until [ -e go ]; do sleep 0.01; done; {script}");
        let mut shell = place.command("sh");
        let shell = place.start_as(shell.args(["-c", &script]));
        link(Path::new(daemon::REAPER), &place.path("bin/reaper"));
        copy("/bin/sh", place.path("bin/claude"));
        for (name, script) in SCRIPTS {
            std::fs::write(place.path(name), script).expect("write a script");
        }
        let scope = shell.pid().to_string();
        let files = place.path("service");
        std::fs::create_dir(&files).expect("create a directory");
        // The default grace: on a busy machine, a shell is slow to run its trap.
        let arguments = daemon::arguments(&files, Some(&scope), "", more);
        let service = Daemon::start(&files, &arguments);
        open(place, "go");
        Watched { shell, service }
    }

    /// Waits until the service has emitted an event that `like` accepts.
    pub(super) fn await_event(&self, like: impl Fn(&Event) -> bool) {
        eventually("the service emits the event", || {
            self.service.events().iter().any(&like).then_some(())
        });
    }

    /// Returns the number of emitted events that `like` accepts.
    fn count(&self, like: impl Fn(&Event) -> bool) -> usize {
        self.service
            .events()
            .iter()
            .filter(|event| like(event))
            .count()
    }

    /// Waits until the script exits with `status`, and until no process is left.
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

fn is_sent(signal: &'static str) -> impl Fn(&Event) -> bool {
    move |event| event.event == "signal" && event.signal.as_deref() == Some(signal)
}

/// The run ends its tree after the command's exit and after the timeout, and what its hook leaves.
fn own_tree(place: &RunWorld) {
    let hook = "setsid sleep 60 & sleep 0.3; echo $REAPER_OUTCOME > hook";
    let script = format!(
        "run='./bin/reaper run'
        $run --report left --on-failure '{hook}' -- sh -c 'for i in 1 2 3 4 5; do setsid sleep 60 & done; exit 3'; echo $? >> said
        $run --report killed --grace 300ms --signal INT --timeout 3s -- sh -c 'trap : TERM INT; while :; do sleep 0.02; done'; echo $? >> said
        $run --report first --leader-first --timeout 3s -- sh -c 'sleep 60 & trap \"exit 7\" TERM; while :; do sleep 0.02; done'; echo $? >> said
        $run --report nothing -- true; echo $? >> said
        until [ -e leave ]; do sleep 0.01; done"
    );
    let watched = Watched::begin(place, &script, &[]);
    place.await_content("said", |content| content.lines().count() == 4);
    assert_eq!(
        place.read("said"),
        "3\n124\n124\n0\n",
        "{}",
        place.read("err")
    );
    assert_eq!(place.read("hook"), "failed\n");
    let left = report(place, "left");
    let counts = ["ended", "killed"].map(|figure| left[figure].as_u64());
    assert_eq!(counts, [Some(5), Some(0)], "{left}");
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
    eventually("the sessions are closed", || {
        let closed = watched.count(|event| event.event == "session.close");
        (closed == 4).then_some(())
    });
    assert_eq!(watched.count(|event| event.event == "signal"), 0);
    open(place, "leave");
    watched.end(place, 0);
}

/// The service ends a run that is killed during its grace.
fn killed(place: &RunWorld) {
    let script = "./bin/reaper run --grace 10min -- sh ./leaves-witness & echo $! > owner
        wait $! 2> killed; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    let owner = place.await_pid("owner");
    place.await_content("signalled", |content| !content.is_empty());
    assert!(owner.signal(Signal::SIGKILL), "the owner is alive");
    watched.await_event(is_sent("SIGKILL"));
    watched.await_event(|event| event.event == "session.close");
    open(place, "leave");
    watched.end(place, 0);
}

/// The run alone ends what an agent that is its command leaves, and what starts during the grace: each gets one SIGTERM.
fn signals_once(place: &RunWorld) {
    let script = "
        run='./bin/reaper run'
        $run -- ./bin/claude ./agent; mv signalled by-agent; rm up late-up
        $run -- sh ./agent; mv signalled by-command; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    place.await_content("by-command", |content| !content.is_empty());
    for name in ["by-agent", "by-command"] {
        assert_eq!(place.read(name), "signalled\n".repeat(2), "{name}");
    }
    let is_agent = |event: &Event| {
        event.event == "session.open" && event.agent.as_deref() != Some("reaper-run")
    };
    watched.await_event(is_agent);
    assert_eq!(watched.count(is_agent), 1, "the agent was recognised");
    open(place, "leave");
    watched.end(place, 0);
}

/// The grace of the outer run limits an inner run with a longer grace.
fn inside(place: &RunWorld) {
    let script = "
        run='./bin/reaper run'
        $run --done-when 'test -e left' --every 50ms --grace 500ms --report report -- \
            $run --grace 10min -- sh -c 'sh ./leaves-ignoring-process; echo left > left; exec sleep 60'
        echo $? > said; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    assert_eq!(
        place.await_content("said", |content| !content.is_empty()),
        "0\n"
    );
    let report = report(place, "report");
    assert_eq!(
        report["survivors"].as_array().map(Vec::len),
        Some(0),
        "{report}"
    );
    open(place, "leave");
    watched.end(place, 0);
}

/// The run also ends processes that are in no session of the service, such as those below a boundary.
fn others(place: &RunWorld) {
    let script = "
        ./bin/reaper run --report report -- sh -c 'tmux -S tmux -f /dev/null new-session -d \"sleep 60\"; setsid sleep 60 & exit 3'
        echo $? > said; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    assert_eq!(
        place.await_content("said", |content| !content.is_empty()),
        "3\n"
    );
    let report = report(place, "report");
    assert!(report["ended"].as_u64() >= Some(2), "{report}");
    open(place, "leave");
    watched.end(place, 0);
}
