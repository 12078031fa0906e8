//! Shared memory, and giving memory back.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use reaper_common::{Offsets, Settings};

/// Bytes in a page.
pub fn page_size() -> u64 {
    // SAFETY: no memory is involved.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// The memory of a BPF ring, as kernel/bpf/ringbuf.c lays it out: a page with the reader's position, a page
/// with the writers', and the data, mapped twice in a row so that no record is broken at the end.
pub struct RingMemory {
    consumer: NonNull<AtomicU64>,
    producer: NonNull<AtomicU64>,
    page: usize,
    /// Bytes of data, a power of two.
    size: usize,
}

// SAFETY: the mappings belong to this value; positions are read and written as atomics, and the data only
// read, where the kernel has said that it is done with it.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

/// What stands at a position of the ring.
pub enum RingRecord<'a> {
    /// A record, and where the next one begins.
    Written { bytes: &'a [u8], next: u64 },
    /// Room that was given back unused.
    Discarded { next: u64 },
    /// The kernel is not done with it, or has not begun.
    BeingWritten,
}

/// `BPF_RINGBUF_BUSY_BIT`, `BPF_RINGBUF_DISCARD_BIT` and `BPF_RINGBUF_HDR_SZ` of include/uapi/linux/bpf.h.
const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER: u64 = 8;

impl RingMemory {
    /// Maps a ring of so many bytes of data.
    ///
    /// # Errors
    /// As `mmap(2)`; `EINVAL` for a size that no ring has.
    pub fn map(ring: BorrowedFd<'_>, size: u32) -> nix::Result<RingMemory> {
        let (page, size) = (page_size() as usize, size as usize);
        let lengths = NonZeroUsize::new(page).zip(NonZeroUsize::new(page + 2 * size));
        let (Some((first, rest)), true) = (lengths, size.is_power_of_two()) else {
            return Err(nix::Error::EINVAL);
        };
        let map = |length, prot, offset| {
            // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
            unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, ring, offset) }
        };
        let consumer = map(first, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, 0)?;
        match map(rest, ProtFlags::PROT_READ, page as i64) {
            Ok(producer) => Ok(RingMemory {
                consumer: consumer.cast(),
                producer: producer.cast(),
                page,
                size,
            }),
            Err(error) => {
                // SAFETY: mapped above, and nothing refers to it.
                let _ = unsafe { munmap(consumer, page) };
                Err(error)
            }
        }
    }

    /// Bytes of data.
    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// Bytes that the reader has given back since the ring was made.
    pub fn consumed(&self) -> u64 {
        // SAFETY: mapped for as long as this value lives; page-aligned.
        unsafe { self.consumer.as_ref() }.load(Ordering::Acquire)
    }

    /// Bytes that were reserved since the ring was made.
    pub fn produced(&self) -> u64 {
        // SAFETY: as above; the kernel writes it as a word.
        unsafe { self.producer.as_ref() }.load(Ordering::Acquire)
    }

    /// Gives back what was read up to a position; never less than before.
    pub fn release(&self, position: u64) {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }.fetch_max(position, Ordering::AcqRel);
    }

    /// What stands at a position between those given back and reserved.
    pub fn record(&self, position: u64) -> RingRecord<'_> {
        let at = self.page + (position as usize & (self.size - 1));
        // SAFETY: within the mapping, whose data begins behind the producer's page; records are aligned to
        // eight bytes, and the kernel writes the word.
        let word = unsafe {
            self.producer
                .cast::<u8>()
                .add(at)
                .cast::<AtomicU32>()
                .as_ref()
        };
        let word = word.load(Ordering::Acquire);
        // Set before the position that says that there is a record.
        if word & BUSY != 0 {
            return RingRecord::BeingWritten;
        }
        let length = u64::from(word & !DISCARDED);
        let next = position + (length + HEADER).next_multiple_of(HEADER);
        if word & DISCARDED != 0 {
            return RingRecord::Discarded { next };
        }
        // No record is longer than the data, so that a number that is none leads nowhere else.
        let length = (length as usize).min(self.size - HEADER as usize);
        // SAFETY: the record's bytes, which lie in one piece since the data is mapped twice; the kernel has
        // committed them and does not write there before the reader has given them back.
        let bytes = unsafe {
            let start = self.producer.cast::<u8>().add(at + HEADER as usize);
            std::slice::from_raw_parts(start.as_ptr(), length)
        };
        RingRecord::Written { bytes, next }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with these lengths, and nothing borrows from them any more.
        unsafe {
            let _ = munmap(self.consumer.cast(), self.page);
            let _ = munmap(self.producer.cast(), self.page + 2 * self.size);
        }
    }
}

/// A BPF array of words that is shared with the probes (`BPF_F_MMAPABLE`).
pub struct Counters {
    first: NonNull<AtomicU64>,
    slots: usize,
}

// SAFETY: the mapping belongs to this value and is used through atomics only.
unsafe impl Send for Counters {}

impl Counters {
    /// Maps an array of so many words.
    ///
    /// # Errors
    /// As `mmap(2)`; `EINVAL` for no words at all.
    pub fn map(array: BorrowedFd<'_>, slots: u32) -> nix::Result<Counters> {
        let slots = slots as usize;
        let length = NonZeroUsize::new(slots * size_of::<u64>()).ok_or(nix::Error::EINVAL)?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let first = unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, array, 0)? };
        Ok(Counters {
            first: first.cast(),
            slots,
        })
    }

    /// Adds to a word, around zero; what lies beyond the array is left alone.
    pub fn add(&self, slot: u32, n: i64) {
        if (slot as usize) < self.slots {
            // SAFETY: within the mapping, which is aligned to a page; the probes add atomically too.
            let word = unsafe { self.first.add(slot as usize).as_ref() };
            word.fetch_add(n.cast_unsigned(), Ordering::AcqRel);
        }
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.first.cast(), self.slots * size_of::<u64>()) };
    }
}

/// A structure of plain integers without hidden padding, whose bytes may be looked at.
///
/// # Safety
/// No padding, no pointers.
pub unsafe trait Plain {}
// SAFETY: `repr(C)`, nothing but u32.
unsafe impl Plain for Offsets {}
// SAFETY: `repr(C)`, four u32 around a u64 at a multiple of eight.
unsafe impl Plain for Settings {}

/// The bytes of a structure as the probes see them.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: the trait promises that each byte is initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Has large pieces of memory come from the system and go back there, each on its own, whatever was
/// freed before. Otherwise the allocator learns from the first ones, which are only needed to load the
/// probes, to keep such pieces for good.
pub fn fix_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator's.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10)
    };
}

/// Gives freed memory back to the system: loading the probes needs far more than running them.
pub fn trim() {
    // SAFETY: takes no memory that is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Whether anything of this host's memory is swapped out now (`sysinfo(2)`).
pub fn is_swap_used() -> bool {
    nix::sys::sysinfo::sysinfo().is_ok_and(|info| info.swap_free() < info.swap_total())
}
