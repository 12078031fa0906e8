//! Starting commands for `reaper run`: signals, orphans to adopt, and the state that a child inherits.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, pthread_sigmask, raise, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, Pid, dup2_stdin, execv, fork, getppid, read, setsid, write};

use super::proc_file::Stat;

/// Signals that ask a process to exit.
pub const TERMINATION_SIGNALS: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Whether SIGPIPE was ignored when this program started. Rust's runtime ignores it before `main`.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

// SAFETY: the C library calls the entries of this section as functions before `main`; the entry is such a function.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_PIPE: extern "C" fn() = note_pipe;

/// Sets [`PIPE_IGNORED`]. Runs before `main`.
extern "C" fn note_pipe() {
    if is_ignored(Signal::SIGPIPE) {
        PIPE_IGNORED.store(true, Ordering::Relaxed);
    }
}

/// Signals that are blocked, so that they can be read from a descriptor. Dropping it discards pending ones and
/// restores the earlier state.
#[derive(Debug)]
pub struct BlockedSignals {
    /// Descriptor from which the signals are read.
    pub signals: SignalFd,
    /// Signal state for the commands that this process starts.
    pub inherited: InheritedSignals,
}

/// Signal mask and dispositions of this process before it changed them, for the commands that it starts.
#[derive(Clone, Copy, Debug)]
pub struct InheritedSignals {
    blocked: SigSet,
    pipe: SigHandler,
    child: SigHandler,
}

impl BlockedSignals {
    /// Blocks all signals, so that this process can pass them on to a command. Applies to this thread and all that it
    /// starts, until the value is dropped.
    ///
    /// That includes the signals of faults, such as SIGSEGV: another process may send them. A fault of this process
    /// still ends it, because the kernel then unblocks the signal (`force_sig_info_to_task` in kernel/signal.c).
    ///
    /// Also resets SIGCHLD to its default disposition.
    ///
    /// # Errors
    /// `EMFILE` and others.
    pub fn begin() -> nix::Result<BlockedSignals> {
        let held = SigSet::all();
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = SignalFd::with_flags(&held, flags)?;
        let pipe = match PIPE_IGNORED.load(Ordering::Relaxed) {
            true => SigHandler::SigIgn,
            false => SigHandler::SigDfl,
        };
        // SIGCHLD must not be ignored, because the kernel then reports no exit statuses of children.
        // SAFETY: no handler is installed.
        let child = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
        // Last, so that an error leaves no signal blocked.
        let mut blocked = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&held), Some(&mut blocked))?;
        let inherited = InheritedSignals {
            blocked,
            pipe,
            child,
        };
        Ok(BlockedSignals { signals, inherited })
    }

    /// Restores the earlier signal mask. Pending signals then act on this process. A drop alone discards them.
    pub fn release(self) {
        // Before the drop, which discards pending signals.
        let before = &self.inherited.blocked;
        let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(before), None);
    }

    /// Returns a pending signal of [`TERMINATION_SIGNALS`] that would have ended this process without this value.
    /// `None` if none exists. The signal stays pending.
    pub fn pending_termination(&self) -> Option<Signal> {
        let waiting = pending()?;
        let would_end = |signal: &Signal| {
            waiting.contains(*signal)
                && !self.inherited.blocked.contains(*signal)
                && !is_ignored(*signal)
        };
        TERMINATION_SIGNALS.into_iter().find(would_end)
    }
}

/// Returns the signals pending for this thread or process; `None` if the system call fails.
fn pending() -> Option<SigSet> {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: the call initializes the set if it succeeds.
    let result = unsafe { libc::sigpending(set.as_mut_ptr()) };
    // SAFETY: as above.
    (result == 0).then(|| unsafe { SigSet::from_sigset_t_unchecked(set.assume_init()) })
}

/// Returns whether a signal is blocked and pending for this thread or process.
pub fn is_pending(signal: Signal) -> bool {
    pending().is_some_and(|set| set.contains(signal))
}

/// Returns whether this process ignores a signal (`SIG_IGN`).
fn is_ignored(signal: Signal) -> bool {
    // SAFETY: the structure consists of integers and pointers, for which zero is valid.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call changes nothing and writes a structure of the right type.
    let result = unsafe { libc::sigaction(signal as i32, std::ptr::null(), &raw mut now) };
    result == 0 && now.sa_sigaction == libc::SIG_IGN
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // Pending signals were meant for the command, which has exited, and must not end this process instead.
        while let Ok(Some(_)) = self.signals.read_signal() {}
        let before = &self.inherited.blocked;
        // Neither call can fail: the mask and the signal are valid.
        // SAFETY: restores the earlier disposition.
        let _ = unsafe { signal(Signal::SIGCHLD, self.inherited.child) };
        let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(before), None);
    }
}

impl InheritedSignals {
    /// Makes the command start with the inherited signal mask and dispositions of SIGPIPE and SIGCHLD. A handler counts
    /// as the default disposition.
    pub fn restore_signals(self, command: &mut Command) {
        let child = match self.child {
            SigHandler::SigIgn => SigHandler::SigIgn,
            _ => SigHandler::SigDfl,
        };
        let restore = move || {
            // SAFETY: no handler of this program is installed.
            unsafe { signal(Signal::SIGPIPE, self.pipe) }?;
            // SAFETY: as above.
            unsafe { signal(Signal::SIGCHLD, child) }?;
            pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&self.blocked), None)?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes only system calls and allocates nothing.
        unsafe { command.pre_exec(restore) };
    }
}

/// Stops this process with `by`, a stop signal of the terminal such as SIGTSTP. Returns once it is continued. `by` is
/// blocked afterwards.
///
/// The kernel ignores such a signal in an orphaned process group, because no shell could continue it. The call then
/// returns at once.
///
/// Does nothing while a SIGCONT is pending for this process. A shell sends it to the whole process group, so it also
/// continues the child, and a stop signal would discard it (`prepare_signal` in kernel/signal.c).
///
/// # Errors
/// As `sigprocmask(2)`.
pub fn stop_self(by: Signal) -> nix::Result<()> {
    if is_pending(Signal::SIGCONT) {
        return Ok(());
    }
    let mut only = SigSet::empty();
    only.add(by);
    raise(by)?;
    pthread_sigmask(SigmaskHow::SIG_UNBLOCK, Some(&only), None)?;
    // Execution gets here once the process is continued.
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&only), None)
}

/// Makes this process adopt orphaned descendants (`PR_SET_CHILD_SUBREAPER`).
///
/// # Errors
/// None on Linux 3.4 and later.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// A change of state of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildChange {
    /// Exited with this status.
    Exited(u8),
    /// Killed by the signal with this number.
    Killed(i32),
    /// Stopped by the signal with this number.
    Stopped(i32),
}

/// Returns the pid of a child that has exited or stopped, and that change. Each change is returned once. `None` if
/// none exists now; does not wait. If the child has exited, this also removes the zombie.
///
/// # Errors
/// `ECHILD`: this process has no children.
pub fn next_change() -> nix::Result<Option<(u32, ChildChange)>> {
    // `__WALL` includes children from clone(2) without SIGCHLD.
    wait(
        libc::P_ALL,
        0,
        libc::WEXITED | libc::WSTOPPED | libc::__WALL,
    )
}

/// Returns the pid and a change of a child without waiting, or `None` if none exists now. `of`, `id` and `what` are
/// the arguments of waitid(2): which children, and which changes.
///
/// `nix` does not support signals without a name, such as real-time signals, that can kill a child.
fn wait(of: libc::idtype_t, id: u32, what: i32) -> nix::Result<Option<(u32, ChildChange)>> {
    // SAFETY: the structure consists of integers, for which zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: the call writes a structure of the right type.
        let result = unsafe { libc::waitid(of, id, &raw mut info, what | libc::WNOHANG) };
        match Errno::result(result) {
            Ok(_) => break,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    // SAFETY: waitid has filled in the fields for a child, or left the pid 0.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    let Ok(pid @ 1..) = u32::try_from(pid) else {
        return Ok(None);
    };
    let change = match info.si_code {
        libc::CLD_EXITED => ChildChange::Exited(status as u8),
        libc::CLD_STOPPED | libc::CLD_TRAPPED => ChildChange::Stopped(status),
        _ => ChildChange::Killed(status),
    };
    Ok(Some((pid, change)))
}

/// Makes the command append a line to a file before exec: its pid, its start time by the kernel, and the monotonic
/// time. If the line cannot be written, the command starts without it.
pub fn record_start(command: &mut Command, file: File) {
    let note = move || {
        let mut stat = [0; 1024];
        let mut line = [0; 160];
        if let Some(start) = own_start(&mut stat) {
            let room = line.len();
            let mut rest = &mut line[..];
            let (pid, at) = (std::process::id(), super::monotonic());
            let whole = writeln!(
                rest,
                "\n{{\"command\":{{\"pid\":{pid},\"start_ns\":{start},\"at\":{at}}}}}"
            );
            let length = room - rest.len();
            if whole.is_ok() {
                let _ = write(&file, &line[..length]);
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only system calls and allocates nothing.
    unsafe { command.pre_exec(note) };
}

/// Makes the kernel send SIGKILL to the command when the thread that starts it ends (`PR_SET_PDEATHSIG`). The setting
/// does not apply to descendants of the command.
pub fn kill_on_parent_death(command: &mut Command) {
    let parent = nix::unistd::getpid();
    let arm = move || Ok(die_with(parent, Signal::SIGKILL)?);
    // SAFETY: between fork and exec the closure makes only system calls and allocates nothing.
    unsafe { command.pre_exec(arm) };
}

/// Makes the kernel send this process a signal when its parent dies. Fails with `ESRCH` if the parent is not `parent`,
/// because it has died already.
fn die_with(parent: Pid, signal: Signal) -> nix::Result<()> {
    nix::sys::prctl::set_pdeathsig(signal)?;
    match getppid() == parent {
        true => Ok(()),
        false => Err(Errno::ESRCH),
    }
}

/// Offset above all error numbers of the kernel (`MAX_ERRNO` of include/linux/err.h).
const ENTERING: i32 = 4096;

/// Makes the command move itself to a cgroup before exec. `procs` is the `cgroup.procs` file of that cgroup. If that
/// fails, the command does not start, and [`not_entered`] recognises the error.
pub fn enter_cgroup(command: &mut Command, procs: File) {
    let enter = move || match write(&procs, b"0") {
        Ok(_) => Ok(()),
        // The parent gets only a number. The offset distinguishes this error from one of exec.
        Err(errno) => Err(io::Error::from_raw_os_error(ENTERING + errno as i32)),
    };
    // SAFETY: between fork and exec the closure makes only system calls and allocates nothing.
    unsafe { command.pre_exec(enter) };
}

/// Returns why a command could not enter its cgroup, or `None` if its start failed for another reason.
pub fn not_entered(error: &io::Error) -> Option<Errno> {
    let number = error.raw_os_error()?.checked_sub(ENTERING)?;
    (number >= 0).then(|| Errno::from_raw(number))
}

/// Returns the start time of this process in ns since boot, precise to the clock tick. `None` if it cannot be read.
///
/// Reads `/proc/self/stat` into `buffer`, which must be large enough for it, and allocates nothing.
pub fn own_start(buffer: &mut [u8]) -> Option<u64> {
    let stat = open(
        c"/proc/self/stat",
        OFlag::O_RDONLY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
    .ok()?;
    let length = read(&stat, buffer).ok()?;
    Some(Stat::parse(&buffer[..length])?.key(0).start)
}

/// Forks. The child gets a new session and /dev/null as standard input. Returns the child's pid in this process, and
/// `None` in the child. The program must not have other threads yet.
///
/// # Errors
/// As `fork(2)`; in the child also as `setsid(2)`, `open(2)` and `dup2(2)`.
pub fn fork_new_session() -> nix::Result<Option<Pid>> {
    // SAFETY: the caller ensures that the program has no other threads yet.
    if let ForkResult::Parent { child } = unsafe { fork() }? {
        return Ok(Some(child));
    }
    setsid()?;
    let null = open(
        c"/dev/null",
        OFlag::O_RDWR | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    dup2_stdin(null.as_fd())?;
    Ok(None)
}

/// Returns whether this process has children, including exited ones that have not been waited for.
///
/// # Errors
/// None that `waitid(2)` documents for this call.
pub fn has_children() -> nix::Result<bool> {
    match wait(libc::P_ALL, 0, libc::WEXITED | libc::WNOWAIT | libc::__WALL) {
        Ok(_) => Ok(true),
        Err(Errno::ECHILD) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Forks. The child gets SIGTERM when this process dies (`PR_SET_PDEATHSIG`). Returns the child's pid in this process,
/// and `None` in the child. The program must not have other threads yet.
///
/// # Errors
/// As `fork(2)`; in the child `ESRCH` if this process has died already.
pub fn fork_dependent() -> nix::Result<Option<Pid>> {
    let parent = nix::unistd::getpid();
    // SAFETY: the caller ensures that the program has no other threads yet.
    if let ForkResult::Parent { child } = unsafe { fork() }? {
        return Ok(Some(child));
    }
    die_with(parent, Signal::SIGTERM).map(|()| None)
}

/// Returns a change of one child: that it has exited or stopped. Each change is returned once. `None` if none exists
/// now; does not wait. If the child has exited, this also removes the zombie.
///
/// # Errors
/// `ECHILD`: it is not a child of this process.
pub fn change_of(child: Pid) -> nix::Result<Option<ChildChange>> {
    let pid = child.as_raw().cast_unsigned();
    let change = wait(libc::P_PID, pid, libc::WEXITED | libc::WSTOPPED)?;
    Ok(change.map(|(_, change)| change))
}

/// Executes this program again in this process, with the arguments `words`, the first of which is the program's name.
/// `file`, if given, stays open. SIGPIPE gets its disposition from the start of this program.
///
/// Returns only if that fails, for example because the program's file was removed. Nothing has changed then.
pub fn reexec(words: &[OsString], file: Option<BorrowedFd<'_>>) -> io::Error {
    let execute = || -> io::Result<()> {
        let program = CString::new(std::env::current_exe()?.into_os_string().into_vec())?;
        let words = words.iter().map(|word| CString::new(word.as_bytes()));
        let words: Vec<CString> = words.collect::<Result<_, _>>()?;
        if let Some(file) = file {
            fcntl(file, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        if !PIPE_IGNORED.load(Ordering::Relaxed) {
            // SAFETY: no handler is installed.
            unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
        }
        execv(&program, &words)?;
        Ok(())
    };
    let error = execute().err();
    if let Some(file) = file {
        // Readers of a pipe see its end only once all processes that have it open are gone.
        let _ = fcntl(file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }
    // SAFETY: as above. Rust's runtime sets this disposition.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    error.unwrap_or_else(|| io::Error::other("execv returned without an error"))
}

/// Takes over a pipe that [`reexec`] left open, by its descriptor, which is then closed by the next exec. Returns
/// `None` for standard streams and closed descriptors.
pub fn take_inherited_pipe(number: i32) -> Option<PipeWriter> {
    if number <= 2 {
        return None;
    }
    // SAFETY: only used for a query, which fails if the descriptor is not open.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).ok()?;
    // SAFETY: the process that started this program left the descriptor open for this purpose only.
    Some(unsafe { OwnedFd::from_raw_fd(number) }.into())
}

/// Redirects standard output and standard error of this process to a file.
///
/// # Errors
/// As `dup2(2)`.
pub fn write_to(file: BorrowedFd<'_>) -> nix::Result<()> {
    nix::unistd::dup2_stdout(file)?;
    nix::unistd::dup2_stderr(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signal that was blocked before does not count as a request to exit.
    #[test]
    fn pending_termination_signal_is_reported_and_stays_pending() {
        for signal_to_restore in [Signal::SIGINT, Signal::SIGQUIT] {
            // A shell's background job and `nohup` start with these ignored.
            // SAFETY: no handler is installed.
            unsafe { signal(signal_to_restore, SigHandler::SigDfl) }.unwrap();
        }
        let held = BlockedSignals::begin().unwrap();
        assert_eq!(held.pending_termination(), None);
        raise(Signal::SIGWINCH).unwrap();
        assert_eq!(held.pending_termination(), None);
        raise(Signal::SIGINT).unwrap();
        assert_eq!(held.pending_termination(), Some(Signal::SIGINT));
        let inner = BlockedSignals::begin().unwrap();
        assert_eq!(inner.pending_termination(), None);
        drop(inner);
        raise(Signal::SIGQUIT).unwrap();
        assert_eq!(held.pending_termination(), Some(Signal::SIGQUIT));
        drop(held);
        assert_eq!(BlockedSignals::begin().unwrap().pending_termination(), None);
    }

    #[test]
    fn process_with_a_pending_sigcont_does_not_stop() {
        let held = BlockedSignals::begin().unwrap();
        raise(Signal::SIGCONT).unwrap();
        stop_self(Signal::SIGTSTP).unwrap();
        assert!(is_pending(Signal::SIGCONT));
        drop(held);
    }

    #[test]
    fn own_start_is_read_from_proc() {
        let mut buffer = [0; 1024];
        assert!(own_start(&mut buffer).is_some_and(|start| start > 0));
    }
}
