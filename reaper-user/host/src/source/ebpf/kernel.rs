//! What the probes need to know of the running kernel.

use reaper_common::Offsets;

use super::btf::Btf;
use super::error::EbpfError;

/// What differs between the kernels that the object runs on.
#[derive(Clone, Copy, Debug)]
pub struct KernelFeatures {
    pub offsets: Offsets,
    /// `sched_process_exit` says whether the group is dead (6.16).
    pub exit_has_group_dead: bool,
    /// Programs may call `bpf_loop` (5.17).
    pub has_bpf_loop: bool,
    /// `cgroup_attach_task` is as the probe expects it: all kernels with cgroups.
    pub reports_moves: bool,
}

impl KernelFeatures {
    /// Reads the kernel's type information.
    ///
    /// # Errors
    /// It lacks something that the probes need.
    pub(super) fn of(btf: &Btf) -> Result<KernelFeatures, EbpfError> {
        Ok(KernelFeatures {
            offsets: btf.offsets().map_err(EbpfError::Btf)?,
            exit_has_group_dead: btf.tracepoint_args("sched_process_exit") == Some(2),
            has_bpf_loop: btf.has_enum_value("bpf_func_id", "BPF_FUNC_loop"),
            reports_moves: btf.tracepoint_args("cgroup_attach_task") == Some(4),
        })
    }
}
