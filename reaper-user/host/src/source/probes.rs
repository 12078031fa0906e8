//! The interface that only kernel probes have: maps that outlive the service, a ring buffer whose records the service
//! frees itself, and signals sent from the kernel.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use reaper_common::{RawKey, RootExit, SessionState};

use super::error::SourceError;
use reaper_model::event::{Membership, ProcessKey};
use reaper_model::ruleset::NameTable;

/// Attached kernel probes.
pub trait Probes {
    /// Returns the maps.
    fn maps(&self) -> &dyn ProbeMaps;

    /// Returns the maps, to change them.
    fn maps_mut(&mut self) -> &mut dyn ProbeMaps;

    /// Returns the ring buffer of events.
    fn ring(&self) -> &dyn EventRing;

    /// Returns a reader of the kernel's process list and the map of members, for use on another thread.
    ///
    /// # Errors
    /// A file descriptor cannot be duplicated.
    fn reader(&self) -> Result<Box<dyn KernelReader>, SourceError>;

    /// Returns the log of the probes.
    ///
    /// # Errors
    /// The probes were loaded without a log.
    fn diagnostics(&mut self) -> Result<Box<dyn Diagnostics>, SourceError>;

    /// Returns whether the probes can signal processes other than the current one.
    fn can_signal(&self) -> bool;

    /// Returns whether an earlier service left the maps and the ring.
    fn is_resumed(&self) -> bool;

    /// Returns whether a service of another ABI version left maps that could not be resumed.
    fn replaced_other_abi(&self) -> bool;

    /// Returns the directory of the pins, if anything is pinned.
    fn pinned_at(&self) -> Option<&Path>;

    /// Keeps the pins when this program exits, however it exits.
    fn keep_pinned(&mut self);

    /// Detaches the probes and removes the pins. Without this call, pinned probes keep running after the source is dropped.
    ///
    /// # Errors
    /// A pin cannot be removed.
    fn unpin(&mut self) -> Result<(), SourceError>;
}

/// The maps that outlive the service: tracked processes, sessions, names and counters.
pub trait ProbeMaps {
    /// Returns the number of processes that can be tracked at once.
    fn capacity(&self) -> u32;

    /// Returns whether the map has all members: a process that is not in it is no member.
    fn is_complete(&self) -> bool;

    /// Writes why a process is tracked, or removes it if `wanted` is `None`. Returns false if the map is full.
    ///
    /// `known` is the entry that the caller last saw. A process that has exited since is not inserted again. If it has
    /// run another program since, the map stays as it is, and its exec record brings the service up to date.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_membership(
        &mut self,
        of: ProcessKey,
        wanted: Option<Membership>,
        known: Option<Membership>,
    ) -> Result<bool, SourceError>;

    /// Removes a process that has exited, whatever its entry says.
    ///
    /// # Errors
    /// The map cannot be written.
    fn remove(&mut self, of: ProcessKey) -> Result<(), SourceError>;

    /// Returns all sessions by their first roots.
    fn sessions(&self) -> Vec<(ProcessKey, SessionState)>;

    /// Returns the exit of a session's root, if a probe has recorded it. The record does not name the root, which may be
    /// a successor of the first one.
    fn root_exit(&self, first_root: ProcessKey) -> Option<RootExit>;

    /// Writes the state of a session; `None` removes it.
    ///
    /// # Errors
    /// The map cannot be written, or is full.
    fn set_session(
        &mut self,
        first_root: ProcessKey,
        state: Option<&SessionState>,
    ) -> Result<(), SourceError>;

    /// Replaces the program names that the rules use.
    ///
    /// # Errors
    /// The maps cannot be written, or have no room for all names.
    fn set_names(&mut self, names: &NameTable) -> Result<(), SourceError>;

    /// Writes the number of sessions whose members are killed when they fork.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_kill_on_fork(&mut self, sessions: u64) -> Result<(), SourceError>;

    /// Writes whether the probes may send the first signal to members.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_kernel_reap(&mut self, reaps: bool) -> Result<(), SourceError>;

    /// Writes whether all pre-existing members are in the map. Once they are, filtering probes report no other process.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_seeded(&mut self, seeded: bool) -> Result<(), SourceError>;

    /// Waits until all probe programs that run now have finished. They may still use earlier contents of the maps.
    fn await_probes(&self);

    /// Returns the number of lost records that this service or an earlier one has reported.
    fn lost_reported(&self) -> u64;

    /// Writes the number of lost records that have been reported.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_lost_reported(&mut self, records: u64) -> Result<(), SourceError>;
}

/// The ring buffer of the probes. Positions are in bytes since its creation.
pub trait EventRing {
    /// Returns its size in bytes.
    fn size(&self) -> u64;

    /// Returns the position up to which records have been drained.
    fn position(&self) -> u64;

    /// Returns a position at least a quarter of the ring behind [`EventRing::position`]. A record begins there, so
    /// another reader can start there.
    fn restart_position(&self) -> u64;

    /// Returns the number of bytes that have been drained but not freed.
    fn unreleased(&self) -> u64;

    /// Returns the number of bytes that wait to be drained.
    fn waiting(&self) -> u64;

    /// Returns a function that frees the records before a position. Any thread may call it.
    fn release(&self) -> Box<dyn Fn(u64) + Send>;
}

/// Reads the kernel's process list and the map of members, from any thread.
pub trait KernelReader: Send {
    /// Returns all living processes that are visible in this program's pid namespace.
    ///
    /// # Errors
    /// The kernel refuses to list them.
    fn processes(&self) -> Result<Vec<ListedProcess>, SourceError>;

    /// Returns all tracked processes. One that is added or removed during the call may be included or not.
    fn members(&self) -> HashMap<ProcessKey, Membership>;
}

/// A living process as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    /// The process.
    pub key: ProcessKey,
    /// Inode number of its pidfds, 0 where the kernel gives none.
    pub pidfd_inode: u64,
}

/// Log of the probes, to be flushed when the file descriptor is readable.
pub trait Diagnostics: AsFd + Send {
    /// Passes all queued messages of the probes to the logger.
    fn flush(&mut self);
}

/// Settings of the probes.
#[derive(Clone, Debug)]
pub struct ProbeOptions {
    /// Size in bytes, a power of two and a multiple of the page size.
    pub ring_size: u32,
    /// Number of processes that can be tracked at once.
    pub max_members: u32,
    /// Whether only processes that are tracked, or may have to be, are reported.
    pub filter: bool,
    /// Whether only descendants of a process in scope can be agents.
    pub scoped: bool,
    /// Whether the probes send signals, on kernels that support it.
    pub kernel_reap: bool,
    /// Place of the pins that outlive this process; `None` pins nothing.
    pub pin: Option<PinOptions>,
    /// Whether the probes log.
    pub log: bool,
    /// Object file to load instead of the built-in one.
    pub object: Option<PathBuf>,
}

/// Place of the pins of one service.
#[derive(Clone, Debug)]
pub struct PinOptions {
    /// Pin directory, below a BPF file system.
    pub dir: PathBuf,
    /// Name of the scope.
    pub name: String,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        ProbeOptions {
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

/// Converts a key to the form that the maps hold.
pub fn raw_key(key: ProcessKey) -> RawKey {
    RawKey {
        pid: key.pid,
        _pad: 0,
        start_ns: key.start,
    }
}

/// Converts a key of the maps; `None` if it names no process.
pub fn model_key(raw: RawKey) -> Option<ProcessKey> {
    (raw.pid != 0).then_some(ProcessKey {
        pid: raw.pid,
        start: raw.start_ns,
    })
}
