//! What only kernel probes have: maps that outlive the service, a ring of which the service frees the records, and
//! signals of their own.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use reaper_common::{RawKey, RootExit, SessionState};

use super::error::SourceError;
use reaper_model::event::{Membership, ProcessKey};
use reaper_model::ruleset::NameTable;

/// Kernel probes at work.
pub trait Probes {
    fn maps(&self) -> &dyn ProbeMaps;

    fn maps_mut(&mut self) -> &mut dyn ProbeMaps;

    fn ring(&self) -> &dyn EventRing;

    /// Returns a reader of what the kernel knows, for another thread.
    ///
    /// # Errors
    /// A file descriptor cannot be duplicated.
    fn reader(&self) -> Result<Box<dyn KernelReader>, SourceError>;

    /// Returns the probes' own diagnostics.
    ///
    /// # Errors
    /// The probes were loaded without them.
    fn diagnostics(&mut self) -> Result<Box<dyn Diagnostics>, SourceError>;

    /// Whether the probes can signal processes other than the current one.
    fn can_signal(&self) -> bool;

    /// Whether an earlier service left the maps and the ring.
    fn is_resumed(&self) -> bool;

    /// Whether a service of another ABI version left maps that could not be resumed.
    fn replaced_other_abi(&self) -> bool;

    /// Returns the directory of the pins, if anything is pinned.
    fn pinned_at(&self) -> Option<&Path>;

    /// Makes the pins outlive this program, however it ends.
    fn keep_pinned(&mut self);

    /// Detaches the probes and removes the pins. Without it, what is pinned goes on when the source is dropped.
    ///
    /// # Errors
    /// A pin cannot be removed.
    fn unpin(&mut self) -> Result<(), SourceError>;
}

/// The maps that outlive the service: processes that are followed, sessions, names and counters.
pub trait ProbeMaps {
    /// Returns the number of processes that can be followed at once.
    fn capacity(&self) -> u32;

    /// Whether each process that is not in the map is no member.
    fn is_complete(&self) -> bool;

    /// Writes why a process is followed, or that it is not any more. `known` is what the map was last known to have for
    /// it. A process that has exited since is not put in again. One that has run another program since is left to its
    /// exec record. Returns false if there was no room for it.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_membership(
        &mut self,
        of: ProcessKey,
        wanted: Option<Membership>,
        known: Option<Membership>,
    ) -> Result<bool, SourceError>;

    /// Removes a process that has exited, whatever the map says of it.
    ///
    /// # Errors
    /// The map cannot be written.
    fn remove(&mut self, of: ProcessKey) -> Result<(), SourceError>;

    /// Returns all sessions by their first roots.
    fn sessions(&self) -> Vec<(ProcessKey, SessionState)>;

    /// Returns the exit of a session's root, if a probe has recorded it. The record does not say of which root.
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

    /// Replaces the names that the rules know.
    ///
    /// # Errors
    /// The maps cannot be written, or the rules know more names than there is room for.
    fn set_names(&mut self, names: &NameTable) -> Result<(), SourceError>;

    /// Writes the number of sessions whose members are killed when they fork.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_kill_on_fork(&mut self, sessions: u64) -> Result<(), SourceError>;

    /// Writes whether the probes may send first signals.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_kernel_reap(&mut self, reaps: bool) -> Result<(), SourceError>;

    /// Writes whether all members that were found running are in the map. From then on probes that filter report no
    /// other process.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_seeded(&mut self, seeded: bool) -> Result<(), SourceError>;

    /// Waits until all probes that run now have reported what they report. They go by what the maps said when they
    /// began.
    fn await_probes(&self);

    /// Returns the number of lost records that any service has reported.
    fn lost_reported(&self) -> u64;

    /// Writes the number of lost records that have been reported.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_lost_reported(&mut self, records: u64) -> Result<(), SourceError>;
}

/// The ring through which the probes report. Positions are in bytes since it was made.
pub trait EventRing {
    /// Returns its size in bytes.
    fn size(&self) -> u64;

    /// Returns the position up to which records have been drained.
    fn position(&self) -> u64;

    /// Returns a position at least a quarter of the ring behind [`EventRing::position`]. A record begins there, so that
    /// another reader can begin there too.
    fn restart_position(&self) -> u64;

    /// Returns the number of bytes that have been drained and not been freed.
    fn unreleased(&self) -> u64;

    /// Returns the number of bytes that wait to be drained.
    fn waiting(&self) -> u64;

    /// Returns what frees the records before a position, from any thread.
    fn release(&self) -> Box<dyn Fn(u64) + Send>;
}

/// Reads what the kernel knows, from any thread.
pub trait KernelReader: Send {
    /// Returns all living processes that this program's pid namespace shows.
    ///
    /// # Errors
    /// The kernel refuses to list them.
    fn processes(&self) -> Result<Vec<ListedProcess>, SourceError>;

    /// Returns all processes that are followed. One that comes or goes meanwhile may be in it or not.
    fn members(&self) -> HashMap<ProcessKey, Membership>;
}

/// A living process as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    pub key: ProcessKey,
    /// Inode number of its pidfds, 0 where the kernel gives none.
    pub pidfd_inode: u64,
}

/// Diagnostics of the probes, to be flushed when the file descriptor is readable.
pub trait Diagnostics: AsFd + Send {
    fn flush(&mut self);
}

/// How to set up the probes.
#[derive(Clone, Debug)]
pub struct ProbeOptions {
    /// Size in bytes, a power of two and a multiple of the page size.
    pub ring_size: u32,
    /// Number of processes that can be followed at once.
    pub max_members: u32,
    /// Whether only processes that are followed, or may have to be, are reported.
    pub filter: bool,
    /// Whether only descendants of a process in scope can be agents.
    pub scoped: bool,
    /// Whether signals are sent from the kernel where it can.
    pub kernel_reap: bool,
    /// Place of the pins that outlive this process; `None` pins nothing.
    pub pin: Option<PinOptions>,
    /// Whether the probes' own diagnostics are wanted.
    pub log: bool,
    /// Object file to load instead of the one built in.
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

/// Converts a key to what the maps hold.
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
