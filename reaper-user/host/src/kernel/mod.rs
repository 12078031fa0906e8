//! Traits through which the engine uses the kernel, apart from its source of events.
//!
//! [`Kernel::open`] returns the real implementation. Tests implement the same traits with a simulated kernel.
//!
//! | trait | real implementation |
//! |---|---|
//! | [`Clock`] | `clock_gettime(2)` |
//! | [`ProcessTable`] | [`Procfs`] |
//! | [`Signals`] and [`ProcessHandle`] | pidfds, and epoll for their exits |
//! | [`FactReader`] | [`FactPool`], threads that read /proc |
//! | [`Source`] | the sources in [`source`](crate::source) |

mod clock;
mod signals;

use std::sync::Arc;

pub use clock::{Clock, Sleep, SystemClock};
pub use signals::{Signals, WatchedHandle};

pub use crate::source::ProcessTable;
pub use crate::sys::notify::ServiceState;
pub use crate::sys::process_handle::ProcessHandle;

use crate::facts::{FactPool, FactReader};
use crate::source::kind::{RejectedSource, SourceKind};
use crate::source::procfs::Procfs;
use crate::source::scan::interval::ScanOptions;
use crate::source::{Source, SourceError, selection};
use crate::sys::exit_poll::ExitPoll;
use crate::sys::notify::Notifier;
use reaper_model::ruleset::Ruleset;

/// Function that starts a reader of the facts that the rules need.
pub type StartFacts = Box<dyn Fn(&Ruleset) -> Box<dyn FactReader>>;

/// Function that opens the best source of lower priority than one that has failed. Also returns the sources that
/// it failed to open before that one.
///
/// # Errors
/// No source can be opened. The error is that of the last one.
pub type OpenFallback =
    Box<dyn Fn(SourceKind) -> Result<(Box<dyn Source>, Vec<RejectedSource>), SourceError>>;

/// Access to the kernel.
pub struct Kernel {
    /// Clocks.
    pub clock: Arc<dyn Clock>,
    /// Process table.
    pub processes: Arc<dyn ProcessTable>,
    /// Handles on processes, which signal them and report their exits.
    pub signals: Arc<dyn Signals>,
    /// Starts a reader of facts; called again after a change of the rules.
    pub start_facts: StartFacts,
    /// Opens the next source after the current one has failed.
    pub open_fallback: OpenFallback,
    /// Sender of messages to the service manager.
    pub notifier: Notifier,
}

impl Kernel {
    /// Returns the real kernel, without a service manager. `ring_size` (bytes) and `scan` are options of the fallback source.
    ///
    /// # Errors
    /// As `epoll_create1(2)`.
    pub fn open(ring_size: u32, scan: ScanOptions) -> nix::Result<Kernel> {
        Ok(Kernel {
            clock: Arc::new(SystemClock),
            processes: Arc::new(Procfs::default()),
            signals: Arc::new(ExitPoll::new()?),
            start_facts: Box::new(|rules| Box::new(FactPool::new("/proc", rules.clone()))),
            open_fallback: Box::new(move |failed| {
                let (source, rejected) = selection::open_fallback(failed, ring_size, scan)?;
                Ok((source as Box<dyn Source>, rejected))
            }),
            notifier: Notifier::default(),
        })
    }
}
