//! Results of draining a source, with counts of lost and malformed records.

use reaper_common::{DecodeError, RecordKind};

/// Number of lost events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Number of lost events of all kinds.
    pub total: u64,
    /// Counts by kind of record, as far as the kinds are known.
    pub by_kind: [u64; RecordKind::ALL.len()],
}

/// Result of draining a source once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Number of records read; for a scan, of the events that it passed on. The proc connector adds the programs that
    /// it still has to read, so that the engine drains again soon.
    pub records: u64,
    /// Number of records that could not be parsed. Skipped data in the ring counts as one.
    pub malformed: u64,
    /// Defect of the last malformed record.
    pub malformation: Option<Malformation>,
    /// Total number of lost records, as far as the drain shows. That is the highest total that a record of the probes
    /// carried, or the proc connector's current total. 0 if no record carried one.
    pub lost: u64,
}

/// Defect of input that could not be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformation {
    /// A record of the kernel.
    #[error("{0}")]
    Record(DecodeError),
    /// The given number of bytes in the ring buffer, in which no record boundary can be found.
    #[cfg(target_os = "linux")]
    #[error("the ring buffer has no record where one should begin; skipped {0} bytes")]
    Ring(u64),
    /// The `stat` file of the process with this pid. Its known state stays unchanged, and it is sent no signals.
    #[cfg(target_os = "linux")]
    #[error("cannot parse /proc/{0}/stat; the process will not be signalled")]
    Stat(u32),
    /// A row of the process table, from which the pid cannot be read either.
    #[cfg(any(target_os = "macos", test))]
    #[error("cannot parse an entry of the system's process list; scans leave that process out")]
    Row,
}

impl Lost {
    /// Returns the numbers of events lost since an earlier count. A number that is lower than before becomes 0.
    pub fn since(&self, earlier: &Lost) -> Lost {
        let mut since = *self;
        since.total = self.total.saturating_sub(earlier.total);
        for (n, before) in since.by_kind.iter_mut().zip(earlier.by_kind) {
            *n = n.saturating_sub(before);
        }
        since
    }

    /// Adds further lost events.
    pub fn add(&mut self, more: &Lost) {
        self.total += more.total;
        for (n, more) in self.by_kind.iter_mut().zip(more.by_kind) {
            *n += more;
        }
    }

    /// Returns the counts by kind, with the names of the kinds. The total is not included.
    pub fn named(&self) -> [(&'static str, u64); RecordKind::ALL.len()] {
        let mut named = RecordKind::ALL.map(|kind| (kind.name(), 0));
        for ((_, n), count) in named.iter_mut().zip(self.by_kind) {
            *n = count;
        }
        named
    }
}
