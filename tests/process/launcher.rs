//! What starts the trees, and stays outside of them.

use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::wait::{WaitStatus, waitpid};

use super::context::{ProcessContext, begin, fork, leave};
use crate::proc;

extern "C" fn nothing(_: i32) {}

/// Lets the kernel take the dead children away. Unlike an ignored SIGCHLD it is not handed on through exec.
fn forget_children() {
    let handler = SigHandler::Handler(nothing);
    let action = SigAction::new(
        handler,
        SaFlags::SA_NOCLDWAIT | SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGCHLD, &action) }.expect("set the handler of SIGCHLD");
}

/// The parent of the agent, and of the canaries: one is a child, the other an orphan that no agent left.
/// It adopts what the trees leave behind, unless told `no-subreaper`.
///
/// Starts what standard input tells, a line each of IMAGE, PLAY, ROLE and arguments with tabs between, or of
/// `spawn`, ROLE and how ([`Stage::spawn`]). When that ends, it ends all that is below it.
pub fn launcher(s: &ProcessContext) -> ! {
    nix::unistd::setsid().expect("setsid");
    forget_children();
    if s.args.is_empty() {
        nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    }
    s.spawn("canary", "sleep");
    begin(&mut s.command("worker", "middle", "canary-orphan", &["sleep".into()]));
    s.report();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("read the next order");
        let words: Vec<String> = line.split('\t').map(String::from).collect();
        let [image, play, role, args @ ..] = words.as_slice() else {
            panic!("no order: {line:?}")
        };
        match (image.as_str(), args) {
            ("spawn", []) => s.spawn(play, role),
            _ => begin(&mut s.command(image, play, role, args)),
        }
    }
    end_all_below(Duration::from_secs(10));
    leave(0)
}

fn end_all_below(limit: Duration) -> usize {
    let end = Instant::now() + limit;
    let me = proc::stat("self").expect("/proc/self/stat").id;
    let mut most = 0;
    loop {
        let left: Vec<_> = proc::descendants(me)
            .into_iter()
            .filter(proc::Stat::is_alive)
            .collect();
        most = most.max(left.len());
        if left.is_empty() || Instant::now() > end {
            return most;
        }
        for p in left {
            p.id.signal(Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs the command in its arguments, and passes its exit code on if nothing is left of it; else 99.
pub fn check_survivors(s: &ProcessContext) -> ! {
    nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    let status = Command::new(&s.args[0])
        .args(&s.args[1..])
        .stdin(Stdio::null())
        .status();
    let code = status.expect("run the command").code().unwrap_or(98);
    leave(if end_all_below(Duration::from_secs(5)) == 0 {
        code
    } else {
        99
    })
}

/// `capsule STORY SOURCE`: tells the scenario, through the source, as the init of a pid namespace with a /proc of its own.
pub fn run_in_pid_namespace(s: &ProcessContext) -> ! {
    unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS).expect("unshare");
    let init = fork(|| {
        // A namespace's init does not die of its own alarm.
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("die with the parent");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .expect("make mounts private");
        mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none).expect("mount /proc");
        let passed =
            std::panic::catch_unwind(|| crate::trees::in_pid_namespace(&s.args[0], &s.args[1]))
                .is_ok();
        leave(i32::from(!passed))
    });
    match waitpid(init, None) {
        Ok(WaitStatus::Exited(_, code)) => leave(code),
        other => panic!("the capsule ended as {other:?}"),
    }
}
