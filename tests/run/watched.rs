//! `reaper run` with a service that watches it. The run ends its own tree, and the service signals nothing of it as long as
//! the run lives. If the run is killed, the service ends what is left.

use std::path::Path;

use nix::sys::signal::Signal;

use super::{RunWorld, ScenarioFn, Started};
use crate::daemon::{self, Daemon, Event};
use crate::world::{eventually, link};

pub const STORIES: &[(&str, ScenarioFn)] = &[
    ("watched-run-ends-its-own-tree", own_tree),
    ("killed-run-is-ended-by-a-service", killed),
    ("each-process-is-asked-once", asks_once),
    ("service-and-a-run-inside", inside),
    ("service-of-others", others),
];

const SCRIPTS: [(&str, &str); 5] = [
    // It goes on starting others.
    (
        "leaves-a-deaf-one",
        "sh -c 'trap \"\" TERM INT; echo up > up; while :; do sleep 0.05; done' &
        until [ -e up ]; do sleep 0.01; done; exit 5",
    ),
    // Leaves one that says when it is asked, and goes on.
    (
        "leaves-a-witness",
        "sh -c 'trap \"echo asked > asked\" TERM; echo up > up; while :; do sleep 0.05; done' &
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
    /// `reaper` is called as it is where it is installed: by that it is known.
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
        open(place, "go");
        Watched { shell, service }
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

fn is_sent(signal: &'static str) -> impl Fn(&Event) -> bool {
    move |event| event.event == "signal" && event.signal.as_deref() == Some(signal)
}

/// What a run has left behind, or ran when its time was over, is ended by the run; so is what its hook leaves.
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
    eventually("the sessions are closed", || {
        let closed = watched.count(|event| event.event == "session.close");
        (closed == 4).then_some(())
    });
    assert_eq!(watched.count(|event| event.event == "signal"), 0);
    open(place, "leave");
    watched.end(place, 0);
}

/// Also amid the grace that the run gives its tree.
fn killed(place: &RunWorld) {
    let script = "./bin/reaper run --grace 10min -- sh ./leaves-a-witness & echo $! > owner
        wait $! 2> killed; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    let owner = place.await_pid("owner");
    place.await_content("asked", |said| !said.is_empty());
    assert!(owner.signal(Signal::SIGKILL), "the owner is there");
    watched.await_event(is_sent("SIGKILL"));
    watched.await_event(|event| event.event == "session.close");
    open(place, "leave");
    watched.end(place, 0);
}

/// What an agent leaves in a run whose command it is, the run ends, and not the service too; so it does with what is born in the
/// grace.
fn asks_once(place: &RunWorld) {
    let script = "
        run='./bin/reaper run'
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

/// A run in a run, with a longer grace: what it leaves is ended when the grace of the outer one is over.
fn inside(place: &RunWorld) {
    let script = "
        run='./bin/reaper run'
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
    open(place, "leave");
    watched.end(place, 0);
}

/// What is a member of no session, as below a boundary, is ended too.
fn others(place: &RunWorld) {
    let script = "
        ./bin/reaper run --report report -- sh -c 'tmux -S tmux -f /dev/null new-session -d \"sleep 60\"; setsid sleep 60 & exit 3'
        echo $? > said; until [ -e leave ]; do sleep 0.01; done";
    let watched = Watched::begin(place, script, &[]);
    assert_eq!(place.await_content("said", |said| !said.is_empty()), "3\n");
    let report = report(place, "report");
    assert!(report["ended"].as_u64() >= Some(2), "{report}");
    open(place, "leave");
    watched.end(place, 0);
}
