//! What the kernel tells by its proc connector, to root, without probes: forks, execs, exits and new user ids of
//! all processes, in the order in which each processor saw them.
//!
//! It names processes by pid alone. Who is meant is known from the times of their forks, from /proc, and from the
//! numbers that the kernel gives pidfds (6.9), which are read as events come, and so a moment late: of a process that
//! lived for less, the program is not known, nor is one of which another had taken the place by then. Where a machine is too
//! busy for that look, the program is [reported later](translate).
//!
//! Of a fork it tells who is the child's parent and not who called it, which differs where that was with
//! `CLONE_PARENT`: such a child counts as made by the parent that it shares with its creator.

pub(super) mod error;
mod glimpse;
mod inbox;
mod listening;
mod parse;
#[cfg(test)]
mod tests;
mod translate;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::drained::{Drained, Lost};
use super::error::SourceError;
use super::event_source::Source;
use super::kind::SourceKind;
use super::procfs::Procfs;
use crate::sys;
use crate::sys::pidfd::Pidfd;
pub use error::ConnectorError;
use inbox::Inbox;
use listening::Listening;
use reaper_model::event::{Event, ProcessKey};
use translate::{Output, Translator};

/// Room for what is told while it is asked.
const PROBE_ROOM: u32 = 1 << 20;
/// How long a look at one process's program may take.
const LOOK_MAX: Duration = Duration::from_millis(100);
/// How many messages are taken in before the socket is emptied again: /proc is slower than the kernel is in telling.
const BATCH: usize = 64;
/// How long one call hands over what has come, in ns: signals, timers and questions wait for it.
const DRAIN_MAX: u64 = 20_000_000;
/// How old what is handed over next may be, in ns, before it matters whether that becomes more; and how often in a row it may.
const DELAY_MAX: u64 = 1_000_000_000;
const GROWN_MAX: u32 = 50;
/// Readings of two clocks differ by less; a suspended machine was so for longer.
const CLOCKS_APART: u64 = 1_000_000;

/// See the module.
pub struct ProcConnector {
    inbox: Inbox,
    translator: Translator,
    /// The kernel tells more, for long, than can be read.
    outrun: bool,
    /// When something was lost that nobody has looked for, in ns on the monotonic clock.
    survey_after: Option<u64>,
    /// For how long what is handed over next has waited, in ns, and how often in a row that had become more.
    delay: u64,
    grown: u32,
    /// What the times of the kernel are behind the time since boot.
    behind: u64,
}

/// Whether this can be used here.
///
/// # Errors
/// What is missing, and what to do.
pub fn probe() -> Result<(), ConnectorError> {
    sys::non_initial_pid_namespace().map_err(ConnectorError::Proc)?;
    Listening::begin(PROBE_ROOM, &mut Vec::new()).map(drop)
}

impl ProcConnector {
    /// Subscribes, and takes note of who lives already. What waits to be read has `room` in bytes, the kernel's own
    /// overhead included.
    ///
    /// # Errors
    /// What is missing, and what to do.
    pub fn open(room: u32) -> Result<ProcConnector, ConnectorError> {
        // What it names by pid is looked for there.
        sys::non_initial_pid_namespace().map_err(ConnectorError::Proc)?;
        let mut early = Vec::new();
        let listening = Listening::begin(room, &mut early)?;
        let mut translator = Translator::new(Procfs::default(), Box::new(number), LOOK_MAX);
        // Afterwards: who is born from now on is told of.
        translator.survey()?;
        Ok(ProcConnector {
            inbox: Inbox::new(listening, early),
            translator,
            outrun: false,
            survey_after: None,
            delay: 0,
            grown: 0,
            behind: sys::suspended(),
        })
    }

    /// Whether the kernel tells more, for long, than can be read: then this is no source to go by.
    fn look_for_delay(&mut self, next: Option<u64>) {
        let delay = next.map_or(0, |next| sys::monotonic().saturating_sub(next));
        let grows = delay > DELAY_MAX && delay >= self.delay;
        self.delay = delay;
        self.grown = if grows { self.grown + 1 } else { 0 };
        if self.grown > GROWN_MAX {
            self.outrun = true;
        }
    }
}

impl Source for ProcConnector {
    fn kind(&self) -> SourceKind {
        SourceKind::ProcConnector
    }

    /// Hands over what was told before this call, in order, as far as that goes in a short time. As soon as it is found that
    /// something was lost, it leaves off: that is to be told first. What is told meanwhile is left for the next call too:
    /// there may be no end to it. An exit that /proc cannot confirm counts as lost.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let began = sys::monotonic();
        let behind = sys::suspended();
        if behind.abs_diff(self.behind) > CLOCKS_APART {
            self.behind = behind;
        }
        let lost = self.inbox.lost().total;
        let mut records = 0;
        let mut told_at = 0;
        loop {
            self.inbox.receive();
            let now = sys::monotonic();
            if self.inbox.lost().total != lost {
                // All that came before the loss may hold the ends of some who will not be found.
                self.survey_after = Some(now);
                break;
            }
            if self.inbox.first().is_none() || told_at > began || now > began + DRAIN_MAX {
                break;
            }
            for _ in 0..BATCH {
                if self.inbox.lost().total != lost {
                    break;
                }
                let Some(message) = self.inbox.take() else {
                    break;
                };
                records += 1;
                told_at = message.time;
                let time = message.time.saturating_add(self.behind);
                let mut out = Output {
                    has_moved_on: &mut |pid| self.inbox.has_moved_on(pid),
                    sink: &mut *sink,
                };
                self.translator.take(time, message.what, &mut out);
            }
        }
        let next = self.inbox.first().map(|message| message.time);
        if self
            .survey_after
            .is_some_and(|after| next.is_none_or(|next| next > after))
        {
            self.survey_after = None;
            // Who is gone is told of by whoever looks for what was lost.
            if let Err(error) = self.translator.survey() {
                tracing::error!("{error}");
            }
        }
        self.look_for_delay(next);
        let lost = self.inbox.lost().total;
        // Counted, so that there is another look soon.
        let mut out = Output {
            has_moved_on: &mut |pid| self.inbox.has_moved_on(pid),
            sink,
        };
        records += self.translator.retry(sys::monotonic(), &mut out) as u64;
        self.inbox.count_as_lost(self.translator.take_missed());
        if self.inbox.lost().total != lost {
            self.survey_after = Some(sys::monotonic());
        }
        let defects = self.inbox.take_defects();
        Drained {
            records: records + defects.records,
            lost: self.inbox.lost().total,
            ..defects
        }
    }

    /// By the process's number, or by its tick in /proc.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        self.translator.lives(key)
    }

    /// The kinds of lost events are not known.
    fn lost(&self) -> Lost {
        self.inbox.lost()
    }

    fn has_undrained(&self) -> bool {
        self.inbox.first().is_some()
    }

    fn failure(&self) -> Option<SourceError> {
        let broken = self.inbox.broken().map(ConnectorError::Broken);
        let error = broken.or_else(|| self.outrun.then_some(ConnectorError::Behind));
        error.map(SourceError::from)
    }

    fn import_keys(&mut self, keys: &mut dyn Iterator<Item = ProcessKey>) {
        self.translator.take_over(keys);
    }
}

impl AsFd for ProcConnector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inbox.listening.0.as_fd()
    }
}

/// As [`glimpse::Numbers`] has it: two microseconds, which is a third of what else is read at a fork.
fn number(pid: u32) -> u64 {
    let number = Pidfd::open(pid).ok().and_then(|pidfd| pidfd.unique_inode());
    number.unwrap_or(0)
}
