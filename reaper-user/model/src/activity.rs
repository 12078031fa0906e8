//! Resource use of a process, and since when it is idle.
//!
//! No event reports work, so each process is read repeatedly and two readings are compared. The process has worked if
//! it has used more CPU time or I/O than an idle program with timers.

/// CPU time per second that an idle program may use, in ns. Measured without a client: `opencode serve` 14 ms, codex's
/// server 0.1 ms.
const HEARTBEAT_CPU_NS: u64 = 20_000_000;
/// Nanoseconds per tick. CPU time is counted in ticks, so each reading may be off by one.
const TICK_NS: u64 = crate::event::TICK_NS;
/// Bytes per second that an idle program may read and write. The kernel does not count send(2) and recv(2). Measured
/// without a client: codex's server 140, `opencode serve` 100. A client that connects to codex's server, says hello and
/// leaves moves 150 KB.
const HEARTBEAT_IO: u64 = 256;
/// Bytes of I/O that are allowed in addition for each reading.
const IO_MARGIN: u64 = 8 << 10;

/// Resource use of a process up to one reading, and its connections at that time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// CPU time of all threads, in ns.
    pub cpu_ns: u64,
    /// Bytes read and written (`rchar` and `wchar` of proc_pid_io(5)), without send(2) and recv(2).
    pub io_bytes: u64,
    /// Resident memory in bytes.
    pub rss: u64,
    /// Swapped out memory in bytes.
    pub swap: u64,
    /// Inode number of the client's socket for each accepted connection, 0 if unknown.
    pub clients: Box<[u64]>,
    /// Inode numbers of the other connected sockets.
    pub sockets: Box<[u64]>,
}

/// Memory of all processes of a session and of those nested in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct TreeMemory {
    /// Resident bytes. Shared pages count once per process.
    #[serde(rename = "memory.rss")]
    pub rss: u64,
    /// Swapped out bytes.
    #[serde(rename = "memory.swap")]
    pub swap: u64,
}

/// Period without work, according to the readings of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Idle {
    /// First reading of the period.
    first: UsageSample,
    last: UsageSample,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UsageSample {
    /// Time of the reading, in ns of `CLOCK_MONOTONIC`.
    at: u64,
    cpu_ns: u64,
    io_bytes: u64,
}

impl UsageSample {
    /// Returns whether the process has used more CPU time or I/O from this sample to `now` than an idle program may.
    fn has_worked_until(self, now: UsageSample) -> bool {
        let seconds = now.at.saturating_sub(self.at) / 1_000_000_000 + 1;
        let cpu = now.cpu_ns.saturating_sub(self.cpu_ns);
        let io = now.io_bytes.saturating_sub(self.io_bytes);
        cpu > seconds * HEARTBEAT_CPU_NS + TICK_NS || io > seconds * HEARTBEAT_IO + IO_MARGIN
    }
}

impl Idle {
    /// Returns the period without work that ends with this reading at `now`, in ns of `CLOCK_MONOTONIC`. `before` is
    /// the period up to the previous reading. If the process has worked since, a new period starts at `now`.
    ///
    /// Both the interval since the previous reading and the whole period must be within the heartbeat: what an idle
    /// program may use. Many short intervals would hide work in their margins, and a long one would hide a short burst.
    pub(super) fn after(before: Option<Idle>, activity: &Activity, now: u64) -> Idle {
        let last = UsageSample {
            at: now,
            cpu_ns: activity.cpu_ns,
            io_bytes: activity.io_bytes,
        };
        let is_idle = |before: &Idle| {
            !before.first.has_worked_until(last) && !before.last.has_worked_until(last)
        };
        let first = before.filter(is_idle).map_or(last, |before| before.first);
        Idle { first, last }
    }

    /// Returns since when the process is idle, in ns of `CLOCK_MONOTONIC`.
    pub(super) fn since(self) -> u64 {
        self.first.at
    }

    /// Returns the time of the last reading, in ns of `CLOCK_MONOTONIC`.
    pub(super) fn read_at(self) -> u64 {
        self.last.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn used(cpu_ms: u64, io_bytes: u64) -> Activity {
        Activity {
            cpu_ns: cpu_ms * 1_000_000,
            io_bytes,
            ..Activity::default()
        }
    }

    #[test]
    fn process_with_a_heartbeat_stays_idle() {
        let first = Idle::after(None, &used(5000, 1 << 20), 100 * SECOND);
        assert_eq!(first.since(), 100 * SECOND);
        let later = Idle::after(Some(first), &used(9200, (1 << 20) + 42_000), 400 * SECOND);
        assert_eq!(later.since(), 100 * SECOND);
    }

    #[test]
    fn process_that_works_between_readings_is_idle_from_second() {
        let first = Idle::after(None, &used(0, 0), 100 * SECOND);
        for busy in [used(7000, 0), used(4, 150_000)] {
            let later = Idle::after(Some(first), &busy, 400 * SECOND);
            assert_eq!(later.since(), 400 * SECOND, "{busy:?}");
        }
    }

    #[test]
    fn work_in_many_short_steps_is_work() {
        let mut idle = Idle::after(None, &used(0, 0), 0);
        // 15 % of a processor, read six times a second.
        for step in 1..600 {
            let now = step * SECOND / 6;
            idle = Idle::after(Some(idle), &used(step * 25, 0), now);
        }
        assert!(idle.since() > 90 * SECOND, "{idle:?}");
    }
}
