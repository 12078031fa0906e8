//! `reaper run --detach`: the run goes on in a child, and this program says what has become of its start.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::rc::Rc;

use crate::cli::OWN_FAILURE;
use crate::sys::child;

/// Whose side of the parting this is.
pub(super) enum Side {
    /// Has told its user, and is to leave with this status.
    Caller(u8),
    Run(Tell),
}

/// Who waits to be told of the start, if somebody does.
#[derive(Clone, Default)]
pub(super) struct Tell(Rc<RefCell<Option<PipeWriter>>>);

/// Goes on in a child; whoever has started this program is told by what that tells.
pub(super) fn part() -> io::Result<Side> {
    let (mut from, to) = io::pipe()?;
    if child::part()?.is_none() {
        return Ok(Side::Run(Tell(Rc::new(RefCell::new(Some(to))))));
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
            anstream::eprintln!("reaper: {}", String::from_utf8_lossy(why));
            *status
        }
        None => {
            anstream::eprintln!(
                "reaper: the detached run was killed before its command was started"
            );
            OWN_FAILURE
        }
    };
    Ok(Side::Caller(status))
}

impl Tell {
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
