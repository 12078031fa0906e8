//! Signals sent by the probes: when a session is being killed (SIGKILL), or when its root exits (SIGTERM).
//!
//! Only to members that no rule can keep. Members that may be kept, be a boundary, or be below a possible boundary are
//! left to the service.

use aya_ebpf::helpers::generated::bpf_send_signal;
use reaper_common::{
    CONTROL_KILL_ON_FORK, MEMBER_CANDIDATE, MEMBER_KEPT, MEMBER_KERNEL_KILLABLE, MEMBER_UNCERTAIN,
    Member, RawKey,
};

use crate::maps::is_set;
use crate::member::{bits_of, has_session};
use crate::session::{self, Session};
use crate::task::{offset, read};

pub const SIGKILL: u32 = 9;
pub const SIGTERM: u32 = 15;
/// `PIDTYPE_TGID` of include/linux/pid_types.h: the process, not one of its threads.
const PIDTYPE_TGID: u32 = 1;

/// Kernel functions (kfuncs) that the loader links. A call contains a placeholder instead of the function's id, which
/// differs between kernels. Only programs for kernels with these functions call them.
macro_rules! kfunc {
    ($number:expr, $type:ty) => {
        // SAFETY: never called as an address: the loader replaces it by a call of the kernel function.
        unsafe { core::mem::transmute::<usize, $type>($number) }
    };
}

/// Sends a signal to the process of a task. Returns 0, or a negative errno.
#[inline(always)]
fn send_signal_task(task: *const u8, signal: u32) -> i32 {
    let send = kfunc!(
        reaper_common::KFUNC_SEND_SIGNAL_TASK,
        unsafe extern "C" fn(*const u8, u32, u32, u64) -> i32
    );
    // SAFETY: the verifier ensures that the task is valid and cannot be freed.
    unsafe { send(task, signal, PIDTYPE_TGID, 0) }
}

/// Sends a signal to the process of a tracepoint's task argument. Returns whether it was sent.
#[inline(always)]
pub fn send_to_argument(task: *const u8, signal: u32) -> bool {
    send_signal_task(task, signal) == 0
}

/// Sends a signal to the process of a task, if its start time matches. Returns whether it was sent. `task` is an untyped
/// pointer.
#[inline(always)]
pub fn send_to(task: *const u8, start_ns: u64, signal: u32) -> bool {
    let from_pid = kfunc!(
        reaper_common::KFUNC_TASK_FROM_PID,
        unsafe extern "C" fn(u32) -> *const u8
    );
    let release = kfunc!(
        reaper_common::KFUNC_TASK_RELEASE,
        unsafe extern "C" fn(*const u8)
    );
    // SAFETY: the reference is released below.
    let held = unsafe { from_pid(read(task, offset!(task_tgid))) };
    if held.is_null() {
        return false;
    }
    // The pid can have been reused, so the start time is compared.
    let same = read::<u64>(held, offset!(task_start_boottime)) == start_ns;
    let sent = same && send_signal_task(held, signal) == 0;
    // SAFETY: acquired by the call above, and not used afterwards.
    unsafe { release(held) };
    sent
}

/// Sends SIGKILL to the current process if its session is being killed and no rule can keep it. Returns whether it was sent.
/// `task` and `member` are those of the current process.
#[inline(always)]
pub fn kill_on_fork(task: *const u8, member: &Member) -> bool {
    if !is_set(CONTROL_KILL_ON_FORK) || !has_session(member) {
        return false;
    }
    let Some(session) = session::of(&member.session) else {
        return false;
    };
    if !session.kills_on_fork() || !is_killable(task, member, &session) {
        return false;
    }
    // SAFETY: a helper without preconditions.
    unsafe { bpf_send_signal(SIGKILL) == 0 }
}

/// Returns whether the probes may signal this member of the session, because no rule can keep it.
///
/// The service has cleared it (MEMBER_KERNEL_KILLABLE), nothing about it is uncertain, its user is the session's, and no
/// rule can match its program's name.
#[inline(always)]
pub fn is_killable(task: *const u8, member: &Member, session: &Session) -> bool {
    let doubtful = MEMBER_UNCERTAIN | MEMBER_KEPT | MEMBER_CANDIDATE;
    if member.flags & (doubtful | MEMBER_KERNEL_KILLABLE) != MEMBER_KERNEL_KILLABLE {
        return false;
    }
    let cred: *const u8 = read(task, offset!(task_cred));
    read::<u32>(cred, offset!(cred_uid)) == session.uid
        && read::<u32>(cred, offset!(cred_euid)) == session.euid
        && bits_of(task) == 0
}

/// Returns whether two keys identify the same process.
#[inline(always)]
pub fn same(a: &RawKey, b: &RawKey) -> bool {
    a.pid == b.pid && a.start_ns == b.start_ns
}
