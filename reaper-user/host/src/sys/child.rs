//! Starting a command and standing in for it: signals, terminal, and whoever is left to this process to wait for.

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

/// Those that a process has by its own doing, and that must not wait.
const FAULTS: [Signal; 6] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGFPE,
    Signal::SIGILL,
    Signal::SIGTRAP,
    Signal::SIGSYS,
];

/// Those by which somebody asks for an end.
pub const TERMINATION_SIGNALS: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Whether SIGPIPE was ignored when this program began. Rust's runtime sets that before `main`.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

// SAFETY: the C library calls what is listed in this section as plain functions before `main`, and the entry is one.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_PIPE: extern "C" fn() = note_pipe;

extern "C" fn note_pipe() {
    if is_ignored(Signal::SIGPIPE) {
        PIPE_IGNORED.store(true, Ordering::Relaxed);
    }
}

/// Signals that wait until they are asked for.
#[derive(Debug)]
pub struct BlockedSignals {
    pub signals: SignalFd,
    pub inherited: InheritedSignals,
}

/// What a command is to find as this process has found it.
#[derive(Clone, Copy, Debug)]
pub struct InheritedSignals {
    blocked: SigSet,
    pipe: SigHandler,
    child: SigHandler,
}

impl BlockedSignals {
    /// Has all signals wait from now on that a command could be meant by, and those that tell of children: in this
    /// thread, and in all that it starts, until this is dropped.
    ///
    /// # Errors
    /// `EMFILE` and the like.
    pub fn begin() -> nix::Result<BlockedSignals> {
        let mut held = SigSet::all();
        for fault in FAULTS {
            held.remove(fault);
        }
        let mut blocked = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&held), Some(&mut blocked))?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = SignalFd::with_flags(&held, flags)?;
        let pipe = match PIPE_IGNORED.load(Ordering::Relaxed) {
            true => SigHandler::SigIgn,
            false => SigHandler::SigDfl,
        };
        // Where SIGCHLD is ignored nobody is told how a child has ended.
        // SAFETY: no handler is set.
        let child = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
        let inherited = InheritedSignals {
            blocked,
            pipe,
            child,
        };
        Ok(BlockedSignals { signals, inherited })
    }

    /// Ends the hold. Signals that have come meanwhile act on this process.
    pub fn release(self) {
        // Before the drop, which discards those that are still held.
        let before = &self.inherited.blocked;
        let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(before), None);
    }

    /// A signal that waits and would have ended this process, had it not been made to wait. It is left where it is.
    pub fn pending_termination(&self) -> Option<Signal> {
        let waiting = pending()?;
        let asks = |signal: &Signal| {
            waiting.contains(*signal)
                && !self.inherited.blocked.contains(*signal)
                && !is_ignored(*signal)
        };
        TERMINATION_SIGNALS.into_iter().find(asks)
    }
}

/// Signals that wait for this thread or process.
fn pending() -> Option<SigSet> {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: the set is written to, and is one if that is said.
    let told = unsafe { libc::sigpending(set.as_mut_ptr()) };
    // SAFETY: the same.
    (told == 0).then(|| unsafe { SigSet::from_sigset_t_unchecked(set.assume_init()) })
}

/// Returns whether this process was sent a signal that it blocks, and has not read it.
pub fn is_pending(signal: Signal) -> bool {
    pending().is_some_and(|set| set.contains(signal))
}

fn is_ignored(signal: Signal) -> bool {
    // SAFETY: the structure is one of integers and pointers, for which zero is a value.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed, and the structure is as long as is meant.
    let asked = unsafe { libc::sigaction(signal as i32, std::ptr::null(), &raw mut now) };
    asked == 0 && now.sa_sigaction == libc::SIG_IGN
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // Those that were for the command have come too late, and must not end this process in its place.
        while let Ok(Some(_)) = self.signals.read_signal() {}
        let before = &self.inherited.blocked;
        // They fail for no mask, and not for this signal.
        // SAFETY: what was set before this began is set again.
        let _ = unsafe { signal(Signal::SIGCHLD, self.inherited.child) };
        let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(before), None);
    }
}

impl InheritedSignals {
    /// Has the command begin with the mask of signals, and with SIGPIPE and SIGCHLD, as they were.
    pub fn restore_signals(self, command: &mut Command) {
        let child = match self.child {
            SigHandler::SigIgn => SigHandler::SigIgn,
            _ => SigHandler::SigDfl,
        };
        let hand_on = move || {
            // SAFETY: no handler of this program's is set.
            unsafe { signal(Signal::SIGPIPE, self.pipe) }?;
            // SAFETY: the same.
            unsafe { signal(Signal::SIGCHLD, child) }?;
            pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&self.blocked), None)?;
            Ok(())
        };
        // SAFETY: between fork and exec nothing but system calls is made, and nothing is allocated.
        unsafe { command.pre_exec(hand_on) };
    }
}

/// Stops this process with a signal of the terminal. The kernel ignores that in an orphaned process group, which no shell
/// could continue.
///
/// Does nothing while a SIGCONT is pending for this process. A shell sends it to the whole process group, so it continues
/// the child too, and a stop signal would discard it (`prepare_signal` in kernel/signal.c).
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
    // It has been stopped, and goes on.
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&only), None)
}

/// Has this process adopt whatever its descendants leave without a parent (`PR_SET_CHILD_SUBREAPER`).
///
/// # Errors
/// None on Linux 3.4 and later.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// What has become of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildChange {
    /// It has exited with this status.
    Exited(u8),
    /// A signal of this number has ended it.
    Killed(i32),
    /// A signal of this number has stopped it.
    Stopped(i32),
}

/// A child of which something has become that nobody was told of, `None` if there is none: one that has exited is
/// waited for by that.
///
/// # Errors
/// `ECHILD`: this process has no children.
pub fn next_change() -> nix::Result<Option<(u32, ChildChange)>> {
    // Threads of others do not count, children by clone(2) that tell nobody do.
    wait(
        libc::P_ALL,
        0,
        libc::WEXITED | libc::WSTOPPED | libc::__WALL,
    )
}

/// Returns a change of a child that is there to be waited for, if there is one (waitid(2)). `nix` knows no signals
/// without a name, such as real-time signals, by which a child may have ended.
fn wait(of: libc::idtype_t, id: u32, what: i32) -> nix::Result<Option<(u32, ChildChange)>> {
    // SAFETY: the structure is one of integers, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: the structure is written to, and is what is meant.
        let told = unsafe { libc::waitid(of, id, &raw mut info, what | libc::WNOHANG) };
        match Errno::result(told) {
            Ok(_) => break,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    // SAFETY: waitid has filled in the fields of a child, or left the pid 0.
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

/// Has the command append a line to a file before it becomes the program: who it is, when it began by the kernel's word, and the
/// time on the monotonic clock. Where that cannot be written it begins all the same.
pub fn note_start(command: &mut Command, file: File) {
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
    // SAFETY: between fork and exec nothing but system calls is made, and nothing is allocated.
    unsafe { command.pre_exec(note) };
}

/// Has the kernel kill the command when this thread ends, by SIGKILL too; who that starts is not meant (`PR_SET_PDEATHSIG`).
pub fn kill_on_parent_death(command: &mut Command) {
    let parent = nix::unistd::getpid();
    let arm = move || Ok(die_with(parent, Signal::SIGKILL)?);
    // SAFETY: between fork and exec nothing but system calls is made, and nothing is allocated.
    unsafe { command.pre_exec(arm) };
}

/// Has the kernel send this process a signal when its parent dies. Fails if that has died already.
fn die_with(parent: Pid, signal: Signal) -> nix::Result<()> {
    nix::sys::prctl::set_pdeathsig(signal)?;
    match getppid() == parent {
        true => Ok(()),
        false => Err(Errno::ESRCH),
    }
}

/// Beyond all numbers of errors that the kernel has (`MAX_ERRNO` of include/linux/err.h).
const ENTERING: i32 = 4096;

/// Has the command go to a cgroup before it becomes the program, or starts anything: `procs` is that one's `cgroup.procs`.
pub fn enter_cgroup(command: &mut Command, procs: File) {
    let enter = move || match write(&procs, b"0") {
        Ok(_) => Ok(()),
        // What comes back has to be told from why there is no such program, of which there is but a number too.
        Err(errno) => Err(io::Error::from_raw_os_error(ENTERING + errno as i32)),
    };
    // SAFETY: between fork and exec nothing but system calls is made, and nothing is allocated.
    unsafe { command.pre_exec(enter) };
}

/// Why a command that could not be started could not enter its cgroup; `None` where something else was the matter.
pub fn not_entered(error: &io::Error) -> Option<Errno> {
    let number = error.raw_os_error()?.checked_sub(ENTERING)?;
    (number >= 0).then(|| Errno::from_raw(number))
}

/// When this process began, in ns since boot, by a file of a few hundred bytes that is read into `buffer`. Allocates nothing.
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

/// Goes on in a child that has a session of its own, and nothing to read; in this process gives its pid.
///
/// # Errors
/// As `fork(2)`.
pub fn fork_new_session() -> nix::Result<Option<Pid>> {
    // SAFETY: this program has no other threads yet, as the caller has to see to.
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

/// Returns whether this process has children, exited ones included.
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

/// Forks. The child gets SIGTERM when this process dies (`PR_SET_PDEATHSIG`). Returns the child's process id in this
/// process, and `None` in the child.
///
/// # Errors
/// As `fork(2)`; in the child `ESRCH` if this process has died already.
pub fn fork_dependent() -> nix::Result<Option<Pid>> {
    let parent = nix::unistd::getpid();
    // SAFETY: this program has no other threads yet, as the caller has to see to.
    if let ForkResult::Parent { child } = unsafe { fork() }? {
        return Ok(Some(child));
    }
    die_with(parent, Signal::SIGTERM).map(|()| None)
}

/// Returns what has become of one child since the last call, if anything has.
///
/// # Errors
/// `ECHILD`: it is no child of this process.
pub fn change_of(child: Pid) -> nix::Result<Option<ChildChange>> {
    let pid = child.as_raw().cast_unsigned();
    let change = wait(libc::P_PID, pid, libc::WEXITED | libc::WSTOPPED)?;
    Ok(change.map(|(_, change)| change))
}

/// Becomes this program anew, as it was begun, but with these words; that has this file open too.
///
/// # Errors
/// It has another name by now, or none. Nothing has changed then.
pub fn reexec(words: &[OsString], file: Option<BorrowedFd<'_>>) -> io::Error {
    let begin = || -> io::Result<()> {
        let program = CString::new(std::env::current_exe()?.into_os_string().into_vec())?;
        let words = words.iter().map(|word| CString::new(word.as_bytes()));
        let words: Vec<CString> = words.collect::<Result<_, _>>()?;
        if let Some(file) = file {
            fcntl(file, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        if !PIPE_IGNORED.load(Ordering::Relaxed) {
            // SAFETY: no handler is set.
            unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
        }
        execv(&program, &words)?;
        Ok(())
    };
    let error = begin().err();
    if let Some(file) = file {
        // Whoever reads from it waits until all who have it are gone.
        let _ = fcntl(file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }
    // SAFETY: as above. As Rust's runtime has it.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    error.unwrap_or_else(|| io::Error::other("it was begun anew"))
}

/// Takes over a pipe by the number that [`reexec`] has left it open by; `None` where there is none. No standard stream is one.
pub fn take_inherited_pipe(number: i32) -> Option<PipeWriter> {
    if number <= 2 {
        return None;
    }
    // SAFETY: it is only asked about; what is no descriptor is an error.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).ok()?;
    // SAFETY: whoever began this program left it for this alone, and nobody else has taken it over.
    Some(unsafe { OwnedFd::from_raw_fd(number) }.into())
}

/// Has what this process writes go to a file from now on.
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

    /// One that was blocked before is nobody's wish for an end.
    #[test]
    fn what_would_have_ended_this_process_is_seen_and_not_taken() {
        for signal_to_restore in [Signal::SIGINT, Signal::SIGQUIT] {
            // A shell's background job and `nohup` start with these ignored.
            // SAFETY: no handler is set.
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
