//! Pids that come again in the same clock tick, for another process.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpid};

use super::context::{ProcessContext, fork, rest};
use crate::proc;

/// `recycler DAEMON WANTED`: in each round an agent dies with a child that dies with it, and the child's pid goes
/// to a new process, `successor`, that no agent has anything to do with. In every other round the daemon is
/// stopped meanwhile, so that it can only look when all has happened.
///
/// Ends when so many successors have pid and tick of a member. The number of rounds is in `DIR/rounds`.
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

/// One round: whether the successor has the member's pid and tick.
fn recycle(s: &ProcessContext, daemon: Pid, stop: bool) -> bool {
    let mut agent = s.command("claude", "recycled-agent", "agent", &[]);
    let mut agent = agent
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start the agent");
    let mut says = BufReader::new(agent.stdout.take().expect("its output")).lines();
    let mut said = || {
        says.next()
            .expect("a line of the agent")
            .expect("read what it says")
    };
    assert_eq!(said(), "ready");
    if stop {
        kill(daemon, Signal::SIGSTOP).expect("stop the daemon");
        until(|| proc::stat(daemon).is_none_or(|d| d.state == b'T'));
    }
    agent
        .stdin
        .take()
        .expect("its input")
        .write_all(b"go\n")
        .expect("tell it to go");
    let member: proc::ProcessKey = {
        let line = said();
        let (pid, ticks) = line.split_once(' ').expect("pid and ticks");
        proc::ProcessKey {
            pid: pid.parse().expect("a pid"),
            ticks: ticks.parse().expect("ticks"),
        }
    };
    agent.kill().expect("end the agent");
    until(|| proc::stat(member.pid).is_none());
    let successor = succeed(s, member.pid);
    let same = proc::stat(successor).is_some_and(|n| n.id == member);
    agent.wait().expect("wait for the agent");
    if stop {
        kill(daemon, Signal::SIGCONT).expect("continue the daemon");
    }
    same
}

/// A new process with this pid. The kernel gives a number back some moments after the process is gone.
fn succeed(s: &ProcessContext, pid: i32) -> Pid {
    loop {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())
            .expect("turn the pids back");
        let child = fork(|| {
            if getpid().as_raw() == pid {
                s.run_behaviour("successor", "sleep");
            }
        });
        if child.as_raw() == pid {
            return child;
        }
        waitpid(child, None).expect("wait for one with another pid");
    }
}

/// Polls without sleeping: a tick is short. The process's lifetime bounds it.
fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

/// The agent of a round: has a child once it is told, and says who it is.
pub fn agent(_: &ProcessContext) -> ! {
    println!("ready");
    std::io::stdin()
        .lock()
        .read_line(&mut String::new())
        .expect("wait for the word");
    let me = getpid();
    let child = fork(|| {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("die with the parent");
        if nix::unistd::getppid() != me {
            super::context::leave(0);
        }
        rest()
    });
    let child = proc::stat(child).expect("the child's stat").id;
    println!("{} {}", child.pid, child.ticks);
    rest()
}
