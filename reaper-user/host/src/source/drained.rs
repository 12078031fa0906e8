//! What draining a source brought, and what was lost on the way.

use reaper_common::{DecodeError, RecordKind};

/// How many events were lost, by kind where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub total: u64,
    pub by_kind: [u64; RecordKind::ALL.len()],
}

/// What a look at a source brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    pub records: u64,
    /// How much of what was read was not understood, and what was wrong with the last of it.
    pub malformed: u64,
    pub malformation: Option<Malformation>,
    /// Highest count of lost records that a record told of.
    pub lost: u64,
}

/// Something that was read and not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformation {
    /// A record of the kernel's is none.
    #[error("{0}")]
    Record(DecodeError),
    /// In so many bytes of the ring there is no telling where a record begins.
    #[cfg(target_os = "linux")]
    #[error("the ring holds no record where one should begin, and {0} bytes of it are skipped")]
    Ring(u64),
    /// A process's own file in /proc; what is known of it stays as it is, and it is sent nothing.
    #[cfg(target_os = "linux")]
    #[error("/proc/{0}/stat cannot be understood, and that process is left alone")]
    Stat(u32),
    /// A row of the process table, so that whose it is is not known either.
    #[cfg(any(target_os = "macos", test))]
    #[error("a row of the process table cannot be understood")]
    Row,
}

impl Lost {
    /// What has been lost since an earlier count.
    pub fn since(&self, earlier: &Lost) -> Lost {
        let mut since = *self;
        since.total = self.total.saturating_sub(earlier.total);
        for (n, before) in since.by_kind.iter_mut().zip(earlier.by_kind) {
            *n = n.saturating_sub(before);
        }
        since
    }

    /// Adds what was lost besides.
    pub fn add(&mut self, more: &Lost) {
        self.total += more.total;
        for (n, more) in self.by_kind.iter_mut().zip(more.by_kind) {
            *n += more;
        }
    }

    /// The counts with the names of their kinds.
    pub fn named(&self) -> [(&'static str, u64); RecordKind::ALL.len()] {
        let mut named = RecordKind::ALL.map(|kind| (kind.name(), 0));
        for ((_, n), count) in named.iter_mut().zip(self.by_kind) {
            *n = count;
        }
        named
    }
}
