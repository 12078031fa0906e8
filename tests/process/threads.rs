//! Processes of two threads that die in the same moment.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, unshare};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, dup};

use super::context::{ProcessContext, fork, leave, rest};

/// Open files of a thread differ by up to so many from round to round: closing them shifts when it gives away
/// its children.
const FILES: u32 = 400;

/// `givers ROUNDS CHILDREN`: in each round a process with two threads, each with so many children, which live
/// on when it dies. Reports itself when all of them have died.
pub fn two_thread_parents(s: &ProcessContext) -> ! {
    let number = |i: usize| s.args[i].parse::<u32>().expect("a number");
    for round in 0..number(0) {
        let s = s.with("giver", &[]);
        let giver = fork(|| {
            s.report();
            give(number(1), round * 37 % FILES)
        });
        waitpid(giver, None).expect("wait for the giver");
    }
    s.report();
    rest()
}

fn give(children: u32, files: u32) -> ! {
    let cpus = sched_getaffinity(Pid::from_raw(0)).expect("read the affinity");
    let cpus: Vec<usize> = (0..CpuSet::count())
        .filter(|cpu| cpus.is_set(*cpu).unwrap_or(false))
        .collect();
    let both_ready = Arc::new(Barrier::new(2));
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    let theirs = Arc::clone(&both_ready);
    std::thread::spawn(move || {
        prepare(last, children, files);
        theirs.wait();
        // Awake, so that it dies as soon as it is told.
        loop {
            std::hint::spin_loop();
        }
    });
    prepare(first, children, files);
    both_ready.wait();
    std::thread::sleep(Duration::from_millis(2));
    leave(0)
}

/// The calling thread's children, its own CPU, and files that nobody shares: it has those to close when it dies,
/// which comes before it gives its children away.
fn prepare(cpu: usize, children: u32, files: u32) {
    for _ in 0..children {
        // The child makes nothing but system calls, which is what it may beside another thread.
        fork(|| rest());
    }
    let mut one = CpuSet::new();
    one.set(cpu).expect("name the CPU");
    sched_setaffinity(Pid::from_raw(0), &one).expect("stay on the CPU");
    unshare(CloneFlags::CLONE_FILES).expect("have files of its own");
    for _ in 0..files {
        std::mem::forget(dup(std::io::stdin()).expect("dup"));
    }
}
