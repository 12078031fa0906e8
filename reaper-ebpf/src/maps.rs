//! Maps shared with the service, and the functions that count records and wake the reader.

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

/// Offsets in the kernel's structures. Written by the loader.
#[unsafe(no_mangle)]
pub static OFFSETS: Global<Offsets> = Global::new(unsafe { core::mem::zeroed() });
/// Settings of the service. Written by the loader.
#[unsafe(no_mangle)]
pub static SETTINGS: Global<Settings> = Global::new(unsafe { core::mem::zeroed() });

/// Returns a field of a read-only global, as a constant for the verifier.
macro_rules! constant {
    ($global:ident: $type:ident . $member:ident) => {
        crate::maps::member(
            &crate::maps::$global,
            core::mem::offset_of!(reaper_common::$type, $member),
        )
    };
}
pub(crate) use constant;

/// Reads a field. Only for [`constant`], which gives an offset within `G`.
#[inline(always)]
pub fn member<G, T: Copy>(global: &Global<G>, offset: usize) -> T {
    let base: *const Global<G> = global;
    // SAFETY: the macro gives an offset within bounds. Volatile, because the loader sets the value after compilation.
    unsafe { core::ptr::read_volatile(base.byte_add(offset).cast()) }
}

/// Ring of all records. The loader sets its size.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
/// Counters of dropped records: total, then by kind.
#[map]
static DROPS: Array<u64> = Array::with_max_entries(RecordKind::COUNTERS, 0);
/// State of the reader: `CONTROL_*`.
#[map]
static CONTROL: Array<u64> = Array::with_max_entries(CONTROL_SLOTS, 0);
/// Tracked processes, and the reasons. The loader sets its size.
#[map]
pub static MEMBERS: HashMap<RawKey, Member> = HashMap::with_max_entries(65536, 0);
/// Number of processes in [`MEMBERS`] per slot of a few pids.
///
/// Checked first, because that map is large and not cached, and this one is small. A count that is too high only costs
/// time, so it is raised before a process is added and lowered after it is removed.
#[map]
static PID_FILTER: Array<u64> = Array::with_max_entries(PID_FILTER_SLOTS, 1 << 10);
/// Sessions opened by the service.
#[map]
pub static SESSIONS: HashMap<RawKey, SessionState> = HashMap::with_max_entries(SESSIONS_MAX, 0);
/// Exits of their roots.
#[map]
pub static ROOT_EXITS: HashMap<RawKey, RootExit> = HashMap::with_max_entries(SESSIONS_MAX, 0);
/// Names and name prefixes that rules match.
#[map]
pub static NAMES: HashMap<[u64; NAME_LEN / 8], u32> = HashMap::with_max_entries(8192, 0);
/// Lookups needed for a name, by its first byte.
#[map]
pub static NAME_INDEX: Array<u32> = Array::with_max_entries(NAME_INDEX_SLOTS as u32, 0);

/// Returns the header of a record of `len` bytes with the current time.
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

/// Returns whether a process with this pid can be in [`MEMBERS`].
#[inline(always)]
pub fn may_be_tracked(pid: u32) -> bool {
    PID_FILTER.get(pid_filter_slot(pid)).is_none_or(|n| *n != 0)
}

/// Adds a process to [`MEMBERS`], or replaces its entry. Returns false if it has none and the map is full.
#[inline(always)]
pub fn track(key: &RawKey, member: &Member) -> bool {
    add(&PID_FILTER, pid_filter_slot(key.pid), 1);
    let room = MEMBERS.insert(key, member, u64::from(BPF_NOEXIST)).is_ok();
    if !room {
        add(&PID_FILTER, pid_filter_slot(key.pid), u64::MAX);
        // The service can have added it meanwhile.
        return MEMBERS.insert(key, member, u64::from(BPF_EXIST)).is_ok();
    }
    true
}

/// Removes a process from [`MEMBERS`].
#[inline(always)]
pub fn untrack(key: &RawKey) {
    if MEMBERS.remove(key).is_ok() {
        add(&PID_FILTER, pid_filter_slot(key.pid), u64::MAX);
    }
}

/// Counts a record for which the ring had no room.
#[inline(always)]
pub fn dropped(kind: RecordKind) {
    count(0);
    count(kind as u32);
}

/// Adds 1 to a drop counter.
#[inline(always)]
pub fn count(slot: u32) {
    add(&DROPS, slot, 1);
}

/// Adds to an element of an array.
#[inline(always)]
fn add(array: &Array<u64>, slot: u32, n: u64) {
    if let Some(at) = array.get_ptr_mut(slot) {
        // SAFETY: a pointer into the map, which outlives the program; the addition is atomic.
        unsafe { core::arch::asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) at, in(reg) n) };
    }
}

/// Returns whether a slot of the control map is not 0.
#[inline(always)]
pub fn is_set(control: u32) -> bool {
    CONTROL.get(control).is_some_and(|n| *n != 0)
}

/// Returns the nesting level of the service's pid namespace; 0 if that is the initial one.
#[inline(always)]
pub fn level() -> u32 {
    CONTROL.get(CONTROL_LEVEL).map_or(0, |level| *level as u32)
}

/// Stores the nesting level of the service's pid namespace.
#[inline(always)]
pub fn set_level(level: u32) {
    // Cannot fail: the slot exists.
    let _ = CONTROL.set(CONTROL_LEVEL, u64::from(level), 0);
}

/// Returns whether only tracked processes are reported. Not before all pre-existing members have been found.
#[inline(always)]
pub fn filters() -> bool {
    let filter: u32 = constant!(SETTINGS: Settings.filter);
    filter != 0 && is_set(CONTROL_SEEDED)
}

/// Returns the flags for committing a record: whether it wakes the reader.
///
/// Waking costs more than everything else here. A record wakes the reader if it is urgent, if an escalation is open, if it
/// is the first one after the reader has announced that it is idle, or if much data is waiting. The reader polls once more after its announcement,
/// because a probe can have committed a record just before.
#[inline(always)]
pub fn wake(urgent: bool) -> u64 {
    const FORCE: u64 = BPF_RB_FORCE_WAKEUP as u64;
    if urgent || is_set(CONTROL_ESCALATIONS) {
        return FORCE;
    }
    if let Some(idle) = CONTROL.get_ptr_mut(CONTROL_IDLE) {
        // SAFETY: a pointer into the map. Two probes that both see 1 wake the reader twice, which is harmless.
        unsafe {
            if *idle != 0 {
                *idle = 0;
                return FORCE;
            }
        }
    }
    let waiting = EVENTS.query(u64::from(BPF_RB_AVAIL_DATA));
    let threshold: u64 = constant!(SETTINGS: Settings.wake_bytes);
    // A range instead of a threshold, so that the records that follow do not wake the reader again.
    if waiting >= threshold && waiting < threshold + 16384 {
        FORCE
    } else {
        BPF_RB_NO_WAKEUP as u64
    }
}
