//! Those whom /proc did not tell of when it was asked: a few more looks, soon.

use std::time::{Duration, Instant};

use super::held::{HasMovedOn, Out};
use super::unread::{Doubted, TRIES, UNREAD_MAX, Unread};
use super::{TrackedProcess, Translator, ended};
use crate::source::proc_connector::glimpse::State;
use crate::source::procfs::ProcessReading;
use crate::sys;
use reaper_model::event::{Event, ProcessKey, Provenance};

/// How long it is looked again at programs in one go: signals, timers and questions wait for it.
const LOOKS_MAX: Duration = Duration::from_millis(20);
/// How long after a look that brought nothing the next one comes, in ns: it may be for want of open files, which others
/// have to give back.
pub const LOOK_AFTER: u64 = 40_000_000;

impl Translator {
    /// Looks again at those who could not be read when they were told of. Gives how many are left to be looked at.
    /// `now` is monotonic.
    pub fn look_again(
        &mut self,
        now: u64,
        has_moved_on: HasMovedOn<'_>,
        sink: &mut impl FnMut(Event),
    ) -> usize {
        self.through(has_moved_on, sink, |this, out| {
            this.look_for_programs(now, out);
            this.look_for_ends(now, out);
        });
        self.unread.len() + self.doubted.len()
    }

    /// How many ends could not be told since this was last asked.
    pub fn take_missed(&mut self) -> u64 {
        std::mem::take(&mut self.missed)
    }

    /// A machine may have been too busy.
    fn look_for_programs(&mut self, now: u64, out: &mut Out<'_>) {
        // Of whom it is told what they have handed on to those who are copies of them.
        let mut resolved = Vec::new();
        let began = Instant::now();
        for unread in std::mem::take(&mut self.unread) {
            let key = unread.key;
            let unknown = self.is_unknown(key);
            if unread
                .copy_of
                .is_some_and(|maker| resolved.contains(&maker))
            {
                if let Some(copy) = self.known.get_mut(&key.pid).filter(|_| unknown) {
                    copy.unknown = false;
                }
                // Also one that is gone, and has left copies of its own.
                resolved.push(key);
                continue;
            }
            // A maker that has run another program since comes after its copies, and is no matter of theirs.
            let is_copy = |other: &Unread| unread.copy_of == Some(other.key);
            if self.unread.iter().any(is_copy) {
                self.unread.push(unread);
                continue;
            }
            if !unknown {
                continue;
            }
            if unread.at > now || began.elapsed() > LOOKS_MAX {
                self.unread.push(unread);
                continue;
            }
            match self.programs.look(key.pid) {
                Some(ProcessReading::Alive(seen))
                    if seen.key.has_same_tick(key) && !out.has_moved_on(key.pid) =>
                {
                    // Otherwise those were told of without it.
                    if out.has_place(key, unread.time) {
                        resolved.push(key);
                    }
                    self.tell(unread.time, key, Some(seen), out);
                }
                None if unread.tries > 0 => self.unread.push(Unread {
                    tries: unread.tries - 1,
                    at: now.saturating_add(LOOK_AFTER),
                    ..unread
                }),
                _ => {}
            }
        }
    }

    /// Whether it lives, and it is not known what it runs.
    fn is_unknown(&self, key: ProcessKey) -> bool {
        let known = self.known.get(&key.pid);
        known.is_some_and(|known| known.key == key && known.unknown)
    }

    /// Whether it may still be told what a process has run at a time.
    pub(super) fn awaits(&self, key: ProcessKey, time: u64) -> bool {
        let unknown = self.is_unknown(key);
        let is = |unread: &Unread| (unread.key, unread.time) == (key, time);
        unknown && self.unread.iter().any(is)
    }

    fn look_for_ends(&mut self, now: u64, out: &mut Out<'_>) {
        for doubted in std::mem::take(&mut self.doubted) {
            let Doubted { key, tries, at } = doubted;
            let known = self.known.get(&key.pid).filter(|known| known.key == key);
            // What has run a program since has not ended.
            let Some(known) = known.filter(|known| known.half_dead).copied() else {
                continue;
            };
            if at > now {
                self.doubted.push(doubted);
                continue;
            }
            match self.glimpses.state(key, known.number) {
                State::Gone => {
                    self.known.remove(&key.pid);
                    let time = sys::boot_time();
                    out.tell(ended(time, Provenance::Inferred, &known, None));
                }
                State::Lives { leader_dead } => {
                    let half_dead = leader_dead;
                    let known = TrackedProcess { half_dead, ..known };
                    self.known.insert(key.pid, known);
                }
                State::Unknown if tries > 0 => self.doubted.push(Doubted {
                    key,
                    tries: tries - 1,
                    at: now.saturating_add(LOOK_AFTER),
                }),
                State::Unknown => self.missed += 1,
                // There is no end to that.
                State::Hidden => {}
            }
        }
    }

    /// One runs a program that cannot be read: there is another look, for which what follows from it waits.
    pub(super) fn await_program(&mut self, key: ProcessKey, time: u64, out: &mut Out<'_>) {
        // Copies hardly ever need a look.
        let runs = |unread: &&Unread| unread.copy_of.is_none();
        if self.unread.iter().filter(runs).count() < UNREAD_MAX {
            self.put(Unread::new(key, time), out);
        }
    }

    /// One that has run nothing yet is what its maker is: if that is awaited, so is this, with it. Gives whether it is.
    pub(super) fn await_as_copy(
        &mut self,
        time: u64,
        key: ProcessKey,
        maker: Option<ProcessKey>,
        out: &mut Out<'_>,
    ) -> bool {
        let mut awaited = self.unread.iter().map(|unread| Some(unread.key));
        let awaited = maker.is_some() && awaited.any(|key| key == maker);
        if awaited {
            let unread = Unread::new(key, time);
            let copy_of = maker;
            self.put(Unread { copy_of, ..unread }, out);
        }
        awaited
    }

    fn put(&mut self, unread: Unread, out: &mut Out<'_>) {
        let maker = self.known.get(&unread.key.pid);
        let maker = maker.and_then(|process| process.maker);
        out.await_program(unread.key, maker, unread.time);
        self.unread.push(unread);
    }

    /// One may have ended, and cannot be read.
    pub(super) fn doubt(&mut self, key: ProcessKey) {
        if self.doubted.iter().any(|doubted| doubted.key == key) {
            return;
        }
        if self.doubted.len() == UNREAD_MAX {
            self.missed += 1;
            return;
        }
        self.doubted.push(Doubted {
            key,
            tries: TRIES,
            at: 0,
        });
    }
}
