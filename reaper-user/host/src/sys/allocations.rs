//! How often a thread asks for memory: for tests of what is to do without.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all is left to the system's allocator. Counting asks for no memory: the counter is made with its thread, and has
// nothing to be dropped.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller has promised what this asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller has promised what this asks for.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// How often the work asks for memory in this thread.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn what_is_asked_for_is_counted() {
    let mut kept = Vec::new();
    assert_eq!(allocations(|| kept.push(Box::new(1))), 2);
    assert_eq!(allocations(|| kept.clear()), 0);
}
