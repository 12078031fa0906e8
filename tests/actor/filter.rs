//! A program to which system calls are denied, as old container runtimes deny those that they do not know.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::libc;

use super::stage::Stage;

/// `ERRNO PROGRAM ARG…`: runs the program where pidfd_open(2) fails so.
pub fn without_pidfds(s: &Stage) -> ! {
    let errno: u16 = s.args[0].parse().expect("an errno");
    deny(libc::SYS_pidfd_open, errno).expect("install a seccomp filter");
    let error = Command::new(&s.args[1]).args(&s.args[2..]).exec();
    panic!("{}: {error}", s.args[1]);
}

/// Has a system call fail, of this thread and what it becomes.
fn deny(call: libc::c_long, errno: u16) -> nix::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let answer = libc::SECCOMP_RET_ERRNO | u32::from(errno);
    let mut steps = [
        // The number of the call stands first.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            call as u32,
        ),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, answer),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    nix::sys::prctl::set_no_new_privs()?;
    let filter = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: the program and its steps outlive the call, which copies them.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program) };
    Errno::result(set).map(drop)
}
