//! Tests of a service that is killed repeatedly at random moments.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{PinnedWorld, Rng, SurvivalScenario};
use crate::cli::ask_json;
use crate::daemon;
use crate::proc::ProcessKey;
use crate::trees::OWN_RULES;

pub const SCENARIOS: &[SurvivalScenario] = &[("killed-20-times", || killed(20))];
pub const SOAKS: &[SurvivalScenario] = &[("killed-200-times", || killed(200))];

/// Limit on the time from a daemon's start to its kill, in ms.
const STARTING_MS: u64 = 120;
/// Limit on the time from a daemon's `ready` event to its kill, in ms.
const READY_MS: u64 = 200;
/// Interval of the daemons that are killed only after they have caught up. On a busy machine the backlog would only grow
/// otherwise.
const CATCH_UP_INTERVAL: u32 = 8;
/// Number of living agents.
const AGENTS: usize = 4;

/// Limit on the time between two changes, in ms.
const CHANGE_MS: u64 = 200;

/// Children of every agent.
const TREE: [&str; 7] = [
    "leaf=sleep",
    "shell=parent+tool+sleep",
    "stubborn=ignore-term",
    "apart=double+setsid",
    "trap=trap",
    "link=chain+6+0",
    "busy=busy+20",
];
/// Additional children of every sixth agent: a kept process and a boundary, each with a child.
const WITH_KEPT: [&str; 2] = [
    "keeper=as:test-keeper+parent+under+sleep",
    "wall=as:test-wall+parent+user+sleep",
];
/// Roles that no service may signal.
const KEPT: [&str; 4] = ["keeper", "under", "wall", "user"];

/// After `times` kills of the service, every due process has been reaped, and no other was signalled. The stream has
/// the end of each.
fn killed(times: u32) {
    let mut rng = Rng::new();
    let mut test = PinnedWorld::new(OWN_RULES, &[]);
    test.world.kill_daemon();
    let mut agents = Agents::default();
    for kill in 0..times {
        if kill % CATCH_UP_INTERVAL == 0 {
            test.world.restart_daemon(&[]);
            ask_json(&test.world, &["status"]);
            test.world.kill_daemon();
        } else if rng.below(2) == 0 {
            let mut daemon = daemon::spawn(test.world.dir(), test.world.arguments());
            agents.change_for(rng.below(STARTING_MS), &mut test, &mut rng);
            let ended = daemon.try_wait().expect("poll the daemon's status");
            assert_eq!(ended, None, "the daemon exited by itself");
            daemon.kill().expect("kill the daemon");
            daemon.wait().expect("wait for the daemon");
        } else {
            test.world.restart_daemon(&[]);
            agents.change_for(rng.below(READY_MS), &mut test, &mut rng);
            test.world.kill_daemon();
        }
    }
    test.world.restart_daemon(&[]);
    let ended = agents.end_all(&test);
    test.await_only(&KEPT);
    // A stopping daemon writes for at most 2 s. That can be too short for the backlog, so the test waits before it
    // stops the daemon.
    for agent in ended {
        let exit = test
            .world
            .await_event("an agent's exit", |e| e.is("session.root_exit", agent));
        test.world.await_event("its session is closed", |e| {
            e.event == "session.close" && e.session_id == exit.session_id
        });
    }
    test.end(&KEPT);
    let stream = test.stream();
    let gap = stream.iter().find(|e| e.event == "gap.open");
    assert!(gap.is_none(), "records were lost: {gap:?}");
}

/// Numbered agents that start and exit.
#[derive(Default)]
struct Agents {
    started: usize,
    living: Vec<usize>,
}

impl Agents {
    /// Makes changes at random intervals for `ms` milliseconds.
    fn change_for(&mut self, ms: u64, test: &mut PinnedWorld, rng: &mut Rng) {
        let end = Instant::now() + Duration::from_millis(ms);
        self.change(test, rng);
        while Instant::now() < end {
            sleep(Duration::from_millis(rng.below(CHANGE_MS)).min(end - Instant::now().min(end)));
            self.change(test, rng);
        }
    }

    /// Starts an agent, or ends one if there are [`AGENTS`].
    fn change(&mut self, test: &mut PinnedWorld, rng: &mut Rng) {
        if self.living.len() < AGENTS {
            let way = ["exit 0", "exit 3", "segfault", "exit-group 8"][self.started % 4];
            let die = format!("die={}", way.replace(' ', "+"));
            let kept = WITH_KEPT.iter().filter(|_| self.started.is_multiple_of(6));
            let tree = TREE.iter().chain(kept).map(|child| child.to_string());
            let tree = tree.chain([die]);
            test.world.launch(
                "claude",
                "agent",
                &role(self.started),
                &tree.collect::<Vec<_>>(),
            );
            self.living.push(self.started);
            self.started += 1;
        } else {
            let which = rng.below(AGENTS as u64) as usize;
            if !test.world.processes(&role(self.living[which])).is_empty() {
                end(test, self.living.swap_remove(which));
            }
        }
    }

    /// Ends all living agents and returns them.
    fn end_all(&mut self, test: &PinnedWorld) -> Vec<ProcessKey> {
        let all = self.living.drain(..).map(|agent| {
            let key = test.world.await_processes(&role(agent), 1)[0];
            end(test, agent);
            key
        });
        all.collect()
    }
}

fn role(agent: usize) -> String {
    format!("agent-{agent}")
}

/// Ends an agent. Agents 0 to 3 get SIGKILL, agents 4 to 7 exit in the way that their arguments set, and so on.
fn end(test: &PinnedWorld, agent: usize) {
    if (agent / 4).is_multiple_of(2) {
        test.world.process(&role(agent)).signal(Signal::SIGKILL);
    } else {
        test.world.open_gate(&format!("die-{}", role(agent)));
    }
}
