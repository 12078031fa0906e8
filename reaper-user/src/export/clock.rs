//! Conversion of event times to the time of day.

use jiff::Timestamp;
use jiff::tz::TimeZone;

use reaper_host::sys;
use reaper_model::event::ProcessKey;

/// Converts event times (nanoseconds since boot) to wall-clock times, as of when it was created.
pub struct EventClock {
    /// Boot time in nanoseconds since the Unix epoch.
    boot: i128,
    boot_id: String,
    zone: TimeZone,
}

impl EventClock {
    /// `boot_id` is the kernel's random id of this boot.
    pub fn new(boot_id: String) -> EventClock {
        let boot = i128::from(sys::wall_time()) - i128::from(sys::boot_time());
        EventClock {
            boot,
            boot_id,
            zone: TimeZone::system(),
        }
    }

    /// A clock of a boot on 2026-01-01, in UTC.
    #[cfg(test)]
    pub fn fixed() -> EventClock {
        EventClock {
            boot: 1_767_225_600_000_000_000,
            boot_id: "boot".to_owned(),
            zone: TimeZone::UTC,
        }
    }

    /// Returns the wall-clock time of an event.
    pub fn wall(&self, boot_ns: u64) -> Timestamp {
        Timestamp::from_nanosecond(self.boot + i128::from(boot_ns)).unwrap_or_default()
    }

    /// Returns the local time of day of an event, in milliseconds.
    pub fn time_of_day(&self, boot_ns: u64) -> impl std::fmt::Display + use<> {
        self.wall(boot_ns)
            .to_zoned(self.zone.clone())
            .strftime("%H:%M:%S%.3f")
            .to_string()
    }

    /// Returns a process name that is never reused: boot id, start time, pid.
    pub fn entity_id(&self, key: ProcessKey) -> impl std::fmt::Display + use<'_> {
        std::fmt::from_fn(move |f| write!(f, "{}-{}-{}", self.boot_id, key.start, key.pid))
    }
}
