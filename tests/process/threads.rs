//! Processes whose two threads exit at the same moment, each with children.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, unshare};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, dup};

use super::context::{ProcessContext, fork, leave, rest};

/// Limit on the extra open files of a thread. Their number varies from round to round: an exiting thread closes them before
/// its children are reparented, so it varies when that happens.
const FILES: u32 = 400;

/// `two-thread-parents ROUNDS CHILDREN`: in each round a process `giver` with two threads, each with CHILDREN children,
/// exits and leaves them behind. Reports itself after the last round.
pub fn two_thread_parents(s: &ProcessContext) -> ! {
    let number = |i: usize| s.args[i].parse::<u32>().expect("a number");
    for round in 0..number(0) {
        let s = s.with("giver", &[]);
        let giver = fork(|| {
            s.report();
            exit_with_children(number(1), round * 37 % FILES)
        });
        waitpid(giver, None).expect("wait for the giver");
    }
    s.report();
    rest()
}

fn exit_with_children(children: u32, files: u32) -> ! {
    let cpus = sched_getaffinity(Pid::from_raw(0)).expect("read the affinity");
    let cpus: Vec<usize> = (0..CpuSet::count())
        .filter(|cpu| cpus.is_set(*cpu).unwrap_or(false))
        .collect();
    let both_ready = Arc::new(Barrier::new(2));
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    let ready = Arc::clone(&both_ready);
    std::thread::spawn(move || {
        prepare(last, children, files);
        ready.wait();
        // Spins, so that it exits as soon as the other thread ends the process.
        loop {
            std::hint::spin_loop();
        }
    });
    prepare(first, children, files);
    both_ready.wait();
    std::thread::sleep(Duration::from_millis(2));
    leave(0)
}

/// Starts the calling thread's children, pins it to a CPU, and opens files. It does not share its descriptor table, so it
/// has to close them when it exits.
fn prepare(cpu: usize, children: u32, files: u32) {
    for _ in 0..children {
        // The child only makes system calls, as the child of a process with several threads must.
        fork(|| rest());
    }
    let mut one = CpuSet::new();
    one.set(cpu).expect("select the CPU");
    sched_setaffinity(Pid::from_raw(0), &one).expect("pin the thread to the CPU");
    unshare(CloneFlags::CLONE_FILES).expect("unshare the descriptor table");
    for _ in 0..files {
        std::mem::forget(dup(std::io::stdin()).expect("dup"));
    }
}
