//! Lists all living processes, with data that /proc does not have: start times in ns, and pidfd inodes.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_seq_write;
use reaper_common::{PROCESS_NAMESPACE_INIT, TableRow};

use crate::task::{Task, load, note_level, offset};

/// Context of an `iter/task` program: `struct bpf_iter__task` of kernel/bpf/task_iter.c.
#[repr(C)]
struct Context {
    /// `struct bpf_iter_meta`. Its first field is the output file.
    meta: *const u8,
    /// Null in the last call.
    task: *const u8,
}

/// Writes a [`TableRow`] for a living process.
#[unsafe(link_section = "iter/task")]
#[unsafe(no_mangle)]
pub extern "C" fn process_table(ctx: *const c_void) -> i32 {
    let ctx = ctx.cast::<Context>();
    // SAFETY: the context of this type of program; the verifier knows its fields.
    let (meta, task) = unsafe {
        (
            core::ptr::read_volatile(&raw const (*ctx).meta),
            core::ptr::read_volatile(&raw const (*ctx).task),
        )
    };
    if task.is_null() {
        return 0;
    }
    note_level();
    // SAFETY: typed by the verifier, like a tracepoint's argument.
    let task = unsafe { Task::from_argument(task) };
    // SAFETY: comes from a typed load.
    let live: u32 = unsafe { load(task.signal(), offset!(signal_live)) };
    if !task.is_leader() || live == 0 {
        return 0;
    }
    let process = task.key();
    if process.pid == 0 {
        return 0;
    }
    let row = TableRow {
        process,
        parent: task.real_parent().key(),
        pidfd_inode: task.pidfd_inode(),
        flags: if task.is_namespace_init() {
            PROCESS_NAMESPACE_INIT
        } else {
            0
        },
        _pad: 0,
    };
    // SAFETY: the file comes from the program's context; the row is a local of that size.
    unsafe {
        let seq: *mut c_void = load(meta, 0);
        bpf_seq_write(
            seq.cast(),
            (&raw const row).cast_mut().cast(),
            size_of::<TableRow>() as u32,
        );
    }
    0
}
