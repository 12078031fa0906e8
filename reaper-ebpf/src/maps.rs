//! What the probes share with the service, and the two things they do with it: count and wake.

use aya_ebpf::Global;
use aya_ebpf::bindings::{
    BPF_EXIST, BPF_NOEXIST, BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP,
};
use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, RingBuf};
use reaper_common::{
    ABI_VERSION, CONTROL_ESCALATIONS, CONTROL_IDLE, CONTROL_LEVEL, CONTROL_SEEDED, CONTROL_SLOTS,
    Header, Member, NAME_INDEX_SLOTS, NAME_LEN, Offsets, PID_FILTER_SLOTS, RawKey, RecordKind,
    RootExit, SESSIONS_MAX, SessionState, Settings, pid_filter_slot,
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
static DROPS: Array<u64> = Array::with_max_entries(RecordKind::COUNTERS, 0);
/// What the reader says of itself: `CONTROL_*`.
#[map]
static CONTROL: Array<u64> = Array::with_max_entries(CONTROL_SLOTS, 0);
/// Who is followed, and why; the loader sets its size.
#[map]
pub static MEMBERS: HashMap<RawKey, Member> = HashMap::with_max_entries(65536, 0);
/// How many are in [`MEMBERS`] of a few pids each: asked first, since that map is large and cold and this
/// one is neither. Too many only cost time. Raised before a process is put in, lowered after it is out.
#[map]
static PID_FILTER: Array<u64> = Array::with_max_entries(PID_FILTER_SLOTS, 1 << 10);
/// The sessions that the service has opened.
#[map]
pub static SESSIONS: HashMap<RawKey, SessionState> = HashMap::with_max_entries(SESSIONS_MAX, 0);
/// The exits of their roots.
#[map]
pub static ROOT_EXITS: HashMap<RawKey, RootExit> = HashMap::with_max_entries(SESSIONS_MAX, 0);
/// Names, and beginnings of names, of the programs that rules know.
#[map]
pub static NAMES: HashMap<[u64; NAME_LEN / 8], u32> = HashMap::with_max_entries(8192, 0);
/// What there is to look up for a name, by its first byte.
#[map]
pub static NAME_INDEX: Array<u32> = Array::with_max_entries(NAME_INDEX_SLOTS as u32, 0);

/// A header for a record of `len` bytes that happens now.
#[inline(always)]
pub fn header(kind: RecordKind, len: usize) -> Header {
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

/// Whether a process of this pid may be in [`MEMBERS`].
#[inline(always)]
pub fn may_be_followed(pid: u32) -> bool {
    PID_FILTER.get(pid_filter_slot(pid)).is_none_or(|n| *n != 0)
}

/// Puts a process into [`MEMBERS`] that is not there; whether there was room.
#[inline(always)]
pub fn follow(key: &RawKey, member: &Member) -> bool {
    add(&PID_FILTER, pid_filter_slot(key.pid), 1);
    let room = MEMBERS.insert(key, member, u64::from(BPF_NOEXIST)).is_ok();
    if !room {
        add(&PID_FILTER, pid_filter_slot(key.pid), u64::MAX);
        // The service may have put it in meanwhile.
        return MEMBERS.insert(key, member, u64::from(BPF_EXIST)).is_ok();
    }
    true
}

/// Takes a process out of [`MEMBERS`].
#[inline(always)]
pub fn unfollow(key: &RawKey) {
    if MEMBERS.remove(key).is_ok() {
        add(&PID_FILTER, pid_filter_slot(key.pid), u64::MAX);
    }
}

/// Counts a record that found no room.
#[inline(always)]
pub fn dropped(kind: RecordKind) {
    count(0);
    count(kind as u32);
}

/// Adds one to a counter.
#[inline(always)]
pub fn count(slot: u32) {
    add(&DROPS, slot, 1);
}

/// Adds to a number in an array.
#[inline(always)]
fn add(array: &Array<u64>, slot: u32, n: u64) {
    if let Some(at) = array.get_ptr_mut(slot) {
        // SAFETY: it points into the map, which outlives the program; the add is atomic.
        unsafe { core::arch::asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) at, in(reg) n) };
    }
}

/// Whether a slot of the control map holds anything but 0.
#[inline(always)]
pub fn is_set(control: u32) -> bool {
    CONTROL.get(control).is_some_and(|n| *n != 0)
}

/// How deep the service's pid namespace lies, if it is not the first one.
#[inline(always)]
pub fn level() -> u32 {
    CONTROL.get(CONTROL_LEVEL).map_or(0, |level| *level as u32)
}

/// Notes the same.
#[inline(always)]
pub fn set_level(level: u32) {
    // A slot that is not there would be another object's map.
    let _ = CONTROL.set(CONTROL_LEVEL, u64::from(level), 0);
}

/// Whether only those are told of who are followed: not before all have been found who ran already.
#[inline(always)]
pub fn filters() -> bool {
    let filter: u32 = constant!(SETTINGS: Settings.filter);
    filter != 0 && is_set(CONTROL_SEEDED)
}

/// Flags to commit a record with: whether it wakes the reader.
///
/// Waking costs more than all else here, so only what is urgent does; of the rest the first record
/// after the reader has gone to sleep, and what comes when much has gathered. The reader looks once
/// more after it has said that it sleeps, since a record may be committed on what it had said before.
#[inline(always)]
pub fn wake(urgent: bool) -> u64 {
    const FORCE: u64 = BPF_RB_FORCE_WAKEUP as u64;
    if urgent || is_set(CONTROL_ESCALATIONS) {
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
