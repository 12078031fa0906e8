//! Processes that fork often, or while they are being reaped. Each has its own limit, which a working reaper never
//! lets it reach.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::wait::waitpid;

use super::context::{ProcessContext, fork, leave, rest};
use super::member::{await_term, set_ignore_term};

const BIRTHS: u32 = 5000;
const TIME: Duration = Duration::from_secs(10);

/// Forks a child every millisecond after SIGTERM, as does each child.
pub fn fork_bomb_on_term(s: &ProcessContext) -> ! {
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let size = NonZeroUsize::MIN.saturating_add(4095);
    // SAFETY: the kernel chooses the address of the new mapping, which is never unmapped.
    let page =
        unsafe { mmap_anonymous(None, size, protection, MapFlags::MAP_SHARED) }.expect("mmap");
    // SAFETY: the page is zeroed, aligned and never unmapped, and all accesses are through this atomic.
    let births: &'static AtomicU32 = unsafe { page.cast::<AtomicU32>().as_ref() };
    await_term(s);
    fork_repeatedly(births, Instant::now() + TIME)
}

fn fork_repeatedly(births: &'static AtomicU32, end: Instant) -> ! {
    while births.fetch_add(1, Ordering::Relaxed) < BIRTHS && Instant::now() < end {
        fork(|| fork_repeatedly(births, end));
        std::thread::sleep(Duration::from_millis(1));
    }
    rest()
}

/// Forks and exits after SIGTERM, as does each child: one process at a time, with a new pid every 2 ms.
pub fn fork_chain_on_term(s: &ProcessContext) -> ! {
    await_term(s);
    relay(Duration::from_millis(2), BIRTHS);
    nix::unistd::alarm::set(super::LIFETIME_S);
    rest()
}

/// Starts a chain of [`exec_chain`] processes after SIGTERM.
pub fn exec_chain_on_term(s: &ProcessContext) -> ! {
    await_term(s);
    set_ignore_term();
    s.run_behaviour("hop", "exec-chain 3000")
}

/// `exec-chain N`: forks a child that executes `exec-chain N-1`, and exits.
pub fn exec_chain(s: &ProcessContext) -> ! {
    let left = number(s);
    if left > 0 {
        fork(|| s.exec(&format!("exec-chain {}", left - 1)));
    }
    leave(0)
}

/// `handover N`: leads a session and ignores SIGTERM. When the test opens the gate `handover`, it forks and exits, as does
/// each child, N times every 200 µs.
pub fn handover(s: &ProcessContext) -> ! {
    set_ignore_term();
    nix::unistd::setsid().expect("setsid");
    s.report();
    s.gate("handover");
    relay(Duration::from_micros(200), number(s));
    leave(0)
}

/// Forks and exits, as does each child after a pause. Returns in the last process, after `births` forks or [`TIME`].
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

/// `busy N`: forks N times, every 3 ms. In turn: a child that exits at once, an orphan that leads a session, and a child
/// that ignores SIGTERM. The last two kinds have the role `brood`.
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

/// `swarm N`: forks N children with the role `brood` without a pause. Every second one ignores SIGTERM.
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
