//! Programs with windows, on the displays of Xvfb.
//!
//! The scenario runs in its own network namespace, where the sockets of a display are. Otherwise the daemons of other
//! tests would see a display on their host, and clear fewer programs for signals of the probes.

use std::process::{Child, Command};

use libtest_mimic::Trial;
use nix::sched::{CloneFlags, unshare};

use super::pids::capsule;
use super::{CONFIG, ScenarioEntry, ScenarioRun, SourceKind, has_programs, trial};
use crate::world::{World, eventually};

/// The scenario inside of the namespaces.
pub const INSIDE: ScenarioEntry = ("windows", windows);

/// Number of the display of a person, which is outside of the trees.
const DISPLAY: u32 = 99;
/// Number of the display that a member starts for a test.
const OWN_DISPLAY: u32 = 200;

/// Exits of agents.
const EXITS: [&str; 4] = ["segfault", "raise+SIGKILL", "raise+SIGHUP", "exit+0"];

/// Returns the test, left out without the programs.
pub fn trial_on_ebpf() -> Trial {
    let run = || ScenarioRun::run(SourceKind::Ebpf, "windows", |view| capsule(view, "windows"));
    let possible = has_programs(&["Xvfb", "xvfb-run", "xterm", "xev"], "windows");
    trial("enforce", "windows", run).with_ignored_flag(!possible)
}

/// X server with a private `/tmp`: clients find it by its abstract socket. Killed on drop.
struct Display(Child);

impl Display {
    fn start() -> Display {
        let script = format!("mount -t tmpfs none /tmp && exec Xvfb :{DISPLAY} -nolisten unix");
        let mut command = Command::new("unshare");
        let child = command.args(["--mount", "sh", "-c", &script]).spawn();
        Display(child.expect("start Xvfb"))
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the number of clients that are connected to the abstract socket of a display.
fn clients(display: u32) -> usize {
    let table = std::fs::read_to_string("/proc/net/unix").expect("/proc/net/unix");
    let name = format!("@/tmp/.X11-unix/X{display}");
    let is_connected = |line: &&str| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(5) == Some("03") && fields.next_back() == Some(&name)
    };
    table.lines().filter(is_connected).count()
}

/// A terminal window and another program with a window outlive their agents. A program on a display that belongs to the
/// session is reaped with that display.
fn windows(view: &ScenarioRun) {
    unshare(CloneFlags::CLONE_NEWNET).expect("make a network namespace");
    let _display = Display::start();
    let mut world = World::new(true);
    view.watch(&mut world, CONFIG);
    let own = world.dir().join("own-display");
    let script = format!(
        "exec unshare --mount sh -c 'mount -t tmpfs none /tmp && exec xvfb-run -n {OWN_DISPLAY} xev'"
    );
    std::fs::write(&own, script).expect("write a script");
    let own = own.display();
    let mut survivors = Vec::new();
    for (n, exit) in EXITS.into_iter().enumerate() {
        let (agent, window, terminal) = (
            format!("agent{n}"),
            format!("window{n}"),
            format!("terminal{n}"),
        );
        let shown = format!("env:DISPLAY=:{DISPLAY}+program");
        world.spawn(
            &agent,
            &format!(
                "as:claude agent parent{n}={shown}+{window}+xev starter{n}={shown}+{terminal}+xterm \
                 tool{n}=program+own{n}+sh+{own} die={exit}"
            ),
        );
        for role in [&agent, &window, &terminal, &format!("own{n}")] {
            world.await_processes(role, 1);
        }
        eventually("the windows are open", || {
            (clients(DISPLAY) == 2 * (n + 1) && clients(OWN_DISPLAY) == 1).then_some(())
        });
        world.open_gate(&format!("die-{agent}"));
        view.await_closed(&world, n + 1);
        world.await_gone(&[
            &format!("starter{n}"),
            &format!("tool{n}"),
            &format!("own{n}"),
        ]);
        eventually("the display of the session is gone", || {
            (clients(OWN_DISPLAY) == 0).then_some(())
        });
        let kept = world.process(&window);
        let decision = world.await_event("the decision about the window", |e| {
            e.is("decision", kept) && e.decision.as_deref() == Some("keep")
        });
        assert_eq!(decision.rule.as_deref(), Some("windows"), "after {exit}");
        survivors.extend([window, terminal, format!("parent{n}")]);
        let survivors: Vec<&str> = survivors.iter().map(String::as_str).collect();
        world.assert_alive(&survivors);
    }
    let survivors: Vec<&str> = survivors.iter().map(String::as_str).collect();
    view.end(world, &survivors);
}
