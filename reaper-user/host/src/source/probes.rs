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

    /// Takes the log of the probes. Works only once.
    ///
    /// # Errors
    /// The probes have no log, or it was taken before.
    fn diagnostics(&mut self) -> Result<Box<dyn Diagnostics>, SourceError>;

    /// Returns whether the probes can signal processes other than the one that caused the event.
    fn can_signal(&self) -> bool;

    /// Returns whether the maps and the ring are those that an earlier service left.
    fn is_resumed(&self) -> bool;

    /// Returns whether a service of another ABI version left maps that could not be resumed.
    fn replaced_other_abi(&self) -> bool;

    /// Returns the directory of the pins, if anything is pinned.
    fn pinned_at(&self) -> Option<&Path>;

    /// Keeps the pins when this program exits, however it exits. Before this call, dropping the source removes pins of
    /// maps that it has created itself.
    fn keep_pinned(&mut self);

    /// Detaches the probes and removes the pins. After [`Probes::keep_pinned`], pinned probes keep running without this
    /// call, even when the source is dropped.
    ///
    /// # Errors
    /// A pin cannot be removed.
    fn unpin(&mut self) -> Result<(), SourceError>;
}

/// The maps that outlive the service: tracked processes, sessions, names and counters.
///
/// A process is tracked if it has an entry in the map of members.
pub trait ProbeMaps {
    /// Returns the maximum number of processes that can be tracked at once.
    fn capacity(&self) -> u32;

    /// Returns whether the map has all members: a process that is not in it is no member. False before
    /// [`ProbeMaps::set_seeded`], and once the map was too full for a process.
    fn is_complete(&self) -> bool;

    /// Writes the entry of a process in the map of members, or removes it if `wanted` is `None`. Returns false only if
    /// the map is full.
    ///
    /// `known` is the entry that the caller last saw, `None` for none. If it is given, a process that has exited since
    /// is not inserted again. Otherwise the caller must check afterwards whether the process has exited.
    ///
    /// If the process has executed a program or changed its cgroup since, a known entry stays as it is. The record of
    /// that event brings the service up to date.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_membership(
        &mut self,
        of: ProcessKey,
        wanted: Option<Membership>,
        known: Option<Membership>,
    ) -> Result<bool, SourceError>;

    /// Removes the entry of a process that has exited, whatever it says. Does nothing if none exists.
    ///
    /// # Errors
    /// The map cannot be written.
    fn remove(&mut self, of: ProcessKey) -> Result<(), SourceError>;

    /// Returns the states of all sessions in the map, with the first roots as keys.
    fn sessions(&self) -> Vec<(ProcessKey, SessionState)>;

    /// Returns the exit of a session's root; `None` if no probe has recorded it. The record does not name the root,
    /// which may be a successor of the first one.
    fn root_exit(&self, first_root: ProcessKey) -> Option<RootExit>;

    /// Writes the state of a session. `None` removes it, together with the recorded exit of its root.
    ///
    /// # Errors
    /// The map cannot be written, or is full.
    fn set_session(
        &mut self,
        first_root: ProcessKey,
        state: Option<&SessionState>,
    ) -> Result<(), SourceError>;

    /// Replaces the program names that the rules can match. The probes compare the name of each executed program with
    /// them.
    ///
    /// # Errors
    /// The maps cannot be written, or have no room for all names.
    fn set_names(&mut self, names: &NameTable) -> Result<(), SourceError>;

    /// Writes the number of sessions whose state has `SESSION_KILL_ON_FORK`. The probes kill members of those at fork
    /// and exec, but check only while the number is not 0.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_kill_on_fork(&mut self, sessions: u64) -> Result<(), SourceError>;

    /// Writes whether the probes may send SIGTERM to the children of a root when a signal kills the root. It applies to
    /// sessions with `SESSION_KERNEL_REAP`.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_kernel_reap(&mut self, reaps: bool) -> Result<(), SourceError>;

    /// Writes whether all pre-existing members are in the map. Once they are, filtering probes report only processes
    /// that are tracked or may have to be.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_seeded(&mut self, seeded: bool) -> Result<(), SourceError>;

    /// Waits until all probe programs that run now have finished, about 10 ms. They may still use earlier contents of
    /// the maps.
    fn await_probes(&self);

    /// Returns the number of lost records that this service or an earlier one has reported in the event stream.
    fn lost_reported(&self) -> u64;

    /// Writes the number for [`ProbeMaps::lost_reported`].
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

    /// Returns a position at which a record begins, so that another reader can start there. It is at least a quarter of
    /// the ring behind [`EventRing::position`].
    ///
    /// If no such position is known, returns the oldest known one, or 0.
    fn restart_position(&self) -> u64;

    /// Returns the number of bytes that have been drained but not freed.
    fn unreleased(&self) -> u64;

    /// Returns the number of bytes that wait to be drained.
    fn waiting(&self) -> u64;

    /// Returns a function that frees the records before a position. Any thread may call it. It does nothing if they are
    /// free already.
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
    /// Size of the ring buffer in bytes, a power of two and a multiple of the page size.
    pub ring_size: u32,
    /// Maximum number of processes that can be tracked at once.
    pub max_members: u32,
    /// Whether the probes report only processes that are tracked or may have to be.
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
    /// Name of the scope, and of its directory in `dir`: `host` or `scope-…`.
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

/// Converts a key of the maps. Returns `None` if the pid is 0: there is no process, or none visible in this pid
/// namespace.
pub fn model_key(raw: RawKey) -> Option<ProcessKey> {
    (raw.pid != 0).then_some(ProcessKey {
        pid: raw.pid,
        start: raw.start_ns,
    })
}
