//! The contract between the probes in the kernel and the service in user space.
//!
//! One crate, used by both sides, without dependencies: fixed-width integers, named padding, layouts
//! that are asserted at compile time. A change of any layout here is a new [`ABI_VERSION`].
//!
//! All pids are *tgids* (a process, not a thread) and are numbered as the service's own pid namespace
//! numbers them; `0` means "not visible from there". All times are nanoseconds since boot, suspend
//! included (`CLOCK_BOOTTIME`), the clock that `start_boottime` of `task_struct` is on.
#![cfg_attr(not(test), no_std)]

mod decode;
mod record;
mod settings;
mod state;

pub use decode::{DecodeError, Record, decode, decode_row};
pub use record::*;
pub use settings::*;
pub use state::*;

/// Version of every layout in this crate. It stands in each record and in the object's section
/// [`ABI_SECTION`], so that an object built from other sources is refused before it is loaded.
pub const ABI_VERSION: u16 = 4;

/// The section of the BPF object that holds [`ABI_VERSION`] as two little-endian bytes.
pub const ABI_SECTION: &str = "reaper_abi";
