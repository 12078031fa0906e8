//! Giving memory back: the allocator of this system does so by itself.

/// Nothing has to be said.
pub fn fix_mmap_threshold() {}

/// Nothing has to be done.
pub fn trim() {}

/// Whether anything of this host's memory is swapped out now: it is not read apart, what a process has compressed or
/// swapped out is part of its footprint.
pub fn is_swap_used() -> bool {
    false
}
