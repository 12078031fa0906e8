//! The kernel's own word: loads the probes, attaches them, and reads their ring.
//!
//! The order matters and is the same every time: the structures' layout is read from BTF, handed to
//! the probes as constants, the programs are loaded (here the verifier judges them) and attached;
//! only then may anybody read /proc, so that nothing falls between the two.

pub mod btf;
mod error;
mod record;
mod ring;

use std::panic::resume_unwind;

use aya::maps::{Array, HashMap, Map, MapData, RingBuf};
use aya::programs::BtfTracePoint;
use aya::{Ebpf, EbpfLoader};
use object::{Object, ObjectSection};
use reaper_common::{
    ABI_SECTION, ABI_VERSION, CONTROL_IDLE, CONTROL_LADDERS, Defect, Kind, Offsets, Settings,
};

use crate::model::event::Event;
use crate::sys;

pub use error::SourceError;
pub use ring::Ring;

/// The probes as they were built; `cargo xtask build-ebpf` makes this file.
static OBJECT: &[u8] = aya::include_bytes_aligned!("reaper.bpf.o");

/// What differs between the kernels that the object runs on.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub offsets: Offsets,
    /// `sched_process_exit` says whether the group is dead (6.16).
    pub exit_has_group_dead: bool,
    /// Programs may call `bpf_loop` (5.17).
    pub has_bpf_loop: bool,
}

impl Kernel {
    /// Reads the running kernel's type information.
    ///
    /// # Errors
    /// There is none, or it lacks something that the probes need.
    pub fn probe() -> Result<Kernel, SourceError> {
        let btf = btf::Btf::load(btf::VMLINUX.as_ref()).map_err(SourceError::Btf)?;
        Ok(Kernel {
            offsets: btf.offsets().map_err(SourceError::Btf)?,
            exit_has_group_dead: btf.tracepoint_args("sched_process_exit") == Some(2),
            has_bpf_loop: btf.has_enum_value("bpf_func_id", "BPF_FUNC_loop"),
        })
    }
}

/// How to set the source up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes, a power of two and a multiple of the page size.
    pub ring_size: u32,
    /// Whether the probes' own diagnostics are wanted.
    pub log: bool,
    /// Another object than the one built in.
    pub object: Option<std::path::PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            ring_size: 8 << 20,
            log: false,
            object: None,
        }
    }
}

/// How many records found no room, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub total: u64,
    pub by_kind: [u64; Kind::ALL.len()],
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

    /// The counts with the names of their kinds.
    pub fn named(&self) -> [(&'static str, u64); Kind::ALL.len()] {
        let mut named = Kind::ALL.map(|kind| (kind.name(), 0));
        for ((_, n), count) in named.iter_mut().zip(self.by_kind) {
            *n = count;
        }
        named
    }
}

/// What a look into the ring brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    pub records: u64,
    /// Records that were none, and what was wrong with the last of them.
    pub malformed: u64,
    pub defect: Option<Defect>,
    /// Highest count of lost records that a record told of.
    pub lost: u64,
}

/// Whether the probes load here: they are judged by the verifier and dropped again.
///
/// # Errors
/// Why they do not.
pub fn probe() -> Result<(), SourceError> {
    Source::load(&Options {
        ring_size: 64 << 10,
        ..Options::default()
    })
    .map(drop)
}

/// The probes, attached. Dropping it detaches them.
pub struct Source {
    ring: Ring,
    control: Array<MapData, u64>,
    watched: HashMap<MapData, u32, u8>,
    drops: Array<MapData, u64>,
    /// Holds the programs and their links.
    ebpf: Ebpf,
}

impl Source {
    /// Loads and attaches the probes.
    ///
    /// # Errors
    /// Each names what is missing and what to do about it.
    pub fn open(options: &Options) -> Result<Source, SourceError> {
        let mut source = Source::load(options)?;
        for program in [
            "process_fork",
            "process_exec",
            "process_exit",
            "process_exit_bounded",
        ] {
            if let Ok(program) = tracepoint(&mut source.ebpf, program)
                && program.fd().is_ok()
            {
                program
                    .attach()
                    .map_err(|e| SourceError::attach(e.into()))?;
            }
        }
        Ok(source)
    }

    /// Loads the probes, which the verifier judges, without attaching them.
    ///
    /// # Errors
    /// As [`Source::open`].
    pub fn load(options: &Options) -> Result<Source, SourceError> {
        let external;
        let object = match &options.object {
            None => OBJECT,
            Some(path) => {
                external = std::fs::read(path).map_err(|source| SourceError::Object {
                    path: path.clone(),
                    source,
                })?;
                &external
            }
        };
        check_abi(object)?;
        // Each of these reads all of the kernel's type information, some 5 MB: side by side, then.
        let (kernel, btf, mut loader) = std::thread::scope(|scope| {
            let others = scope.spawn(|| (Kernel::probe(), aya::Btf::from_sys_fs()));
            let loader = EbpfLoader::new();
            let (kernel, btf) = others.join().unwrap_or_else(|panic| resume_unwind(panic));
            (kernel, btf, loader)
        });
        let kernel = kernel?;
        let btf = btf.map_err(|e| SourceError::load(e.into()))?;
        let settings = Settings {
            pid_namespace: sys::pid_namespace_unless_first().map_err(SourceError::Proc)?,
            exit_has_group_dead: kernel.exit_has_group_dead.into(),
            wake_bytes: u64::from(options.ring_size) / 2,
        };
        // The bytes of both, as the probes lay them out.
        let (offsets, settings) = (sys::bytes_of(&kernel.offsets), sys::bytes_of(&settings));
        let level = if options.log {
            aya_log::Level::Trace as u8
        } else {
            0
        };
        let mut ebpf = loader
            .btf(Some(&btf))
            .override_global("OFFSETS", offsets, true)
            .override_global("SETTINGS", settings, true)
            .override_global(aya_log::LEVEL, &level, false)
            .map_max_entries("EVENTS", options.ring_size)
            .load(object)
            .map_err(|e| SourceError::load(e.into()))?;
        let exit = if kernel.has_bpf_loop {
            "process_exit"
        } else {
            "process_exit_bounded"
        };
        for (program, hook) in [
            ("process_fork", "sched_process_fork"),
            ("process_exec", "sched_process_exec"),
            (exit, "sched_process_exit"),
        ] {
            let program = tracepoint(&mut ebpf, program)?;
            program
                .load(hook, &btf)
                .map_err(|e| SourceError::load(e.into()))?;
        }
        let ring = RingBuf::try_from(take(&mut ebpf, "EVENTS")?)
            .map_err(|e| SourceError::load(e.into()))?;
        Ok(Source {
            ring: Ring::new(ring)?,
            control: Array::try_from(take(&mut ebpf, "CONTROL")?)
                .map_err(|e| SourceError::load(e.into()))?,
            watched: HashMap::try_from(take(&mut ebpf, "WATCHED")?)
                .map_err(|e| SourceError::load(e.into()))?,
            drops: Array::try_from(take(&mut ebpf, "DROPS")?)
                .map_err(|e| SourceError::load(e.into()))?,
            ebpf,
        })
    }

    /// The ring, for waiting on its file descriptor.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Hands over all that is in the ring, in order. What is no record is counted and skipped.
    pub fn drain(&mut self, sink: impl FnMut(Event)) -> Drained {
        let until = self.ring.produced();
        self.ring.drain_until(until, sink)
    }

    /// Says whether the reader sleeps until it is woken. After `true` look into the ring once more,
    /// a little later: a probe may have committed a record on what was said before.
    pub fn set_idle(&mut self, idle: bool) -> Result<(), SourceError> {
        self.control
            .set(CONTROL_IDLE, u64::from(idle), 0)
            .map_err(SourceError::map)
    }

    /// Says whether a ladder is open; while there is one, every record wakes the reader.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_ladders(&mut self, open: bool) -> Result<(), SourceError> {
        self.control
            .set(CONTROL_LADDERS, u64::from(open), 0)
            .map_err(SourceError::map)
    }

    /// Has the exit of a process wake the reader at once. Where there is no room for it, its exit is
    /// seen like any other, within 50 ms.
    pub fn watch(&mut self, pid: u32) {
        if let Err(error) = self.watched.insert(pid, 1, 0) {
            tracing::warn!("pid {pid} is not watched: {error}");
        }
    }

    /// Ends what [`Source::watch`] began.
    pub fn unwatch(&mut self, pid: u32) {
        // It may not have had room in the first place.
        let _ = self.watched.remove(&pid);
    }

    /// What has been lost so far.
    pub fn lost(&self) -> Lost {
        let count = |slot: usize| self.drops.get(&(slot as u32), 0).unwrap_or(0);
        Lost {
            total: count(0),
            by_kind: Kind::ALL.map(|kind| count(kind as usize)),
        }
    }

    /// A reader of the probes' own diagnostics, to be flushed when it is readable.
    ///
    /// # Errors
    /// The probes were loaded without them.
    pub fn logger(&mut self) -> Result<aya_log::EbpfLogger<&'static dyn log::Log>, SourceError> {
        aya_log::EbpfLogger::init(&mut self.ebpf).map_err(|e| SourceError::load(e.into()))
    }

    /// Time spent in each program and how often it ran, where the kernel keeps count
    /// (`sysctl kernel.bpf_stats_enabled`).
    pub fn run_stats(&self) -> Vec<(String, std::time::Duration, u64)> {
        let stats = |(name, program): (&str, &aya::programs::Program)| {
            let info = program.info().ok()?;
            Some((name.to_owned(), info.run_time(), info.run_count()))
        };
        self.ebpf.programs().filter_map(stats).collect()
    }
}

fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut BtfTracePoint, SourceError> {
    let program = ebpf
        .program_mut(name)
        .ok_or_else(|| SourceError::foreign(name))?;
    program.try_into().map_err(|_| SourceError::foreign(name))
}

fn take(ebpf: &mut Ebpf, name: &str) -> Result<Map, SourceError> {
    ebpf.take_map(name)
        .ok_or_else(|| SourceError::foreign(name))
}

/// Refuses an object that was built for other records than this program knows.
fn check_abi(object: &[u8]) -> Result<(), SourceError> {
    let file = object::File::parse(object).map_err(|_| SourceError::foreign("ELF header"))?;
    let section = file
        .section_by_name(ABI_SECTION)
        .ok_or_else(|| SourceError::foreign(ABI_SECTION))?;
    match section.data() {
        Ok(&[low, high]) if u16::from_le_bytes([low, high]) == ABI_VERSION => Ok(()),
        Ok(&[low, high]) => Err(SourceError::Abi {
            found: u16::from_le_bytes([low, high]),
        }),
        _ => Err(SourceError::foreign(ABI_SECTION)),
    }
}
