//! Those whom /proc did not tell of when it was asked: a few more looks, soon.

use super::{Process, Translator, ended};
use crate::model::event::{Event, Key, Provenance};
use crate::source::proc_connector::glimpse::State;
use crate::source::procfs::Look;
use crate::sys;

/// How often it is tried again to read a program, or whether one has ended, and of how many at once.
pub const TRIES: u32 = 3;
pub const UNREAD_MAX: usize = 64;
/// How long after an end that could not be read the next look comes, in ns: it may be for want of open files, which
/// others have to give back.
pub const LOOK_AFTER: u64 = 40_000_000;

/// One of whom the last thread may have exited.
pub struct Doubted {
    key: Key,
    tries: u32,
    /// When it is looked at again, on the monotonic clock.
    at: u64,
}

impl Translator {
    /// Looks again at those who could not be read when they were told of. Gives how many are left to be looked at.
    /// `now` is monotonic.
    pub fn look_again(&mut self, now: u64, sink: &mut impl FnMut(Event)) -> usize {
        self.look_for_programs(sink);
        self.look_for_ends(now, sink);
        self.unread.len() + self.doubted.len()
    }

    /// How many ends could not be told since this was last asked.
    pub fn take_missed(&mut self) -> u64 {
        std::mem::take(&mut self.missed)
    }

    /// A machine may have been too busy.
    fn look_for_programs(&mut self, sink: &mut impl FnMut(Event)) {
        for (key, tries) in std::mem::take(&mut self.unread) {
            let known = self.known.get(&key.pid).filter(|known| known.key == key);
            if known.is_none_or(|known| !known.unknown) {
                continue;
            }
            match self.programs.look(key.pid) {
                Some(Look::Alive(seen)) if seen.key.same_tick(key) => {
                    self.tell(seen.at, key, Some(seen), sink);
                }
                None if tries > 0 => self.unread.push((key, tries - 1)),
                _ => {}
            }
        }
    }

    fn look_for_ends(&mut self, now: u64, sink: &mut impl FnMut(Event)) {
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
                    sink(ended(time, Provenance::Inferred, &known, None));
                }
                State::Lives { leader_dead } => {
                    let half_dead = leader_dead;
                    let known = Process { half_dead, ..known };
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

    /// One runs another program, which cannot be read.
    pub(super) fn doubt_program(&mut self, key: Key) {
        if self.unread.len() < UNREAD_MAX {
            self.unread.push((key, TRIES));
        }
    }

    /// One may have ended, and cannot be read.
    pub(super) fn doubt(&mut self, key: Key) {
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
