//! Memory shared with the probes, and settings of the allocator.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use reaper_common::{Offsets, Settings};

/// Returns the page size in bytes.
pub fn page_size() -> u64 {
    // SAFETY: no memory is involved.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// The memory of a BPF ring buffer, in the layout of kernel/bpf/ringbuf.c. One page has the consumer position and one
/// the producer position. The data follows, mapped twice in a row, so that each record is contiguous.
pub struct RingMemory {
    consumer: NonNull<AtomicU64>,
    producer: NonNull<AtomicU64>,
    page: usize,
    /// Size of the data in bytes, a power of two.
    size: usize,
}

// SAFETY: this value owns the mappings. Positions are accessed as atomics. The data is only read, and only where the
// kernel has committed it.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

/// Content of the ring at a position.
pub enum RingRecord<'a> {
    /// A committed record.
    Written {
        /// Content without the header of the ring.
        bytes: &'a [u8],
        /// Position of the next record.
        next: u64,
    },
    /// Space that was discarded by its writer.
    Discarded {
        /// Position of the next record.
        next: u64,
    },
    /// A record that is not committed yet.
    BeingWritten,
}

/// `BPF_RINGBUF_BUSY_BIT`, `BPF_RINGBUF_DISCARD_BIT` and `BPF_RINGBUF_HDR_SZ` of include/uapi/linux/bpf.h.
const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER: u64 = 8;

impl RingMemory {
    /// Maps a ring with `size` bytes of data.
    ///
    /// # Errors
    /// As `mmap(2)`; `EINVAL` if no ring can have this size.
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

    /// Returns the size of the data in bytes.
    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// Returns the consumer position: the number of bytes released since the ring was created.
    pub fn consumed(&self) -> u64 {
        // SAFETY: mapped for as long as this value lives; page-aligned.
        unsafe { self.consumer.as_ref() }.load(Ordering::Acquire)
    }

    /// Returns the producer position: the number of bytes reserved since the ring was created.
    pub fn produced(&self) -> u64 {
        // SAFETY: as above; the kernel writes it as a word.
        unsafe { self.producer.as_ref() }.load(Ordering::Acquire)
    }

    /// Releases the data before `position` for new records. Does nothing if more is released already.
    pub fn release(&self, position: u64) {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }.fetch_max(position, Ordering::AcqRel);
    }

    /// Returns the record that starts at `position`: at the consumer position, or where the record before ends.
    /// `position` must be below the producer position.
    pub fn record(&self, position: u64) -> RingRecord<'_> {
        let at = self.page + (position as usize & (self.size - 1));
        // SAFETY: within the mapping, whose data begins after the producer's page. Records are aligned to eight
        // bytes, and the kernel writes this word atomically.
        let word = unsafe {
            self.producer
                .cast::<u8>()
                .add(at)
                .cast::<AtomicU32>()
                .as_ref()
        };
        let word = word.load(Ordering::Acquire);
        // The kernel sets the busy bit before it advances the producer position past the record.
        if word & BUSY != 0 {
            return RingRecord::BeingWritten;
        }
        let length = u64::from(word & !DISCARDED);
        let next = position + (length + HEADER).next_multiple_of(HEADER);
        if word & DISCARDED != 0 {
            return RingRecord::Discarded { next };
        }
        // No record is longer than the data. The limit keeps a corrupt length from leading outside of the mapping.
        let length = (length as usize).min(self.size - HEADER as usize);
        // SAFETY: the bytes of the record, contiguous because the data is mapped twice. The kernel has committed them
        // and does not write there before they are released.
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

/// A BPF array of 64-bit counters, shared with the probes (`BPF_F_MMAPABLE`).
pub struct Counters {
    first: NonNull<AtomicU64>,
    slots: usize,
}

// SAFETY: this value owns the mapping and uses it only through atomics.
unsafe impl Send for Counters {}

impl Counters {
    /// Maps an array of `slots` counters.
    ///
    /// # Errors
    /// As `mmap(2)`; `EINVAL` if `slots` is 0.
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

    /// Adds `n`, which can be negative, to a counter, wrapping around. Ignores a slot beyond the array.
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

/// A structure whose bytes can be viewed.
///
/// # Safety
/// It has no padding and no pointers.
pub unsafe trait Plain {}
// SAFETY: `repr(C)`, only u32 fields.
unsafe impl Plain for Offsets {}
// SAFETY: `repr(C)`, four u32 around a u64 at an offset divisible by eight.
unsafe impl Plain for Settings {}

/// Returns the bytes of a structure, as the probes see them.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: the trait promises that each byte is initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Fixes at 128 KiB the size from which an allocation gets its own mapping, which is unmapped when it is freed. Does
/// nothing without glibc.
///
/// By default the allocator raises that size after the large allocations for loading the probes, and then never
/// returns such memory to the system.
pub fn fix_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    // SAFETY: only sets a parameter of the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10)
    };
}

/// Returns freed memory to the system, because loading the probes needs far more memory than running them. Does nothing
/// without glibc.
pub fn trim() {
    // SAFETY: releases only unused memory.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Returns whether this host currently has memory swapped out (`sysinfo(2)`).
pub fn is_swap_used() -> bool {
    nix::sys::sysinfo::sysinfo().is_ok_and(|info| info.swap_free() < info.swap_total())
}
