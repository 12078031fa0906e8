//! What the service tells the probes before they are loaded (read-only globals, which the verifier
//! takes for constants) and while they run (the control map).

/// Byte offsets of the kernel's own structures, read from the running kernel's BTF.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    pub task_pid: u32,
    pub task_tgid: u32,
    pub task_real_parent: u32,
    pub task_group_leader: u32,
    pub task_start_boottime: u32,
    pub task_exit_code: u32,
    pub task_signal: u32,
    pub task_children: u32,
    pub task_sibling: u32,
    pub task_thread_node: u32,
    pub task_thread_pid: u32,
    pub task_mm: u32,
    pub task_cred: u32,
    pub task_comm: u32,
    pub task_cgroups: u32,
    pub cred_uid: u32,
    pub cred_euid: u32,
    pub signal_live: u32,
    pub signal_thread_head: u32,
    pub signal_nr_threads: u32,
    pub signal_group_exit_code: u32,
    pub signal_flags: u32,
    /// Byte that holds the bit `is_child_subreaper`.
    pub signal_subreaper_byte: u32,
    /// Mask of that bit in its byte.
    pub signal_subreaper_mask: u32,
    pub signal_has_subreaper_byte: u32,
    pub signal_has_subreaper_mask: u32,
    pub signal_maxrss: u32,
    pub signal_pids: u32,
    pub signal_tty: u32,
    pub tty_driver: u32,
    pub tty_index: u32,
    pub driver_major: u32,
    pub driver_minor_start: u32,
    pub pid_level: u32,
    pub pid_numbers: u32,
    /// `pid.ino`; [`ABSENT`] before 6.9.
    pub pid_ino: u32,
    pub upid_nr: u32,
    pub upid_ns: u32,
    pub upid_size: u32,
    pub namespace_inum: u32,
    pub namespace_child_reaper: u32,
    pub mm_arg_start: u32,
    pub mm_arg_end: u32,
    pub mm_env_start: u32,
    pub mm_env_end: u32,
    pub mm_exe_file: u32,
    pub bprm_filename: u32,
    pub bprm_file: u32,
    pub file_path: u32,
    pub path_mnt: u32,
    pub path_dentry: u32,
    pub dentry_parent: u32,
    pub dentry_name: u32,
    pub mount_mnt: u32,
    pub mount_parent: u32,
    pub mount_mountpoint: u32,
    pub mnt_root: u32,
    pub css_set_dfl_cgrp: u32,
    pub cgroup_kn: u32,
    pub kernfs_node_id: u32,
}

/// Offset of a member that the running kernel does not have.
pub const ABSENT: u32 = u32::MAX;

/// What stands in the object for the id of the kernel's `bpf_task_from_pid`, until the loader knows it.
pub const KFUNC_TASK_FROM_PID: usize = 0x7ea9_0001;
/// The same for `bpf_task_release`.
pub const KFUNC_TASK_RELEASE: usize = 0x7ea9_0002;
/// The same for `bpf_send_signal_task`.
pub const KFUNC_SEND_SIGNAL_TASK: usize = 0x7ea9_0003;

/// Settings that hold for as long as the probes are loaded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Inode of the service's pid namespace, or 0 if it is the first one, where no translation is needed.
    pub pid_namespace: u32,
    /// 1 if `sched_process_exit` says itself whether the thread group is dead (6.16 and later).
    pub exit_has_group_dead: u32,
    /// Bytes waiting in the ring at which the reader is woken, whatever they are.
    pub wake_bytes: u64,
    /// 1 if only members, candidates and what decides about them are told of; 0 for every process.
    pub filter: u32,
    /// 1 if only what descends from [`crate::MEMBER_SCOPE`] can be an agent.
    pub scoped: u32,
}

/// Index into the control map: 1 while the reader sleeps until it is woken; the first record clears it.
pub const CONTROL_IDLE: u32 = 0;
/// Index into the control map: 1 while a ladder is open, and every record wakes the reader.
pub const CONTROL_ESCALATIONS: u32 = 1;
/// Index into the control map: number of sessions that are condemned.
pub const CONTROL_KILL_ON_FORK: u32 = 2;
/// Index into the control map: 1 once all members that were found running are in the map, so that
/// whoever is not in it is none.
pub const CONTROL_SEEDED: u32 = 3;
/// Index into the control map: how many of the lost records the service has told of.
pub const CONTROL_LOST_REPORTED: u32 = 4;
/// Index into the control map: inode of the pid namespace by which processes are numbered, plus one.
pub const CONTROL_NAMESPACE: u32 = 5;
/// Index into the control map: 1 if the probes may send the first signals of a session.
pub const CONTROL_KERNEL_REAP: u32 = 6;
/// Index into the control map: how deep the service's pid namespace lies below the first one. Written by the
/// program that lists all processes, which the service runs before it attaches a probe.
pub const CONTROL_LEVEL: u32 = 7;
/// Index into the control map: 1 if [`crate::KEEP_MARKER`] is all that rules ask of an environment, so that the probes
/// can tell what another program means to [`crate::MEMBER_KERNEL_KILLABLE`].
pub const CONTROL_ONLY_KEEP_MARKER: u32 = 8;
/// Number of slots of the control map.
pub const CONTROL_SLOTS: u32 = 9;

/// Slots of the map that counts the followed by their pids.
pub const PID_FILTER_SLOTS: u32 = 8192;

/// Which of these slots counts a pid: pids follow one another, so that neighbours share a slot, and few
/// lines of the cache hold those of all that run now.
pub const fn pid_filter_slot(pid: u32) -> u32 {
    (pid >> 3) & (PID_FILTER_SLOTS - 1)
}
