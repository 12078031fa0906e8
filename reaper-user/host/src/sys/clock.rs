//! Which clocks there are.

use nix::time::ClockId;

/// Goes on while the machine is suspended.
pub const BOOT: ClockId = ClockId::CLOCK_BOOTTIME;
/// Stands still meanwhile.
pub const MONOTONIC: ClockId = ClockId::CLOCK_MONOTONIC;
