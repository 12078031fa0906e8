//! Which clocks there are. Both begin at the boot, and neither follows the wall clock when that is set.

use nix::time::ClockId;

/// Goes on while the machine is suspended (`mach_continuous_time`).
pub const BOOT: ClockId = ClockId::from_raw(libc::CLOCK_MONOTONIC_RAW);
/// Stands still meanwhile (`mach_absolute_time`).
pub const MONOTONIC: ClockId = ClockId::from_raw(libc::CLOCK_UPTIME_RAW);
