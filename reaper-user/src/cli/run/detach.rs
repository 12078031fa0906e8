//! `reaper run --detach`: a child supervises the run, and this process reports whether it has started.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;

use crate::cli::OWN_FAILURE;
use crate::export::message;
use reaper_host::advice::Advised as _;
use reaper_host::sys::child;

/// Process that continues after the fork.
pub(super) enum Side {
    /// The process that the user started. The start has been reported; it exits with this status.
    Caller(u8),
    Run(StartNotifier),
}

/// Subcommand by which a service recognises the supervisor of a run, whatever arguments follow. Hidden from users.
pub(in crate::cli) const SUPERVISE: &str = "run-owner";

/// Pipe to the process that waits for the start, if one does. Written at most once.
#[derive(Clone, Default)]
pub(super) struct StartNotifier(Rc<RefCell<Option<PipeWriter>>>);

/// Forks. The parent waits for the report of the start, prints it, and returns [`Side::Caller`].
///
/// The child executes this program again as [`SUPERVISE`]. Only if that fails, it returns, with [`Side::Run`].
pub(super) fn split() -> io::Result<Side> {
    let (mut receiver, to) = io::pipe()?;
    if child::fork_new_session()?.is_none() {
        become_supervisor(&to);
        return Ok(Side::Run(StartNotifier::to(to)));
    }
    drop(to);
    let mut report = Vec::new();
    receiver.read_to_end(&mut report)?;
    let status = match report.split_first() {
        Some((0, id)) => {
            let mut out = io::stdout();
            // The run has started, whether or not its id can be printed.
            let _ = out.write_all(id).and_then(|()| out.flush());
            0
        }
        Some((status, why)) => {
            message!("reaper: {}", String::from_utf8_lossy(why));
            *status
        }
        None => {
            message!(
                "reaper: the detached `reaper run` was killed before its command started; start it again"
            );
            OWN_FAILURE
        }
    };
    Ok(Side::Caller(status))
}

/// Re-executes this program with the subcommand that services recognise. If that fails, the run continues unrecognised.
fn become_supervisor(to: &PipeWriter) {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    // Only `--color` may come before the subcommand.
    let Some(at) = args.iter().skip(1).position(|arg| arg == "run") else {
        return tracing::debug!("services will not recognise this run: unexpected subcommand");
    };
    let number = to.as_fd().as_raw_fd().to_string();
    let subcommand = [SUPERVISE.into(), "--tell".into(), number.into()];
    args.splice(at + 1..at + 2, subcommand);
    let error = child::reexec(&args, Some(to.as_fd()));
    tracing::debug!("services will not recognise this run: {error}");
}

impl StartNotifier {
    pub(super) fn to(to: PipeWriter) -> StartNotifier {
        StartNotifier(Rc::new(RefCell::new(Some(to))))
    }

    /// Reports that the run has started or waits for a slot. Does nothing after an earlier report.
    pub(super) fn started(&self, id: &str) {
        // The run continues even if no process waits.
        let _ = self.send(0, &format!("{id}\n"));
    }

    /// Reports that the start failed. Returns whether a process waited for that: it prints the message.
    pub(super) fn failed(&self, status: u8, why: &str) -> bool {
        self.send(status, why)
    }

    /// Redirects standard output and standard error of this process to a log file; the command inherits them. If that
    /// fails, logs an error, and the run continues without a log.
    pub(super) fn write_to(&self, log: &File) {
        if let Err(error) = child::write_to(log.as_fd()) {
            tracing::error!(
                "cannot redirect the output of the run to its log: {}; it is lost, and `reaper logs` shows nothing",
                error.advised()
            );
        }
    }

    /// Writes the report, if a process waits for it and none was sent before. Returns whether it was written.
    fn send(&self, status: u8, message: &str) -> bool {
        let to = self.0.borrow_mut().take();
        // The report is lost if the reading end is closed.
        to.is_some_and(|mut to| {
            let sent = to.write_all(&[&[status], message.as_bytes()].concat());
            sent.is_ok()
        })
    }
}
