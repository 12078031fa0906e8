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

    /// Passes all events that happened before this call to `sink`, in order. Counts and skips malformed records.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained;

    /// Returns the kernel probes if they are the source.
    fn probes(&self) -> Option<&dyn Probes> {
        None
    }

    /// Returns the kernel probes, mutably, if they are the source.
    fn probes_mut(&mut self) -> Option<&mut dyn Probes> {
        None
    }

    /// Returns the number of events lost since the source began.
    fn lost(&self) -> Lost {
        Lost::default()
    }

    /// Returns the total of [`Source::lost`]. Called before each round of signals, so it must be cheap.
    fn lost_total(&self) -> u64 {
        self.lost().total
    }

    /// Returns the number of times that the kernel did not run a probe.
    fn skipped(&self) -> u64 {
        0
    }

    /// Returns the number of processes that could not be tracked because the map in the kernel was full.
    fn untracked_members(&self) -> u64 {
        0
    }

    /// Returns whether it reports only tracked processes.
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

    /// Returns why the source has stopped delivering events. The engine then replaces it.
    fn failure(&self) -> Option<SourceError> {
        None
    }

    /// Takes over the keys under which the previous source reported its processes, so that both report the same keys.
    /// A source whose keys are exact only to the clock tick ignores them.
    fn import_keys(&mut self, _keys: &mut dyn Iterator<Item = ProcessKey>) {}

    /// Returns whether the pid still belongs to the process that was reported under this key.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool;

    /// Announces whether the exit of a process matters. Only sources that scan use this.
    fn watch_exit(&mut self, _key: ProcessKey, _wanted: bool) {}

    /// Makes the next [`Source::drain`] scan the process table.
    fn scan_now(&mut self) {}

    /// Makes the next scan come soon.
    fn scan_soon(&mut self) {}

    /// Returns a time, in nanoseconds since boot, such that each living process that started earlier has been reported.
    ///
    /// Processes that stay unreadable for many scans are excepted. Returns `None` if the source does not scan.
    fn last_scan(&self) -> Option<u64> {
        None
    }

    /// Returns whether it finds new processes by scanning, so that events between two scans are only inferred. That
    /// includes macOS, where the kernel reports forks and exits, but not which process was forked.
    fn is_polling(&self) -> bool {
        self.last_scan().is_some()
    }

    /// Returns the last error of opening a pidfd, if the source needs pidfds and lacks some.
    fn pidfd_error(&self) -> Option<Errno> {
        None
    }

    /// Announces whether the service sleeps until the source wakes it.
    ///
    /// # Errors
    /// A map cannot be written.
    fn announce_idle(&mut self, _idle: bool) -> Result<(), SourceError> {
        Ok(())
    }

    /// Announces whether an escalation is open. While one is, each event is urgent.
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
