//! Converts event times and process keys to what the stream shows: wall-clock times, and ids that are never reused.

use std::fmt::Display;
use std::sync::LazyLock;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Serialize, Serializer};

use reaper_host::sys;
use reaper_model::event::ProcessKey;

/// This boot, read at the first record. A later change of the system clock therefore does not reorder records.
static BOOT: LazyLock<Boot> = LazyLock::new(|| Boot {
    time: i128::from(sys::wall_time()) - i128::from(sys::boot_time()),
    id: sys::host::Host::read().boot_id,
    zone: TimeZone::system(),
});

struct Boot {
    /// Time of the boot in nanoseconds since the Unix epoch.
    time: i128,
    /// Boot id of the kernel.
    id: String,
    zone: TimeZone,
}

/// Returns the wall-clock time of an event, given in nanoseconds since boot.
pub fn wall_time(boot_ns: u64) -> Timestamp {
    Timestamp::from_nanosecond(BOOT.time + i128::from(boot_ns)).unwrap_or_default()
}

/// Returns the local time of day of an event, with milliseconds.
pub fn time_of_day(boot_ns: u64) -> String {
    local(boot_ns, "%H:%M:%S%.3f")
}

/// Returns the local time of day of an event, to the second.
pub fn time_of_day_in_seconds(boot_ns: u64) -> String {
    local(boot_ns, "%H:%M:%S")
}

fn local(boot_ns: u64, format: &str) -> String {
    let time = wall_time(boot_ns).to_zoned(BOOT.zone.clone());
    time.strftime(format).to_string()
}

/// Process id that is never reused: boot id, start time, pid.
pub struct EntityId(pub ProcessKey);

impl Display for EntityId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ProcessKey { pid, start } = self.0;
        write!(f, "{}-{start}-{pid}", BOOT.id)
    }
}

impl Serialize for EntityId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
