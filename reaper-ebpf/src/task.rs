//! The only reads of `task_struct` and what hangs off it.
//!
//! Two ways to read: [`Task::load`] is a plain load, for pointers whose type the verifier knows (a
//! tracepoint's argument and what is reached from it); [`read`] copies, for all others. Both answer 0
//! where the memory is not there.

use aya_ebpf::helpers::generated::{bpf_get_current_task, bpf_probe_read_kernel};
use reaper_common::{ABSENT, RawKey};

use crate::maps::{constant, level, set_level};

/// Offset of a member, as a constant to the verifier.
macro_rules! offset {
    ($member:ident) => {
        {
            let offset: u32 = crate::maps::constant!(OFFSETS: Offsets.$member);
            offset as usize
        }
    };
}
pub(crate) use offset;

/// Copies a value from kernel memory; 0 where it cannot be read.
#[inline(always)]
pub fn read<T: Copy>(base: *const u8, offset: usize) -> T {
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the helper checks the source; the destination is a local of that size, which it fills with
    // zeros where it fails. Plain integers and pointers, for which zero is a value.
    unsafe {
        bpf_probe_read_kernel(
            value.as_mut_ptr().cast(),
            size_of::<T>() as u32,
            base.wrapping_add(offset).cast(),
        );
        value.assume_init()
    }
}

/// Cuts a number to the bits of `MASK`, in a way that the compiler cannot take out for knowing better:
/// older verifiers lose a bound when a value is kept on the stack or copied before it is compared.
#[inline(always)]
pub fn masked<const MASK: i32>(mut value: u64) -> usize {
    // SAFETY: arithmetic on a register.
    unsafe { core::arch::asm!("{0} &= {1}", inout(reg) value, const MASK) };
    value as usize
}

/// Loads through a pointer that the verifier has typed.
///
/// # Safety
/// `base` came from a tracepoint's argument by way of such loads alone; the verifier refuses others.
#[inline(always)]
pub unsafe fn load<T: Copy>(base: *const u8, offset: usize) -> T {
    // SAFETY: the verifier has checked the type and turned the load into one that cannot fault.
    unsafe { core::ptr::read_volatile(base.wrapping_add(offset).cast()) }
}

/// The service's pid namespace, 0 for the first one.
#[inline(always)]
fn namespace() -> u32 {
    constant!(SETTINGS: Settings.pid_namespace)
}

/// A `task_struct` the verifier knows the type of: a thread, standing for its process.
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

    /// Loads a member.
    #[inline(always)]
    pub fn load<T: Copy>(self, offset: usize) -> T {
        // SAFETY: the invariant of `Task`.
        unsafe { load(self.0, offset) }
    }

    #[inline(always)]
    fn leader(self) -> Task {
        Task(self.load(offset!(task_group_leader)))
    }

    /// The thread that is parent to this task's process.
    #[inline(always)]
    pub fn real_parent(self) -> Task {
        Task(self.load(offset!(task_real_parent)))
    }

    #[inline(always)]
    pub fn signal(self) -> *const u8 {
        self.load(offset!(task_signal))
    }

    /// Whether it leads its thread group, as the only thread of a new process does.
    #[inline(always)]
    pub fn is_leader(self) -> bool {
        self.load::<u32>(offset!(task_pid)) == self.load::<u32>(offset!(task_tgid))
    }

    /// Identity of the process, with pid 0 if the service cannot see it.
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

    /// Real and effective user id, as the first user namespace has them; `u32::MAX`, which nobody has,
    /// where they cannot be told.
    #[inline(always)]
    pub fn uids(self) -> (u32, u32) {
        let cred: *const u8 = self.load(offset!(task_cred));
        // Where the kernel's type information carries `__rcu`, the verifier asks for this.
        if cred.is_null() {
            return (u32::MAX, u32::MAX);
        }
        // SAFETY: reached by a typed load.
        unsafe {
            (
                load(cred, offset!(cred_uid)),
                load(cred, offset!(cred_euid)),
            )
        }
    }

    /// Inode number of the process's pidfds, 0 where the kernel keeps none.
    #[inline(always)]
    pub fn pidfd_inode(self) -> u64 {
        if offset!(pid_ino) == ABSENT as usize {
            return 0;
        }
        let pid: *const u8 = self.leader().load(offset!(task_thread_pid));
        // SAFETY: reached by typed loads.
        unsafe { load(pid, offset!(pid_ino)) }
    }

    /// Whether the process is the init of a pid namespace below the first one.
    #[inline(always)]
    pub fn is_namespace_init(self) -> bool {
        let pid: *const u8 = self.load(offset!(task_thread_pid));
        // SAFETY: reached by a typed load.
        let level: u32 = unsafe { load(pid, offset!(pid_level)) };
        if level == 0 {
            return false;
        }
        // Copied this time: the verifier lets nobody add what it does not know to a typed pointer.
        let pid: *const u8 = read(self.0, offset!(task_thread_pid));
        read::<u32>(upid(pid, level), offset!(upid_nr)) == 1
    }
}

/// The `upid` of a `struct pid` at a level of nesting.
#[inline(always)]
pub fn upid(pid: *const u8, level: u32) -> *const u8 {
    pid.wrapping_add(offset!(pid_numbers) + level as usize * offset!(upid_size))
}

/// The number of a `struct pid` as the service's namespace has it, 0 if it is not seen from there.
#[inline(never)]
pub fn visible_number(pid: *const u8) -> u32 {
    let wanted = namespace();
    if wanted == 0 {
        return read(pid, offset!(pid_numbers) + offset!(upid_nr));
    }
    // Not searched for: older verifiers take minutes for a loop in here.
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

/// Notes how deep the pid namespace of the current process lies, which has to be the service itself.
#[inline(always)]
pub fn note_level() {
    if namespace() != 0 {
        // SAFETY: a plain helper.
        let current = unsafe { bpf_get_current_task() } as *const u8;
        let pid: *const u8 = read(current, offset!(task_thread_pid));
        set_level(read(pid, offset!(pid_level)));
    }
}

/// The same of a `struct pid` whose address is at an offset from a typed pointer.
///
/// # Safety
/// As [`load`].
#[inline(always)]
pub unsafe fn visible_number_at(base: *const u8, offset: usize) -> u32 {
    if namespace() == 0 {
        // SAFETY: as the caller promises.
        let pid: *const u8 = unsafe { load(base, offset) };
        read(pid, offset!(pid_numbers) + offset!(upid_nr))
    } else {
        visible_number(read(base, offset))
    }
}

/// Identity of the process of a task that is reached by copying.
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
