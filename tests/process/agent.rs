//! Agents, and the processes between an agent and the launcher.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::dup;

use super::context::{ProcessContext, begin, leave, rest};
use super::member::{leave_thread, make_twin};

/// Starts the children of an agent and exits when the test opens the gate `die-ROLE`.
///
/// Each argument `ROLE=HOW` or `ROLE*N=HOW` starts one or N children by [`ProcessContext::spawn`]. In `HOW`, `+` stands
/// for a space and `{plus}` for a plus sign. `HOW` = `twin` starts a sibling of the agent instead. `die=HOW` sets how the
/// agent exits.
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
            nix::sys::signal::raise(signal).expect("raise the signal");
            rest()
        }
        ("segfault", _) => {
            setrlimit(Resource::RLIMIT_CORE, 0, 0).expect("disable core dumps");
            // SAFETY: not sound, on purpose: no memory is mapped at 8, and the test needs the fault.
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
        // A shell, such as that of a hook at the end of the session, leaves processes in the background.
        ("shell", script) => {
            let script = script.replace("{dir}", &s.dir.display().to_string());
            let status = Command::new("sh").args(["-c", &script]).status();
            assert!(status.expect("start a shell").success(), "{script} fails");
            leave(0)
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
        _ => panic!("no way to exit is named '{how}'"),
    }
}

/// Becomes a subreaper that never waits, and starts the agent.
pub fn never_waiting_subreaper(s: &ProcessContext) -> ! {
    nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    begin(&mut s.agent());
    s.report();
    rest()
}

/// Executes the agent.
pub fn shim_exec(s: &ProcessContext) -> ! {
    panic!("exec the agent: {}", s.agent().exec())
}

/// Executes the agent from a thread that is not the leader.
pub fn shim_thread(s: &ProcessContext) -> ! {
    let mut agent = s.agent();
    std::thread::spawn(move || panic!("exec the agent: {}", agent.exec()));
    rest()
}

/// Starts the agent and exits.
pub fn shim_spawn(s: &ProcessContext) -> ! {
    begin(&mut s.agent());
    leave(0)
}

/// Starts the agent as leader of a session with a new controlling terminal.
pub fn terminal(s: &ProcessContext) -> ! {
    let pty = nix::pty::openpty(None, None).expect("openpty");
    nix::unistd::setsid().expect("setsid");
    // SAFETY: the descriptor is open, and the argument 0 does not steal a terminal from another session.
    let got = unsafe { nix::libc::ioctl(pty.slave.as_raw_fd(), nix::libc::TIOCSCTTY, 0) };
    assert_eq!(
        got,
        0,
        "set the controlling terminal: {}",
        std::io::Error::last_os_error()
    );
    let slave = || dup(&pty.slave).expect("dup");
    begin(s.agent().stdin(slave()).stdout(slave()));
    s.report();
    rest()
}
