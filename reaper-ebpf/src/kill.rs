//! Signals from the kernel, where a session is past all mercy or its root leaves orphans this very moment.
//!
//! Only to members of whom no rule can know more than that they are members: whatever may be kept, or
//! be a boundary, or is below something that may be one, is left to the service.

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

/// The kernel's functions that the loader puts in: each call has a number instead of the function's id,
/// which differs from kernel to kernel. They are called only in programs for kernels that have them.
macro_rules! kfunc {
    ($number:expr, $type:ty) => {
        // SAFETY: never called as an address: the loader has made it a call of the kernel's function.
        unsafe { core::mem::transmute::<usize, $type>($number) }
    };
}

#[inline(always)]
fn send_signal_task(task: *const u8, signal: u32) -> i32 {
    let send = kfunc!(
        reaper_common::KFUNC_SEND_SIGNAL_TASK,
        unsafe extern "C" fn(*const u8, u32, u32, u64) -> i32
    );
    // SAFETY: the verifier makes sure that it is a task that cannot go away.
    unsafe { send(task, signal, PIDTYPE_TGID, 0) }
}

/// Sends a signal to the process of a task that a tracepoint was handed; whether it went.
#[inline(always)]
pub fn send_to_argument(task: *const u8, signal: u32) -> bool {
    send_signal_task(task, signal) == 0
}

/// Sends a signal to the process of this key, if it is still that one; whether it went. `task` is reached
/// by copying.
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
    // SAFETY: what is found is let go again below.
    let held = unsafe { from_pid(read(task, offset!(task_tgid))) };
    if held.is_null() {
        return false;
    }
    // Whoever has the number now; the start says whether it is the one that was looked at.
    let same = read::<u64>(held, offset!(task_start_boottime)) == start_ns;
    let sent = same && send_signal_task(held, signal) == 0;
    // SAFETY: held since the call above, and not used afterwards.
    unsafe { release(held) };
    sent
}

/// Kills the current process if it is a member of a condemned session; whether it did.
#[inline(always)]
pub fn condemned(task: *const u8, member: &Member) -> bool {
    if !is_set(CONTROL_KILL_ON_FORK) || !has_session(member) {
        return false;
    }
    let Some(session) = session::of(&member.session) else {
        return false;
    };
    if !session.is_condemned() || !is_plain(task, member, &session) {
        return false;
    }
    // SAFETY: a plain helper.
    unsafe { bpf_send_signal(SIGKILL) == 0 }
}

/// Whether no rule can know more of a process than that it is a member of this session.
#[inline(always)]
pub fn is_plain(task: *const u8, member: &Member, session: &Session) -> bool {
    let doubtful = MEMBER_UNCERTAIN | MEMBER_KEPT | MEMBER_CANDIDATE;
    if member.flags & (doubtful | MEMBER_KERNEL_KILLABLE) != MEMBER_KERNEL_KILLABLE {
        return false;
    }
    let cred: *const u8 = read(task, offset!(task_cred));
    read::<u32>(cred, offset!(cred_uid)) == session.uid
        && read::<u32>(cred, offset!(cred_euid)) == session.euid
        && bits_of(task) == 0
}

/// Whether two keys name one process.
#[inline(always)]
pub fn same(a: &RawKey, b: &RawKey) -> bool {
    a.pid == b.pid && a.start_ns == b.start_ns
}
