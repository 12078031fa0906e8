//! A process comes to be.

use aya_ebpf::macros::btf_tracepoint;
use aya_ebpf::programs::BtfTracePointContext;
use aya_log_ebpf::debug;
use reaper_common::{FORK_NAMESPACE_INIT, ForkRecord, Kind};

use crate::maps::{EVENTS, dropped, header, wake};
use crate::task::Task;

/// `TP_PROTO(struct task_struct *parent, struct task_struct *child)` of include/trace/events/sched.h.
///
/// Runs in the creator, before the child can run; fires for threads too.
#[btf_tracepoint(function = "sched_process_fork")]
pub fn process_fork(ctx: BtfTracePointContext) -> i32 {
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
    let key = child.key();
    if key.pid == 0 {
        return 0;
    }
    let Some(mut record) = EVENTS.reserve::<ForkRecord>(0) else {
        dropped(Kind::Fork);
        return 0;
    };
    let (uid, euid) = child.uids();
    record.write(ForkRecord {
        header: header(Kind::Fork, size_of::<ForkRecord>()),
        child: key,
        parent: child.real_parent().key(),
        creator: creator.key(),
        pidfd_inode: child.pidfd_inode(),
        uid,
        euid,
        flags: if child.is_namespace_init() {
            FORK_NAMESPACE_INIT
        } else {
            0
        },
        _pad: 0,
    });
    record.submit(wake(false));
    debug!(&ctx, "fork: pid {}", key.pid);
    0
}
