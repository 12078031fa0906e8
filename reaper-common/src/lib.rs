//! Interface between the probes in the kernel and the service in user space.
//!
//! Both sides use this crate. It has no dependencies, and its types have fixed-width integers, named padding and layouts
//! that are asserted at compile time. A change of any layout needs a new [`ABI_VERSION`].
//!
//! All pids are *tgids* (of a process, not a thread) in the service's pid namespace; `0` means "not visible from there".
//! All times are nanoseconds since boot, including time suspended (`CLOCK_BOOTTIME`), as in `start_boottime` of
//! `task_struct`.
#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

mod decode;
mod record;
mod settings;
mod state;

pub use decode::{DecodeError, Record, decode, decode_row};
pub use record::*;
pub use settings::*;
pub use state::*;

/// Version of all layouts in this crate. Each record has it, and so has the section [`ABI_SECTION`] of the BPF object.
/// The service refuses to load an object with another version.
pub const ABI_VERSION: u16 = 4;

/// Section of the BPF object with [`ABI_VERSION`] as two little-endian bytes.
pub const ABI_SECTION: &str = "reaper_abi";
