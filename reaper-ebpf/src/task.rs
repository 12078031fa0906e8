//! Reads `task_struct` and the structures that it refers to, in one of two ways.
//!
//! [`Task::load`] is a plain load through a pointer whose type the verifier knows: a tracepoint's argument, or a pointer
//! loaded from it. [`read`] copies through any other pointer. Both return 0 if the memory cannot be read.

use aya_ebpf::helpers::generated::{bpf_get_current_task, bpf_probe_read_kernel};
use reaper_common::{ABSENT, RawKey};

use crate::maps::{constant, level, set_level};

/// Returns the offset of a field, as a constant for the verifier.
macro_rules! offset {
    ($member:ident) => {
        {
            let offset: u32 = crate::maps::constant!(OFFSETS: Offsets.$member);
            offset as usize
        }
    };
}
pub(crate) use offset;

/// Copies a value from kernel memory; 0 if it cannot be read.
#[inline(always)]
pub fn read<T: Copy>(base: *const u8, offset: usize) -> T {
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the helper checks the source. The destination is a local of that size, which it fills with zeros on
    // failure. `T` is an integer or a pointer, for which zero is valid.
    unsafe {
        bpf_probe_read_kernel(
            value.as_mut_ptr().cast(),
            size_of::<T>() as u32,
            base.wrapping_add(offset).cast(),
        );
        value.assume_init()
    }
}

/// Masks a number with `MASK`, in assembly so that the compiler cannot remove it. Older verifiers lose a bound when a
/// value is stored on the stack or copied before it is compared.
#[inline(always)]
pub fn masked<const MASK: i32>(mut value: u64) -> usize {
    // SAFETY: arithmetic on a register.
    unsafe { core::arch::asm!("{0} &= {1}", inout(reg) value, const MASK) };
    value as usize
}

/// Loads a value through a pointer typed by the verifier.
///
/// # Safety
/// `base` comes from a tracepoint's argument through such loads only. The verifier refuses others.
#[inline(always)]
pub unsafe fn load<T: Copy>(base: *const u8, offset: usize) -> T {
    // SAFETY: the verifier has checked the type and made the load one that cannot fault.
    unsafe { core::ptr::read_volatile(base.wrapping_add(offset).cast()) }
}

/// Returns the inode of the service's pid namespace, 0 for the initial one.
#[inline(always)]
fn namespace() -> u32 {
    constant!(SETTINGS: Settings.pid_namespace)
}

/// A `task_struct` pointer typed by the verifier: a thread, which stands for its process.
#[derive(Clone, Copy)]
pub struct Task(*const u8);

impl Task {
    /// # Safety
    /// `pointer` is a tracepoint's argument of type `struct task_struct *`.
    #[inline(always)]
    pub unsafe fn from_argument(pointer: *const u8) -> Task {
        Task(pointer)
    }

    #[inline(always)]
    pub fn as_ptr(self) -> *const u8 {
        self.0
    }

    #[inline(always)]
    pub fn load<T: Copy>(self, offset: usize) -> T {
        // SAFETY: the invariant of `Task`.
        unsafe { load(self.0, offset) }
    }

    #[inline(always)]
    fn leader(self) -> Task {
        Task(self.load(offset!(task_group_leader)))
    }

    /// Returns the parent of this task's process, as one of its threads.
    #[inline(always)]
    pub fn real_parent(self) -> Task {
        Task(self.load(offset!(task_real_parent)))
    }

    /// Returns the address of the process's `signal_struct`.
    #[inline(always)]
    pub fn signal(self) -> *const u8 {
        self.load(offset!(task_signal))
    }

    /// Returns whether it leads its thread group, like the only thread of a new process.
    #[inline(always)]
    pub fn is_leader(self) -> bool {
        self.load::<u32>(offset!(task_pid)) == self.load::<u32>(offset!(task_tgid))
    }

    /// Returns the identity of the process, with pid 0 if it is not visible to the service.
    #[inline(always)]
    pub fn key(self) -> RawKey {
        let leader = self.leader();
        let pid = if namespace() == 0 {
            self.load(offset!(task_tgid))
        } else {
            visible_number(read(leader.0, offset!(task_thread_pid)))
        };
        RawKey {
            pid,
            _pad: 0,
            start_ns: leader.load(offset!(task_start_boottime)),
        }
    }

    /// Returns the real and effective uid in the initial user namespace; `u32::MAX`, which is no valid uid, if unknown.
    #[inline(always)]
    pub fn uids(self) -> (u32, u32) {
        let cred: *const u8 = self.load(offset!(task_cred));
        // Required by the verifier if the kernel's type information includes `__rcu`.
        if cred.is_null() {
            return (u32::MAX, u32::MAX);
        }
        // SAFETY: comes from a typed load.
        unsafe {
            (
                load(cred, offset!(cred_uid)),
                load(cred, offset!(cred_euid)),
            )
        }
    }

    /// Returns the inode number of the process's pidfds, 0 if the kernel has none.
    #[inline(always)]
    pub fn pidfd_inode(self) -> u64 {
        if offset!(pid_ino) == ABSENT as usize {
            return 0;
        }
        let pid: *const u8 = self.leader().load(offset!(task_thread_pid));
        // SAFETY: comes from typed loads.
        unsafe { load(pid, offset!(pid_ino)) }
    }

    /// Returns whether the process is the init process of a pid namespace below the initial one.
    #[inline(always)]
    pub fn is_namespace_init(self) -> bool {
        let pid: *const u8 = self.load(offset!(task_thread_pid));
        // SAFETY: comes from a typed load.
        let level: u32 = unsafe { load(pid, offset!(pid_level)) };
        if level == 0 {
            return false;
        }
        // Copied here: the verifier does not allow adding a variable offset to a typed pointer.
        let pid: *const u8 = read(self.0, offset!(task_thread_pid));
        read::<u32>(upid(pid, level), offset!(upid_nr)) == 1
    }
}

/// Returns the `upid` of a `struct pid` at a nesting level.
#[inline(always)]
pub fn upid(pid: *const u8, level: u32) -> *const u8 {
    pid.wrapping_add(offset!(pid_numbers) + level as usize * offset!(upid_size))
}

/// Returns the pid of a `struct pid` in the service's namespace, 0 if it is not visible there.
#[inline(never)]
pub fn visible_number(pid: *const u8) -> u32 {
    let wanted = namespace();
    if wanted == 0 {
        return read(pid, offset!(pid_numbers) + offset!(upid_nr));
    }
    // Not searched for in a loop, for which older verifiers take minutes.
    let level = level();
    if read::<u32>(pid, offset!(pid_level)) < level {
        return 0;
    }
    let upid = upid(pid, level);
    let namespace: *const u8 = read(upid, offset!(upid_ns));
    if read::<u32>(namespace, offset!(namespace_inum)) == wanted {
        read(upid, offset!(upid_nr))
    } else {
        0
    }
}

/// Stores the nesting level of the current process's pid namespace. The current process must be the service.
#[inline(always)]
pub fn note_level() {
    if namespace() != 0 {
        // SAFETY: a plain helper.
        let current = unsafe { bpf_get_current_task() } as *const u8;
        let pid: *const u8 = read(current, offset!(task_thread_pid));
        set_level(read(pid, offset!(pid_level)));
    }
}

/// Like [`visible_number`], for a `struct pid` whose address is at an offset from a typed pointer.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
pub unsafe fn visible_number_at(base: *const u8, offset: usize) -> u32 {
    if namespace() == 0 {
        // SAFETY: guaranteed by the caller.
        let pid: *const u8 = unsafe { load(base, offset) };
        read(pid, offset!(pid_numbers) + offset!(upid_nr))
    } else {
        visible_number(read(base, offset))
    }
}

/// Returns the identity of the process of an untyped task.
#[inline(always)]
pub fn key_of(task: *const u8) -> RawKey {
    if task.is_null() {
        return RawKey {
            pid: 0,
            _pad: 0,
            start_ns: 0,
        };
    }
    let leader: *const u8 = read(task, offset!(task_group_leader));
    let pid = if namespace() == 0 {
        read(task, offset!(task_tgid))
    } else {
        visible_number(read(leader, offset!(task_thread_pid)))
    };
    RawKey {
        pid,
        _pad: 0,
        start_ns: read(leader, offset!(task_start_boottime)),
    }
}
