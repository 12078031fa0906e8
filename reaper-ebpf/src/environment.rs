//! Whether a program was started with `REAPER_KEEP=1`. Read at exec, since a program may overwrite its environment as
//! soon as it runs (`setproctitle(3)`): /proc shows the marker no more, and the process would be signalled.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user_str};
use aya_ebpf::macros::map;
use aya_ebpf::maps::PerCpuArray;
use reaper_common::{ENVIRONMENT_KEEP, ENVIRONMENT_UNMARKED, ENVIRONMENT_UNREAD, KEEP_MARKER};

use crate::task::{Task, load, offset};

/// Variables that are gone through where the kernel has `bpf_loop` (5.17), and where it has not; where there are more,
/// the service reads them.
const VARIABLES: u32 = 1024;
const VARIABLES_BOUNDED: u32 = 64;
/// Longest variable, with its NUL; so for what is longer.
const VARIABLE_MAX: usize = 4096;

#[repr(C, align(8))]
struct Variable([u8; VARIABLE_MAX]);

#[map]
static VARIABLE: PerCpuArray<Variable> = PerCpuArray::with_max_entries(1, 0);

/// A walk over the variables.
#[repr(C)]
struct Walk {
    at: u64,
    end: u64,
    /// An `ENVIRONMENT_*`.
    found: u32,
}

unsafe extern "C" fn each_variable(_: u32, walk: *mut Walk) -> i64 {
    // SAFETY: `of` hands over its own walk, and nobody else has it meanwhile.
    unsafe { &mut *walk }.step().into()
}

impl Walk {
    /// One variable; true when the walk is over.
    #[inline(always)]
    fn step(&mut self) -> bool {
        if self.at >= self.end {
            self.found = ENVIRONMENT_UNMARKED;
            return true;
        }
        let Some(variable) = VARIABLE.get_ptr_mut(0) else {
            return true;
        };
        // SAFETY: per-CPU memory of this map of that size; the helper checks the source.
        let len = unsafe {
            bpf_probe_read_user_str(variable.cast(), VARIABLE_MAX as u32, self.at as *const _)
        };
        if len <= 0 || len >= VARIABLE_MAX as i64 {
            return true;
        }
        if len == KEEP_MARKER.len() as i64 && is_keep_mark(variable) {
            self.found = ENVIRONMENT_KEEP;
            return true;
        }
        self.at += len as u64;
        false
    }
}

/// Looks through the environment of a task that has just run another program: an `ENVIRONMENT_*`. For `all` see
/// [`VARIABLES`].
#[inline(always)]
pub fn of(task: Task, all: bool) -> u32 {
    let mm: *const u8 = task.load(offset!(task_mm));
    // SAFETY: `mm` was reached by a typed load.
    let mut walk = unsafe {
        Walk {
            at: load(mm, offset!(mm_env_start)),
            end: load(mm, offset!(mm_env_end)),
            found: ENVIRONMENT_UNREAD,
        }
    };
    if walk.at == 0 {
        return ENVIRONMENT_UNREAD;
    }
    if all {
        // SAFETY: `each_variable` takes what is handed over here, for no longer than the call.
        unsafe {
            bpf_loop(
                VARIABLES,
                each_variable as *mut c_void,
                (&raw mut walk).cast(),
                0,
            );
        }
    } else {
        let _over = (0..VARIABLES_BOUNDED).any(|_| walk.step());
    }
    walk.found
}

#[inline(always)]
fn is_keep_mark(variable: *const Variable) -> bool {
    const MARK: &[u8; 14] = KEEP_MARKER;
    const FIRST: u64 = u64::from_ne_bytes(*MARK.first_chunk().unwrap());
    const LAST: u64 = u64::from_ne_bytes(*MARK.last_chunk().unwrap());
    // The words overlap.
    let last = MARK.len() - size_of::<u64>();
    // SAFETY: within the map's memory.
    unsafe {
        let variable: *const u8 = variable.cast();
        core::ptr::read_volatile(variable.cast::<u64>()) == FIRST
            && core::ptr::read_unaligned(variable.add(last).cast::<u64>()) == LAST
    }
}
