//! What the probes share with the service, and the two things they do with it: count and wake.

use aya_ebpf::Global;
use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, RingBuf};
use reaper_common::{
    ABI_VERSION, CONTROL_IDLE, CONTROL_LADDERS, CONTROL_SLOTS, Header, Kind, Offsets, Settings,
};

/// Where the members of the kernel's structures are. Written by the loader.
#[unsafe(no_mangle)]
pub static OFFSETS: Global<Offsets> = Global::new(unsafe { core::mem::zeroed() });
/// What the service wants. Written by the loader.
#[unsafe(no_mangle)]
pub static SETTINGS: Global<Settings> = Global::new(unsafe { core::mem::zeroed() });

/// One member of a read-only global, as a constant to the verifier.
macro_rules! constant {
    ($global:ident: $type:ident . $member:ident) => {
        crate::maps::member(
            &crate::maps::$global,
            core::mem::offset_of!(reaper_common::$type, $member),
        )
    };
}
pub(crate) use constant;

/// For [`constant`] alone, which gives an offset within `G`.
#[inline(always)]
pub fn member<G, T: Copy>(global: &Global<G>, offset: usize) -> T {
    let base: *const Global<G> = global;
    // SAFETY: in bounds, as the macro gives it; volatile, since the loader and not the compiler
    // decides the value.
    unsafe { core::ptr::read_volatile(base.byte_add(offset).cast()) }
}

/// The one ring; the loader sets its size.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
/// Records dropped: in all, then by kind.
#[map]
static DROPS: Array<u64> = Array::with_max_entries(Kind::COUNTERS, 0);
/// What the reader says of itself: `CONTROL_IDLE`, `CONTROL_LADDERS`.
#[map]
static CONTROL: Array<u64> = Array::with_max_entries(CONTROL_SLOTS, 0);
/// Pids whose exit wakes the reader at once.
#[map]
static WATCHED: HashMap<u32, u8> = HashMap::with_max_entries(16384, 0);

/// A header for a record of `len` bytes that happens now.
#[inline(always)]
pub fn header(kind: Kind, len: usize) -> Header {
    let lost = DROPS.get(0).map_or(0, |n| *n);
    // SAFETY: no argument, no precondition.
    let time_ns = unsafe { bpf_ktime_get_boot_ns() };
    Header {
        len: len as u32,
        kind: kind as u16,
        abi: ABI_VERSION,
        time_ns,
        lost,
    }
}

/// Counts a record that found no room.
#[inline(always)]
pub fn dropped(kind: Kind) {
    for slot in [0, kind as u32] {
        if let Some(n) = DROPS.get_ptr_mut(slot) {
            // SAFETY: `n` points into the map, which outlives the program; the add is atomic.
            unsafe { core::arch::asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) n, in(reg) 1u64) };
        }
    }
}

/// Whether the service asked to be woken when this process exits.
#[inline(always)]
pub fn watched(pid: u32) -> bool {
    // SAFETY: the value is not looked at, so a concurrent removal does no harm.
    unsafe { WATCHED.get(pid) }.is_some()
}

/// Flags to commit a record with: whether it wakes the reader.
///
/// Waking costs more than all else here, so only what is urgent does; of the rest the first record
/// after the reader has gone to sleep, and what comes when much has gathered. The reader looks once
/// more after it has said that it sleeps, since a record may be committed on what it had said before.
#[inline(always)]
pub fn wake(urgent: bool) -> u64 {
    const FORCE: u64 = BPF_RB_FORCE_WAKEUP as u64;
    if urgent || CONTROL.get(CONTROL_LADDERS).is_some_and(|n| *n != 0) {
        return FORCE;
    }
    if let Some(idle) = CONTROL.get_ptr_mut(CONTROL_IDLE) {
        // SAFETY: points into the map; two probes that both see 1 wake the reader twice, no harm.
        unsafe {
            if *idle != 0 {
                *idle = 0;
                return FORCE;
            }
        }
    }
    let waiting = EVENTS.query(u64::from(BPF_RB_AVAIL_DATA));
    let threshold: u64 = constant!(SETTINGS: Settings.wake_bytes);
    // A window, not a threshold, so that what comes after does not wake again and again.
    if waiting >= threshold && waiting < threshold + 16384 {
        FORCE
    } else {
        BPF_RB_NO_WAKEUP as u64
    }
}
