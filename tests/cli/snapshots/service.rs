//! Snapshots of a service's answers.

use super::Entry;
use super::agent::Agent;
use super::transcript::Transcript;
use crate::world::eventually;

/// Script of an agent: a process whose parent exits when the gate opens, one with REAPER_KEEP, one more, and a shell with a
/// child.
const WORK: &str = "\
(sleep 3311 & read go < detach; exit 0)
REAPER_KEEP=1 sleep 3312 &
sleep 3313 &
bash -c 'sleep 3314 & wait' &
wait
";

/// Script of an agent that exits with status 0 when the gate opens, and leaves a server behind.
const SERVER: &str = "\
(sleep 3321 & read go < detach; exit 0)
perl -MIO::Socket -e '$s = IO::Socket::INET->new(Listen => 1); open F, \">up\"; sleep' &
read go < exit
exit 0
";

const WORK_COMMANDS: &[&str] = &[
    "bash -c sleep 3314",
    "bin/claude work.sh",
    "sleep 3311",
    "sleep 3312",
    "sleep 3313",
    "sleep 3314",
];
const SERVER_COMMANDS: &[&str] = &["bin/claude work.sh", "perl", "sleep 3321"];

/// Commands while the agent is alive.
const ALIVE: &[Entry<'static>] = &[
    ("a service", &["status"]),
    ("its agent", &["tree"]),
    ("the agent itself", &["explain", "{bin/claude}"]),
    ("a member", &["explain", "{sleep 3313}"]),
    (
        "a member whose parent has exited",
        &["explain", "{sleep 3311}"],
    ),
    ("a member with REAPER_KEEP=1", &["explain", "{sleep 3312}"]),
    ("a process of no agent", &["explain", "{canary}"]),
    ("a process outside of the scope", &["explain", "1"]),
    ("no process", &["explain", "4194304"]),
    ("no process", &["keep", "4194304"]),
    ("no process", &["unkeep", "4194304"]),
    ("no process", &["agents", "--test", "4194304"]),
    ("nothing is kept", &["keep", "--list"]),
    ("a time to keep", &["keep", "{sleep 3314}", "--for", "2h"]),
    ("what is kept", &["keep", "--list"]),
    ("a kept member", &["explain", "{sleep 3314}"]),
    ("a process that cannot be kept", &["keep", "{canary}"]),
    ("an end of that", &["unkeep", "{sleep 3314}"]),
    ("nothing to end", &["unkeep", "{sleep 3314}"]),
    ("until it exits", &["keep", "{sleep 3314}"]),
    ("what agents have left behind", &["scan"]),
    ("the config again", &["config", "reload"]),
];

/// Commands after the requests to keep are in the journal.
const REQUESTED: &[Entry<'static>] = &[
    ("a session that is open", &["history"]),
    ("a kept member", &["history", "{sleep 3314}"]),
    ("no such session", &["history", "--agent", "codex"]),
    ("no such agent", &["history", "--agent", "claud"]),
    ("no such agent", &["tree", "--agent", "claud-code"]),
    ("no such agent", &["agents", "cladue-code"]),
    ("no such agent", &["agents", "nothing-similar"]),
    ("all agents", &["agents"]),
];

/// Commands of another user.
const OTHER_USER: &[Entry<'static>] = &[
    ("another user", &["status"]),
    ("the agents of another user", &["tree"]),
    ("a process of another user", &["explain", "{sleep 3313}"]),
    ("a process of another user", &["keep", "{sleep 3313}"]),
    ("a request that only root may make", &["config", "reload"]),
    ("the sessions of another user", &["history"]),
];

/// Commands after the agent was killed.
const KILLED: &[Entry<'static>] = &[
    ("a service that has reaped", &["status"]),
    ("what is left", &["tree"]),
    ("a reaped process", &["explain", "{sleep 3313}"]),
    ("the agent", &["explain", "{bin/claude}"]),
    ("a process with REAPER_KEEP=1", &["explain", "{sleep 3312}"]),
    ("a process that a user keeps", &["explain", "{sleep 3314}"]),
    ("the parent of a kept process", &["explain", "{bash}"]),
    ("a reaped process", &["keep", "{sleep 3313}"]),
    ("what has happened", &["history"]),
    ("the last hour", &["history", "--since", "1h"]),
    ("a reaped process", &["history", "{sleep 3313}"]),
    ("the agent", &["history", "{bin/claude}"]),
];

pub fn enforcing() {
    let agent = Agent::start(WORK, WORK_COMMANDS, &[]);
    let dir = agent.world.dir().to_owned();
    let mut transcript = Transcript::new(&dir);
    agent.show(&mut transcript, ALIVE, None);
    agent.await_history("\"request\":\"keep\"", 2);
    agent.show(&mut transcript, REQUESTED, None);
    agent.show(&mut transcript, OTHER_USER, Some("4242"));
    agent.kill();
    agent
        .world
        .await_event("a closed session", |e| e.event == "session.close");
    agent.await_history("\"closed_at\":\"", 1);
    agent.show(&mut transcript, KILLED, None);
    agent.assert(transcript, "service");
}

/// Commands after the agent was killed, to a service that only observes.
const OBSERVED: &[Entry<'static>] = &[
    ("a service that observes", &["status"]),
    ("what would be reaped", &["tree"]),
    (
        "a process that would be reaped",
        &["explain", "{sleep 3313}"],
    ),
    ("what would have happened", &["history"]),
    ("what agents have left behind", &["scan"]),
    ("a request to reap", &["scan", "--reap"]),
    ("a process to keep", &["keep", "{sleep 3313}"]),
    ("an end of that", &["unkeep", "{sleep 3313}"]),
];

pub fn observing() {
    let agent = Agent::start(WORK, WORK_COMMANDS, &["--observe"]);
    let dir = agent.world.dir().to_owned();
    let mut transcript = Transcript::new(&dir);
    agent.kill();
    agent.await_history("\"root_exited\"", 4);
    agent.await_history("\"keep_marker\"", 1);
    agent.show(&mut transcript, OBSERVED, None);
    agent.assert(transcript, "observing-service");
}

/// Commands after the agent has exited with status 0.
const EXITED: &[Entry<'static>] = &[
    ("a server that has time", &["explain", "{perl}"]),
    ("what is left", &["tree"]),
    ("what has happened", &["history"]),
];

pub fn server_with_time() {
    let agent = Agent::start(SERVER, SERVER_COMMANDS, &[]);
    let dir = agent.world.dir().to_owned();
    eventually("the server listens", || {
        dir.join("up").exists().then_some(())
    });
    agent.world.open_gate("exit");
    agent.await_history("\"rule_delay\"", 1);
    agent.await_history("\"ended\"", 1);
    let mut transcript = Transcript::new(&dir);
    agent.show(&mut transcript, EXITED, None);
    agent.assert(transcript, "server-with-time");
}
