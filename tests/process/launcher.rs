//! Processes outside of the trees: the launcher, which starts them, and wrappers that run a whole test.

use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::wait::{WaitStatus, waitpid};

use super::context::{ProcessContext, begin, fork, leave};
use crate::proc;

extern "C" fn ignore(_: i32) {}

/// Makes the kernel discard the zombies of this process. Unlike an ignored SIGCHLD, children do not inherit this through
/// exec.
fn discard_zombies() {
    let handler = SigHandler::Handler(ignore);
    let action = SigAction::new(
        handler,
        SaFlags::SA_NOCLDWAIT | SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler is empty, so it is async-signal-safe.
    unsafe { sigaction(Signal::SIGCHLD, &action) }.expect("set the handler of SIGCHLD");
}

/// Starts the canaries (a child, and an orphan that no agent left) and then the processes of the test.
///
/// It adopts the orphans of the trees, unless it has the argument `no-subreaper`.
///
/// Each line of standard input starts a process. The words are separated by tabs: IMAGE, BEHAVIOUR, ROLE and arguments, or
/// `spawn`, ROLE and HOW ([`ProcessContext::spawn`]). At the end of the input it kills all its descendants and exits.
pub fn launcher(s: &ProcessContext) -> ! {
    nix::unistd::setsid().expect("setsid");
    discard_zombies();
    if s.args.is_empty() {
        nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    }
    s.spawn("canary", "sleep");
    begin(&mut s.command("worker", "middle", "canary-orphan", &["sleep".into()]));
    s.report();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("read the next command");
        let words: Vec<String> = line.split('\t').map(String::from).collect();
        let [image, behaviour, role, args @ ..] = words.as_slice() else {
            panic!("malformed command: {line:?}")
        };
        match (image.as_str(), args) {
            ("spawn", []) => s.spawn(behaviour, role),
            _ => begin(&mut s.command(image, behaviour, role, args)),
        }
    }
    kill_descendants(Duration::from_secs(10));
    leave(0)
}

/// Kills all descendants, for at most `limit`. Returns the largest number that was alive at the same time.
fn kill_descendants(limit: Duration) -> usize {
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

/// Runs the command in its arguments. Exits with its exit code, or with 99 if it leaves processes behind.
pub fn check_survivors(s: &ProcessContext) -> ! {
    nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    let status = Command::new(&s.args[0])
        .args(&s.args[1..])
        .stdin(Stdio::null())
        .status();
    let code = status.expect("run the command").code().unwrap_or(98);
    leave(if kill_descendants(Duration::from_secs(5)) == 0 {
        code
    } else {
        99
    })
}

/// `run-in-pid-namespace NAME [SOURCE]`: runs a scenario with this source, or a test of snapshots, as the init process of a PID
/// namespace with its own /proc.
pub fn run_in_pid_namespace(s: &ProcessContext) -> ! {
    unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS).expect("unshare");
    let init = fork(|| {
        // The kernel discards a namespace init's own SIGALRM, so its lifetime must end with this process.
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("set the parent-death signal");
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .expect("make mounts private");
        mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none).expect("mount /proc");
        let test = || match &s.args[..] {
            [name] => crate::cli::snapshots::in_pid_namespace(name),
            words => crate::trees::in_pid_namespace(&words[0], &words[1]),
        };
        let passed = std::panic::catch_unwind(test).is_ok();
        leave(i32::from(!passed))
    });
    match waitpid(init, None) {
        Ok(WaitStatus::Exited(_, code)) => leave(code),
        other => panic!("the init process of the namespace ended with {other:?}"),
    }
}
