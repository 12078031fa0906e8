//! Forces the reuse of a pid within the same clock tick, so that two processes have the same key in /proc.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpid};

use super::context::{ProcessContext, fork, rest};
use crate::proc;

/// `recycler DAEMON WANTED`: runs rounds until WANTED processes have had the pid and tick of a member.
///
/// In each round an agent is killed and its child dies with it. The child's pid goes to a new process `successor`, which no
/// agent started. In every second round the daemon (pid DAEMON) is stopped meanwhile, so that it reads /proc only
/// afterwards. The number of rounds is written to `DIR/rounds`.
pub fn recycler(s: &ProcessContext) -> ! {
    let daemon = Pid::from_raw(s.args[0].parse().expect("the daemon's pid"));
    let wanted: u32 = s.args[1].parse().expect("a number");
    let (mut same, mut rounds) = (0, 0u32);
    while same < wanted {
        same += u32::from(recycle(s, daemon, rounds.is_multiple_of(2)));
        rounds += 1;
    }
    std::fs::write(s.dir.join("rounds"), rounds.to_string()).expect("write the result");
    s.report();
    rest()
}

/// Runs a round. Returns whether the successor has the member's pid and tick.
fn recycle(s: &ProcessContext, daemon: Pid, stop: bool) -> bool {
    let mut agent = s.command("claude", "recycled-agent", "agent", &[]);
    let mut agent = agent
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start the agent");
    let mut lines = BufReader::new(agent.stdout.take().expect("its output")).lines();
    let mut next_line = || {
        lines
            .next()
            .expect("a line of the agent")
            .expect("read the agent's output")
    };
    assert_eq!(next_line(), "ready");
    if stop {
        kill(daemon, Signal::SIGSTOP).expect("stop the daemon");
        until(|| proc::stat(daemon).is_none_or(|d| d.state == b'T'));
    }
    agent
        .stdin
        .take()
        .expect("its input")
        .write_all(b"go\n")
        .expect("write to the agent");
    let member: proc::ProcessKey = {
        let line = next_line();
        let (pid, ticks) = line.split_once(' ').expect("pid and ticks");
        proc::ProcessKey {
            pid: pid.parse().expect("a pid"),
            ticks: ticks.parse().expect("ticks"),
        }
    };
    agent.kill().expect("kill the agent");
    until(|| proc::stat(member.pid).is_none());
    let successor = start_successor(s, member.pid);
    let same = proc::stat(successor).is_some_and(|n| n.id == member);
    agent.wait().expect("wait for the agent");
    if stop {
        kill(daemon, Signal::SIGCONT).expect("continue the daemon");
    }
    same
}

/// Starts the process `successor` with this pid. Retries, because the kernel frees a pid some time after its process is
/// gone.
fn start_successor(s: &ProcessContext, pid: i32) -> Pid {
    loop {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())
            .expect("set the last pid");
        let child = fork(|| {
            if getpid().as_raw() == pid {
                s.run_behaviour("successor", "sleep");
            }
        });
        if child.as_raw() == pid {
            return child;
        }
        waitpid(child, None).expect("wait for a child with another pid");
    }
}

/// Polls without sleeping, because a tick is short. SIGALRM at the end of the process's lifetime limits it.
fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

/// Starts a child after a line of input, and prints its pid and start ticks. The agent of a round.
pub fn agent(_: &ProcessContext) -> ! {
    println!("ready");
    std::io::stdin()
        .lock()
        .read_line(&mut String::new())
        .expect("read a line");
    let me = getpid();
    let child = fork(|| {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("set the parent-death signal");
        if nix::unistd::getppid() != me {
            super::context::leave(0);
        }
        rest()
    });
    let child = proc::stat(child).expect("the child's stat").id;
    println!("{} {}", child.pid, child.ticks);
    rest()
}
