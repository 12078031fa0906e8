//! Functions that std and nix have no safe call for: children that share memory, and signal handlers.

use std::ffi::{c_int, c_void};
use std::io::{PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::Pid;

/// Stack size of a child, in bytes.
pub const STACK: usize = 8192;

/// Creates a child that exits at once, and returns after its exit, as `vfork` and `_exit` do.
///
/// # Errors
/// As `clone(2)`.
pub fn vfork_exit(stack: &mut [u8; STACK]) -> nix::Result<Pid> {
    extern "C" fn exit(_: *mut c_void) -> c_int {
        0
    }
    // SAFETY: CLONE_VFORK suspends this thread until the child is gone. The child borrows only the stack.
    unsafe { clone(stack, libc::CLONE_VFORK, exit, std::ptr::null_mut()) }
}

/// Creates a child that exits at once and leaves a [`sleeper`] behind.
///
/// # Errors
/// As `clone(2)`.
pub fn spawn_orphan(
    stack: &mut [u8; STACK],
    orphans: &'static mut [u8; STACK],
) -> nix::Result<Pid> {
    extern "C" fn exit_and_leave_sleeper(orphans: *mut c_void) -> c_int {
        // SAFETY: `argument` is the `'static` stack that is passed below, and nothing else uses it.
        let stack = unsafe { &mut *orphans.cast::<[u8; STACK]>() };
        c_int::from(sleeper(stack).is_err())
    }
    let orphans = std::ptr::from_mut(orphans).cast();
    // SAFETY: as in `vfork_exit`; the orphan has its own `'static` stack.
    unsafe { clone(stack, libc::CLONE_VFORK, exit_and_leave_sleeper, orphans) }
}

/// Creates a child that exits when the other end of its standard input is closed.
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
    // SAFETY: the child owns its `'static` stack and writes nothing else but errno. This single-threaded program does
    // not read errno after a successful call.
    unsafe { clone(stack, 0, sleep, std::ptr::null_mut()) }
}

/// Creates a child that runs `main` on `stack`.
///
/// # Safety
/// The child shares all memory with its parent: it must not outlive its stack or touch memory that the parent uses.
/// `argument` must be valid for `main`.
unsafe fn clone(
    stack: &mut [u8; STACK],
    flags: c_int,
    main: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> nix::Result<Pid> {
    let top = stack.as_mut_ptr_range().end;
    let top = top.wrapping_sub(top.addr() % 16).cast();
    let flags = flags | libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: `top` is the aligned end of the child's stack. The caller guarantees the rest.
    let pid = unsafe { libc::clone(main, top, flags, argument) };
    nix::Error::result(pid).map(Pid::from_raw)
}

/// Makes a command get SIGTERM when this thread exits.
pub fn end_with_us(command: &mut Command) {
    // SAFETY: the closure makes only a system call between fork and exec.
    unsafe { command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?)) };
}

/// Pipe to write to on a termination signal.
static END: OnceLock<PipeWriter> = OnceLock::new();

/// Makes SIGINT, SIGTERM and SIGHUP write a byte to a pipe instead of ending this process. Only the first call has an
/// effect.
///
/// # Errors
/// As `sigaction(2)`.
pub fn write_on_termination(pipe: PipeWriter) -> nix::Result<()> {
    extern "C" fn on_signal(_: c_int) {
        // Async-signal-safe: `OnceLock::get` is an atomic load, and writing a byte a system call.
        if let Some(mut pipe) = END.get() {
            let _ = pipe.write(&[0]);
        }
    }
    let _ = END.set(pipe);
    let handler = SigHandler::Handler(on_signal);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler is async-signal-safe.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}
