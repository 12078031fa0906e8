//! Settings of the allocator, which needs none on macOS.

/// Does nothing on macOS.
pub fn fix_mmap_threshold() {}

/// Does nothing: the allocator returns freed memory by itself.
pub fn trim() {}

/// Returns false: swap is not read separately on macOS. The footprint of a process includes swapped memory.
pub fn is_swap_used() -> bool {
    false
}
