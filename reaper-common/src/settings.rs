//! Settings from the service for the probes: before loading (read-only globals, constants for the verifier), and at run
//! time (the control map).

/// Byte offsets of fields in the kernel's structures, read from the running kernel's BTF.
///
/// Each field names the structure and field whose offset it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// `task_struct.pid`.
    pub task_pid: u32,
    /// `task_struct.tgid`.
    pub task_tgid: u32,
    /// `task_struct.real_parent`.
    pub task_real_parent: u32,
    /// `task_struct.group_leader`.
    pub task_group_leader: u32,
    /// `task_struct.start_boottime`.
    pub task_start_boottime: u32,
    /// `task_struct.exit_code`.
    pub task_exit_code: u32,
    /// `task_struct.signal`.
    pub task_signal: u32,
    /// `task_struct.children`.
    pub task_children: u32,
    /// `task_struct.sibling`.
    pub task_sibling: u32,
    /// `task_struct.thread_node`.
    pub task_thread_node: u32,
    /// `task_struct.thread_pid`.
    pub task_thread_pid: u32,
    /// `task_struct.mm`.
    pub task_mm: u32,
    /// `task_struct.cred`.
    pub task_cred: u32,
    /// `task_struct.comm`.
    pub task_comm: u32,
    /// `task_struct.cgroups`.
    pub task_cgroups: u32,
    /// `cred.uid.val`.
    pub cred_uid: u32,
    /// `cred.euid.val`.
    pub cred_euid: u32,
    /// `signal_struct.live.counter`.
    pub signal_live: u32,
    /// `signal_struct.thread_head`.
    pub signal_thread_head: u32,
    /// `signal_struct.nr_threads`.
    pub signal_nr_threads: u32,
    /// `signal_struct.group_exit_code`.
    pub signal_group_exit_code: u32,
    /// `signal_struct.flags`.
    pub signal_flags: u32,
    /// Byte of `signal_struct` with the bit `is_child_subreaper`.
    pub signal_subreaper_byte: u32,
    /// Mask of the bit in its byte.
    pub signal_subreaper_mask: u32,
    /// Byte of `signal_struct` with the bit `has_child_subreaper`.
    pub signal_has_subreaper_byte: u32,
    /// Mask of the bit in its byte.
    pub signal_has_subreaper_mask: u32,
    /// `signal_struct.maxrss`.
    pub signal_maxrss: u32,
    /// `signal_struct.pids`.
    pub signal_pids: u32,
    /// `signal_struct.tty`.
    pub signal_tty: u32,
    /// `tty_struct.driver`.
    pub tty_driver: u32,
    /// `tty_struct.index`.
    pub tty_index: u32,
    /// `tty_driver.major`.
    pub driver_major: u32,
    /// `tty_driver.minor_start`.
    pub driver_minor_start: u32,
    /// `pid.level`.
    pub pid_level: u32,
    /// `pid.numbers`.
    pub pid_numbers: u32,
    /// `pid.ino`; [`ABSENT`] before Linux 6.9.
    pub pid_ino: u32,
    /// `upid.nr`.
    pub upid_nr: u32,
    /// `upid.ns`.
    pub upid_ns: u32,
    /// Size of `upid` in bytes.
    pub upid_size: u32,
    /// `pid_namespace.ns.inum`.
    pub namespace_inum: u32,
    /// `pid_namespace.child_reaper`.
    pub namespace_child_reaper: u32,
    /// `mm_struct.arg_start`.
    pub mm_arg_start: u32,
    /// `mm_struct.arg_end`.
    pub mm_arg_end: u32,
    /// `mm_struct.env_start`.
    pub mm_env_start: u32,
    /// `mm_struct.env_end`.
    pub mm_env_end: u32,
    /// `mm_struct.exe_file`.
    pub mm_exe_file: u32,
    /// `linux_binprm.filename`.
    pub bprm_filename: u32,
    /// `linux_binprm.file`.
    pub bprm_file: u32,
    /// `file.f_path`.
    pub file_path: u32,
    /// `path.mnt`.
    pub path_mnt: u32,
    /// `path.dentry`.
    pub path_dentry: u32,
    /// `dentry.d_parent`.
    pub dentry_parent: u32,
    /// `dentry.d_name.name`.
    pub dentry_name: u32,
    /// `mount.mnt`.
    pub mount_mnt: u32,
    /// `mount.mnt_parent`.
    pub mount_parent: u32,
    /// `mount.mnt_mountpoint`.
    pub mount_mountpoint: u32,
    /// `vfsmount.mnt_root`.
    pub mnt_root: u32,
    /// `css_set.dfl_cgrp`.
    pub css_set_dfl_cgrp: u32,
    /// `cgroup.kn`.
    pub cgroup_kn: u32,
    /// `kernfs_node.id`.
    pub kernfs_node_id: u32,
}

/// Offset of a field that the running kernel does not have.
pub const ABSENT: u32 = u32::MAX;

/// Placeholder in the object for the id of the kernel's `bpf_task_from_pid`, which the loader replaces.
pub const KFUNC_TASK_FROM_PID: usize = 0x7ea9_0001;
/// Placeholder for `bpf_task_release`.
pub const KFUNC_TASK_RELEASE: usize = 0x7ea9_0002;
/// Placeholder for `bpf_send_signal_task`.
pub const KFUNC_SEND_SIGNAL_TASK: usize = 0x7ea9_0003;

/// Settings that stay the same while the probes are loaded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Inode of the service's pid namespace, or 0 if it is the initial one and pids need no translation.
    pub pid_namespace: u32,
    /// 1 if `sched_process_exit` reports whether the thread group is dead (Linux 6.16).
    pub exit_has_group_dead: u32,
    /// Number of bytes in the ring at which the reader is woken for any record.
    pub wake_bytes: u64,
    /// 1 if only events of tracked processes and agent candidates are reported; 0 for all processes.
    pub filter: u32,
    /// 1 if only descendants of processes with [`crate::MEMBER_SCOPE`] can be agents.
    pub scoped: u32,
}

/// Index into the control map: 1 while the reader sleeps until it is woken; the next record clears it.
pub const CONTROL_IDLE: u32 = 0;
/// Index into the control map: 1 while an escalation is open, so that every record wakes the reader.
pub const CONTROL_ESCALATIONS: u32 = 1;
/// Index into the control map: number of sessions whose members are killed at fork and exec.
pub const CONTROL_KILL_ON_FORK: u32 = 2;
/// Index into the control map: 1 once all pre-existing members are in the map. Other processes are no members.
pub const CONTROL_SEEDED: u32 = 3;
/// Index into the control map: number of lost records that the service has reported.
pub const CONTROL_LOST_REPORTED: u32 = 4;
/// Index into the control map: inode of the pid namespace of all pids in the maps, plus one.
pub const CONTROL_NAMESPACE: u32 = 5;
/// Index into the control map: 1 if the probes may send the first signals to a session.
pub const CONTROL_KERNEL_REAP: u32 = 6;
/// Index into the control map: nesting level of the service's pid namespace below the initial one. Set by the program
/// that lists all processes, which the service runs before it attaches a probe.
pub const CONTROL_LEVEL: u32 = 7;
/// Index into the control map: 1 if rules need nothing of an environment but [`crate::KEEP_MARKER`]. The probes can then
/// keep [`crate::MEMBER_KERNEL_KILLABLE`] set over an exec.
pub const CONTROL_ONLY_KEEP_MARKER: u32 = 8;
/// Number of slots of the control map.
pub const CONTROL_SLOTS: u32 = 9;

/// Number of slots of the map that counts tracked processes by pid.
pub const PID_FILTER_SLOTS: u32 = 8192;

/// Returns the slot that counts a pid. Neighbouring pids share a slot, because pids are allocated in order. So few cache
/// lines hold the slots of all running processes.
pub const fn pid_filter_slot(pid: u32) -> u32 {
    (pid >> 3) & (PID_FILTER_SLOTS - 1)
}
