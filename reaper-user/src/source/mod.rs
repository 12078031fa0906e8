//! Where events come from. Sources know nothing of policy.

pub mod ebpf;
pub mod procfs;
