//! Behaviours of session members.

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

/// Reports itself and sleeps.
pub fn sleep(s: &ProcessContext) -> ! {
    s.report();
    rest()
}

/// Reports itself and exits with status 0.
pub fn finish(s: &ProcessContext) -> ! {
    s.report();
    leave(0)
}

/// Leads a new session.
pub fn own_session(s: &ProcessContext) -> ! {
    nix::unistd::setsid().expect("setsid");
    s.report();
    rest()
}

/// `parent ROLE HOW…`: starts a child.
pub fn parent(s: &ProcessContext) -> ! {
    s.spawn(&s.args[0], &s.args[1..].join(" "));
    s.report();
    rest()
}

/// `middle HOW…`: the intermediate process of a double fork. Starts [`orphan`] with these arguments and exits.
pub fn middle(s: &ProcessContext) -> ! {
    let how = s.args.join(" ");
    let (modifiers, play) = modifiers(&how);
    let orphan = format!("orphan {} {play}", getpid());
    let gate = s.dir.join(format!("orphan-{}", getpid()));
    mkfifo(&gate, Mode::from_bits_truncate(0o666)).expect("make the gate");
    s.spawn(&s.role, &[&modifiers[..], &[&orphan]].concat().join(" "));
    // Opening the FIFO blocks until the orphan waits at the gate. So it runs its program before it becomes an orphan.
    let opened = File::options().write(true).open(gate);
    opened.expect("open the gate of the orphan");
    leave(0)
}

/// `orphan PID BEHAVIOUR…`: runs the behaviour once its parent PID has exited.
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
    // SAFETY: no handler is installed.
    unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }.expect("ignore SIGTERM");
}

/// Overwrites its environment, as `setproctitle(3)` does for a long title.
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
    // SAFETY: the kernel mapped this memory for the environment, and nothing reads a variable afterwards.
    unsafe { std::ptr::write_bytes(start as *mut u8, 0, end - start) };
    s.report();
    rest()
}

/// Reports this process and waits for SIGTERM, which does not end it.
pub fn await_term(s: &ProcessContext) {
    let mut term = SigSet::empty();
    term.add(Signal::SIGTERM);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&term), None).expect("block SIGTERM");
    s.report();
    term.wait().expect("wait for SIGTERM");
}

/// Runs [`cleaner`] on SIGTERM and exits when that has exited.
pub fn trap(s: &ProcessContext) -> ! {
    await_term(s);
    let status = s
        .command("worker", "cleaner", "cleaner", &[])
        .status()
        .expect("run the clean-up");
    leave(i32::from(!status.success()))
}

/// `with-helper ROLE`: starts a process that it needs until the end of its clean-up. On SIGTERM, creates the file
/// `cleaned` after 200 ms if that process is still alive, and exits.
pub fn with_helper(s: &ProcessContext) -> ! {
    let mut helper = s.command("worker", "sleep", &s.args[0], &[]);
    let mut helper = helper.spawn().expect("start the helper");
    await_term(s);
    std::thread::sleep(Duration::from_millis(200));
    if helper.try_wait().expect("look at the helper").is_none() {
        std::fs::write(s.dir.join("cleaned"), "").expect("write the file");
    }
    leave(0)
}

/// Creates the file `cleaned` after 200 ms, which shows that the process was not killed.
pub fn cleaner(s: &ProcessContext) -> ! {
    s.report();
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(s.dir.join("cleaned"), "").expect("write the file");
    leave(0)
}

/// Stops itself by SIGSTOP.
pub fn stopped(s: &ProcessContext) -> ! {
    s.report();
    raise(Signal::SIGSTOP).expect("stop");
    rest()
}

/// Exits its leader thread while another thread continues.
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

/// Exits the calling thread only.
pub fn leave_thread() -> ! {
    // SAFETY: the call takes no pointers, and no other thread uses this thread's stack.
    unsafe { nix::libc::syscall(nix::libc::SYS_exit, 0) };
    unreachable!("exit returned")
}

/// Executes another program from a thread that is not the leader.
pub fn thread_exec(s: &ProcessContext) -> ! {
    let s = s.with(&s.role, &[]);
    std::thread::spawn(move || s.exec("sleep"));
    rest()
}

/// Adopts the orphan `leaf` as a subreaper inside the tree.
pub fn nested_subreaper(s: &ProcessContext) -> ! {
    nix::sys::prctl::set_child_subreaper(true).expect("become a subreaper");
    s.spawn("leaf", "double sleep");
    s.report();
    rest()
}

/// Never waits for its exited child.
pub fn zombie_parent(s: &ProcessContext) -> ! {
    let child = fork(|| leave(0));
    while proc::stat(child).is_some_and(|c| c.is_alive()) {
        std::thread::sleep(Duration::from_millis(1));
    }
    s.report();
    rest()
}

/// Starts `twin` as its sibling.
pub fn clone_sibling(s: &ProcessContext) -> ! {
    make_twin(s);
    s.report();
    rest()
}

/// Starts `twin` as a sibling of the calling process, by `CLONE_PARENT`.
pub fn make_twin(s: &ProcessContext) {
    let flags = nix::libc::CLONE_PARENT | nix::libc::SIGCHLD;
    // SAFETY: like fork(2), without a new stack or shared memory, and this process has one thread.
    let pid = unsafe { nix::libc::syscall(nix::libc::SYS_clone, flags, 0, 0, 0, 0) };
    assert!(pid >= 0, "clone: {}", std::io::Error::last_os_error());
    if pid == 0 {
        nix::unistd::alarm::set(super::LIFETIME_S);
        s.run_behaviour("twin", "sleep");
    }
}

/// `chain LENGTH MIDDLE`: a chain of LENGTH processes, each the child of the previous one.
///
/// Process number MIDDLE, counted from the end, has the role `middle`, the next one `cut`, those after it `lower` and
/// those before it `upper`. The first process has the role that its starter gives.
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

/// `later GATE ROLE HOW…`: starts a child when the test opens the gate.
pub fn later(s: &ProcessContext) -> ! {
    s.report();
    s.gate(&s.args[0]);
    s.spawn(&s.args[1], &s.args[2..].join(" "));
    rest()
}

/// `other-uid BEHAVIOUR…`: changes to uid 65534 and executes another program, as `su` and `sudo` do.
pub fn other_uid(s: &ProcessContext) -> ! {
    nix::unistd::setuid(Uid::from_raw(65534)).expect("setuid");
    s.exec(&s.args.join(" "))
}

/// Changes to uid 65534 without exec, as a server does after it has bound its port.
pub fn drop_privileges(s: &ProcessContext) -> ! {
    nix::unistd::setuid(Uid::from_raw(65534)).expect("setuid");
    s.report();
    rest()
}

/// Creates a PID namespace with the init process `init` and two descendants of it.
pub fn namespace(s: &ProcessContext) -> ! {
    unshare(CloneFlags::CLONE_NEWPID).expect("unshare the PID namespace");
    s.spawn("init", "parent inside parent inside-too setsid");
    s.report();
    rest()
}

/// Reports itself and executes the command in its arguments.
pub fn run(s: &ProcessContext) -> ! {
    s.report();
    let error = std::process::Command::new(&s.args[0])
        .args(&s.args[1..])
        .exec();
    panic!("exec {}: {error}", s.args[0])
}

/// `host ROLE HOW…`: starts a child, and runs the test's daemon when the test opens the gate `host`.
///
/// The lines of `DIR/command` are the words of the daemon's command line. Its wait status is written to `DIR/status`.
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

/// Starts a program whose name, arguments and directory contain line breaks and terminal control sequences.
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
    let directory = s.dir.join("in\u{1b}]0;x\u{7}\u{9b}\u{202e}\nFORGED");
    std::fs::create_dir_all(&directory).expect("create a directory");
    command.current_dir(directory);
    begin(&mut command);
    s.report();
    rest()
}
