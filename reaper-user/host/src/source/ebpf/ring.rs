//! Reading the ring: up to where it is known to stand, and giving room back only when all that followed
//! from the records there has been seen to.
//!
//! Where the reader stands is kept in the ring itself. A service that is killed leaves what it had not
//! given back for the next one, which reads it again: events come at least once.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use aya::maps::MapData;

use super::error::EbpfError;
use super::record;
use crate::source::drained::{Drained, Malformation};
use crate::source::probes::EventRing;
use crate::sys::{RingMemory, RingRecord};
use reaper_model::event::Event;

/// Looks at a record that is still being written before the thread sleeps.
const SPINS: u32 = 4096;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(50);
/// After so many naps, with as many looks between two of them, what is still being written is no record: some seconds. For one of
/// them a host may well keep a processor that is at it.
const NAPS_MAX: u32 = 10_000;
/// In so many parts of the ring a place is known where a record begins.
const PARTS: u64 = 8;

/// The ring's reader. There is one.
pub struct Ring {
    map: MapData,
    reader: Reader,
}

/// What it reads, and how far it is.
struct Reader {
    memory: Arc<RingMemory>,
    /// Up to where records have been handed over, in bytes since the ring was made.
    read: u64,
    /// Where records began that have been handed over, a part of the ring apart, the oldest first.
    begun: VecDeque<u64>,
}

impl Ring {
    pub(super) fn new(map: MapData) -> Result<Ring, EbpfError> {
        let size = map.info().map_err(EbpfError::map)?.max_entries();
        let memory = RingMemory::map(map.fd().as_fd(), size);
        let memory = memory.map_err(|e| EbpfError::Map(e.into()))?;
        let reader = Reader::new(memory);
        Ok(Ring { map, reader })
    }

    /// How far probes have reserved room, in bytes since the ring was made. Whatever happened before
    /// this call is in the ring before this position.
    pub(super) fn produced(&self) -> u64 {
        self.reader.memory.produced()
    }

    /// See [`Reader::drain_until`].
    pub(super) fn drain_until(&mut self, position: u64, sink: impl FnMut(Event)) -> Drained {
        self.reader.drain_until(position, sink)
    }
}

impl EventRing for Ring {
    fn size(&self) -> u64 {
        self.reader.memory.size()
    }

    fn position(&self) -> u64 {
        self.reader.read
    }

    fn restart_position(&self) -> u64 {
        self.reader.behind()
    }

    fn unreleased(&self) -> u64 {
        self.position()
            .saturating_sub(self.reader.memory.consumed())
    }

    fn waiting(&self) -> u64 {
        self.produced().saturating_sub(self.position())
    }

    fn release(&self) -> Box<dyn Fn(u64) + Send> {
        let memory = Arc::clone(&self.reader.memory);
        Box::new(move |position| memory.release(position))
    }
}

impl Reader {
    fn new(memory: RingMemory) -> Reader {
        Reader {
            read: memory.consumed(),
            memory: Arc::new(memory),
            begun: VecDeque::new(),
        }
    }

    /// See [`EventRing::restart_position`].
    fn behind(&self) -> u64 {
        let most = self.read.saturating_sub(self.memory.size() / 4);
        let begun = self.begun.iter().rev().find(|at| **at <= most);
        // The first one is closer only where the others have been skipped.
        let begun = begun.or(self.begun.front());
        // Nothing is given back by this.
        begun.copied().unwrap_or_default()
    }

    /// A record has been read, and the next one begins there.
    fn go_on_at(&mut self, next: u64) {
        self.read = next;
        let part = self.memory.size() / PARTS;
        if self.begun.back().is_none_or(|last| next - last >= part) {
            self.begun.push_back(next);
            // The last of them lie in more than the quarter that is held in any case.
            if self.begun.len() as u64 > PARTS {
                self.begun.pop_front();
            }
        }
    }

    /// Hands over the records before a position, where one begins, in order, waiting for those still being written:
    /// a probe takes well under a microsecond between reserving room and committing. Where there is no record, all up
    /// to that position is skipped.
    fn drain_until(&mut self, position: u64, mut sink: impl FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        // At the record that is read from here.
        let (mut at, mut spins) = (self.read, 0_u32);
        while position.wrapping_sub(self.read).cast_signed() > 0 {
            let (bytes, next) = match self.memory.record(self.read) {
                RingRecord::Written { next, .. } | RingRecord::Discarded { next }
                    if next > position =>
                {
                    self.skip_to(position, &mut drained);
                    break;
                }
                RingRecord::Written { bytes, next } => (bytes, next),
                RingRecord::Discarded { next } => {
                    self.go_on_at(next);
                    continue;
                }
                RingRecord::BeingWritten => {
                    if at != self.read {
                        (at, spins) = (self.read, 0);
                    }
                    // It may be this thread that keeps the probe from the processor.
                    spins += 1;
                    if spins.is_multiple_of(SPINS) {
                        std::thread::sleep(NAP);
                    }
                    if spins > NAPS_MAX * SPINS {
                        self.skip_to(position, &mut drained);
                    }
                    std::hint::spin_loop();
                    continue;
                }
            };
            drained.records += 1;
            match record::events(bytes, &mut sink) {
                Ok(lost) => drained.lost = drained.lost.max(lost),
                Err(defect) => {
                    drained.malformed += 1;
                    drained.malformation = Some(Malformation::Record(defect));
                }
            }
            self.go_on_at(next);
        }
        drained
    }

    /// What stands here is no record, so that nothing before that position can be found.
    fn skip_to(&mut self, position: u64, drained: &mut Drained) {
        drained.malformed += 1;
        drained.malformation = Some(Malformation::Ring(position - self.read));
        self.go_on_at(position);
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd().as_fd()
    }
}

#[cfg(test)]
mod tests;
