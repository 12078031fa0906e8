//! Counts the allocations of a thread, for tests of code that must not allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system allocator does all the work. Counting does not allocate: the counter is const-initialized and
// has no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller guarantees what `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees what `System` requires.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Returns the number of allocations that `work` makes in this thread.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn allocations_of_a_closure_are_counted() {
    let mut kept = Vec::new();
    assert_eq!(allocations(|| kept.push(Box::new(1))), 2);
    assert_eq!(allocations(|| kept.clear()), 0);
}
