//! Times and names of processes as they are written: times of day, and names that are never reused.

use std::fmt::Display;
use std::sync::LazyLock;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Serialize, Serializer};

use reaper_host::sys;
use reaper_model::event::ProcessKey;

/// This boot, as of the first record: a clock that is set later does not bring records out of order.
static BOOT: LazyLock<Boot> = LazyLock::new(|| Boot {
    time: i128::from(sys::wall_time()) - i128::from(sys::boot_time()),
    id: sys::host::Host::read().boot_id,
    zone: TimeZone::system(),
});

struct Boot {
    /// Nanoseconds since the Unix epoch.
    time: i128,
    /// The kernel's random id of it.
    id: String,
    zone: TimeZone,
}

/// Returns the time of day of an event, given in nanoseconds since boot.
pub fn wall_time(boot_ns: u64) -> Timestamp {
    Timestamp::from_nanosecond(BOOT.time + i128::from(boot_ns)).unwrap_or_default()
}

/// Returns the local time of day of an event, in milliseconds.
pub fn time_of_day(boot_ns: u64) -> impl Display {
    wall_time(boot_ns)
        .to_zoned(BOOT.zone.clone())
        .strftime("%H:%M:%S%.3f")
        .to_string()
}

/// A process name that is never reused: boot id, start time, pid.
pub struct EntityId(pub ProcessKey);

impl Serialize for EntityId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ProcessKey { pid, start } = self.0;
        serializer.collect_str(&format_args!("{}-{start}-{pid}", BOOT.id))
    }
}
