//! Checks whether a program was started with `REAPER_KEEP=1`.
//!
//! Done at exec, because a program can overwrite its environment as soon as it runs (`setproctitle(3)`). Then /proc no
//! longer shows the marker, and the service would signal the process.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user_str};
use aya_ebpf::macros::map;
use aya_ebpf::maps::PerCpuArray;
use reaper_common::{ENVIRONMENT_KEEP, ENVIRONMENT_UNMARKED, ENVIRONMENT_UNREAD, KEEP_MARKER};

use crate::task::{Task, load, offset};

/// Maximum number of variables that are checked, with `bpf_loop` (Linux 5.17) and without. The service reads the
/// environment if there are more.
const VARIABLES: u32 = 1024;
const VARIABLES_BOUNDED: u32 = 64;
/// Maximum length of a variable, with its NUL. The service reads the environment if one is longer.
const VARIABLE_MAX: usize = 4096;

#[repr(C, align(8))]
struct Variable([u8; VARIABLE_MAX]);

#[map]
static VARIABLE: PerCpuArray<Variable> = PerCpuArray::with_max_entries(1, 0);

/// State of the walk over the variables.
#[repr(C)]
struct Walk {
    at: u64,
    end: u64,
    /// Result `ENVIRONMENT_*`.
    found: u32,
}

unsafe extern "C" fn each_variable(_: u32, walk: *mut Walk) -> i64 {
    // SAFETY: `of` passes its own walk, to which nothing else has access meanwhile.
    unsafe { &mut *walk }.step().into()
}

impl Walk {
    /// Checks one variable. Returns whether the walk has ended.
    #[inline(always)]
    fn step(&mut self) -> bool {
        if self.at >= self.end {
            self.found = ENVIRONMENT_UNMARKED;
            return true;
        }
        let Some(variable) = VARIABLE.get_ptr_mut(0) else {
            return true;
        };
        // SAFETY: per-CPU memory of this map with that size; the helper checks the source.
        let len = unsafe {
            bpf_probe_read_user_str(variable.cast(), VARIABLE_MAX as u32, self.at as *const _)
        };
        if len <= 0 || len >= VARIABLE_MAX as i64 {
            return true;
        }
        if len == KEEP_MARKER.len() as i64 && is_keep_marker(variable) {
            self.found = ENVIRONMENT_KEEP;
            return true;
        }
        self.at += len as u64;
        false
    }
}

/// Searches the environment of a task for [`KEEP_MARKER`] at exec. Returns `ENVIRONMENT_*`. `has_bpf_loop` says whether the
/// kernel has `bpf_loop`, so that [`VARIABLES`] variables can be checked and not only [`VARIABLES_BOUNDED`].
#[inline(always)]
pub fn of(task: Task, has_bpf_loop: bool) -> u32 {
    let mm: *const u8 = task.load(offset!(task_mm));
    // SAFETY: `mm` comes from a typed load.
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
    if has_bpf_loop {
        // SAFETY: `each_variable` takes this argument and uses it only during the call.
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

/// Returns whether a variable as long as [`KEEP_MARKER`] is equal to it.
#[inline(always)]
fn is_keep_marker(variable: *const Variable) -> bool {
    const MARK: &[u8; 14] = KEEP_MARKER;
    const FIRST: u64 = u64::from_ne_bytes(*MARK.first_chunk().unwrap());
    const LAST: u64 = u64::from_ne_bytes(*MARK.last_chunk().unwrap());
    // The two words overlap.
    let last = MARK.len() - size_of::<u64>();
    // SAFETY: within the memory of the map.
    unsafe {
        let variable: *const u8 = variable.cast();
        core::ptr::read_volatile(variable.cast::<u64>()) == FIRST
            && core::ptr::read_unaligned(variable.add(last).cast::<u64>()) == LAST
    }
}
