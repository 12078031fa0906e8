//! Makes the proc connector's socket of a daemon fail, by a seccomp filter that asks this process about system calls
//! (seccomp_unotify(2)).

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

/// Offset in `seccomp_data` of the low half of the fifth argument: of recvfrom(2), the buffer for the sender's address.
/// The proc connector passes one, to check that the kernel is the sender.
const SENDER: u32 = 16 + 4 * 8;

/// Runs the daemon as [`host`](super::member::host) does. Once `DIR/deaf` exists, each recvfrom(2) with a buffer for the
/// sender's address fails with EIO.
pub fn failing_socket(s: &ProcessContext) -> ! {
    s.report();
    s.gate("host");
    let command = std::fs::read_to_string(s.dir.join("command")).expect("read the command");
    let (reader, writer) = pipe().expect("a pipe");
    let daemon = fork_with_files(|| {
        let listener = intercept_recvfrom().expect("install a seccomp filter");
        let number = listener.to_ne_bytes();
        File::from(writer)
            .write_all(&number)
            .expect("send the listener's descriptor");
        let words: Vec<&str> = command.lines().collect();
        super::member::run(&s.with("daemon", &words))
    });
    let mut number = [0; 4];
    let read = File::from(reader).read_exact(&mut number);
    read.expect("receive the listener's descriptor");
    // SAFETY: the child opened it in the shared descriptor table. Its exec unshares the table and closes only its copy.
    let listener = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(number)) };
    while let Some(call) = next_call(&listener) {
        answer(&listener, call, s.dir.join("deaf").exists());
    }
    let status = match waitpid(daemon, None).expect("wait for the daemon") {
        WaitStatus::Exited(_, code) => code << 8,
        WaitStatus::Signaled(_, signal, _) => signal as i32,
        other => panic!("the daemon has not exited: {other:?}"),
    };
    let status = ExitStatus::from_raw(status).into_raw();
    std::fs::write(s.dir.join("status"), format!("{status}\n")).expect("write the status");
    rest()
}

/// Forks a child that shares the descriptor table of this process until it executes a program.
fn fork_with_files(child: impl FnOnce()) -> Pid {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: like fork(2), without a new stack or shared memory, and this process has one thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        0 => child(),
        // The child closes the closure's descriptors, in the shared table.
        _ => std::mem::forget(child),
    }
    Pid::from_raw(Errno::result(pid).expect("clone") as i32)
}

/// Makes each recvfrom(2) of this thread with a buffer for the sender's address wait for an answer. Returns the listener's
/// descriptor.
fn intercept_recvfrom() -> nix::Result<i32> {
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

/// Returns the id of the next call that waits for an answer; `None` once all filtered processes have exited.
fn next_call(listener: &OwnedFd) -> Option<u64> {
    loop {
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::NONE).expect("wait for a call");
        let events = fds[0].revents().unwrap_or(PollFlags::empty());
        if events.contains(PollFlags::POLLHUP) {
            return None;
        }
        // SAFETY: the struct has only integers, for which zero is valid. The kernel requires zeros.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        let file = listener.as_raw_fd();
        // SAFETY: the request number contains the size of the struct to which the call writes.
        let got = unsafe { libc::ioctl(file, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) };
        // Fails if a signal interrupted the waiting thread meanwhile.
        if got == 0 {
            return Some(call.id);
        }
    }
}

/// Lets a call continue, or makes it fail with EIO.
fn answer(listener: &OwnedFd, id: u64, fails: bool) {
    let mut answer = libc::seccomp_notif_resp {
        id,
        val: 0,
        error: if fails { -libc::EIO } else { 0 },
        flags: if fails {
            0
        } else {
            libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32
        },
    };
    let file = listener.as_raw_fd();
    // SAFETY: the request number contains the size of the struct that the call reads.
    unsafe { libc::ioctl(file, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
}
