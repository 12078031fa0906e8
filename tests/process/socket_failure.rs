//! A daemon whose socket fails: by a filter that asks somebody else what is to become of a system call.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, pipe};

use super::context::{ProcessContext, rest};
use super::filter::{install, instruction};

/// Where the low half of the fifth argument stands in `seccomp_data`: the sender's address, which who asks for it
/// wants to know whether it was the kernel.
const SENDER: u32 = 16 + 4 * 8;

/// Like [`host`](super::member::host), but once `DIR/deaf` is there, the daemon can receive nothing more from whom it
/// asks for their address: that fails with EIO.
pub fn failing_socket(s: &ProcessContext) -> ! {
    s.report();
    s.gate("host");
    let command = std::fs::read_to_string(s.dir.join("command")).expect("read the command");
    let (said, says) = pipe().expect("a pipe");
    let daemon = fork_with_files(|| {
        let listener = watch_receiving().expect("install a seccomp filter");
        let number = listener.to_ne_bytes();
        File::from(says).write_all(&number).expect("say its number");
        let words: Vec<&str> = command.lines().collect();
        super::member::run(&s.with("daemon", &words))
    });
    let mut number = [0; 4];
    let heard = File::from(said).read_exact(&mut number);
    heard.expect("hear the listener's number");
    // SAFETY: the child has opened it in the table of files that was both's, and closes its own by running a program.
    let listener = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(number)) };
    while let Some(call) = next(&listener) {
        answer(&listener, call, s.dir.join("deaf").exists());
    }
    let status = match waitpid(daemon, None).expect("wait for the daemon") {
        WaitStatus::Exited(_, code) => code << 8,
        WaitStatus::Signaled(_, signal, _) => signal as i32,
        other => panic!("the daemon has not ended: {other:?}"),
    };
    let status = ExitStatus::from_raw(status).into_raw();
    std::fs::write(s.dir.join("status"), format!("{status}\n")).expect("write the status");
    rest()
}

/// A child whose open files are this process's own, until it runs a program.
fn fork_with_files(child: impl FnOnce()) -> Pid {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: like fork: no new stack, no memory shared, and this process has one thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        0 => child(),
        // What it has is the child's, which closes it for both.
        _ => std::mem::forget(child),
    }
    Pid::from_raw(Errno::result(pid).expect("clone") as i32)
}

/// From now on this thread waits for an answer where it receives and asks from whom. Gives the number of the file that
/// gives the answers.
fn watch_receiving() -> nix::Result<i32> {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    install(
        &mut [
            instruction(load, 0, 0, 0),
            instruction(equal, 0, 3, libc::SYS_recvfrom as u32),
            instruction(load, 0, 0, SENDER),
            instruction(equal, 1, 0, 0),
            instruction(answer, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
            instruction(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
        ],
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
    )
}

/// The number of the next call that waits for an answer; `None` if nobody is left to make one.
fn next(listener: &OwnedFd) -> Option<u64> {
    loop {
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::NONE).expect("wait for a call");
        let events = fds[0].revents().unwrap_or(PollFlags::empty());
        if events.contains(PollFlags::POLLHUP) {
            return None;
        }
        // SAFETY: integers alone, for which zero is a value, and which the kernel asks for.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        let file = listener.as_raw_fd();
        // SAFETY: the call writes to what it is given, which is as long as its number says.
        let got = unsafe { libc::ioctl(file, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) };
        // Whoever made it may have been interrupted meanwhile.
        if got == 0 {
            return Some(call.id);
        }
    }
}

fn answer(listener: &OwnedFd, id: u64, deaf: bool) {
    let mut answer = libc::seccomp_notif_resp {
        id,
        val: 0,
        error: if deaf { -libc::EIO } else { 0 },
        flags: if deaf {
            0
        } else {
            libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32
        },
    };
    let file = listener.as_raw_fd();
    // SAFETY: the call reads what it is given, which is as long as its number says.
    unsafe { libc::ioctl(file, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
}
