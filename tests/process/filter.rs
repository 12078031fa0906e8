//! Denies system calls to a program by seccomp, as old container runtimes deny those that they do not know.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::libc;

use super::context::ProcessContext;

/// Offset in `seccomp_data` of the low half of the first argument.
const FIRST_ARGUMENT: u32 = 16;

/// `without-pidfds ERRNO PROGRAM ARG…`: executes the program, for which pidfd_open(2) fails with this error.
pub fn without_pidfds(s: &ProcessContext) -> ! {
    execute_filtered(s, None)
}

/// `without-pidfds-of-others ERRNO PROGRAM ARG…`: does the same, but the program can open a pidfd of itself.
pub fn without_pidfds_of_others(s: &ProcessContext) -> ! {
    execute_filtered(s, Some(std::process::id()))
}

fn execute_filtered(s: &ProcessContext, allowed: Option<u32>) -> ! {
    let errno: u16 = s.args[0].parse().expect("an errno");
    deny(libc::SYS_pidfd_open, errno, allowed).expect("install a seccomp filter");
    let error = Command::new(&s.args[1]).args(&s.args[2..]).exec();
    panic!("{}: {error}", s.args[1]);
}

/// Makes a system call fail for this thread and the programs that it executes, unless its first argument is `allowed`.
fn deny(call: libc::c_long, errno: u16, allowed: Option<u32>) -> nix::Result<()> {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let failure = libc::SECCOMP_RET_ERRNO | u32::from(errno);
    let steps = &mut [
        // `seccomp_data` begins with the number of the call.
        instruction(load, 0, 0, 0),
        instruction(equal, 0, 3, call as u32),
        instruction(load, 0, 0, FIRST_ARGUMENT),
        // No pid is this large.
        instruction(equal, 1, 0, allowed.unwrap_or(u32::MAX)),
        instruction(answer, 0, 0, failure),
        instruction(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    install(steps, 0).map(drop)
}

/// Returns an instruction of a BPF filter. `jt` and `jf` are the numbers of instructions to skip if a comparison is true or
/// false.
pub fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

/// Installs a seccomp filter for this thread and the programs that it executes. Returns the result of seccomp(2).
pub fn install(steps: &mut [libc::sock_filter], flags: libc::c_ulong) -> nix::Result<i32> {
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    nix::sys::prctl::set_no_new_privs()?;
    let install = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the program and its instructions outlive the call, which copies them.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, install, flags, &raw const program) };
    Errno::result(set).map(|set| set as i32)
}
