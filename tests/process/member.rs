//! What members of a session do.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, raise, signal, sigprocmask};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, Uid, getpid, mkfifo};

use super::context::{ProcessContext, begin, fork, leave, modifiers, orphaned_by, rest};
use crate::proc;

/// Is there.
pub fn sleep(s: &ProcessContext) -> ! {
    s.report();
    rest()
}

/// Leads a session of its own.
pub fn own_session(s: &ProcessContext) -> ! {
    nix::unistd::setsid().expect("setsid");
    s.report();
    rest()
}

/// Has a child: `parent ROLE PLAY…`.
pub fn parent(s: &ProcessContext) -> ! {
    s.spawn(&s.args[0], &s.args[1..].join(" "));
    s.report();
    rest()
}

/// The process in the middle of a double fork: starts `orphan` with the rest of its arguments, and is gone.
pub fn middle(s: &ProcessContext) -> ! {
    let how = s.args.join(" ");
    let (modifiers, play) = modifiers(&how);
    let orphan = format!("orphan {} {play}", getpid());
    let gate = s.dir.join(format!("orphan-{}", getpid()));
    mkfifo(&gate, Mode::from_bits_truncate(0o666)).expect("make the gate");
    s.spawn(&s.role, &[&modifiers[..], &[&orphan]].concat().join(" "));
    // It is what it is to be before it is an orphan: opening waits for who reads there.
    let opened = File::options().write(true).open(gate);
    opened.expect("let the orphan pass");
    leave(0)
}

/// `orphan PID PLAY…`: plays once the parent PID is gone.
pub fn orphan(s: &ProcessContext) -> ! {
    s.gate(&format!("orphan-{}", s.args[0]));
    orphaned_by(Pid::from_raw(s.args[0].parse().expect("the parent's pid")));
    s.run_behaviour(&s.role, &s.args[1..].join(" "))
}

/// Ignores SIGTERM.
pub fn ignore_term(s: &ProcessContext) -> ! {
    set_ignore_term();
    s.report();
    rest()
}

pub fn set_ignore_term() {
    // SAFETY: no handler is installed, the signal is ignored.
    unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }.expect("ignore SIGTERM");
}

/// Overwrites its environment, as `setproctitle(3)` does to make room for a title.
pub fn title(s: &ProcessContext) -> ! {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc/self/stat");
    let (_, fields) = stat.rsplit_once(')').expect("a name in parentheses");
    // env_start and env_end, the 50th and 51st field of proc_pid_stat(5); the state is the third.
    let mut fields = fields.split_whitespace().skip(47);
    let mut address = || -> usize {
        fields
            .next()
            .and_then(|f| f.parse().ok())
            .expect("an address")
    };
    let (start, end) = (address(), address());
    // SAFETY: the memory is this process's own, and nothing reads a variable afterwards.
    unsafe { std::ptr::write_bytes(start as *mut u8, 0, end - start) };
    s.report();
    rest()
}

/// Blocks until SIGTERM is sent to this process, which does not end it.
pub fn await_term(s: &ProcessContext) {
    let mut term = SigSet::empty();
    term.add(Signal::SIGTERM);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&term), None).expect("block SIGTERM");
    s.report();
    term.wait().expect("wait for SIGTERM");
}

/// Forks a clean-up when it is told to end, and ends when that is done.
pub fn trap(s: &ProcessContext) -> ! {
    await_term(s);
    let status = s
        .command("worker", "cleaner", "cleaner", &[])
        .status()
        .expect("run the clean-up");
    leave(i32::from(!status.success()))
}

/// The clean-up: takes a while, and leaves a file to show that it came to its end.
pub fn cleaner(s: &ProcessContext) -> ! {
    s.report();
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(s.dir.join("cleaned"), "").expect("write the file");
    leave(0)
}

/// Is stopped.
pub fn stopped(s: &ProcessContext) -> ! {
    s.report();
    raise(Signal::SIGSTOP).expect("stop");
    rest()
}

/// Its leader thread exits while another goes on.
pub fn leader_first(s: &ProcessContext) -> ! {
    let zombie_leader = {
        let s = s.with(&s.role, &[]);
        move || {
            while proc::stat("self").is_none_or(|me| me.state != b'Z') {
                std::thread::sleep(Duration::from_millis(1));
            }
            s.report();
            rest()
        }
    };
    std::thread::spawn(zombie_leader);
    leave_thread()
}

/// Ends the calling thread alone.
pub fn leave_thread() -> ! {
    // SAFETY: ends this thread, whose stack nobody else uses.
    unsafe { nix::libc::syscall(nix::libc::SYS_exit, 0) };
    unreachable!("exit returned")
}

/// Runs another program from a thread that is not the leader.
pub fn thread_exec(s: &ProcessContext) -> ! {
    let s = s.with(&s.role, &[]);
    std::thread::spawn(move || s.exec("sleep"));
    rest()
}

/// A subreaper inside the tree: adopts `leaf`.
pub fn nested_subreaper(s: &ProcessContext) -> ! {
    nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    s.spawn("leaf", "double sleep");
    s.report();
    rest()
}

/// Never waits for its child, which has ended.
pub fn zombie_parent(s: &ProcessContext) -> ! {
    let child = fork(|| leave(0));
    while proc::stat(child).is_some_and(|c| c.is_alive()) {
        std::thread::sleep(Duration::from_millis(1));
    }
    s.report();
    rest()
}

/// Makes `twin`, whose parent is this process's own: `CLONE_PARENT`.
pub fn clone_sibling(s: &ProcessContext) -> ! {
    make_twin(s);
    s.report();
    rest()
}

/// The twin of [`twins`], of whatever process calls.
pub fn make_twin(s: &ProcessContext) {
    let flags = nix::libc::CLONE_PARENT | nix::libc::SIGCHLD;
    // SAFETY: like fork: no new stack, nothing shared, and this process has one thread.
    let pid = unsafe { nix::libc::syscall(nix::libc::SYS_clone, flags, 0, 0, 0, 0) };
    assert!(pid >= 0, "clone: {}", std::io::Error::last_os_error());
    if pid == 0 {
        nix::unistd::alarm::set(super::LIFETIME_S);
        s.run_behaviour("twin", "sleep");
    }
}

/// `chain LENGTH MIDDLE`: so many processes, each the child of the one before. Those after number `MIDDLE`
/// (counted from the end) are called `lower`, the first of them `cut`, the one itself `middle`.
pub fn chain(s: &ProcessContext) -> ! {
    let number = |i: usize| s.args[i].parse::<u32>().expect("a number");
    let (left, middle) = (number(0) - 1, number(1));
    if left > 0 {
        let role = match left.cmp(&middle) {
            std::cmp::Ordering::Greater => "upper",
            std::cmp::Ordering::Equal => "middle",
            std::cmp::Ordering::Less if left + 1 == middle => "cut",
            std::cmp::Ordering::Less => "lower",
        };
        s.spawn(role, &format!("chain {left} {middle}"));
    }
    s.report();
    rest()
}

/// `later GATE ROLE HOW…`: has a child once the test opens the gate.
pub fn later(s: &ProcessContext) -> ! {
    s.report();
    s.gate(&s.args[0]);
    s.spawn(&s.args[1], &s.args[2..].join(" "));
    rest()
}

/// Becomes nobody, and then what its arguments say: by another program, as `su` and `sudo` do it.
pub fn other_uid(s: &ProcessContext) -> ! {
    nix::unistd::setuid(Uid::from_raw(65534)).expect("setuid");
    s.exec(&s.args.join(" "))
}

/// Becomes nobody within its program, as a server does that has bound its port.
pub fn drop_privileges(s: &ProcessContext) -> ! {
    nix::unistd::setuid(Uid::from_raw(65534)).expect("setuid");
    s.report();
    rest()
}

/// Makes a pid namespace, whose init is `init` with two processes below it.
pub fn namespace(s: &ProcessContext) -> ! {
    unshare(CloneFlags::CLONE_NEWPID).expect("unshare the pid namespace");
    s.spawn("init", "parent inside parent inside-too setsid");
    s.report();
    rest()
}

/// Runs the command in its arguments in place of this program.
pub fn run(s: &ProcessContext) -> ! {
    s.report();
    let error = std::process::Command::new(&s.args[0])
        .args(&s.args[1..])
        .exec();
    panic!("exec {}: {error}", s.args[0])
}

/// Once the test opens the gate `host`, it runs the command whose words are the lines of `DIR/command`, as
/// `daemon`, and writes what `wait` tells of it to `DIR/status`. Has a child meanwhile: `host ROLE PLAY…`.
pub fn host(s: &ProcessContext) -> ! {
    s.spawn(&s.args[0], &s.args[1..].join(" "));
    s.report();
    s.gate("host");
    let command = std::fs::read_to_string(s.dir.join("command")).expect("read the command");
    let words: Vec<String> = command.lines().map(String::from).collect();
    let status = s.command("worker", "run", "daemon", &words).status();
    let status = status.expect("run the command").into_raw();
    std::fs::write(s.dir.join("status"), format!("{status}\n")).expect("write the status");
    rest()
}

/// Starts a program whose name and arguments try to break out of a line.
pub fn forger(s: &ProcessContext) -> ! {
    let program = s.dir.join("bin").join(crate::cli::hostile::NAME);
    std::fs::hard_link(s.dir.join("bin/worker"), &program).expect("link the program");
    let mut command = std::process::Command::new(program);
    command
        .args(["test-process", "sleep", "forged"])
        .arg(&s.dir);
    command
        .args(["x\nFORGED\r\u{1b}[31m\t\u{7f}\u{85}\u{9b}\"\\", ""])
        .arg(OsStr::from_bytes(b"\xff\xfe\x80"))
        .arg(OsStr::from_bytes(crate::cli::hostile::ARGUMENT));
    let place = s.dir.join("in\u{1b}]0;x\u{7}\u{9b}\u{202e}\nFORGED");
    std::fs::create_dir_all(&place).expect("make a directory");
    command.current_dir(place);
    begin(&mut command);
    s.report();
    rest()
}
