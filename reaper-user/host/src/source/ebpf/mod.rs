//! The kernel's own word: loads the probes, attaches them, and reads their ring.
//!
//! The order matters and is the same every time: the structures' layout is read from BTF, handed to
//! the probes as constants, the programs are loaded (here the verifier judges them) and attached;
//! only then may anybody read /proc, so that nothing falls between the two.

pub mod btf;
pub(super) mod error;
pub mod kfunc;
mod load;
pub mod pins;
mod record;
mod ring;
mod state;

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aya::Ebpf;
use aya::programs::links::FdLink;
use reaper_common::{CONTROL_ESCALATIONS, CONTROL_IDLE, decode_row};

use super::drained::{Drained, Lost};
use super::error::SourceError;
use super::event_source::Source;
use super::kind::SourceKind;
use super::probes::{
    Diagnostics, EventRing, KernelReader, ListedProcess, PinOptions, ProbeMaps, ProbeOptions,
    Probes,
};
use load::{LoadedObject, PreparedObject};
use pins::PinDir;
use reaper_model::event::{Event, Membership, ProcessKey};
use reaper_model::ruleset::NameTable;
use ring::Ring;
use state::{KernelMaps, MemberMap};

pub use error::{EbpfError, PinError};

/// Whether the probes load here: they are judged by the verifier and dropped again.
///
/// # Errors
/// Why they do not.
pub fn probe() -> Result<(), EbpfError> {
    let prepared = PreparedObject::new(
        &ProbeOptions {
            ring_size: 64 << 10,
            max_members: 1024,
            kernel_reap: true,
            ..ProbeOptions::default()
        },
        64 << 10,
    )?;
    let mut loaded = prepared.load(None)?;
    loaded.load_probes()?;
    loaded.load_task_iter()
}

/// The probes at work, and what they share with the service. Dropping it detaches them, unless they
/// are pinned.
pub struct EbpfSource {
    ring: Ring,
    state: KernelMaps,
    /// Holds the program that lists all processes, which can be run from any thread.
    task_iter: Arc<Mutex<Ebpf>>,
    /// Hold the probes: also where they are pinned, since somebody may remove the pins.
    links: Vec<FdLink>,
    place: Option<PinDir>,
    /// The programs at work, for what the kernel counts of them.
    probes: Vec<OwnedFd>,
    /// Maps and ring are those of a service before this one.
    resumed: bool,
    /// Whether maps were found of a version that cannot be gone on from.
    replaced_other_abi: bool,
    can_signal: bool,
    reports_moves: bool,
    filters: bool,
}

impl EbpfSource {
    /// Loads and attaches the probes, or takes up what a service before this one has left at work.
    ///
    /// Where nothing can be pinned, it says so and goes on without.
    ///
    /// # Errors
    /// Each names what is missing and what to do about it. [`PinError::Locked`]: another service has it.
    pub fn open(options: &ProbeOptions, names: &NameTable) -> Result<EbpfSource, EbpfError> {
        let why_not = match &options.pin {
            None => None,
            Some(pin) => match EbpfSource::pinned(options, names, pin) {
                Err(EbpfError::Pin(error)) if !matches!(error, PinError::Locked { .. }) => {
                    Some(error)
                }
                other => return other,
            },
        };
        let prepared = PreparedObject::new(options, options.ring_size)?;
        let mut loaded = prepared.load(None)?;
        let (ring, state) = shared(&prepared, &mut loaded, names)?;
        loaded.load_probes()?;
        let links = loaded.attach()?;
        if let Some(error) = why_not {
            tracing::warn!("{error}; what happens while this service is down will not be known");
        }
        EbpfSource::new(loaded, ring, state, links)
    }

    fn pinned(
        options: &ProbeOptions,
        names: &NameTable,
        pin: &PinOptions,
    ) -> Result<EbpfSource, EbpfError> {
        let mut place = PinDir::take(pin)?;
        let found = place.found_maps()?;
        place.fresh = found.is_none();
        let source = EbpfSource::pinned_at_place(options, names, &place, found)?;
        Ok(EbpfSource {
            place: Some(place),
            ..source
        })
    }

    fn pinned_at_place(
        options: &ProbeOptions,
        names: &NameTable,
        place: &PinDir,
        found: Option<(PathBuf, u32)>,
    ) -> Result<EbpfSource, EbpfError> {
        let (maps, ring_size) = match &found {
            Some((maps, ring_size)) => (Some(maps.as_path()), *ring_size),
            None => (None, options.ring_size),
        };
        let prepared = PreparedObject::new(options, ring_size)?;
        let mut loaded = prepared.load(maps)?;
        if maps.is_none() {
            place.pin_maps(&loaded)?;
        }
        let (ring, state) = shared(&prepared, &mut loaded, names)?;
        if !place.has_probes(&loaded, &prepared.identity) {
            loaded.load_probes()?;
            let links = loaded.attach()?;
            place.pin_probes(&prepared.identity, &mut loaded, links)?;
        }
        let replaced = place.remove_others(&prepared.identity)?;
        let probes = place.probe_fds(&loaded, &prepared.identity);
        Ok(EbpfSource {
            probes,
            resumed: maps.is_some(),
            replaced_other_abi: replaced > 0,
            links: place.links(&loaded, &prepared.identity),
            ..EbpfSource::new(loaded, ring, state, Vec::new())?
        })
    }

    fn new(
        mut loaded: LoadedObject<'_>,
        ring: Ring,
        state: KernelMaps,
        links: Vec<(&'static str, FdLink)>,
    ) -> Result<EbpfSource, EbpfError> {
        Ok(EbpfSource {
            probes: loaded.probe_fds(),
            ring,
            state,
            can_signal: loaded.prepared.can_signal,
            reports_moves: loaded.prepared.reports_moves,
            filters: loaded.prepared.is_filtered(),
            task_iter: Arc::new(Mutex::new(loaded.ebpf)),
            links: links.into_iter().map(|(_, link)| link).collect(),
            place: None,
            resumed: false,
            replaced_other_abi: false,
        })
    }
}

impl Source for EbpfSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Ebpf
    }

    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained {
        let until = self.ring.produced();
        self.ring.drain_until(until, sink)
    }

    fn probes(&self) -> Option<&dyn Probes> {
        Some(self)
    }

    fn probes_mut(&mut self) -> Option<&mut dyn Probes> {
        Some(self)
    }

    fn lost(&self) -> Lost {
        self.state.lost()
    }

    fn lost_total(&self) -> u64 {
        self.state.lost_total()
    }

    /// The kernel does not run a probe while another runs on the same processor; 5.12 and later count that. Such an
    /// event is not reported, and no mark is inherited.
    fn skipped(&self) -> u64 {
        let misses = |probe: &OwnedFd| {
            let path = format!("/proc/self/fdinfo/{}", probe.as_raw_fd());
            let text = std::fs::read_to_string(path).ok()?;
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("recursion_misses:"))?;
            line.trim().parse::<u64>().ok()
        };
        self.probes.iter().filter_map(misses).sum()
    }

    fn untracked_members(&self) -> u64 {
        self.state.untracked_members()
    }

    fn is_filtered(&self) -> bool {
        self.filters
    }

    fn reports_moves(&self) -> bool {
        self.reports_moves
    }

    fn failure(&self) -> Option<SourceError> {
        self.state.failure().map(SourceError::from)
    }

    /// Returns true: the probes report an exit before the pid can be reused.
    fn confirms_identity(&mut self, _: ProcessKey) -> bool {
        true
    }

    /// After `true` the ring has to be drained once more, a little later: a probe may have committed a record without a
    /// wake-up because of what was announced before.
    fn announce_idle(&mut self, idle: bool) -> Result<(), SourceError> {
        Ok(self.state.set_control(CONTROL_IDLE, idle.into())?)
    }

    /// While an escalation is open, each record wakes the reader.
    fn announce_escalations(&mut self, open: bool) -> Result<(), SourceError> {
        Ok(self.state.set_control(CONTROL_ESCALATIONS, open.into())?)
    }
}

impl AsFd for EbpfSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl Probes for EbpfSource {
    fn maps(&self) -> &dyn ProbeMaps {
        &self.state
    }

    fn maps_mut(&mut self) -> &mut dyn ProbeMaps {
        &mut self.state
    }

    fn ring(&self) -> &dyn EventRing {
        &self.ring
    }

    fn reader(&self) -> Result<Box<dyn KernelReader>, SourceError> {
        Ok(Box::new(Reader {
            table: Arc::clone(&self.task_iter),
            member_map: self.state.member_map()?,
        }))
    }

    fn diagnostics(&mut self) -> Result<Box<dyn Diagnostics>, SourceError> {
        let logger = aya_log::EbpfLogger::init(&mut locked(&self.task_iter));
        Ok(Box::new(logger.map_err(|e| EbpfError::load(e.into()))?))
    }

    fn can_signal(&self) -> bool {
        self.can_signal
    }

    fn is_resumed(&self) -> bool {
        self.resumed
    }

    fn replaced_other_abi(&self) -> bool {
        self.replaced_other_abi
    }

    fn pinned_at(&self) -> Option<&Path> {
        self.place.as_ref().map(PinDir::path)
    }

    fn keep_pinned(&mut self) {
        if let Some(place) = &mut self.place {
            place.fresh = false;
        }
    }

    fn unpin(&mut self) -> Result<(), SourceError> {
        self.links.clear();
        let removed = self.place.take().map_or(Ok(()), |place| place.remove());
        Ok(removed.map_err(EbpfError::from)?)
    }
}

impl Diagnostics for aya_log::EbpfLogger<&'static dyn log::Log> {
    fn flush(&mut self) {
        self.flush();
    }
}

/// The program that lists all processes, and the map of members.
struct Reader {
    table: Arc<Mutex<Ebpf>>,
    member_map: MemberMap,
}

impl KernelReader for Reader {
    fn processes(&self) -> Result<Vec<ListedProcess>, SourceError> {
        let bytes = list(&mut locked(&self.table))?;
        let (mut rows, mut rest) = (Vec::new(), &bytes[..]);
        while !rest.is_empty() {
            let (row, next) =
                decode_row(rest).map_err(|e| EbpfError::Refused(e.to_string().into()))?;
            rows.push(ListedProcess {
                key: record::key(row.process),
                pidfd_inode: row.pidfd_inode,
            });
            rest = next;
        }
        Ok(rows)
    }

    fn members(&self) -> HashMap<ProcessKey, Membership> {
        self.member_map.read()
    }
}

fn locked(table: &Mutex<Ebpf>) -> MutexGuard<'_, Ebpf> {
    // Nothing is half done in it where a thread has panicked.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the program that lists all processes writes.
fn list(ebpf: &mut Ebpf) -> Result<Vec<u8>, EbpfError> {
    let refused = |e: Box<dyn std::error::Error + Send + Sync>| EbpfError::Refused(e);
    let program = load::task_iter(ebpf)?;
    let link = program.attach().and_then(|id| program.take_link(id));
    let link = link.map_err(|e| refused(e.into()))?;
    let mut file = link.into_file().map_err(|e| refused(e.into()))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)
        .map_err(|e| refused(e.into()))?;
    Ok(bytes)
}

/// What the probes and the service share, with the names in place before a probe can ask for one.
fn shared(
    prepared: &PreparedObject,
    loaded: &mut LoadedObject<'_>,
    names: &NameTable,
) -> Result<(Ring, KernelMaps), EbpfError> {
    let ring = Ring::new(loaded.take_map("EVENTS")?)?;
    let mut state = KernelMaps::new(|name| loaded.take_map(name))?;
    if !state.set_namespace(prepared.pid_namespace())? {
        return Err(EbpfError::OtherNamespace);
    }
    state.withdraw()?;
    state.write_names(names)?;
    loaded.load_task_iter()?;
    if prepared.pid_namespace() != 0 {
        // How deep that lies is what the probes learn from this.
        list(&mut loaded.ebpf)?;
    }
    Ok((ring, state))
}
