//! The service is killed, again and again, whatever it is at.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{Dice, PinnedWorld, SurvivalScenario};
use crate::cli::ask_json;
use crate::daemon;
use crate::proc::ProcessKey;
use crate::trees::OWN_RULES;

pub const STORIES: &[SurvivalScenario] = &[("killed-20-times", || killed(20))];
pub const SOAKS: &[SurvivalScenario] = &[("killed-200-times", || killed(200))];

/// Longest time from a daemon's start, and from the moment that it is ready, to its end, in ms.
const STARTING_MS: u64 = 120;
const READY_MS: u64 = 200;
/// One in so many is let come to the end of what those before it have left: where all are killed sooner than that, on a busy
/// machine, it only grows.
const CATCHES_UP: u32 = 8;
/// Agents at a time.
const AGENTS: usize = 4;

/// Longest time from one change to the next, in ms.
const CHANGE_MS: u64 = 200;

/// What all agents have below them, and what only some have.
const TREE: [&str; 7] = [
    "leaf=sleep",
    "shell=parent+tool+sleep",
    "stubborn=ignore-term",
    "apart=double+setsid",
    "trap=trap",
    "link=chain+6+0",
    "busy=busy+20",
];
const SPARING: [&str; 2] = [
    "keeper=as:test-keeper+parent+under+sleep",
    "wall=as:test-wall+parent+user+sleep",
];
const SPARED: [&str; 4] = ["keeper", "under", "wall", "user"];

/// Whatever the service is at when it is killed, the next one goes on with it: nobody survives who is due, nobody
/// else is touched, and of everybody it is told what became of them.
fn killed(times: u32) {
    let mut dice = Dice::new();
    let mut life = PinnedWorld::new(OWN_RULES, &[]);
    life.world.kill_daemon();
    let mut agents = Agents::default();
    for kill in 0..times {
        if kill % CATCHES_UP == 0 {
            life.world.restart_daemon(&[]);
            ask_json(&life.world, &["status"]);
            life.world.kill_daemon();
        } else if dice.below(2) == 0 {
            let mut daemon = daemon::spawn(life.world.dir(), life.world.arguments());
            agents.change_for(dice.below(STARTING_MS), &mut life, &mut dice);
            let ended = daemon.try_wait().expect("look at the daemon");
            assert_eq!(ended, None, "it ended by itself");
            daemon.kill().expect("kill the daemon");
            daemon.wait().expect("wait for the daemon");
        } else {
            life.world.restart_daemon(&[]);
            agents.change_for(dice.below(READY_MS), &mut life, &mut dice);
            life.world.kill_daemon();
        }
    }
    life.world.restart_daemon(&[]);
    let ended = agents.end_all(&life);
    life.await_left(&SPARED);
    // One that is stopped waits 2 s at most for its stream to be written, of which there may be more than that.
    for who in ended {
        let gone = life
            .world
            .await_event("an agent's end", |e| e.is("session.root_exit", who));
        life.world.await_event("its session is closed", |e| {
            e.event == "session.close" && e.session_id == gone.session_id
        });
    }
    life.end(&SPARED);
    let stream = life.stream();
    let gap = stream.iter().find(|e| e.event == "gap.open");
    assert!(gap.is_none(), "records were lost: {gap:?}");
}

/// Agents that come and go.
#[derive(Default)]
struct Agents {
    begun: usize,
    living: Vec<usize>,
}

impl Agents {
    /// One more or one less, now and then.
    fn change_for(&mut self, ms: u64, life: &mut PinnedWorld, dice: &mut Dice) {
        let end = Instant::now() + Duration::from_millis(ms);
        self.change(life, dice);
        while Instant::now() < end {
            sleep(Duration::from_millis(dice.below(CHANGE_MS)).min(end - Instant::now().min(end)));
            self.change(life, dice);
        }
    }

    fn change(&mut self, life: &mut PinnedWorld, dice: &mut Dice) {
        if self.living.len() < AGENTS {
            let way = ["exit 0", "exit 3", "segfault", "exit-group 8"][self.begun % 4];
            let die = format!("die={}", way.replace(' ', "+"));
            let sparing = SPARING.iter().filter(|_| self.begun.is_multiple_of(6));
            let tree = TREE.iter().chain(sparing).map(|child| child.to_string());
            let tree = tree.chain([die]);
            life.world.launch(
                "claude",
                "agent",
                &role(self.begun),
                &tree.collect::<Vec<_>>(),
            );
            self.living.push(self.begun);
            self.begun += 1;
        } else {
            let which = dice.below(AGENTS as u64) as usize;
            if !life.world.processes(&role(self.living[which])).is_empty() {
                end(life, self.living.swap_remove(which));
            }
        }
    }

    /// Gives who they were.
    fn end_all(&mut self, life: &PinnedWorld) -> Vec<ProcessKey> {
        let all = self.living.drain(..).map(|agent| {
            let who = life.world.await_processes(&role(agent), 1)[0];
            end(life, agent);
            who
        });
        all.collect()
    }
}

fn role(agent: usize) -> String {
    format!("agent-{agent}")
}

/// Every other one is killed, the others leave in the way they were given.
fn end(life: &PinnedWorld, agent: usize) {
    if (agent / 4).is_multiple_of(2) {
        life.world.process(&role(agent)).signal(Signal::SIGKILL);
    } else {
        life.world.open_gate(&format!("die-{}", role(agent)));
    }
}
