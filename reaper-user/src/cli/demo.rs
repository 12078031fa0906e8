//! `reaper demo`: starts a small process tree like that of an agent, orphans it and reaps it.

#[cfg_attr(target_os = "macos", path = "demo/darwin.rs")]
mod system;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep};

use super::engine::{
    check_open_files, in_thread, kernel, open_source, runtime, settings, stop_signals, with_writer,
};
use super::{Failure, scope};
use crate::config::Config;
use crate::engine::{Engine, Stop};
use crate::export::{Detail, Format, Sink, StreamOutput};
use crate::reap;
use reaper_host::kernel::ProcessHandle;
use reaper_host::source::probes::ProbeOptions;
use reaper_host::source::procfs::{ProcessReading, Procfs};
use reaper_host::sys::pidfd::{self, Pidfd};
use reaper_model::event::TICK_NS;

/// Prints a line. Ignores errors: a closed output is no reason to leave the tree behind.
macro_rules! print_line {
    ($($part:tt)*) => {
        let _ = crate::export::print(format!($($part)*) + "\n");
    };
}

/// Returns the config of the demo: a rule for a program of this file name, and a short grace.
fn config(program: &str) -> String {
    format!(
        "grace = '1s'\n{}[[agent]]\nname = 'demo-agent'\nexe = '**/{program}'\nargs = 'demo-agent'\n",
        system::CONFIG
    )
}

/// Processes that the agent leaves behind: description and script. Each script prints the pid to watch. If the demo is
/// killed, they exit after a minute.
const CHILDREN: [(&str, &str); 4] = [
    ("an ordinary child", "echo $$; exec sleep 60"),
    ("a new session (setsid)", system::OWN_SESSION),
    ("a double fork, orphaned already", "(sleep 62 & echo $!)"),
    (
        "a shell that ignores SIGTERM, and starts one sleep after another",
        "trap '' TERM; echo $$; n=0; while [ $n -lt 60 ]; do sleep 1; n=$((n+1)); done",
    ),
];

/// Time limit of the demo.
const DEADLINE: Duration = Duration::from_secs(15);

/// Runs the demo. Returns 1 if a process of the tree survives.
pub(super) fn run(json: bool) -> Result<u8, Failure> {
    let program = std::env::current_exe()
        .context("cannot read /proc/self/exe to start this program again")?;
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let config = Config::parse(&config(&name), Path::new("demo"))?;
    // Scoped to one tree, and unpinned: the probes disappear with this program.
    let options = ProbeOptions {
        filter: true,
        scoped: true,
        kernel_reap: config.may_kernel_reap(),
        ..ProbeOptions::default()
    };
    check_open_files()?;
    reaper_host::sys::lower_oom_score();
    pidfd::probe().context("cannot run the demo")?;
    let (source, _) = open_source(&config, &options)?;
    let mut agent = Agent::start()?;
    let pid = agent.child.id();
    let format = match json {
        true => Format::Json,
        false => {
            introduce(pid);
            Format::Lines(Detail::Summary)
        }
    };
    let scope_name = pid.to_string();
    let settings = settings(
        config,
        scope::parse(std::slice::from_ref(&scope_name))?,
        vec![scope_name],
    );
    let stdout = StreamOutput::stdout(format);
    let outputs = vec![stdout.map_err(Failure::system("cannot open stdout"))?];
    let work = move |sink: Sink| {
        in_thread(move || {
            runtime()?.block_on(async {
                let engine = Engine::start(kernel(&settings)?, source, settings, sink)?;
                let mut survivors = agent.leave_behind()?;
                let no_requests = tokio::sync::mpsc::channel(1).1;
                let stop = wait(&mut agent, &mut survivors);
                let reaped = engine.run(stop, no_requests).await?.reaped;
                Ok((reaped, survivors.end()))
            })
        })
    };
    let (reaped, survivors) = with_writer(outputs, work)?;
    match survivors.is_empty() {
        _ if json => {}
        true => {
            print_line!(
                "\nNothing is left: {reaped} processes were reaped, the four and what they had started."
            );
        }
        false => {
            let survivors = survivors.join(", ");
            print_line!("\nNot reaped in time, and killed now: {survivors}");
        }
    }
    Ok(u8::from(!survivors.is_empty()))
}

/// Prints what the demo does.
fn introduce(pid: u32) {
    print_line!("Started a stand-in for a coding agent as pid {pid}. Only its tree is watched.");
    print_line!("It starts four commands that try to escape in different ways:");
    for (what, _) in CHILDREN {
        print_line!("  - {what}");
    }
    print_line!("It is then killed with SIGKILL. The others get SIGTERM, and SIGKILL after 1s.\n");
}

/// Kills the agent and waits until its tree is gone. Returns why the demo ends.
async fn wait(agent: &mut Agent, survivors: &mut LeftBehind) -> Stop {
    let Ok(stop) = stop_signals(true) else {
        return Stop::because("no signal handler");
    };
    let run = async {
        // Gives the engine time to read the pre-existing processes.
        sleep(Duration::from_millis(300)).await;
        agent.end();
        let deadline = Instant::now() + DEADLINE;
        while !survivors.all_ended() && Instant::now() < deadline {
            sleep(Duration::from_millis(20)).await;
        }
        // Gives the engine time to confirm the exits.
        sleep(Duration::from_millis(100)).await;
        Stop::because("the demo is over")
    };
    tokio::select! {
        stop = run => stop,
        stop = stop => stop,
    }
}

/// Stand-in for an agent: this program, started again. Killed on drop.
struct Agent {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Start time in ns since boot, truncated to a clock tick.
    began: u64,
    stdout: BufReader<ChildStdout>,
}

impl Agent {
    fn start() -> Result<Agent, Failure> {
        let program = std::env::current_exe()
            .context("cannot read /proc/self/exe to start this program again")?;
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
            .ok_or_else(|| anyhow!("the demo's agent has no stdout; report this as a bug"))?;
        let ticks = Procfs::default().start_ticks(child.id());
        let began =
            ticks.ok_or_else(|| anyhow!("the demo's agent exited at once; try again"))? * TICK_NS;
        let stdout = BufReader::new(stdout);
        Ok(Agent {
            child,
            stdin,
            began,
            stdout,
        })
    }

    /// Makes the agent start its children. Returns a pidfd of each.
    fn leave_behind(&mut self) -> Result<LeftBehind, Failure> {
        if let Some(stdin) = &mut self.stdin {
            stdin
                .write_all(b"go\n")
                .context("cannot write to the demo's agent")?;
        }
        let mut survivors = LeftBehind(Vec::new());
        for (what, _) in CHILDREN {
            let mut line = String::new();
            self.stdout
                .read_line(&mut line)
                .context("cannot read from the demo's agent")?;
            let pid: u32 = line
                .trim()
                .parse()
                .ok()
                .with_context(|| format!("the demo's agent did not report the pid of {what}, but {line:?}; report this as a bug"))?;
            let pidfd = self
                .open_own(pid)
                .with_context(|| format!("process {pid} of the demo ({what}) has exited already, or is not the expected one; try again"))?;
            survivors.0.push((what, pid, pidfd));
        }
        Ok(survivors)
    }

    /// Opens a pidfd of a process of the agent's tree. Returns `None` if the process exits, or is not recognised as a
    /// process of the tree within 1 s.
    ///
    /// The pidfd is opened before the process is checked. If it is still alive afterwards, the check was about the same
    /// process.
    fn open_own(&self, pid: u32) -> Option<Pidfd> {
        let pidfd = Pidfd::open(pid).ok()?;
        let deadline = std::time::Instant::now() + Duration::from_secs(1);
        // During an exec, a process has no command line to recognise it by.
        while !self.is_own(pid) {
            if pidfd.has_exited() || std::time::Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        (!pidfd.has_exited()).then_some(pidfd)
    }

    /// Returns whether the process started after the agent and runs a program of the agent's children.
    fn is_own(&self, pid: u32) -> bool {
        let Ok(ProcessReading::Alive(seen)) = Procfs::default().read(pid) else {
            return false;
        };
        let runs = |arg: &[u8]| CHILDREN.iter().any(|(_, script)| arg == script.as_bytes());
        seen.key.start >= self.began && (seen.image.comm == b"sleep" || seen.image.args().any(runs))
    }

    /// Kills the agent and waits for its exit.
    fn end(&mut self) {
        // The pid of an unreaped child cannot be reused.
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

/// Processes that the agent has left behind: description, pid and pidfd.
struct LeftBehind(Vec<(&'static str, u32, Pidfd)>);

impl LeftBehind {
    fn all_ended(&self) -> bool {
        self.0.iter().all(|(_, _, pidfd)| pidfd.has_exited())
    }

    /// Kills the survivors and returns their descriptions.
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

/// Runs `reaper demo-agent`: waits for input, starts the children and waits to be killed.
pub(super) fn agent() -> Result<(), Failure> {
    let mut stdin = std::io::stdin().lock();
    let mut line = String::new();
    stdin
        .read_line(&mut line)
        .context("cannot read from the demo")?;
    if line.is_empty() {
        return Err(Failure::Usage(
            "demo-agent is only started by `reaper demo`; run that".into(),
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
    // Returns when the demo exits. The demo may have killed this process before.
    stdin
        .read_line(&mut line)
        .context("cannot wait for the demo to exit")?;
    Ok(())
}
