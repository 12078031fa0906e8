//! What forks much, or while it is being ended. Each has a bound of its own, far beyond what a reaper may take.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::wait::waitpid;

use super::context::{ProcessContext, fork, leave, rest};
use super::member::{await_term, set_ignore_term};

const BIRTHS: u32 = 5000;
const TIME: Duration = Duration::from_secs(10);

/// From SIGTERM on, it and each child of it fork a child each millisecond.
pub fn fork_bomb_on_term(s: &ProcessContext) -> ! {
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let size = NonZeroUsize::MIN.saturating_add(4095);
    // SAFETY: a new mapping, which stays for as long as the process does.
    let page =
        unsafe { mmap_anonymous(None, size, protection, MapFlags::MAP_SHARED) }.expect("mmap");
    // SAFETY: the page is zeroed, aligned, never unmapped, and only ever used as this one atomic.
    let births: &'static AtomicU32 = unsafe { page.cast::<AtomicU32>().as_ref() };
    await_term(s);
    heads(births, Instant::now() + TIME)
}

fn heads(births: &'static AtomicU32, end: Instant) -> ! {
    while births.fetch_add(1, Ordering::Relaxed) < BIRTHS && Instant::now() < end {
        fork(|| heads(births, end));
        std::thread::sleep(Duration::from_millis(1));
    }
    rest()
}

/// From SIGTERM on, it forks and is gone, and so does its child: a tree of one that is never the same.
pub fn fork_chain_on_term(s: &ProcessContext) -> ! {
    await_term(s);
    relay(Duration::from_millis(2), BIRTHS);
    nix::unistd::alarm::set(super::LIFETIME_S);
    rest()
}

/// The same by programs: what it forks runs another one, which does likewise.
pub fn exec_chain_on_term(s: &ProcessContext) -> ! {
    await_term(s);
    set_ignore_term();
    s.run_behaviour("hop", "exec-chain 3000")
}

/// `hop N`: forks what runs another program that plays `hop N-1`, and is gone.
pub fn exec_chain(s: &ProcessContext) -> ! {
    let left = number(s);
    if left > 0 {
        fork(|| s.exec(&format!("exec-chain {}", left - 1)));
    }
    leave(0)
}

/// `handover N`: like `runner` from the moment on that the test opens its gate, faster, at most N times, and SIGTERM is
/// ignored.
pub fn handover(s: &ProcessContext) -> ! {
    set_ignore_term();
    nix::unistd::setsid().expect("setsid");
    s.report();
    s.gate("handover");
    relay(Duration::from_micros(200), number(s));
    leave(0)
}

/// Forks and is gone, and so does its child after a pause. Returns in the last of them.
fn relay(pause: Duration, births: u32) {
    let end = Instant::now() + TIME;
    for _ in 0..births {
        if Instant::now() > end {
            break;
        }
        // SAFETY: this process has one thread.
        if unsafe { nix::unistd::fork() }.expect("fork").is_parent() {
            leave(0);
        }
        std::thread::sleep(pause);
    }
}

/// `busy N`: forks so many times, with a pause: in turn one that is gone at once, an orphan with a session of its own,
/// and a child that ignores SIGTERM. Those that stay are called `brood`.
pub fn busy(s: &ProcessContext) -> ! {
    s.report();
    for n in 0..number(s) {
        match n % 3 {
            0 => drop(waitpid(fork(|| leave(0)), None)),
            1 => s.spawn("brood", "triple-fork setsid"),
            _ => s.spawn("brood", "fork ignore-term"),
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    rest()
}

/// `swarm N`: has so many children as fast as it can, called `brood`, every other one ignoring SIGTERM.
pub fn swarm(s: &ProcessContext) -> ! {
    for n in 0..number(s) {
        s.spawn(
            "brood",
            if n % 2 == 0 {
                "fork setsid"
            } else {
                "fork ignore-term"
            },
        );
    }
    s.report();
    rest()
}

fn number(s: &ProcessContext) -> u32 {
    s.args[0].parse().expect("a number")
}
