//! Probes that report events of processes (not threads) through one ring.
//!
//! The programs read the kernel's structures at offsets that the service takes from the running kernel's BTF and stores
//! in read-only globals. For the verifier these are constants, so most reads are plain loads through typed pointers. One
//! object serves every kernel from 5.10 on.
//!
//! For the host this crate is an empty program, so that formatting, lints and tests of the workspace include it.
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

/// Required by the helpers, which are reserved for GPL-compatible programs.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// ABI version, checked by the service before it loads the object.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "reaper_abi")]
#[unsafe(no_mangle)]
static ABI: [u8; 2] = reaper_common::ABI_VERSION.to_le_bytes();

#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("these are kernel probes: build them with `cargo xtask build-ebpf`");
}
