//! Measures how long a command has written no output, for `--idle`.
//!
//! Writes to a terminal are watched with inotify. All other output goes through a pipe, which this process copies on.

mod terminal;

use std::fs::File;
use std::io::{self, IsTerminal, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::fstat;

use super::RunError;
use reaper_host::advice::Advised as _;
use reaper_host::sys;
use terminal::Terminal;

/// Time limit without progress for the rest of the output, after the last process of the tree has exited.
const REST_MAX: Duration = Duration::from_secs(1);

/// Monitor of a command's stdout and stderr.
pub(super) struct OutputMonitor {
    activity: Arc<OutputActivity>,
    terminals: Vec<Terminal>,
    /// Channel that is disconnected when all copying threads have exited.
    copying: Receiver<()>,
}

/// Activity that the threads of the monitor record.
struct OutputActivity {
    /// Time of the last output through a pipe (`CLOCK_MONOTONIC`, ns).
    pipe_ns: AtomicU64,
    /// Time of the last write to a terminal (`CLOCK_MONOTONIC`, ns).
    terminal_ns: AtomicU64,
    /// Number of threads that have read output and are writing it.
    writing: AtomicUsize,
}

impl OutputMonitor {
    /// Redirects stdout and stderr of a command to pipes, which threads copy to those of this process.
    ///
    /// An output of this process that is a terminal is watched instead; the command keeps what it has. If stdout and
    /// stderr of this process are the same file they share one pipe, which keeps their order.
    pub(super) fn begin(command: &mut Command) -> Result<OutputMonitor, RunError> {
        let failed = |source| RunError::System {
            what: "cannot watch the output of the command for --idle, so the command was not started",
            source,
        };
        let now = sys::monotonic();
        let (done, copying) = channel();
        let mut monitor = OutputMonitor {
            activity: Arc::new(OutputActivity {
                pipe_ns: AtomicU64::new(now),
                terminal_ns: AtomicU64::new(now),
                writing: AtomicUsize::new(0),
            }),
            terminals: Vec::new(),
            copying,
        };
        let out = monitor.pipe(io::stdout(), &done).map_err(failed)?;
        let err = match (&out, is_same_file(&io::stdout(), &io::stderr())) {
            (Some(out), true) => out.try_clone().map(Some),
            // Both are the same terminal.
            (None, true) => Ok(None),
            (_, false) => monitor.pipe(io::stderr(), &done),
        };
        if let Some(err) = err.map_err(failed)? {
            command.stderr(err);
        }
        if let Some(out) = out {
            command.stdout(out);
        }
        Ok(monitor)
    }

    /// Closes this process's write ends of the pipes, after the command has started.
    pub(super) fn close_pipes(command: &mut Command) {
        command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
    }

    /// Returns a pipe in place of the output `to`, and starts a thread that copies from it to `to`. For a terminal, returns
    /// `None`: the command writes to it directly, and the monitor watches the terminal.
    ///
    /// The thread drops its clone of `done` when it finishes.
    fn pipe(
        &mut self,
        to: impl AsFd + IsTerminal,
        done: &Sender<()>,
    ) -> io::Result<Option<io::PipeWriter>> {
        let terminal = to.is_terminal();
        let to = File::from(to.as_fd().try_clone_to_owned()?);
        if terminal {
            self.terminals.push(Terminal::begin(to, &self.activity)?);
            return Ok(None);
        }
        let (from, pipe) = io::pipe()?;
        let (activity, done) = (self.activity.clone(), done.clone());
        let copying = move || copy(from, to, &activity, done);
        thread::Builder::new()
            .name("output".to_owned())
            .spawn(copying)?;
        Ok(Some(pipe))
    }

    /// Returns the time since the last output.
    pub(super) fn idle_for(&self) -> Duration {
        let now = sys::monotonic();
        let load = |time: &AtomicU64| time.load(Ordering::Relaxed);
        let last = load(&self.activity.pipe_ns).max(load(&self.activity.terminal_ns));
        let idle = Duration::from_nanos(now.saturating_sub(last));
        self.terminals
            .iter()
            .filter_map(Terminal::unwatched_idle)
            .fold(idle, Duration::min)
    }

    /// Waits until all output has been copied.
    ///
    /// A slow reader may take its time, until `give_up` returns true; it is called once per [`REST_MAX`]. Returns
    /// earlier if a process outside of the tree holds a pipe open and writes nothing for [`REST_MAX`].
    pub(super) fn finish(self, give_up: impl Fn() -> bool) {
        loop {
            let before = self.activity.pipe_ns.load(Ordering::Relaxed);
            match self.copying.recv_timeout(REST_MAX) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let is_active = self.activity.pipe_ns.load(Ordering::Relaxed) != before
                        || self.activity.writing.load(Ordering::Relaxed) > 0;
                    if !is_active || give_up() {
                        return;
                    }
                }
            }
        }
    }
}

/// Copies a pipe until its end or a failed write, and records the activity. The dropped sender reports that the thread
/// has finished.
fn copy(mut from: PipeReader, mut to: File, activity: &OutputActivity, _done: Sender<()>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                activity.writing.fetch_add(1, Ordering::Relaxed);
                activity.pipe_ns.store(sys::monotonic(), Ordering::Relaxed);
                let written = write_all(&mut to, &buffer[..n]);
                activity.writing.fetch_sub(1, Ordering::Relaxed);
                // Closes the pipe if the reader has gone: the command then gets SIGPIPE, as it would without the pipe.
                match written {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
                    Err(error) => {
                        tracing::error!(
                            "cannot pass on the output of the command: {}; it is lost, and the command gets SIGPIPE if it writes more",
                            error.advised_or("check the file or device that it is redirected to")
                        );
                        return;
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Writes all bytes. Waits on `EAGAIN`, because another process may have set `O_NONBLOCK` on the shared file
/// description.
fn write_all(to: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(to.as_fd(), PollFlags::POLLOUT)];
                poll(&mut fds, PollTimeout::NONE)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_same_file(one: &impl AsFd, other: &impl AsFd) -> bool {
    let device_and_inode = |fd: BorrowedFd<'_>| {
        let stat = fstat(fd).ok()?;
        Some((stat.st_dev, stat.st_ino))
    };
    device_and_inode(one.as_fd()).is_some_and(|one| Some(one) == device_and_inode(other.as_fd()))
}
