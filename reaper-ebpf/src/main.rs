//! The probes: what happens to processes, not threads, told through one ring.
//!
//! Each program reads the kernel's structures at offsets that the service found in the running
//! kernel's BTF and handed over as read-only globals. The verifier takes those for constants, so most
//! reads are plain loads through typed pointers, and one object serves every kernel from 5.10 on.
//!
//! On the host this crate is an empty program, so that formatting, lints and tests of the whole
//! workspace include it.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(
    target_arch = "bpf",
    feature(asm_experimental_arch),
    expect(
        unstable_features,
        reason = "counters need an atomic add, which rustc has only as assembly here"
    )
)]

#[cfg(target_arch = "bpf")]
mod cgroup;
#[cfg(target_arch = "bpf")]
mod environment;
#[cfg(target_arch = "bpf")]
mod exec;
#[cfg(target_arch = "bpf")]
mod exit;
#[cfg(target_arch = "bpf")]
mod fork;
#[cfg(target_arch = "bpf")]
mod kill;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod member;
#[cfg(target_arch = "bpf")]
mod path;
#[cfg(target_arch = "bpf")]
mod session;
#[cfg(target_arch = "bpf")]
mod table;
#[cfg(target_arch = "bpf")]
mod task;

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

/// The helpers used are for GPL-compatible programs only.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// Read by the service before it loads anything.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "reaper_abi")]
#[unsafe(no_mangle)]
static ABI: [u8; 2] = reaper_common::ABI_VERSION.to_le_bytes();

#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("these are kernel probes: build them with `cargo xtask build-ebpf`");
}
