//! Shared memory, and giving memory back.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use reaper_common::{Offsets, Settings};

/// Bytes in a page.
pub fn page_size() -> u64 {
    // SAFETY: no memory is involved.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// A position of a BPF ring, at the start of one of its first two pages.
pub struct Position(NonNull<AtomicU64>);

// SAFETY: the mapping belongs to this value and is only read, atomically.
unsafe impl Send for Position {}

impl Position {
    /// Maps a page of the ring for reading.
    ///
    /// # Errors
    /// As `mmap(2)`.
    pub fn map(ring: BorrowedFd<'_>, page: i64) -> nix::Result<Position> {
        let size = page_size();
        let length = NonZeroUsize::new(size as usize).ok_or(nix::Error::EINVAL)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ,
                MapFlags::MAP_SHARED,
                ring,
                page * size.cast_signed(),
            )?
        };
        Ok(Position(address.cast()))
    }

    /// Bytes since the ring was made.
    pub fn load(&self) -> u64 {
        // SAFETY: mapped for as long as this value lives; page-aligned; the kernel writes it as a word.
        unsafe { self.0.as_ref() }.load(Ordering::Acquire)
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.0.cast(), page_size() as usize) };
    }
}

/// A structure of plain integers without hidden padding, whose bytes may be looked at.
///
/// # Safety
/// No padding, no pointers.
pub unsafe trait Plain {}
// SAFETY: `repr(C)`, nothing but u32.
unsafe impl Plain for Offsets {}
// SAFETY: `repr(C)`, u32, u32, u64.
unsafe impl Plain for Settings {}

/// The bytes of a structure as the probes see them.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: the trait promises that each byte is initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Has large pieces of memory come from the system and go back there, each on its own, whatever was
/// freed before. Otherwise the allocator learns from the first ones, which are only needed to load the
/// probes, to keep such pieces for good.
pub fn keep_little() {
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
