//! Reports execs.

use aya_ebpf::helpers::bpf_get_current_cgroup_id;
use aya_ebpf::helpers::generated::{
    bpf_get_current_comm, bpf_probe_read_kernel_str, bpf_probe_read_user, bpf_ringbuf_output,
};
use aya_ebpf::macros::{btf_tracepoint, map};
use aya_ebpf::maps::PerCpuArray;
use aya_ebpf::programs::BtfTracePointContext;
use aya_log_ebpf::debug;
use reaper_common::{ARGV_MAX, ExecRecord, FILENAME_MAX, MEMBER_CANDIDATE, RecordKind};

use crate::kill::{self, SIGKILL};
use crate::maps::{EVENTS, dropped, header, wake};
use crate::task::{Task, load, masked, offset, visible_number_at};
use crate::{member, path};

/// Size of the fixed part of the record.
const FIXED: usize = size_of::<ExecRecord>();
/// Byte offsets of `PIDTYPE_PGID` and `PIDTYPE_SID` (include/linux/pid_types.h) in the array of pointers.
const PGID: usize = 2 * 8;
const SID: usize = 3 * 8;

/// Buffer in which a record is assembled, because its parts have variable lengths.
#[repr(C)]
struct Scratch {
    fixed: ExecRecord,
    strings: [u8; FILENAME_MAX + path::ROOM + ARGV_MAX],
}

#[map]
static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// `TP_PROTO(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)`.
///
/// Fires after the other threads have exited and the caller has taken the leader's identity.
#[btf_tracepoint(function = "sched_process_exec")]
pub fn process_exec(ctx: BtfTracePointContext) -> i32 {
    report(&ctx, true)
}

/// The same for kernels without `bpf_loop`.
#[btf_tracepoint(function = "sched_process_exec")]
pub fn process_exec_bounded(ctx: BtfTracePointContext) -> i32 {
    report(&ctx, false)
}

/// Updates the membership of the process, kills it if its session is being killed, and writes the exec record.
/// `has_bpf_loop` as in [`crate::environment::of`].
#[inline(always)]
fn report(ctx: &BtfTracePointContext, has_bpf_loop: bool) -> i32 {
    // SAFETY: the arguments of the prototype above.
    let (task, bprm) = unsafe { (Task::from_argument(ctx.arg(0)), ctx.arg::<*const u8>(2)) };
    let key = task.key();
    if key.pid == 0 {
        return 0;
    }
    // SAFETY: typed loads from the tracepoint's argument.
    let (file, name): (*const u8, *const u8) = unsafe {
        let file: *const u8 = load(bprm, offset!(bprm_file));
        let dentry: *const u8 = load(file, offset!(file_path) + offset!(path_dentry));
        (file, load(dentry, offset!(dentry_name)))
    };
    let Some((member, environment)) = member::on_exec(task, &key, name, has_bpf_loop) else {
        return 0;
    };
    let killed = kill::kill_on_fork(task.as_ptr(), &member);
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: per-CPU memory of this map; a tracepoint program does not preempt itself.
    unsafe {
        let fixed = &raw mut (*scratch).fixed;
        let strings = (&raw mut (*scratch).strings).cast::<u8>();
        let filename_len = filename(bprm, strings);
        let (argv_len, argv_full_len) = argv(task, strings.add(filename_len));
        debug!(
            ctx,
            "exec: pid {}, {} of {} bytes of argv", key.pid, argv_len, argv_full_len
        );
        let (uid, euid) = task.uids();
        let signal = task.signal();
        fixed.write(ExecRecord {
            header: header(RecordKind::Exec, 0),
            process: key,
            parent: task.real_parent().key(),
            pidfd_inode: task.pidfd_inode(),
            cgroup_id: bpf_get_current_cgroup_id(),
            uid,
            euid,
            pgid: visible_number_at(signal, offset!(signal_pids) + PGID),
            sid: visible_number_at(signal, offset!(signal_pids) + SID),
            tty: terminal(signal),
            old_tid: ctx.arg(1),
            argv_full_len,
            argv_len,
            filename_len: filename_len as u16,
            exe_len: 0,
            exe_cut: 0,
            comm: [0; 16],
            member,
            signal: if killed { SIGKILL } else { 0 },
            environment,
        });
        bpf_get_current_comm((&raw mut (*fixed).comm).cast(), 16);
        // Last, because the verifier follows each exit of the walk separately to the end of the program.
        let before = filename_len + argv_len as usize;
        let (exe_len, exe_cut) = path::components(file, strings.add(before));
        let len = FIXED + before + exe_len;
        (*fixed).header.len = len as u32;
        (*fixed).exe_len = exe_len as u16;
        (*fixed).exe_cut = exe_cut.into();
        let ring = (&raw const EVENTS).cast_mut().cast();
        // Urgent for candidates: until the service has classified one, its exit has no consequences.
        let urgent = member.flags & MEMBER_CANDIDATE != 0;
        if bpf_ringbuf_output(ring, scratch.cast(), len as u64, wake(urgent)) != 0 {
            dropped(RecordKind::Exec);
        }
    }
    0
}

/// Copies the file name as passed to exec. Returns its length without NUL.
#[inline(always)]
unsafe fn filename(bprm: *const u8, out: *mut u8) -> usize {
    // SAFETY: `bprm` is the tracepoint's argument; `out` has at least FILENAME_MAX bytes.
    let n = unsafe {
        let name: *const u8 = load(bprm, offset!(bprm_filename));
        bpf_probe_read_kernel_str(out.cast(), FILENAME_MAX as u32, name.cast())
    };
    // The length includes the NUL. An error counts as an empty name.
    if n > 0 {
        masked::<{ FILENAME_MAX as i32 - 1 }>(n.cast_unsigned() - 1)
    } else {
        0
    }
}

/// Copies argv up to ARGV_MAX. Returns the number of copied bytes, 0 if argv cannot be read, and the full length.
#[inline(always)]
unsafe fn argv(task: Task, out: *mut u8) -> (u32, u32) {
    let mm: *const u8 = task.load(offset!(task_mm));
    // SAFETY: `mm` comes from a typed load.
    let (start, end): (u64, u64) = unsafe {
        (
            load(mm, offset!(mm_arg_start)),
            load(mm, offset!(mm_arg_end)),
        )
    };
    let full = end.wrapping_sub(start);
    let wanted = if full > ARGV_MAX as u64 {
        ARGV_MAX as u64
    } else {
        full
    };
    // SAFETY: the caller provides ARGV_MAX bytes at `out`; the helper checks the source.
    match unsafe { bpf_probe_read_user(out.cast(), wanted as u32, start as *const _) } {
        0 => (wanted as u32, full as u32),
        _ => (0, full as u32),
    }
}

/// Returns the device number of the controlling terminal, encoded as by `new_encode_dev` of include/linux/kdev_t.h; 0
/// without a terminal.
#[inline(always)]
unsafe fn terminal(signal: *const u8) -> u32 {
    // SAFETY: typed loads; a load through a null pointer returns 0.
    let (major, minor): (u32, u32) = unsafe {
        let tty: *const u8 = load(signal, offset!(signal_tty));
        if tty.is_null() {
            return 0;
        }
        let driver: *const u8 = load(tty, offset!(tty_driver));
        let first: u32 = load(driver, offset!(driver_minor_start));
        (
            load(driver, offset!(driver_major)),
            first + load::<u32>(tty, offset!(tty_index)),
        )
    };
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
