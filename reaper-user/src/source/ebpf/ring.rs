//! Reading the ring: up to where it is known to stand, and giving room back only when all that followed
//! from the records there has been seen to.
//!
//! Where the reader stands is kept in the ring itself. A service that is killed leaves what it had not
//! given back for the next one, which reads it again: events come at least once.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use aya::maps::MapData;

use super::{Drained, SourceError, record};
use crate::model::event::Event;
use crate::source::Flaw;
use crate::sys::{Record, RingMemory};

/// Looks at a record that is still being written before the thread sleeps.
const SPINS: u32 = 4096;

/// The ring's reader. There is one.
pub struct Ring {
    map: MapData,
    memory: Arc<RingMemory>,
    /// Up to where records have been handed over, in bytes since the ring was made.
    read: u64,
}

/// Gives room in the ring back, from any thread.
#[derive(Clone)]
pub struct Release(Arc<RingMemory>);

impl Release {
    /// What was read up to a position is not needed any more.
    pub fn up_to(&self, position: u64) {
        self.0.release(position);
    }
}

impl Ring {
    pub(super) fn new(map: MapData) -> Result<Ring, SourceError> {
        let size = map.info().map_err(SourceError::map)?.max_entries();
        let memory = RingMemory::map(map.fd().as_fd(), size);
        let memory = memory.map_err(|e| SourceError::Map(e.into()))?;
        Ok(Ring {
            map,
            read: memory.consumed(),
            memory: Arc::new(memory),
        })
    }

    /// Bytes in the ring.
    pub fn size(&self) -> u64 {
        self.memory.size()
    }

    /// Up to where records have been handed over.
    pub fn position(&self) -> u64 {
        self.read
    }

    /// Bytes that have been handed over and not been given back.
    pub fn held(&self) -> u64 {
        self.read.saturating_sub(self.memory.consumed())
    }

    /// Bytes that wait to be read.
    pub fn waiting(&self) -> u64 {
        self.produced().saturating_sub(self.read)
    }

    pub fn release(&self) -> Release {
        Release(Arc::clone(&self.memory))
    }

    /// How far probes have reserved room, in bytes since the ring was made. Whatever happened before
    /// this call is in the ring before this position.
    pub(super) fn produced(&self) -> u64 {
        self.memory.produced()
    }

    /// Hands over the records before a position, in order, waiting for those still being written:
    /// a probe takes well under a microsecond between reserving room and committing.
    pub(super) fn drain_until(&mut self, position: u64, mut sink: impl FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        let mut spins = 0_u32;
        while position.wrapping_sub(self.read).cast_signed() > 0 {
            let (bytes, next) = match self.memory.record(self.read) {
                Record::Written { bytes, next } => (bytes, next),
                Record::Discarded { next } => {
                    self.read = next;
                    continue;
                }
                Record::BeingWritten => {
                    // It may be this thread that keeps the probe from the processor.
                    spins += 1;
                    if spins.is_multiple_of(SPINS) {
                        std::thread::sleep(Duration::from_micros(50));
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
                    drained.flaw = Some(Flaw::Record(defect));
                }
            }
            self.read = next;
        }
        drained
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd().as_fd()
    }
}
