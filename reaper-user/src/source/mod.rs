//! Where events come from. Sources know nothing of policy.
//!
//! The engine waits until a source is readable and drains it. What only the probes have (maps in the kernel that
//! outlive the service, a ring that is given back, signals of their own) others answer for by having none.

#[cfg(any(target_os = "macos", test))]
pub mod darwin;
#[cfg(target_os = "linux")]
pub mod ebpf;
pub mod kind;
#[cfg(target_os = "linux")]
pub mod proc_connector;
#[cfg(target_os = "linux")]
pub mod procfs;
pub mod scan;
mod snapshot;

/// What answers elsewhere as the probes and /proc do on Linux.
#[cfg(target_os = "macos")]
pub use darwin::{no_probes as ebpf, table as procfs};

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use reaper_common::{Defect, Kind};

#[cfg(target_os = "macos")]
use darwin::kernel::{Scan, ScanError};
use ebpf::{Ring, State};
use kind::SourceKind;
#[cfg(target_os = "linux")]
use proc_connector::{ConnectorError, ProcConnector};
use reaper_model::agent::NameTable;
use reaper_model::event::{Event, ProcessKey};
#[cfg(target_os = "linux")]
use scan::{Scan, ScanError};

/// A source at work.
pub enum Source {
    Ebpf(Box<ebpf::Source>),
    Scan(Box<Scan>),
    #[cfg(target_os = "linux")]
    ProcConnector(Box<ProcConnector>),
}

/// Why a source cannot be used, or goes on no longer.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error(transparent)]
    Ebpf(#[from] ebpf::SourceError),
    #[error(transparent)]
    Scan(#[from] ScanError),
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    ProcConnector(#[from] ConnectorError),
}

/// How many events were lost, by kind where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub total: u64,
    pub by_kind: [u64; Kind::ALL.len()],
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
    Record(Defect),
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

impl Source {
    /// Where it stands among the sources.
    pub fn kind(&self) -> SourceKind {
        match self {
            Source::Ebpf(_) => SourceKind::Ebpf,
            Source::Scan(_) => SourceKind::Scan,
            #[cfg(target_os = "linux")]
            Source::ProcConnector(_) => SourceKind::ProcConnector,
        }
    }

    /// What it is called in configs, on command lines and in the stream.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Hands over all that has happened before this call, in order. What is no record is counted and skipped.
    pub fn drain(&mut self, sink: impl FnMut(Event)) -> Drained {
        match self {
            Source::Ebpf(probes) => probes.drain(sink),
            Source::Scan(scan) => scan.drain(sink),
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.drain(sink),
        }
    }

    /// The probes, if they are the source.
    pub fn probes(&self) -> Option<&ebpf::Source> {
        match self {
            Source::Ebpf(probes) => Some(probes),
            Source::Scan(_) => None,
            #[cfg(target_os = "linux")]
            Source::ProcConnector(_) => None,
        }
    }

    /// The same, to change them.
    pub fn probes_mut(&mut self) -> Option<&mut ebpf::Source> {
        match self {
            Source::Ebpf(probes) => Some(probes),
            Source::Scan(_) => None,
            #[cfg(target_os = "linux")]
            Source::ProcConnector(_) => None,
        }
    }

    /// What the kernel keeps for the service and the one after it.
    pub fn maps(&self) -> Option<&State> {
        self.probes().map(|probes| &probes.state)
    }

    /// The same, to change it.
    pub fn maps_mut(&mut self) -> Option<&mut State> {
        self.probes_mut().map(|probes| &mut probes.state)
    }

    /// What has to be given back when it has been read and seen to.
    pub fn ring(&self) -> Option<&Ring> {
        self.probes().map(ebpf::Source::ring)
    }

    /// Up to where events have been handed over: only ever more, and 0 where that is not counted.
    pub fn position(&self) -> u64 {
        self.ring().map_or(0, Ring::position)
    }

    /// Whether it tells only of those who are followed.
    pub fn is_filtered(&self) -> bool {
        self.probes().is_some_and(ebpf::Source::is_filtered)
    }

    /// Whether it can send signals to others than the current process.
    pub fn can_signal(&self) -> bool {
        self.probes().is_some_and(ebpf::Source::can_signal)
    }

    /// How often the kernel has left a probe out.
    pub fn skipped(&self) -> u64 {
        self.probes().map_or(0, ebpf::Source::skipped)
    }

    /// What was lost since the source began.
    pub fn lost(&self) -> Lost {
        match self {
            Source::Ebpf(probes) => probes.state.lost(),
            Source::Scan(_) => Lost::default(),
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.lost(),
        }
    }

    /// How much that is in all: cheap.
    pub fn lost_total(&self) -> u64 {
        match self {
            Source::Ebpf(probes) => probes.state.lost_total(),
            Source::Scan(_) => 0,
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.lost().total,
        }
    }

    /// Whether there is more to be drained without being readable.
    pub fn has_waiting(&self) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.has_waiting(),
            Source::Ebpf(_) | Source::Scan(_) => false,
        }
    }

    /// Whether there is something that has been told of and not been handed over.
    pub fn has_unreported(&self) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.has_untold(),
            Source::Ebpf(_) | Source::Scan(_) => false,
        }
    }

    /// Why it tells nothing any more, if it does not: the next one is to take its place.
    pub fn failure(&self) -> Option<SourceError> {
        match self {
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.failure().map(SourceError::from),
            Source::Ebpf(probes) => probes.state.failure().map(SourceError::from),
            Source::Scan(_) => None,
        }
    }

    /// It takes the place of another, which has told of these: it is to call them the same. What a scan calls them is
    /// understood by the tick.
    pub fn take_over(&mut self, keys: impl Iterator<Item = ProcessKey>) {
        match self {
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.take_over(keys),
            Source::Ebpf(_) | Source::Scan(_) => drop(keys),
        }
    }

    /// How many could not be followed for want of room.
    pub fn untracked_members(&self) -> u64 {
        self.maps().map_or(0, State::unfollowed)
    }

    /// Whether who is not in the maps is no member.
    pub fn is_complete(&self) -> bool {
        self.maps().is_some_and(State::is_complete)
    }

    /// Where it is pinned, if it is.
    pub fn pinned_at(&self) -> Option<&Path> {
        self.probes().and_then(ebpf::Source::pinned_at)
    }

    /// From now on what is pinned outlives this program, however that ends.
    pub fn keep_pinned(&mut self) {
        if let Some(probes) = self.probes_mut() {
            probes.keep_pinned();
        }
    }

    /// Ends its work for good; without it, what is pinned goes on when this is dropped.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn disarm(&mut self) -> Result<(), SourceError> {
        self.with_probes(ebpf::Source::disarm)
    }

    /// Tells it whether the service sleeps until it is woken.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn announce_idle(&mut self, idle: bool) -> Result<(), SourceError> {
        self.with_probes(|probes| probes.state.set_idle(idle))
    }

    /// Tells it whether every event matters now.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn announce_escalations(&mut self, open: bool) -> Result<(), SourceError> {
        if let Source::Scan(scan) = self {
            scan.set_ladders(open);
        }
        self.with_probes(|probes| probes.state.announce_escalations(open))
    }

    /// The end of a process matters, or does not any more. The kernel tells of all of them but to a scan.
    pub fn follow(&mut self, key: ProcessKey, wanted: bool) {
        if let Source::Scan(scan) = self {
            scan.follow(key, wanted);
        }
    }

    /// What is drained next is no older than this call, also where it is found by looking.
    pub fn scan_now(&mut self) {
        if let Source::Scan(scan) = self {
            scan.look_now();
        }
    }

    /// Where processes are found by looking: the next look comes soon.
    pub fn scan_soon(&mut self) {
        if let Source::Scan(scan) = self {
            scan.look_soon();
        }
    }

    /// Whether it finds who is born by looking, so that what comes and goes between two looks is only concluded. On macOS
    /// too, where the kernel tells of forks and exits, but not of who was born.
    pub fn is_scan(&self) -> bool {
        matches!(self, Source::Scan(_))
    }

    /// Where processes are found by looking: until when, in ns since boot, whoever was born and lives has been told of, but
    /// for those who cannot be read for long.
    pub fn last_scan(&self) -> Option<u64> {
        match self {
            Source::Scan(scan) => Some(scan.looked()),
            Source::Ebpf(_) => None,
            #[cfg(target_os = "linux")]
            Source::ProcConnector(_) => None,
        }
    }

    /// Whether the process is still the one that has been told of under this key. The probes tell of an exit before
    /// anybody else can have the pid; a scan of /proc knows it only of whom it has a hold on, and one on macOS as of its
    /// last pass; and the proc connector tells of an exit a moment after the parent may have waited, so that /proc is asked
    /// as well.
    pub fn confirms_identity(&mut self, key: ProcessKey) -> bool {
        match self {
            Source::Ebpf(_) => true,
            Source::Scan(scan) => scan.vouches(key),
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.vouches(key),
        }
    }

    /// Whether it tells of processes that go to another cgroup.
    pub fn reports_moves(&self) -> bool {
        self.probes().is_some_and(ebpf::Source::reports_moves)
    }

    /// Why it has no hold on some, if it has to have one and that is so.
    pub fn out_of_files(&self) -> Option<Errno> {
        match self {
            Source::Scan(scan) => scan.starved(),
            Source::Ebpf(_) => None,
            #[cfg(target_os = "linux")]
            Source::ProcConnector(_) => None,
        }
    }

    /// Leaves word of how much loss has been told of.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn set_lost_reported(&mut self, records: u64) -> Result<(), SourceError> {
        self.with_probes(|probes| probes.state.set_lost_told(records))
    }

    /// Gives it the names that rules know.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn set_names(&mut self, names: &NameTable) -> Result<(), SourceError> {
        self.with_probes(|probes| probes.state.set_names(names))
    }

    /// A process is gone, and nobody has told of it.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn forget(&mut self, key: ProcessKey) -> Result<(), SourceError> {
        self.with_probes(|probes| probes.state.remove(key))
    }

    fn with_probes(
        &mut self,
        work: impl FnOnce(&mut ebpf::Source) -> Result<(), ebpf::SourceError>,
    ) -> Result<(), SourceError> {
        self.probes_mut().map_or(Ok(()), |probes| Ok(work(probes)?))
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Source::Ebpf(probes) => probes.ring().as_fd(),
            Source::Scan(scan) => scan.as_fd(),
            #[cfg(target_os = "linux")]
            Source::ProcConnector(connector) => connector.as_fd(),
        }
    }
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
    pub fn named(&self) -> [(&'static str, u64); Kind::ALL.len()] {
        let mut named = Kind::ALL.map(|kind| (kind.name(), 0));
        for ((_, n), count) in named.iter_mut().zip(self.by_kind) {
            *n = count;
        }
        named
    }
}
