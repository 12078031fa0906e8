//! Reports forks.

use aya_ebpf::macros::btf_tracepoint;
use aya_ebpf::programs::BtfTracePointContext;
use aya_log_ebpf::debug;
use reaper_common::{
    ForkRecord, PROCESS_CHILD_SIGNALLED, PROCESS_NAMESPACE_INIT, PROCESS_OTHER_CGROUP, RecordKind,
};

use crate::kill::{self, SIGKILL};
use crate::maps::{EVENTS, dropped, filters, header, wake};
use crate::task::Task;
use crate::{cgroup, member};

/// `TP_PROTO(struct task_struct *parent, struct task_struct *child)` of include/trace/events/sched.h.
///
/// Runs in the creator's context, before the child can run. Fires for threads too.
#[btf_tracepoint(function = "sched_process_fork")]
pub fn process_fork(ctx: BtfTracePointContext) -> i32 {
    report(&ctx, false)
}

/// The same for kernels on which a program can signal other processes than the current one.
#[btf_tracepoint(function = "sched_process_fork")]
pub fn process_fork_killing(ctx: BtfTracePointContext) -> i32 {
    report(&ctx, true)
}

/// Makes the child a member if its creator is one, kills both if their session is being killed, and writes the fork
/// record. `can_signal` says whether this program can signal other processes than the current one, such as the child.
#[inline(always)]
fn report(ctx: &BtfTracePointContext, can_signal: bool) -> i32 {
    // SAFETY: the arguments of the prototype above.
    let (creator, child) = unsafe {
        (
            Task::from_argument(ctx.arg(0)),
            Task::from_argument(ctx.arg(1)),
        )
    };
    if !child.is_leader() {
        return 0;
    }
    let creator_key = creator.key();
    let creator_is = match member::of(&creator_key) {
        None if filters() => return 0,
        Some(member) if filters() && !member::is_inherited(&member) => return 0,
        found => found.unwrap_or(member::UNTRACKED),
    };
    let key = child.key();
    if key.pid == 0 {
        return 0;
    }
    let together = cgroup::are_together(creator, child);
    let member = member::inherit(&creator_is, &key, together);
    let killed = kill::kill_on_fork(creator.as_ptr(), &creator_is);
    let child_killed = killed && can_signal && kill::send_to_argument(child.as_ptr(), SIGKILL);
    let Some(mut record) = EVENTS.reserve::<ForkRecord>(0) else {
        dropped(RecordKind::Fork);
        return 0;
    };
    let (uid, euid) = child.uids();
    let mut flags = 0;
    if child.is_namespace_init() {
        flags |= PROCESS_NAMESPACE_INIT;
    }
    if child_killed {
        flags |= PROCESS_CHILD_SIGNALLED;
    }
    if !together {
        flags |= PROCESS_OTHER_CGROUP;
    }
    record.write(ForkRecord {
        header: header(RecordKind::Fork, size_of::<ForkRecord>()),
        child: key,
        parent: child.real_parent().key(),
        creator: creator_key,
        pidfd_inode: child.pidfd_inode(),
        uid,
        euid,
        flags,
        signal: if killed { SIGKILL } else { 0 },
        member,
    });
    record.submit(wake(false));
    debug!(ctx, "fork: pid {}", key.pid);
    0
}
