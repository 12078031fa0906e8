//! The interface between the engine and any source of events.

use std::os::fd::AsFd;

use nix::errno::Errno;

use super::drained::{Drained, Lost};
use super::error::SourceError;
use super::kind::SourceKind;
use super::probes::{ProbeMaps, Probes};
use reaper_model::event::{Event, ProcessKey};

/// A source of process events. Its file descriptor is readable when there is something to drain.
///
/// The default methods fit a source that receives each event from the kernel, has no probes and needs no announcements.
pub trait Source: AsFd {
    /// Returns the kind of the source.
    fn kind(&self) -> SourceKind;

    /// Returns the name of the source in configs, on command lines and in the stream.
    fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Passes the received events to `sink`, in order, without waiting for new ones. Counts and skips malformed
    /// records.
    ///
    /// The kernel probes pass on all events recorded before the call. The proc connector may leave some for the next
    /// call ([`Source::has_undrained`]). A source that scans emits new differences only if a scan is due.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained;

    /// Returns the kernel probes if they are the source.
    fn probes(&self) -> Option<&dyn Probes> {
        None
    }

    /// Returns the kernel probes, mutably, if they are the source.
    fn probes_mut(&mut self) -> Option<&mut dyn Probes> {
        None
    }

    /// Returns the numbers of lost events: for pinned probes since the maps were created, even by an earlier service.
    /// For other sources the count begins with the source.
    fn lost(&self) -> Lost {
        Lost::default()
    }

    /// Returns the total of [`Source::lost`]. Called before each round of signals, so it must be cheap.
    fn lost_total(&self) -> u64 {
        self.lost().total
    }

    /// Returns the number of times that the kernel did not run a probe for an event. Always 0 without probes.
    fn skipped(&self) -> u64 {
        0
    }

    /// Returns the number of processes that could not be tracked because the map in the kernel was full. Always 0
    /// without probes.
    fn untracked_members(&self) -> u64 {
        0
    }

    /// Returns whether it leaves out events of processes that are neither tracked (in the kernel's map of members) nor
    /// may have to be.
    fn is_filtered(&self) -> bool {
        false
    }

    /// Returns whether it reports processes that move to another cgroup.
    fn reports_moves(&self) -> bool {
        false
    }

    /// Returns whether received events still wait to be drained, although the file descriptor may not be readable.
    fn has_undrained(&self) -> bool {
        false
    }

    /// Returns why the source can no longer be used; `None` while it works. The engine then replaces it.
    fn failure(&self) -> Option<SourceError> {
        None
    }

    /// Takes over the keys under which the previous source reported its processes, so that both report the same keys.
    /// A source whose keys are exact only to the clock tick ignores them.
    fn import_keys(&mut self, _keys: &mut dyn Iterator<Item = ProcessKey>) {}

    /// Returns whether the pid still belongs to the process that was reported under this key. False does not prove that
    /// the process has exited: it may be unreadable.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool;

    /// Starts (`true`) or stops watching for the exit of a process. Only the scan of /proc uses this; other sources
    /// ignore it.
    fn watch_exit(&mut self, _key: ProcessKey, _wanted: bool) {}

    /// Makes the next [`Source::drain`] scan the process table. Does nothing if the source does not scan.
    fn scan_now(&mut self) {}

    /// Makes the next scan come after the shortest interval. Does nothing if the source does not scan.
    fn scan_soon(&mut self) {}

    /// Returns a time, in nanoseconds since boot, such that each living process that started earlier has been reported.
    ///
    /// Processes that stay unreadable for many scans are excepted. Returns `None` if the source does not scan, and 0
    /// before its first complete scan.
    fn last_scan(&self) -> Option<u64> {
        None
    }

    /// Returns whether it finds new processes by scanning, so that events between two scans are only inferred.
    ///
    /// That includes macOS, where the kernel reports forks and exits, but not which process was forked.
    fn is_polling(&self) -> bool {
        self.last_scan().is_some()
    }

    /// Returns the last error of opening a pidfd, if the source needs pidfds and lacks some. Otherwise returns `None`.
    fn pidfd_error(&self) -> Option<Errno> {
        None
    }

    /// Announces whether the service sleeps until the source wakes it. Probes then wake it at the next record,
    /// otherwise only at urgent records or a half-full ring. Other sources ignore this.
    ///
    /// # Errors
    /// A map cannot be written.
    fn announce_idle(&mut self, _idle: bool) -> Result<(), SourceError> {
        Ok(())
    }

    /// Announces whether an escalation (SIGTERM, later SIGKILL) is open. While one is, probes wake the service at each
    /// record, and scans follow each other faster.
    ///
    /// # Errors
    /// A map cannot be written.
    fn announce_escalations(&mut self, _open: bool) -> Result<(), SourceError> {
        Ok(())
    }
}

impl dyn Source + '_ {
    /// Returns the maps of the kernel probes if they are the source.
    pub fn maps(&self) -> Option<&dyn ProbeMaps> {
        self.probes().map(|probes| probes.maps())
    }

    /// Returns the maps of the kernel probes, mutably, if they are the source.
    pub fn maps_mut(&mut self) -> Option<&mut dyn ProbeMaps> {
        self.probes_mut().map(|probes| probes.maps_mut())
    }
}
