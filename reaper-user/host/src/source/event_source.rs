//! What the engine needs of any source of events.

use std::os::fd::AsFd;

use nix::errno::Errno;

use super::drained::{Drained, Lost};
use super::error::SourceError;
use super::kind::SourceKind;
use super::probes::{ProbeMaps, Probes};
use reaper_model::event::{Event, ProcessKey};

/// A source of process events. Its file descriptor is readable when there is something to drain.
///
/// The default answers are those of a source that receives each event from the kernel, has no probes and needs no
/// announcements.
pub trait Source: AsFd {
    fn kind(&self) -> SourceKind;

    /// Returns the name of the source in configs, on command lines and in the stream.
    fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Passes all events that happened before this call to `sink`, in order. Counts and skips malformed records.
    fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> Drained;

    /// Returns the kernel probes, if they are the source.
    fn probes(&self) -> Option<&dyn Probes> {
        None
    }

    /// Returns the kernel probes for changes.
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

    /// Returns the number of processes that could not be followed because the kernel's map was full.
    fn untracked_members(&self) -> u64 {
        0
    }

    /// Whether it reports only processes that are followed.
    fn is_filtered(&self) -> bool {
        false
    }

    /// Whether it reports processes that move to another cgroup.
    fn reports_moves(&self) -> bool {
        false
    }

    /// Whether it has received events that it has not passed on yet: more can be drained although the file descriptor
    /// is not readable.
    fn has_undrained(&self) -> bool {
        false
    }

    /// Returns why the source delivers no events any more. The engine then replaces it.
    fn failure(&self) -> Option<SourceError> {
        None
    }

    /// Takes the keys under which the source before this one reported its processes: this one has to use the same.
    /// A source whose keys are exact only to the tick needs none of them.
    fn import_keys(&mut self, _keys: &mut dyn Iterator<Item = ProcessKey>) {}

    /// Whether the pid still belongs to the process that was reported under this key.
    fn confirms_identity(&mut self, key: ProcessKey) -> bool;

    /// Says whether the exit of a process matters. Only a source that polls has to know.
    fn watch_exit(&mut self, _key: ProcessKey, _wanted: bool) {}

    /// Makes the next [`Source::drain`] poll: what that finds is no older than this call.
    fn scan_now(&mut self) {}

    /// Makes the next poll come soon.
    fn scan_soon(&mut self) {}

    /// Returns the time, in nanoseconds since boot, before which each process that was born and lives has been
    /// reported; `None` if the source does not find processes by polling. Processes that cannot be read for long are
    /// left out.
    fn last_scan(&self) -> Option<u64> {
        None
    }

    /// Whether it finds new processes by polling, so that what happens between two polls is only inferred. True on macOS
    /// too, where the kernel reports forks and exits, but not which process was born.
    fn is_polling(&self) -> bool {
        self.last_scan().is_some()
    }

    /// Returns why some processes have no pidfd, if the source needs one and could not open it.
    fn pidfd_error(&self) -> Option<Errno> {
        None
    }

    /// Announces whether the service sleeps until it is woken.
    ///
    /// # Errors
    /// A map cannot be written.
    fn announce_idle(&mut self, _idle: bool) -> Result<(), SourceError> {
        Ok(())
    }

    /// Announces whether an escalation is open, so that each event matters now.
    ///
    /// # Errors
    /// A map cannot be written.
    fn announce_escalations(&mut self, _open: bool) -> Result<(), SourceError> {
        Ok(())
    }
}

impl dyn Source + '_ {
    /// Returns the maps of the kernel probes, if they are the source.
    pub fn maps(&self) -> Option<&dyn ProbeMaps> {
        self.probes().map(|probes| probes.maps())
    }

    /// Returns the maps of the kernel probes for changes.
    pub fn maps_mut(&mut self) -> Option<&mut dyn ProbeMaps> {
        self.probes_mut().map(|probes| probes.maps_mut())
    }
}
