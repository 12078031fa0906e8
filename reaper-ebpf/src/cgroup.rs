//! Reports moves to another cgroup, where another systemd unit may manage the process.

use aya_ebpf::macros::btf_tracepoint;
use aya_ebpf::programs::BtfTracePointContext;
use reaper_common::{MoveRecord, RecordKind};

use crate::maps::{EVENTS, dropped, filters, header, wake};
use crate::member;
use crate::task::{Task, offset, read};

/// `TP_PROTO(struct cgroup *dst_cgrp, const char *path, struct task_struct *task, bool threadgroup)`.
///
/// Fires once per process, after the move. Updates the membership of the process, and writes the move record.
#[btf_tracepoint(function = "cgroup_attach_task")]
pub fn cgroup_attach(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: the third argument of the prototype above.
    let task = unsafe { Task::from_argument(ctx.arg(2)) };
    let process = task.key();
    let mut member = match member::of(&process) {
        None if process.pid == 0 || filters() => return 0,
        found => found.unwrap_or(member::UNTRACKED),
    };
    // Earlier findings of the service hold only for the old cgroup.
    member::on_move(&process, &mut member);
    let Some(mut record) = EVENTS.reserve::<MoveRecord>(0) else {
        dropped(RecordKind::Move);
        return 0;
    };
    record.write(MoveRecord {
        header: header(RecordKind::Move, size_of::<MoveRecord>()),
        process,
        cgroup_id: id_of(task),
        member,
    });
    record.submit(wake(false));
    0
}

/// Returns the cgroup (v2) id of a task.
#[inline(always)]
fn id_of(task: Task) -> u64 {
    let set: *const u8 = read(task.as_ptr(), offset!(task_cgroups));
    let cgroup: *const u8 = read(set, offset!(css_set_dfl_cgrp));
    let node: *const u8 = read(cgroup, offset!(cgroup_kn));
    read(node, offset!(kernfs_node_id))
}

/// Returns whether two tasks are in the same cgroups.
#[inline(always)]
pub fn are_together(one: Task, other: Task) -> bool {
    let sets = offset!(task_cgroups);
    read::<u64>(one.as_ptr(), sets) == read::<u64>(other.as_ptr(), sets)
}
