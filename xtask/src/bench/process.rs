//! The processes that are measured with: this program again, under other names.
//!
//! `load` does what it is told on its standard input. Told to kill, it is the parent of agents, and adopts
//! what they leave. Every process exits when the other end of its standard input is closed.

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

/// Names of the images; the kernel takes a process's from the file that it runs.
pub const LOAD: &str = "rb-load";
pub const AGENT: &str = "rb-agent";
pub const ORPHAN: &str = "rb-orphan";
pub const HOLDER: &str = "rb-holder";
/// An agent beside those that are measured.
pub const OTHER_AGENT: &str = "rb-agent-other";
/// Directory beside them with agents that only sleep.
pub const IDLE: &str = "idle";

/// How long an orphan may live on.
const PATIENCE_MS: u16 = 15_000;
/// Children that each forker of a bomb keeps: more than the smallest ring has room for when they go to
/// another parent. Orphans that it leaves behind, and forks between two of them.
const KEPT: usize = 1000;
const ORPHANS: usize = 50;
const STRIDE: usize = 200;
/// How long the processes with many open files live on after their agent.
const WAVE: Duration = Duration::from_millis(300);

/// Plays a role to its end.
///
/// # Errors
/// No such role, or the system denies it something.
pub fn run_role(role: &[String]) -> Result<()> {
    match role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["load"] => load(),
        ["agent", orphans] => stand_with(orphans.parse()?, "orphan"),
        ["bomb", forkers] => stand_with(forkers.parse()?, "forker"),
        ["crowd", holders, files] => crowd(holders.parse()?, files),
        ["holder", files] => holder(files.parse()?),
        ["forker"] => forker(),
        ["orphan"] => orphan(),
        _ => bail!("no such role: {}", role.join(" ")),
    }
}

/// Answers each order with a line: `ok` and a number, or what went wrong.
fn load() -> Result<()> {
    nix::sys::prctl::set_child_subreaper(true).context("cannot become a subreaper")?;
    for order in std::io::stdin().lock().lines() {
        let answer = match obey(&order?) {
            Ok(answer) => format!("ok {answer}\n"),
            Err(error) => format!("{error:#}\n"),
        };
        if std::io::stdout().write_all(answer.as_bytes()).is_err() {
            // Nobody is there any more to tell of it.
            break;
        }
    }
    // The sleepers have seen the end as well.
    while waitpid(None, None).is_ok() {}
    Ok(())
}

fn obey(order: &str) -> Result<u64> {
    let words: Vec<&str> = order.split(' ').collect();
    let numbers = words.iter().skip(1).map(|word| word.parse());
    let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().context("no number")?;
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
            let (said, lived) = (orphans as usize, Duration::from_millis(ms));
            for _ in 0..rounds {
                // Each of its children says one byte.
                kill_agent(["agent", &orphans.to_string()], said, lived)?;
                for _ in 0..orphans {
                    waitpid(None, None).context("an orphan has another parent")?;
                }
            }
            Ok(rounds)
        }
        ("idle", &[n]) => idle_agents(n),
        ("crowd", &[holders, files]) => crowds(holders, files),
        ("bomb", &[forkers, ms]) => {
            let role = ["bomb", &forkers.to_string()];
            let took = kill_agent(role, 0, Duration::from_millis(ms))?;
            // What it left came here; some may be on their last steps.
            while waitpid(None, None).is_ok() {}
            Ok(took)
        }
        _ => bail!("no such order: {order}"),
    }
}

/// Stays on one CPU from now on, its children as well: where they are put matters more than who watches.
/// Says which.
fn pin() -> Result<u64> {
    let allowed = sched_getaffinity(Pid::this())?;
    let cpus = (0..CpuSet::count()).rev();
    let mut usable = cpus.filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let cpu = usable.next().context("no CPU to run on")?;
    let mut one = CpuSet::new();
    one.set(cpu)?;
    sched_setaffinity(Pid::this(), &one).context("cannot stay on one CPU")?;
    Ok(cpu as u64)
}

/// Nanoseconds that `n` times take.
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

/// Makes that many sleeping children, or as many as the system lets it; says how many.
fn sleepers(n: usize) -> Result<u64> {
    let stacks = vec![0_u8; n * raw::STACK].leak().as_chunks_mut().0;
    let made = stacks
        .iter_mut()
        .map(raw::sleeper)
        .take_while(Result::is_ok);
    Ok(made.count() as u64)
}

/// Starts an agent in this role, whose children say so many bytes, kills it when it has lived for a while, and waits
/// until all that it leaves is gone. Returns how many ns that took.
fn kill_agent(role: [&str; 2], said: usize, lived: Duration) -> Result<u64> {
    let mut agent = process_command(AGENT, &role)?
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start an agent")?;
    let mut output = agent.stdout.take().context("no pipe from the agent")?;
    output
        .read_exact(&mut vec![0; said])
        .context("the agent ended before its time")?;
    std::thread::sleep(lived);
    let start = Instant::now();
    agent.kill().context("cannot kill the agent")?;
    let status = agent.wait().context("cannot wait for the agent")?;
    ensure!(
        status.code().is_none(),
        "the agent ended by itself: {status}"
    );
    // The pipe's other end is the orphans' alone now: it is closed when the last is gone.
    let ended = hangup(output, PollTimeout::from(PATIENCE_MS))?;
    let took = start.elapsed();
    ensure!(ended, "some still live {PATIENCE_MS} ms after their agent");
    Ok(u64::try_from(took.as_nanos())?)
}

/// Starts that many agents that do nothing until this process ends.
fn idle_agents(n: u64) -> Result<u64> {
    let own = std::env::args_os().next().context("no name of its own")?;
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

/// Until there is another order, has one agent after the other quit above `holders` processes with that many open files each.
/// Returns how many agents.
fn crowds(holders: u64, files: u64) -> Result<u64> {
    // Where nothing listens, no open files are read.
    let _listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let mut agents = 0;
    while !is_readable()? {
        let (input, leash) = std::io::pipe()?;
        let role = ["crowd", &holders.to_string(), &files.to_string()];
        let mut agent = process_command(OTHER_AGENT, &role)?.stdin(input).spawn()?;
        let status = agent.wait()?;
        ensure!(status.success(), "the agent ended with {status}");
        // A rule may keep what was not signalled by then.
        std::thread::sleep(WAVE);
        drop(leash);
        for _ in 0..holders {
            waitpid(None, None).context("an orphan has another parent")?;
        }
        agents += 1;
    }
    Ok(agents)
}

/// Has so many [`holder`]s, and quits when all have opened their files.
fn crowd(holders: usize, files: &str) -> Result<()> {
    let (mut ready, output) = std::io::pipe()?;
    for _ in 0..holders {
        let mut holder = process_command(HOLDER, &["holder", files])?;
        holder.stdout(output.try_clone()?).spawn()?;
    }
    drop(output);
    Ok(ready.read_exact(&mut vec![0; holders])?)
}

/// Has so many open files until the other end of its standard input is closed.
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

/// Whether there is another order.
fn is_readable() -> Result<bool> {
    let input = std::io::stdin();
    let mut input = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut input, PollTimeout::ZERO)? > 0)
}

/// Has so many children, until it is killed.
fn stand_with(children: u64, role: &str) -> Result<()> {
    let children: Vec<_> = (0..children)
        .map(|_| Ok(process_command(ORPHAN, &[role])?.spawn()?))
        .collect::<Result<_>>()
        .context("cannot start a child")?;
    hangup(std::io::stdin(), PollTimeout::NONE)?;
    // Only if nobody has killed it.
    for mut child in children {
        let _: ExitStatus = child.wait()?;
    }
    Ok(())
}

/// Has many children, forks without end, and leaves orphans behind now and then.
fn forker() -> Result<()> {
    sleepers(KEPT)?;
    let mut stack = [0; raw::STACK];
    let (mut strays, _) = vec![0_u8; ORPHANS * raw::STACK].leak().as_chunks_mut();
    while !hangup(std::io::stdin(), PollTimeout::ZERO)? {
        for _ in 0..STRIDE {
            vfork(&mut stack)?;
        }
        if let Some((stray, rest)) = std::mem::take(&mut strays).split_first_mut() {
            strays = rest;
            let parent = raw::spawn_orphan(&mut stack, stray).context("cannot fork")?;
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
        // Nobody waits for it.
        return Ok(());
    }
    hangup(std::io::stdin(), PollTimeout::NONE)?;
    Ok(())
}

/// This program under another name, beside the one that it goes by.
fn process_command(image: &str, role: &[&str]) -> Result<Command> {
    let own = std::env::args_os().next().context("no name of its own")?;
    let mut command = Command::new(Path::new(&own).with_file_name(image));
    command.arg("bench-process").args(role);
    Ok(command)
}

/// Waits until the other end is closed; false if that takes too long.
fn hangup(file: impl AsFd, limit: PollTimeout) -> Result<bool> {
    let mut file = [PollFd::new(file.as_fd(), PollFlags::empty())];
    Ok(poll(&mut file, limit)? > 0)
}
