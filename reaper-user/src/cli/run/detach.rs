//! `reaper run --detach`: the run goes on in a child, and this program says what has become of its start.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;

use crate::cli::OWN_FAILURE;
use crate::export::message;
use reaper_host::sys::child;

/// Whose side of the parting this is.
pub(super) enum Side {
    /// Has told its user, and is to leave with this status.
    Caller(u8),
    Run(StartNotifier),
}

/// By this word a service knows who owns a command, whatever the words are that follow. It is hidden from users.
pub(in crate::cli) const OWNER: &str = "run-owner";

/// Who waits to be told of the start, if somebody does.
#[derive(Clone, Default)]
pub(super) struct StartNotifier(Rc<RefCell<Option<PipeWriter>>>);

/// Goes on in a child; whoever has started this program is told by what that tells.
pub(super) fn part() -> io::Result<Side> {
    let (mut from, to) = io::pipe()?;
    if child::fork_new_session()?.is_none() {
        become_owner(&to);
        return Ok(Side::Run(StartNotifier::to(to)));
    }
    drop(to);
    let mut told = Vec::new();
    from.read_to_end(&mut told)?;
    let status = match told.split_first() {
        Some((0, id)) => {
            let mut out = io::stdout();
            // It runs, whether or not somebody reads that.
            let _ = out.write_all(id).and_then(|()| out.flush());
            0
        }
        Some((status, why)) => {
            message!("reaper: {}", String::from_utf8_lossy(why));
            *status
        }
        None => {
            message!("reaper: the detached run was killed before its command was started");
            OWN_FAILURE
        }
    };
    Ok(Side::Caller(status))
}

/// Becomes the owner of a command in the eyes of a service, by beginning this program anew. Where that cannot be, it goes on
/// without one that knows.
fn become_owner(to: &PipeWriter) {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    let Some(word) = words.get_mut(1).filter(|word| *word == "run") else {
        return tracing::debug!("no service will know of this run: it was called by another word");
    };
    *word = OWNER.into();
    let number = to.as_fd().as_raw_fd().to_string();
    words.splice(2..2, ["--tell".into(), number.into()]);
    let error = child::reexec(&words, Some(to.as_fd()));
    tracing::debug!("no service will know of this run: {error}");
}

impl StartNotifier {
    pub(super) fn to(to: PipeWriter) -> StartNotifier {
        StartNotifier(Rc::new(RefCell::new(Some(to))))
    }

    /// It goes on by itself.
    pub(super) fn begun(&self, id: &str) {
        // If nobody waits for it, so be it.
        let _ = self.say(0, &format!("{id}\n"));
    }

    /// Whether somebody waited for that, who says it then.
    pub(super) fn failed(&self, status: u8, why: &str) -> bool {
        self.say(status, why)
    }

    /// Has all that it and its command say go to a file.
    pub(super) fn write_to(&self, log: &File) {
        if let Err(error) = child::write_to(log.as_fd()) {
            tracing::error!("its output cannot go to its log: {error}");
        }
    }

    fn say(&self, status: u8, what: &str) -> bool {
        let to = self.0.borrow_mut().take();
        // Whoever does not listen any more has been told nothing.
        to.is_some_and(|mut to| {
            let said = to.write_all(&[&[status], what.as_bytes()].concat());
            said.is_ok()
        })
    }
}
