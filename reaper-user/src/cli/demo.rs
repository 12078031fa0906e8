//! `reaper demo`: a small agent-shaped tree, orphaned and reaped while one looks on.

#[cfg_attr(target_os = "macos", path = "demo/darwin.rs")]
mod system;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep};

use super::engine::{in_thread, kernel, open_source, runtime, settings, stop_signal, with_writer};
use super::{Failure, scope};
use crate::config::Config;
use crate::engine::Engine;
use crate::export::{Format, Sink, StreamOutput};
use crate::reap;
use reaper_host::kernel::ProcessHandle;
use reaper_host::source::probes::ProbeOptions;
use reaper_host::source::procfs::{ProcessReading, Procfs};
use reaper_host::sys::pidfd::{self, Pidfd};
use reaper_model::event::TICK_NS;

/// Prints a line; that nobody reads any more is no reason to leave the tree behind.
macro_rules! say {
    ($($part:tt)*) => {
        let _ = crate::export::print(format!($($part)*) + "\n");
    };
}

/// The demo's own rule for a program of this file name, and a grace that nobody has to wait long for.
fn config(program: &str) -> String {
    format!(
        "grace = '1s'\n{}[[agent]]\nname = 'demo-agent'\nexe = '**/{program}'\nargs = 'demo-agent'\n",
        system::CONFIG
    )
}

/// What the agent leaves behind; each script prints the pid that is to be watched. They end by
/// themselves after a minute, should the demo be killed.
const CHILDREN: [(&str, &str); 4] = [
    ("an ordinary child", "echo $$; exec sleep 60"),
    ("a session of its own (setsid)", system::OWN_SESSION),
    ("double-forked, orphaned already", "(sleep 62 & echo $!)"),
    (
        "ignores SIGTERM",
        "trap '' TERM; echo $$; n=0; while [ $n -lt 60 ]; do sleep 1; n=$((n+1)); done",
    ),
];

/// How long all of it may take before the demo calls it a failure.
const DEADLINE: Duration = Duration::from_secs(15);

/// Runs the demo; its exit status is 1 if something of the tree lives on.
pub(super) fn run() -> Result<u8, Failure> {
    let program = std::env::current_exe().context("cannot tell this program's path")?;
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let config = Config::parse(&config(&name), Path::new("demo"))?;
    // Of a process and what descends from it, and gone with this program.
    let options = ProbeOptions {
        filter: true,
        scoped: true,
        kernel_reap: config.may_kernel_reap(),
        ..ProbeOptions::default()
    };
    pidfd::probe().context("nothing could be ended")?;
    let (source, _) = open_source(&config, &options)?;
    let mut agent = Agent::start()?;
    let pid = agent.child.id();
    say!("A stand-in for a coding agent runs as pid {pid}; nothing but its tree is considered.");
    say!("It starts four processes, each in its own way of getting away:");
    for (what, _) in CHILDREN {
        say!("  - {what}");
    }
    say!("Then it is killed with SIGKILL. SIGTERM goes to what is left, and after 1 s SIGKILL.\n");
    let scope_name = pid.to_string();
    let settings = settings(
        config,
        scope::parse(std::slice::from_ref(&scope_name))?,
        vec![scope_name],
    );
    let outputs = vec![StreamOutput::stdout(Format::Lines { lifecycle: false })];
    let work = move |sink: Sink| {
        in_thread(move || {
            runtime()?.block_on(async {
                let engine = Engine::start(kernel(&settings)?, source, settings, sink)?;
                let mut left = agent.leave_behind()?;
                let nobody_asks = tokio::sync::mpsc::channel(1).1;
                let stop = wait(&mut agent, &mut left);
                let reaped = engine.run(stop, nobody_asks).await?.reaped;
                Ok((reaped, left.end()))
            })
        })
    };
    let (reaped, left) = with_writer(outputs, work)?;
    if left.is_empty() {
        say!("\nNothing is left of it: {reaped} processes ended, each confirmed by its pidfd.");
        return Ok(0);
    }
    say!("\nStill there, and ended now: {}", left.join(", "));
    Ok(1)
}

/// Kills the agent, waits until nothing of its tree is left, and tells why the demo is over.
async fn wait(agent: &mut Agent, left: &mut LeftBehind) -> &'static str {
    let Ok(stop) = stop_signal(true) else {
        return "no signal handler";
    };
    let gone = async {
        // Time to see what was there before.
        sleep(Duration::from_millis(300)).await;
        agent.end();
        let deadline = Instant::now() + DEADLINE;
        while !left.all_ended() && Instant::now() < deadline {
            sleep(Duration::from_millis(20)).await;
        }
        // The engine confirms the ends in its own time.
        sleep(Duration::from_millis(100)).await;
        "the demo is over"
    };
    tokio::select! {
        reason = gone => reason,
        reason = stop => reason,
    }
}

/// The stand-in for an agent: this program again. Killed when dropped.
struct Agent {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Its start in ns since boot, to the tick.
    began: u64,
    stdout: BufReader<ChildStdout>,
}

impl Agent {
    fn start() -> Result<Agent, Failure> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(program)
            .arg("demo-agent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the demo's agent")?;
        let stdin = child.stdin.take();
        let stdout = child
            .stdout
            .take()
            .ok_or_else(|| anyhow!("the demo's agent has no output"))?;
        let ticks = Procfs::default().start_ticks(child.id());
        let began = ticks.ok_or_else(|| anyhow!("the demo's agent is gone already"))? * TICK_NS;
        let stdout = BufReader::new(stdout);
        Ok(Agent {
            child,
            stdin,
            began,
            stdout,
        })
    }

    /// Has it start its children; a handle on each of them.
    fn leave_behind(&mut self) -> Result<LeftBehind, Failure> {
        if let Some(stdin) = &mut self.stdin {
            stdin
                .write_all(b"go\n")
                .context("cannot talk to the demo's agent")?;
        }
        let mut left = LeftBehind(Vec::new());
        for (what, _) in CHILDREN {
            let mut line = String::new();
            self.stdout
                .read_line(&mut line)
                .context("cannot read from the demo's agent")?;
            let pid: u32 = line
                .trim()
                .parse()
                .with_context(|| format!("no pid from {what}: {line:?}"))?;
            let pidfd = self
                .own(pid)
                .with_context(|| format!("no process {pid} of {what}"))?;
            left.0.push((what, pid, pidfd));
        }
        Ok(left)
    }

    /// A handle on a process of this agent's tree. Opened first, so that what is read of the pid is of
    /// whoever the handle is on, if that lives on afterwards.
    fn own(&self, pid: u32) -> Option<Pidfd> {
        let pidfd = Pidfd::open(pid).ok()?;
        let deadline = std::time::Instant::now() + Duration::from_secs(1);
        // In the middle of an exec a process has no command line to know it by.
        while !self.is_own(pid) {
            if pidfd.has_exited() || std::time::Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        (!pidfd.has_exited()).then_some(pidfd)
    }

    /// Whether the pid's process began no earlier than the agent and runs what the agent's children run.
    fn is_own(&self, pid: u32) -> bool {
        let Ok(ProcessReading::Alive(seen)) = Procfs::default().read(pid) else {
            return false;
        };
        let runs = |arg: &[u8]| CHILDREN.iter().any(|(_, script)| arg == script.as_bytes());
        seen.key.start >= self.began && (seen.image.comm == b"sleep" || seen.image.args().any(runs))
    }

    fn end(&mut self) {
        // It is this process's child and not waited for yet, so its pid is its own.
        if let Ok(pidfd) = Pidfd::open(self.child.id()) {
            let _ = reap::signal_own(&pidfd, self.child.id(), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.end();
        }
    }
}

/// What the agent left, by what it is.
struct LeftBehind(Vec<(&'static str, u32, Pidfd)>);

impl LeftBehind {
    fn all_ended(&self) -> bool {
        self.0.iter().all(|(_, _, pidfd)| pidfd.has_exited())
    }

    /// Ends what lives on; tells what that was.
    fn end(&self) -> Vec<String> {
        let alive = self.0.iter().filter(|(_, _, pidfd)| !pidfd.has_exited());
        let ended = alive.map(|(what, pid, pidfd)| {
            let _ = reap::signal_own(pidfd, *pid, Signal::SIGKILL);
            format!("{what} ({pid})")
        });
        ended.collect()
    }
}

impl Drop for LeftBehind {
    fn drop(&mut self) {
        self.end();
    }
}

/// What `reaper demo-agent` does: waits for a word, starts the children, and waits to be killed.
pub(super) fn agent() -> Result<(), Failure> {
    let mut stdin = std::io::stdin().lock();
    let mut line = String::new();
    stdin
        .read_line(&mut line)
        .context("cannot read the demo's word")?;
    if line.is_empty() {
        return Err(Failure::Usage(
            "demo-agent is a part of `reaper demo`".into(),
        ));
    }
    let mut children = Vec::new();
    for (what, script) in CHILDREN {
        let child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .spawn();
        children.push(child.with_context(|| format!("cannot start {what}"))?);
    }
    // Until the demo goes away, should it not kill this first.
    stdin
        .read_line(&mut line)
        .context("cannot wait for the demo")?;
    Ok(())
}
