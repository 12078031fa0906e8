//! Reads the ring buffer of the probes.
//!
//! Reading does not free records. The service frees them once it has saved all that follows from them. The ring stores
//! the position up to which records are freed, so the service that follows a killed one reads the others again. Each
//! event is therefore delivered at least once.

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

/// Number of polls of an uncommitted record before the thread sleeps.
const SPINS: u32 = 4096;
/// Duration of this sleep.
const PAUSE: Duration = Duration::from_micros(50);
/// Number of sleeps after which an uncommitted record counts as damaged: some seconds. A hypervisor can well take the
/// processor from a writing probe for one second.
const PAUSES_MAX: u32 = 10_000;
/// Number of parts of the ring, in each of which the reader remembers the start of a record.
const PARTS: u64 = 8;

/// The only reader of the ring buffer.
pub struct Ring {
    map: MapData,
    reader: Reader,
}

/// Memory of the ring buffer, and the position in it.
struct Reader {
    memory: Arc<RingMemory>,
    /// Position up to which records have been drained, in bytes since the creation of the ring.
    position: u64,
    /// Start positions of drained records, at least a part of the ring apart, oldest first.
    record_starts: VecDeque<u64>,
}

impl Ring {
    pub(super) fn new(map: MapData) -> Result<Ring, EbpfError> {
        let size = map.info().map_err(EbpfError::map("EVENTS"))?.max_entries();
        let memory = RingMemory::map(map.fd().as_fd(), size);
        let memory = memory.map_err(EbpfError::map("EVENTS"))?;
        let reader = Reader::new(memory);
        Ok(Ring { map, reader })
    }

    /// Returns the position up to which probes have reserved space, in bytes since the creation of the ring. All earlier
    /// events have their records before it.
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
        self.reader.position
    }

    fn restart_position(&self) -> u64 {
        self.reader.restart_position()
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
            position: memory.consumed(),
            memory: Arc::new(memory),
            record_starts: VecDeque::new(),
        }
    }

    /// See [`EventRing::restart_position`].
    fn restart_position(&self) -> u64 {
        let most = self.position.saturating_sub(self.memory.size() / 4);
        let start = self.record_starts.iter().rev().find(|at| **at <= most);
        // If no start is old enough, the oldest one is used. That happens early on, or after a skip.
        let start = start.or(self.record_starts.front());
        // Position 0 frees nothing.
        start.copied().unwrap_or_default()
    }

    /// Moves to the start of the next record. Remembers some of these starts for [`Reader::restart_position`].
    fn advance_to(&mut self, next: u64) {
        self.position = next;
        let part = self.memory.size() / PARTS;
        if self
            .record_starts
            .back()
            .is_none_or(|last| next - last >= part)
        {
            self.record_starts.push_back(next);
            // The remaining starts reach back further than the quarter of the ring that is never freed.
            if self.record_starts.len() as u64 > PARTS {
                self.record_starts.pop_front();
            }
        }
    }

    /// Passes on the records before the position `until`, at which a record begins. A record that cannot be decoded is
    /// counted and skipped.
    ///
    /// Waits for uncommitted records: a probe takes well under a microsecond between reserving and committing. Skips
    /// everything before `until` if the data is no valid record, or stays uncommitted for some seconds.
    fn drain_until(&mut self, until: u64, mut sink: impl FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        // Number of polls of the record at position `at`.
        let (mut at, mut spins) = (self.position, 0_u32);
        while until.wrapping_sub(self.position).cast_signed() > 0 {
            let (bytes, next) = match self.memory.record(self.position) {
                RingRecord::Written { next, .. } | RingRecord::Discarded { next }
                    if next > until =>
                {
                    self.skip_to(until, &mut drained);
                    break;
                }
                RingRecord::Written { bytes, next } => (bytes, next),
                RingRecord::Discarded { next } => {
                    self.advance_to(next);
                    continue;
                }
                RingRecord::BeingWritten => {
                    if at != self.position {
                        (at, spins) = (self.position, 0);
                    }
                    // This thread may occupy the processor that the probe needs.
                    spins += 1;
                    if spins.is_multiple_of(SPINS) {
                        std::thread::sleep(PAUSE);
                    }
                    if spins > PAUSES_MAX * SPINS {
                        self.skip_to(until, &mut drained);
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
            self.advance_to(next);
        }
        drained
    }

    /// Skips invalid data up to a position, because no start of a record can be found before it.
    fn skip_to(&mut self, position: u64, drained: &mut Drained) {
        drained.malformed += 1;
        drained.malformation = Some(Malformation::Ring(position - self.position));
        self.advance_to(position);
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd().as_fd()
    }
}

#[cfg(test)]
mod tests;
