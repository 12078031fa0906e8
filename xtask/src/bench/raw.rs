//! What std and nix have no safe call for: children without a copy of memory, and being told of Ctrl-C.

use std::ffi::{c_int, c_void};
use std::io::{PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::Pid;

/// Bytes of stack that a child from here needs, with room to spare.
pub const STACK: usize = 8192;

/// A child that exits at once; returns when it has, as after `vfork` and `_exit`.
///
/// # Errors
/// As `clone(2)`.
pub fn vfork_exit(stack: &mut [u8; STACK]) -> nix::Result<Pid> {
    extern "C" fn exit(_: *mut c_void) -> c_int {
        0
    }
    // SAFETY: CLONE_VFORK holds this thread up until the child is gone, which borrows the stack alone.
    unsafe { clone(stack, libc::CLONE_VFORK, exit, std::ptr::null_mut()) }
}

/// A child that exits at once and leaves a [`sleeper`] behind.
///
/// # Errors
/// As `clone(2)`.
pub fn spawn_orphan(
    stack: &mut [u8; STACK],
    orphans: &'static mut [u8; STACK],
) -> nix::Result<Pid> {
    extern "C" fn beget(orphans: *mut c_void) -> c_int {
        // SAFETY: the stack that was handed over below, for good.
        let stack = unsafe { &mut *orphans.cast::<[u8; STACK]>() };
        c_int::from(sleeper(stack).is_err())
    }
    let orphans = std::ptr::from_mut(orphans).cast();
    // SAFETY: as in `vfork_exit`; the orphan has its own stack.
    unsafe { clone(stack, libc::CLONE_VFORK, beget, orphans) }
}

/// A child that sleeps until the other end of its standard input is closed, and then exits.
///
/// # Errors
/// As `clone(2)`.
pub fn sleeper(stack: &'static mut [u8; STACK]) -> nix::Result<Pid> {
    extern "C" fn sleep(_: *mut c_void) -> c_int {
        let mut input = libc::pollfd {
            fd: 0,
            events: 0,
            revents: 0,
        };
        // SAFETY: one element, on the child's own stack.
        while unsafe { libc::poll(&raw mut input, 1, -1) } < 0 {}
        0
    }
    // SAFETY: the child has its stack for good, and touches nothing else but errno, which is not read
    // in this single-threaded program after a call that succeeded.
    unsafe { clone(stack, 0, sleep, std::ptr::null_mut()) }
}

/// # Safety
/// The child shares all memory with its parent: it must not outlive its stack or touch what the parent
/// uses. `argument` is what `main` takes.
unsafe fn clone(
    stack: &mut [u8; STACK],
    flags: c_int,
    main: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> nix::Result<Pid> {
    let top = stack.as_mut_ptr_range().end;
    let top = top.wrapping_sub(top.addr() % 16).cast();
    let flags = flags | libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: `top` is the aligned end of a stack that is the child's; what it does, the caller has promised.
    let pid = unsafe { libc::clone(main, top, flags, argument) };
    nix::Error::result(pid).map(Pid::from_raw)
}

/// Has a command end when this thread does.
pub fn end_with_us(command: &mut Command) {
    // SAFETY: one system call, which is safe between fork and exec.
    unsafe { command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?)) };
}

/// Where to write when this process is to end.
static END: OnceLock<PipeWriter> = OnceLock::new();

/// Has a byte written to a pipe when this process is asked to end, instead of ending it. Only the first
/// call counts.
///
/// # Errors
/// As `sigaction(2)`.
pub fn write_on_termination(pipe: PipeWriter) -> nix::Result<()> {
    extern "C" fn tell(_: c_int) {
        // `OnceLock::get` is one atomic load, and writing a byte one system call: a handler may.
        if let Some(mut pipe) = END.get() {
            let _ = pipe.write(&[0]);
        }
    }
    let _ = END.set(pipe);
    let handler = SigHandler::Handler(tell);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler does only what a handler may.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}
