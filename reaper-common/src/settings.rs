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
}

/// Offset of a member that the running kernel does not have.
pub const ABSENT: u32 = u32::MAX;

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
}

/// Index into the control map: 1 while the reader sleeps until it is woken; the first record clears it.
pub const CONTROL_IDLE: u32 = 0;
/// Index into the control map: 1 while a ladder is open, and every record wakes the reader.
pub const CONTROL_LADDERS: u32 = 1;
/// Number of slots of the control map.
pub const CONTROL_SLOTS: u32 = 2;
