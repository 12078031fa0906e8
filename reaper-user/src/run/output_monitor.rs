//! For how long a command has said nothing.
//!
//! When it writes to a terminal the kernel tells; everything else goes through a pipe of this process's.

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
use reaper_host::sys;
use terminal::Terminal;

/// How long what is still in a pipe is waited for when nobody of the tree is left to write to it.
const REST: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct OutputMonitor {
    passed: Arc<OutputActivity>,
    terminals: Vec<Terminal>,
    /// Ends when all pipes have.
    piped: Receiver<()>,
}

/// What is noted of what is written.
struct OutputActivity {
    /// When something came through a pipe last, in ns on the monotonic clock.
    piped: AtomicU64,
    /// When a terminal was written to last.
    shown: AtomicU64,
    /// How many have something in hand that is still to be written.
    writing: AtomicUsize,
}

impl OutputMonitor {
    /// Has the command that is to be started write to a pipe wherever it would not write to a terminal; to one alone
    /// where both would go to the same file, so that they stay in order.
    pub(super) fn begin(command: &mut Command) -> Result<OutputMonitor, RunError> {
        let cannot = |source| RunError::System {
            what: "its output cannot be passed on",
            source,
        };
        let now = sys::monotonic();
        let (done, piped) = channel();
        let mut silence = OutputMonitor {
            passed: Arc::new(OutputActivity {
                piped: AtomicU64::new(now),
                shown: AtomicU64::new(now),
                writing: AtomicUsize::new(0),
            }),
            terminals: Vec::new(),
            piped,
        };
        let out = silence.pipe(io::stdout(), &done).map_err(cannot)?;
        let err = match (&out, same(&io::stdout(), &io::stderr())) {
            (Some(out), true) => out.try_clone().map(Some),
            // One terminal.
            (None, true) => Ok(None),
            (_, false) => silence.pipe(io::stderr(), &done),
        };
        if let Some(err) = err.map_err(cannot)? {
            command.stderr(err);
        }
        if let Some(out) = out {
            command.stdout(out);
        }
        Ok(silence)
    }

    /// Once the command has them, this process holds no pipe open.
    pub(super) fn let_go(command: &mut Command) {
        command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
    }

    /// What is to be written to in place of an output, unless that is a terminal.
    fn pipe(
        &mut self,
        to: impl AsFd + IsTerminal,
        done: &Sender<()>,
    ) -> io::Result<Option<io::PipeWriter>> {
        let terminal = to.is_terminal();
        let to = File::from(to.as_fd().try_clone_to_owned()?);
        if terminal {
            self.terminals.push(Terminal::begin(to, &self.passed)?);
            return Ok(None);
        }
        let (from, pipe) = io::pipe()?;
        let (passed, done) = (self.passed.clone(), done.clone());
        let copying = move || copy_on(from, to, &passed, done);
        thread::Builder::new()
            .name("output".to_owned())
            .spawn(copying)?;
        Ok(Some(pipe))
    }

    /// Returns how long nothing has been written.
    pub(super) fn idle_for(&self) -> Duration {
        let now = sys::monotonic();
        let last = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let last = last(&self.passed.piped).max(last(&self.passed.shown));
        let told = now.saturating_sub(last);
        self.terminals
            .iter()
            .filter_map(Terminal::written)
            .fold(Duration::from_nanos(told), Duration::min)
    }

    /// Waits until all that was written has been passed on, or somebody outside of the tree holds a pipe open. Whoever
    /// reads it may take their time, up to where it is given up.
    pub(super) fn finish(self, give_up: impl Fn() -> bool) {
        loop {
            let before = self.passed.piped.load(Ordering::Relaxed);
            match self.piped.recv_timeout(REST) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let moved = self.passed.piped.load(Ordering::Relaxed) != before
                        || self.passed.writing.load(Ordering::Relaxed) > 0;
                    if !moved || give_up() {
                        return;
                    }
                }
            }
        }
    }
}

/// Passes on what is read to the end. Dropping the sender says that it has come.
fn copy_on(mut from: PipeReader, mut to: File, passed: &OutputActivity, _done: Sender<()>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                passed.writing.fetch_add(1, Ordering::Relaxed);
                passed.piped.store(sys::monotonic(), Ordering::Relaxed);
                let written = write_all(&mut to, &buffer[..n]);
                passed.writing.fetch_sub(1, Ordering::Relaxed);
                // If nobody reads any more, the command learns that as it would have without a pipe in between.
                match written {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
                    Err(error) => {
                        tracing::error!("its output cannot be passed on: {error}");
                        return;
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Waits where another has said that nobody shall.
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

/// Whether two descriptors are on the same file.
fn same(one: &impl AsFd, other: &impl AsFd) -> bool {
    let name = |of: BorrowedFd<'_>| {
        let stat = fstat(of).ok()?;
        Some((stat.st_dev, stat.st_ino))
    };
    name(one.as_fd()).is_some_and(|one| Some(one) == name(other.as_fd()))
}
