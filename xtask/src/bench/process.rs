//! Processes of the benchmarks: this program under other names.
//!
//! `load` reads requests from its standard input. For `kill` it starts agents and adopts their orphans. Every process
//! exits when the other end of its standard input is closed.

use std::io::{BufRead, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use super::raw;

/// File names of the executables. The kernel names a process after its file.
pub const LOAD: &str = "rb-load";
pub const AGENT: &str = "rb-agent";
pub const ORPHAN: &str = "rb-orphan";
pub const HOLDER: &str = "rb-holder";
/// Agent that is not measured.
pub const OTHER_AGENT: &str = "rb-agent-other";
/// Directory next to them with agents that only sleep.
pub const IDLE: &str = "idle";

/// Time limit for orphans to exit.
const PATIENCE_MS: u16 = 15_000;
/// Number of children of each forker in a bomb. The smallest ring buffer has no room for the reparenting of so many.
const KEPT: usize = 1000;
/// Number of orphans that a forker leaves behind, and of forks between two of them.
const ORPHANS: usize = 50;
const STRIDE: usize = 200;
/// Time for which the processes with many open files outlive their agent.
const WAVE: Duration = Duration::from_millis(300);

/// Runs a role until it exits.
///
/// # Errors
/// There is no such role, or a system call fails.
pub fn run_role(role: &[String]) -> Result<()> {
    match role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["load"] => load(),
        ["agent", orphans] => stand_with(orphans.parse()?, "orphan"),
        ["bomb", forkers] => stand_with(forkers.parse()?, "forker"),
        ["crowd", holders, files] => crowd(holders.parse()?, files),
        ["holder", files] => holder(files.parse()?),
        ["forker"] => forker(),
        ["orphan"] => orphan(),
        _ => bail!("unknown role: {}", role.join(" ")),
    }
}

/// Answers each request with a line: `ok` and a number, or an error.
fn load() -> Result<()> {
    nix::sys::prctl::set_child_subreaper(true).context("cannot become a subreaper")?;
    for request in std::io::stdin().lock().lines() {
        let response = match handle_request(&request?) {
            Ok(response) => format!("ok {response}\n"),
            Err(error) => format!("{error:#}\n"),
        };
        if std::io::stdout().write_all(response.as_bytes()).is_err() {
            // The benchmark is gone.
            break;
        }
    }
    // The sleepers exit with the same hangup.
    while waitpid(None, None).is_ok() {}
    Ok(())
}

fn handle_request(request: &str) -> Result<u64> {
    let words: Vec<&str> = request.split(' ').collect();
    let numbers = words.iter().skip(1).map(|word| word.parse());
    let numbers: Vec<u64> = numbers
        .collect::<Result<_, _>>()
        .context("a parameter is not a number")?;
    match (words[0], &numbers[..]) {
        ("pin", &[]) => pin(),
        ("spawn", &[n]) => timed(n, || {
            let status = Command::new("/bin/true").stdin(Stdio::null()).status();
            ensure!(status.context("cannot start /bin/true")?.success());
            Ok(())
        }),
        ("vfork", &[n]) => {
            let mut stack = [0; raw::STACK];
            timed(n, || vfork(&mut stack))
        }
        ("storm", &[ms]) => {
            let (mut stack, mut n) = ([0; raw::STACK], 0);
            let end = Instant::now() + Duration::from_millis(ms);
            while Instant::now() < end {
                vfork(&mut stack)?;
                n += 1;
            }
            Ok(n)
        }
        ("sleepers", &[n]) => sleepers(n as usize),
        ("kill", &[rounds, orphans, ms]) => {
            let (bytes, lived) = (orphans as usize, Duration::from_millis(ms));
            for _ in 0..rounds {
                // Each child writes one byte.
                kill_agent(["agent", &orphans.to_string()], bytes, lived)?;
                for _ in 0..orphans {
                    waitpid(None, None).context("an orphan was adopted by another process")?;
                }
            }
            Ok(rounds)
        }
        ("idle", &[n]) => idle_agents(n),
        ("crowd", &[holders, files]) => crowds(holders, files),
        ("bomb", &[forkers, ms]) => {
            let role = ["bomb", &forkers.to_string()];
            let took = kill_agent(role, 0, Duration::from_millis(ms))?;
            // Its orphans were adopted by this process; some may still be exiting.
            while waitpid(None, None).is_ok() {}
            Ok(took)
        }
        _ => bail!("unknown request: {request}"),
    }
}

/// Pins this process and its children to one CPU, and returns its number. The placement would have a larger effect than
/// the service.
fn pin() -> Result<u64> {
    let allowed = sched_getaffinity(Pid::this())?;
    let cpus = (0..CpuSet::count()).rev();
    let mut usable = cpus.filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let cpu = usable.next().context("no CPU to run on")?;
    let mut one = CpuSet::new();
    one.set(cpu)?;
    sched_setaffinity(Pid::this(), &one).context("cannot set the CPU affinity")?;
    Ok(cpu as u64)
}

/// Calls `once` `n` times and returns the nanoseconds that it takes.
fn timed(n: u64, mut once: impl FnMut() -> Result<()>) -> Result<u64> {
    let start = Instant::now();
    (0..n).try_for_each(|_| once())?;
    Ok(u64::try_from(start.elapsed().as_nanos())?)
}

fn vfork(stack: &mut [u8; raw::STACK]) -> Result<()> {
    let child = raw::vfork_exit(stack).context("cannot fork")?;
    waitpid(child, None).context("cannot wait for a child")?;
    Ok(())
}

/// Creates up to `n` sleeping children, as many as the system allows, and returns their number.
fn sleepers(n: usize) -> Result<u64> {
    let stacks = vec![0_u8; n * raw::STACK].leak().as_chunks_mut().0;
    let made = stacks
        .iter_mut()
        .map(raw::sleeper)
        .take_while(Result::is_ok);
    Ok(made.count() as u64)
}

/// Starts an agent, waits for `bytes` bytes from its children and for the time `lived`, kills it, and waits until its
/// orphans have exited. Returns the nanoseconds from the kill on.
fn kill_agent(role: [&str; 2], bytes: usize, lived: Duration) -> Result<u64> {
    let mut agent = process_command(AGENT, &role)?
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start an agent")?;
    let mut output = agent.stdout.take().context("no pipe from the agent")?;
    output
        .read_exact(&mut vec![0; bytes])
        .context("the agent exited too early")?;
    std::thread::sleep(lived);
    let start = Instant::now();
    agent.kill().context("cannot kill the agent")?;
    let status = agent.wait().context("cannot wait for the agent")?;
    ensure!(
        status.code().is_none(),
        "the agent exited by itself: {status}"
    );
    // Only the orphans still have the other end of the pipe. It is closed when the last one exits.
    let ended = hangup(output, PollTimeout::from(PATIENCE_MS))?;
    let took = start.elapsed();
    ensure!(
        ended,
        "orphans are alive {PATIENCE_MS} ms after their agent"
    );
    Ok(u64::try_from(took.as_nanos())?)
}

/// Starts `n` agents that do nothing until this process exits.
fn idle_agents(n: u64) -> Result<u64> {
    let own = std::env::args_os().next().context("argv is empty")?;
    let agent = Path::new(&own).with_file_name(IDLE).join(OTHER_AGENT);
    for _ in 0..n {
        let mut command = Command::new(&agent);
        command.arg("infinity").stdin(Stdio::null());
        command.stdout(Stdio::null());
        raw::end_with_us(&mut command);
        command.spawn().context("cannot start an idle agent")?;
    }
    Ok(n)
}

/// Starts agents one after the other, until there is another request. Each exits and leaves `holders` processes with
/// `files` open files each. Returns the number of agents.
fn crowds(holders: u64, files: u64) -> Result<u64> {
    // The service reads open files only if a socket listens on the host.
    let _listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let mut agents = 0;
    while !is_readable()? {
        let (input, leash) = std::io::pipe()?;
        let role = ["crowd", &holders.to_string(), &files.to_string()];
        let mut agent = process_command(OTHER_AGENT, &role)?.stdin(input).spawn()?;
        let status = agent.wait()?;
        ensure!(status.success(), "the agent exited with {status}");
        // Processes that were not signalled may be kept by a rule.
        std::thread::sleep(WAVE);
        drop(leash);
        for _ in 0..holders {
            waitpid(None, None).context("an orphan was adopted by another process")?;
        }
        agents += 1;
    }
    Ok(agents)
}

/// Starts [`holder`]s and exits when all have opened their files.
fn crowd(holders: usize, files: &str) -> Result<()> {
    let (mut ready, output) = std::io::pipe()?;
    for _ in 0..holders {
        let mut holder = process_command(HOLDER, &["holder", files])?;
        holder.stdout(output.try_clone()?).spawn()?;
    }
    drop(output);
    Ok(ready.read_exact(&mut vec![0; holders])?)
}

/// Keeps `files` files open until the other end of its standard input is closed.
fn holder(files: u64) -> Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let input = std::io::stdin();
    let files: Vec<_> = (0..files)
        .map(|_| input.as_fd().try_clone_to_owned())
        .collect::<Result<_, _>>()?;
    orphan()?;
    drop(files);
    Ok(())
}

/// Returns whether there is another request.
fn is_readable() -> Result<bool> {
    let input = std::io::stdin();
    let mut input = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut input, PollTimeout::ZERO)? > 0)
}

/// Starts children and waits until it is killed.
fn stand_with(children: u64, role: &str) -> Result<()> {
    let children: Vec<_> = (0..children)
        .map(|_| Ok(process_command(ORPHAN, &[role])?.spawn()?))
        .collect::<Result<_>>()
        .context("cannot start a child")?;
    hangup(std::io::stdin(), PollTimeout::NONE)?;
    // Reached only if this process was not killed.
    for mut child in children {
        let _: ExitStatus = child.wait()?;
    }
    Ok(())
}

/// Keeps many children, forks endlessly, and leaves orphans behind from time to time.
fn forker() -> Result<()> {
    sleepers(KEPT)?;
    let mut stack = [0; raw::STACK];
    let (mut stacks, _) = vec![0_u8; ORPHANS * raw::STACK].leak().as_chunks_mut();
    while !hangup(std::io::stdin(), PollTimeout::ZERO)? {
        for _ in 0..STRIDE {
            vfork(&mut stack)?;
        }
        if let Some((orphan_stack, rest)) = std::mem::take(&mut stacks).split_first_mut() {
            stacks = rest;
            let parent = raw::spawn_orphan(&mut stack, orphan_stack).context("cannot fork")?;
            waitpid(parent, None).context("cannot wait for a child")?;
        }
    }
    Ok(())
}

fn orphan() -> Result<()> {
    let mut output = std::io::stdout();
    if output
        .write_all(b".")
        .and_then(|()| output.flush())
        .is_err()
    {
        // The reader is gone.
        return Ok(());
    }
    hangup(std::io::stdin(), PollTimeout::NONE)?;
    Ok(())
}

/// Returns a command that runs this program under another name.
fn process_command(image: &str, role: &[&str]) -> Result<Command> {
    let own = std::env::args_os().next().context("argv is empty")?;
    let mut command = Command::new(Path::new(&own).with_file_name(image));
    command.arg("bench-process").args(role);
    Ok(command)
}

/// Waits until the other end of a pipe is closed; returns false if that takes too long.
fn hangup(file: impl AsFd, limit: PollTimeout) -> Result<bool> {
    let mut file = [PollFd::new(file.as_fd(), PollFlags::empty())];
    Ok(poll(&mut file, limit)? > 0)
}
