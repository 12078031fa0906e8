//! Agents, and what stands between one and the launcher.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::dup;

use super::context::{ProcessContext, begin, leave, rest};
use super::member::{leave_thread, make_twin};

/// An agent. Each argument `ROLE=HOW` or `ROLE*N=HOW` is a child (or N) as [`Stage::spawn`] has it, where `+`
/// stands for a space and `{plus}` for itself; the way `twin` starts its
/// twin instead, whose parent is not the agent. `die=HOW` says how it dies when the test opens the gate `die-ROLE`.
pub fn agent(s: &ProcessContext) -> ! {
    let mut death = "exit 0".to_owned();
    for arg in &s.args {
        let (role, how) = arg.split_once('=').expect("ROLE=HOW");
        let how = how.replace('+', " ").replace("{plus}", "+");
        match role.split_once('*').unwrap_or((role, "1")) {
            ("die", _) => death = how,
            _ if how == "twin" => make_twin(s),
            (role, n) => (0..n.parse().expect("a number")).for_each(|_: u32| s.spawn(role, &how)),
        }
    }
    s.report();
    s.gate(&format!("die-{}", s.role));
    die(s, &death)
}

fn die(s: &ProcessContext, how: &str) -> ! {
    match how.split_once(' ').unwrap_or((how, "")) {
        ("exit", code) => leave(code.parse().expect("an exit code")),
        ("raise", name) => {
            let signal = name.parse().expect("the name of a signal");
            nix::sys::signal::raise(signal).expect("raise it");
            rest()
        }
        ("segfault", _) => {
            setrlimit(Resource::RLIMIT_CORE, 0, 0).expect("do without a core dump");
            // SAFETY: not sound, on purpose: nothing is mapped at 8, and the fault is what the test is about.
            unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
            unreachable!("wrote to address 8")
        }
        ("exit-group", threads) => {
            let n: u32 = threads.parse().expect("a number of threads");
            for i in 0..n {
                std::thread::spawn(move || if i == n / 2 { leave(7) } else { rest() });
            }
            rest()
        }
        ("leader-first", _) => {
            let s = s.with("leaderless", &[]);
            std::thread::spawn(move || {
                while crate::proc::stat("self").is_none_or(|me| me.state != b'Z') {
                    std::thread::yield_now();
                }
                s.report();
                s.gate("die-leaderless");
                leave(3)
            });
            leave_thread()
        }
        _ => panic!("no way to die is called '{how}'"),
    }
}

/// A subreaper that starts the agent and never waits for what it adopts.
pub fn never_waiting_subreaper(s: &ProcessContext) -> ! {
    nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    begin(&mut s.agent());
    s.report();
    rest()
}

/// Becomes the agent.
pub fn shim_exec(s: &ProcessContext) -> ! {
    panic!("exec the agent: {}", s.agent().exec())
}

/// Becomes the agent, from a thread that is not the leader.
pub fn shim_thread(s: &ProcessContext) -> ! {
    let mut agent = s.agent();
    std::thread::spawn(move || panic!("exec the agent: {}", agent.exec()));
    rest()
}

/// Starts the agent and is gone.
pub fn shim_spawn(s: &ProcessContext) -> ! {
    begin(&mut s.agent());
    leave(0)
}

/// The leader of a session on a terminal of its own, with the agent in it.
pub fn terminal(s: &ProcessContext) -> ! {
    let pty = nix::pty::openpty(None, None).expect("openpty");
    nix::unistd::setsid().expect("setsid");
    // SAFETY: the descriptor is open; 0 steals no terminal from anybody.
    let got = unsafe { nix::libc::ioctl(pty.slave.as_raw_fd(), nix::libc::TIOCSCTTY, 0) };
    assert_eq!(
        got,
        0,
        "take the terminal: {}",
        std::io::Error::last_os_error()
    );
    let slave = || dup(&pty.slave).expect("dup");
    begin(s.agent().stdin(slave()).stdout(slave()));
    s.report();
    rest()
}
