//! Prepares the object file of the probes for the running kernel, and loads it.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;

use aya::maps::{MapData, MapType};
use aya::programs::links::FdLink;
use aya::programs::{BtfTracePoint, Iter, Program};
use aya::{Ebpf, EbpfLoader};
use object::{Object, ObjectSection};
use reaper_common::{ABI_SECTION, ABI_VERSION, Offsets, SESSION_LEN, Settings};
use sha2::{Digest, Sha256};

use super::btf::{Btf, VMLINUX};
use super::error::EbpfError;
use super::kfunc;
use crate::source::probes::ProbeOptions;
use crate::sys;

/// Object file of the probes, built by `cargo xtask build-ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("reaper.bpf.o");

/// Returns the SHA-256 hash of the object file, as recorded when it was built.
pub fn object_sha256() -> Option<&'static str> {
    let record = include_str!("reaper.bpf.toolchain");
    record
        .lines()
        .find_map(|line| line.strip_prefix("sha256: "))
}

/// Maps that are pinned, for the next service to resume: name, kind, and sizes of keys and values.
pub(super) const MAPS: [(&str, MapType, u32, u32); 9] = [
    ("EVENTS", MapType::RingBuf, 0, 0),
    ("MEMBERS", MapType::Hash, 16, 24),
    ("PID_FILTER", MapType::Array, 4, 8),
    ("SESSIONS", MapType::Hash, 16, SESSION_LEN as u32),
    ("ROOT_EXITS", MapType::Hash, 16, 16),
    ("NAMES", MapType::Hash, 16, 4),
    ("NAME_INDEX", MapType::Array, 4, 4),
    ("CONTROL", MapType::Array, 4, 8),
    ("DROPS", MapType::Array, 4, 8),
];

/// Properties of the running kernel on which the probes depend.
struct KernelFeatures {
    offsets: Offsets,
    /// Whether `sched_process_exit` has the argument `group_dead` (Linux 6.16).
    exit_has_group_dead: bool,
    /// Whether programs may call `bpf_loop` (Linux 5.17).
    has_bpf_loop: bool,
    /// Whether `cgroup_attach_task` has the arguments that the probe expects, as in all kernels with cgroups.
    reports_moves: bool,
    /// Object with the ids of the kernel's functions patched in, if the kernel has them and signals are wanted.
    patched: Option<Vec<u8>>,
}

/// An object file that is prepared for the running kernel.
pub(super) struct PreparedObject {
    object: Vec<u8>,
    btf: aya::Btf,
    offsets: Offsets,
    settings: Settings,
    has_bpf_loop: bool,
    /// Whether the probes report processes that move to another cgroup.
    pub reports_moves: bool,
    /// Whether the probes can signal processes other than the one that caused the event.
    pub can_signal: bool,
    log: bool,
    ring_size: u32,
    max_members: u32,
    /// Hash of the object and of all constants that are put into it.
    pub identity: String,
}

impl PreparedObject {
    /// Reads the object and the running kernel's type information. `ring_size` must be that of a pinned ring if there is
    /// one.
    ///
    /// # Errors
    /// The object or the type information cannot be used.
    pub fn new(options: &ProbeOptions, ring_size: u32) -> Result<PreparedObject, EbpfError> {
        let object = match &options.object {
            None => OBJECT.to_vec(),
            Some(path) => std::fs::read(path).map_err(|source| EbpfError::Object {
                path: path.clone(),
                source,
            })?,
        };
        check_abi(&object)?;
        // Both read all of the kernel's type information, about 5 MB, so they run in parallel.
        let (kernel, btf) = std::thread::scope(|scope| {
            let kernel = scope.spawn(|| KernelFeatures::read(&object, options.kernel_reap));
            let btf = aya::Btf::from_sys_fs();
            (
                kernel.join().unwrap_or_else(|panic| resume_unwind(panic)),
                btf,
            )
        });
        let kernel = kernel?;
        let btf = btf.map_err(|e| EbpfError::load(e.into()))?;
        let settings = Settings {
            pid_namespace: sys::non_initial_pid_namespace().map_err(EbpfError::Proc)?,
            exit_has_group_dead: kernel.exit_has_group_dead.into(),
            wake_bytes: u64::from(ring_size) / 2,
            filter: options.filter.into(),
            scoped: options.scoped.into(),
        };
        let mut hash = Sha256::new();
        for part in [
            &object[..],
            sys::bytes_of(&kernel.offsets),
            sys::bytes_of(&settings),
        ] {
            hash.update(part);
        }
        hash.update([kernel.patched.is_some().into(), options.log.into()]);
        let hash = hash.finalize();
        let identity = hash.iter().take(8).map(|byte| format!("{byte:02x}"));
        let identity = identity.collect();
        Ok(PreparedObject {
            identity,
            can_signal: kernel.patched.is_some(),
            object: kernel.patched.unwrap_or(object),
            btf,
            offsets: kernel.offsets,
            settings,
            has_bpf_loop: kernel.has_bpf_loop,
            reports_moves: kernel.reports_moves,
            log: options.log,
            ring_size,
            max_members: options.max_members,
        })
    }

    /// Returns the inode of the pid namespace of the reported pids, 0 for the initial one.
    pub fn pid_namespace(&self) -> u32 {
        self.settings.pid_namespace
    }

    /// Returns whether the probes report only processes that are tracked or may have to be.
    pub fn is_filtered(&self) -> bool {
        self.settings.filter != 0
    }

    /// Creates the maps, or opens those that are pinned in the directory `maps`. Loads no program yet.
    ///
    /// # Errors
    /// The kernel rejects the object or a map.
    pub fn load(&self, maps: Option<&Path>) -> Result<LoadedObject<'_>, EbpfError> {
        let level = if self.log {
            aya_log::Level::Trace as u8
        } else {
            0
        };
        // Both structures have the layout that the probes expect.
        let (offsets, settings) = (sys::bytes_of(&self.offsets), sys::bytes_of(&self.settings));
        let mut loader = EbpfLoader::new();
        loader
            .btf(Some(&self.btf))
            .override_global("OFFSETS", offsets, true)
            .override_global("SETTINGS", settings, true)
            .override_global(aya_log::LEVEL, &level, false)
            .map_max_entries("EVENTS", self.ring_size)
            .map_max_entries("MEMBERS", self.max_members);
        for (name, ..) in MAPS {
            if let Some(directory) = maps {
                loader.map_pin_path(name, directory.join(name));
            }
        }
        let ebpf = loader
            .load(&self.object)
            .map_err(|e| EbpfError::load(e.into()))?;
        Ok(LoadedObject {
            ebpf,
            prepared: self,
        })
    }

    /// Returns the names of the programs for this kernel, each with the tracepoint that it hooks.
    fn probes(&self) -> Vec<(&'static str, &'static str)> {
        let fork = match self.can_signal {
            true => "process_fork_killing",
            false => "process_fork",
        };
        let exit = match (self.can_signal, self.has_bpf_loop) {
            (true, _) => "process_exit_killing",
            (false, true) => "process_exit",
            (false, false) => "process_exit_bounded",
        };
        let exec = match self.has_bpf_loop {
            true => "process_exec",
            false => "process_exec_bounded",
        };
        let mut probes = vec![
            (fork, "sched_process_fork"),
            (exec, "sched_process_exec"),
            (exit, "sched_process_exit"),
        ];
        if self.reports_moves {
            probes.push(("cgroup_attach", "cgroup_attach_task"));
        }
        probes
    }
}

/// An object with its maps, whose programs can be loaded and attached.
pub(super) struct LoadedObject<'a> {
    pub ebpf: Ebpf,
    pub prepared: &'a PreparedObject,
}

impl LoadedObject<'_> {
    /// Returns the hooks of the probes: names of tracepoints.
    pub fn hooks(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.prepared.probes().into_iter().map(|(_, hook)| hook)
    }

    /// Returns file descriptors of the loaded probes.
    pub fn probe_fds(&mut self) -> Vec<OwnedFd> {
        let fd = |(program, _)| {
            let program = tracepoint(&mut self.ebpf, program).ok()?;
            program.fd().ok()?.as_fd().try_clone_to_owned().ok()
        };
        self.prepared.probes().into_iter().filter_map(fd).collect()
    }

    /// Pins the loaded programs in a directory.
    ///
    /// # Errors
    /// As `BPF_OBJ_PIN` of bpf(2).
    pub fn pin_programs(&mut self, dir: &Path) -> Result<(), aya::pin::PinError> {
        for (program, hook) in self.prepared.probes() {
            if let Ok(program) = tracepoint(&mut self.ebpf, program) {
                program.pin(dir.join(program_pin(hook)))?;
            }
        }
        Ok(())
    }

    /// Takes a map out of the object.
    ///
    /// # Errors
    /// The object has no map of this name, it is of another kind, or it was taken before.
    pub fn take_map(&mut self, name: &str) -> Result<MapData, EbpfError> {
        let map = self.ebpf.take_map(name);
        match map.ok_or_else(|| EbpfError::invalid_object(name))? {
            aya::maps::Map::Array(map)
            | aya::maps::Map::HashMap(map)
            | aya::maps::Map::RingBuf(map) => Ok(map),
            _ => Err(EbpfError::invalid_object(name)),
        }
    }

    /// Loads the probes in parallel, one thread for each. The verifier takes most of the time of setup.
    ///
    /// # Errors
    /// The verifier rejects a probe.
    pub fn load_probes(&mut self) -> Result<(), EbpfError> {
        let LoadedObject { ebpf, prepared } = self;
        let probes = prepared.probes();
        let mut programs: Vec<_> = ebpf.programs_mut().collect();
        let load = |name: &str, hook: &str, program: Option<&mut Program>| {
            let program = program.and_then(|program| program.try_into().ok());
            let program: &mut BtfTracePoint =
                program.ok_or_else(|| EbpfError::invalid_object(name))?;
            let loaded = program.load(hook, &prepared.btf);
            loaded.map_err(|e| EbpfError::load(e.into()))
        };
        thread::scope(|scope| {
            let begin = |(name, hook)| {
                let at = programs.iter().position(|program| program.0 == name);
                let program = at.map(|at| programs.swap_remove(at).1);
                scope.spawn(move || load(name, hook, program))
            };
            let loading: Vec<_> = probes.into_iter().map(begin).collect();
            loading
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    /// Attaches the loaded probes, and returns the hook and the link of each. Dropping a link detaches the probe unless it
    /// is pinned.
    ///
    /// # Errors
    /// The kernel refuses to attach a probe.
    pub fn attach(&mut self) -> Result<Vec<(&'static str, FdLink)>, EbpfError> {
        let attach = |(program, hook)| {
            let program = tracepoint(&mut self.ebpf, program)?;
            let link = program.attach().and_then(|id| program.take_link(id));
            let link = link.map_err(|e| EbpfError::load(e.into()))?;
            Ok((hook, link.into()))
        };
        self.prepared.probes().into_iter().map(attach).collect()
    }

    /// Loads the program that lists all processes.
    ///
    /// # Errors
    /// The verifier rejects it.
    pub fn load_task_iter(&mut self) -> Result<(), EbpfError> {
        let table = task_iter(&mut self.ebpf)?;
        table
            .load("task", &self.prepared.btf)
            .map_err(|e| EbpfError::load(e.into()))
    }
}

/// Returns the name of the pin of a hook's program.
pub(super) fn program_pin(hook: &str) -> String {
    format!("{hook}-program")
}

/// Returns the program that lists all processes.
pub(super) fn task_iter(ebpf: &mut Ebpf) -> Result<&mut Iter, EbpfError> {
    program(ebpf, "process_table")
}

fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut BtfTracePoint, EbpfError> {
    program(ebpf, name)
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<P, EbpfError>
where
    P: TryFrom<&'a mut Program>,
{
    let program = ebpf
        .program_mut(name)
        .and_then(|found| found.try_into().ok());
    program.ok_or_else(|| EbpfError::invalid_object(name))
}

impl KernelFeatures {
    /// Reads the kernel's type information.
    ///
    /// # Errors
    /// It lacks something that the probes need.
    fn read(object: &[u8], kernel_reap: bool) -> Result<KernelFeatures, EbpfError> {
        let btf = Btf::load(VMLINUX.as_ref()).map_err(EbpfError::Btf)?;
        let patched = (kernel_reap && kfunc::has_all(&btf)).then(|| kfunc::patch(object, &btf));
        Ok(KernelFeatures {
            offsets: btf.offsets().map_err(EbpfError::Btf)?,
            exit_has_group_dead: btf.tracepoint_args("sched_process_exit") == Some(2),
            has_bpf_loop: btf.has_enum_value("bpf_func_id", "BPF_FUNC_loop"),
            reports_moves: btf.tracepoint_args("cgroup_attach_task") == Some(4),
            patched: patched.flatten(),
        })
    }
}

/// Checks the ABI version of an object.
///
/// # Errors
/// It is another one, or the object does not state it.
fn check_abi(object: &[u8]) -> Result<(), EbpfError> {
    let file = object::File::parse(object).map_err(|_| EbpfError::invalid_object("ELF header"))?;
    let section = file
        .section_by_name(ABI_SECTION)
        .ok_or_else(|| EbpfError::invalid_object(ABI_SECTION))?;
    match section.data() {
        Ok(&[low, high]) if u16::from_le_bytes([low, high]) == ABI_VERSION => Ok(()),
        Ok(&[low, high]) => Err(EbpfError::Abi {
            found: u16::from_le_bytes([low, high]),
        }),
        _ => Err(EbpfError::invalid_object(ABI_SECTION)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_hash_is_that_of_the_object() {
        let hash = Sha256::digest(OBJECT);
        let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(object_sha256(), Some(digits.as_str()));
    }
}
