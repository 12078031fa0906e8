//! What the kernel tells by its proc connector, to root, without probes: forks, execs, exits and new user ids of
//! all processes, in the order in which each processor saw them.
//!
//! It names processes by pid alone. Who is meant is known from the times of their forks, from /proc, and from the
//! numbers that the kernel gives pidfds (6.9), which are read as events come, and so a moment late: of a process that
//! lived for less, the program is not known.
//!
//! Of a fork it tells who is the child's parent and not who called it, which differs where that was with
//! `CLONE_PARENT`: such a child counts as made by the parent that it shares with its creator.

mod aside;
mod error;
mod glimpse;
mod parse;
#[cfg(test)]
mod tests;
mod translate;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use nix::errno::Errno;

use super::procfs::Procfs;
use super::{Drained, Flaw, Lost};
use crate::model::event::{Event, Key};
use crate::sys;
use crate::sys::netlink::Connector;
use crate::sys::pidfd::Pidfd;
pub use error::ConnectorError;
use parse::{Message, What, messages, subscription};
use translate::Translator;

/// Room for what is told while it is asked.
const PROBE_ROOM: u32 = 1 << 20;
/// How long the kernel may take to answer. It does before the call returns, if it does at all.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long a look at one process's program may take.
const LOOK_MAX: Duration = Duration::from_millis(100);
/// More than any datagram of the kernel's.
const DATAGRAM_MAX: usize = 1024;
/// How many messages are taken in before the socket is emptied again: /proc is slower than the kernel is in telling.
const BATCH: usize = 64;
/// How many wait here at most: the rest is left in the socket, where each takes twenty times the room.
const WAITING_MAX: usize = 1 << 20;
/// How long one call hands over what has come, in ns: signals, timers and questions wait for it.
const DRAIN_MAX: u64 = 20_000_000;
/// How old what is handed over next may be, in ns, before it matters whether that becomes more; and how often in a row it may.
const DELAY_MAX: u64 = 1_000_000_000;
const GROWN_MAX: u32 = 50;
/// Readings of two clocks differ by less; a suspended machine was so for longer.
const CLOCKS_APART: u64 = 1_000_000;

/// See the module.
pub struct ProcConnector {
    socket: Listening,
    translator: Translator,
    /// What has been received and is still to be taken in, in order.
    waiting: VecDeque<Message>,
    count: Count,
    /// Why nothing is told any more.
    failure: Option<Failure>,
    /// When something was lost that nobody has looked for, in ns on the monotonic clock.
    survey_after: Option<u64>,
    /// For how long what is handed over next has waited, in ns, and how often in a row that had become more.
    delay: u64,
    grown: u32,
    /// What the times of the kernel are behind the time since boot.
    behind: u64,
}

/// Why nothing is to be had from it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Socket(Errno),
    /// More is told than can be read.
    Behind,
}

/// Tells how many messages have not come.
#[derive(Debug, Default)]
struct Count {
    lost: Lost,
    /// The number that each processor's next message has.
    next: HashMap<u32, u32>,
    /// Of those that are counted as lost, for how many no number has been found missing so far.
    presumed: u64,
}

/// Whether this can be used here.
///
/// # Errors
/// What is missing, and what to do.
pub fn probe() -> Result<(), ConnectorError> {
    sys::pid_namespace_unless_first().map_err(ConnectorError::Proc)?;
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
        sys::pid_namespace_unless_first().map_err(ConnectorError::Proc)?;
        let mut early = Vec::new();
        let socket = Listening::begin(room, &mut early)?;
        let mut translator = Translator::new(Procfs::default(), Box::new(number), LOOK_MAX);
        // Afterwards: who is born from now on is told of.
        translator.survey()?;
        let mut count = Count::default();
        for message in &early {
            count.meet(message.cpu, message.number);
        }
        Ok(ProcConnector {
            socket,
            translator,
            waiting: early.into(),
            count,
            failure: None,
            survey_after: None,
            delay: 0,
            grown: 0,
            behind: sys::suspended(),
        })
    }

    /// Hands over what was told before this call, in order, as far as that goes in a short time. As soon as it is found
    /// that something was lost, it leaves off: that is to be told first. What is told meanwhile is left for the next call
    /// too: there may be no end to it.
    /// An end of which /proc cannot be asked in time counts as lost.
    pub fn drain(&mut self, mut sink: impl FnMut(Event)) -> Drained {
        let began = sys::monotonic();
        let behind = sys::suspended();
        if behind.abs_diff(self.behind) > CLOCKS_APART {
            self.behind = behind;
        }
        let lost = self.count.lost.total;
        let mut drained = Drained::default();
        let mut told_at = 0;
        loop {
            self.receive(&mut drained);
            let now = sys::monotonic();
            if self.count.lost.total != lost {
                // All that came before the loss may hold the ends of some who will not be found.
                self.survey_after = Some(now);
                break;
            }
            if self.waiting.is_empty() || told_at > began || now > began + DRAIN_MAX {
                break;
            }
            for message in self.waiting.drain(..self.waiting.len().min(BATCH)) {
                drained.records += 1;
                told_at = message.time;
                let time = message.time.saturating_add(self.behind);
                self.translator.take(time, message.what, &mut sink);
            }
        }
        let next = self.waiting.front().map(|message| message.time);
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
        // Counted, so that there is another look soon.
        drained.records += self.translator.look_again(sys::monotonic(), &mut sink) as u64;
        let missed = self.translator.take_missed();
        if missed > 0 {
            self.count.lost.total += missed;
            self.survey_after = Some(sys::monotonic());
        }
        drained.lost = self.count.lost.total;
        drained
    }

    /// Whether the kernel tells more, for long, than can be read: then this is no source to go by.
    fn look_for_delay(&mut self, next: Option<u64>) {
        let delay = next.map_or(0, |next| sys::monotonic().saturating_sub(next));
        let grows = delay > DELAY_MAX && delay >= self.delay;
        self.delay = delay;
        self.grown = if grows { self.grown + 1 } else { 0 };
        if self.grown > GROWN_MAX {
            self.failure.get_or_insert(Failure::Behind);
        }
    }

    /// Whether some of what was received is still to be handed over: the socket says nothing of it.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes what there is out of the socket, which has room for a burst alone.
    fn receive(&mut self, drained: &mut Drained) {
        let mut buffer = [0; DATAGRAM_MAX];
        while self.waiting.len() < WAITING_MAX {
            let datagram = match self.socket.0.receive(&mut buffer) {
                Ok(Some(datagram)) => datagram,
                Ok(None) => return,
                Err(Errno::ENOBUFS) => {
                    self.count.overran();
                    continue;
                }
                Err(error) => {
                    self.failure = Some(Failure::Socket(error));
                    return;
                }
            };
            for message in messages(datagram) {
                match message {
                    Ok(message) => {
                        self.count.meet(message.cpu, message.number);
                        self.waiting.push_back(message);
                    }
                    Err(defect) => {
                        drained.records += 1;
                        drained.malformed += 1;
                        drained.flaw = Some(Flaw::Record(defect));
                    }
                }
            }
        }
    }

    /// Whether the process is still the one that has been told of under this key, by its number, or its tick in /proc.
    pub fn vouches(&mut self, key: Key) -> bool {
        self.translator.lives(key)
    }

    /// See [`Translator::take_over`].
    pub fn take_over(&mut self, keys: impl Iterator<Item = Key>) {
        self.translator.take_over(keys);
    }

    /// Why it tells nothing any more, if it does not.
    pub fn failure(&self) -> Option<ConnectorError> {
        self.failure.map(ConnectorError::from)
    }

    /// What was lost since it was opened. Of which kinds nobody knows.
    pub fn lost(&self) -> Lost {
        self.count.lost
    }
}

impl AsFd for ProcConnector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.0.as_fd()
    }
}

impl Count {
    /// There was no room for some: for how many, the next numbers tell.
    fn overran(&mut self) {
        self.lost.total += 1;
        self.presumed += 1;
    }

    /// A processor's message with this number has come. Some can be missing without a word, where the kernel had no
    /// memory for them.
    fn meet(&mut self, cpu: u32, number: u32) {
        let next = self.next.insert(cpu, number.wrapping_add(1));
        let missing = next.map_or(0, |next| u64::from(number.wrapping_sub(next)));
        let counted = missing.min(self.presumed);
        self.presumed -= counted;
        self.lost.total += missing - counted;
    }
}

/// As [`glimpse::Numbers`] has it: two microseconds, which is a third of what else is read at a fork.
fn number(pid: u32) -> u64 {
    let number = Pidfd::open(pid).ok().and_then(|pidfd| pidfd.number());
    number.unwrap_or(0)
}

/// The socket of a listener, which says so when it is one no more: older kernels go on telling otherwise.
struct Listening(Connector);

impl Listening {
    /// What else comes before the answer is left in `early`, as far as there was room for it.
    fn begin(room: u32, early: &mut Vec<Message>) -> Result<Listening, ConnectorError> {
        let (listening, own) = Listening::ask(room)?;
        listening.await_answer(own, early)?;
        Ok(listening)
    }

    /// Gives the number by which the answer will be known.
    fn ask(room: u32) -> Result<(Listening, u32), ConnectorError> {
        let room = i32::try_from(room).unwrap_or(i32::MAX);
        let socket = Connector::open(libc::CN_IDX_PROC, room).map_err(ConnectorError::open)?;
        // Answers go to all listeners: this tells which is its own.
        let own = (sys::boot_time() as u32).rotate_left(16) ^ std::process::id();
        let asked = socket.send(&subscription(true, own));
        asked.map_err(ConnectorError::ask)?;
        Ok((Listening(socket), own))
    }

    fn await_answer(&self, own: u32, early: &mut Vec<Message>) -> Result<(), ConnectorError> {
        let deadline = Instant::now() + PATIENCE;
        let mut buffer = [0; DATAGRAM_MAX];
        while early.len() < WAITING_MAX {
            match self.0.receive(&mut buffer) {
                Ok(Some(datagram)) => {
                    for message in messages(datagram).flatten() {
                        match message.what {
                            What::Answer { to, errno } if to == own => {
                                return match errno {
                                    0 => Ok(()),
                                    errno => Err(ConnectorError::answer(errno)),
                                };
                            }
                            _ => early.push(message),
                        }
                    }
                }
                Ok(None) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if !self.0.wait(left) {
                        return Err(ConnectorError::Silent);
                    }
                }
                // On a busy machine there is soon no room for more. The answer came first, and who is there is looked at
                // afterwards.
                Err(Errno::ENOBUFS) => {}
                Err(error) => return Err(ConnectorError::ask(error)),
            }
        }
        Err(ConnectorError::Silent)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // If the kernel does not hear it, it tells nobody.
        self.0.send(&subscription(false, 0)).unwrap_or_default();
    }
}
