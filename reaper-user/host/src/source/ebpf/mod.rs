//! Event source with the highest priority: eBPF probes in the kernel.
//!
//! The order of setup matters. The layout of kernel structures is read from BTF and passed to the probes as constants.
//! Then the programs are loaded, which the verifier checks, and attached. Only after that may /proc be read for
//! pre-existing processes, so that no process is missed in between.

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
pub use load::object_sha256;

/// Checks that the probes can be loaded on this host. Passes them through the verifier and drops them again.
///
/// # Errors
/// The probes cannot be loaded.
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

/// Source that reads the events of attached probes. Dropping it detaches them unless they are pinned.
pub struct EbpfSource {
    ring: Ring,
    state: KernelMaps,
    /// Holder of the program that lists all processes. Any thread can run it.
    task_iter: Arc<Mutex<Ebpf>>,
    /// Links that keep the probes attached, even if a user removes their pins.
    links: Vec<FdLink>,
    pin_dir: Option<PinDir>,
    /// Attached programs, of which the kernel counts missed runs.
    probes: Vec<OwnedFd>,
    /// Whether the maps and the ring are those of an earlier service.
    resumed: bool,
    /// Whether maps of another ABI version were found, which cannot be resumed.
    replaced_other_abi: bool,
    can_signal: bool,
    reports_moves: bool,
    filters: bool,
}

impl EbpfSource {
    /// Loads and attaches the probes, or resumes the pinned probes of an earlier service.
    ///
    /// If pinning fails, it logs a warning and continues without pins.
    ///
    /// # Errors
    /// The probes cannot be loaded, or another service holds the pins ([`PinError::Locked`]).
    pub fn open(options: &ProbeOptions, names: &NameTable) -> Result<EbpfSource, EbpfError> {
        let pin_error = match &options.pin {
            None => None,
            Some(pin) => match EbpfSource::open_pinned(options, names, pin) {
                Err(EbpfError::Pin(error)) if !matches!(error, PinError::Locked { .. }) => {
                    Some(error)
                }
                other => return other,
            },
        };
        let prepared = PreparedObject::new(options, options.ring_size)?;
        let mut loaded = prepared.load(None)?;
        let (ring, state) = shared_maps(&prepared, &mut loaded, names)?;
        loaded.load_probes()?;
        let links = loaded.attach()?;
        if let Some(error) = pin_error {
            tracing::warn!(
                "cannot pin the probes: {error}; this service works, but when it stops or restarts, events are lost until the next \
                 one runs{}",
                stale_pins(options)
            );
        }
        EbpfSource::new(loaded, ring, state, links)
    }

    /// Opens the source with pins: resumes the maps and probes of an earlier service, and creates and pins what is
    /// missing.
    fn open_pinned(
        options: &ProbeOptions,
        names: &NameTable,
        pin: &PinOptions,
    ) -> Result<EbpfSource, EbpfError> {
        let mut pin_dir = PinDir::acquire(pin)?;
        let found = pin_dir.find_maps()?;
        pin_dir.is_fresh = found.is_none();
        let source = EbpfSource::load_pinned(options, names, &pin_dir, found)?;
        Ok(EbpfSource {
            pin_dir: Some(pin_dir),
            ..source
        })
    }

    /// Does the work of `open_pinned` in a locked directory. `found` is the directory of pinned maps and the size of
    /// their ring.
    fn load_pinned(
        options: &ProbeOptions,
        names: &NameTable,
        pin_dir: &PinDir,
        found: Option<(PathBuf, u32)>,
    ) -> Result<EbpfSource, EbpfError> {
        let (maps, ring_size) = match &found {
            Some((maps, ring_size)) => (Some(maps.as_path()), *ring_size),
            None => (None, options.ring_size),
        };
        let prepared = PreparedObject::new(options, ring_size)?;
        let mut loaded = prepared.load(maps)?;
        if maps.is_none() {
            pin_dir.pin_maps(&loaded)?;
        }
        let (ring, state) = shared_maps(&prepared, &mut loaded, names)?;
        if !pin_dir.has_probes(&loaded, &prepared.identity) {
            loaded.load_probes()?;
            let links = loaded.attach()?;
            pin_dir.pin_probes(&prepared.identity, &mut loaded, links)?;
        }
        let replaced = pin_dir.remove_others(&prepared.identity)?;
        let probes = pin_dir.probe_fds(&loaded, &prepared.identity);
        Ok(EbpfSource {
            probes,
            resumed: maps.is_some(),
            replaced_other_abi: replaced > 0,
            links: pin_dir.links(&loaded, &prepared.identity),
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
            pin_dir: None,
            resumed: false,
            replaced_other_abi: false,
        })
    }
}

/// Returns what to do about pins of an earlier service that cannot be used; empty without such pins.
fn stale_pins(options: &ProbeOptions) -> String {
    match options.pin.as_ref().and_then(pins::find_stale) {
        None => String::new(),
        Some(stale) => format!(
            "; probes of an earlier service stay pinned in {} and record events for nothing: run `reaper unpin` on the host",
            stale.display()
        ),
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

    /// Returns the number of runs that the kernel skipped because another probe ran on the same processor. Linux 5.12
    /// and later count them, since the probe was loaded.
    ///
    /// A skipped event is not reported, and a skipped fork passes on no membership.
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

    /// Returns true, because the probes report an exit before the pid can be reused.
    fn confirms_identity(&mut self, _: ProcessKey) -> bool {
        true
    }

    /// Announces whether the service is idle. After `true` the caller must drain the ring once more, a little later: a probe
    /// that still saw the old announcement may have committed a record without waking the service.
    fn announce_idle(&mut self, idle: bool) -> Result<(), SourceError> {
        Ok(self.state.set_control(CONTROL_IDLE, idle.into())?)
    }

    /// Announces whether an escalation is open. While one is, each record wakes the reader.
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
            task_iter: Arc::clone(&self.task_iter),
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
        self.pin_dir.as_ref().map(PinDir::path)
    }

    fn keep_pinned(&mut self) {
        if let Some(pin_dir) = &mut self.pin_dir {
            pin_dir.is_fresh = false;
        }
    }

    fn unpin(&mut self) -> Result<(), SourceError> {
        self.links.clear();
        let removed = self
            .pin_dir
            .take()
            .map_or(Ok(()), |pin_dir| pin_dir.remove());
        Ok(removed.map_err(EbpfError::from)?)
    }
}

impl Diagnostics for aya_log::EbpfLogger<&'static dyn log::Log> {
    fn flush(&mut self) {
        self.flush();
    }
}

/// Reader of the kernel's process list and of the map of members.
struct Reader {
    task_iter: Arc<Mutex<Ebpf>>,
    member_map: MemberMap,
}

impl KernelReader for Reader {
    fn processes(&self) -> Result<Vec<ListedProcess>, SourceError> {
        let bytes = list_processes(&mut locked(&self.task_iter))?;
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

fn locked(task_iter: &Mutex<Ebpf>) -> MutexGuard<'_, Ebpf> {
    // A thread that panicked has left the program usable.
    task_iter.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the program that lists all processes, and returns its output: rows for [`decode_row`].
fn list_processes(ebpf: &mut Ebpf) -> Result<Vec<u8>, EbpfError> {
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

/// Opens the ring and the maps, and writes the program names before any probe can look one up. Also resets settings of
/// an earlier service, and loads the program that lists all processes.
///
/// # Errors
/// The maps cannot be used, or belong to another PID namespace.
fn shared_maps(
    prepared: &PreparedObject,
    loaded: &mut LoadedObject<'_>,
    names: &NameTable,
) -> Result<(Ring, KernelMaps), EbpfError> {
    let ring = Ring::new(loaded.take_map("EVENTS")?)?;
    let mut state = KernelMaps::new(|name| loaded.take_map(name))?;
    if !state.set_namespace(prepared.pid_namespace())? {
        return Err(EbpfError::OtherNamespace);
    }
    state.reset_controls()?;
    state.write_names(names)?;
    loaded.load_task_iter()?;
    if prepared.pid_namespace() != 0 {
        // The probes learn the nesting level of the pid namespace from this run.
        list_processes(&mut loaded.ebpf)?;
    }
    Ok((ring, state))
}
