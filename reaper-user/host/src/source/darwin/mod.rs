//! Process table and event source on macOS, which has neither /proc nor probes.
//!
//! [`table`] reads the process table by sysctl(3) and libproc. [`scan`] is the event source: the kernel reports forks, execs
//! and exits, but not which process was forked, so a pass over the process table finds the new ones. The parsers
//! [`kinfo`](crate::sys::kinfo), [`args`] and [`sockets`], and [`births`], which emits the new processes, do not need macOS,
//! so their tests run on any system.

pub mod args;
pub(crate) mod births;
#[cfg(target_os = "macos")]
pub mod kernel;
pub mod scan;
pub(crate) mod sockets;
#[cfg(target_os = "macos")]
pub mod table;
