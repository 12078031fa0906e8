//! Processes on macOS: what the kernel tells of them, and a source of events made of that.
//!
//! There is no /proc, and there are no probes. [`table`] answers by sysctl(3) and libproc what /proc answers elsewhere, and
//! [`scan`] tells of what changes: the kernel sends word of forks, execs and exits, but not of who was born, which a pass over
//! the process table finds out. What is read is understood by [`kinfo`](crate::sys::kinfo), [`args`] and [`sockets`], and made
//! into events by [`births`], which need no macOS.

pub mod args;
pub mod births;
#[cfg(target_os = "macos")]
pub mod kernel;
pub mod scan;
pub mod sockets;
#[cfg(target_os = "macos")]
pub mod table;
