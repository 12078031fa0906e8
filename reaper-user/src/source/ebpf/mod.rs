//! The kernel's own word: loads the probes, attaches them, and reads their ring.
//!
//! The order matters and is the same every time: the structures' layout is read from BTF, handed to
//! the probes as constants, the programs are loaded (here the verifier judges them) and attached;
//! only then may anybody read /proc, so that nothing falls between the two.

pub mod btf;
mod error;
mod kfunc;
mod load;
pub mod pins;
mod record;
mod ring;
mod state;

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aya::Ebpf;
use aya::programs::links::FdLink;
use reaper_common::{Offsets, RawKey, TableRow, decode_row};

use super::{Drained, Lost};
use load::{Loaded, PreparedObject};
use pins::{PinDir, PinError, PinOptions};
use reaper_model::agent::NameTable;
use reaper_model::event::{Event, ProcessKey};

pub use error::SourceError;
pub use ring::{Release, Ring};
pub use state::{MemberMap, State};

/// What differs between the kernels that the object runs on.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub offsets: Offsets,
    /// `sched_process_exit` says whether the group is dead (6.16).
    pub exit_has_group_dead: bool,
    /// Programs may call `bpf_loop` (5.17).
    pub has_bpf_loop: bool,
    /// `cgroup_attach_task` is as the probe expects it: all kernels with cgroups.
    pub tells_of_moves: bool,
}

impl Kernel {
    /// Reads the running kernel's type information.
    ///
    /// # Errors
    /// There is none, or it lacks something that the probes need.
    pub fn probe() -> Result<Kernel, SourceError> {
        Kernel::of(&btf::Btf::load(btf::VMLINUX.as_ref()).map_err(SourceError::Btf)?)
    }

    fn of(btf: &btf::Btf) -> Result<Kernel, SourceError> {
        Ok(Kernel {
            offsets: btf.offsets().map_err(SourceError::Btf)?,
            exit_has_group_dead: btf.tracepoint_args("sched_process_exit") == Some(2),
            has_bpf_loop: btf.has_enum_value("bpf_func_id", "BPF_FUNC_loop"),
            tells_of_moves: btf.tracepoint_args("cgroup_attach_task") == Some(4),
        })
    }
}

/// How to set the source up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes, a power of two and a multiple of the page size.
    pub ring_size: u32,
    /// Processes that can be followed at once.
    pub max_members: u32,
    /// Only of those who are followed is told, and of who may have to be.
    pub filter: bool,
    /// Only what descends from a process in scope can be an agent.
    pub scoped: bool,
    /// Signals are sent from the kernel where it can.
    pub kernel_reap: bool,
    /// Where to pin what outlives this process; `None`: nothing does.
    pub pin: Option<PinOptions>,
    /// Whether the probes' own diagnostics are wanted.
    pub log: bool,
    /// Another object than the one built in.
    pub object: Option<std::path::PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            ring_size: 8 << 20,
            max_members: 65_536,
            filter: false,
            scoped: false,
            kernel_reap: false,
            pin: None,
            log: false,
            object: None,
        }
    }
}

/// Whether the probes load here: they are judged by the verifier and dropped again.
///
/// # Errors
/// Why they do not.
pub fn probe() -> Result<(), SourceError> {
    let prepared = PreparedObject::new(
        &Options {
            ring_size: 64 << 10,
            max_members: 1024,
            kernel_reap: true,
            ..Options::default()
        },
        64 << 10,
    )?;
    let mut loaded = prepared.load(None)?;
    loaded.load_probes()?;
    loaded.load_table()
}

/// The probes at work, and what they share with the service. Dropping it detaches them, unless they
/// are pinned.
pub struct Source {
    ring: Ring,
    pub state: State,
    table: Table,
    /// Hold the probes: also where they are pinned, since somebody may remove the pins.
    links: Vec<FdLink>,
    place: Option<PinDir>,
    /// The programs at work, for what the kernel counts of them.
    probes: Vec<OwnedFd>,
    /// Maps and ring are those of a service before this one.
    taken_up: bool,
    /// How many sets of maps were found of versions that cannot be gone on from.
    left_behind: usize,
    kills: bool,
    tells_moves: bool,
    filters: bool,
}

impl Source {
    /// Loads and attaches the probes, or takes up what a service before this one has left at work.
    ///
    /// Where nothing can be pinned, it says so and goes on without.
    ///
    /// # Errors
    /// Each names what is missing and what to do about it. [`PinError::Held`]: another service has it.
    pub fn open(options: &Options, names: &NameTable) -> Result<Source, SourceError> {
        let why_not = match &options.pin {
            None => None,
            Some(pin) => match Source::pinned(options, names, pin) {
                Err(SourceError::Pin(error)) if !matches!(error, PinError::Held { .. }) => {
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
        Source::new(loaded, ring, state, links)
    }

    fn pinned(
        options: &Options,
        names: &NameTable,
        pin: &PinOptions,
    ) -> Result<Source, SourceError> {
        let mut place = PinDir::take(pin)?;
        let found = place.found_maps()?;
        place.fresh = found.is_none();
        let source = Source::pinned_at_place(options, names, &place, found)?;
        Ok(Source {
            place: Some(place),
            ..source
        })
    }

    fn pinned_at_place(
        options: &Options,
        names: &NameTable,
        place: &PinDir,
        found: Option<(PathBuf, u32)>,
    ) -> Result<Source, SourceError> {
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
        let left_behind = place.remove_others(&prepared.identity)?;
        let probes = place.probe_fds(&loaded, &prepared.identity);
        Ok(Source {
            probes,
            taken_up: maps.is_some(),
            left_behind,
            links: place.links(&loaded, &prepared.identity),
            ..Source::new(loaded, ring, state, Vec::new())?
        })
    }

    fn new(
        mut loaded: Loaded<'_>,
        ring: Ring,
        state: State,
        links: Vec<(&'static str, FdLink)>,
    ) -> Result<Source, SourceError> {
        Ok(Source {
            probes: loaded.probe_fds(),
            ring,
            state,
            kills: loaded.kills(),
            tells_moves: loaded.tells_moves(),
            filters: loaded.filters(),
            table: Table(Arc::new(Mutex::new(loaded.ebpf))),
            links: links.into_iter().map(|(_, link)| link).collect(),
            place: None,
            taken_up: false,
            left_behind: 0,
        })
    }

    /// The ring, for waiting on its file descriptor.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Whether a service before this one has left the maps and the ring.
    pub fn is_taken_up(&self) -> bool {
        self.taken_up
    }

    /// Whether a service of another ABI version has left what could not be gone on from.
    pub fn replaced_other_abi(&self) -> bool {
        self.left_behind > 0
    }

    /// Whether the probes can send signals to others than the current process.
    pub fn can_signal(&self) -> bool {
        self.kills
    }

    /// Whether the probes tell of processes that go to another cgroup.
    pub fn reports_moves(&self) -> bool {
        self.tells_moves
    }

    /// Whether the probes tell only of those who are followed.
    pub fn is_filtered(&self) -> bool {
        self.filters
    }

    /// How often the kernel has left a probe out, because another was at work on that processor (5.12 and
    /// later count it): nobody was told then, and nothing handed on.
    pub fn skipped(&self) -> u64 {
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

    /// Where it is pinned, if it is.
    pub fn pinned_at(&self) -> Option<&std::path::Path> {
        self.place.as_ref().map(PinDir::path)
    }

    /// From now on what is pinned outlives this program, however that ends.
    pub fn keep_pinned(&mut self) {
        if let Some(place) = &mut self.place {
            place.fresh = false;
        }
    }

    /// Ends the probes' work for good; without it, what is pinned goes on when this is dropped.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn disarm(&mut self) -> Result<(), SourceError> {
        self.links.clear();
        self.place
            .take()
            .map_or(Ok(()), |place| Ok(place.remove()?))
    }

    /// Hands over all that is in the ring, in order. What is no record is counted and skipped.
    pub fn drain(&mut self, sink: impl FnMut(Event)) -> Drained {
        let until = self.ring.produced();
        self.ring.drain_until(until, sink)
    }

    /// The program that lists all processes.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// A reader of the probes' own diagnostics, to be flushed when it is readable.
    ///
    /// # Errors
    /// The probes were loaded without them.
    pub fn logger(&mut self) -> Result<aya_log::EbpfLogger<&'static dyn log::Log>, SourceError> {
        aya_log::EbpfLogger::init(&mut self.table.ebpf()).map_err(|e| SourceError::load(e.into()))
    }
}

/// The program that lists all processes; can be run from any thread.
#[derive(Clone)]
pub struct Table(Arc<Mutex<Ebpf>>);

impl Table {
    fn ebpf(&self) -> MutexGuard<'_, Ebpf> {
        // Nothing is half done in it where a thread has panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All living processes that this program's pid namespace shows.
    ///
    /// # Errors
    /// The kernel refuses to list them.
    pub fn read(&self) -> Result<Vec<Row>, SourceError> {
        let bytes = list(&mut self.ebpf())?;
        let (mut rows, mut rest) = (Vec::new(), &bytes[..]);
        while !rest.is_empty() {
            let (row, next) =
                decode_row(rest).map_err(|e| SourceError::Refused(e.to_string().into()))?;
            rows.push(Row::from(row));
            rest = next;
        }
        Ok(rows)
    }
}

/// What the program that lists all processes writes.
fn list(ebpf: &mut Ebpf) -> Result<Vec<u8>, SourceError> {
    let refused = |e: Box<dyn std::error::Error + Send + Sync>| SourceError::Refused(e);
    let program = load::table(ebpf)?;
    let link = program.attach().and_then(|id| program.take_link(id));
    let link = link.map_err(|e| refused(e.into()))?;
    let mut file = link.into_file().map_err(|e| refused(e.into()))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)
        .map_err(|e| refused(e.into()))?;
    Ok(bytes)
}

/// A key as the kernel's maps have it.
pub fn raw_key(key: ProcessKey) -> RawKey {
    record::raw(key)
}

/// The same the other way; `None` for nobody.
pub fn model_key(key: RawKey) -> Option<ProcessKey> {
    record::visible(key)
}

/// A living process as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub key: ProcessKey,
    /// Inode number of its pidfds, 0 where the kernel gives none.
    pub pidfd_inode: u64,
}

impl From<TableRow> for Row {
    fn from(row: TableRow) -> Row {
        Row {
            key: record::key(row.process),
            pidfd_inode: row.pidfd_inode,
        }
    }
}

/// What the probes and the service share, with the names in place before a probe can ask for one.
fn shared(
    prepared: &PreparedObject,
    loaded: &mut Loaded<'_>,
    names: &NameTable,
) -> Result<(Ring, State), SourceError> {
    let ring = Ring::new(loaded.take_map("EVENTS")?)?;
    let mut state = State::new(|name| loaded.take_map(name))?;
    if !state.set_namespace(prepared.pid_namespace())? {
        return Err(SourceError::OtherNamespace);
    }
    // What the service before this one wanted of the probes need not be what this one wants.
    state.set_kill_on_fork(0)?;
    state.enable_kernel_reap(false)?;
    state.announce_escalations(false)?;
    state.set_names(names)?;
    loaded.load_table()?;
    if prepared.pid_namespace() != 0 {
        // How deep that lies is what the probes learn from this.
        list(&mut loaded.ebpf)?;
    }
    Ok((ring, state))
}
