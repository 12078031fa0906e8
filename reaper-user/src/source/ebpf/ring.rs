//! Reading the ring, up to where it is known to stand.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use aya::maps::{MapData, RingBuf};

use super::{Drained, SourceError, record};
use crate::model::event::Event;
use crate::sys::Position;

/// Looks at a record that is still being written before the thread sleeps.
const SPINS: u32 = 4096;

/// The ring's reader. There is one.
pub struct Ring {
    ring: RingBuf<MapData>,
    consumed: Position,
    produced: Position,
}

impl Ring {
    pub(super) fn new(ring: RingBuf<MapData>) -> Result<Ring, SourceError> {
        // kernel/bpf/ringbuf.c: the consumer's position is at the start of the first page, the
        // producer's at the start of the second.
        let page = |n| Position::map(ring.as_fd(), n).map_err(|e| SourceError::Map(e.into()));
        Ok(Ring {
            consumed: page(0)?,
            produced: page(1)?,
            ring,
        })
    }

    /// How far probes have reserved room, in bytes since the ring was made. Whatever happened before
    /// this call is in the ring before this position.
    pub(super) fn produced(&self) -> u64 {
        self.produced.load()
    }

    /// Hands over the records before a position, in order, waiting for those still being written:
    /// a probe takes well under a microsecond between reserving room and committing.
    pub(super) fn drain_until(&mut self, position: u64, mut sink: impl FnMut(Event)) -> Drained {
        let mut drained = Drained::default();
        let mut spins = 0_u32;
        while position.wrapping_sub(self.consumed.load()).cast_signed() > 0 {
            let Some(item) = self.ring.next() else {
                // It may be this thread that keeps the probe from the processor.
                spins += 1;
                if spins.is_multiple_of(SPINS) {
                    std::thread::sleep(Duration::from_micros(50));
                }
                std::hint::spin_loop();
                continue;
            };
            drained.records += 1;
            match record::event(&item) {
                Ok((event, lost)) => {
                    drained.lost = drained.lost.max(lost);
                    sink(event);
                }
                Err(defect) => {
                    drained.malformed += 1;
                    drained.defect = Some(defect);
                }
            }
        }
        drained
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}
