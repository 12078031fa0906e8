//! An agent with a few processes, and a service that watches it.

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use super::Entry;
use super::mask::{Mask, VALUES};
use super::transcript::Transcript;
use crate::cli::service_requests::{ask, ask_json, socket};
use crate::daemon::{JOURNAL, REAPER};
use crate::world::{World, eventually, link};

/// Limits that no process reaches, even on a busy machine. A signal from the kernel could end a process before its memory is
/// read.
const CONFIG: &str = "grace = \"1min\"\nkill_timeout = \"1min\"\nkernel_reap = \"off\"\n";

/// World with a service, and an agent that runs a script.
pub struct Agent {
    pub world: World,
    /// Command and pid of each member of its session.
    members: Vec<(String, i32)>,
}

impl Agent {
    /// Starts both, and waits until the members have these commands, given by their beginning.
    pub fn start(script: &str, commands: &[&str], more: &[&str]) -> Agent {
        let mut world = World::new(true);
        link(Path::new("/bin/bash"), &world.dir().join("bin/claude"));
        // Other users may not be able to read the build directory.
        link(Path::new(REAPER), &world.dir().join("reaper"));
        fs::write(world.dir().join("work.sh"), script).expect("write a script");
        for gate in ["detach", "exit"] {
            mkfifo(&world.dir().join(gate), Mode::S_IRWXU).expect("make a gate");
        }
        world.start_daemon(CONFIG, &[&JOURNAL, more].concat());
        world.spawn("agent", "exec bin/claude work.sh");
        let mut agent = Agent {
            world,
            members: Vec::new(),
        };
        agent.await_members(&["bin/claude work.sh", "bin/claude work.sh", "sleep 33"]);
        agent.world.open_gate("detach");
        agent.await_members(commands);
        agent.await_history("\"detached\"", 1);
        agent
    }

    /// Waits until the members run these commands. They are sorted, and given by their beginnings.
    fn await_members(&mut self, commands: &[&str]) {
        self.members = eventually("the processes of the agent", || {
            let tree = ask_json(&self.world, &["tree"]);
            let groups = tree["groups"].as_array()?.iter();
            let members =
                groups.flat_map(|group| group["processes"].as_array().into_iter().flatten());
            let member = |member: &Value| {
                Some((
                    member["command"].as_str()?.to_owned(),
                    member["pid"].as_i64()? as i32,
                ))
            };
            let mut members: Vec<_> = members.filter_map(member).collect();
            members.sort_unstable();
            let all = members.len() == commands.len();
            let mut pairs = members.iter().zip(commands);
            let same = all && pairs.all(|((command, _), start)| command.starts_with(start));
            same.then_some(members)
        });
    }

    /// Waits until the journal, which follows the service, contains a text `n` times.
    pub fn await_history(&self, text: &str, n: usize) {
        eventually(&format!("{n} × {text} in the history"), || {
            let history = ask(&self.world, &["history", "--json"]).out;
            (history.matches(text).count() == n).then_some(())
        });
    }

    /// Returns the pid of the first member whose command starts so.
    fn pid(&self, start: &str) -> i32 {
        let mut members = self.members.iter();
        let member = members.find(|(command, _)| command.starts_with(start));
        member.unwrap_or_else(|| panic!("no member is '{start}'")).1
    }

    /// Kills the agent.
    pub fn kill(&self) {
        let root = crate::proc::stat(self.pid("bin/claude")).expect("the agent");
        assert!(root.id.signal(Signal::SIGKILL), "the agent is gone");
    }

    /// Runs commands with the service's socket, as root or as another user. `{START}` is the pid of the member whose command
    /// starts so, or of the canary.
    pub fn show(&self, transcript: &mut Transcript<'_>, entries: &[Entry<'_>], user: Option<&str>) {
        let program = self.world.dir().join("reaper");
        for (what, words) in entries {
            let pid = |word: &str| match word
                .strip_prefix('{')
                .and_then(|word| word.strip_suffix('}'))
            {
                Some("canary") => self.world.process("canary").pid.to_string(),
                Some(start) => self.pid(start).to_string(),
                None => word.to_owned(),
            };
            let shown = words
                .iter()
                .map(|word| if word.starts_with('{') { "PID" } else { word });
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid", user.unwrap_or("0"), "--clear-groups"])
                .arg(&program);
            command
                .args(words.iter().map(|word| pid(word)))
                .args(["--socket", &socket(&self.world)]);
            transcript.run(what, &shown.collect::<Vec<_>>().join(" "), &mut command);
        }
    }

    /// Stops the service, adds its own lines, and compares the transcript with its snapshot.
    pub fn assert(mut self, mut transcript: Transcript<'_>, name: &str) {
        self.world.stop();
        let output = ["stdout", "stderr"].map(|name| {
            let text = fs::read_to_string(self.world.dir().join(name)).expect("read the output");
            // Processes that are ended at the same time are reported in any order.
            let mut lines: Vec<&str> = text
                .lines()
                .map(|line| line.split_once("  ").map_or(line, |(_, rest)| rest))
                .collect();
            lines.sort_unstable();
            lines.join("\n")
        });
        transcript.add(
            "its lines, sorted and without their times",
            "daemon",
            output,
        );
        transcript.assert(name, &Mask::new(self.world.dir(), VALUES));
    }
}
